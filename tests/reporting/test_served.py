"""The report's part on served lines: sweeps."""

from typing import Any

from stages.cells import table
from stages.cells.table import ResultRow
from stages.reporting import served


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


def test_a_sweep_names_the_loads_at_which_plain_decoding_is_faster() -> None:
    speedups = {(10, 16): 0.8, (10, 64): 0.4, (1000, 16): 1.5, (1000, 64): 0.5, (1000, 1): 2.0}
    sweeps = served.build_sweeps(with_speedups(speedups) + with_speedups({(10, 16): 0.9}, "t3_1_4"))
    best, chain = sweeps  # one load is no sweep
    assert [load.shorten() for load in chain.slower] == ["10 x 16", "10 x 64", "1000 x 64"]
    assert best.of_trees and best.speedups == speedups | {(10, 16): 0.9}
