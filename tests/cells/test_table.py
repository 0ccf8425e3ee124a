"""Served cells joined with baselines and replays, against figures taken from the records by hand."""

from statistics import fmean
from typing import Any

import pytest

from stages.cells import cell, interval, table
from stages.cells.table import ResultRow
from tests import served_cells
from tests.served_cells import FINGERPRINT, Row, made_up, point, replayed_tree

REPLAYS = {
    "e009": [
        replayed_tree("t5_1_6", 3.0),
        replayed_tree("t8_2_16", 4.0),
        replayed_tree("t5_1_6", 2.5, temperature=0.7, top_p=0.9),
        replayed_tree("t5_1_6", 2.7, temperature=0.7, top_p=0.9, draft_sampling="sampled", cycles=900.25),
    ]
}


def join(*cells: Row, of_eval: bool = True) -> list[table.TableLine]:
    return served_cells.join(cells, REPLAYS, {"eval"} if of_eval else ())


def make_speculative_cell(*points: Row, **keys: Any) -> Row:
    return made_up("eval", "e009", "t5_1_6", list(points), **keys)


def get_speculative_row(lines: list[table.TableLine]) -> ResultRow:
    (row,) = (line.row for line in lines if line.row["decoding"] == table.SPECULATIVE)
    return row


def test_speedup_is_output_throughput_over_the_baselines_repeat_by_repeat() -> None:
    slow, fast = point(64, 4, 0.02, repeats=3, seed=1), point(64, 4, 0.01, tau=2.9, repeats=3, seed=2)
    row = get_speculative_row(join(made_up("eval", points=[slow]), make_speculative_cell(fast)))
    by_hand = []
    for repeat in range(3):
        rate = []
        for one in (fast, slow):
            mine = [r for r in one["requests"] if r["repeat"] == repeat]
            last = max(r["wait_s"] + r["e2e_s"] for r in mine)  # all are due at 0
            rate.append(sum(r["output_tokens"] for r in mine) / last)
        by_hand.append(rate[0] / rate[1])
    assert row["speedup"] == pytest.approx(fmean(by_hand))
    assert (row["speedup_low"], row["speedup_high"]) == pytest.approx(interval.compute_mean_interval(by_hand))
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"]
    assert row["remark"] is None and (row["repeats"], row["requests"], row["completed"]) == (3, 24, 24)


def test_points_are_joined_by_answer_length_and_concurrency() -> None:
    baseline = made_up(
        "eval", points=[point(64, 1, 0.01), point(64, 4, 0.03), point(128, 4, 0.05), point(64, None, 0.09)]
    )
    cell_ = make_speculative_cell(
        point(128, 4, 0.01, tau=2.9), point(64, None, 0.01, tau=2.9), point(64, 1, 0.01, tau=2.9)
    )
    rows = [line.row for line in join(baseline, cell_) if line.row["decoding"] == table.SPECULATIVE]
    for row, other in zip(rows, [baseline["points"][i] for i in (2, 3, 0)], strict=True):
        assert row["baseline_output_throughput"] == other["loads"][0]["output_throughput"]


@pytest.mark.parametrize(
    ("baseline", "cell_", "why"),
    [
        (
            {"fingerprint": FINGERPRINT | {"gpu": "NVIDIA H100", "flags": {"mem_fraction": 0.7, "tp": 1}}},
            {},
            "not compared: the baseline differs in flags.mem_fraction (0.8 against 0.7); gpu (NVIDIA H200 against NVIDIA H100)",
        ),
        ({"points": [point(64, 8, 0.02)]}, {}, "not compared: the baseline has no load of 64 tokens at concurrency 4"),
        (
            {"points": [], "status": cell.UNSUPPORTED, "reason": "no GPU"},
            {},
            "not compared: the baseline is unsupported: no GPU",
        ),
    ],
)
def test_what_does_not_compare_has_no_speedup_but_the_reason(baseline: Row, cell_: Row, why: str) -> None:
    first = made_up("eval", points=[point(64, 4, 0.02, accuracy=0.5)])
    row = get_speculative_row(
        join(first | baseline, make_speculative_cell(point(64, 4, 0.01, tau=2.9, accuracy=0.4), **cell_))
    )
    assert why in row["remark"]
    joined_keys = ("speedup", "speedup_low", "speedup_high", "identical_share", "baseline_output_throughput")
    assert {row[key] for key in joined_keys} == {None}
    assert row["tau"] == 2.9 and row["output_throughput"] > 0 and row["accuracy"] is not None


