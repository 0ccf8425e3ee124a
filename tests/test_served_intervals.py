"""The interval of a served cell's tau: over prompts, whatever the number of repeats (no server, no target)."""

from types import SimpleNamespace
from typing import Any

import pytest

from stages.cells import request_record
from stages.cells.cell import SPECULATIVE
from stages.engines.cell_engine import LoadResult
from stages.measuring import cell_run
from stages.params.tree_shape import Load, TreeShape

TREE = TreeShape.parse("t3_1_4")
ACCEPTED = {"a.0": 4, "b.0": 9, "c.0": 15, "d.0": 20}  # of ten cycles each


def load_of(accepted: dict[str, int]) -> LoadResult:
    """Every request answered in ten cycles."""
    records = []
    for name, drafts in accepted.items():
        counts = request_record.AcceptanceCounts(10, drafts, True, [10, 0, 0, 0])
        records.append(
            request_record.RequestRecord(
                f"{name}#0", 0.0, 0.0, 1.0, [(0.5, 1), (1.0, 9)], True, 3, 10, "stop", None, counts=counts
            )
        )
    return LoadResult(records)


def acceptance_of(repeats: list[dict[str, int]], prompts: str = "gsm8k") -> dict[str, Any]:
    workload = SimpleNamespace(prompts=prompts, request_rate=None)
    subject: Any = SimpleNamespace(
        context=SimpleNamespace(workload=workload, tree=TREE, references={}),
        list_figures=lambda results: {},
        list_warnings=lambda load, results: [],
    )
    results = [[load_of(accepted)] for accepted in repeats]
    return cell_run.build_point(subject, SPECULATIVE, Load(10, 1), results)["acceptance"]


def test_repeats_of_the_same_answers_do_not_narrow_the_interval_of_tau() -> None:
    """Bug: requests were resampled, not prompts: nine repeats of the same greedy answers made it a third as wide."""
    once, often = acceptance_of([ACCEPTED]), acceptance_of([ACCEPTED] * 9)
    assert often["tau"] == once["tau"]
    assert (often["tau_low"], often["tau_high"]) == pytest.approx((once["tau_low"], once["tau_high"]))
    assert once["tau_low"] < once["tau"] < once["tau_high"]


def test_one_prompt_has_no_interval_however_often_it_is_repeated() -> None:
    """Bug: it had one of zero width."""
    found = acceptance_of([{"a.0": 4}] * 3)
    assert (found["tau"], found["tau_low"], found["tau_high"]) == (1.4, None, None)


def test_turns_of_a_conversation_of_the_eval_split_do_not_narrow_the_interval_of_tau() -> None:
    """Bug: each answer of a conversation counted as a prompt of its own."""
    turns = {name.replace(".0", f".{turn}"): drafts for name, drafts in ACCEPTED.items() for turn in range(4)}
    once, often = acceptance_of([ACCEPTED], "eval"), acceptance_of([turns], "eval")
    assert (often["tau_low"], often["tau_high"]) == pytest.approx((once["tau_low"], once["tau_high"]))
