"""Recover the token ids of answers that came from a server, and check that the server rendered the same prompt."""

from dataclasses import dataclass
from typing import Any, Protocol

from stages.target import chat_template


class ServedAnswer(Protocol):
    """An answer as a server returned it (`serving.client.ChatAnswer`)."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str | None: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def completion_tokens(self) -> int | None: ...
    @property
    def answer_ids(self) -> list[int] | None: ...


@dataclass(frozen=True)
class SampledAnswer:
    """An answer as token ids."""

    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str
    source: str  # of the ids: "server", or from text with or without a token count to compare


def check_served_prompt(
    row: str, prompt_ids: list[int], served_ids: list[int] | None, served_count: int | None, hint: str
) -> None:
    """Raise ValueError where the server's prompt differs from ours: its chat template is another, and every row wrong."""
    if served_ids is None and served_count in (None, len(prompt_ids)):
        return
    if served_ids is not None and served_ids == prompt_ids:
        return
    raise ValueError(
        f"sample_target: row {row}: the server was prompted with {len(served_ids) if served_ids else served_count} "
        f"tokens, this tokenizer and its chat template give {len(prompt_ids)}{' others' if served_ids else ''}; let the "
        f"server use the target's own template, and set sample_target.thinking as it does{hint}"
    )


def recover_token_ids(
    tokenizer: Any,
    history: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    prompt_ids: list[int],
    answer: ServedAnswer,
    eos: list[int],
    end_token: int,
    thinking: bool | None,
) -> SampledAnswer | None:
    """Return the answer's ids: the server's own, or its text tokenised; None where the server's count disagrees."""
    finish_reason = answer.finish_reason
    if ids := answer.answer_ids:
        lacks_end = finish_reason == "stop" and ids[-1] not in eos
        return SampledAnswer(prompt_ids, [*ids, end_token] if lacks_end else ids, finish_reason, "server")
    ids = chat_template.encode_answer(tokenizer, history, answer.text, answer.reasoning, eos, thinking, tools)
    count = answer.completion_tokens
    if finish_reason == "length" and count == len(ids) + 1:
        finish_reason = "stop"  # the end token was the last that fitted
    if finish_reason == "stop":
        ids = [*ids, end_token]
    # Some servers leave the end token out of their count.
    if count is not None and count not in ((len(ids), len(ids) - 1) if finish_reason == "stop" else (len(ids),)):
        return None
    return SampledAnswer(prompt_ids, ids, finish_reason, "text, unchecked" if count is None else "text, as many")
