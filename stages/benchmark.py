"""benchmark: measure one cell on the torch engine.   python -m stages.benchmark WORKLOAD CHECKPOINT TREE

Plain and speculative decoding of the same prompts alternate, so that a drifting machine affects both alike. In float32 their
greedy outputs are expected to be identical; the share of identical answers is a metric of every greedy cell. Above temperature
0 both use the same seed, so that neither is timed on a longer answer (engine/sampling.py), unless drafts are sampled too
(benchmark.draft_sampling): then they share the distribution alone. Later turns of a question follow plain decoding's own
earlier answers in both, so both decode the same prompt even after a near-tie.

A workload with several prompts at once, or a sweep, is measured in loads, as a server is: each load once by plain and once by
speculative decoding, alternating (cells/served_records.py has the cell). With several GPUs each process has a share of the
prompts and of the slots; the first process writes the cell.

With `benchmark.mode: eagle` or `baseline` only one of the two decodings runs, in loads too, and the cell has no speedup.

A tree that the draft can't grow, deeper than a block draft's block, gives a cell of status "unsupported", and nothing is loaded.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from stages.cells import load_points, metrics, served_records, stopping, torch_cell_writer, torch_records
from stages.cells.served_records import LoadPoint, LoadsMeasurement
from stages.cells.stopping import RepeatRule
from stages.cells.torch_cell_writer import TorchCellSetup
from stages.cells.torch_records import DraftSize, PromptRow, StageCost, StoppingRecord, TorchMeasurement
from stages.engine.decode import DecodeStep
from stages.engine.decode_state import DecodeRequest
from stages.engine.device_placement import measure_remaining_memory
from stages.engine.memory_estimate import MemoryEstimate
from stages.engine.sampling import SamplingParams
from stages.grading import grade
from stages.measuring import torch_context
from stages.measuring.torch_context import QuestionTurn, TorchCellContext
from stages.params import schema, stage_inputs
from stages.params.section import get_named
from stages.params.tree_shape import Load, parse_shape
from stages.params.units import GIB
from stages.prompts import workload_prompts
from stages.prompts.workload_prompts import WorkloadPrompt
from stages.runtime import distributed
from stages.serving import inprocess_load, latency
from stages.target import manifest
from stages.telemetry import gpu_energy
from stages.telemetry.run_stage import run_stage

DECODING_KINDS = ("plain", "speculative")
KINDS_BY_MODE = {"both": DECODING_KINDS, "eagle": ("speculative",), "baseline": ("plain",)}

OutputsByKind = dict[str, list[int]]  # token ids of an answer, by kind of decoding


@dataclass(frozen=True)
class TorchAnswer:
    """An answer, decoded both ways."""

    row: PromptRow
    accepted: list[int]  # drafts in each verify cycle
    outputs: OutputsByKind


def main(workload_name: str, checkpoint_name: str, tree_name: str) -> None:
    params = stage_inputs.read_params("benchmark", workload_name, checkpoint_name, tree_name)
    processes = params.benchmark.processes
    if reason := torch_context.explain_unsupported(params, workload_name, checkpoint_name, parse_shape(tree_name)):
        setup = _describe_setup(params, workload_name, checkpoint_name, tree_name)
        path = torch_cell_writer.write_unsupported(setup, reason)
        print(f"{tree_name} at {checkpoint_name}: {served_records.UNSUPPORTED}: {reason} -> {path}")
        return
    torch_context.check_gpus(params)
    try:
        launched = distributed.launch_ranks("benchmark", [workload_name, checkpoint_name, tree_name], processes)
    except ValueError:
        raise ValueError(
            f"one of {processes} processes ended early; its output is above. Correct that and run again, or set "
            "benchmark.num_gpus_total to num_gpus_per_model for one process"
        ) from None
    if not launched:
        with distributed.join_process_group(params.target.device) as ranks:
            _run_cell(params, workload_name, checkpoint_name, tree_name, ranks)


def _run_cell(
    params: schema.Params,
    workload_name: str,
    checkpoint_name: str,
    tree_name: str,
    ranks: distributed.RankContext,
) -> None:
    torch.set_num_threads(params.benchmark.num_threads)
    gpus = params.target.gpus(params.benchmark.num_gpus_total)
    meter, started = gpu_energy.EnergyMeter(gpus), time.perf_counter()
    tree = parse_shape(tree_name)
    workload = get_named(params.benchmark.workloads, workload_name, "benchmark.workloads")
    prompts, warmup = workload_prompts.read_prompts(workload_name)
    if workload.grade:
        workload_prompts.check_references(workload_name, prompts)
        grade.check_sandbox(prompts["reference"], workload_name, params.benchmark.allow_unsandboxed_code)
    work = torch_context.build_context(params, workload, checkpoint_name, tree, ranks, prompts, warmup)
    memory = torch_context.estimate_memory(work)
    if ranks.first:
        print(f"memory of a process: {memory}", flush=True)
    memory.check(measure_remaining_memory(work.engine.model, params.benchmark.max_gpu_memory), work.engine.device)
    one_by_one = params.benchmark.is_decoded_one_by_one(workload_name)
    measured, summary = _measure_prompt_by_prompt(work) if one_by_one else _measure_in_loads(work)
    if not ranks.first:
        return
    took = StageCost(round(time.perf_counter() - started, 2), meter.names(), meter.joules())
    setup = _describe_setup(params, workload_name, checkpoint_name, tree_name)
    path = torch_cell_writer.write_measured(setup, measured, took, work.samples_drafts)
    print(f"{tree_name} at {checkpoint_name}: {summary} -> {path}")


def _describe_setup(params: schema.Params, workload_name: str, checkpoint_name: str, tree_name: str) -> TorchCellSetup:
    device, settings = params.target.device, params.benchmark
    workload = get_named(settings.workloads, workload_name, "benchmark.workloads")
    hardware = torch_records.describe_hardware(device, settings.num_threads, settings.num_gpus_total)
    return TorchCellSetup(workload_name, checkpoint_name, tree_name, workload, hardware)


# Prompt by prompt


def _measure_prompt_by_prompt(work: TorchCellContext) -> tuple[TorchMeasurement, str]:
    """Return the measured part of a cell, and a summary in words."""
    work.engine.slots.reserve_length(work.longest_prompt + work.max_new_tokens)
    for question in workload_prompts.list_rows(
        work.warmup_prompts
    ):  # uncounted: first calls allocate and select kernels
        for kind in DECODING_KINDS:
            sampling_params = torch_context.make_sampling_params(work, question.id, 0, 0)
            list(_start_decoding(work, kind, question.prompt_ids, question.id, sampling_params))
    prompt_set, tree = work.workload.prompts, work.tree
    answers, ended = stopping.decode_repeats(work.workload, partial(_decode_repeat, work), prints=work.ranks.first)
    rows = [answer.row for answer in answers]
    found = metrics.compute_cell_metrics(rows, tree.num_steps, tree.num_draft_tokens, prompt_set)
    measured = TorchMeasurement(
        metrics=found,
        repeats=metrics.summarise_repeats(rows, prompt_set),
        quality=_grade_rows(work, rows, [answer.outputs for answer in answers]),
        histogram=metrics.count_accepted_lengths([answer.accepted for answer in answers], tree.num_steps),
        prompts=rows,
        stopping=ended,
        draft=_measure_draft(work),
    )
    share = found.identical_share
    identical = "" if share is None else f"identical {share:.0%} of "
    return measured, f"tau {found.tau:.3f}, speedup {found.speedup:.2f}, {identical}{len(rows)} answers"


def _measure_draft(work: TorchCellContext) -> DraftSize:
    """Return the size of the draft, and of what it has kept of the last answer."""
    slots = work.engine.slots.idle[0]
    method, proposer = list(slots.proposers.items())[-1]
    state = proposer.count_state_bytes(slots)
    return DraftSize(weights_bytes=method.weight_bytes, state_bytes=state, draft_parameters=method.num_parameters)


def _decode_repeat(work: TorchCellContext, repeat: int) -> list[TorchAnswer]:
    """Decode every prompt once both ways, divided over processes; return the answers of all processes."""
    own_answers = [
        (index, answer)
        for index, question in enumerate(workload_prompts.list_rows(work.prompts))
        if index % work.ranks.world == work.ranks.rank
        for answer in _decode_turns(work, question, repeat, index)
    ]
    all_answers = distributed.all_gather_lists(work.ranks, own_answers)
    return [answer for _, answer in sorted(all_answers, key=lambda pair: pair[0])]  # turns of a prompt stay in order


def _decode_turns(
    work: TorchCellContext, question: WorkloadPrompt, repeat: int, prompt_index: int
) -> Iterator[TorchAnswer]:
    """Yield the answer of each turn.

    The kind of decoding that goes first alternates over prompts, repeats and turns.
    """
    turn: QuestionTurn | None = torch_context.get_first_turn(question)
    while turn:
        order = DECODING_KINDS if (prompt_index + repeat + turn.number) % 2 == 0 else DECODING_KINDS[::-1]
        sampling_params = torch_context.make_sampling_params(work, question.id, repeat, turn.number)
        timed = {
            kind: torch_context.time_decode(
                partial(_start_decoding, work, kind, turn.ids, question.id, sampling_params), work.params.target.device
            )
            for kind in order
        }
        outputs = {kind: decoded.tokens for kind, decoded in timed.items()}
        row = _build_row(work, turn, repeat, sampling_params, timed)
        yield TorchAnswer(row, [step.num_accepted for step in timed["speculative"].cycles], outputs)
        turn = torch_context.build_next_turn(work, turn, outputs["plain"])


def _build_row(
    work: TorchCellContext,
    turn: QuestionTurn,
    repeat: int,
    sampling_params: SamplingParams | None,
    timed: dict[str, torch_context.TimedDecode],
) -> PromptRow:
    """Return the row of an answer, not yet graded; `timed` is by kind of decoding."""
    speculative, plain = timed["speculative"], timed["plain"]
    prompt_id, output, plain_output = turn.question.id, speculative.tokens, plain.tokens
    return PromptRow(
        id=prompt_id,
        repeat=repeat,
        turn=turn.number,
        prompt_tokens=len(turn.ids),
        output_tokens=len(output),
        cycles=len(speculative.cycles),
        accepted=sum(step.num_accepted for step in speculative.cycles),
        identical=None if sampling_params else output == plain_output,
        divergence_margin=None
        if sampling_params
        else torch_context.measure_divergence_margin(work, turn.ids, prompt_id, output, plain_output),
        finish_reason="stop" if output[-1] in work.engine.end_tokens else "length",
        prefill_latency_s=speculative.prefill_s,
        e2e_latency_s=speculative.total_s,
        correct=None,
        baseline_output_tokens=len(plain_output),
        baseline_prefill_latency_s=plain.prefill_s,
        baseline_e2e_latency_s=plain.total_s,
        baseline_correct=None,
        process_s=speculative.process_s,
        baseline_process_s=plain.process_s,
    )


def _start_decoding(
    work: TorchCellContext, kind: str, ids: list[int], prompt_id: str, sampling_params: SamplingParams | None
) -> Iterator[DecodeStep]:
    images = work.images[prompt_id]
    if kind == "plain":
        return work.engine.decode_plain(ids, work.max_new_tokens, images, sampling_params)
    return work.engine.decode_speculative(ids, work.max_new_tokens, work.tree, images, sampling_params)


def _grade_rows(
    work: TorchCellContext, rows: list[PromptRow], outputs: list[OutputsByKind]
) -> torch_records.TorchQuality | None:
    """Grade first turns, after the last clock has stopped. Return the cell's `quality`, None if nothing is graded."""
    if not work.workload.grade:
        return None
    references = dict(work.prompts.select("id", "reference").iter_rows())
    unsandboxed = work.params.benchmark.allow_unsandboxed_code
    return torch_cell_writer.grade_rows(
        rows, outputs, references, lambda ids: torch_context.decode_text(work, ids), unsandboxed
    )


