"""Rows of a cell (results/served_records.py) from the request records of a load."""

import hashlib
import json
from typing import Any

from stages.serving.latency import RequestRecord


def get_question_id(r: RequestRecord) -> str:
    """Return the question's id; a record's id is `id#turn`."""
    return r.id.rpartition("#")[0]


def make_request_row(repeat: int, turn: int, r: RequestRecord, correct: bool | None) -> dict[str, Any]:
    """Return a request row (served_records.RequestRow)."""
    answer = json.dumps(r.ids) if r.ids else r.text
    done = not r.failure_reason
    return {
        "repeat": repeat, "id": get_question_id(r), "turn": turn, "prompt_tokens": r.input_tokens,
        "output_tokens": r.output_tokens, "cycles": r.counts.cycles if r.counts else None,
        "accepted": r.counts.accepted if r.counts else None, "finish_reason": r.finish_reason, "failed": r.failure_reason,
        "ttft_s": r.ttft_s if done else None, "tpot_s": r.tpot_s if done else None, "e2e_s": r.e2e_s if done else None,
        "wait_s": r.sent - r.due, "answer": hashlib.sha256(answer.encode()).hexdigest()[:16] if done else None,
        "correct": correct,
    }  # fmt: skip


def join_turns(turns: list[list[RequestRecord]]) -> list[RequestRecord]:
    """Return the records of all turns, shifted in time so that each turn follows the one before without a gap.

    In the gap the prompts of the next turn are rendered. The records are changed in place.
    """
    every: list[RequestRecord] = []
    for found in turns:
        if every:
            late = min(r.due for r in found) - max(r.ended for r in every)
            for r in found:
                r.due, r.sent, r.ended = r.due - late, r.sent - late, r.ended - late
                r.events = [(at - late, tokens) for at, tokens in r.events]
        every += found
    return every
