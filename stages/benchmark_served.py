"""benchmark_served: measure one cell on a serving engine.   python -m stages.benchmark_served WORKLOAD [CHECKPOINT TREE]

A cell is one server configuration under one workload. Without a checkpoint and a tree it is the baseline: the same server
without a draft. A workload that is a sweep has a point for each answer length and concurrency, all measured on one server.
The stage starts the server and stops it, or uses a running one (benchmark_served.server.base_urls). A configuration that the
engine can't run gives a cell of status "unsupported", a draft of which no token is accepted one of status "skipped"; a server
that would measure something else stops the stage with an error.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from stages.cells import cell, points, stopping
from stages.cells.cell import Acceptance, Cell, LoadPoint, ServerDescription, StoppingRecord
from stages.cells.record import name_draft_sampling
from stages.cells.stopping import RepeatRule
from stages.engines import gpu_memory, registry
from stages.engines.protocol import ServedDraft
from stages.engines.server import UnsupportedByServerError
from stages.measuring import measured_loads, server_setup
from stages.measuring import requests as served_requests
from stages.measuring.load_checks import NothingAcceptedError
from stages.measuring.load_generator import LoadResult
from stages.measuring.measured_server import MeasuredServer
from stages.measuring.requests import ServedCellContext
from stages.params import stage_inputs
from stages.params.tree_shape import Load, parse_shape
from stages.telemetry import gpu_energy
from stages.telemetry.run_stage import run_stage


def main(workload_name: str, checkpoint_name: str = "", tree_name: str = "") -> None:
    if bool(checkpoint_name) != bool(tree_name):
        raise ValueError(
            f"expected WORKLOAD [CHECKPOINT TREE], found {workload_name} {checkpoint_name}; a cell with a draft needs both"
        )
    stage = "benchmark_served" if checkpoint_name else "benchmark_served_baseline"
    params = stage_inputs.read_params(stage, *filter(None, (workload_name, checkpoint_name, tree_name)))
    config_name = cell.name_configuration(checkpoint_name or None, tree_name or None)
    meter, started = gpu_energy.EnergyMeter(server_setup.list_stage_gpus(params, [config_name])), time.perf_counter()
    gpus_before = gpu_memory.list_visible_gpus()
    tree = parse_shape(tree_name) if checkpoint_name else None
    draft_config = server_setup.read_draft_config(params, checkpoint_name) if checkpoint_name else {}
    work = server_setup.build_context(params, workload_name, draft_config)
    measured = server_setup.configure_server(work, checkpoint_name, tree, draft_config)
    baseline = MeasuredServer(cell.name_configuration(None, None))
    reason, ended = server_setup.explain_unsupported(work, measured, draft_config), None
    status = cell.UNSUPPORTED if reason else cell.RAN
    if not reason:
        server_setup.check_positions(work, measured, draft_config)
        try:
            ended = _measure_repeats(work, measured, baseline if tree and params.benchmark_served.interleave else None)
        except UnsupportedByServerError as error:
            status, reason = cell.UNSUPPORTED, error.reason
        except NothingAcceptedError as error:
            status, reason = cell.SKIPPED, str(error)
            measured.loads, baseline.loads = {}, {}
    seconds = round(time.perf_counter() - started, 2)
    outcome = {"status": status, "reason": reason, "seconds": seconds, "gpus": meter.names(), "joules": meter.joules()}
    found = _build_cell(work, measured, baseline, ended, gpus_before, outcome)
    print(f"{found.name}: {f'{status}: {reason}' if reason else status} -> {found.write()}")


# Measuring


def _measure_repeats(
    work: ServedCellContext, measured: MeasuredServer, baseline: MeasuredServer | None
) -> StoppingRecord | None:
    """Measure all repeats of all points; return why there are no more, None without `baseline`.

    With `baseline` each repeat also has a server without a draft, in alternating order, so that a drifting machine affects
    both alike.
    """
    plan = server_setup.build_server_plan(work)
    owner = cell.name_cell(work.workload_name, measured.checkpoint, measured.tree_name)
    open_servers = partial(measured_loads.open_servers, plan, owner=owner)
    if baseline is None:
        with open_servers([measured]):
            measured_loads.run_repeats(work, measured, list(range(work.workload.repeats)))
        return None
    workload, measure_half = work.workload, partial(_measure_widest_half, measured, baseline)
    rule = RepeatRule(workload.fewest_repeats, workload.most_repeats, workload.half_width)
    if plan.count_servers_at_once() < 2:
        return rule.run(partial(_measure_one_by_one, work, open_servers, (baseline, measured)), measure_half)
    with open_servers([baseline, measured]):
        return rule.run(partial(_measure_together, work, (baseline, measured)), measure_half)


def _measure_widest_half(measured: MeasuredServer, baseline: MeasuredServer) -> float | None:
    """Return the widest of the loads' speedup intervals, as half of it and a share; None where a load has none."""
    halves = []
    for load in measured.loads:
        speeds = [points.list_throughputs(_list_records(server.loads[load])) for server in (measured, baseline)]
        halves.append(stopping.measure_loads_half_width(*speeds))
    known = [half for half in halves if half is not None]
    return max(known) if len(known) == len(halves) else None


