"""Recover the token ids of answers that came from a server, and check that the server rendered the same prompt."""

from dataclasses import dataclass

from stages.engines.chat_answer import ChatAnswer
from stages.target import chat_template
from stages.target.prompt_encoder import PromptEncoder
from stages.target.template_facts import Messages


@dataclass(frozen=True)
class SampledAnswer:
    """An answer as token ids."""

    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str
    # Of the ids: exact (this process), template (the data), server, or "text, as many" or "text, unchecked".
    source: str


def check_served_prompt(
    encoder: PromptEncoder,
    row: str,
    prompt_ids: list[int],
    answer: ChatAnswer,
    history: Messages,
    tools: Messages | None,
    images: list[str],
) -> list[int]:
    """Return the prompt that the server rendered: ours, or where the chat template shows a date, ours of another day.

    Raises ValueError where it differs: the server's chat template is another, and every row wrong.
    """
    served_ids = _expand_served_prompt(encoder, row, prompt_ids, answer.prompt_ids, images)

    def is_served(ids: list[int]) -> bool:
        return ids == served_ids if served_ids is not None else answer.prompt_tokens in (None, len(ids))

    if is_served(prompt_ids):
        return prompt_ids
    if encoder.date is not None:
        dated = encoder.list_dated_prompts(row, history, tools, images)
        if (found := next(filter(is_served, dated), None)) is not None:
            return found
    extras = bool(tools) or any({"tool_calls", "reasoning_content"} & set(message) for message in history)
    hint = "; this row has tools, calls or thoughts, which not every server renders (docs/sampling.md)" * extras
    hint += "; this row has images, which the server may cut otherwise (docs/sampling.md)" * bool(images)
    raise ValueError(
        f"sample_target: row {row}: the server was prompted with "
        f"{len(served_ids) if served_ids else answer.prompt_tokens} tokens, this tokenizer and its chat template give "
        f"{len(prompt_ids)}{' others' if served_ids else ''}; let the server use the target's own template, and set "
        f"sample_target.thinking as it does{hint}"
    )


def _expand_served_prompt(
    encoder: PromptEncoder, row: str, prompt_ids: list[int], served_ids: list[int] | None, images: list[str]
) -> list[int] | None:
    """Return the server's prompt with its images as ours has them; a server may report it before or after its expansion."""
    processor = encoder.image_processor
    if served_ids is None or processor is None or not images:
        return served_ids
    if served_ids.count(processor.image_token_id) == len(images):
        return encoder.expand_images(row, served_ids, images)
    if len(served_ids) != len(prompt_ids):
        return served_ids
    # Instead of image tokens an engine may have other numbers, such as hashes of the image (SGLang).
    is_image = [token == processor.image_token_id for token in prompt_ids]
    return [processor.image_token_id if image else own for image, own in zip(is_image, served_ids, strict=True)]


def explain_wrong_ids(encoder: PromptEncoder, vocab_size: int, prompt_ids: list[int], answer: ChatAnswer) -> str | None:
    """Return why the server's ids can't be those of its answer; None where they may be, or where it returned none."""
    ids, count = answer.answer_ids, answer.completion_tokens
    if not ids:
        return None
    if (wrong := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
        return f"the server returned token id {wrong}, of a vocabulary of {vocab_size}"
    if ids[: len(prompt_ids)] == prompt_ids:
        return "the server returned the ids of the prompt before those of its answer"
    without_end = len(ids) - (ids[-1] in encoder.eos)
    if count is not None and count - without_end not in (0, 1):  # some servers leave the end token out of their count
        return f"the server returned {len(ids)} token ids and counted {count}"
    # A server's parser may take thoughts and special tokens out of the text, and its tokenizer spaces.
    decoded = [_join_words(encoder.tokenizer.decode(ids, skip_special_tokens=skips)) for skips in (True, False)]
    for text in (answer.text, answer.reasoning or ""):
        if not any(_join_words(text) in whole for whole in decoded):
            return f"the server returned token ids of another text than its own, which begins {text.strip()[:40]!r}"
    return None


def _join_words(text: str) -> str:
    """Return the text without white space, and without the character that stands for the cut part of another."""
    return "".join(text.split()).rstrip("\N{REPLACEMENT CHARACTER}")


def recover_token_ids(
    encoder: PromptEncoder, history: Messages, tools: Messages | None, prompt_ids: list[int], answer: ChatAnswer
) -> SampledAnswer:
    """Return the answer's ids: the server's own, or its text tokenised.

    Raises ValueError where the server's count disagrees, and where it ended the answer by anything but an end token of the
    target: no row gets one that the target did not write.
    """
    reason, count = answer.finish_reason, answer.completion_tokens
    ids, source = answer.answer_ids, "server"
    if not ids:
        ids = chat_template.encode_answer(
            encoder.tokenizer, history, answer.text, answer.reasoning, encoder.eos, encoder.thinking, tools
        )
        source = "text, unchecked" if count is None else "text, as many"
        if reason == "length" and count == len(ids) + 1:
            reason = "stop"  # the end token was the last that fitted
    end = next((position for position, token in enumerate(ids) if token in encoder.eos), None)
    if end is not None:  # a server may say length where it is the last token that fits, or add drafts behind it
        ids, reason = ids[: end + 1], "stop"
    elif reason == "stop":
        ids = [*ids, _find_unshown_end(encoder, ids, answer)]
    # Some servers leave the end token out of their count.
    allowed = (len(ids), len(ids) - 1) if reason == "stop" else (len(ids),)
    if source == "text, as many" and count not in allowed:
        raise ValueError(f"the server counted {count} tokens; its text, tokenised again, gives {len(ids)}")
    return SampledAnswer(prompt_ids, ids, reason, source)


def _find_unshown_end(encoder: PromptEncoder, ids: list[int], answer: ChatAnswer) -> int:
    """Return the end token that the target wrote behind `ids`. Raises ValueError where nothing shows that it wrote one."""
    stop = answer.stopped_at
    if stop in encoder.eos:
        return int(stop)
    name = encoder.tokenizer.convert_ids_to_tokens
    if stop is not None:
        found = f"at the string {stop!r}" if isinstance(stop, str) else f"at token {stop}, {name(stop)!r}"
    elif not answer.answer_ids or (answer.completion_tokens == len(ids) + 1 and len(encoder.eos) == 1):
        return encoder.end_token
    else:
        found = f"after token {ids[-1]}, {name(ids[-1])!r}"
    known = ", ".join(f"{token} {name(token)!r}" for token in encoder.eos)
    raise ValueError(
        f"the server ended the answer {found}, expected an end token of the target ({known}); take stop strings out of the "
        "server's settings, or write the token to eos_token_id in the target's generation_config.json"
    )
