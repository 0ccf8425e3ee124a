"""The report's part on served lines: tables, sweeps and their break-evens, memory, warnings."""

from typing import Any

from stages.cells import table
from stages.cells.table import ResultRow
from stages.reporting import served_sweeps, tables


def with_speedups(speedups: dict[tuple[int, int | None], float], tree: str = "t5_1_6", **keys: Any) -> list[ResultRow]:
    """Lines of a sweep, joined, with just these speedups: (tokens, concurrency) -> speedup."""
    return [
        ResultRow(
            **{"workload": "sweep", "checkpoint": "e009", "tree": tree, "decoding": table.SPECULATIVE, "status": "ran"}
            | {
                "max_new_tokens": tokens,
                "concurrency": cap,
                "request_rate": "inf",
                "speedup": speedup,
                "engine": "sglang",
            }
            | {"requests": 8, "completed": 8, "temperature": 0.0}
            | keys
        )
        for (tokens, cap), speedup in speedups.items()
    ]


def format_rows(rows: list[ResultRow]) -> list[str]:
    return [line for group in tables.group_loads(rows) for line in tables._format_load_group(group, rows)]


def test_a_sweeps_break_evens_come_from_its_points() -> None:
    """From 1.5 at 16 to 0.5 at 64 the line over log2 crosses 1 at 32; from 0.8 at 10 to 1.2 at 1000 it does at 100."""
    (sweep,) = served_sweeps.build_sweeps(
        with_speedups({(10, 16): 0.8, (10, 64): 0.4, (1000, 16): 1.5, (1000, 64): 0.5, (1000, 1): 2.0})
    )
    assert sweep.by_length == [
        "answers of 10 tokens: slower at every concurrency measured, 16 to 64: at best 0.8× at 16",
        "answers of 1000 tokens: faster up to a concurrency of 32, slower beyond",
    ]
    assert sweep.by_cap[0].startswith("at concurrency 16: slower up to an answer length of ")
    assert sweep.by_cap[1].startswith("at concurrency 64: slower at every answer length")
    assert len(sweep.by_cap) == 2  # at concurrency 1 there is one length only
    assert [row.load.shorten() for row in sweep.slower] == ["10 x 16", "10 x 64", "1000 x 64"]
    (even,) = served_sweeps.build_sweeps(with_speedups({(10, 4): 0.8, (1000, 4): 1.2}))
    assert (even.by_length, even.by_cap) == (
        [],
        ["at concurrency 4: slower up to an answer length of 100, faster beyond"],
    )
    assert even.plot and even.plot.axis == "answer length (tokens)"


def test_the_best_tree_at_each_load_stands_first() -> None:
    rows = with_speedups({(64, 1): 2.0, (64, 64): 0.8}) + with_speedups({(64, 1): 1.8, (64, 64): 1.1}, tree="t8_2_16")
    best, *each = served_sweeps.build_sweeps(rows)
    assert [c.row["tree"] for c in best.heat[0][1]] == ["t5_1_6", "t8_2_16"]
    assert best.by_length == [
        "answers of 64 tokens: faster at every concurrency measured, 1 to 64: at least 1.1× at 64"
    ]
    assert [sweep.name for sweep in (best, *each)] == ["the best tree at each load", "5_1_6 (5_1_5)", "8_2_16"]


def test_the_terminal_says_what_is_off_apart_or_lost() -> None:
    rows = with_speedups({(64, 4): 1.5}, replay_agrees="no", replay_ratio=0.7, replay_tau=3.0, tau=2.1, completed=6)
    rows += with_speedups({(64, 4): None}, tree="t8_2_16", remark="not compared: gpu")
    rows += with_speedups(
        {(64, 4): None}, tree="t8_3_16", status="unsupported", remark="unsupported: topk", replay_tau=4.2
    )
    lines = format_rows(rows)
    off, lost, apart, cannot = [line for line in lines if line.startswith("!")]
    assert (
        off.startswith("! 5_1_6 (5_1_5), 64 x 4: tau 2.10 is 0.70 of the replayed 3.00.")
        and "map of the vocabulary" in off
    )
    assert lost.endswith("2 of 8 requests failed") and apart == "! 8_2_16, 64 x 4: not compared: gpu"
    assert cannot == "! 8_3_16: unsupported: topk; replayed, its tau is 4.20"
