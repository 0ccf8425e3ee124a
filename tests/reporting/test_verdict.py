"""The verdict of made-up results: what it advises, and that no number whose interval holds 1 is advised."""

from typing import Any

import pytest

from stages.cells import table
from stages.cells.cell import Cell
from stages.cells.prediction import LaunchAdvice, PredictedSpeedup
from stages.cells.replay_records import GroupTau, ReplayedTree
from stages.cells.table import ResultRow
from stages.cells.training_records import TrainingReport
from stages.params.families import DSPARK, SUFFIX, DraftKind
from stages.reporting import verdict
from stages.reporting.families import Families
from stages.reporting.timing_noise import TimingRemark
from stages.reporting.verdict import Verdict
from tests.served_cells import replayed_tree
from tests.torch_cells import timed_cell


def predict(speedup: float, low: float | None, high: float | None, **changes: Any) -> PredictedSpeedup:
    values: dict[str, Any] = {
        "engine": "torch", "workload": None, "max_new_tokens": None, "temperature": 0.0, "checkpoint": "e009", "num_steps": 6,
        "topk": 4, "num_draft_tokens": 32, "concurrency": 1, "tau": 4.0, "tau_low": 3.9, "tau_high": 4.1, "C": 2.5,
        "speedup": speedup, "low": low, "high": high,
    }  # fmt: skip
    return PredictedSpeedup.model_validate(values | changes)


def advise(row: PredictedSpeedup, engine: str = "sglang") -> LaunchAdvice:
    more = {"engine": engine, "enable": row.is_faster, "flags": []}
    return LaunchAdvice.model_validate(row.model_dump() | more)


def serve(concurrency: int, speedup: float, low: float | None, high: float | None, **changes: Any) -> ResultRow:
    values: dict[str, Any] = {
        "workload": "code", "checkpoint": "e009", "tree": "t8_3_16", "engine": "sglang", "temperature": 0.0,
        "decoding": "speculative", "status": "ran", "max_new_tokens": 200, "concurrency": concurrency, "tau": 3.0,
        "speedup": speedup, "speedup_low": low, "speedup_high": high,
    }  # fmt: skip
    return ResultRow.model_validate(values | changes)


def give(
    predicted: list[PredictedSpeedup] | None = None,
    cells: list[Cell] | None = None,
    served: list[ResultRow] | None = None,
    launch: list[LaunchAdvice] | None = None,
    families: Families | None = None,
    replays: dict[str, list[ReplayedTree]] | None = None,
    groups: dict[str, list[GroupTau]] | None = None,
    trained: dict[str, TrainingReport] | None = None,
    remarks: list[TimingRemark] | None = None,
) -> Verdict:
    rows = predicted or []
    launch = [advise(row) for row in rows if row.engine != "torch"] if launch is None else launch
    measured = [line.row for line in table.join_lines(cells or [], {}, [])]
    given = launch, rows, [*measured, *(served or [])], remarks or []
    return verdict.build_verdict(*given, ["eval"], replays or {}, families or {}, (), groups, trained)


def replayed_chain(first: float) -> ReplayedTree:
    values: dict[str, Any] = {
        "checkpoint": "e009", "tree": "t3_1_4", "num_steps": 3, "topk": 1, "num_draft_tokens": 4, "tau": 1.2,
        "tau_low": 1.1, "tau_high": 1.3,
        "accept_rate": 0.1, "cycles": 10, "accepted": 2, "mean_depth": 1.0, "acceptance": f"{first} 0.1 0.1",
        "tau_oracle": 2.0, "tau_adaptive": 2.0, "temperature": 0.0, "top_p": None,
    }  # fmt: skip
    return ReplayedTree.model_validate(values)


