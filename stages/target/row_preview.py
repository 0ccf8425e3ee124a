"""Show rows of prompt and answer ids as text."""

import os
import re
from typing import Any

MAX_CHARACTERS = 1600  # shown of a prompt or an answer in the report


def describe_row(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of data/sampled as text for the report, which has no tokenizer; long texts without their middle."""
    return {
        "id": row["id"],
        "prompt": _clip_text(decode_prompt(tokenizer, row["prompt_ids"])),
        "answer": _clip_text(tokenizer.decode(row["answer_ids"])),
        "prompt_tokens": len(row["prompt_ids"]),
        "answer_tokens": len(row["answer_ids"]),
        "finish_reason": row["finish_reason"],
    }


def print_row(tokenizer: Any, row: dict[str, Any]) -> None:
    """Print a row with its answer, the tokens trained on, in colour."""
    start, stop = ("[[", "]]") if os.environ.get("NO_COLOR") else ("\x1b[30;42m", "\x1b[0m")
    supervised, total = len(row["answer_ids"]), len(row["prompt_ids"]) + len(row["answer_ids"])
    print(f"\n--- {row['id']}: {supervised} of {total} tokens are trained on, {row.get('finish_reason', 'the data')}")
    # Coloured line by line, since a terminal would otherwise paint the margin too.
    answer = "\n".join(f"{start}{line}{stop}" for line in tokenizer.decode(row["answer_ids"]).split("\n"))
    print(decode_prompt(tokenizer, row["prompt_ids"]) + answer)


def decode_prompt(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids, each run of one special token (an image's) as the token and its count."""
    return re.sub(r"(<\|\w+\|>)\1+", lambda m: f"{m[1]}×{len(m[0]) // len(m[1])}", tokenizer.decode(ids))


def _clip_text(text: str) -> str:
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} […] {text[-half:]}"
