"""Cells of the torch engine that could be true, for tests of what the report says of speeds."""

import hashlib
from typing import Any

from stages.cells import cell, points, table
from stages.cells.cell import Cell
from stages.cells.request_record import AcceptanceCounts, RequestRecord
from stages.cells.table import TableLine
from stages.params.tree_shape import TreeShape, parse_shape
from tests import costs

TOKENS = 101
DRAFT = {"weights_bytes": 4096, "state_bytes": 512, "draft_parameters": 1024}


def answers(
    ids: list[str],
    e2e_s: float,
    prefill_s: float,
    tokens: int = TOKENS,
    counts: AcceptanceCounts | None = None,
    process_share: float | None = 1.0,
) -> list[RequestRecord]:
    """Records of answers that were decoded one after the other."""
    found = []
    for number, name in enumerate(ids):
        start = number * e2e_s
        events = [(start + prefill_s, 1), (start + e2e_s, tokens - 1)]
        record = RequestRecord(f"{name}#0", start, start, start + e2e_s, events, 7, tokens, "length")
        record.ids, record.counts = list(hashlib.sha256(name.encode()).digest()), counts
        record.process_s = process_share and process_share * e2e_s
        found.append(record)
    return found


def timed_cell(
    tree: str,
    speedup: float = 1.5,
    low: float | None = 1.3,
    high: float | None = 1.7,
    *,
    workload: str = "eval",
    checkpoint: str = "e009",
    step_s: float = costs.PLAIN_S,
    prefill_s: float = 0.01,
    process_share: float | None = 1.0,
    tau: float = 3.0,
    prompts: int = 2,
    tokens: int = TOKENS,
    histogram: list[int] | None = None,
    cycles: int = 40,
    **keys: Any,
) -> Cell:
    """A cell decoded in turns: plain decoding takes `step_s` a token after a prefill, the tree is `speedup` times as fast."""
    shape = TreeShape.parse(tree) if tree.startswith("t") else parse_shape(tree)
    plain_s, ids = prefill_s + step_s * (tokens - 1), [f"row{n}.0" for n in range(prompts)]
    counts = AcceptanceCounts(cycles, round(cycles * (tau - 1)), histogram or [10, 30])
    drafted = [answers(ids, plain_s / speedup, prefill_s, tokens, counts, process_share)]
    plain = [answers(ids, plain_s, prefill_s, tokens, None, process_share)]
    acceptance = {
        "tau": tau, "tau_low": tau - 0.1, "tau_high": tau + 0.1, "accept_rate": (tau - 1) / shape.num_steps,
        "node_accept_rate": (tau - 1) / (shape.num_draft_tokens - 1), "cycles": cycles * prompts,
        "accepted": counts.accepted * prompts, "histogram": counts.histogram, "engine": {},
    }  # fmt: skip
    load = points.Load(200, 1)
    shared = {"process_share": process_share, "stopping": {"repeats": 1, "rule": "repeats", "half_width": None}}
    in_turns = {"speedup": speedup, "speedup_low": low, "speedup_high": high}
    made = {
        "workload": workload, "checkpoint": checkpoint, "tree": tree, "engine": "torch", "status": cell.RAN,
        "temperature": 0.0, "top_p": 1.0, "top_k": None, "seed": 0, "hardware": costs.HARDWARE, "versions": {},
        "seconds": 3.0, "gpus": [], "joules": None, "draft": DRAFT,
        "points": [points.build_point(load, "inf", [drafted], acceptance, [], in_turns=in_turns, **shared)],
        "baseline_points": [points.build_point(load, "inf", [plain], None, [], **shared)],
    }  # fmt: skip
    return Cell.model_validate(made | keys)


def read_line(workload: str, checkpoint: str, tree: str) -> TableLine:
    """Return the line of a cell that was decoded prompt by prompt, beside its own plain decoding."""
    (line,) = table.join_lines([Cell.read("torch", workload, checkpoint, tree)], {}, [])
    assert line.point and line.baseline_point
    return line
