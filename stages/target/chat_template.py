"""Chat template, token ids and loss mask: what a server would feed the target for a conversation, and what it answered.

Prompts are rendered by the tokenizer's own template, then tokenised as one text, as OpenAI-compatible servers do. Where
an answer begins and ends is found by rendering the conversation up to it, once ending in the assistant's header and
once with the answer, never by a pattern over text: it holds for every template that renders an answer after the very
header it prompts with. An answer is tokenised apart from its prompt, since that is how it came about: no token spans
the two.

The mask of a row is its answer: `encode_turns` gives a row per turn, each with the history that serving would show (Qwen3
and gpt-oss drop earlier thoughts from it). `encode_conversation` gives all answers of one rendering, for whoever shows it whole.
"""

import os
from bisect import bisect_left
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoTokenizer

from stages.target import template_spans

Messages = list[dict[str, Any]]
_closers_by_tokenizer: WeakKeyDictionary[Any, tuple[frozenset[int], tuple[str, ...]]] = WeakKeyDictionary()
_shapes_by_tokenizer: WeakKeyDictionary[Any, dict[Any, template_spans.TemplateShape | None]] = WeakKeyDictionary()


def load_tokenizer(source: Any, trust_remote_code: bool, chat_template: str | None) -> Any:
    """The target's tokenizer, from its folder; `chat_template` takes the place of its own.

    Raises:
        ValueError: naming the folder, where its files are missing, cut or broken.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # each broken file has another: of JSON, of a missing key, of the Rust library
        raise ValueError(
            f"{source}: expected the target's config.json and tokenizer, found none that can be read "
            f"({type(error).__name__}: {str(error)[:300]}); get the target's files again, those of a builtin target by: "
            "dvc repro -f -s prepare_target"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def find_assistant_messages(messages: Messages) -> list[int]:
    """The indices of the assistant's messages; each is one question for the target."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def build_template_kwargs(thinking: bool | None) -> dict[str, bool]:
    """What the template is told besides the messages; a server gets the same as chat_template_kwargs."""
    return {} if thinking is None else {"enable_thinking": thinking}


def encode_prompt(
    tokenizer: Any, messages: Messages, thinking: bool | None = None, tools: Messages | None = None
) -> list[int]:
    """Token ids of `messages`, and of the `tools` on offer, with the assistant's header after them, ready for its answer."""
    return tokenizer.encode(_render_messages(tokenizer, messages, True, thinking, tools), add_special_tokens=False)


def encode_turns(
    tokenizer: Any, messages: Messages, eos: list[int], thinking: bool | None = None, tools: Messages | None = None
) -> list[tuple[list[int], list[int]]]:
    """Per assistant's message, (prompt ids, answer ids with their end token), as if the target had said it.

    Raises:
        ValueError: naming the message, where the template renders an answer otherwise than after its own header, where
            it leaves out the end token, or where the text holds one.
    """
    rows: list[tuple[list[int], list[int]]] = []
    known_text, known_ids = "", list[int]()
    closers, closing = _find_closers(tokenizer)
    for i in find_assistant_messages(messages):
        before = _render_messages(tokenizer, messages[:i], True, thinking, tools)
        whole = _render_messages(tokenizer, messages[: i + 1], False, thinking, tools)
        if not whole.startswith(before):
            raise ValueError(
                f"message {i}: the template prompts with ...{before[-60:]!r} but renders the answer after "
                f"...{whole[_count_shared_characters(before, whole) :][:60]!r}; set sample_target.thinking to what "
                "the data was written with"
            )
        if known_text and before.startswith(known_text):
            prompt = known_ids + tokenizer.encode(before[len(known_text) :], add_special_tokens=False)
        else:
            prompt = tokenizer.encode(before, add_special_tokens=False)
        rows.append((prompt, _encode_until_end(tokenizer, whole[len(before) :], eos, i)))
        # What ends in a closing token is tokenised the same whatever follows: the next, longer prompt may begin with it.
        cut = max((before.rfind(c) + len(c) for c in closing if c in before), default=0)
        last = next((k for k in range(len(prompt) - 1, -1, -1) if prompt[k] in closers), -1)
        known_text, known_ids = (before[:cut], prompt[: last + 1]) if cut and last >= 0 else ("", [])
    return rows


