"""benchmark_served: measure one cell on a serving engine.   python -m stages.benchmark_served WORKLOAD [CHECKPOINT TREE]

A cell is one server configuration under one workload. Without a checkpoint and a tree it is the baseline: the same server
without a draft. A workload that is a sweep has a point for each answer length and concurrency, all measured on one server.
The stage starts the server and stops it, or uses a running one (benchmark_served.server.base_urls). A configuration that the
engine can't run gives a cell of status "unsupported"; a server that would measure something else stops the stage with an error.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.data import workload_prompts
from stages.draft import checkpoint
from stages.grading import grade
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.section import get_named
from stages.params.tree_shape import TreeShape
from stages.results import load_points, served_points, served_records, torch_records
from stages.results.stopping import RepeatRule
from stages.results.torch_records import StoppingRecord
from stages.served_cell import requests as served_requests
from stages.served_cell.requests import SECTION, ServedCellContext
from stages.serving import (
    engine_flags,
    gpu_memory,
    load_checks,
    load_generator,
    measured_server,
    measuring_turn,
)
from stages.serving.load_generator import Arrivals, LoadResult
from stages.serving.measured_server import CheckServer, Load, MeasuredServer, ServerPlan
from stages.target import manifest, vision
from stages.telemetry import gpu_energy
from stages.telemetry.run_stage import run_stage

LOGS_FOLDER = Path(".scratch/served")
PROMPT_COLUMNS = ("id", "prompt_ids", "length_share")  # of a cell's fingerprint
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class OpenedServer:
    """A server that answers."""

    server: MeasuredServer
    url: str
    check: CheckServer


@dataclass(frozen=True)
class StageCost:
    """Time, GPUs and energy of a stage; the field names are keys of its cell."""

    seconds: float
    gpus: list[str]
    joules: float | None


def main(workload_name: str, checkpoint_name: str = "", tree_name: str = "") -> None:
    if bool(checkpoint_name) != bool(tree_name):
        raise ValueError(
            f"expected WORKLOAD [CHECKPOINT TREE], found {workload_name} {checkpoint_name}; a cell with a draft needs both"
        )
    params = schema.load_params()
    meter, started = gpu_energy.EnergyMeter(_list_stage_gpus(params, checkpoint_name, tree_name)), time.perf_counter()
    gpus_before = gpu_memory.list_visible_gpus()
    tree = TreeShape.parse(tree_name) if checkpoint_name else None
    draft_config: dict[str, Any] = {}  # the draft's config.json
    if checkpoint_name:
        maker = params.get_making_stage(checkpoint_name)
        draft_config, _ = checkpoint.read_draft(checkpoint.locate_checkpoint(checkpoint_name), maker)
    work = _build_context(params, workload_name, draft_config)
    measured = _configure_server(work, checkpoint_name, tree, draft_config)
    baseline = MeasuredServer(served_records.name_server_config(None, None))
    reason = _explain_unsupported(work, measured, draft_config)
    ended = None
    if not reason:
        _check_positions(work, measured, draft_config)
        ended = _measure_repeats(work, measured, baseline if tree and params.benchmark_served.interleave else None)
    took = StageCost(round(time.perf_counter() - started, 2), meter.names(), meter.joules())
    path = _write_cell(work, measured, baseline, reason, ended, gpus_before, took)
    name = served_records.name_served_cell(workload_name, measured.checkpoint, measured.tree_name)
    status = f"{served_records.UNSUPPORTED}: {reason}" if reason else served_records.RAN
    print(f"{name}: {status} -> {path}")


def _list_stage_gpus(params: schema.Params, checkpoint_name: str, tree_name: str) -> list[int]:
    """Return the GPUs of the cell's server. External servers use no local GPU."""
    settings = params.benchmark_served.server
    external = served_records.name_server_config(checkpoint_name or None, tree_name or None) in settings.base_urls
    return [] if external or params.target.device == "cpu" else list(range(settings.tp))