def test_a_mean_hides_no_source_or_context_that_loses_or_pays() -> None:
    """tau 4.0 at 1.5x: a source pays from tau 2.67 on."""
    tree = replayed_chain(0.7).model_copy(update={"tree": "t6_4_32", "tau": 4.0})
    ends = {"code.jsonl": (4.4, 4.1, 4.7), "chat.jsonl": (2.2, 2.0, 2.5), "maths.jsonl": (2.6, 2.4, 2.8)}
    taus = [
        GroupTau(by="source", group=name, answers=40, cycles=99, tree="t6_4_32", tau=tau, tau_low=low, tau_high=high)
        for name, (tau, low, high) in ends.items()
    ]
    found = give([predict(1.5, 1.4, 1.6)], replays={"e009": [tree]}, groups={"e009": taus})
    assert found.kind == "launch"
    assert found.details == ("It loses on chat.jsonl (0.83x, tau 2.20): do not launch it for these",)
    assert [f"{group.speedup:.3f}" for group in found.groups] == ["0.825", "0.975", "1.650"]
    found = give([predict(0.9, 0.8, 0.95)], replays={"e009": [tree]}, groups={"e009": [*taus[1:], *taus[:1]]})
    assert found.kind == "plain" and not found.details  # 4.4 is 0.99x
    found = give([predict(0.96, 0.9, 0.99)], replays={"e009": [tree]}, groups={"e009": taus})
    assert found.details == () and give([predict(1.5, 1.4, 1.6)], replays={"e009": [tree]}).groups == ()
    better = [taus[0].model_copy(update={"tau_low": 4.3}), taus[1]]
    found = give([predict(0.96, 0.9, 0.99)], replays={"e009": [tree]}, groups={"e009": better})
    assert found.details == ("It would pay on code.jsonl (1.06x, tau 4.40) alone",)
    lengths = {"group": ["0-128", "128-256"], "tau": [4.1, 2.2], "tau_low": [4.0, 2.0], "tau_high": [4.2, 2.4]}
    columns = (dict(zip(lengths, values, strict=True)) for values in zip(*lengths.values(), strict=True))
    contexts = [taus[0].model_copy(update={"by": "context", **column}) for column in columns]
    found = give([predict(1.5, 1.4, 1.6)], replays={"e009": [tree]}, groups={"e009": [*taus[:1], *contexts]})
    assert found.details == ("It loses on contexts of 128-256 tokens (0.83x, tau 2.20): do not launch it for these",)
    assert [group.tau.by for group in found.groups] == ["context", "context"]  # one source is all of them


@pytest.mark.parametrize(("speedup", "low", "high"), [(0.83, 0.7, 0.95), (0.98, 0.8, 1.2)])
def test_where_plain_decoding_is_as_fast_the_verdict_is_not_to_speculate(
    speedup: float, low: float, high: float
) -> None:
    found = give([predict(0.9, 0.8, 1.05)], [timed_cell("t8_3_16", speedup, low, high)])
    ends = f"{speedup:.2f}x ({low:.2f} to {high:.2f})"
    assert found.kind == "plain"
    assert found.headline == f"Do not speculate at concurrency 1: the best measured, t8_3_16 with e009, is {ends}"
    assert found.warnings == (f"no measured tree is faster than plain decoding, the best at {speedup:.2f}x",)


def test_an_interval_that_holds_1_is_never_the_advice() -> None:
    """Bug: on a busy machine 1.74x, with an interval from 0.72 to 3.53, was the headline's best."""
    found = give(cells=[timed_cell("t5_1_6", 1.74, 0.72, 3.53), timed_cell("t8_3_16", 1.4, 0.9, 2.0)])
    assert found.kind == "noisy" and "Launch" not in found.headline
    assert found.headline == (
        "Timings are too noisy to say at concurrency 1: the best measured, t5_1_6 with e009, is 1.74x (0.72 to 3.53); "
        "dvc repro -fs benchmark@eval-e009-t5_1_6 on an idle machine, or raise benchmark.workloads.eval.num_prompts"
    )


FAST, SLOW, DISTURBED = (1.5, 1.3, 1.8), (0.8, 0.7, 0.9), (1.2, 0.9, 1.6)


