"""benchmark_served: one cell, by a serving engine.   python -m stages.benchmark_served WORKLOAD [CHECKPOINT TREE]

A cell is one server configuration under one workload; without a checkpoint and a tree it is the baseline, the same server
without a draft. A workload that is a sweep gives a point for each pair of answer length and concurrency, all on one server.
The server is started for the cell and ended with it, or is one of yours (benchmark_served.server.base_urls). What an engine
can't run becomes a cell that says so; what would measure something else than was asked stops with an explanation.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

from stages.data import workload_prompts
from stages.draft import checkpoint
from stages.grading import grade
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.section import get_named
from stages.params.tree_sections import TreeShape
from stages.results import clusters, interval, served_records, torch_records
from stages.serving import engine_flags, gpu_memory, http_session, latency, load_generator, request_records, server
from stages.serving.load_generator import Arrivals, LoadRequest, LoadResult
from stages.target import chat_template, manifest, vision
from stages.telemetry import gpu_energy
from stages.trees import acceptance

SECTION = "benchmark_served.server"
LOGS_FOLDER = Path(".scratch/served")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIN_JUDGED_CYCLES = 20  # cycles without a single accepted draft that are no accident
RELEASED_GIB, RELEASE_S = 1.0, 30.0  # of a GPU's memory, and how long after the server's end


@dataclass
class ServedCellContext:
    """What every load of the cell needs."""

    p: schema.Params
    name: str
    w: Workload
    rows: pl.DataFrame  # as asked.ASKED
    warmup: pl.DataFrame
    made: manifest.TargetManifest
    folder: Path  # the target
    setup: engine_flags.ServerSetup
    eyes: vision.CachedImageProcessor | None

    @cached_property
    def key(self) -> str | None:
        return http_session.read_api_key(self.p.benchmark_served.server.api_key_env, SECTION)

    @cached_property
    def tokenizer(self) -> Any:
        return chat_template.load_tokenizer(self.folder, self.p.target.trust_remote_code, self.made.chat_template)

    @property
    def model(self) -> str:
        return self.p.benchmark_served.server.model or str(self.folder)


@dataclass
class MeasuredServer:
    """A server configuration of the cell, and what was measured on it."""

    checkpoint: str | None
    tree: TreeShape | None
    draft: engine_flags.ServedDraft | None
    flags: list[str]
    loads: dict[tuple[int, int | None], list[list[LoadResult]]] = field(default_factory=dict)  # point -> repeat -> turn
    said: dict[str, Any] = field(default_factory=dict)
    line: list[str] = field(default_factory=list)
    gpu: dict[str, float | None] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str | None, str | None]:
        """Of checkpoint and tree."""
        return self.checkpoint, self.tree.name if self.tree else None

    @property
    def config(self) -> str:
        return served_records.name_server_config(*self.names)


def main(workload: str, name: str = "", tree_name: str = "") -> None:
    if bool(name) != bool(tree_name):
        raise ValueError(
            f"expected WORKLOAD [CHECKPOINT TREE], found {workload} {name}; a cell with a draft needs both"
        )
    p = schema.load_params()
    meter, started = gpu_energy.EnergyMeter(_list_stage_gpus(p, name, tree_name)), time.perf_counter()
    w = get_named(p.benchmark.workloads, workload, "benchmark.workloads")
    made = manifest.read_manifest()
    folder, before = manifest.resolve_weights_folder(made).absolute(), gpu_memory.list_visible_gpus()
    tree = TreeShape.parse(tree_name) if name else None
    config: dict[str, Any] = {}
    if name:
        config, _ = checkpoint.read_draft(checkpoint.locate_checkpoint(name), p.made_by(name))
    rows, warmup = workload_prompts.read_prompts(workload)
    if w.grade:
        workload_prompts.check_references(workload, rows)
        grade.check_sandbox(rows["reference"], workload, p.benchmark.allow_unsandboxed_code)
    setup, eyes = _build_setup(p, w, made, folder, config), _load_image_processor(p, folder, rows)
    work = ServedCellContext(p, workload, w, rows, warmup, made, folder, setup, eyes)
    side, plain = _configure_server(work, name, tree, config), MeasuredServer(None, None, None, [])
    engine = p.benchmark_served.engine
    reason = engine_flags.explain_unsupported(engine, *_get_tree_tuple(tree), config) if tree else None
    reason = reason or (f"{engine} takes no pictures with token ids" if work.eyes and engine == "vllm" else None)
    if not reason:
        _check_fits(work, tree, config)
        _measure_repeats(work, side, plain if tree and p.benchmark_served.interleave else None)
    took = {"seconds": round(time.perf_counter() - started, 2), "gpus": meter.names(), "joules": meter.joules()}
    found = _build_cell(work, side, plain, reason, before) | took
    print(_describe_result(found, served_records.write_served_cell(found)))


def _list_stage_gpus(p: schema.Params, name: str, tree_name: str) -> list[int]:
    """Those that the cell's server takes; none here, where one is used that runs somewhere."""
    s = p.benchmark_served.server
    known = served_records.name_server_config(name or None, tree_name or None) in s.base_urls
    return [] if known or p.target.device == "cpu" else list(range(s.tp))