def test_a_server_that_answered_nothing_divides_nothing() -> None:
    empty = {"requests": 8, "completed": 0, "failed": {"timeout": 8}, "duration_s": 60.0, "output_throughput": 0.0}
    silent = point(64, 4, 0.02)
    silent["loads"] = [
        load | empty | dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2e_s"), None) for load in silent["loads"]
    ]
    row = get_speculative_row(
        join(made_up("eval", points=[point(64, 4, 0.01)]), make_speculative_cell(silent | {"acceptance": None}))
    )
    assert row["remark"] == "not compared: this cell answered nothing"
    assert row["ttft_mean_s"] is None and row["tau"] is None and row["completed"] == 0


def test_a_cell_measured_in_turns_is_held_against_its_own_baseline() -> None:
    elsewhere = made_up("eval", points=[point(64, 4, 0.5)], fingerprint=FINGERPRINT | {"gpu": "another"})
    own = point(64, 4, 0.02, repeats=2, seed=5)
    lines = join(elsewhere, make_speculative_cell(point(64, 4, 0.01, tau=2.9, repeats=2), baseline_points=[own]))
    row = get_speculative_row(lines)
    assert row["remark"] is None and 1.5 < row["speedup"] < 2.5
    assert row["baseline_output_throughput"] == fmean(load["output_throughput"] for load in own["loads"])
    plain = [line.row for line in lines if line.row["decoding"] == table.PLAIN]
    assert [(r["checkpoint"], r["tree"]) for r in plain] == [(None, None), ("e009", "t5_1_6")]
    assert all(r["tau"] is None and r["speedup"] is None for r in plain)


def test_identical_share_counts_answers_by_their_digests() -> None:
    ours = point(64, 4, 0.01, tau=2.9, repeats=2, parted=3)  # 3 of 8 in each repeat
    theirs = point(64, 4, 0.02, repeats=2)
    assert (
        get_speculative_row(join(made_up("eval", points=[theirs]), make_speculative_cell(ours)))["identical_share"]
        == 10 / 16
    )
    ours["requests"][0] |= {"failed": "timeout", "answer": None}  # a parted one: in no share
    theirs["requests"][15] |= {"failed": "timeout", "answer": None}  # the same of the other side
    assert (
        get_speculative_row(join(made_up("eval", points=[theirs]), make_speculative_cell(ours)))["identical_share"]
        == 9 / 14
    )
    assert (
        get_speculative_row(join(made_up("eval", points=[theirs]), make_speculative_cell(ours, temperature=1.0)))[
            "identical_share"
        ]
        is None
    )


@pytest.mark.parametrize(
    ("how", "tau"),
    [
        ({}, 3.0), ({"top_p": 0.5, "top_k": 9}, 3.0), ({"temperature": 0.7, "top_p": 0.9}, 2.5), ({"temperature": 0.7}, None),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 9}, None), ({"temperature": 0.8, "top_p": 0.9}, None),
        ({"temperature": 0.7, "top_p": 0.9, "draft_sampling": "greedy"}, 2.5),
        ({"temperature": 0.7, "top_p": 0.9, "draft_sampling": "sampled"}, 2.7),
        ({"temperature": 0.7, "draft_sampling": "sampled"}, None),
    ],
)  # fmt: skip
def test_a_cell_stands_beside_the_replay_of_answers_that_were_drawn_as_its_own(how: Row, tau: float | None) -> None:
    """At temperature 0 nothing is drawn, so top-p and top-k say nothing there."""
    row = get_speculative_row(
        join(made_up("eval", points=[point(64, 4, 0.02)]), make_speculative_cell(point(64, 4, 0.01, tau=2.6), **how))
    )
    assert row["replay_tau"] == tau and row["draft_sampling"] == how.get("draft_sampling", "greedy")
    assert row["replay_ratio"] == (None if tau is None else pytest.approx(2.6 / tau))


def test_what_the_engine_cannot_run_is_a_line_with_its_reason_and_its_replayed_tau() -> None:
    lines = join(made_up("eval", points=[point(64, 4, 0.02)]), made_up("eval", "e009", "t8_2_16"))
    row = get_speculative_row(lines)
    assert (row["status"], row["replay_tau"], row["tau"]) == (cell.UNSUPPORTED, 4.0, None)
    assert row["remark"] == "unsupported: topk above 1 isn't built there"