@pytest.mark.parametrize(
    ("guessed", "cells", "checkpoint"),
    [
        ("e009", [("e003", FAST)], "e003"),
        ("e009", [("e003", SLOW), ("e001", SLOW)], "e009"),
        ("e009", [("e003", FAST), ("e009", DISTURBED)], "e003"),
        ("e009", [], "e009"),
    ],
)
def test_the_verdict_is_about_the_measured_checkpoint_where_one_is(
    guessed: str, cells: list[tuple[str, tuple[float, float, float]]], checkpoint: str
) -> None:
    made = [timed_cell("t6_4_32", *ends, checkpoint=name) for name, ends in cells]
    assert give([predict(*FAST, checkpoint=guessed)], made).checkpoint == checkpoint
    assert give().checkpoint is None


@pytest.mark.parametrize(("ends", "kind"), [((0.05, 20.0), "noisy"), ((None, None), "unknown"), ((0.8, 1.1), "plain")])
def test_a_best_below_1_that_can_not_be_told_is_no_advice_against(
    ends: tuple[float | None, float | None], kind: str
) -> None:
    """Bug: the verdict was "Do not speculate" for a speedup of 0.97 whose interval is 0.05 to 20 or is missing."""
    found = give([predict(0.7, 0.6, 0.8)], [timed_cell("t5_1_6", 0.97, *ends)])
    assert found.kind == kind and found.headline.startswith("Do not speculate") == (kind == "plain")


def test_a_prediction_of_another_set_is_to_be_measured_not_launched() -> None:
    """Bug: below "too noisy to say" for one set stood "Launch", by a prediction for another."""
    noisy = serve(1, 1.2, 0.9, 1.6, engine="torch", in_turns=True, workload="code")
    for guess in (predict(*FAST), predict(*FAST, engine="sglang", workload="chat", max_new_tokens=200)):
        found = give([guess], served=[noisy])
        assert found.kind == "noisy" and "Launch" not in " ".join(found.list_lines())
        assert any(line.startswith("Measure t6_4_32 with e009 at concurrency 1") for line in found.details)
    own = predict(*FAST, engine="sglang", workload="code", max_new_tokens=200, concurrency=8)
    found = give([own], served=[serve(1, 1.5, 1.4, 1.6)])
    assert [line.startswith("Launch") for line in found.list_lines()[:2]] == [True, True]  # one set, another load


def test_of_measured_trees_one_whose_times_are_odd_comes_last_and_says_so() -> None:
    cells = [timed_cell("t5_1_6", 1.9, 1.6, 2.2), timed_cell("t8_3_16", 1.5, 1.3, 1.8)]
    remarks = [TimingRemark("benchmark@eval-e009-t5_1_6", "odd")]
    assert give(cells=cells, remarks=remarks).headline.startswith(
        "Launch t8_3_16 with e009: measured 1.50x (1.30 to 1.80)"
    )
    (only,) = give(cells=cells[:1], remarks=remarks).list_lines()[:1]
    assert only == "Launch t5_1_6 with e009: measured 1.90x (1.60 to 2.20, doubtful timings) at concurrency 1"


def test_a_servers_own_prediction_belongs_to_its_load_and_the_torch_engines_to_its_own() -> None:
    own = predict(1.3, 1.1, 1.5, engine="sglang", workload="code", max_new_tokens=200, concurrency=8)
    found = give([own, predict(1.6, 1.2, 2.1)], [timed_cell("t8_3_16")], [serve(8, 1.2, 1.05, 1.4)])
    torch, served = found.list_lines()
    assert (
        torch.startswith("Launch t8_3_16 with e009: measured 1.50x") and "t6_4_32 with e009 is predicted 1.60x" in torch
    )
    assert served == (
        "Launch t8_3_16 with e009: measured 1.20x (1.05 to 1.40) at concurrency 8 (sglang, code, 200 tokens); t6_4_32 with e009 "
        "is predicted 1.30x (1.10 to 1.50): measure it before you rely on it (benchmark_served.checkpoints, workloads and trees)"
    )