def _get_tree_tuple(tree: TreeShape) -> tuple[int, int, int]:
    return tree.num_steps, tree.topk, tree.num_draft_tokens


def _configure_server(
    work: ServedCellContext, name: str, tree: TreeShape | None, config: dict[str, Any]
) -> MeasuredServer:
    if tree is None:
        return MeasuredServer(None, None, None, [])
    s = work.p.benchmark_served
    draft = engine_flags.ServedDraft(
        str((checkpoint.locate_checkpoint(name) / "draft").absolute()), s.server.algorithm, *_get_tree_tuple(tree)
    )
    return MeasuredServer(name, tree, draft, engine_flags.build_speculation_flags(s.engine, draft, config))


def _build_setup(
    p: schema.Params, w: Workload, made: manifest.TargetManifest, folder: Path, config: dict[str, Any]
) -> engine_flags.ServerSetup:
    s = p.benchmark_served.server
    most = [cap for _, cap in w.points() if cap is not None]
    holds = config.get("max_position_embeddings", made.max_position_embeddings)
    return engine_flags.ServerSetup(
        p.benchmark_served.engine, str(folder), p.target.dtype, p.target.device, p.target.trust_remote_code,
        s.tp, s.mem_fraction, s.max_total_tokens, s.max_batch or max(most, default=None),
        holds if holds < made.max_position_embeddings else None,  # an engine refuses a draft that holds less than it does
        s.torch_compile, tuple(s.launch_args),
    )  # fmt: skip


def _load_image_processor(p: schema.Params, folder: Path, rows: pl.DataFrame) -> vision.CachedImageProcessor | None:
    """What shows the pictures, where there are any."""
    return (
        vision.CachedImageProcessor(folder, p.target.trust_remote_code)
        if (rows["images"].list.len() > 0).any()
        else None
    )


def _count_needed_tokens(work: ServedCellContext, tree: TreeShape | None) -> int:
    """Tokens that the longest request may take: prompt, answer, and a tree beyond it."""
    longest = max(_find_longest_prompt(work), work.warmup["prompt_ids"].list.len().max() or 0)
    return longest + max(length for length, _ in work.w.points()) + (tree.num_draft_tokens if tree else 0)


def _check_fits(work: ServedCellContext, tree: TreeShape | None, config: dict[str, Any]) -> None:
    """Raises ValueError where target or draft hold too few positions for what will be asked."""
    need, target = _count_needed_tokens(work, tree), work.made.max_position_embeddings
    for who, holds in (("the target", target), ("the draft", config.get("max_position_embeddings", target))):
        if holds < need:
            raise ValueError(
                f"{who} holds {holds} positions (max_position_embeddings), expected at least {need}: the longest prompt of "
                f"workload {work.name}, its answer and a tree. Lower max_new_tokens or choose shorter prompts; a draft's is "
                "init_draft.max_position_embeddings, and rope allows more without training anew"
            )


# Measuring