def encode_conversation(
    tokenizer: Any, messages: Messages, eos: list[int], thinking: bool | None = None
) -> tuple[list[int], list[tuple[int, int]]]:
    """The conversation in one rendering, as token ids, and of each answer the half-open range, end token included."""
    last = find_assistant_messages(messages)[-1] if find_assistant_messages(messages) else -1
    text = _render_messages(tokenizer, messages[: last + 1], False, thinking)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = find_answer_starts(tokenizer, messages, text, thinking)
    closers = _find_closers(tokenizer)[0] | set(eos)
    return encoded["input_ids"], locate_answer_tokens(encoded["input_ids"], encoded["offset_mapping"], begins, closers)


def find_answer_starts(tokenizer: Any, messages: Messages, text: str, thinking: bool | None = None) -> list[int]:
    """Where in `text`, the whole rendering, each answer begins, in characters."""
    known = _find_starts_by_shape(tokenizer, messages, text, thinking)
    return find_starts_by_rendering(tokenizer, messages, text, thinking) if known is None else known


def find_starts_by_rendering(tokenizer: Any, messages: Messages, text: str, thinking: bool | None = None) -> list[int]:
    """`find_answer_starts` for any template and conversation, by rendering each prompt.

    The rendering up to an answer, with the assistant's header, is a prefix of the whole, but for what the template
    writes into the header of the turn to come only: an empty think block. Then the two part at the header's end.
    """
    found: list[int] = []
    asked = find_assistant_messages(messages)
    if not asked:
        return found
    batch = [
        _duplicate_reasoning_key(messages[:i]) for i in asked
    ]  # one call for all: half of a call is not the rendering
    settings = build_template_kwargs(thinking)
    heads = tokenizer.apply_chat_template(batch, tokenize=False, add_generation_prompt=True, **settings)
    for i, before in zip(asked, heads, strict=True):
        if text.startswith(before):
            found.append(len(before))
            continue
        # The answer may begin as the header would go on: so would a "<b>" where an empty <think> is left out.
        other = [
            *messages[:i],
            {**messages[i], "content": template_spans.CONTENT_MARK},
            *messages[i + 1 : asked[-1] + 1],
        ]
        shared = min(
            _count_shared_characters(before, text),
            _count_shared_characters(before, _render_messages(tokenizer, other, False, thinking)),
        )
        least = _render_messages(tokenizer, messages[:i], False, thinking)
        if shared <= len(least.rstrip()):
            raise ValueError(
                f"message {i}: the template rewrites what comes before this answer once more follows it, "
                f"...{text[shared : shared + 60]!r}; its answers can't be told apart in one rendering"
            )
        found.append(shared)
    return found


def _find_starts_by_shape(tokenizer: Any, messages: Messages, text: str, thinking: bool | None) -> list[int] | None:
    """`find_answer_starts` by what is known of conversations of this shape; None where that proves nothing."""
    template = tokenizer.chat_template
    last = (find_assistant_messages(messages) or [-1])[-1]
    asked = messages[: last + 1]
    roles, sought = (
        template_spans.extract_roles(asked),
        template_spans.find_inspected_texts(template) if isinstance(template, str) else None,
    )
    if not roles or sought is None:
        return None
    learnt = _shapes_by_tokenizer.setdefault(tokenizer, {})
    key = template, thinking, roles
    if key not in learnt:
        if len(learnt) >= template_spans.MAX_SHAPES:
            learnt.clear()
        learnt[key] = template_spans.learn_template_shape(
            roles,
            lambda marked: _render_messages(tokenizer, marked, False, thinking),
            lambda marked, whole: find_starts_by_rendering(tokenizer, marked, whole, thinking),
        )
    shape = learnt[key]
    return None if shape is None else template_spans.locate_answer_starts(shape, asked, text, sought)


def locate_answer_tokens(
    ids: list[int], offsets: list[tuple[int, int]], begins: list[int], closers: set[int] | frozenset[int]
) -> list[tuple[int, int]]:
    """Character positions of answers -> token ranges: a search for each, not a walk over all tokens for each."""
    first = [bisect_left(offsets, (begin,)) for begin in begins]
    ranges = []
    for start, stop in zip(first, [*first[1:], len(ids)], strict=True):
        inside = ids[start:stop]
        ends = [inside.index(token) for token in closers if token in inside]
        end = min(ends, default=stop - start - 1)
        if stop == len(ids) and ends:  # of the last turn the last one, since its thoughts may have their own
            end = stop - start - 1 - min(inside[::-1].index(token) for token in closers if token in inside)
        ranges.append((start, start + end + 1))
    return ranges


