"""Loads of a torch cell, decoded plainly and speculatively in turns: answer by answer, or load by load.

The records have the form of a server's (cells/request_record.py). A later turn follows plain decoding's own earlier answers in
both kinds, so both decode the same prompt even after a near-tie. The kind that goes first alternates.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import cast

import torch

from stages.cells.cell import PLAIN, SPECULATIVE
from stages.cells.points import MIN_JUDGED_CYCLES
from stages.cells.request_record import AcceptanceCounts, RequestRecord
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.measuring import torch_context
from stages.measuring.torch_context import QuestionTurn, TorchCellContext
from stages.params.tree_shape import Load
from stages.prompts import workload_prompts
from stages.runtime import distributed

KINDS_BY_MODE = {"both": (PLAIN, SPECULATIVE), "eagle": (SPECULATIVE,), "baseline": (PLAIN,)}

RecordsByKind = dict[str, list[RequestRecord]]


def list_kinds(work: TorchCellContext) -> tuple[str, ...]:
    """Return the kinds of decoding that benchmark.mode asks for."""
    return KINDS_BY_MODE[work.params.benchmark.mode]


def warm_up(work: TorchCellContext) -> None:
    """Decode the warm-up prompts uncounted, two tokens of each for loads: first calls allocate and select kernels."""
    prompts, kinds = workload_prompts.list_rows(work.warmup_prompts), list_kinds(work)
    if work.in_turns:
        length = max(load.max_new_tokens for load in work.workload.list_loads())
        work.engine.slots.reserve_length(work.longest_prompt + length)
        for turn in map(torch_context.get_first_turn, prompts):
            for kind in kinds:
                list(_start_decoding(work, kind, turn, length, 0))
        return
    requests = [DecodeRequest(prompt.prompt_ids, 2, work.images[prompt.id]) for prompt in prompts]
    for kind in kinds if requests else ():
        list(work.engine.decode_batch(requests, len(requests), None if kind == PLAIN else work.tree))


def explain_skipped(work: TorchCellContext) -> str | None:
    """Return why the cell is not worth a measurement: no draft is accepted in the first cycles; None once one is.

    Where all answers together have fewer cycles it is measured. All processes return the same.
    """
    if SPECULATIVE not in list_kinds(work):
        return None
    if all(distributed.all_gather_lists(work.ranks, [_starts_idle(work)])):
        return f"no draft was accepted in the first {MIN_JUDGED_CYCLES} cycles, so tau is 1.00"
    return None


def _starts_idle(work: TorchCellContext) -> bool:
    cycles, length = 0, max(load.max_new_tokens for load in work.workload.list_loads())
    for turn in map(torch_context.get_first_turn, workload_prompts.list_rows(work.prompts)):
        decoding = cast(Generator[DecodeStep, None, None], _start_decoding(work, SPECULATIVE, turn, length, 0))
        with closing(decoding) as steps:
            next(steps)  # prefill
            for cycles, step in enumerate(steps, start=cycles + 1):  # noqa: B020
                if step.num_accepted or cycles == MIN_JUDGED_CYCLES:
                    return not step.num_accepted
    return False


def run_repeat(work: TorchCellContext, load: Load, repeat: int) -> dict[str, list[list[RequestRecord]]]:
    """Run one repeat of one load: by kind of decoding, the records of each turn, from all processes."""
    run = _run_in_turns if work.in_turns else _run_loads
    found: dict[str, list[list[RequestRecord]]] = {kind: [] for kind in list_kinds(work)}
    turns = [torch_context.get_first_turn(prompt) for prompt in workload_prompts.list_rows(work.prompts)]
    while turns:
        for kind, records in run(work, turns, load, repeat).items():
            found[kind].append(records)
        answered = zip(turns, next(iter(found.values()))[-1], strict=True)
        following = [torch_context.build_next_turn(work, turn, record.ids) for turn, record in answered]
        turns = [turn for turn in following if turn]
    return found


# Answer by answer


def _run_in_turns(work: TorchCellContext, turns: list[QuestionTurn], load: Load, repeat: int) -> RecordsByKind:
    """Decode every turn both ways, divided over processes; the kind that goes first alternates over prompts."""
    own = [
        (index, _decode_both_ways(work, turn, load.max_new_tokens, repeat, (index + repeat + turn.number) % 2 == 1))
        for index, turn in enumerate(turns)
        if index % work.ranks.world == work.ranks.rank
    ]
    both = [pair for _, pair in sorted(distributed.all_gather_lists(work.ranks, own), key=lambda item: item[0])]
    return {kind: _line_up([pair[kind] for pair in both]) for kind in list_kinds(work)}


def _line_up(records: list[RequestRecord]) -> list[RequestRecord]:
    """Shift the times of answers that were decoded one at a time, so that each follows the one before."""
    now = 0.0
    for record in records:
        record.events = [(now + time_s, tokens) for time_s, tokens in record.events]
        record.due, record.sent, record.ended = now, now, now + record.ended
        now = record.ended
    return records


def _decode_both_ways(
    work: TorchCellContext, turn: QuestionTurn, length: int, repeat: int, is_reversed: bool
) -> dict[str, RequestRecord]:
    kinds = list_kinds(work)
    found = {
        kind: _time_decoding(work, kind, turn, partial(_start_decoding, work, kind, turn, length, repeat))
        for kind in (reversed(kinds) if is_reversed else kinds)
    }
    speculative, plain = found[SPECULATIVE], found[PLAIN]
    if not work.workload.temperature:
        speculative.divergence_margin = torch_context.measure_divergence_margin(work, turn, speculative.ids, plain.ids)
    return found


def _start_decoding(
    work: TorchCellContext, kind: str, turn: QuestionTurn, length: int, repeat: int
) -> Iterator[DecodeStep]:
    prompt_id = turn.question.id
    images, drawn = work.images[prompt_id], torch_context.make_sampling_params(work, prompt_id, repeat, turn.number)
    if kind == PLAIN:
        return work.engine.decode_plain(turn.ids, length, images, drawn)
    return work.engine.decode_speculative(turn.ids, length, work.tree, images, drawn)


def _time_decoding(
    work: TorchCellContext, kind: str, turn: QuestionTurn, start: Callable[[], Iterator[DecodeStep]]
) -> RequestRecord:
    """Return the record of the decoding that `start` begins.

    On a GPU a prefill runs once before: the first prompt of a length selects kernels, which can take ten prefills.
    """
    device = work.params.target.device
    if is_on_gpu := device.startswith("cuda"):
        warmup = start()
        next(warmup)
        del warmup
    process_started, started = time.process_time(), read_device_clock(device)
    decoding = start()
    steps = [next(decoding)]
    ends = [read_device_clock(device) - started]
    for step in decoding:
        steps.append(step)
        ends.append(time.perf_counter() - started)
    ends[-1] = read_device_clock(device) - started
    record = RequestRecord(f"{turn.question.id}#{turn.number}", ended=ends[-1], input_tokens=len(turn.ids))
    record.process_s = None if is_on_gpu else time.process_time() - process_started
    for step, end_s in zip(steps, ends, strict=True):
        _add_step(record, step, end_s)
    _finish(work, kind, record, [step.num_accepted for step in steps])
    return record


def _add_step(record: RequestRecord, step: DecodeStep, end_s: float) -> None:
    record.events.append((end_s, len(step.tokens)))
    record.ids += step.tokens


def _finish(work: TorchCellContext, kind: str, record: RequestRecord, accepted: list[int]) -> None:
    """Fill in what follows from the steps of an answer. `accepted`: draft tokens of each, of which the first is prefill."""
    record.output_tokens = len(record.ids)
    record.finish_reason = "stop" if record.ids[-1] in work.engine.end_tokens else "length"
    if kind == SPECULATIVE:
        histogram = [accepted[1:].count(length) for length in range(work.tree.num_steps + 1)]
        record.counts = AcceptanceCounts(len(accepted) - 1, sum(accepted), True, histogram)


def read_device_clock(device: str) -> float:
    """Return seconds, after the device has finished all queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