def _measure_repeats(work: ServedCellContext, side: MeasuredServer, plain: MeasuredServer | None) -> None:
    """All repeats of all points. With `plain` each repeat has a server without a draft too, in turns, so that a drifting
    machine touches both alike.
    """
    every = list(range(work.w.repeats))
    if plain is None:
        rounds = [(side, every)]
    else:
        rounds = [(s, [n]) for n in every for s in ((plain, side) if n % 2 == 0 else (side, plain))]
    for one, repeats in rounds:
        with _open_server(work, one) as (url, check):
            for number in repeats:
                for point in work.w.points():
                    begun = time.perf_counter()
                    turns = asyncio.run(_run_load(work, one, url, check, point, number))
                    one.loads.setdefault(point, []).append(turns)
                    print(_describe_load(work, one, point, number, turns, time.perf_counter() - begun), flush=True)


@contextlib.contextmanager
def _open_server(work: ServedCellContext, side: MeasuredServer) -> Iterator[tuple[str, Any]]:
    """(its URL, what looks after it) of a server of this side: one of the user's, or one that is started for the block."""
    s = work.p.benchmark_served
    if side.config in s.server.base_urls:
        url = http_session.strip_api_path(s.server.base_urls[side.config])
        asyncio.run(_identify_server(work, side, url, lambda: None))
        yield url, lambda: None
        return
    if s.server.base_urls:
        print(f"note: benchmark_served.server.base_urls has no {side.config}; starting one", flush=True)
    before = gpu_memory.list_visible_gpus()
    if work.p.target.device != "cpu":
        gpu_memory.check_free_memory(before[: s.server.tp], s.server.mem_fraction)
        _check_weights_fit(work, side, sum(gpu.total for gpu in before[: s.server.tp]) * s.server.mem_fraction)
    port = server.find_free_port()
    side.line = [*engine_flags.build_setup_command(work.setup, port, s.server.command), *side.flags]
    log = LOGS_FOLDER / f"{served_records.name_served_cell(work.name, *side.names)}.log"
    print(f"starting {s.engine} for {side.config}; its log is {log}", flush=True)
    threads = work.p.target.num_threads if work.p.target.device == "cpu" else None
    with server.run_server(
        s.engine, side.line, port, str(work.folder), log, s.server.start_timeout_s, threads=threads, section=SECTION
    ) as running:
        asyncio.run(_identify_server(work, side, running.base_url, running.check))
        side.gpu = {"gpu_before": _sum_used_gib(before), "gpu_serving": _sum_used_gib(gpu_memory.list_visible_gpus())}
        yield running.base_url, running.check
    side.gpu["gpu_after"] = _wait_for_release(before)


def _check_weights_fit(work: ServedCellContext, side: MeasuredServer, room: float) -> None:
    """Says what the server will hold, in GiB, of the `room` it may take. Raises ValueError where the weights alone don't fit."""
    m, gib = work.made, 2**30
    held = sum(file.stat().st_size for file in work.folder.glob("*.safetensors")) / gib
    draft = _measure_draft_gib(side) or 0.0
    token = 2 * m.num_layers * m.num_key_value_heads * m.head_dim * DTYPE_BYTES[work.p.target.dtype]  # keys and values
    tokens = max(_get_concurrency(work, cap) * (_find_longest_prompt(work) + length) for length, cap in work.w.points())
    cache = min(tokens, work.setup.max_total_tokens or tokens) * token / gib
    print(
        f"memory: {held:.2f} GiB of weights, {draft:.2f} of the draft, {cache:.2f} of KV cache at most "
        f"({tokens} tokens of {token} bytes), of {room:.2f} GiB",
        flush=True,
    )
    if room and held + draft > room:
        raise ValueError(
            f"the target's weights are {held:.1f} GiB and the draft's {draft:.1f}, expected less than {room:.1f} GiB "
            "(benchmark_served.server.mem_fraction of the GPU's memory, times tp); raise tp or mem_fraction, or take a "
            "larger GPU"
        )


def _get_concurrency(work: ServedCellContext, cap: int | None) -> int:
    return min(cap or len(work.rows), len(work.rows))


def _find_longest_prompt(work: ServedCellContext) -> int:
    return int(work.rows["prompt_ids"].list.len().max())