def _build_context(params: schema.Params, workload_name: str, draft_config: dict[str, Any]) -> ServedCellContext:
    workload = get_named(params.benchmark.workloads, workload_name, "benchmark.workloads")
    target = manifest.read_manifest()
    folder = manifest.resolve_weights_folder(target).absolute()
    prompts, warmup = workload_prompts.read_prompts(workload_name)
    if workload.grade:
        workload_prompts.check_references(workload_name, prompts)
        grade.check_sandbox(prompts["reference"], workload_name, params.benchmark.allow_unsandboxed_code)
    has_images = (prompts["images"].list.len() > 0).any()
    images = vision.CachedImageProcessor(folder, params.target.trust_remote_code) if has_images else None
    setup = _build_setup(params, workload, target, folder, draft_config)
    return ServedCellContext(params, workload_name, workload, prompts, warmup, target, folder, setup, images)


def _build_setup(
    params: schema.Params,
    workload: Workload,
    target: manifest.TargetManifest,
    folder: Path,
    draft_config: dict[str, Any],
) -> engine_flags.ServerSetup:
    settings = params.benchmark_served.server
    caps = [cap for _, cap in workload.list_loads() if cap is not None]
    positions = draft_config.get("max_position_embeddings", target.max_position_embeddings)
    return engine_flags.ServerSetup(
        engine=params.benchmark_served.engine,
        folder=str(folder),
        dtype=params.target.dtype,
        device=params.target.device,
        trust_remote_code=params.target.trust_remote_code,
        tp=settings.tp,
        mem_fraction=settings.mem_fraction,
        max_total_tokens=settings.max_total_tokens,
        max_batch=settings.max_batch or max(caps, default=None),
        # Engines refuse a draft with fewer positions than the context length.
        context_length=positions if positions < target.max_position_embeddings else None,
        torch_compile=settings.torch_compile,
        more=tuple(settings.launch_args),
    )


def _configure_server(
    work: ServedCellContext, checkpoint_name: str, tree: TreeShape | None, draft_config: dict[str, Any]
) -> MeasuredServer:
    if tree is None:
        return MeasuredServer(served_records.name_server_config(None, None))
    settings = work.params.benchmark_served
    folder = str((checkpoint.locate_checkpoint(checkpoint_name) / "draft").absolute())
    shape = tree.num_steps, tree.topk, tree.num_draft_tokens
    draft = engine_flags.ServedDraft(folder, settings.server.algorithm, *shape)
    flags = engine_flags.build_speculation_flags(settings.engine, draft, draft_config)
    name = served_records.name_server_config(checkpoint_name, tree.name)
    return MeasuredServer(name, checkpoint_name, tree.name, draft, flags)


def _explain_unsupported(work: ServedCellContext, measured: MeasuredServer, draft_config: dict[str, Any]) -> str | None:
    """Return why the engine can't run this cell; None if it can."""
    engine, draft, reason = work.params.benchmark_served.engine, measured.draft, None
    if draft:
        shape = draft.num_steps, draft.topk, draft.num_draft_tokens
        reason = engine_flags.explain_unsupported(engine, *shape, draft_config)
    if not reason and work.image_processor and engine == "vllm":
        reason = f"{engine} takes no pictures with token ids"
    return reason


def _count_request_tokens(work: ServedCellContext) -> int:
    """Return the tokens of the longest prompt and its answer."""
    longest = max(work.longest_prompt, work.warmup_prompts["prompt_ids"].list.len().max() or 0)
    return longest + max(length for length, _ in work.workload.list_loads())


def _check_positions(work: ServedCellContext, measured: MeasuredServer, draft_config: dict[str, Any]) -> None:
    """Raises ValueError if the target or the draft has fewer positions than the longest request needs."""
    needed = _count_request_tokens(work) + measured.num_draft_tokens
    target = work.manifest.max_position_embeddings
    for name, positions in (("the target", target), ("the draft", draft_config.get("max_position_embeddings", target))):
        if positions < needed:
            raise ValueError(
                f"{name} holds {positions} positions (max_position_embeddings), expected at least {needed}: the longest "
                f"prompt of workload {work.workload_name}, its answer and a tree. Lower max_new_tokens or choose shorter "
                "prompts; a draft's is init_draft.max_position_embeddings, and rope allows more without training anew"
            )


