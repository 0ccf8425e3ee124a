"""The torch engine: decoding in the stage's own process, plainly and speculatively in turns, answer by answer or load by load.

Plain and speculative decoding of the same prompts alternate, so that a drifting machine affects both alike: answer by answer,
or, for a workload with several prompts at once or a sweep, load by load, as a server is measured. In float32 their greedy
outputs are expected to be identical. Above temperature 0 both use the same seed, so that neither is timed on a longer answer
(engine/sampling.py), unless drafts are sampled too (benchmark.draft_sampling): then they share the distribution alone. A later
turn follows plain decoding's own earlier answers in both kinds, so both decode the same prompt even after a near-tie.

With several GPUs each process has a share of the prompts and of the slots; the first process writes the cell.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import polars as pl
import torch

from stages.cells import cell
from stages.cells.cell import PLAIN, SKIPPED, SPECULATIVE, CellSetting, DraftSize, Memory, NotMeasuredError
from stages.cells.points import MIN_JUDGED_CYCLES
from stages.cells.record import name_draft_sampling
from stages.cells.request_record import AcceptanceCounts, RequestRecord
from stages.engine import memory_estimate, sampling
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.engine.device_placement import measure_remaining_memory, place_model
from stages.engine.memory_estimate import MemoryEstimate
from stages.engine.sampling import SamplingParams
from stages.engines.cell_engine import CellContext, CellEngine, LoadResult, QuestionTurn, ResultsByKind, Subject
from stages.families import family
from stages.families.draft_decoding import build_engine
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.families import SHAPES
from stages.params.tree_shape import Load, TreeShape
from stages.params.units import GIB
from stages.prompts import workload_prompts
from stages.runtime import distributed
from stages.runtime.distributed import RankContext
from stages.target import head_check, loading, manifest, vision
from stages.target.multimodal import ImagePatches

KINDS_BY_MODE = {"both": (PLAIN, SPECULATIVE), "eagle": (SPECULATIVE,), "baseline": (PLAIN,)}

RecordsByKind = dict[str, list[RequestRecord]]


@dataclass(eq=False)
class TorchCell(CellEngine, Subject):
    """A cell of the torch engine, which is its own only subject."""

    context: CellContext
    results: ResultsByKind = field(default_factory=dict)
    ranks: RankContext = field(init=False)  # this and what follows is there once the cell is open
    engine: Engine = field(init=False)
    images: dict[str, ImagePatches | None] = field(init=False)  # by prompt id
    memory: MemoryEstimate | None = field(default=None, init=False)
    # of loads that were decoded: seconds of this process on the CPU, and by the clock
    clocks: dict[Load, tuple[float, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.name = cell.name_configuration(self.context.checkpoint, self.tree.name)
        self.workload = self.context.workload
        self.in_turns = self.context.params.benchmark.is_decoded_one_by_one(self.context.workload_name)

    @property
    def subjects(self) -> list[Subject]:
        return [self]

    @property
    def is_first(self) -> bool:  # type: ignore[override]  # known once the processes have met
        return self.ranks.first

    @property
    def tree(self) -> TreeShape:
        assert self.context.tree, "the torch engine has no cell without a draft"
        return self.context.tree

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of decoding that benchmark.mode asks for."""
        return KINDS_BY_MODE[self.context.params.benchmark.mode]

    @property
    def samples_drafts(self) -> bool:
        """Return whether drafts are sampled; at temperature 0 they are greedy in any case."""
        return self.context.params.benchmark.draft_sampling == "sampled" and self.workload.temperature > 0

    @property
    def longest_answer(self) -> int:
        return max(load.max_new_tokens for load in self.workload.list_loads())

    def list_gpus(self) -> list[int]:
        params = self.context.params
        return params.target.gpus(params.benchmark.num_gpus_total)

    def explain_unsupported(self) -> str | None:
        """Return why the cell can't be measured, by the config.json of its draft alone; None if it can."""
        if reason := family.explain_unsupported(str(self.context.checkpoint), self.tree):
            return reason
        if self.tree.letter != "t" and not self.in_turns:
            return f"{SHAPES[self.tree.letter]} are decoded one prompt at a time"
        return None

    def launch(self) -> bool:
        params, context = self.context.params, self.context
        check_gpus(params)
        names, processes = [context.workload_name, str(context.checkpoint), self.tree.name], params.benchmark.processes
        try:
            return distributed.launch_ranks("benchmark", names, processes)
        except ValueError:
            raise ValueError(
                f"one of {processes} processes ended early; its output is above. Correct that and run again, or set "
                "benchmark.num_gpus_total to num_gpus_per_model for one process"
            ) from None

    def group_loads(self) -> list[list[Load]]:
        """Each load is a group, since caches and CUDA graphs are of one number of requests."""
        return [[load] for load in self.workload.list_loads()]

    @contextmanager
    def open(self, subjects: list[Subject]) -> Iterator[None]:
        """Load target, draft and images, and decode what is not counted."""
        context, params = self.context, self.context.params
        with distributed.join_process_group(params.target.device) as self.ranks:
            torch.set_num_threads(params.benchmark.num_threads)
            paths = dict(pl.concat([context.prompts, context.warmup_prompts]).select("id", "images").iter_rows())
            # Images are decoded before any clock runs, since a server's client sends them decoded too.
            self.images = vision.load_image_patches(context.target_folder, params.target.trust_remote_code, paths)
            self.engine = load_engine(params, self.workload, str(context.checkpoint), self.ranks)
            self.memory = self._estimate_memory()
            if self.is_first:
                print(f"memory of a process: {self.memory}", flush=True)
            free = measure_remaining_memory(self.engine.model, params.benchmark.max_gpu_memory)
            self.memory.check(free, self.engine.device)
            self._warm_up()
            self._check_accepted()
            yield

    def _estimate_memory(self) -> MemoryEstimate:
        """Estimate the memory of the largest load, or of the longest prompt alone. Raises ValueError if it can't be decoded."""
        prompts = len(self.context.prompts)
        caps = [min(cap or prompts, prompts) for _, cap in self.workload.list_loads()]
        slots = max(-(-cap // self.ranks.world) for cap in caps)  # of a process
        tokens, samples = self.context.longest_prompt + self.longest_answer, self.workload.temperature > 0
        return memory_estimate.estimate_memory(self.engine, tokens, slots, self.tree, samples, self.samples_drafts)

    def _warm_up(self) -> None:
        """Decode the warm-up prompts uncounted, two tokens of each for loads: first calls allocate and select kernels."""
        turns = self.context.list_first_turns(self.context.warmup_prompts)
        if self.in_turns:
            self.engine.slots.reserve_length(self.context.longest_prompt + self.longest_answer)
            for turn in turns:
                for kind in self.kinds:
                    list(self._start_decoding(kind, turn, self.longest_answer, 0))
            return
        requests = [DecodeRequest(turn.ids, 2, self.images[turn.question.id]) for turn in turns]
        for kind in self.kinds if requests else ():
            list(self.engine.decode_batch(requests, len(requests), None if kind == PLAIN else self.tree))

    def _check_accepted(self) -> None:
        """Raise NotMeasuredError, in all processes, where no draft is accepted in the first cycles.

        Where all answers together have fewer cycles the cell is measured.
        """
        if SPECULATIVE in self.kinds and all(distributed.all_gather_lists(self.ranks, [self._starts_idle()])):
            reason = f"no draft was accepted in the first {MIN_JUDGED_CYCLES} cycles, so tau is 1.00"
            raise NotMeasuredError(SKIPPED, reason)

    def _starts_idle(self) -> bool:
        cycles = 0
        for turn in self.context.list_first_turns(self.context.prompts):
            steps = self._start_decoding(SPECULATIVE, turn, self.longest_answer, 0)
            next(steps)  # prefill
            for cycles, step in enumerate(steps, start=cycles + 1):  # noqa: B020
                if step.num_accepted or cycles == MIN_JUDGED_CYCLES:
                    return not step.num_accepted
        return False

    def run_turn(self, turns: list[QuestionTurn], load: Load, repeat: int) -> dict[str, LoadResult]:
        """Decode a turn of each question by all kinds of decoding; the records are those of all processes."""
        started, process_started = time.perf_counter(), time.process_time()
        if self.in_turns:
            found = self._run_in_turns(turns, load, repeat)
        else:
            order = self.kinds if (repeat + turns[0].number) % 2 == 0 else self.kinds[::-1]
            found = {kind: self._run_load(kind, turns, load, repeat) for kind in order}
        process_s, wall_s = time.process_time() - process_started, time.perf_counter() - started
        if self.in_turns:
            answers = [record for records in found.values() for record in records]
            process_s, wall_s = sum(r.process_s or 0.0 for r in answers), sum(r.e2e_s for r in answers)
        earlier_process_s, earlier_wall_s = self.clocks.get(load, (0.0, 0.0))
        self.clocks[load] = earlier_process_s + process_s, earlier_wall_s + wall_s
        return {kind: LoadResult(found[kind]) for kind in self.kinds}

    def list_warnings(self, load: Load, results: list[LoadResult]) -> list[str]:
        cap, prompts = load.concurrency, len(self.context.prompts)
        return [f"{prompts} prompts, so never {cap} at once"] if cap and cap > prompts else []

    def measure_process_share(self, load: Load) -> float | None:
        process_s, wall_s = self.clocks[load]
        is_alone_on_cpu = self.ranks.world == 1 and not self.context.params.target.device.startswith("cuda")
        return process_s / wall_s if is_alone_on_cpu and wall_s else None

    def describe(self) -> CellSetting:
        """Return where the cell was measured; its baseline is its own. Memory is estimated, of one process."""
        target, params = self.context.manifest, self.context.params
        memory, settings = Memory(), params.benchmark
        if found := self.memory:
            sizes = {"weights": found.target, "draft": found.draft, "kv_cache": found.cache}
            gib = {name: round(size / GIB, 3) for name, size in sizes.items()}
            memory = Memory(**gib, kv_tokens=found.cache_tokens)
        return CellSetting(
            hardware=cell.describe_hardware(params.target.device, settings.num_threads, settings.num_gpus_total),
            versions=cell.list_versions("torch", "transformers"),
            fingerprint={"target": [target.model, target.revision, target.config_digest]},
            draft_sampling=name_draft_sampling(self.samples_drafts),
            memory=memory,
            draft=self._measure_draft() if self.in_turns and self.results else None,
        )

    def _measure_draft(self) -> DraftSize:
        """Return the size of the draft, and of what it has kept of the last answer."""
        slots = self.engine.slots.idle[0]
        state = list(slots.proposers.values())[-1].count_state_bytes(slots)
        module = self.engine.drafter.module if self.engine.drafter else None
        weights = [] if module is None else [tensor.nbytes for tensor in module.state_dict().values()]
        parameters = [] if module is None else [tensor.numel() for tensor in module.parameters()]
        return DraftSize(weights_bytes=sum(weights), state_bytes=state, draft_parameters=sum(parameters))

    # Answer by answer

    def _run_in_turns(self, turns: list[QuestionTurn], load: Load, repeat: int) -> RecordsByKind:
        """Decode every turn both ways, divided over processes; the kind that goes first alternates over prompts."""
        own = [
            (index, self._decode_both_ways(turn, load.max_new_tokens, repeat, (index + repeat + turn.number) % 2 == 1))
            for index, turn in enumerate(turns)
            if index % self.ranks.world == self.ranks.rank
        ]
        both = [pair for _, pair in sorted(distributed.all_gather_lists(self.ranks, own), key=lambda item: item[0])]
        return {kind: _line_up([pair[kind] for pair in both]) for kind in self.kinds}

    def _decode_both_ways(
        self, turn: QuestionTurn, length: int, repeat: int, is_reversed: bool
    ) -> dict[str, RequestRecord]:
        found = {
            kind: self._time_decoding(kind, turn, partial(self._start_decoding, kind, turn, length, repeat))
            for kind in (reversed(self.kinds) if is_reversed else self.kinds)
        }
        speculative, plain = found[SPECULATIVE], found[PLAIN]
        if not self.workload.temperature and speculative.ids != plain.ids:
            speculative.divergence_margin = self._measure_divergence_margin(turn, speculative.ids, plain.ids)
        return found

    def _measure_divergence_margin(self, turn: QuestionTurn, output: list[int], plain_output: list[int]) -> float:
        """Return the logit margin where two answers part: a near-tie is rounding, a wide one a defect."""
        shared = next(
            (i for i, (a, b) in enumerate(zip(output, plain_output, strict=False)) if a != b),
            min(len(output), len(plain_output)),
        )
        return self.engine.measure_margin(turn.ids, plain_output[:shared], self.images[turn.question.id])

    def _start_decoding(self, kind: str, turn: QuestionTurn, length: int, repeat: int) -> Iterator[DecodeStep]:
        images, drawn = self.images[turn.question.id], self._make_sampling_params(turn, repeat)
        if kind == PLAIN:
            return self.engine.decode_plain(turn.ids, length, images, drawn)
        return self.engine.decode_speculative(turn.ids, length, self.tree, images, drawn)

    def _make_sampling_params(self, turn: QuestionTurn, repeat: int) -> SamplingParams | None:
        return make_sampling_params(self.workload, self.samples_drafts, turn.question.id, repeat, turn.number)

    def _time_decoding(self, kind: str, turn: QuestionTurn, start: Callable[[], Iterator[DecodeStep]]) -> RequestRecord:
        """Return the record of the decoding that `start` begins.

        On a GPU a prefill runs once before: the first prompt of a length selects kernels, which can take ten prefills.
        """
        device = self.context.params.target.device
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
        record = RequestRecord(turn.id, ended=ends[-1], input_tokens=len(turn.ids))
        record.process_s = None if is_on_gpu else time.process_time() - process_started
        for step, end_s in zip(steps, ends, strict=True):
            _add_step(record, step, end_s)
        self._finish(kind, record, [step.num_accepted for step in steps])
        return record

    def _finish(self, kind: str, record: RequestRecord, accepted: list[int]) -> None:
        """Fill in what follows from the steps of an answer. `accepted`: draft tokens of each, of which the first is prefill."""
        record.output_tokens = len(record.ids)
        record.finish_reason = "stop" if record.ids[-1] in self.engine.end_tokens else "length"
        if kind == SPECULATIVE:
            histogram = [accepted[1:].count(length) for length in range(self.tree.num_steps + 1)]
            record.counts = AcceptanceCounts(len(accepted) - 1, sum(accepted), histogram)

    # Load by load

    def _run_load(self, kind: str, turns: list[QuestionTurn], load: Load, repeat: int) -> list[RequestRecord]:
        """Decode all turns, at most `load.concurrency` at once over all processes, and return the records of all processes.

        Each process has some of the slots, and their requests.
        """
        ranks, slots = self.ranks, min(load.concurrency or len(turns), len(turns))
        turn_indices = [n for n in range(len(turns)) if n % slots % ranks.world == ranks.rank]
        requests = [self._make_request(turns[n], load.max_new_tokens, repeat) for n in turn_indices]
        records = [RequestRecord(turns[n].id, input_tokens=len(turns[n].ids)) for n in turn_indices]
        engine, own_slots = self.engine, len(range(ranks.rank, slots, ranks.world))
        tree = None if kind == PLAIN else self.tree
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
            self._finish(kind, record, counts)
        indexed = distributed.all_gather_lists(ranks, list(zip(turn_indices, records, strict=True)))
        return [record for _, record in sorted(indexed, key=lambda pair: pair[0])]

    def _make_request(self, turn: QuestionTurn, length: int, repeat: int) -> DecodeRequest:
        limit = workload_prompts.compute_max_new_tokens(turn.question.length_share, length)
        return DecodeRequest(turn.ids, limit, self.images[turn.question.id], self._make_sampling_params(turn, repeat))


def load_engine(params: schema.Params, workload: Workload, checkpoint_name: str, ranks: RankContext) -> Engine:
    """Return the engine of target and draft on this process's device, or devices."""
    target, settings = manifest.read_manifest(), params.benchmark
    first = torch.device(ranks.device).index or 0
    # The process's own GPU is the first.
    gpus = [f"cuda:{first + n * settings.processes}" for n in range(settings.num_gpus_per_model)]
    on_one_device = ranks.device == "cpu" or (len(gpus) == 1 and settings.max_gpu_memory is None)
    load_device = ranks.device if on_one_device else "cpu"
    folder = str(manifest.resolve_weights_folder(target))
    model = loading.load_target(folder, params.target.dtype, load_device, params.target.trust_remote_code)
    if not on_one_device:
        place_model(model, gpus, settings.max_gpu_memory)
    head_check.check_drawn_logits(model, workload.temperature, target.logits_scale)
    end_tokens = [] if workload.ignore_eos else target.eos_token_ids
    return build_engine(params, checkpoint_name, model, target, ranks.device, end_tokens)[0]


def make_sampling_params(
    workload: Workload, samples_drafts: bool, prompt_id: str, repeat: int, turn: int
) -> SamplingParams | None:
    """Return the sampling of one answer, seeded by the workload's seed and the answer's position; None at temperature 0."""
    seed = f"{workload.seed}:{prompt_id}:{repeat}:{turn}"
    return sampling.make_sampling_params(workload.temperature, workload.top_p, workload.top_k, seed, samples_drafts)


def check_gpus(params: schema.Params) -> None:
    """Raises ValueError if fewer GPUs are visible than the stage is to use."""
    needed = params.benchmark.num_gpus_total
    if needed > 1 and params.target.device.startswith("cuda") and (found := torch.cuda.device_count()) < needed:
        raise ValueError(
            f"benchmark.num_gpus_total is {needed}, this stage sees {found} GPUs; lower it, or raise "
            "schedule.stages.benchmark.gpus (CUDA_VISIBLE_DEVICES, where you set it)"
        )


def read_device_clock(device: str) -> float:
    """Return seconds, after the device has finished all queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _line_up(records: list[RequestRecord]) -> list[RequestRecord]:
    """Shift the times of answers that were decoded one at a time, so that each follows the one before."""
    now = 0.0
    for record in records:
        record.events = [(now + time_s, tokens) for time_s, tokens in record.events]
        record.due, record.sent, record.ended = now, now, now + record.ended
        now = record.ended
    return records


def _add_step(record: RequestRecord, step: DecodeStep, end_s: float) -> None:
    record.events.append((end_s, len(step.tokens)))
    record.ids += step.tokens