async def _identify_server(work: ServedCellContext, side: MeasuredServer, url: str, check: Any) -> None:
    """Learn what the server is, and that it is the one meant. Raises ValueError where it isn't."""
    async with http_session.HttpSession(work.model, work.w.deadline_s, SECTION, work.key) as http:
        try:
            engine = await http.engine_of(url)
            side.said = await engine_flags.fetch_server_info(http, url, engine)
        except http_session.ExchangeFailedError as error:
            check()
            raise ValueError(f"{url} can't be asked: {error}; is it running? Correct {SECTION}.base_urls") from None
    if engine != work.setup.engine:
        raise ValueError(f"{url} is served by {engine}, expected {work.setup.engine}; correct benchmark_served.engine")
    most = max((cap for _, cap in work.w.points() if cap is not None), default=None)
    engine_flags.check_server_info(
        side.said, side.draft, min(most, len(work.rows)) if most else None, _count_needed_tokens(work, side.tree)
    )


def _sum_used_gib(found: list[gpu_memory.GpuMemory]) -> float | None:
    return round(sum(gpu.used for gpu in found), 2) if found else None


def _wait_for_release(before: list[gpu_memory.GpuMemory]) -> float | None:
    """GiB in use once the server has let go of its memory; says so where it doesn't."""
    until = time.monotonic() + RELEASE_S
    while (after := _sum_used_gib(gpu_memory.list_visible_gpus())) is not None and after > (
        _sum_used_gib(before) or 0
    ) + RELEASED_GIB:
        if time.monotonic() > until:
            print(
                f"warning: {after} GiB are still in use {RELEASE_S:g} s after the server's end, {_sum_used_gib(before)} were before"
            )
            break
        time.sleep(0.5)
    return after


async def _run_load(
    work: ServedCellContext, side: MeasuredServer, url: str, check: Any, point: tuple[int, int | None], number: int
) -> list[LoadResult]:
    """One repeat of one point: a load for each turn, the later ones asked after the engine's own earlier answers."""
    length, cap = point
    w, arrivals = work.w, Arrivals(work.w.rate, cap, work.w.seed + number)
    about = f"{side.config}, {length} tokens, {cap or 'no limit'} at once"
    asks, warmup, loads = (
        _make_first_requests(work, work.rows, length),
        _make_first_requests(work, work.warmup, length),
        [],
    )
    while asks:
        with tqdm(total=len(asks), desc=about, unit="request", mininterval=2) as bar:
            found = await load_generator.run_load(
                url, work.model, asks, arrivals, w.deadline_s, warmup, SECTION, work.key, work.setup.engine, check, bar.update
            )  # fmt: skip
        _check_answered(about, found)
        loads.append(found)
        asks, warmup = _make_next_requests(work, loads, length), []
    _check_drafts_accepted(work, side, loads)
    return loads


def _check_answered(about: str, found: LoadResult) -> None:
    failed = [r for r in found.records if r.failed]
    if len(failed) == len(found.records):
        raise ValueError(f"{about}: all {len(failed)} requests failed, the first: {failed[0].failed}, {failed[0].why}")


def _check_drafts_accepted(work: ServedCellContext, side: MeasuredServer, loads: list[LoadResult]) -> None:
    """Raises ValueError where a draft is served and not one draft token was accepted: a draft is never that bad."""
    cycles, accepted = _sum_counts(loads)
    if side.draft and cycles >= MIN_JUDGED_CYCLES and accepted == 0:
        raise ValueError(
            f"{side.config}: tau is exactly 1.00, no draft was accepted in {cycles} cycles. The engine drafts from something "
            f"else than this draft: benchmark_served.server.algorithm is {side.draft.algorithm}, and with EAGLE SGLang leaves "
            "out an EAGLE-3 draft's fusion of layers (expected EAGLE3); or the draft is another target's, or its tensors have "
            "names that the engine passes over; or the target's own answers are noise there (SGLang 0.5.17 looks for lm_head in "
            "a Qwen3-MoE with tied embeddings). Replay says what to expect: results/replay"
        )
    if side.draft and not cycles and not any(found.uncounted for found in loads):
        tokens = sum(r.output_tokens for found in loads for r in found.records)
        if tokens > len(work.rows) * 2:
            raise ValueError(
                f"{side.config}: the engine says nothing of accepted drafts; is speculation on? It says it runs "
                f"{side.said.get('speculative_algorithm', 'nobody knows what')}"
            )


