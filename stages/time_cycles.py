"""time_cycles: time the cycles of an engine with one draft.   python -m stages.time_cycles ENGINE CHECKPOINT

Seconds of cycles of several trees, and of steps of plain decoding, at one number of requests or several. The cost model is fitted
to them, and with replay's tau the report predicts speedups. A cost measured on one engine says nothing of another. Times depend
on a draft's shapes, not on its weights: e000 stands for every EAGLE-3 checkpoint that train_draft makes from it.

The torch engine decodes contexts of the workload's prompts (engines/torch_cycles.py). Of an engine that serves, servers of every
tree, and of the target alone, get the workload's loads. They simulate how many drafts are accepted, so a draft that was never
trained does, and each cycle yields a known number of tokens; no tau is measured. The cycles of all answer lengths make one fit,
with terms for the prompts of other requests that are read meanwhile (measuring/simulated_answers.py). docs/cost.md
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from stages.cells import cost_fit, cycle_times, timing_grid
from stages.cells.cell import LoadPoint
from stages.cells.record import DraftSampling, Record, name_draft_sampling
from stages.cells.timing_grid import CycleTime, MeasuredGrid, TimingGrid
from stages.engines import cell_engine, gpu_memory
from stages.measuring import cell_run, measured_server, repeats, server_setup, simulated_answers
from stages.measuring.measured_server import MeasuredServer
from stages.measuring.server_setup import ServedWorkload
from stages.params import schema, stage_inputs
from stages.params.engines import is_in_process
from stages.params.tree_shape import TreeShape
from stages.runtime import atomic, scratch
from stages.target import manifest
from stages.telemetry.run_stage import run_stage

MIN_SIMULATED_CYCLES = 50  # fewer say little of simulated acceptance
MAX_DEVIATION = 0.2  # of a simulated accept length from the one that was asked


class ServerTimes(Record):
    """The measurements of one server, kept until all servers have theirs."""

    version: str | None  # of the engine
    draft_sampling: DraftSampling
    points: list[LoadPoint]


def main(engine: str, checkpoint: str) -> None:
    started, params = time.perf_counter(), stage_inputs.read_params("time_cycles", engine, checkpoint)
    if is_in_process(engine):
        from stages.engines import torch_cycles  # the engine's kernels, which no server needs

        measured = torch_cycles.time_cycles(params, checkpoint)
    else:
        measured = _time_servers(params, engine, checkpoint)
    target = manifest.read_manifest()
    fit = cost_fit.fit_cost_model([*measured[0].grid, *measured[0].other_lengths])
    grids = [
        TimingGrid(
            **vars(found),
            engine=engine,
            checkpoint=checkpoint,
            target=[target.model, target.revision, target.config_digest],
            fit=fit,
            seconds=round(time.perf_counter() - started, 2),
        )
        for found in measured
    ]
    path = timing_grid.write_grids(grids)
    for grid in grids:
        length = f", {grid.max_new_tokens} tokens" if grid.max_new_tokens else ""
        others = f", and {len(grid.other_lengths)} of other answer lengths" if grid.other_lengths else ""
        print(
            f"{engine}{length}: {len(grid.grid)} cycles timed in {grid.seconds:.1f} s{others}; a plain step takes "
            f"{1000 * grid.plain[0].step_s:.2f} ms; cycles left out of the fit are predicted within {fit.error:.1%} (root mean "
            f"square; at worst {fit.error_max:.1%}) -> {path}"
        )


# Servers


def _time_servers(params: schema.Params, engine: str, checkpoint: str) -> list[MeasuredGrid]:
    """Return a grid for each answer length of the workload. Raises ValueError for servers that would measure something else."""
    context = cell_engine.build_context(params, engine, params.time_cycles.workload, None, None)
    work = ServedWorkload(context, server_setup.read_draft_config(params, checkpoint))
    servers = list(_configure_servers(work, checkpoint))
    if len(servers) == 1:
        raise ValueError(f"{engine} runs none of time_cycles.trees with {checkpoint}, expected some; name others")
    gpus = gpu_memory.list_visible_gpus()
    folder = scratch.locate_scratch(
        f"time_cycles-{engine}-{checkpoint}",
        context.workload.model_dump(),
        work.settings.model_dump(),
        params.time_cycles.accept_length,
        asdict(context.manifest),
        context.prompts.rows(),
        work.draft_config,
        [work.find_version(), [gpu.name for gpu in gpus]],
    )
    missing = [server for server in servers if not _locate_times(folder, server).exists()]
    if len(missing) < len(servers):
        print(
            f"resumed: {len(servers) - len(missing)} of {len(servers)} servers were measured before, kept in {folder}"
        )
    at_once = work.count_servers_at_once() if work.can_start_together() else 1
    for start in range(0, len(missing), at_once):
        _measure_servers(work, missing[start : start + at_once], checkpoint, folder)
    stage = timing_grid.name_stage(engine, checkpoint)
    measured = [(server, ServerTimes.read_json(_locate_times(folder, server), stage)) for server in servers]
    _print_warnings(measured)
    grids = _build_grids(work, measured, gpus)
    scratch.remove_scratch(folder)
    return grids


def _configure_servers(work: ServedWorkload, checkpoint: str) -> Iterator[MeasuredServer]:
    """Yield the baseline and a server of each tree that the engine can run, whose loads are those of simulated answers.

    Raises:
        ValueError: for a tree that is longer than the positions of target and draft.
    """
    settings, simulated = work.params.time_cycles, simulated_answers.simulate_answers(work)
    yield measured_server.configure_server(work, None, None)
    for name in settings.trees:
        tree = TreeShape.parse(name)
        server = measured_server.configure_server(simulated, checkpoint, tree)
        if reason := server.explain_unsupported():
            print(f"left out of time_cycles.trees: {name} with {checkpoint}: {reason}", flush=True)
            continue
        work.check_positions(server.num_draft_tokens)
        server.simulated_length = min(settings.accept_length, tree.num_steps + 1)
        server.speculation_flags, server.variables = work.engine.simulate_acceptance(
            server.simulated_length, server.speculation_flags
        )
        yield server


def _locate_times(folder: Path, server: MeasuredServer) -> Path:
    return folder / f"{server.name}.json"


def _measure_servers(work: ServedWorkload, servers: list[MeasuredServer], checkpoint: str, folder: Path) -> None:
    """Measure servers that are open together, in turns, and keep what was measured on each."""
    loads = list(dict.fromkeys(load for server in servers for load in server.context.workload.list_loads()))
    with measured_server.open_servers(work, servers, f"time_cycles-{checkpoint}"):
        for repeat in range(work.context.workload.repeats):  # each on every server before the next
            for server, load in repeats.order_loads(servers, loads, repeat):
                repeats.run_load(server, load, repeat)
                _check_simulated(server)
    for server in servers:
        points = [
            cell_run.build_point(server, server.kind, load, of_load)
            for load, of_load in server.results[server.kind].items()
        ]
        drafts = name_draft_sampling(server.samples_drafts)
        times = ServerTimes(version=server.info.get("version"), draft_sampling=drafts, points=points)
        atomic.write_json(_locate_times(folder, server), times.model_dump())


def _check_simulated(server: MeasuredServer) -> None:
    """Raise ValueError if a server's cycles do not yield as many tokens as it was told: it simulates nothing, or another length.

    The last cycle of each answer may be cut, to one token at least.
    """
    results = [result for of_load in server.results[server.kind].values() for turns in of_load for result in turns]
    (cycles, accepted), length = repeats.sum_counts(results), server.simulated_length
    if length is None or cycles < MIN_SIMULATED_CYCLES:
        return
    num_answers = sum(len(result.records) for result in results)
    found = 1 + accepted / cycles
    uncut = found + num_answers * (math.ceil(length) - 1) / cycles
    if found > length * (1 + MAX_DEVIATION) or uncut < length * (1 - MAX_DEVIATION):
        raise ValueError(
            f"{server.name}: {found:.2f} tokens in each of {cycles} cycles, expected {length:g} (time_cycles.accept_length): "
            "the engine's version ignores the setting (docs/cost.md), or it is of base_urls: leave it out there"
        )


def _print_warnings(measured: list[tuple[MeasuredServer, ServerTimes]]) -> None:
    """Print what is wrong with loads, each sentence once with the loads that it is of."""
    loads: dict[str, list[str]] = {}
    for server, times in measured:
        for point in times.points:
            for warning in point.warnings:
                loads.setdefault(warning, []).append(f"{server.name}, {point.load}")
    for warning, names in loads.items():
        others = f" and {len(names) - 1} other loads" if len(names) > 1 else ""
        print(f"warning: {names[0]}{others}: {warning}", flush=True)


def _build_grids(
    work: ServedWorkload, measured: list[tuple[MeasuredServer, ServerTimes]], gpus: list[gpu_memory.GpuMemory]
) -> list[MeasuredGrid]:
    """Return a grid of each answer length of the workload."""
    (baseline, plain), context = measured[0], work.context
    cycles: dict[int, list[CycleTime]] = {}
    for draft, times in ((server.draft, times) for server, times in measured):
        for point in times.points if draft else []:
            assert draft, "a server without a draft has no cycles"
            cycles.setdefault(point.max_new_tokens, []).append(cycle_times.build_cycle_time(draft.shape, point))
    grids = []
    for length in dict.fromkeys(length for length, _ in context.workload.list_loads()):
        points = [point for _, times in measured for point in times.points if point.max_new_tokens == length]
        requests = [r for point in points for r in point.requests if not r.failed]
        grids.append(
            MeasuredGrid(
                workload=context.workload_name,
                max_new_tokens=length,
                draft=work.draft_config,
                settings={
                    "temperature": context.workload.temperature,
                    "draft_sampling": measured[-1][1].draft_sampling,
                    "context": round(fmean(r.prompt_tokens + (r.output_tokens or 0) / 2 for r in requests)),
                    "repeats": context.workload.repeats,
                    "simulated_accept_length": work.params.time_cycles.accept_length,
                },
                plain=cycle_times.build_plain_steps(p for p in plain.points if p.max_new_tokens == length),
                grid=cycles[length],
                other_lengths=[cycle for other, found in cycles.items() if other != length for cycle in found],
                hardware=work.describe_hardware(baseline.name, gpus),
                versions={context.engine: plain.version} if plain.version else {},
            )
        )
    return grids


def _list_stage_gpus() -> list[int]:
    """Return the GPUs of the largest engine."""
    params = schema.load_params()
    sizes = [params.benchmark_served.get_server(engine).tp for engine in params.time_cycles.served_engines]
    return params.target.gpus(max([1, *sizes]))


if __name__ == "__main__":
    run_stage(main, _list_stage_gpus)
