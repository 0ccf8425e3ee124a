"""benchmark: one cell of the table, by the torch engine.   python -m stages.benchmark WORKLOAD CHECKPOINT TREE

Plain and speculative decoding of the same prompts, in turns, so that a drifting machine touches both alike. At float32
the two must say the same: the share of identical answers is a metric of every greedy cell. Above temperature 0 both are
drawn from the same seed, so that one is not timed on a longer answer than the other (engine/sampling.py). A later turn
of a question comes after plain decoding's own earlier answers, for both: so both decode the same prompt, even where a
near-tie parted them.

A workload that keeps several prompts under way, or is a sweep, is measured in loads, as a server is: all of it plainly and
all of it speculatively, in turns (results/served_records.py has the cell). With several GPUs each process has a share of the prompts,
and of those under way; the first one writes what all of them measured.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch

from stages.data import workload_prompts
from stages.draft import checkpoint
from stages.draft.eagle3 import Eagle3Draft
from stages.engine import sampling, timing
from stages.engine.batch_decode import BatchEngine
from stages.engine.batch_state import DecodeRequest
from stages.engine.decode_state import DecodeStep
from stages.engine.device_placement import measure_remaining_memory, place_model
from stages.engine.memory_estimate import GIB, MemoryEstimate
from stages.engine.sampling import SamplingParams
from stages.grading import grade
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.section import get_named
from stages.params.tree_sections import TreeShape
from stages.results import clusters, interval, served_records, torch_records
from stages.runtime import distributed
from stages.runtime.all_gather import all_gather_json
from stages.serving import latency, request_records, spec_counters
from stages.target import chat_template, loading, manifest, vision
from stages.target.vision import ImagePatches
from stages.telemetry import gpu_energy
from stages.trees import acceptance

DECODING_KINDS = ("plain", "speculative")

Row = dict[str, Any]
OutputsByKind = dict[str, list[int]]  # by kind of decoding, the ids of an answer


@dataclass(frozen=True)
class TorchCellContext:
    """What every decoding of a cell needs."""

    p: schema.Params
    w: Workload
    tree: TreeShape
    group: distributed.RankContext
    engine: BatchEngine
    shown: dict[str, ImagePatches | None]  # the pictures of each prompt, by its id
    tokenizer: Any  # None where no text is needed
    prompts: pl.DataFrame  # as asked.ASKED
    warm: pl.DataFrame


def main(workload: str, name: str, tree_name: str) -> None:
    p = schema.load_params()
    b = p.benchmark
    _check_gpus(p)
    try:
        shared_out = distributed.launch_ranks("benchmark", [workload, name, tree_name], b.processes)
    except ValueError:
        raise ValueError(
            f"one of {b.processes} processes ended early; what it said is above. Correct that and run again, or set "
            "benchmark.num_gpus_total to num_gpus_per_model for one process"
        ) from None
    if not shared_out:
        with distributed.join_process_group(p.target.device) as group:
            _run_cell(p, workload, name, tree_name, group)


def _check_gpus(p: schema.Params) -> None:
    """Raises ValueError where this stage sees fewer GPUs than it is to use."""
    needed = p.benchmark.num_gpus_total
    if needed > 1 and p.target.device.startswith("cuda") and (found := torch.cuda.device_count()) < needed:
        raise ValueError(
            f"benchmark.num_gpus_total is {needed}, this stage sees {found} GPUs; lower it, or raise "
            "schedule.stages.benchmark.gpus (CUDA_VISIBLE_DEVICES, where you set it)"
        )


def _run_cell(p: schema.Params, workload: str, name: str, tree_name: str, group: distributed.RankContext) -> None:
    torch.set_num_threads(p.target.num_threads)
    meter, started = gpu_energy.EnergyMeter(p.target.gpus(p.benchmark.num_gpus_total)), time.perf_counter()
    tree, w = TreeShape.parse(tree_name), get_named(p.benchmark.workloads, workload, "benchmark.workloads")
    prompts, warm = workload_prompts.read_prompts(workload)
    if w.grade:
        workload_prompts.check_references(workload, prompts)
        grade.check_sandbox(prompts["reference"], workload, p.benchmark.allow_unsandboxed_code)
    images = dict(pl.concat([prompts, warm]).select("id", "images").iter_rows())
    # Decoded before any clock runs: a server's client sends them ready, too.
    shown = vision.load_image_patches(
        manifest.resolve_weights_folder(manifest.read_manifest()), p.target.trust_remote_code, images
    )
    engine = _build_engine(p, w, name, group)
    work = TorchCellContext(p, w, tree, group, engine, shown, _load_needed_tokenizer(p, w, prompts), prompts, warm)
    memory = _estimate_memory(work)
    if group.first:
        print(f"memory of a process: {memory}", flush=True)
    memory.check(measure_remaining_memory(engine.model, p.benchmark.max_gpu_memory), engine.device)
    found, said = _measure_prompt_by_prompt(work) if w.alone else _measure_in_loads(work)
    if not group.first:
        return
    whole = {
        "workload": workload,
        "checkpoint": name,
        "tree": tree_name,
        **tree.model_dump(),
        "engine": served_records.TORCH_ENGINE,
        "definitions": torch_records.DEFINITIONS,
        "temperature": w.temperature,
        "top_p": w.top_p,
        "top_k": w.top_k,
        **found,
        "hardware": _describe_hardware(p),
        "versions": torch_records.list_versions("torch", "transformers"),
        "seconds": round(time.perf_counter() - started, 2),
        "seed": w.seed,
        "gpus": meter.names(),
        "joules": meter.joules(),
    }
    file = torch_records.write_torch_cell(whole) if w.alone else served_records.write_served_cell(whole)
    print(f"{tree_name} at {name}: {said} -> {file}")


def _estimate_memory(work: TorchCellContext) -> MemoryEstimate:
    """What the longest of its loads will take, or the longest prompt alone. Raises ValueError for what can't be decoded."""
    w, world = work.w, work.group.world
    every = len(work.prompts)
    slots = [-(-min(cap or every, every) // world) for _, cap in w.points()]  # of a process
    tokens = _find_longest_prompt(work) + max(length for length, _ in w.points())
    return work.engine.estimate_memory(tokens, max(slots), _get_tree_tuple(work, "speculative"), w.temperature > 0)


def _describe_hardware(p: schema.Params) -> dict[str, Any]:
    total = p.benchmark.num_gpus_total
    return torch_records.describe_hardware(p.target.device, p.target.num_threads) | (
        {"num_gpus_total": total} if total > 1 else {}
    )


def _measure_prompt_by_prompt(work: TorchCellContext) -> tuple[dict[str, Any], str]:
    """The part of a cell that is measured, and the same in words."""
    work.engine.slots.reserve_length(_find_longest_prompt(work) + _get_max_new_tokens(work))
    for question in work.warm.iter_rows(named=True):  # not counted: first calls allocate and pick kernels
        for kind in DECODING_KINDS:
            drawn = _make_sampling_params(work, question["id"], 0, 0)
            list(_start_decoding(work, kind, question["prompt_ids"], question["id"], drawn))
    mine = [
        (repeat, number, row, [s.num_accepted for s in cycles], said)
        for repeat in range(work.w.repeats)
        for number, question in enumerate(work.prompts.iter_rows(named=True))
        if number % work.group.world == work.group.rank
        for row, cycles, said in _decode_turns(work, question, repeat, number)
    ]
    every = sorted(all_gather_json(work.group, mine), key=lambda one: one[:2])  # turns of a prompt stay in order
    rows: list[Row] = [row for _, _, row, _, _ in every]
    histogram = np.zeros(work.tree.num_steps + 1, dtype=np.int64)
    for _, _, _, accepted, _ in every:
        histogram += np.bincount(accepted, minlength=work.tree.num_steps + 1)
    spoken = [said for *_, said in every]  # to be graded now that no clock runs
    metrics = _compute_metrics(rows, work.tree, work.w.prompts)
    same = metrics["identical_share"]
    alike = "" if same is None else f"identical {same:.0%} of "
    found = {
        "metrics": metrics,
        "repeats": _summarise_repeats(rows, work.w.prompts),
        "quality": _grade_first_turns(work, rows, spoken, dict(work.prompts.select("id", "reference").iter_rows())),
        "histogram": histogram.tolist(),
        "prompts": rows,
    }
    return found, f"tau {metrics['tau']:.3f}, speedup {metrics['speedup']:.2f}, {alike}{len(rows)} answers"


def _get_max_new_tokens(work: TorchCellContext) -> int:
    assert isinstance(work.w.max_new_tokens, int), "params.Workload.alone sees to it"
    return work.w.max_new_tokens


def _decode_turns(
    work: TorchCellContext, question: Row, repeat: int, number: int
) -> Iterator[tuple[Row, list[DecodeStep], OutputsByKind]]:
    """Of each turn its row, its cycles, and what both said.

    Who goes first changes from prompt to prompt, from repeat to repeat and from turn to turn.
    """
    messages, ids, answer = question["messages"], question["prompt_ids"], ""
    for turn, says in enumerate([None, *(question["later"] or [])]):
        if says is not None:
            messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": says}]
            ids = chat_template.encode_prompt(work.tokenizer, messages, work.p.sample_target.thinking)
        order = DECODING_KINDS if (number + repeat + turn) % 2 == 0 else DECODING_KINDS[::-1]
        drawn = _make_sampling_params(work, question["id"], repeat, turn)
        both = {
            kind: timing.time_decode(
                partial(_start_decoding, work, kind, ids, question["id"], drawn), work.p.target.device
            )
            for kind in order
        }
        mine, plain = both["speculative"], both["plain"]
        said, plain_said, cycles = mine.tokens, plain.tokens, mine.cycles
        row = {
            "id": question["id"],
            "repeat": repeat,
            "turn": turn,
            "prompt_tokens": len(ids),
            "output_tokens": len(said),
            "cycles": len(cycles),
            "accepted": sum(s.num_accepted for s in cycles),
            "identical": None if drawn else said == plain_said,
            "divergence_margin": None
            if drawn
            else _measure_divergence_margin(work.engine, ids, work.shown[question["id"]], said, plain_said),
            "finish_reason": "stop" if said[-1] in work.engine.end_tokens else "length",
            "prefill_latency_s": mine.prefill_s,
            "e2e_latency_s": mine.total_s,
            "correct": None,
            "baseline_output_tokens": len(plain_said),
            "baseline_prefill_latency_s": plain.prefill_s,
            "baseline_e2e_latency_s": plain.total_s,
            "baseline_correct": None,
        }
        yield row, cycles, {"plain": plain_said, "speculative": said}
        if work.tokenizer is not None:
            answer = _decode_text(work, plain_said)


def _make_sampling_params(work: TorchCellContext, name: str, repeat: int, turn: int) -> SamplingParams | None:
    """By the workload's seed and what is answered."""
    w = work.w
    return sampling.make_sampling_params(w.temperature, w.top_p, w.top_k, f"{w.seed}:{name}:{repeat}:{turn}")


def _start_decoding(
    work: TorchCellContext, kind: str, ids: list[int], name: str, drawn: SamplingParams | None
) -> Iterator[DecodeStep]:
    most, pictures, tree = _get_max_new_tokens(work), work.shown[name], work.tree
    if kind == "plain":
        return work.engine.decode_plain(ids, most, pictures, drawn)
    return work.engine.decode_speculative(ids, most, tree.num_steps, tree.topk, tree.num_draft_tokens, pictures, drawn)


def _load_needed_tokenizer(p: schema.Params, w: Workload, prompts: pl.DataFrame) -> Any:
    """Where answers are graded, or later turns follow them."""
    if not w.grade and not prompts["later"].is_not_null().any():
        return None
    made = manifest.read_manifest()
    return chat_template.load_tokenizer(
        manifest.resolve_weights_folder(made), p.target.trust_remote_code, made.chat_template
    )


def _decode_text(work: TorchCellContext, ids: list[int]) -> str:
    """An answer as a server would send it: without the target's special tokens."""
    return work.tokenizer.decode(ids, skip_special_tokens=True)


def _build_engine(p: schema.Params, w: Workload, name: str, group: distributed.RankContext) -> BatchEngine:
    made, b = manifest.read_manifest(), p.benchmark
    first = torch.device(group.device).index or 0
    cards = [f"cuda:{first + n * b.processes}" for n in range(b.num_gpus_per_model)]  # the first is the process's own
    whole = group.device == "cpu" or (len(cards) == 1 and b.max_gpu_memory is None)
    lies = group.device if whole else "cpu"
    model = loading.load_target(
        str(manifest.resolve_weights_folder(made)), None, p.target.dtype, lies, p.target.trust_remote_code
    )
    if not whole:
        place_model(model, cards, b.max_gpu_memory)
    config, tensors = checkpoint.read_draft(checkpoint.locate_checkpoint(name), p.made_by(name))
    draft = Eagle3Draft.of(config, tensors).to(group.device, model.dtype).requires_grad_(False)
    eos = [] if w.ignore_eos else made.eos_token_ids
    return BatchEngine(model, eos, made.feature_layers, draft, p.benchmark.semantics)


def _measure_divergence_margin(
    engine: BatchEngine, prompt: list[int], pictures: ImagePatches | None, said: list[int], plain_said: list[int]
) -> float | None:
    """How sure the target was where two answers part: a near-tie is rounding, a wide gap would be a defect."""
    if said == plain_said:
        return None
    shared = next(
        (i for i, (a, b) in enumerate(zip(said, plain_said, strict=False)) if a != b), min(len(said), len(plain_said))
    )
    return engine.measure_margin(prompt, plain_said[:shared], pictures)


# Loads


@dataclass(frozen=True)
class TurnRequest:
    """A turn of a question."""

    question: Row  # as asked.ASKED
    turn: int
    messages: list[dict[str, str]] | None  # None of random prompts
    ids: list[int]


def _measure_in_loads(work: TorchCellContext) -> tuple[dict[str, Any], str]:
    """As `_measure_prompt_by_prompt`, with a point for each answer length and concurrency."""
    _warm_up(work)
    points: dict[str, list[Row]] = {kind: [] for kind in DECODING_KINDS}
    for point in work.w.points():
        repeats = [_run_both_kinds(work, *point, repeat) for repeat in range(work.w.repeats)]
        for kind in DECODING_KINDS:
            points[kind].append(_build_point(work, kind, *point, [both[kind] for both in repeats]))
    made = manifest.read_manifest()
    said: list[str] = []
    for ours, plain in zip(points["speculative"], points["plain"], strict=True):
        speeds = [float(np.mean([one["output_throughput"] for one in p["loads"]])) for p in (ours, plain)]
        load = f"{ours['max_new_tokens']} tokens, {ours['concurrency'] or 'all'} at once"
        said.append(f"{load}: tau {ours['acceptance']['tau']:.3f}, {speeds[0]:.1f} tokens/s, plain {speeds[1]:.1f}")
    found: Row = {
        "status": served_records.RAN,
        "reason": None,
        "fingerprint": {"target": [made.model, made.revision, made.config_digest]},  # its baseline is its own
        "server": {"command": [], "info": {}},
        "memory": dict.fromkeys(served_records.MEMORY_KEYS) | _convert_to_gib(_estimate_memory(work)),
        "points": points["speculative"],
        "baseline_points": points["plain"],
    }
    return found, "; ".join(said)


def _find_longest_prompt(work: TorchCellContext) -> int:
    """Tokens of the longest prompt of a first turn."""
    return max(int(rows["prompt_ids"].list.len().max() or 0) for rows in (work.prompts, work.warm))


def _convert_to_gib(memory: MemoryEstimate) -> dict[str, float]:
    """Of one process, under the names of served.MEMORY."""
    sizes = {"weights": memory.target, "draft": memory.draft, "kv_cache": memory.cache}
    return {name: round(size / GIB, 3) for name, size in sizes.items()} | {"kv_tokens": memory.cache_tokens}


def _warm_up(work: TorchCellContext) -> None:
    """Not counted: first calls allocate and pick kernels."""
    asks = [DecodeRequest(row["prompt_ids"], 2, work.shown[row["id"]]) for row in work.warm.iter_rows(named=True)]
    for kind in DECODING_KINDS if asks else ():
        list(work.engine.decode_batch(asks, len(asks), _get_tree_tuple(work, kind)))


def _get_tree_tuple(work: TorchCellContext, kind: str) -> tuple[int, int, int] | None:
    t = work.tree
    return None if kind == "plain" else (t.num_steps, t.topk, t.num_draft_tokens)


def _run_both_kinds(
    work: TorchCellContext, length: int, cap: int | None, repeat: int
) -> dict[str, list[list[latency.RequestRecord]]]:
    """One repeat of one point, by kind of decoding: a load for each turn. Who goes first changes with both."""
    found: dict[str, list[list[latency.RequestRecord]]] = {kind: [] for kind in DECODING_KINDS}
    waiting = [TurnRequest(row, 0, row["messages"], row["prompt_ids"]) for row in work.prompts.iter_rows(named=True)]
    while waiting:
        for kind in DECODING_KINDS if (repeat + waiting[0].turn) % 2 == 0 else DECODING_KINDS[::-1]:
            found[kind].append(_run_load(work, kind, waiting, length, cap, repeat))
        waiting = _list_next_turns(work, waiting, found["plain"][-1])
    return found


def _list_next_turns(
    work: TorchCellContext, answered: list[TurnRequest], records: list[latency.RequestRecord]
) -> list[TurnRequest]:
    """What is asked after these, of questions that have a later turn."""
    found: list[TurnRequest] = []
    for request, record in zip(answered, records, strict=True):
        later = request.question["later"] or []
        if request.messages is not None and len(later) > request.turn:
            said = {"role": "assistant", "content": _decode_text(work, record.ids)}
            messages = [*request.messages, said, {"role": "user", "content": later[request.turn]}]
            ids = chat_template.encode_prompt(work.tokenizer, messages, work.p.sample_target.thinking)
            found.append(TurnRequest(request.question, request.turn + 1, messages, ids))
    return found


def _run_load(
    work: TorchCellContext, kind: str, every: list[TurnRequest], length: int, cap: int | None, repeat: int
) -> list[latency.RequestRecord]:
    """All of them, at most `cap` at once over all processes; each process has some of those slots and their requests."""
    group, slots = work.group, min(cap or len(every), len(every))
    numbers = [n for n in range(len(every)) if n % slots % group.world == group.rank]
    asks = [_make_request(work, every[n], length, repeat) for n in numbers]
    own = len(range(group.rank, slots, group.world))
    if asks:
        work.engine.warm_up(asks, own, _get_tree_tuple(work, kind))
        if work.engine.uses_cuda_graphs:  # all prompts are read once, uncounted, as in timing.timed
            list(
                work.engine.decode_batch([ask._replace(max_new_tokens=1) for ask in asks], own, _get_tree_tuple(work, kind))
            )
    all_gather_json(group, [])  # all begin together
    begun = timing.read_device_clock(group.device)
    records = [
        latency.RequestRecord(
            f"{every[n].question['id']}#{every[n].turn}", 0.0, 0.0, 0.0, [], True, len(ask.prompt), 0, None, None
        )
        for n, ask in zip(numbers, asks, strict=True)
    ]
    accepted: list[list[int]] = [[] for _ in asks]  # drafts of each cycle; of the first token, from prefill, 0
    for told in work.engine.decode_batch(asks, own, _get_tree_tuple(work, kind)) if asks else ():
        now = time.perf_counter() - begun
        for number, step in told:
            record = records[number]
            if step is None:
                record.sent = now
            else:
                record.events.append((now, len(step.tokens)))
                record.ids += step.tokens
                accepted[number].append(step.num_accepted)
    for record, drafts in zip(records, accepted, strict=True):
        record.ended, record.output_tokens = record.events[-1][0], len(record.ids)
        record.finish_reason = "stop" if record.ids[-1] in work.engine.end_tokens else "length"
        if kind == "speculative":
            histogram = np.bincount(drafts[1:], minlength=work.tree.num_steps + 1).tolist()
            record.counts = spec_counters.AcceptanceCounts(len(drafts) - 1, sum(drafts), 0, True, histogram)
    mine = [[n, asdict(record)] for n, record in zip(numbers, records, strict=True)]
    return [_parse_record(one) for _, one in sorted(all_gather_json(group, mine), key=lambda pair: pair[0])]


def _parse_record(found: Row) -> latency.RequestRecord:
    """From what another process says of it."""
    kept = found["counts"]
    events = [(at, tokens) for at, tokens in found["events"]]
    return latency.RequestRecord(**found | {"events": events, "counts": kept and spec_counters.AcceptanceCounts(*kept)})


def _make_request(work: TorchCellContext, request: TurnRequest, length: int, repeat: int) -> DecodeRequest:
    name = request.question["id"]
    most = workload_prompts.compute_max_new_tokens(request.question["length_share"], length)
    return DecodeRequest(request.ids, most, work.shown[name], _make_sampling_params(work, name, repeat, request.turn))


def _build_point(
    work: TorchCellContext, kind: str, length: int, cap: int | None, repeats: list[list[list[latency.RequestRecord]]]
) -> Row:
    """As served.POINT."""
    every = [(n, turn, r) for n, turns in enumerate(repeats) for turn, load in enumerate(turns) for r in load]
    references = dict(work.prompts.select("id", "reference").iter_rows())
    graded = [
        None if turn or not work.w.grade else _is_right(work, references[request_records.get_question_id(r)], r.ids)
        for _, turn, r in every
    ]
    marks = [
        (references[request_records.get_question_id(r)], mark)
        for (_, _, r), mark in zip(every, graded, strict=True)
        if mark is not None
    ]
    few = len(work.prompts)
    return {
        "max_new_tokens": length,
        "concurrency": cap,
        "request_rate": work.w.request_rate,
        "loads": [latency.summarise_load(request_records.join_turns(turns)) for turns in repeats],
        "acceptance": _compute_acceptance(work, repeats) if kind == "speculative" else None,
        "quality": grade.summarise_grades([words for words, _ in marks], [mark for _, mark in marks])
        if marks
        else None,
        "requests": [request_records.make_request_row(*one, mark) for one, mark in zip(every, graded, strict=True)],
        "warnings": [f"{few} prompts, so never {cap} at once"] if cap and cap > few else [],
    }


def _compute_acceptance(work: TorchCellContext, repeats: list[list[list[latency.RequestRecord]]]) -> Row:
    """As served.ACCEPTANCE, of all requests; the interval is over conversations."""
    names, counted = [], []
    for r in (r for turns in repeats for load in turns for r in load):
        assert r.counts is not None, "_load counts"
        names.append(clusters.cluster_of(work.w.prompts, request_records.get_question_id(r)))
        counted.append([r.counts.accepted, r.counts.cycles, *r.counts.histogram])
    accepted, cycles, *histogram = clusters.sums(names, np.array(counted)).T  # [C] each
    tau = acceptance.compute_tau(accepted, cycles)
    low, high = interval.of_tau(accepted, cycles, work.tree.num_steps) or (None, None)
    nodes = cycles.sum() * (work.tree.num_draft_tokens - 1)
    return {
        "tau": tau,
        "tau_low": low,
        "tau_high": high,
        "accept_rate": (tau - 1) / work.tree.num_steps,
        "node_accept_rate": float(accepted.sum() / max(1, nodes)),
        "cycles": int(cycles.sum()),
        "accepted": int(accepted.sum()),
        "histogram": [int(count.sum()) for count in histogram],
        "clipped": True,
        "engine": {},
    }


# Grades


def _is_right(work: TorchCellContext, reference: str, ids: list[int]) -> bool:
    return grade.grade_answer(reference, _decode_text(work, ids), work.p.benchmark.allow_unsandboxed_code)


def _grade_first_turns(
    work: TorchCellContext, rows: list[Row], spoken: list[OutputsByKind], references: dict[str, str]
) -> dict[str, Any] | None:
    """Fills in `correct` and `baseline_correct` of first turns, and says how many are; None where nothing is graded."""
    if not work.w.grade:
        return None
    first = [(row, said) for row, said in zip(rows, spoken, strict=True) if row["turn"] == 0]
    for row, said in first:
        for kind, column in (("plain", "baseline_correct"), ("speculative", "correct")):
            row[column] = _is_right(work, references[row["id"]], said[kind])
    graded = [references[row["id"]] for row, _ in first]
    return {
        "plain": grade.summarise_grades(graded, [row["baseline_correct"] for row, _ in first]),
        "speculative": grade.summarise_grades(graded, [row["correct"] for row, _ in first]),
    }


# Metrics


def _compute_metrics(rows: list[Row], tree: TreeShape, prompts: str) -> dict[str, float | None]:
    """Return cell.METRICS, as docs/metrics.md defines them; `prompts` is the workload's. Intervals are over conversations."""
    accepted, cycles = (_by_cluster(rows, k, prompts).sum(1) for k in ("accepted", "cycles"))  # [C]
    tau = acceptance.compute_tau(accepted, cycles)
    low, high = interval.of_tau(accepted, cycles, tree.num_steps) or (None, None)
    seconds, plain_seconds = (sum(r[k] for r in rows) for k in ("e2e_latency_s", "baseline_e2e_latency_s"))
    tokens, plain_tokens = (sum(r[k] for r in rows) for k in ("output_tokens", "baseline_output_tokens"))
    output_tok_s, baseline_tok_s = tokens / seconds, plain_tokens / plain_seconds
    speedup_low, speedup_high = interval.of_speedup(*_collect_speed_columns(rows, prompts)) or (None, None)
    return {
        "tau": tau,
        "tau_low": low,
        "tau_high": high,
        "accept_rate": (tau - 1) / tree.num_steps,
        "node_accept_rate": float(accepted.sum() / max(1, cycles.sum() * (tree.num_draft_tokens - 1))),
        "prefill_latency_s": float(np.mean([r["prefill_latency_s"] for r in rows])),
        "e2e_latency_s": seconds / len(rows),
        "output_tok_s": output_tok_s,
        "baseline_output_tok_s": baseline_tok_s,
        "speedup": output_tok_s / baseline_tok_s,
        "speedup_low": speedup_low,
        "speedup_high": speedup_high,
        "identical_share": None if rows[0]["identical"] is None else float(np.mean([r["identical"] for r in rows])),
    }


def _by_cluster(rows: list[Row], column: str, prompts: str) -> np.ndarray:
    """Return sums of a column, [C, R]: of each conversation, in each repeat."""
    values = np.zeros((len(rows), 1 + max(row["repeat"] for row in rows)), dtype=type(rows[0][column]))
    for number, row in enumerate(rows):
        values[number, row["repeat"]] = row[column]
    return clusters.sums([clusters.cluster_of(prompts, row["id"]) for row in rows], values)


def _summarise_repeats(rows: list[Row], prompts: str) -> list[dict[str, float]]:
    """Of each repeat alone, its speed and speedup: how much the machine drifts."""
    tokens, seconds, plain_tokens, plain_seconds = (
        column.sum(0) for column in _collect_speed_columns(rows, prompts)
    )  # [R]
    speed, plain = tokens / seconds, plain_tokens / plain_seconds
    return [
        {"output_tok_s": float(a), "baseline_output_tok_s": float(b), "speedup": float(a / b)}
        for a, b in zip(speed, plain, strict=True)
    ]


def _collect_speed_columns(rows: list[Row], prompts: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return [C, R] each: tokens and seconds, speculative and then plain."""
    tokens, seconds = _by_cluster(rows, "output_tokens", prompts), _by_cluster(rows, "e2e_latency_s", prompts)
    plain_tokens = _by_cluster(rows, "baseline_output_tokens", prompts)
    return tokens, seconds, plain_tokens, _by_cluster(rows, "baseline_e2e_latency_s", prompts)


if __name__ == "__main__":
    schema.run_stage(main)