# In loads


def _measure_in_loads(work: TorchCellContext) -> tuple[LoadsMeasurement, str]:
    """Return as `_measure_prompt_by_prompt`, with a point for each answer length and concurrency."""
    _warm_up(work)
    points: dict[str, list[LoadPoint]] = {kind: [] for kind in DECODING_KINDS}  # of a kind that does not run: none
    for load in work.workload.list_loads():
        found = _repeat_load(work, load)
        for kind in list_kinds(work):
            points[kind].append(_build_point(work, kind, load, found))
    target = manifest.read_manifest()
    measured = LoadsMeasurement(
        status=served_records.RAN,
        reason=None,
        fingerprint={"target": [target.model, target.revision, target.config_digest]},  # the baseline is its own
        server=served_records.ServerDescription(command=[], info={}),
        memory=_describe_memory(torch_context.estimate_memory(work)),
        points=points["speculative"],
        baseline_points=points["plain"],
    )
    pairs = itertools.zip_longest(points["speculative"], points["plain"])
    return measured, "; ".join(load_points.describe_point(*pair) for pair in pairs)


def list_kinds(work: TorchCellContext) -> tuple[str, ...]:
    """Return the kinds of decoding that benchmark.mode asks for."""
    return KINDS_BY_MODE[work.params.benchmark.mode]


