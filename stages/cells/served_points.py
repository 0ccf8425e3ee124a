"""Parts of a served cell: its server, fingerprint and memory, and the accepted draft tokens of its points."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from stages.cells import load_points, metrics, stopping
from stages.cells.served_records import PointAcceptance, ServerDescription, ServerMemory
from stages.cells.torch_records import Hardware
from stages.params.tree_shape import Load
from stages.serving import engine_flags, latency, load_checks
from stages.serving.engine_flags import ServedDraft
from stages.serving.gpu_memory import GpuMemory
from stages.serving.load_generator import LoadResult
from stages.serving.measured_server import MeasuredServer


def describe_server(server: MeasuredServer) -> ServerDescription:
    return ServerDescription(
        command=[_shorten_path(word) for word in server.command],
        info={key: _shorten_path(value) for key, value in server.info.items()},
    )


def _shorten_path(word: Any) -> Any:
    """Return the last two names of an absolute path, since a cell may be published; other values unchanged."""
    return "/".join(word.split("/")[-2:]) if isinstance(word, str) and word.startswith("/") else word


def describe_memory(server: MeasuredServer, gpus: list[GpuMemory]) -> ServerMemory:
    return ServerMemory(
        **asdict(server.get_reported_memory()),
        draft=server.measure_draft_gib(),
        gpu_total=round(sum(gpu.total for gpu in gpus), 2) if gpus else None,
        **asdict(server.gpu_memory),
    )


def build_fingerprint(
    target: list[Any],
    setup: engine_flags.ServerSetup,
    engine_version: Any,
    requests: list[Any],
    hardware: Hardware,
) -> dict[str, Any]:
    """Return what cell and baseline must share for a speedup.

    Args:
        target: model, revision and digest of its config.
        requests: prompts and workload, as JSON values. The context length is left out, since it changes no time.
    """
    text = json.dumps(requests, sort_keys=True)
    return {
        "target": target,
        "setup": asdict(setup) | {"folder": target[0], "context_length": None},
        "engine_version": engine_version,
        "workload": hashlib.sha256(text.encode()).hexdigest()[:16],
        "hardware": {key: hardware[key] for key in sorted(hardware) if key != "python"},
    }


def measure_widest_half(measured: MeasuredServer, baseline: MeasuredServer) -> float | None:
    """Return the widest of the loads' speedup intervals, as half of it and a share; None where a load has none."""
    halves = []
    for load in measured.loads:
        throughputs, baseline_throughputs = (
            load_points.list_throughputs([[result.records for result in turns] for turns in server.loads[load]])
            for server in (measured, baseline)
        )
        halves.append(stopping.measure_loads_half_width(throughputs, baseline_throughputs))
    known = [half for half in halves if half is not None]
    return max(known) if len(known) == len(halves) else None


def describe_load(
    server: MeasuredServer, load: Load, repeat: int, num_repeats: int, turns: list[LoadResult], seconds: float
) -> str:
    """Return a line for the log."""
    summary = latency.summarise_load([r for found in turns for r in found.records])
    cycles, accepted = load_checks.sum_counts(turns)
    tau = f"tau {metrics.pool_acceptance([accepted], [cycles], 1, None).tau:.3f}, " if cycles else ""
    if server.simulated:
        tau = "acceptance simulated, "
    repeat_label = f" ({repeat + 1} of {num_repeats})" if num_repeats > 1 else ""
    return (
        f"{server.config_name}, {load}{repeat_label}: {tau}"
        f"{summary.output_throughput:.1f} output tokens/s, {summary.completed} of {summary.requests} answered, "
        f"{seconds:.1f} s"
    )


def compute_acceptance(draft: ServedDraft | None, loads: list[LoadResult], prompt_set: str) -> PointAcceptance | None:
    """Return a point's acceptance; None without a draft or without counts.

    docs/metrics.md: "Accepted drafts of a server". vLLM counts over all requests together, so its tau has no interval.
    """
    counts = [c for load in loads for c in load_checks.list_counts(load)]
    if draft is None or not counts:
        return None
    records = None if any(load.counters for load in loads) else [r for load in loads for r in load.records if r.counts]
    return load_points.pool_counts(
        counts, records, prompt_set, draft.num_steps, draft.num_draft_tokens, _collect_engine_figures(loads)
    )


def _collect_engine_figures(loads: list[LoadResult]) -> dict[str, Any]:
    """Return the engine's own accept lengths, by its names."""
    figures: dict[str, Any] = {}
    for load in loads:
        figures |= load.engine_figures
    key = "spec_accept_length"
    per_request = [r.engine_meta[key] for load in loads for r in load.records if key in r.engine_meta]
    if per_request:
        figures[f"{key}, mean over requests"] = float(np.mean(per_request))
    return figures