# Load by load


def _run_loads(work: TorchCellContext, turns: list[QuestionTurn], load: Load, repeat: int) -> RecordsByKind:
    kinds = list_kinds(work)
    order = kinds if (repeat + turns[0].number) % 2 == 0 else kinds[::-1]
    found = {kind: _run_load(work, kind, turns, load, repeat) for kind in order}
    return {kind: found[kind] for kind in kinds}


def _run_load(
    work: TorchCellContext, kind: str, turns: list[QuestionTurn], load: Load, repeat: int
) -> list[RequestRecord]:
    """Decode all turns, at most `load.concurrency` at once over all processes, and return the records of all processes.

    Each process has some of the slots, and their requests.
    """
    ranks, slots = work.ranks, min(load.concurrency or len(turns), len(turns))
    turn_indices = [n for n in range(len(turns)) if n % slots % ranks.world == ranks.rank]
    requests = [_make_request(work, turns[n], load.max_new_tokens, repeat) for n in turn_indices]
    records = [
        RequestRecord(f"{turns[n].question.id}#{turns[n].number}", input_tokens=len(turns[n].ids)) for n in turn_indices
    ]
    engine, own_slots = work.engine, len(range(ranks.rank, slots, ranks.world))
    tree = None if kind == PLAIN else work.tree
    if requests:
        engine.warm_up(requests, own_slots, tree)
        if engine.uses_cuda_graphs:  # prefill all prompts once, uncounted
            list(engine.decode_batch([request._replace(max_new_tokens=1) for request in requests], own_slots, tree))
    distributed.all_gather_lists(ranks, [])  # all processes start together
    started = read_device_clock(ranks.device)
    accepted: list[list[int]] = [[] for _ in records]
    # A pass holds (request index, step); a step of None means that the request has taken a slot.
    for steps in engine.decode_batch(requests, own_slots, tree) if requests else ():
        now = time.perf_counter() - started
        for index, step in steps:
            if step is None:
                records[index].sent = now
            else:
                _add_step(records[index], step, now)
                accepted[index].append(step.num_accepted)
    for record, counts in zip(records, accepted, strict=True):
        record.ended = record.events[-1][0]
        _finish(work, kind, record, counts)
    indexed = distributed.all_gather_lists(ranks, list(zip(turn_indices, records, strict=True)))
    return [record for _, record in sorted(indexed, key=lambda pair: pair[0])]


def _make_request(work: TorchCellContext, turn: QuestionTurn, length: int, repeat: int) -> DecodeRequest:
    question, max_new_tokens = (
        turn.question,
        workload_prompts.compute_max_new_tokens(turn.question.length_share, length),
    )
    drawn = torch_context.make_sampling_params(work, question.id, repeat, turn.number)
    return DecodeRequest(turn.ids, max_new_tokens, work.images[question.id], drawn)
