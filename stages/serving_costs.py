"""serving_costs: time cycles of a serving engine.   python -m stages.serving_costs WORKLOAD

Serves every tree of `serving_costs.trees`, and the target alone, under the loads of one workload. The engine simulates how many
drafts are accepted, so a draft that was never trained does, and each cycle yields a known number of tokens. From the times of
cycles and plain steps comes a timing grid for each answer length; with replay's tau the report predicts speedups at each
concurrency. No tau is measured here. The cycles of all lengths make one fit, of which two terms are the prompts of other requests
that are read meanwhile (measuring/simulated_answers.py). docs/cost.md
"""

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.cells import cost_fit, cycle_times, points, timing_grid
from stages.cells.cell import LoadPoint
from stages.cells.cost_model import CostModel
from stages.cells.record import Record, name_draft_sampling
from stages.cells.timing_grid import CycleTime, TimingGrid
from stages.engines import gpu_memory
from stages.measuring import load_checks, measured_loads, server_setup, simulated_answers
from stages.measuring.measured_server import MeasuredServer, ServerPlan
from stages.measuring.requests import ServedCellContext
from stages.params import schema, stage_inputs
from stages.params.tree_shape import Load, TreeShape
from stages.runtime import atomic, scratch
from stages.telemetry.run_stage import run_stage


class ServedTimes(Record):
    """The measurements of one server: of one load in one repeat, kept until all are measured, or of all loads and repeats."""

    version: str | None  # of the engine
    points: list[LoadPoint]


def main(workload_name: str) -> None:
    params, started = stage_inputs.read_params("serving_costs", workload_name), time.perf_counter()
    settings = params.serving_costs
    draft_config = server_setup.read_draft_config(params, settings.checkpoint)
    work = server_setup.build_context(params, workload_name, draft_config)
    servers = list(_configure_servers(work, draft_config))
    plan = server_setup.build_server_plan(work)
    version, gpus = plan.find_version(), gpu_memory.list_visible_gpus()
    folder = scratch.locate_scratch(
        f"serving_costs-{workload_name}",
        work.workload.model_dump(),
        params.benchmark_served.model_dump(include={"engine", "server"}),
        settings.model_dump(exclude={"workloads", "trees"}),
        asdict(work.manifest),
        work.prompts.rows(),
        [version, [gpu.name for gpu in gpus]],
    )
    measured = list(_measure_or_read(work, plan, servers, folder))
    _print_warnings(measured)
    seconds = round(time.perf_counter() - started, 2)
    cycles = _list_cycles(measured)
    fit = cost_fit.fit_cost_model([cycle for length_cycles in cycles.values() for cycle in length_cycles])
    grids = [
        _build_grid(work, measured, length, cycles, fit, draft_config, gpus, seconds)
        for length in dict.fromkeys(length for length, _ in work.workload.list_loads())
    ]
    path = timing_grid.write_serving_costs(workload_name, grids)
    scratch.remove_scratch(folder)
    for grid in grids:
        print(
            f"{grid.engine}, {grid.max_new_tokens} tokens: {len(grid.grid)} cycles timed, and {len(grid.other_lengths)} of other "
            f"answer lengths, each predicted from the others within {grid.fit.error:.1%} (root mean square; at worst "
            f"{grid.fit.error_max:.1%}) -> {path}"
        )


def _configure_servers(work: ServedCellContext, draft_config: dict[str, Any]) -> Iterator[MeasuredServer]:
    """Yield the baseline and a server of each tree.

    Raises:
        ValueError: for a tree that the engine can't run, or longer than the positions of target and draft.
    """
    settings = work.params.serving_costs
    yield server_setup.configure_server(work, "", None, {})
    for name in settings.trees:
        tree = TreeShape.parse(name)
        server = server_setup.configure_server(work, settings.checkpoint, tree, draft_config)
        if reason := server_setup.explain_unsupported(work, server, draft_config):
            raise ValueError(f"serving_costs.trees: {name}: {reason}; take it out of the list")
        server_setup.check_positions(work, server, draft_config)
        server.simulated_length = min(settings.accept_length, tree.num_steps + 1)
        server.speculation_flags, server.variables = work.engine.simulate_acceptance(
            server.simulated_length, server.speculation_flags
        )
        yield server


