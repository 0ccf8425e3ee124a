"""The report's part on served lines: tables, sweeps and their break-evens, memory, warnings."""

from typing import Any

from stages.cells import table
from stages.cells.table import ResultRow
from stages.reporting import served_sweeps


def with_speedups(speedups: dict[tuple[int, int | None], float], tree: str = "t5_1_6", **keys: Any) -> list[ResultRow]:
    """Lines of a sweep, joined, with just these speedups: (tokens, concurrency) -> speedup."""
    return [
        ResultRow(
            **{"workload": "sweep", "checkpoint": "e009", "tree": tree, "decoding": table.SPECULATIVE, "status": "ran"}
            | {"max_new_tokens": tokens, "concurrency": cap, "request_rate": "inf"}
            | {"speedup": speedup, "engine": "sglang"}
            | {"requests": 8, "completed": 8, "temperature": 0.0}
            | keys
        )
        for (tokens, cap), speedup in speedups.items()
    ]


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
    assert [load.shorten() for load in sweep.slower] == ["10 x 16", "10 x 64", "1000 x 64"]
    (even,) = served_sweeps.build_sweeps(with_speedups({(10, 4): 0.8, (1000, 4): 1.2}))
    assert (even.by_length, even.by_cap) == (
        [],
        ["at concurrency 4: slower up to an answer length of 100, faster beyond"],
    )