def check_loss_mask(row: str, prompt: list[int], answer: list[int], eos: list[int], complete: bool = True) -> None:
    """Raises ValueError naming the row, for a mask that would teach nothing, everything, or never to end."""
    if not answer or (complete and all(token in eos for token in answer)):
        raise ValueError(
            f"row {row}: its mask is all zero, expected at least one token to learn: the template renders nothing for "
            "its answer. Correct the row, or the template"
        )
    if not prompt:
        raise ValueError(
            f"row {row}: its mask is all one, expected a prompt before the answer; correct the row, or the template"
        )
    if complete and answer[-1] not in eos:
        raise ValueError(
            f"row {row}: its answer ends in token {answer[-1]}, expected one of the target's ({', '.join(map(str, eos))}): a "
            "draft would not learn to end. Correct the template, or eos_token_id in the target's generation_config.json"
        )


def encode_answer(
    tokenizer: Any, messages: Messages, text: str, reasoning: str | None, eos: list[int],
    thinking: bool | None = None, tools: Messages | None = None,
) -> list[int]:  # fmt: skip
    """Ids of an answer of which a server gave the text only, without its end token.

    With its thoughts taken out of the text, both go through the template, which knows what it writes between them.
    """
    if reasoning is None:
        return tokenizer.encode(text, add_special_tokens=False)
    said = {"role": "assistant", "content": text, "reasoning_content": reasoning}
    ids = encode_turns(tokenizer, [*messages, said], eos, thinking, tools)[-1][1]
    return ids[:-1] if ids[-1] in eos else ids


def find_end_token(tokenizer: Any, eos: list[int]) -> int:
    """The end token the template closes an answer with; a target may have several that end it."""
    closing, _ = _find_closers(tokenizer)
    probe = encode_turns(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], eos)[0][
        1
    ]
    return probe[-1] if probe[-1] in eos else next((token for token in eos if token in closing), eos[0])


def _count_shared_characters(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 - characters are what is asked for


def _render_messages(
    tokenizer: Any, messages: Messages, header: bool, thinking: bool | None, tools: Messages | None = None
) -> str:
    if not messages and not header:
        return ""
    settings = build_template_kwargs(thinking) | ({"tools": tools} if tools else {})
    return tokenizer.apply_chat_template(
        _duplicate_reasoning_key(messages), tokenize=False, add_generation_prompt=header, **settings
    )


def _duplicate_reasoning_key(messages: Messages) -> Messages:
    """Thoughts under gpt-oss's name too: its template reads `thinking`, the others `reasoning_content`."""
    return [{**m, "thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in messages]


def _encode_until_end(tokenizer: Any, text: str, eos: list[int], message: int) -> list[int]:
    """Ids of `text` up to its end token; what the template writes behind it (a newline) nobody generates."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = next((k for k, token in enumerate(ids) if token in eos), None)
    if end is None:
        return ids  # `check_loss_mask` says so, and names the row
    if tokenizer.decode(ids[end + 1 :]).strip():
        raise ValueError(
            f"message {message} goes on after its end token: {tokenizer.decode(ids[end : end + 20])!r}. Its text "
            "holds a token "
            "of the template's own; take it out"
        )
    return ids[: end + 1]


def _find_closers(tokenizer: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """Special tokens that close an answer in the template's history, as ids; and as text, where tokens can't span them."""
    if tokenizer not in _closers_by_tokenizer:
        word = "answer"
        asked = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": word},
            {"role": "user", "content": "b"},
        ]
        found: set[str] = set()
        for messages in (asked, asked[:2]):
            behind = _render_messages(tokenizer, messages, False, None).rpartition(word)[2]
            special = tokenizer.get_added_vocab()
            at = {text: behind.find(text) for text in special if text in behind}
            if at:
                found.add(min(at, key=lambda text: (at[text], -len(text))))
        ids = frozenset(tokenizer.convert_tokens_to_ids(text) for text in found)
        _closers_by_tokenizer[tokenizer] = (
            ids,
            tuple(sorted(text for text in found if _is_token_boundary(tokenizer, text))),
        )
    return _closers_by_tokenizer[tokenizer]


def _is_token_boundary(tokenizer: Any, closing: str) -> bool:
    """Whether text is tokenised apart before and after `closing`; a tokenizer that marks the text's beginning does not."""
    head, tail = f"a {closing}", "\n b"
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return encode(head + tail) == encode(head) + encode(tail)