def _describe_memory(memory: MemoryEstimate) -> served_records.ServerMemory:
    """Return the estimated sizes of one process."""
    return served_records.ServerMemory(
        weights=round(memory.target / GIB, 3),
        draft=round(memory.draft / GIB, 3),
        kv_cache=round(memory.cache / GIB, 3),
        kv_tokens=memory.cache_tokens,
        gpu_before=None,
        gpu_serving=None,
        gpu_after=None,
        gpu_total=None,
    )


def _warm_up(work: TorchCellContext) -> None:
    """Decode two tokens of each warm-up prompt: first calls allocate and select kernels."""
    prompts = workload_prompts.list_rows(work.warmup_prompts)
    requests = [DecodeRequest(prompt.prompt_ids, 2, work.images[prompt.id]) for prompt in prompts]
    for kind in list_kinds(work) if requests else ():
        list(work.engine.decode_batch(requests, len(requests), None if kind == "plain" else work.tree))


@dataclass(frozen=True)
class RepeatedLoad:
    """One load, repeated."""

    records: dict[str, load_points.RepeatRecords]  # by kind of decoding
    # CPU time of this process / wall time; None on a GPU, and where processes wait for others
    process_share: float | None
    stopping: StoppingRecord


def _repeat_load(work: TorchCellContext, load: Load) -> RepeatedLoad:
    """Run one point until it was repeated often enough."""
    records: dict[str, load_points.RepeatRecords] = {kind: [] for kind in list_kinds(work)}
    started, process_started, ended = time.perf_counter(), time.process_time(), None
    rule, repeats = RepeatRule.of_workload(work.workload), 0
    while ended is None:
        found = _run_kinds(work, load, repeats)
        repeats += 1
        for kind in records:
            records[kind].append(found[kind])
        speeds = [load_points.list_throughputs(records[kind]) for kind in ("speculative", "plain") if kind in records]
        half_width = stopping.measure_loads_half_width(*speeds) if len(speeds) == 2 else None
        ended = rule.judge(repeats, half_width, prints=work.ranks.first)  # all processes find the same
    share = (time.process_time() - process_started) / (time.perf_counter() - started)
    is_alone_on_cpu = work.ranks.world == 1 and not work.params.target.device.startswith("cuda")
    return RepeatedLoad(records, share if is_alone_on_cpu else None, ended)


