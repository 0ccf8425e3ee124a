"""benchmark: measure one cell on the torch engine.   python -m stages.benchmark WORKLOAD CHECKPOINT TREE

Plain and speculative decoding of the same prompts alternate, so that a drifting machine affects both alike: answer by answer,
or, for a workload with several prompts at once or a sweep, load by load, as a server is measured (measuring/torch_loads.py). In
float32 their greedy outputs are expected to be identical; the share of identical answers is a metric of every greedy cell. Above
temperature 0 both use the same seed, so that neither is timed on a longer answer (engine/sampling.py), unless drafts are sampled
too (benchmark.draft_sampling): then they share the distribution alone. With several GPUs each process has a share of the prompts
and of the slots; the first process writes the cell.

With `benchmark.mode: eagle` or `baseline` only one of the two decodings runs, in loads, and the cell has no speedup.

A tree that the draft can't grow, deeper than a block draft's block, gives a cell of status "unsupported", and nothing is loaded.
A draft of which no token is accepted in the first hundred cycles gives one of status "skipped", and nothing is measured.
"""

import itertools
import time
from typing import Any

import torch

from stages.cells import cell, metrics, points, stopping
from stages.cells.cell import (
    PLAIN,
    SKIPPED,
    SPECULATIVE,
    UNSUPPORTED,
    Cell,
    DraftSize,
    LoadPoint,
    Memory,
    StoppingRecord,
)
from stages.cells.points import RepeatRecords
from stages.cells.record import name_draft_sampling
from stages.cells.stopping import RepeatRule
from stages.engine.device_placement import measure_remaining_memory
from stages.grading import grade
from stages.measuring import torch_context, torch_loads
from stages.measuring.torch_context import TorchCellContext
from stages.params import schema, stage_inputs
from stages.params.engines import TORCH
from stages.params.section import get_named
from stages.params.tree_shape import Load, parse_shape
from stages.params.units import GIB
from stages.prompts import workload_prompts
from stages.runtime import distributed
from stages.target import manifest
from stages.telemetry import gpu_energy
from stages.telemetry.run_stage import run_stage


def main(workload_name: str, checkpoint_name: str, tree_name: str) -> None:
    names = workload_name, checkpoint_name, tree_name
    params = stage_inputs.read_params("benchmark", *names)
    if reason := torch_context.explain_unsupported(params, workload_name, checkpoint_name, parse_shape(tree_name)):
        found = _describe_cell(params, *names, status=UNSUPPORTED, reason=reason)
        print(f"{tree_name} at {checkpoint_name}: {UNSUPPORTED}: {reason} -> {found.write()}")
        return
    torch_context.check_gpus(params)
    processes = params.benchmark.processes
    try:
        launched = distributed.launch_ranks("benchmark", list(names), processes)
    except ValueError:
        raise ValueError(
            f"one of {processes} processes ended early; its output is above. Correct that and run again, or set "
            "benchmark.num_gpus_total to num_gpus_per_model for one process"
        ) from None
    if not launched:
        with distributed.join_process_group(params.target.device) as ranks:
            _run_cell(params, *names, ranks)


def _run_cell(
    params: schema.Params, workload_name: str, checkpoint_name: str, tree_name: str, ranks: distributed.RankContext
) -> None:
    torch.set_num_threads(params.benchmark.num_threads)
    meter = gpu_energy.EnergyMeter(params.target.gpus(params.benchmark.num_gpus_total))
    started, tree, names = time.perf_counter(), parse_shape(tree_name), (workload_name, checkpoint_name, tree_name)
    workload = get_named(params.benchmark.workloads, workload_name, "benchmark.workloads")
    prompts, warmup = workload_prompts.read_prompts(workload_name)
    if workload.grade:
        workload_prompts.check_references(workload_name, prompts)
        grade.check_programs(prompts["reference"], workload_name, params.benchmark.run_generated_code)
    in_turns = params.benchmark.is_decoded_one_by_one(workload_name)
    work = torch_context.build_context(params, workload, checkpoint_name, tree, ranks, prompts, warmup, in_turns)
    memory = torch_context.estimate_memory(work)
    if ranks.first:
        print(f"memory of a process: {memory}", flush=True)
    memory.check(measure_remaining_memory(work.engine.model, params.benchmark.max_gpu_memory), work.engine.device)
    torch_loads.warm_up(work)
    if reason := torch_loads.explain_skipped(work):
        if ranks.first:
            skipped = _describe_cell(params, *names, status=SKIPPED, reason=reason)
            print(f"{tree_name} at {checkpoint_name}: {SKIPPED}: {reason} -> {skipped.write()}")
        return
    found: dict[str, list[LoadPoint]] = {SPECULATIVE: [], PLAIN: []}  # of a kind that does not run: none
    for load in workload.list_loads():
        for kind, point in _measure_load(work, load).items():
            found[kind].append(point)
    if not ranks.first:
        return
    target = manifest.read_manifest()
    sizes = {"weights": memory.target, "draft": memory.draft, "kv_cache": memory.cache}
    gib = {name: round(size / GIB, 3) for name, size in sizes.items()}
    measured = _describe_cell(
        params,
        *names,
        draft_sampling=name_draft_sampling(work.samples_drafts),
        fingerprint={"target": [target.model, target.revision, target.config_digest]},  # the baseline is its own
        memory=Memory(**gib, kv_tokens=memory.cache_tokens),  # estimated, of one process
        draft=_measure_draft(work) if in_turns else None,
        points=found[SPECULATIVE],
        baseline_points=found[PLAIN],
        seconds=round(time.perf_counter() - started, 2),
        gpus=meter.names(),
        joules=meter.joules(),
    )
    pairs = itertools.zip_longest(found[SPECULATIVE], found[PLAIN])
    summary = "; ".join(_summarise(point, plain, workload.temperature == 0) for point, plain in pairs)
    print(f"{tree_name} at {checkpoint_name}: {summary} -> {measured.write()}")


