"""A benchmark cell of loads on disk: one server configuration under one workload (benchmark_served -> report), or the
torch engine under one that isn't answered prompt by prompt (benchmark -> report).

A workload may be a sweep: then the cell has a point for each pair of answer length and concurrency. A baseline cell is
the same server without a draft. The report joins the two only where their fingerprints agree.
"""

from pathlib import Path
from typing import Any

from stages.results import torch_records
from stages.runtime import atomic

RAN, UNSUPPORTED = "ran", "unsupported"
TORCH_ENGINE = (
    "torch"  # the engine whose loads are cells of `benchmark`: no server, and plain decoding in turns with each
)
SERVED_CELL_KEYS = (
    "workload", "checkpoint", "tree", "num_steps", "topk", "num_draft_tokens",  # null of a baseline, but the workload
    "engine", "status", "reason",  # unsupported: what the engine can't do; then there is no point
    "definitions", "temperature", "top_p", "top_k",
    "fingerprint",  # what two cells must share to be compared: engine and version, flags but the draft's, prompts, GPU
    "server",  # command: its line; info: what it says of itself
    "memory",  # as MEMORY
    "points", "baseline_points",  # the latter where the cell measured its own baseline in turns (interleave), else []
    "hardware", "versions", "seconds", "seed", "gpus", "joules",  # the latter two as in a cell
)  # fmt: skip
MEMORY_KEYS = (  # GiB, null where it isn't known; `kv_tokens` a count
    "weights", "draft", "kv_cache", "kv_tokens", "gpu_before", "gpu_serving", "gpu_after", "gpu_total",
)  # fmt: skip
POINT_KEYS = (
    "max_new_tokens", "concurrency", "request_rate",
    "loads",  # serving.latency.summary of each repeat
    "acceptance",  # as ACCEPTANCE; null without a draft
    "quality",  # {graded, correct, accuracy, how}; null where nothing is graded
    "requests",  # as REQUEST, of all repeats
    "warnings",  # sentences
)  # fmt: skip
ACCEPTANCE_KEYS = (
    "tau", "tau_low", "tau_high",  # the ends null of one conversation, and where the engine counts over all requests
    "accept_rate", "node_accept_rate", "cycles", "accepted",
    "histogram",  # the engine's: cycles that accepted i drafts, those beyond the end too
    "clipped",  # whether `accepted` leaves out what lies beyond an answer's end (docs/metrics.md)
    "engine",  # the engine's own figures, by its names
)  # fmt: skip
REQUEST_KEYS = (
    "repeat", "id", "turn", "prompt_tokens", "output_tokens", "cycles", "accepted", "finish_reason", "failed",
    "ttft_s", "tpot_s", "e2e_s", "wait_s",
    "answer",  # a digest of the answer's ids (or text): the same answer has the same
    "correct",  # null where not graded
)  # fmt: skip


def locate_served_cell(workload: str, checkpoint: str | None, tree: str | None, engine: str | None = None) -> Path:
    """A baseline has neither checkpoint nor tree. The torch engine's loads lie where its other cells do."""
    if engine == TORCH_ENGINE:
        return torch_records.locate_torch_cell(workload, str(checkpoint), str(tree))
    return torch_records.CELLS_FOLDER / f"served-{name_served_cell(workload, checkpoint, tree)}.json"


def name_served_cell(workload: str, checkpoint: str | None, tree: str | None) -> str:
    return f"{workload}-{name_server_config(checkpoint, tree)}"


def name_server_config(checkpoint: str | None, tree: str | None) -> str:
    """The server's configuration in a word, as benchmark_served.server.base_urls names it."""
    return f"{checkpoint}-{tree}" if checkpoint else "baseline"


def name_served_stage(workload: str, checkpoint: str | None, tree: str | None, engine: str | None = None) -> str:
    """The DVC stage that makes it."""
    if engine == TORCH_ENGINE:
        return f"benchmark@{workload}-{checkpoint}-{tree}"
    return f"benchmark_served{'' if checkpoint else '_baseline'}@{workload}" + (
        f"-{checkpoint}-{tree}" if checkpoint else ""
    )


def write_served_cell(found: dict[str, Any]) -> Path:
    """Returns where it lies."""
    assert set(found) == set(SERVED_CELL_KEYS), f"keys {sorted(found)} are not {sorted(SERVED_CELL_KEYS)}"
    assert set(found["memory"]) == set(MEMORY_KEYS), sorted(found["memory"])
    for point in [*found["points"], *found["baseline_points"]]:
        assert set(point) == set(POINT_KEYS), sorted(point)
        assert point["acceptance"] is None or set(point["acceptance"]) == set(ACCEPTANCE_KEYS), sorted(
            point["acceptance"]
        )
        assert all(set(row) == set(REQUEST_KEYS) for row in point["requests"])
    place = locate_served_cell(found["workload"], found["checkpoint"], found["tree"], found["engine"])
    atomic.write_json(place, found)
    return place


def read_served_cell(
    workload: str, checkpoint: str | None, tree: str | None, engine: str | None = None
) -> dict[str, Any]:
    """Raises ValueError naming the file and what to run, where the cell is missing or not whole."""
    config = workload, checkpoint, tree, engine
    place, made_by = locate_served_cell(*config), name_served_stage(*config)
    found: dict[str, Any] = atomic.read_json(place, made_by=made_by)
    if missing := set(SERVED_CELL_KEYS) - set(found):
        raise ValueError(
            f"{place} lacks {sorted(missing)}; it was cut or written by another version: dvc repro -f -s {made_by}"
        )
    torch_records.check_definitions(place, found["definitions"], made_by)
    return found