def _measure_or_read(
    work: ServedCellContext, plan: ServerPlan, servers: list[MeasuredServer], folder: Path
) -> Iterator[tuple[MeasuredServer, ServedTimes]]:
    """Yield the times of each server: those that a killed run left, or measured now.

    As many servers as the machine holds start at once, if they can, and take turns; else each is measured alone.
    """
    at_once = plan.count_servers_at_once() if plan.can_start_together() else 1
    simulated = simulated_answers.simulate_answers(work)
    contexts = {server.config_name: work if server.simulated_length is None else simulated for server in servers}
    missing = []
    for server in servers:
        paths = _list_paths(folder, server, contexts[server.config_name])
        if num_measured := sum(path.exists() for path in paths):
            print(
                f"resumed: {server.config_name}: {num_measured} of {len(paths)} loads were measured before, kept in {folder}"
            )
        if num_measured < len(paths):
            missing.append(server)
    for start in range(0, len(missing), at_once):
        group = missing[start : start + at_once]
        pairs = [(contexts[server.config_name], server) for server in group]
        with measured_loads.open_servers(plan, group, f"serving_costs-{work.workload_name}"):
            for repeat in range(work.workload.repeats):  # each on every server before the next
                for context, server, load in measured_loads.order_loads(pairs, repeat):
                    if not _locate_times(folder, server, load, repeat).exists():
                        _measure_load(context, server, load, repeat, folder)
    for server in servers:
        paths = _list_paths(folder, server, contexts[server.config_name])
        yield server, _join_repeats([_read_times(work, path) for path in paths])


def _read_times(work: ServedCellContext, path: Path) -> ServedTimes:
    return ServedTimes.read_json(path, f"serving_costs@{work.workload_name}")


def _list_paths(folder: Path, server: MeasuredServer, work: ServedCellContext) -> list[Path]:
    """Return where the times of each load of a server are kept, in every repeat."""
    loads = work.workload.list_loads()
    return [_locate_times(folder, server, load, repeat) for repeat in range(work.workload.repeats) for load in loads]


def _locate_times(folder: Path, server: MeasuredServer, load: Load, repeat: int) -> Path:
    return folder / f"{server.config_name}-{load.max_new_tokens}-{load.concurrency}-{repeat}.json"


def _measure_load(work: ServedCellContext, server: MeasuredServer, load: Load, repeat: int, folder: Path) -> None:
    """Measure one repeat of a load on a server and keep its times.

    It is judged together with the server's earlier ones, of a killed run too: one alone may have too few cycles to tell.

    Raises:
        ValueError: if the server did not accept as many tokens as it was told to. The earlier times are deleted then.
    """
    measured_loads.run_load(work, server, load, repeat)
    records = [[result.records for result in server.loads[load][-1]]]
    warnings = measured_loads.list_warnings(work, server, load, server.loads[load][-1])
    point = points.build_point(load, work.workload.request_rate, records, None, warnings)
    rows = [row.model_copy(update={"repeat": repeat}) for row in point.requests]
    times = ServedTimes(version=server.info.get("version"), points=[point.model_copy(update={"requests": rows})])
    length = server.simulated_length
    if length is not None:
        earlier_paths = [path for path in _list_paths(folder, server, work) if path.exists()]
        all_times = [times, *(_read_times(work, path) for path in earlier_paths)]
        found = [row for load_times in all_times for point in load_times.points for row in point.requests]
        cycles, accepted = sum(row.cycles or 0 for row in found), sum(row.accepted or 0 for row in found)
        try:
            load_checks.check_simulated(server.config_name, length, cycles, accepted, len(found))
        except ValueError:
            for path in earlier_paths:
                path.unlink()
            raise
    atomic.write_json(_locate_times(folder, server, load, repeat), times.model_dump())