def _sum_counts(loads: list[LoadResult]) -> tuple[int, int]:
    """Cycles and accepted drafts of some loads."""
    counts = [c for found in loads for c in _list_counts(found)]
    return sum(c.cycles for c in counts), sum(c.accepted for c in counts)


def _list_counts(found: LoadResult) -> list[Any]:
    return [found.counters] if found.counters else [r.counts for r in found.records if r.counts]


# What is asked


def _make_first_requests(work: ServedCellContext, rows: pl.DataFrame, length: int) -> list[LoadRequest]:
    return [_make_request(work, row, 0, row["prompt_ids"], length) for row in rows.iter_rows(named=True)]


def _make_next_requests(work: ServedCellContext, loads: list[LoadResult], length: int) -> list[LoadRequest]:
    """The turn after those asked, of the questions that have one and whose earlier turns were answered."""
    turn, asks = len(loads), []
    answers = [{request_records.get_question_id(r): r for r in found.records if not r.failed} for found in loads]
    for row in work.rows.iter_rows(named=True):
        later = row["later"] or []
        if len(later) < turn or not all(row["id"] in of_turn for of_turn in answers):
            continue
        messages = list(row["messages"])
        for said, words in zip(answers, later, strict=False):
            messages += [
                {"role": "assistant", "content": _decode_text(work, said[row["id"]])},
                {"role": "user", "content": words},
            ]
        ids = chat_template.encode_prompt(work.tokenizer, messages, work.p.sample_target.thinking)
        asks.append(_make_request(work, row, turn, ids, length))
    return asks


def _make_request(work: ServedCellContext, row: dict[str, Any], turn: int, ids: list[int], length: int) -> LoadRequest:
    w, tokens = work.w, workload_prompts.compute_max_new_tokens(row["length_share"], length)
    shown = _build_image_body(work.eyes, row["images"], ids) if work.eyes and row["images"] else {}
    return LoadRequest(f"{row['id']}#{turn}", ids, tokens, w.temperature, w.top_p, w.top_k, w.ignore_eos, shown)


def _build_image_body(eyes: vision.CachedImageProcessor, images: list[str], ids: list[int]) -> dict[str, Any]:
    """Pictures as SGLang takes them beside ids; it repeats each one's token itself, and where that is done already it
    never answers (0.5.17)."""
    return {
        "input_ids": vision.collapse_image_tokens(ids, eyes.image_token_id, eyes.count_image_tokens(images)),
        "image_data": [eyes.build_data_url(path) for path in images],
    }


# The cell


def _build_cell(
    work: ServedCellContext,
    side: MeasuredServer,
    plain: MeasuredServer,
    reason: str | None,
    before: list[gpu_memory.GpuMemory],
) -> dict[str, Any]:
    p = work.p
    hardware = torch_records.describe_hardware("cpu", p.target.num_threads)
    if before and p.target.device != "cpu":
        hardware["gpu"] = ", ".join(gpu.name for gpu in before[: p.benchmark_served.server.tp])
    if side.config in p.benchmark_served.server.base_urls:
        hardware = {"server": "one that was running; what it runs on isn't known"}
    version = side.said.get("version")
    return {
        "workload": work.name,
        "checkpoint": side.checkpoint,
        "tree": side.names[1],
        **(side.tree.model_dump() if side.tree else dict.fromkeys(TreeShape.model_fields)),
        "engine": p.benchmark_served.engine,
        "status": served_records.UNSUPPORTED if reason else served_records.RAN,
        "reason": reason,
        "definitions": torch_records.DEFINITIONS,
        "temperature": work.w.temperature,
        "top_p": work.w.top_p,
        "top_k": work.w.top_k,
        "fingerprint": _build_fingerprint(work, side, hardware),
        "server": {
            "command": [_shorten_path(word) for word in side.line],
            "info": {k: _shorten_path(v) for k, v in side.said.items()},
        },
        "memory": _build_memory(side, before),
        "points": _build_points(work, side),
        "baseline_points": _build_points(work, plain),
        "hardware": hardware,
        "versions": {p.benchmark_served.engine: version} if version else {},
        "seed": work.w.seed,
    }