def _describe_cell(
    params: schema.Params, workload_name: str, checkpoint_name: str, tree_name: str, **found: Any
) -> Cell:
    """Return the cell with what was found; without it, as it is known before anything is measured."""
    settings = params.benchmark
    workload = get_named(settings.workloads, workload_name, "benchmark.workloads")
    known: dict[str, Any] = {"status": cell.RAN, "seconds": 0.0, "gpus": [], "joules": None}
    return Cell(
        workload=workload_name,
        checkpoint=checkpoint_name,
        tree=tree_name,
        engine=TORCH.name,
        hardware=cell.describe_hardware(params.target.device, settings.num_threads, settings.num_gpus_total),
        versions=cell.list_versions("torch", "transformers"),
        **workload.model_dump(include=cell.SAMPLING_KEYS),
        **known | found,
    )


def _measure_load(work: TorchCellContext, load: Load) -> dict[str, LoadPoint]:
    """Repeat a load until that was often enough; return its point by kind of decoding."""
    records: dict[str, RepeatRecords] = {kind: [] for kind in torch_loads.list_kinds(work)}
    started, process_started = time.perf_counter(), time.process_time()

    def measure_repeat(repeat: int) -> None:
        for kind, turns in torch_loads.run_repeat(work, load, repeat).items():
            records[kind].append(turns)

    workload = work.workload
    rule = RepeatRule(workload.fewest_repeats, workload.most_repeats, workload.half_width)
    # All processes find the same.
    ended = rule.run(measure_repeat, lambda: _measure_half_width(work, records), prints=work.ranks.first)
    share = (time.process_time() - process_started) / (time.perf_counter() - started)
    if work.in_turns:
        answers = [request.record for repeats in records.values() for request in points.list_requests(repeats)]
        wall_s = sum(record.e2e_s for record in answers)
        share = sum(record.process_s or 0.0 for record in answers) / wall_s if wall_s else 0.0
    is_alone_on_cpu = work.ranks.world == 1 and not work.params.target.device.startswith("cuda")
    return {
        kind: _build_point(work, kind, load, records, share if is_alone_on_cpu else None, ended) for kind in records
    }


def _measure_half_width(work: TorchCellContext, records: dict[str, RepeatRecords]) -> float | None:
    if len(records) < 2:
        return None
    if work.in_turns:
        return stopping.measure_pooled_half_width(_pool_speedup(work, records))
    return stopping.measure_loads_half_width(*(points.list_throughputs(records[kind]) for kind in (SPECULATIVE, PLAIN)))


def _pool_speedup(work: TorchCellContext, records: dict[str, RepeatRecords]) -> cell.PooledSpeedup:
    answers, plain = (
        [[record for turn in turns for record in turn] for turns in records[kind]] for kind in (SPECULATIVE, PLAIN)
    )
    return metrics.pool_speedup(answers, plain, work.workload.prompts)


def _build_point(
    work: TorchCellContext,
    kind: str,
    load: Load,
    records: dict[str, RepeatRecords],
    process_share: float | None,
    ended: StoppingRecord,
) -> LoadPoint:
    repeats, cap, prompts = records[kind], load.concurrency, len(work.prompts)
    acceptance, in_turns = None, None
    if kind == SPECULATIVE:
        answers = [request.record for request in points.list_requests(repeats)]
        acceptance = points.pool_counts(answers, work.workload.prompts, work.tree.num_steps, work.tree.num_draft_tokens)
        in_turns = _pool_speedup(work, records) if work.in_turns else None
    return points.build_point(
        load,
        work.workload.request_rate,
        repeats,
        acceptance,
        [f"{prompts} prompts, so never {cap} at once"] if cap and cap > prompts else [],
        dict(work.prompts.select("id", "reference").iter_rows()) if work.workload.grade else None,
        lambda record: torch_context.decode_text(work, record.ids),
        in_turns=in_turns,
        process_share=process_share,
        stopping=ended,
    )


def _measure_draft(work: TorchCellContext) -> DraftSize:
    """Return the size of the draft, and of what it has kept of the last answer."""
    slots = work.engine.slots.idle[0]
    method, proposer = list(slots.proposers.items())[-1]
    state = proposer.count_state_bytes(slots)
    return DraftSize(weights_bytes=method.weight_bytes, state_bytes=state, draft_parameters=method.num_parameters)


def _summarise(point: LoadPoint | None, plain: LoadPoint | None, is_greedy: bool) -> str:
    """Return what a point says, in words."""
    if not (point and plain and point.in_turns and point.acceptance):
        return points.describe_point(point, plain)
    share = point.share_identical(plain) if is_greedy else None
    identical = "" if share is None else f"identical {share:.0%} of "
    return f"tau {point.acceptance.tau:.3f}, speedup {point.in_turns.speedup:.2f}, {identical}{len(point.requests)} answers"


if __name__ == "__main__":
    run_stage(main)
