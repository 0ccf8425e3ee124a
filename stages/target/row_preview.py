"""Show rows of prompt and answer ids as text."""

import os
import re
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 1600  # shown of a prompt or an answer in the report


@dataclass(frozen=True)
class RowPreview:
    """A row of data/sampled as text, as results/sample_report.json holds it."""

    id: str
    origin: str  # file and row of the raw data
    prompt: str
    answer: str
    prompt_tokens: int
    answer_tokens: int
    finish_reason: str


def describe_row(
    tokenizer: Any, origin: str, row_id: str, prompt_ids: list[int], answer_ids: list[int], finish_reason: str
) -> RowPreview:
    """Return a row for the report, which has no tokenizer; long texts without their middle."""
    return RowPreview(
        id=row_id,
        origin=origin,
        prompt=_clip_text(decode_prompt(tokenizer, prompt_ids)),
        answer=_clip_text(tokenizer.decode(answer_ids)),
        prompt_tokens=len(prompt_ids),
        answer_tokens=len(answer_ids),
        finish_reason=finish_reason,
    )


def print_row(tokenizer: Any, row_id: str, prompt_ids: list[int], answer_ids: list[int], ending: str) -> None:
    """Print a row with its answer, the tokens trained on, in colour; `ending` is its finish reason."""
    start, stop = ("[[", "]]") if os.environ.get("NO_COLOR") else ("\x1b[30;42m", "\x1b[0m")
    supervised, total = len(answer_ids), len(prompt_ids) + len(answer_ids)
    print(f"\n--- {row_id}: {supervised} of {total} tokens are trained on, {ending}")
    # Coloured line by line, since a terminal would otherwise paint the margin too.
    answer = "\n".join(f"{start}{line}{stop}" for line in tokenizer.decode(answer_ids).split("\n"))
    print(decode_prompt(tokenizer, prompt_ids) + answer)


def decode_prompt(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids, each run of one special token (an image's) as the token and its count."""
    return re.sub(r"(<\|\w+\|>)\1+", lambda m: f"{m[1]}×{len(m[0]) // len(m[1])}", tokenizer.decode(ids))


def _clip_text(text: str) -> str:
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} […] {text[-half:]}"