def _build_fingerprint(work: ServedCellContext, side: MeasuredServer, hardware: dict[str, Any]) -> dict[str, Any]:
    """What must agree for a speedup to be one. The server's context length is not in it: it moves nothing that is timed."""
    asked_for = work.w.model_dump()
    words = json.dumps([work.rows.select("id", "prompt_ids", "length_share").to_dicts(), asked_for], sort_keys=True)
    setup = asdict(work.setup) | {"folder": work.made.model, "context_length": None}
    target = [work.made.model, work.made.revision, work.made.config_digest]
    return {
        "target": target,
        "setup": setup,
        "engine_version": side.said.get("version"),
        "workload": hashlib.sha256(words.encode()).hexdigest()[:16],
        "hardware": {key: hardware[key] for key in sorted(hardware) if key != "python"},
    }


def _shorten_path(word: Any) -> Any:
    """What a cell may show: of a path its last two names."""
    return "/".join(word.split("/")[-2:]) if isinstance(word, str) and word.startswith("/") else word


def _measure_draft_gib(side: MeasuredServer) -> float | None:
    """Of its file: engines don't say what a draft takes."""
    return round((Path(side.draft.folder) / "model.safetensors").stat().st_size / 2**30, 3) if side.draft else None


def _build_memory(side: MeasuredServer, before: list[gpu_memory.GpuMemory]) -> dict[str, Any]:
    total = {"gpu_total": round(sum(gpu.total for gpu in before), 2) if before else None}
    return (
        dict.fromkeys(served_records.MEMORY_KEYS)
        | engine_flags.read_server_memory(side.said)
        | {"draft": _measure_draft_gib(side)}
        | total
        | side.gpu
    )


def _build_points(work: ServedCellContext, side: MeasuredServer) -> list[dict[str, Any]]:
    return [_build_point(work, side, *point, repeats) for point, repeats in side.loads.items()]


def _build_point(
    work: ServedCellContext, side: MeasuredServer, length: int, cap: int | None, repeats: list[list[LoadResult]]
) -> dict[str, Any]:
    every = [
        (number, turn, r)
        for number, turns in enumerate(repeats)
        for turn, found in enumerate(turns)
        for r in found.records
    ]
    marks = _grade_requests(work, every)
    return {
        "max_new_tokens": length,
        "concurrency": cap,
        "request_rate": work.w.request_rate,
        "loads": [
            latency.summarise_load(request_records.join_turns([found.records for found in turns])) for turns in repeats
        ],
        "acceptance": _compute_acceptance(side, [found for turns in repeats for found in turns], work.w.prompts),
        "quality": _summarise_grades(work, every, marks),
        "requests": [request_records.make_request_row(*one, mark) for one, mark in zip(every, marks, strict=True)],
        "warnings": _list_warnings(work, side, cap, length, repeats),
    }


def _grade_requests(work: ServedCellContext, every: list[tuple[int, int, latency.RequestRecord]]) -> list[bool | None]:
    """Whether each answer is right; None where nothing is graded: of later turns, and of requests that failed."""
    if not work.w.grade:
        return [None] * len(every)
    right = dict(work.rows.select("id", "reference").iter_rows())
    unsandboxed = work.p.benchmark.allow_unsandboxed_code
    return [
        None
        if turn or r.failed
        else grade.grade_answer(right[request_records.get_question_id(r)], _decode_text(work, r), unsandboxed)
        for _, turn, r in every
    ]


def _summarise_grades(
    work: ServedCellContext, every: list[tuple[int, int, latency.RequestRecord]], marks: list[bool | None]
) -> dict[str, Any] | None:
    right = dict(work.rows.select("id", "reference").iter_rows())
    graded = [
        (right[request_records.get_question_id(r)], mark)
        for (_, _, r), mark in zip(every, marks, strict=True)
        if mark is not None
    ]
    return grade.summarise_grades([words for words, _ in graded], [mark for _, mark in graded]) if graded else None


def _decode_text(work: ServedCellContext, r: latency.RequestRecord) -> str:
    """An answer without the target's special tokens, as a server would send it."""
    return work.tokenizer.decode(r.ids, skip_special_tokens=True) if r.ids else r.text


