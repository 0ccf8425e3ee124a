"""benchmark_served: measure one cell on a serving engine.   python -m stages.benchmark_served WORKLOAD [CHECKPOINT TREE]

A cell is one server configuration under one workload. Without a checkpoint and a tree it is the baseline: the same server
without a draft. A workload that is a sweep has a point for each answer length and concurrency, all measured on one server.
The stage starts the server and stops it, or uses a running one (benchmark_served.server.base_urls). A configuration that the
engine can't run gives a cell of status "unsupported"; a server that would measure something else stops the stage with an error.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from stages.cells import load_points, served_points, served_records, torch_records
from stages.cells.record import name_draft_sampling
from stages.cells.stopping import RepeatRule
from stages.cells.torch_records import StageCost, StoppingRecord
from stages.measuring import measured_loads, server_setup
from stages.measuring import requests as served_requests
from stages.measuring.measured_loads import OpenedServer
from stages.measuring.requests import ServedCellContext
from stages.params import stage_inputs
from stages.params.tree_shape import Load, TreeShape
from stages.serving import gpu_memory
from stages.serving.load_generator import LoadResult
from stages.serving.measured_server import MeasuredServer
from stages.telemetry import gpu_energy
from stages.telemetry.run_stage import run_stage


def main(workload_name: str, checkpoint_name: str = "", tree_name: str = "") -> None:
    if bool(checkpoint_name) != bool(tree_name):
        raise ValueError(
            f"expected WORKLOAD [CHECKPOINT TREE], found {workload_name} {checkpoint_name}; a cell with a draft needs both"
        )
    params = (
        stage_inputs.read_params("benchmark_served", workload_name, checkpoint_name, tree_name)
        if checkpoint_name
        else stage_inputs.read_params("benchmark_served_baseline", workload_name)
    )
    config_name = served_records.name_server_config(checkpoint_name or None, tree_name or None)
    meter, started = gpu_energy.EnergyMeter(server_setup.list_stage_gpus(params, [config_name])), time.perf_counter()
    gpus_before = gpu_memory.list_visible_gpus()
    tree = TreeShape.parse(tree_name) if checkpoint_name else None
    draft_config = server_setup.read_draft_config(params, checkpoint_name) if checkpoint_name else {}
    work = server_setup.build_context(params, workload_name, draft_config)
    measured = server_setup.configure_server(work, checkpoint_name, tree, draft_config)
    baseline = MeasuredServer(served_records.name_server_config(None, None))
    reason = server_setup.explain_unsupported(work, measured, draft_config)
    ended = None
    if not reason:
        server_setup.check_positions(work, measured, draft_config)
        ended = _measure_repeats(work, measured, baseline if tree and params.benchmark_served.interleave else None)
    took = StageCost(round(time.perf_counter() - started, 2), meter.names(), meter.joules())
    path = _write_cell(work, measured, baseline, reason, ended, gpus_before, took)
    name = served_records.name_served_cell(workload_name, measured.checkpoint, measured.tree_name)
    status = f"{served_records.UNSUPPORTED}: {reason}" if reason else served_records.RAN
    print(f"{name}: {status} -> {path}")


# Measuring


def _measure_repeats(
    work: ServedCellContext, measured: MeasuredServer, baseline: MeasuredServer | None
) -> StoppingRecord | None:
    """Measure all repeats of all points; return why there are no more, None without `baseline`.

    With `baseline` each repeat also has a server without a draft, in alternating order, so that a drifting machine affects
    both alike.
    """
    plan = server_setup.build_server_plan(work)
    owner = served_records.name_served_cell(work.workload_name, measured.checkpoint, measured.tree_name)
    open_servers = partial(measured_loads.open_servers, plan, owner=owner)
    if baseline is None:
        with open_servers([measured]) as (opened,):
            measured_loads.run_repeats(work, opened, list(range(work.workload.repeats)))
        return None
    if plan.count_servers_at_once() < 2:
        return _alternate(
            work, measured, baseline, partial(_measure_one_by_one, work, open_servers, (baseline, measured))
        )
    with open_servers([baseline, measured]) as pair:
        return _alternate(work, measured, baseline, partial(_measure_together, work, pair))


def _alternate(
    work: ServedCellContext,
    measured: MeasuredServer,
    baseline: MeasuredServer,
    measure_repeat: Callable[[int], None],
) -> StoppingRecord:
    """Measure repeats of both servers, until the workload's rule ends them; return why there are no more."""
    rule = RepeatRule.of_workload(work.workload)
    repeat, ended = 0, None
    while ended is None:
        measure_repeat(repeat)
        repeat += 1
        ended = rule.judge(repeat, served_points.measure_widest_half(measured, baseline))
    return ended