def _run_kinds(work: TorchCellContext, load: Load, repeat: int) -> dict[str, list[list[latency.RequestRecord]]]:
    """Run one repeat of one point: by kind of decoding, a load for each turn. The first kind alternates."""
    kinds = list_kinds(work)
    records: dict[str, list[list[latency.RequestRecord]]] = {kind: [] for kind in kinds}
    prompts = workload_prompts.list_rows(work.prompts)
    turns = [torch_context.get_first_turn(prompt) for prompt in prompts]
    while turns:
        for kind in kinds if (repeat + turns[0].number) % 2 == 0 else kinds[::-1]:
            records[kind].append(_run_load(work, kind, turns, load, repeat))
        answered = zip(turns, records[kinds[0]][-1], strict=True)
        following = [torch_context.build_next_turn(work, turn, record.ids) for turn, record in answered]
        turns = [turn for turn in following if turn]
    return records


def _run_load(
    work: TorchCellContext, kind: str, turns: list[QuestionTurn], load: Load, repeat: int
) -> list[latency.RequestRecord]:
    """Decode all turns, at most `load.concurrency` at once over all processes, and return the records of all processes.

    Each process has some of the slots, and their requests.
    """
    ranks, slots = work.ranks, min(load.concurrency or len(turns), len(turns))
    turn_indices = [n for n in range(len(turns)) if n % slots % ranks.world == ranks.rank]
    requests = {
        f"{turns[n].question.id}#{turns[n].number}": _make_request(work, turns[n], load.max_new_tokens, repeat)
        for n in turn_indices
    }

    def start_clock() -> float:
        distributed.all_gather_lists(ranks, [])  # all processes start together
        return torch_context.read_device_clock(ranks.device)

    own_slots = len(range(ranks.rank, slots, ranks.world))
    records = inprocess_load.decode_load(
        work.engine, requests, own_slots, None if kind == "plain" else work.tree, start_clock
    )
    indexed_records = list(zip(turn_indices, records, strict=True))
    return [
        record for _, record in sorted(distributed.all_gather_lists(ranks, indexed_records), key=lambda pair: pair[0])
    ]


