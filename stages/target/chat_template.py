"""Apply chat templates: token ids of prompts and answers, and the loss mask.

Prompts are rendered by the tokenizer's template, then tokenised as one text, as OpenAI-compatible servers do. An answer's
span is found by rendering the conversation up to it, once with the generation prompt and once with the answer, never by a
pattern over text. So any template works that renders an answer after the header it prompts with. An answer is tokenised
apart from its prompt, as it was generated: no token spans the two.

The loss mask of a row is its answer. `encode_turns` gives one row per turn, with the history that serving would show (Qwen3
and gpt-oss drop earlier thoughts). `encode_conversation` gives all answers of one rendering.
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
    """Load the target's tokenizer from its folder; `chat_template` replaces its own if given.

    Raises:
        ValueError: naming the folder, where its files are missing, cut or broken.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # broken files raise many types: JSON errors, KeyError, the Rust library's
        raise ValueError(
            f"{source}: expected the target's config.json and tokenizer, found none that can be read "
            f"({type(error).__name__}: {str(error)[:300]}); get the target's files again, those of a builtin target by: "
            "dvc repro -f -s prepare_target"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def find_assistant_messages(messages: Messages) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def build_template_kwargs(thinking: bool | None) -> dict[str, bool]:
    """Return the template's arguments beside the messages; servers take them as chat_template_kwargs."""
    return {} if thinking is None else {"enable_thinking": thinking}


def encode_prompt(
    tokenizer: Any, messages: Messages, thinking: bool | None = None, tools: Messages | None = None
) -> list[int]:
    """Return the token ids of `messages` and `tools`, with the generation prompt."""
    return tokenizer.encode(_render_messages(tokenizer, messages, True, thinking, tools), add_special_tokens=False)


def encode_turns(
    tokenizer: Any, messages: Messages, eos: list[int], thinking: bool | None = None, tools: Messages | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, answer ids with their end token) per assistant message, as if the target had generated it.

    Raises:
        ValueError: naming the message, where the template does not render an answer after its own header, or where the
            text holds an end token.
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
        # Text up to a closing token is tokenised alike whatever follows, so the next, longer prompt reuses its ids.
        cut = max((before.rfind(c) + len(c) for c in closing if c in before), default=0)
        last = next((k for k in range(len(prompt) - 1, -1, -1) if prompt[k] in closers), -1)
        known_text, known_ids = (before[:cut], prompt[: last + 1]) if cut and last >= 0 else ("", [])
    return rows


def encode_conversation(
    tokenizer: Any, messages: Messages, eos: list[int], thinking: bool | None = None
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of a conversation in one rendering, and each answer's half-open token range with its end token."""
    last = find_assistant_messages(messages)[-1] if find_assistant_messages(messages) else -1
    text = _render_messages(tokenizer, messages[: last + 1], False, thinking)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = find_answer_starts(tokenizer, messages, text, thinking)
    closers = _find_closers(tokenizer)[0] | set(eos)
    return encoded["input_ids"], locate_answer_tokens(encoded["input_ids"], encoded["offset_mapping"], starts, closers)


def find_answer_starts(tokenizer: Any, messages: Messages, text: str, thinking: bool | None = None) -> list[int]:
    """Return where each answer starts in `text`, the whole rendering, in characters."""
    known = _find_starts_by_shape(tokenizer, messages, text, thinking)
    return find_starts_by_rendering(tokenizer, messages, text, thinking) if known is None else known


def find_starts_by_rendering(tokenizer: Any, messages: Messages, text: str, thinking: bool | None = None) -> list[int]:
    """Return `find_answer_starts` for any template and conversation, by rendering each prompt.

    The rendering of a prompt is a prefix of the whole, except for text that the template writes only into the header of the
    next turn, such as an empty think block. Then the two differ from the header's end.

    Raises:
        ValueError: naming the message, where the template rewrites earlier text once more messages follow.
    """
    found: list[int] = []
    turns = find_assistant_messages(messages)
    if not turns:
        return found
    batch = [_duplicate_reasoning_key(messages[:i]) for i in turns]  # in one call, whose overhead is half of the cost
    settings = build_template_kwargs(thinking)
    prompts = tokenizer.apply_chat_template(batch, tokenize=False, add_generation_prompt=True, **settings)
    for i, before in zip(turns, prompts, strict=True):
        if text.startswith(before):
            found.append(len(before))
            continue
        # The answer may start like the rest of the header ("<b>" where an empty <think> is left out), so another is tried.
        other = [
            *messages[:i],
            {**messages[i], "content": template_spans.CONTENT_MARK},
            *messages[i + 1 : turns[-1] + 1],
        ]
        shared = min(
            _count_shared_characters(before, text),
            _count_shared_characters(before, _render_messages(tokenizer, other, False, thinking)),
        )
        least = _render_messages(tokenizer, messages[:i], False, thinking)
        if shared <= len(least.rstrip()):
            raise ValueError(
                f"message {i}: the template rewrites what comes before this answer once more follows it, "
                f"...{text[shared : shared + 60]!r}; its answers can't be located in one rendering"
            )
        found.append(shared)
    return found


def _find_starts_by_shape(tokenizer: Any, messages: Messages, text: str, thinking: bool | None) -> list[int] | None:
    """Return `find_answer_starts` from the template's shape; None where the shape does not apply."""
    template = tokenizer.chat_template
    last = (find_assistant_messages(messages) or [-1])[-1]
    answered = messages[: last + 1]
    roles = template_spans.extract_roles(answered)
    inspected = template_spans.find_inspected_texts(template) if isinstance(template, str) else None
    if not roles or inspected is None:
        return None
    shapes = _shapes_by_tokenizer.setdefault(tokenizer, {})
    key = template, thinking, roles
    if key not in shapes:
        if len(shapes) >= template_spans.MAX_SHAPES:
            shapes.clear()
        shapes[key] = template_spans.learn_template_shape(
            roles,
            lambda marked: _render_messages(tokenizer, marked, False, thinking),
            lambda marked, whole: find_starts_by_rendering(tokenizer, marked, whole, thinking),
        )
    shape = shapes[key]
    return None if shape is None else template_spans.locate_answer_starts(shape, answered, text, inspected)


def locate_answer_tokens(
    ids: list[int], offsets: list[tuple[int, int]], starts: list[int], closers: set[int] | frozenset[int]
) -> list[tuple[int, int]]:
    """Return the token ranges of answers that start at these characters, by binary search."""
    first = [bisect_left(offsets, (start,)) for start in starts]
    ranges = []
    for start, stop in zip(first, [*first[1:], len(ids)], strict=True):
        inside = ids[start:stop]
        ends = [inside.index(token) for token in closers if token in inside]
        end = min(ends, default=stop - start - 1)
        if stop == len(ids) and ends:  # the last turn's thoughts may hold closers, so take its last one
            end = stop - start - 1 - min(inside[::-1].index(token) for token in closers if token in inside)
        ranges.append((start, start + end + 1))
    return ranges


def check_loss_mask(row: str, prompt: list[int], answer: list[int], eos: list[int], complete: bool = True) -> None:
    """Raise ValueError naming the row, for a mask of all zeros, of all ones, or without an end token."""
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
    tokenizer: Any,
    messages: Messages,
    text: str,
    reasoning: str | None,
    eos: list[int],
    thinking: bool | None = None,
    tools: Messages | None = None,
) -> list[int]:
    """Return the ids, without end token, of an answer that a server returned as text.

    Thoughts that the server separated go through the template, which writes the text between them and the answer.
    """
    if reasoning is None:
        return tokenizer.encode(text, add_special_tokens=False)
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
    ids = encode_turns(tokenizer, [*messages, message], eos, thinking, tools)[-1][1]
    return ids[:-1] if ids[-1] in eos else ids


def find_end_token(tokenizer: Any, eos: list[int]) -> int:
    """Return the end token with which the template closes an answer; a target may have several."""
    closing, _ = _find_closers(tokenizer)
    probe = encode_turns(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], eos)[0][
        1
    ]
    return probe[-1] if probe[-1] in eos else next((token for token in eos if token in closing), eos[0])


def _count_shared_characters(a: str, b: str) -> int:
    """Return the length of the common prefix."""
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
    """Copy `reasoning_content` to `thinking`, the key that gpt-oss's template reads."""
    return [{**m, "thinking": m["reasoning_content"]} if m.get("reasoning_content") else m for m in messages]


def _encode_until_end(tokenizer: Any, text: str, eos: list[int], message: int) -> list[int]:
    """Return the ids of `text` up to its end token; text after it (a newline) is never generated."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = next((k for k, token in enumerate(ids) if token in eos), None)
    if end is None:
        return ids  # `check_loss_mask` raises for it, with the row's name
    if tokenizer.decode(ids[end + 1 :]).strip():
        raise ValueError(
            f"message {message} goes on after its end token: {tokenizer.decode(ids[end : end + 20])!r}. Its text "
            "holds a token of the template's own; take it out"
        )
    return ids[: end + 1]


def _find_closers(tokenizer: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return special tokens that close an answer in the history: as ids, and as text where no token spans their end."""
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
    """Return whether text before and after `closing` is tokenised apart; not so for tokenizers that mark a text's start."""
    head, tail = f"a {closing}", "\n b"
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return encode(head + tail) == encode(head) + encode(tail)