def _compute_acceptance(side: MeasuredServer, loads: list[LoadResult], prompts: str) -> dict[str, Any] | None:
    """docs/metrics.md: "Accepted drafts of a server". None without a draft, or where the engine counts nothing."""
    counts = [c for found in loads for c in _list_counts(found)]
    if side.tree is None or not counts:
        return None
    accepted, cycles = (np.array([getattr(c, key) for c in counts]) for key in ("accepted", "cycles"))
    tau = acceptance.compute_tau(accepted, cycles)
    low, high = _interval(loads, side.tree.num_steps, prompts) or (None, None)
    histogram = np.zeros(side.tree.num_steps + 1, dtype=np.int64)
    for c in counts:
        histogram[: len(c.histogram)] += np.array(c.histogram, dtype=np.int64)
    figures: dict[str, Any] = {}
    for found in loads:
        figures |= found.figures
    per_request = [r.said["spec_accept_length"] for f in loads for r in f.records if "spec_accept_length" in r.said]
    if per_request:
        figures["spec_accept_length, mean over requests"] = float(np.mean(per_request))
    return {
        "tau": tau,
        "tau_low": low,
        "tau_high": high,
        "accept_rate": (tau - 1) / side.tree.num_steps,
        "node_accept_rate": float(accepted.sum() / max(1, cycles.sum() * (side.tree.num_draft_tokens - 1))),
        "cycles": int(cycles.sum()),
        "accepted": int(accepted.sum()),
        "histogram": histogram.tolist(),
        "clipped": all(c.clipped for c in counts),
        "engine": figures,
    }


def _interval(loads: list[LoadResult], num_steps: int, prompts: str) -> interval.Interval | None:
    """Return tau's, over conversations; None where the engine counts over all requests together."""
    records = [r for found in loads for r in found.records if r.counts]
    if any(found.counters for found in loads) or not records:
        return None
    names = [clusters.cluster_of(prompts, request_records.get_question_id(r)) for r in records]
    counted = np.array([[r.counts.accepted, r.counts.cycles] for r in records if r.counts])
    accepted, cycles = clusters.sums(names, counted).T  # [C] each
    return interval.of_tau(accepted, cycles, num_steps)


def _list_warnings(
    work: ServedCellContext, side: MeasuredServer, cap: int | None, length: int, repeats: list[list[LoadResult]]
) -> list[str]:
    found = []
    loads = [one for turns in repeats for one in turns]
    failed = [r for one in loads for r in one.records if r.failed]
    if failed:
        found.append(
            f"{len(failed)} requests failed and are in no latency, the first: {failed[0].failed}, {failed[0].why}"
        )
    if uncounted := [words for one in loads for words in one.uncounted]:
        found.append(
            f"{len(uncounted)} requests' accepted drafts can't be counted and are in no tau, the first: {uncounted[0]}"
        )
    holds = engine_flags.read_server_memory(side.said)["kv_tokens"]
    longest = sorted(work.rows["prompt_ids"].list.len().to_list(), reverse=True)[: cap or len(work.rows)]
    need = sum(longest) + len(longest) * (length + (side.tree.num_draft_tokens if side.tree else 0))
    if holds is not None and need > holds:
        found.append(
            f"the KV cache holds {holds} tokens, {need} would be needed for {len(longest)} of the longest at once: some may "
            "have waited in the engine, or been put back"
        )
    return found


def _describe_load(
    work: ServedCellContext,
    side: MeasuredServer,
    point: tuple[int, int | None],
    number: int,
    turns: list[LoadResult],
    seconds: float,
) -> str:
    told = latency.summarise_load([r for found in turns for r in found.records])
    cycles, accepted = _sum_counts(turns)
    tau = f"tau {(accepted + cycles) / cycles:.3f}, " if cycles else ""
    repeat = f" ({number + 1} of {work.w.repeats})" if work.w.repeats > 1 else ""
    return (
        f"{side.config}, {point[0]} tokens, {point[1] or 'no limit'} at once{repeat}: {tau}"
        f"{told['output_throughput']:.1f} output tokens/s, {told['completed']} of {told['requests']} answered, {seconds:.1f} s"
    )


def _describe_result(found: dict[str, Any], place: Path) -> str:
    what = served_records.name_served_cell(found["workload"], found["checkpoint"], found["tree"])
    return f"{what}: {found['status']}{': ' + found['reason'] if found['reason'] else ''} -> {place}"


if __name__ == "__main__":
    schema.run_stage(main)