def _list_records(repeats: list[list[LoadResult]]) -> points.RepeatRecords:
    return [[result.records for result in turns] for turns in repeats]


def _measure_together(work: ServedCellContext, pair: Sequence[MeasuredServer], repeat: int) -> None:
    """Measure a repeat of two servers that are up, each load on both before the next."""
    for _, server, load in measured_loads.order_loads([(work, server) for server in pair], repeat):
        measured_loads.run_load(work, server, load, repeat)


def _measure_one_by_one(
    work: ServedCellContext,
    open_servers: Callable[[list[MeasuredServer]], contextlib.AbstractContextManager[None]],
    pair: Sequence[MeasuredServer],
    repeat: int,
) -> None:
    """Measure a repeat of two servers of which one can be up at a time, in alternating order."""
    for server in measured_loads.order_turns(pair, repeat):
        with open_servers([server]):
            measured_loads.run_repeats(work, server, [repeat])


# The cell


def _build_cell(
    work: ServedCellContext,
    measured: MeasuredServer,
    baseline: MeasuredServer,
    ended: StoppingRecord | None,
    gpus_before: list[gpu_memory.GpuMemory],
    outcome: dict[str, Any],
) -> Cell:
    workload, engine = work.workload, work.params.benchmark_served.engine
    hardware = server_setup.describe_hardware(work, measured, gpus_before)
    version = measured.info.get("version")
    gpu_total = round(sum(gpu.total for gpu in gpus_before), 2) if gpus_before else None
    return Cell(
        workload=work.workload_name,
        checkpoint=measured.checkpoint,
        tree=measured.tree_name,
        draft_sampling=name_draft_sampling(server_setup.samples_drafts(work, measured)),
        engine=engine,
        fingerprint=server_setup.build_fingerprint(work, version, hardware),
        server=ServerDescription(
            command=[_shorten_path(word) for word in measured.command],
            info={key: _shorten_path(value) for key, value in measured.info.items()},
        ),
        memory=measured.memory.model_copy(update={"draft": measured.measure_draft_gib(), "gpu_total": gpu_total}),
        points=[_build_point(work, measured, *item, ended) for item in measured.loads.items()],
        baseline_points=[_build_point(work, baseline, *item) for item in baseline.loads.items()],
        hardware=hardware,
        versions={engine: version} if version else {},
        **workload.model_dump(include=cell.SAMPLING_KEYS),
        **outcome,
    )


def _shorten_path(word: Any) -> Any:
    """Return the last two names of an absolute path, since a cell may be published; other values unchanged."""
    return "/".join(word.split("/")[-2:]) if isinstance(word, str) and word.startswith("/") else word


def _build_point(
    work: ServedCellContext,
    measured: MeasuredServer,
    load: Load,
    repeats: list[list[LoadResult]],
    ended: StoppingRecord | None = None,
) -> LoadPoint:
    results = [result for turns in repeats for result in turns]
    warnings = measured_loads.list_warnings(work, measured, load, results)
    warnings += [measured.notice] if measured.notice else []
    return points.build_point(
        load,
        work.workload.request_rate,
        _list_records(repeats),
        compute_acceptance(measured.draft, results, work.workload.prompts),
        warnings,
        work.references if work.workload.grade else None,
        partial(served_requests.decode_text, work),
        stopping=ended,
    )


def compute_acceptance(draft: ServedDraft | None, loads: list[LoadResult], prompt_set: str) -> Acceptance | None:
    """Return a point's acceptance; None without a draft or without counts. docs/metrics.md: "Accepted drafts of a server"."""
    records = [record for load in loads for record in load.records]
    if draft is None or not any(record.counts for record in records):
        return None
    figures: dict[str, Any] = {}  # the engine's own accept lengths, by its names
    for load in loads:
        figures |= load.engine_figures
        key = registry.get(load.engine).accept_length
        if lengths := [float(r.engine_meta[key]) for r in records if r.engine_meta.get(key) is not None]:
            figures[f"{key}, mean over requests"] = fmean(lengths)
    found = points.pool_counts(records, prompt_set, draft.num_steps, draft.num_draft_tokens)
    return found.model_copy(update={"engine": figures})


if __name__ == "__main__":
    run_stage(main)