def _join_repeats(all_times: list[ServedTimes]) -> ServedTimes:
    """Return the times of one server, with one point for each load, of all its repeats."""
    by_load: dict[Load, list[LoadPoint]] = {}
    for point in (point for times in all_times for point in times.points):
        by_load.setdefault(point.load, []).append(point)
    points = [
        repeats[0].model_copy(
            update={
                "loads": [load for point in repeats for load in point.loads],
                "requests": [row for point in repeats for row in point.requests],
                "warnings": list(dict.fromkeys(warning for point in repeats for warning in point.warnings)),
            }
        )
        for repeats in by_load.values()
    ]
    return ServedTimes(version=all_times[0].version, points=points)


def _print_warnings(measured: list[tuple[MeasuredServer, ServedTimes]]) -> None:
    """Print what is wrong with loads, each sentence once with the loads that it is of."""
    loads: dict[str, list[str]] = {}
    for server, times in measured:
        for point in times.points:
            for warning in point.warnings:
                loads.setdefault(warning, []).append(f"{server.config_name}, {point.load}")
    for warning, names in loads.items():
        others = f" and {len(names) - 1} other loads" if len(names) > 1 else ""
        print(f"warning: {names[0]}{others}: {warning}", flush=True)


def _list_cycles(measured: list[tuple[MeasuredServer, ServedTimes]]) -> dict[int, list[CycleTime]]:
    """Return the cycles of all trees by answer length."""
    found: dict[int, list[CycleTime]] = {}
    for server, times in measured:
        for point in times.points if server.tree_name else []:
            cycle = cycle_times.build_cycle_time(TreeShape.parse(server.tree_name or ""), point)
            found.setdefault(point.max_new_tokens, []).append(cycle)
    return found


def _build_grid(
    work: ServedCellContext,
    measured: list[tuple[MeasuredServer, ServedTimes]],
    length: int,
    cycles: dict[int, list[CycleTime]],
    fit: CostModel,
    draft_config: dict[str, Any],
    gpus: list[gpu_memory.GpuMemory],
    seconds: float,
) -> TimingGrid:
    """Return the timing grid of one answer length."""
    points = [point for _, times in measured for point in times.points if point.max_new_tokens == length]
    requests = [r for point in points for r in point.requests if not r.failed]
    baseline, plain_times = measured[0]
    return TimingGrid(
        definitions=timing_grid.COST_DEFINITIONS,
        engine=work.setup.engine,
        workload=work.workload_name,
        max_new_tokens=length,
        checkpoint=work.params.serving_costs.checkpoint,
        draft=draft_config,
        target=[work.manifest.model, work.manifest.revision, work.manifest.config_digest],
        settings={
            "temperature": work.workload.temperature,
            "draft_sampling": name_draft_sampling(server_setup.samples_drafts(work, measured[-1][0])),
            "context": round(fmean(r.prompt_tokens + (r.output_tokens or 0) / 2 for r in requests)),
            "repeats": work.workload.repeats,
            "simulated_accept_length": work.params.serving_costs.accept_length,
        },
        plain=cycle_times.build_plain_steps(point for point in plain_times.points if point.max_new_tokens == length),
        grid=cycles[length],
        other_lengths=[
            cycle for other_length, length_cycles in cycles.items() for cycle in length_cycles if other_length != length
        ],
        fit=fit,
        hardware=server_setup.describe_hardware(work, baseline, gpus),
        versions={work.setup.engine: plain_times.version} if plain_times.version else {},
        seconds=seconds,
    )


def _list_stage_gpus() -> list[int]:
    """Return the GPUs of the servers."""
    params = schema.load_params()
    settings = params.serving_costs
    names = [f"{settings.checkpoint}-{tree}" for tree in settings.trees]
    return server_setup.list_stage_gpus(params, ["baseline", *names])


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