def _make_request(work: TorchCellContext, turn: QuestionTurn, length: int, repeat: int) -> DecodeRequest:
    prompt_id = turn.question.id
    max_new_tokens = workload_prompts.compute_max_new_tokens(turn.question.length_share, length)
    drawn = torch_context.make_sampling_params(work, prompt_id, repeat, turn.number)
    return DecodeRequest(turn.ids, max_new_tokens, work.images[prompt_id], drawn)


def _build_point(work: TorchCellContext, kind: str, load: Load, found: RepeatedLoad) -> LoadPoint:
    repeats, cap = found.records[kind], load.concurrency
    requests = load_points.list_requests(repeats)
    references = dict(work.prompts.select("id", "reference").iter_rows())
    grades: list[bool | None] = [None] * len(requests)
    if work.workload.grade:
        unsandboxed = work.params.benchmark.allow_unsandboxed_code
        grades = load_points.grade_first_turns(
            requests, references, lambda r: torch_context.decode_text(work, r.ids), unsandboxed
        )
    acceptance = None
    if kind == "speculative":
        records = [request.record for request in requests]
        counts = [record.counts for record in records if record.counts]
        tree = work.tree
        acceptance = load_points.pool_counts(
            counts, records, work.workload.prompts, tree.num_steps, tree.num_draft_tokens, {}
        )
    prompts = len(work.prompts)
    point = load_points.build_point(
        load,
        work.workload.request_rate,
        repeats,
        grades,
        references,
        acceptance,
        [f"{prompts} prompts, so never {cap} at once"] if cap and cap > prompts else [],
    )
    return point.model_copy(update={"process_share": found.process_share, "stopping": found.stopping})


if __name__ == "__main__":
    run_stage(main)
