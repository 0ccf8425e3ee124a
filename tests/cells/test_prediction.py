"""Predicted speedups and what to launch, against arithmetic by hand."""

import math

import pytest

from stages.cells import prediction
from stages.cells.prediction import EngineLaunch, PredictedSpeedup
from stages.params.tree_shape import TreeShape
from stages.reporting.costs import format_advice, format_launch_table
from tests import costs
from tests.served_cells import replayed_tree as replay


def test_a_speedup_is_tau_over_the_cost_of_a_cycle_in_plain_steps() -> None:
    trees = [replay("t5_3_12", 4.2), replay("t8_1_9", 3.0)]
    found = prediction.predict_speedups(costs.made_up(), "e009", 0.0, trees)
    for row, tree in zip(found, trees, strict=True):
        cycle = costs.seconds(tree.shape)
        assert pytest.approx(cycle / costs.PLAIN_S) == row.C
        assert row.speedup == pytest.approx(tree.tau / (cycle / costs.PLAIN_S))
        assert (row.engine, row.checkpoint, row.concurrency) == ("torch", "e009", 1)


def test_the_interval_joins_those_of_tau_of_the_fit_and_of_the_plain_step() -> None:
    """Each alone first, then all: shares of independent errors add by their squares."""
    exact, noisy = costs.made_up(), costs.made_up(points=costs.grid(noise=0.03))
    still = {"plain": [exact.plain[0].model_copy(update={"error": 0.0})]}
    (tau_alone,) = prediction.predict_speedups(
        exact.model_copy(update=still), "e009", 0.0, [replay("t5_3_12", 4.0, 3.6, 4.8)]
    )
    assert tau_alone.low / tau_alone.speedup == pytest.approx(0.9)
    assert tau_alone.high / tau_alone.speedup == pytest.approx(1.2)
    margin = noisy.fit.margin
    (fit_alone,) = prediction.predict_speedups(noisy.model_copy(update=still), "e009", 0.0, [replay("t5_3_12", 4.0)])
    assert math.log(fit_alone.high / fit_alone.speedup) == pytest.approx(margin)
    (all_three,) = prediction.predict_speedups(noisy, "e009", 0.0, [replay("t5_3_12", 4.0, 3.6, 4.8)])
    joined = math.sqrt(
        math.log(4.0 / 3.6) ** 2 + margin**2 + (2.2622 * 0.01) ** 2
    )  # Student's t: the plain step has ten samples
    assert all_three.low == pytest.approx(all_three.speedup * math.exp(-joined), rel=1e-6)


def test_without_the_spread_of_tau_or_of_the_plain_step_there_is_no_interval_and_no_yes() -> None:
    """Bug: a plain step timed in one repeat counted as exact, and the prediction's interval was too narrow."""
    (one_conversation,) = prediction.predict_speedups(
        costs.made_up(), "e009", 0.0, [replay("t5_3_12", 4.0).model_copy(update={"tau_low": None, "tau_high": None})]
    )
    once = {"plain": [{"batch": 1, "step_s": costs.PLAIN_S, "error": None, "samples": 1}]}
    (one_repeat,) = prediction.predict_speedups(costs.made_up(**once), "e009", 0.0, [replay("t5_3_12", 4.0, 3.9, 4.1)])
    for row in (one_conversation, one_repeat):
        assert (row.low, row.high) == (None, None) and row.speedup > 1
        own = row.model_copy(update={"engine": "sglang"})
        assert [found.enable for found in prediction.choose_launches([own], chains_on_vllm)] == [False]


# --- what to launch ---------------------------------------------------------------------------------------------------


def guess(name: str, speedup: float, low: float | None, **keys: object) -> PredictedSpeedup:
    tree = TreeShape.parse(name)
    row = {"engine": "sglang", "workload": None, "max_new_tokens": None, "checkpoint": "e009", "concurrency": 1}
    shape = {
        "num_steps": tree.num_steps,
        "topk": tree.topk,
        "num_draft_tokens": tree.num_draft_tokens,
        "temperature": 0.0,
    }
    figures = {"tau": 4.0, "tau_low": None, "tau_high": None, "C": 2.0, "speedup": speedup}
    return PredictedSpeedup(**row | shape | figures | {"low": low, "high": speedup + 0.1} | keys)


def chains_on_vllm(engine: str, row: PredictedSpeedup) -> EngineLaunch | None:
    return None if engine == "vllm" and row.topk > 1 else EngineLaunch(["--tree", f"{row.num_steps}_{row.topk}"], "9.1")


def test_the_fastest_tree_that_an_engine_can_run_is_proposed() -> None:
    trees = ("t5_3_12", 1.9, 1.7), ("t3_1_4", 1.4, 1.2), ("t2_1_3", 1.3, 1.1)
    rows = [guess(*tree, engine=engine) for engine in ("sglang", "vllm") for tree in trees]
    sglang, vllm = prediction.choose_launches(rows, chains_on_vllm)
    found = [sglang[key] for key in ("engine", "num_steps", "topk", "flags")]
    assert found == ["sglang", 5, 3, ["--tree", "5_3"]]
    assert (vllm["engine"], vllm["num_steps"], vllm["topk"], vllm["flags"]) == ("vllm", 3, 1, ["--tree", "3_1"])
    assert "    --tree 3_1    # vllm 9.1 or later" in format_launch_table([sglang, vllm])


@pytest.mark.parametrize(
    ("low", "high", "advice"),
    [
        (0.02, 90.0, "can't tell"),  # two repeats of a plain step
        (0.6, 2.5, "can't tell"),
        (0.9, 1.9, "no"),
        (0.1, 0.9, "no"),
        (1.1, 90.0, "yes"),
        (math.nan, math.nan, "can't tell"),
        (0.0, math.inf, "can't tell"),
        (None, None, "can't tell"),
    ],
)
def test_an_interval_that_says_nothing_is_no_no(low: float | None, high: float | None, advice: str) -> None:
    """Bug: the advice was "no" for an interval of 0.02 to 90, and for one whose ends are NaN or infinite."""
    rows = [
        guess("t3_1_4", 1.4, low, high=high, workload="chat", max_new_tokens=64, concurrency=cap, engine="sglang")
        for cap in (1, 8)
    ]
    launch = [row for row in prediction.choose_launches(rows, chains_on_vllm) if row.engine == "sglang"]
    assert [format_advice(row) for row in launch] == [advice, advice]


def test_nothing_is_advised_by_the_costs_of_another_engine() -> None:
    """Bug: on a laptop the torch engine's costs on a CPU advised vLLM: "t3_1_4, predicted 1.46x"."""
    assert prediction.choose_launches([guess("t3_1_4", 1.46, 1.3, engine="torch")], chains_on_vllm) == []
