"""Apply chat templates: token ids of prompts and answers, and the loss mask.

Prompts are rendered by the tokenizer's template, then tokenised as one text, as OpenAI-compatible servers do. An answer's
span is found by rendering the conversation up to it, once with the generation prompt and once with the answer, never by a
pattern over text. So any template works that renders an answer after the header it prompts with. An answer is tokenised
behind its prompt, as it was generated: no token spans the two.

What a template shows is found by rendering known words (template_facts.py).

The loss mask of a row is its answer. `encode_turns` gives one row per turn, with the history that serving would show (Qwen3
and gpt-oss drop earlier thoughts).
"""

import os
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from transformers import AutoTokenizer

from stages.target import foreign_files
from stages.target.template_facts import ANSWER, ASK, PROBES, Messages, apply_template, probe_template, write_as_parts

OWN_ANSWERS = (
    "the data's answers can't be masked by it: set sample_target.backend: transformers or server, which ask the target, or "
    "write a template whose history has what it prompts with (target.chat_template)"
)


class TemplateRefusalError(ValueError):
    """A chat template that does not render these messages: of a role that it does not know, or in another order."""


def load_tokenizer(source: Any, trust_remote_code: bool, chat_template: str | None) -> Any:
    """Load the target's tokenizer from its folder; `chat_template` replaces its own if given.

    Raises ValueError naming the folder, where its files are missing, cut or broken.
    """
    with foreign_files.refuse_unreadable(str(source), "the target's config.json and tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        tokenizer.decode(tokenizer.encode("a"))  # settings of a wrong type come to light here
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def explain_unknown_token(tokenizer: Any, ids: list[int], vocab_size: int) -> str | None:
    """Return the first token of `ids` that an embedding of `vocab_size` rows lacks, and what to do; None where it has all."""
    unknown = next((token for token in ids if token >= vocab_size), None)
    if unknown is None:
        return None
    return (
        f"the text needs the token {tokenizer.convert_ids_to_tokens(unknown)!r}, id {unknown}, expected one of the {vocab_size} "
        "rows of the target's embedding; take it out of the text or the chat template, or give the target a trained row for it"
    )


def list_rendered_tokens(tokenizer: Any) -> set[int]:
    """Return the tokens of the known words of PROBES as the chat template renders them; none without a template."""
    found: set[int] = set()
    for messages, tools, _ in PROBES.values() if tokenizer.chat_template else ():
        for thinking in (None, True, False):
            with suppress(TemplateRefusalError):
                found.update(encode_prompt(tokenizer, messages, thinking, tools))
    return found


def build_template_kwargs(tokenizer: Any, thinking: bool | None) -> dict[str, bool]:
    """Return the template's arguments beside the messages; servers take them as chat_template_kwargs."""
    return {} if thinking is None else dict.fromkeys(probe_template(tokenizer).thinking_keys, thinking)


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
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render_messages(tokenizer, messages[:i], True, thinking, tools)
        whole = _render_messages(tokenizer, messages[: i + 1], False, thinking, tools)
        if not whole.startswith(before):
            shared = len(os.path.commonprefix([before, whole]))  # noqa: RUF071 - characters are meant
            has_choice = bool(probe_template(tokenizer).thinking_keys)
            advice = "set sample_target.thinking to what the data was written with" if has_choice else OWN_ANSWERS
            raise ValueError(
                f"message {i}: the template prompts with ...{before[-60:]!r} but renders the answer after "
                f"...{whole[shared : shared + 60]!r}; {advice}"
            )
        prompt = tokenizer.encode(before, add_special_tokens=False)
        answer = encode_behind(tokenizer, before, prompt, whole[len(before) :])
        rows.append((prompt, _cut_behind_end(tokenizer, before, answer, eos, i)))
    return rows


def check_loss_mask(row: str, prompt: list[int], answer: list[int], eos: list[int], complete: bool = True) -> None:
    """Raise ValueError naming the row, for a mask of all zeros, of all ones, or without an end token."""
    if not answer or (complete and all(token in eos for token in answer)):
        problem = (
            "its mask is all zero, expected at least one token to learn: the template renders nothing for its answer"
        )
    elif not prompt:
        problem = "its mask is all one, expected a prompt before the answer"
    elif complete and answer[-1] not in eos:
        ends = ", ".join(map(str, eos))
        problem = f"its answer ends in token {answer[-1]}, expected one of the target's ({ends}): a draft would not learn to end"
    else:
        return
    raise ValueError(
        f"row {row}: {problem}; correct the row, the template, or eos_token_id in the target's generation_config.json"
    )


def encode_behind(tokenizer: Any, prompt: str, prompt_ids: list[int], text: str) -> list[int]:
    """Return the ids of `text` as they follow a prompt of these ids.

    Tokenizers that mark the start of a text (Llama 2's, Mistral's) give its first word another token when it is tokenised alone,
    one that the target never writes there. Where a token would span the border, the text is tokenised behind less of the
    prompt: its last character, or nothing.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for before, ids in ((prompt, prompt_ids), (prompt[-1:], None)):
        head = encode(before) if ids is None else ids
        if before and (whole := encode(before + text))[: len(head)] == head:
            return whole[len(head) :]
    return encode(text)


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

    Thoughts that the server separated go through the template, which writes the text between them and the answer. A space that
    the template writes before an answer is the target's, and a server's decoder drops it from the start of a text.
    """
    if reasoning is not None:
        message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
        ids = encode_turns(tokenizer, [*messages, message], eos, thinking, tools)[-1][1]
        return ids[:-1] if ids[-1] in eos else ids
    before = _render_messages(tokenizer, messages, True, thinking, tools)
    if text[:1].strip():
        try:
            answered = [*messages, {"role": "assistant", "content": text}]
            whole = _render_messages(tokenizer, answered, False, thinking, tools)
        except TemplateRefusalError:
            whole = ""
        rest = whole[len(before) :] if whole.startswith(before) else ""
        text = rest[: len(rest) - len(rest.lstrip())] + text
    return encode_behind(tokenizer, before, tokenizer.encode(before, add_special_tokens=False), text)


def find_end_token(tokenizer: Any, eos: list[int]) -> int:
    """Return the end token with which the template closes an answer; a target may have several.

    Where the template shows none behind a last answer (some close an answer between turns only), that of its history, else the
    first.
    """
    return next((token for closing in _list_closing(tokenizer) for token in closing if token in eos), eos[0])


def _render_messages(
    tokenizer: Any, messages: Messages, header: bool, thinking: bool | None, tools: Messages | None = None
) -> str:
    if not messages and not header:
        return ""
    written = write_as_parts(messages, probe_template(tokenizer).parts)
    try:
        return apply_template(tokenizer, written, header, tools, build_template_kwargs(tokenizer, thinking))
    except Exception as error:  # a template may raise anything
        roles = ", ".join(str(message["role"]) for message in messages)
        raise TemplateRefusalError(
            f"the target's chat template refuses messages of the roles {roles}: {str(error) or repr(error)}; leave them out of "
            "the data, or write a template that takes them to templates/NAME.jinja and set target.chat_template: NAME.jinja"
        ) from None


def _cut_behind_end(tokenizer: Any, prompt: str, ids: list[int], eos: list[int], message: int) -> list[int]:
    """Return the ids of an answer up to its end token; text after it is never generated: a newline, or the header of the next
    answer, which some templates write behind every conversation, as behind the `prompt`.
    """
    end = next((k for k, token in enumerate(ids) if token in eos), None)
    if end is None:
        return ids  # `check_loss_mask` raises for it, with the row's name
    if not prompt.rstrip().endswith(tokenizer.decode(ids[end + 1 :]).strip()):
        raise ValueError(
            f"message {message} goes on after its end token: {tokenizer.decode(ids[end : end + 20])!r}. Its text "
            "holds a token of the template's own; take it out"
        )
    return ids[: end + 1]


def find_closing_token(tokenizer: Any, known: set[int]) -> int | None:
    """Return the special token by which the template closes an answer where none of the `known` end tokens is there, else None.

    A header is none that closes: the text behind the answer is compared with those before the question and the answer.
    """
    for messages in ([ASK, ANSWER], [ASK, ANSWER, {"role": "user", "content": "aerienext"}]):
        with suppress(TemplateRefusalError):
            before, _, rest = _render_messages(tokenizer, messages, False, None).rpartition("aerieanswer")
            behind, opening = rest.partition("aerienext")[0].strip(), before.partition("aeriequestion")
            found = _find_special(tokenizer, behind)
            if found and not any(text.rstrip().endswith(behind) for text in (opening[0], opening[2])):
                return None if known.intersection(found) else found[0]
    return None


def _find_special(tokenizer: Any, text: str) -> list[int]:
    """Return the added tokens in a text by their first places; of those that begin at one place the longest first."""
    added = tokenizer.get_added_vocab().items()
    return [token for *_, token in sorted((text.find(own), -len(own), token) for own, token in added if own in text)]


def explain_rendered(tokenizer: Any, messages: Messages) -> str | None:
    """Return why these messages are a prompt that is rendered already, or a part of one, and what to do; None where they are not.

    That is, the text of one has a token by which the template opens or closes turns, or ends in the header of an answer.
    """
    marks, header = _find_turn_marks(tokenizer)
    for number, message in enumerate(messages):
        content = message["content"] or ""
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        for text in texts:
            found = next((mark for mark in marks if mark in text), None)
            if found is None and message["role"] == "user" and header and text.rstrip().endswith(header):
                found = header
            if found is not None:
                return (
                    f"message {number} ({message['role']}) holds {found!r}, which the target's chat template writes between "
                    "turns: its text is a prompt that is rendered already, and would be rendered twice; give the messages "
                    "themselves, or take the mark out of the text"
                )
    return None


@lru_cache(maxsize=8)
def _find_turn_marks(tokenizer: Any) -> tuple[tuple[str, ...], str]:
    """Return the special tokens that open or close a user's turn or close an answer, and the header of an answer."""
    turn, prompt = (_render_messages(tokenizer, [ASK], header, None) for header in (False, True))
    special = {text for text, token in tokenizer.get_added_vocab().items() if token in tokenizer.all_special_ids}
    closing = set(tokenizer.convert_ids_to_tokens([tokens[0] for tokens in _list_closing(tokenizer) if tokens]))
    return tuple(sorted(closing | {text for text in special if text in turn})), prompt.removeprefix(turn).strip()


@lru_cache(maxsize=8)
def _list_closing(tokenizer: Any) -> list[list[int]]:
    """Return the added tokens behind a last answer, and behind one of the history: the first of each closes it."""
    rendered = [_render_messages(tokenizer, turns, False, None) for turns in ([ASK, ANSWER], [ASK, ANSWER, ASK])]
    return [_find_special(tokenizer, text.rpartition("aerieanswer")[2]) for text in rendered]