# Measuring


def _measure_repeats(
    work: ServedCellContext, measured: MeasuredServer, baseline: MeasuredServer | None
) -> StoppingRecord | None:
    """Measure all repeats of all points; return why there are no more, None without `baseline`.

    With `baseline` each repeat also has a server without a draft, in alternating order, so that a drifting machine affects
    both alike.
    """
    plan = _build_server_plan(work)
    if baseline is None:
        with _open(work, plan, measured) as opened, measuring_turn.measure_server():
            _run_repeats(work, opened, list(range(work.workload.repeats)))
        return None
    if not plan.can_hold_two():
        return _alternate(work, measured, baseline, lambda one: _open_for_a_turn(work, plan, one))
    with _open(work, plan, baseline) as first, _open(work, plan, measured) as second, measuring_turn.measure_server():
        both = {first.server.config_name: first, second.server.config_name: second}
        return _alternate(work, measured, baseline, lambda one: contextlib.nullcontext(both[one.config_name]))


def _alternate(
    work: ServedCellContext,
    measured: MeasuredServer,
    baseline: MeasuredServer,
    take: Callable[[MeasuredServer], contextlib.AbstractContextManager[OpenedServer]],
) -> StoppingRecord:
    """Measure both servers in turns, in alternating order; return why there are no more repeats."""
    rule = RepeatRule.of_workload(work.workload)
    pair, number, ended = (baseline, measured), 0, None
    while ended is None:
        for one in pair if number % 2 == 0 else reversed(pair):
            with take(one) as opened:
                _run_repeats(work, opened, [number])
        number += 1
        ended = rule.judge(number, served_points.measure_widest_half(measured, baseline))
    return ended


@contextlib.contextmanager
def _open(work: ServedCellContext, plan: ServerPlan, one: MeasuredServer) -> Iterator[OpenedServer]:
    cell_name = served_records.name_served_cell(work.workload_name, one.checkpoint, one.tree_name)
    with measured_server.open_server(plan, one, LOGS_FOLDER / f"{cell_name}.log") as (url, check):
        yield OpenedServer(one, url, check)


@contextlib.contextmanager
def _open_for_a_turn(work: ServedCellContext, plan: ServerPlan, one: MeasuredServer) -> Iterator[OpenedServer]:
    with _open(work, plan, one) as opened, measuring_turn.measure_server():
        yield opened


def _run_repeats(work: ServedCellContext, opened: OpenedServer, numbers: list[int]) -> None:
    """Run these repeats of all points on a server."""
    one = opened.server
    for number in numbers:
        for load in work.workload.list_loads():
            started = time.perf_counter()
            turns = asyncio.run(_run_load(work, one, opened.url, opened.check, load, number))
            one.loads.setdefault(load, []).append(turns)
            took = turns, time.perf_counter() - started
            print(served_points.describe_load(one, load, number, work.workload.most_repeats, *took), flush=True)


def _build_server_plan(work: ServedCellContext) -> ServerPlan:
    settings, target, prompts = work.params.benchmark_served.server, work.manifest, len(work.prompts)
    loads = work.workload.list_loads()
    caps = [cap for _, cap in loads if cap is not None]
    dtype_bytes = DTYPE_BYTES[work.params.target.dtype]
    return ServerPlan(
        setup=work.setup,
        program=settings.command,
        base_urls=settings.base_urls,
        served_model=work.served_model,
        api_key=work.api_key,
        request_timeout_s=work.workload.deadline_s,
        start_timeout_s=settings.start_timeout_s,
        num_threads=work.params.target.num_threads,
        vision_patch=settings.vision_patch and work.setup.engine == "sglang" and target.modality == "image",
        section=SECTION,
        max_concurrency=min(max(caps), prompts) if caps else None,
        request_tokens=_count_request_tokens(work),
        cache_tokens=max(min(cap or prompts, prompts) * (work.longest_prompt + length) for length, cap in loads),
        token_bytes=2 * target.num_layers * target.num_key_value_heads * target.head_dim * dtype_bytes,
    )