def _measure_together(work: ServedCellContext, pair: list[OpenedServer], repeat: int) -> None:
    """Measure a repeat of two servers that are up, each load on both before the next."""
    for _, opened, load in measured_loads.order_loads([(work, server) for server in pair], repeat):
        measured_loads.run_load(work, opened, load, repeat)


def _measure_one_by_one(
    work: ServedCellContext,
    open_servers: Callable[[list[MeasuredServer]], contextlib.AbstractContextManager[list[OpenedServer]]],
    pair: Sequence[MeasuredServer],
    repeat: int,
) -> None:
    """Measure a repeat of two servers of which one can be up at a time, in alternating order."""
    for server in measured_loads.order_turns(pair, repeat):
        with open_servers([server]) as (opened,):
            measured_loads.run_repeats(work, opened, [repeat])


# The cell


def _write_cell(
    work: ServedCellContext,
    measured: MeasuredServer,
    baseline: MeasuredServer,
    reason: str | None,
    ended: StoppingRecord | None,
    gpus_before: list[gpu_memory.GpuMemory],
    took: StageCost,
) -> Path:
    params, workload, draft = work.params, work.workload, measured.draft
    hardware = server_setup.describe_hardware(work, measured, gpus_before)
    version = measured.info.get("version")
    cell = {
        "workload": work.workload_name,
        "checkpoint": measured.checkpoint,
        "tree": measured.tree_name,
        "num_steps": draft and draft.num_steps,
        "topk": draft and draft.topk,
        "num_draft_tokens": draft and draft.num_draft_tokens,
        "draft_sampling": name_draft_sampling(server_setup.samples_drafts(work, measured)),
        "engine": params.benchmark_served.engine,
        "status": served_records.UNSUPPORTED if reason else served_records.RAN,
        "reason": reason,
        "definitions": torch_records.DEFINITIONS,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        "fingerprint": server_setup.build_fingerprint(work, version, hardware),
        "server": served_points.describe_server(measured).model_dump(),
        "memory": served_points.describe_memory(measured, gpus_before).model_dump(),
        "points": [
            _build_point(work, measured, *item).model_copy(update={"stopping": ended}).model_dump()
            for item in measured.loads.items()
        ],
        "baseline_points": [_build_point(work, baseline, *item).model_dump() for item in baseline.loads.items()],
        "hardware": hardware,
        "versions": {params.benchmark_served.engine: version} if version else {},
        "seed": workload.seed,
        **asdict(took),
    }
    return served_records.write_served_cell(cell)


def _build_point(
    work: ServedCellContext, measured: MeasuredServer, load: Load, repeats: list[list[LoadResult]]
) -> served_records.LoadPoint:
    records = [[result.records for result in turns] for turns in repeats]
    requests = load_points.list_requests(records)
    grades: list[bool | None] = [None] * len(requests)
    if work.workload.grade:
        unsandboxed = work.params.benchmark.allow_unsandboxed_code
        grades = load_points.grade_first_turns(
            requests, work.references, lambda record: served_requests.decode_text(work, record), unsandboxed
        )
    results = [result for turns in repeats for result in turns]
    warnings = measured_loads.list_warnings(work, measured, load, results)
    warnings += [measured.notice] if measured.notice else []
    return load_points.build_point(
        load,
        work.workload.request_rate,
        records,
        grades,
        work.references,
        served_points.compute_acceptance(measured.draft, results, work.workload.prompts),
        warnings,
    )


if __name__ == "__main__":
    run_stage(main)
