"""serving_costs: time cycles of a serving engine.   python -m stages.serving_costs ENGINE WORKLOAD

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
from typing import NamedTuple

from stages.cells import cost_fit, cycle_times, timing_grid
from stages.cells.cell import LoadPoint
from stages.cells.cost_model import CostModel
from stages.cells.record import Record, name_draft_sampling
from stages.cells.timing_grid import CycleTime, TimingGrid
from stages.engines import cell_engine, gpu_memory
from stages.engines.cell_engine import LoadResult
from stages.measuring import cell_run, load_checks, measured_server, repeats, server_setup, simulated_answers
from stages.measuring.measured_server import MeasuredServer
from stages.measuring.server_setup import ServedWorkload
from stages.params import schema, stage_inputs
from stages.params.tree_shape import Load, TreeShape
from stages.runtime import atomic, scratch
from stages.telemetry.run_stage import run_stage


class KeptLoad(Record):
    """One repeat of a load on a server, kept until all are measured."""

    version: str | None  # of the engine
    turns: list[LoadResult]
    warnings: list[str]


class ServedTimes(NamedTuple):
    """The measurements of one server."""

    server: MeasuredServer
    version: str | None
    points: list[LoadPoint]


def main(engine: str, workload_name: str) -> None:
    params, started = stage_inputs.read_params("serving_costs", engine, workload_name), time.perf_counter()
    settings = params.serving_costs
    context = cell_engine.build_context(params, engine, workload_name, None, None)
    work = ServedWorkload(context, server_setup.read_draft_config(params, settings.checkpoint))
    servers = list(_configure_servers(work))
    version, gpus = work.find_version(), gpu_memory.list_visible_gpus()
    folder = scratch.locate_scratch(
        f"serving_costs-{engine}-{workload_name}",
        context.workload.model_dump(),
        [engine, work.settings.model_dump()],
        settings.model_dump(exclude={"workloads", "trees"}),
        asdict(context.manifest),
        context.prompts.rows(),
        [version, [gpu.name for gpu in gpus]],
    )
    measured = list(_measure_or_read(work, servers, folder))
    _print_warnings(measured)
    seconds = round(time.perf_counter() - started, 2)
    cycles = _list_cycles(measured)
    fit = cost_fit.fit_cost_model([cycle for length_cycles in cycles.values() for cycle in length_cycles])
    grids = [
        _build_grid(work, measured, length, cycles, fit, gpus, seconds)
        for length in dict.fromkeys(length for length, _ in context.workload.list_loads())
    ]
    path = timing_grid.write_serving_costs(workload_name, grids)
    scratch.remove_scratch(folder)
    for grid in grids:
        print(
            f"{grid.engine}, {grid.max_new_tokens} tokens: {len(grid.grid)} cycles timed, and {len(grid.other_lengths)} of other "
            f"answer lengths, each predicted from the others within {grid.fit.error:.1%} (root mean square; at worst "
            f"{grid.fit.error_max:.1%}) -> {path}"
        )


def _configure_servers(work: ServedWorkload) -> Iterator[MeasuredServer]:
    """Yield the baseline and a server of each tree, whose loads are those of simulated answers.

    Raises:
        ValueError: for a tree that the engine can't run, or longer than the positions of target and draft.
    """
    settings, simulated = work.params.serving_costs, simulated_answers.simulate_answers(work)
    yield measured_server.configure_server(work, None, None)
    for name in settings.trees:
        tree = TreeShape.parse(name)
        server = measured_server.configure_server(simulated, settings.checkpoint, tree)
        if reason := server.explain_unsupported():
            raise ValueError(f"serving_costs.trees: {name}: {reason}; take it out of the list")
        work.check_positions(server.num_draft_tokens)
        server.simulated_length = min(settings.accept_length, tree.num_steps + 1)
        server.speculation_flags, server.variables = work.engine.simulate_acceptance(
            server.simulated_length, server.speculation_flags
        )
        yield server


def _measure_or_read(work: ServedWorkload, servers: list[MeasuredServer], folder: Path) -> Iterator[ServedTimes]:
    """Yield the times of each server: those that a killed run left, or measured now.

    As many servers as the machine holds start at once, if they can, and take turns; else each is measured alone.
    """
    at_once = work.count_servers_at_once() if work.can_start_together() else 1
    loads = list(dict.fromkeys(load for server in servers for load in server.context.workload.list_loads()))
    missing = []
    for server in servers:
        paths = _list_paths(folder, server)
        if num_measured := sum(path.exists() for path in paths):
            print(
                f"resumed: {server.name}: {num_measured} of {len(paths)} loads were measured before, kept in {folder}"
            )
        if num_measured < len(paths):
            missing.append(server)
    for start in range(0, len(missing), at_once):
        group = missing[start : start + at_once]
        with measured_server.open_servers(work, group, f"serving_costs-{work.context.workload_name}"):
            for repeat in range(work.context.workload.repeats):  # each on every server before the next
                for server, load in repeats.order_loads(group, loads, repeat):
                    if not _locate_load(folder, server, load, repeat).exists():
                        _measure_load(server, load, repeat, folder)
    for server in servers:
        yield _read_times(server, folder)


def _list_paths(folder: Path, server: MeasuredServer) -> list[Path]:
    """Return where each load of a server is kept, in every repeat."""
    workload = server.context.workload
    return [_locate_load(folder, server, load, n) for n in range(workload.repeats) for load in workload.list_loads()]


def _locate_load(folder: Path, server: MeasuredServer, load: Load, repeat: int) -> Path:
    return folder / f"{server.name}-{load.max_new_tokens}-{load.concurrency}-{repeat}.json"


def _read_load(server: MeasuredServer, path: Path) -> KeptLoad:
    return KeptLoad.read_json(path, timing_grid.name_costs_stage(server.context.engine, server.context.workload_name))


def _measure_load(server: MeasuredServer, load: Load, repeat: int, folder: Path) -> None:
    """Measure one repeat of a load on a server and keep it.

    It is judged together with the server's earlier ones, of a killed run too: one alone may have too few cycles to tell.

    Raises:
        ValueError: if the server did not accept as many tokens as it was told to. The earlier ones are deleted then.
    """
    repeats.run_load(server, load, repeat)
    turns, length = server.results[server.kind][load][-1], server.simulated_length
    if length is not None:
        earlier_paths = [path for path in _list_paths(folder, server) if path.exists()]
        found = [*turns, *(result for path in earlier_paths for result in _read_load(server, path).turns)]
        try:
            answers = sum(len(result.records) for result in found)
            load_checks.check_simulated(server.name, length, *repeats.sum_counts(found), answers)
        except ValueError:
            for path in earlier_paths:
                path.unlink()
            raise
    kept = KeptLoad(version=server.info.get("version"), turns=turns, warnings=server.list_warnings(load, turns))
    atomic.write_json(_locate_load(folder, server, load, repeat), kept.model_dump())


def _read_times(server: MeasuredServer, folder: Path) -> ServedTimes:
    """Return the points of a server, each of all repeats that are kept."""
    workload, found, version = server.context.workload, list[LoadPoint](), None
    for load in workload.list_loads():
        paths = (_locate_load(folder, server, load, repeat) for repeat in range(workload.repeats))
        kept = [_read_load(server, path) for path in paths]
        point, version = cell_run.build_point(server, server.kind, load, [each.turns for each in kept]), kept[0].version
        warnings = dict.fromkeys(warning for each in kept for warning in each.warnings)
        found.append(point.model_copy(update={"warnings": list(warnings)}))
    return ServedTimes(server, version, found)


def _print_warnings(measured: list[ServedTimes]) -> None:
    """Print what is wrong with loads, each sentence once with the loads that it is of."""
    loads: dict[str, list[str]] = {}
    for times in measured:
        for point in times.points:
            for warning in point.warnings:
                loads.setdefault(warning, []).append(f"{times.server.name}, {point.load}")
    for warning, names in loads.items():
        others = f" and {len(names) - 1} other loads" if len(names) > 1 else ""
        print(f"warning: {names[0]}{others}: {warning}", flush=True)


def _list_cycles(measured: list[ServedTimes]) -> dict[int, list[CycleTime]]:
    """Return the cycles of all trees by answer length."""
    found: dict[int, list[CycleTime]] = {}
    for server, _, points in measured:
        for point in points if server.draft else []:
            assert server.draft, "a server without a draft has no cycles"
            cycle = cycle_times.build_cycle_time(server.draft.shape, point)
            found.setdefault(point.max_new_tokens, []).append(cycle)
    return found


def _build_grid(
    work: ServedWorkload,
    measured: list[ServedTimes],
    length: int,
    cycles: dict[int, list[CycleTime]],
    fit: CostModel,
    gpus: list[gpu_memory.GpuMemory],
    seconds: float,
) -> TimingGrid:
    """Return the timing grid of one answer length."""
    points = [point for times in measured for point in times.points if point.max_new_tokens == length]
    requests = [r for point in points for r in point.requests if not r.failed]
    (baseline, version, plain), context = measured[0], work.context
    return TimingGrid(
        definitions=timing_grid.COST_DEFINITIONS,
        engine=context.engine,
        workload=context.workload_name,
        max_new_tokens=length,
        checkpoint=work.params.serving_costs.checkpoint,
        draft=work.draft_config,
        target=[context.manifest.model, context.manifest.revision, context.manifest.config_digest],
        settings={
            "temperature": context.workload.temperature,
            "draft_sampling": name_draft_sampling(measured[-1].server.samples_drafts),
            "context": round(fmean(r.prompt_tokens + (r.output_tokens or 0) / 2 for r in requests)),
            "repeats": context.workload.repeats,
            "simulated_accept_length": work.params.serving_costs.accept_length,
        },
        plain=cycle_times.build_plain_steps(point for point in plain if point.max_new_tokens == length),
        grid=cycles[length],
        other_lengths=[
            cycle for other_length, length_cycles in cycles.items() for cycle in length_cycles if other_length != length
        ],
        fit=fit,
        hardware=work.describe_hardware(baseline.name, gpus),
        versions={context.engine: version} if version else {},
        seconds=seconds,
    )


def _list_stage_gpus() -> list[int]:
    """Return the GPUs of the servers."""
    params = schema.load_params()
    settings = params.serving_costs
    names = [f"{settings.checkpoint}-{tree}" for tree in settings.trees]
    engines = params.benchmark_served.engines
    return max((server_setup.list_stage_gpus(params, engine, ["baseline", *names]) for engine in engines), key=len)


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