async def _run_load(
    work: ServedCellContext, measured: MeasuredServer, url: str, check: CheckServer, load: Load, number: int
) -> list[LoadResult]:
    """Run one repeat of one point: a load for each turn; later turns follow the engine's own earlier answers."""
    length, cap = load
    workload, arrivals = work.workload, Arrivals(work.workload.requests_per_second, cap, work.workload.seed + number)
    load_name = f"{measured.config_name}, {length} tokens, concurrency {cap or 'unlimited'}"
    requests, warmup = (
        [
            served_requests.make_request(work, row, 0, row.prompt_ids, length)
            for row in workload_prompts.list_rows(prompts)
        ]
        for prompts in (work.prompts, work.warmup_prompts)
    )
    results: list[LoadResult] = []
    while requests:
        with tqdm(total=len(requests), desc=load_name, unit="request", mininterval=2) as bar:
            server = url, work.served_model
            limits, engine = (arrivals, workload.deadline_s), work.setup.engine
            result = await load_generator.run_load(
                *server, requests, *limits, warmup, SECTION, work.api_key, engine, check, bar.update
            )
        load_checks.check_answered(load_name, result)
        results.append(result)
        requests, warmup = served_requests.make_next_requests(work, results, length), []
    load_checks.check_drafts_accepted(measured.config_name, measured.draft, results, measured.info, len(work.prompts))
    return results


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
    hardware = _describe_hardware(work, measured, gpus_before)
    version = measured.info.get("version")
    cell = {
        "workload": work.workload_name,
        "checkpoint": measured.checkpoint,
        "tree": measured.tree_name,
        "num_steps": draft and draft.num_steps,
        "topk": draft and draft.topk,
        "num_draft_tokens": draft and draft.num_draft_tokens,
        "engine": params.benchmark_served.engine,
        "status": served_records.UNSUPPORTED if reason else served_records.RAN,
        "reason": reason,
        "definitions": torch_records.DEFINITIONS,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        "fingerprint": served_points.build_fingerprint(
            [work.manifest.model, work.manifest.revision, work.manifest.config_digest],
            work.setup,
            version,
            [work.prompts.select(*PROMPT_COLUMNS).to_dicts(), workload.model_dump(exclude={"until"})],
            hardware,
        ),
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


def _describe_hardware(
    work: ServedCellContext, measured: MeasuredServer, gpus: list[gpu_memory.GpuMemory]
) -> torch_records.Hardware:
    settings = work.params.benchmark_served.server
    if measured.config_name in settings.base_urls:
        return {"server": "one that was running; what it runs on isn't known"}
    hardware = torch_records.describe_hardware("cpu", work.params.target.num_threads)
    if gpus and work.params.target.device != "cpu":
        hardware["gpu"] = ", ".join(gpu.name for gpu in gpus[: settings.tp])
    return hardware


def _build_point(
    work: ServedCellContext, measured: MeasuredServer, load: Load, repeats: list[list[LoadResult]]
) -> served_records.LoadPoint:
    length, cap = load
    records = [[result.records for result in turns] for turns in repeats]
    requests = load_points.list_requests(records)
    grades: list[bool | None] = [None] * len(requests)
    if work.workload.grade:
        unsandboxed = work.params.benchmark.allow_unsandboxed_code
        grades = load_points.grade_first_turns(
            requests, work.references, lambda record: served_requests.decode_text(work, record), unsandboxed
        )
    results = [result for turns in repeats for result in turns]
    warnings = load_checks.list_warnings(
        results,
        work.prompts["prompt_ids"].list.len().to_list(),
        cap,
        length + measured.num_draft_tokens,
        engine_flags.read_server_memory(measured.info).kv_tokens,
    )
    warnings += [measured.notice] if measured.notice else []
    return load_points.build_point(
        load_points.PointLoad(length, cap, work.workload.request_rate),
        records,
        grades,
        work.references,
        served_points.compute_acceptance(measured.draft, results, work.workload.prompts),
        warnings,
    )


if __name__ == "__main__":
    run_stage(main)
