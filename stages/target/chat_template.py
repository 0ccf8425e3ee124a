"""Apply chat templates: token ids of prompts and answers, and the loss mask.

Prompts are rendered by the tokenizer's template, then tokenised as one text, as OpenAI-compatible servers do. An answer's
span is found by rendering the conversation up to it, once with the generation prompt and once with the answer, never by a
pattern over text. So any template works that renders an answer after the header it prompts with. An answer is tokenised
apart from its prompt, as it was generated: no token spans the two.

The loss mask of a row is its answer. `encode_turns` gives one row per turn, with the history that serving would show (Qwen3
and gpt-oss drop earlier thoughts).
"""

import os
from typing import Any
from weakref import WeakKeyDictionary

import jinja2
from transformers import AutoTokenizer

Messages = list[dict[str, Any]]
_closers_by_tokenizer: WeakKeyDictionary[Any, tuple[frozenset[int], tuple[str, ...]]] = WeakKeyDictionary()


class TemplateRefusalError(ValueError):
    """A chat template that does not render these messages: of a role that it does not know, or in another order."""


def load_tokenizer(source: Any, trust_remote_code: bool, chat_template: str | None) -> Any:
    """Load the target's tokenizer from its folder; `chat_template` replaces its own if given.

    Raises ValueError naming the folder, where its files are missing, cut or broken.
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

    Raises ValueError naming the message, where the template does not render an answer after its own header, or where the text
    holds an end token.
    """
    rows: list[tuple[list[int], list[int]]] = []
    known_text, known_ids = "", list[int]()
    closers, closing = _find_closers(tokenizer)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render_messages(tokenizer, messages[:i], True, thinking, tools)
        whole = _render_messages(tokenizer, messages[: i + 1], False, thinking, tools)
        if not whole.startswith(before):
            shared = len(os.path.commonprefix([before, whole]))  # noqa: RUF071 - characters are meant
            raise ValueError(
                f"message {i}: the template prompts with ...{before[-60:]!r} but renders the answer after "
                f"...{whole[shared : shared + 60]!r}; set sample_target.thinking to what "
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
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    _, probe = encode_turns(tokenizer, turns, eos)[0]
    return probe[-1] if probe[-1] in eos else next((token for token in eos if token in closing), eos[0])


def _render_messages(
    tokenizer: Any, messages: Messages, header: bool, thinking: bool | None, tools: Messages | None = None
) -> str:
    if not messages and not header:
        return ""
    settings = build_template_kwargs(thinking) | ({"tools": tools} if tools else {})
    try:
        return tokenizer.apply_chat_template(
            _duplicate_reasoning_key(messages), tokenize=False, add_generation_prompt=header, **settings
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise TemplateRefusalError(
            f"the target's chat template refuses messages of the roles {roles}: {error}; leave them out of the data, or write "
            "a template that takes them to templates/NAME.jinja and set target.chat_template: NAME.jinja"
        ) from None


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
        turns = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "answer"), ("user", "b"))]
        found: set[str] = set()
        for messages in (turns, turns[:2]):
            behind = _render_messages(tokenizer, messages, False, None).rpartition("answer")[2]
            special = tokenizer.get_added_vocab()
            offsets = {text: behind.find(text) for text in special if text in behind}
            if offsets:
                found.add(min(offsets, key=lambda text: (offsets[text], -len(text))))
        ids = frozenset(tokenizer.convert_tokens_to_ids(text) for text in found)
        texts = tuple(sorted(text for text in found if _is_token_boundary(tokenizer, text)))
        _closers_by_tokenizer[tokenizer] = ids, texts
    return _closers_by_tokenizer[tokenizer]


def _is_token_boundary(tokenizer: Any, closing: str) -> bool:
    """Return whether text before and after `closing` is tokenised apart; not so for tokenizers that mark a text's start."""
    head, tail = f"a {closing}", "\n b"
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return encode(head + tail) == encode(head) + encode(tail)