def test_an_undertrained_draft_is_called_so_before_speculation_is_called_useless() -> None:
    """Bug: "Do not speculate" of a draft of which 17% of the first drafts were right; it needed training."""
    row = replayed_chain(0.17)
    lost = [timed_cell("t3_1_4", 0.7, 0.6, 0.8)]
    found = give(cells=lost, replays={"e009": [row], "e003": [replayed_chain(0.1)]})
    assert found.headline.startswith("e009 is undertrained: 17% of its first drafts are right")
    assert found.details[0].startswith("Do not speculate")
    values = {
        "weights": "x", "from": "e000", "epochs": [], "seconds": 1.0, "few_steps": "only 2 optimizer steps in all",
    }  # fmt: skip
    trained = {"e009": TrainingReport.model_validate(values)}
    found = give(cells=lost, replays={"e009": [row]}, trained=trained)
    assert found.headline.endswith("only 2 optimizer steps in all")
    assert give(cells=lost, replays={"e009": [replayed_chain(0.62)]}).headline.startswith("Do not speculate")
    fast = [timed_cell("t3_1_4", 1.7, 1.6, 1.8)]
    assert give(cells=fast, replays={"e009": [row]}).headline.startswith("Launch")


# Trees of block drafts

BLOCKS = {"e009": DraftKind(), "b003": DraftKind(DSPARK, 7)}


def test_trees_of_block_drafts_that_no_engine_runs_are_never_advised() -> None:
    """By prediction, by measurement or both: what is left of the others is advised."""
    wide = {"checkpoint": "b003", "num_steps": 4, "topk": 2, "num_draft_tokens": 9}
    rows = [predict(2.5, 2.2, 2.8, **wide), predict(1.3, 1.1, 1.5)]
    found = give(rows, launch=[], families=BLOCKS)
    assert found.headline.startswith("Launch t6_4_32 with e009: predicted 1.30x") and found.details == ()
    cells = [
        timed_cell("t4_2_9", 2.6, 2.3, 2.9, checkpoint="b003"), timed_cell("t3_1_4", 2.0, 1.9, 2.1, checkpoint="b003"),
        timed_cell("t6_4_32", 1.2, 1.1, 1.3),
    ]  # fmt: skip
    found = give(rows, cells, families=BLOCKS)
    assert found.headline.startswith("Launch t6_4_32 with e009: measured 1.20x") and found.checkpoint == "e009"
    (faster,) = found.details
    assert faster.startswith(
        "Faster in the torch engine: t4_2_9 with b003, measured 2.60x (2.30 to 2.90); torch engine only:"
    )
    slower = [*cells[:1], timed_cell("t7_1_8", 2.7, 2.5, 2.9, checkpoint="b003")]
    assert give(cells=slower, families=BLOCKS).details == (), "bug: a slower tree was named beside the one to launch"
    alone = give(rows[:1], cells[:2], launch=[], families=BLOCKS)
    assert "Launch" not in alone.headline and alone.kind == "unknown"
    served = [serve(8, 1.9, 1.7, 2.1, engine="torch", checkpoint="b003", tree="t4_2_9")]
    assert "Launch" not in give(served=served, launch=[], families=BLOCKS).headline


def test_a_lookup_is_set_against_the_best_trained_tree() -> None:
    families = {"e009": DraftKind(), "suffix": DraftKind(SUFFIX)}
    trained = [replayed_tree("t5_2_8", 2.1, 2.0, 2.2), replayed_tree("t5_1_6", 2.4, 2.2, 2.6)]

    def compare(tau: float, groups: dict[str, list[GroupTau]] | None = None) -> str:
        looked_up = [replayed_tree("x24_8", tau, 2.0, 4.4, checkpoint="suffix")]
        (line,) = give(replays={"e009": trained, "suffix": looked_up}, families=families, groups=groups).details
        return line

    expected = "Without training x24_8 with suffix commits 3.20 tokens a cycle (2.00-4.40), replayed; trained, 5_1_6"
    assert compare(3.2).startswith(expected) and compare(3.2).endswith("takes less than 0.75 times as long")
    ends = {"answers": 4, "cycles": 9, "tau_low": None, "tau_high": None}
    groups = {
        name: [GroupTau(by="source", group=f"{n}.jsonl", tree=tree, tau=tau, **ends) for n, tau in enumerate(taus)]
        for name, tree, taus in (("e009", "t5_1_6", (2.5, 2.3)), ("suffix", "x24_8", (1.2, 4.0)))
    }
    assert compare(2.0, groups).endswith("takes less than 1.20 times as long; on 1.jsonl the former commits more")
