"""The server configurations of a workload: how a server is set up, what it must hold, and what it can't run."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stages.cells import cell
from stages.cells.cell import Hardware
from stages.draft import checkpoint
from stages.engines import gpu_memory
from stages.engines.protocol import ServerSetup, describe_draft
from stages.families.family import find_family, get_files
from stages.grading import grade
from stages.measuring.measured_server import MeasuredServer, ServerPlan
from stages.measuring.requests import SECTION, ServedCellContext
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.section import get_named
from stages.params.tree_shape import TreeShape, parse_shape
from stages.prompts import workload_prompts
from stages.target import manifest, vision

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PROMPT_COLUMNS = ("id", "prompt_ids", "length_share")  # of a cell's fingerprint


def list_stage_gpus(params: schema.Params, config_names: list[str]) -> list[int]:
    """Return the GPUs of servers of these configurations. External servers use no local GPU."""
    settings = params.benchmark_served.server
    external = all(name in settings.base_urls for name in config_names)
    return [] if external or params.target.device == "cpu" else list(range(settings.tp))


def read_draft_config(params: schema.Params, checkpoint_name: str) -> dict[str, Any]:
    """Return config.json of the draft, all of whose files are checked."""
    folder, maker = checkpoint.locate_checkpoint(checkpoint_name), params.get_making_stage(checkpoint_name)
    return get_files(find_family(folder, maker)).read_config(folder, maker)


def build_context(params: schema.Params, workload_name: str, draft_config: dict[str, Any]) -> ServedCellContext:
    workload = get_named(params.benchmark.workloads, workload_name, "benchmark.workloads")
    target = manifest.read_manifest()
    folder = manifest.resolve_weights_folder(target).absolute()
    prompts, warmup = workload_prompts.read_prompts(workload_name)
    if workload.grade:
        workload_prompts.check_references(workload_name, prompts)
        grade.check_programs(prompts["reference"], workload_name, params.benchmark.run_generated_code)
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
) -> ServerSetup:
    settings = params.benchmark_served.server
    caps = [cap for _, cap in workload.list_loads() if cap is not None]
    positions = draft_config.get("max_position_embeddings", target.max_position_embeddings)
    return ServerSetup(
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
        quantised=settings.quantised,
    )


def configure_server(
    work: ServedCellContext, checkpoint_name: str, tree: TreeShape | None, draft_config: dict[str, Any]
) -> MeasuredServer:
    if tree is None:
        return MeasuredServer(cell.name_configuration(None, None))
    settings = work.params.benchmark_served
    folder = str((checkpoint.locate_checkpoint(checkpoint_name) / "draft").absolute())
    draft = describe_draft(folder, draft_config, tree, settings.server.algorithm)
    flags = work.engine.build_speculation_flags(draft, draft_config)
    name = cell.name_configuration(checkpoint_name, tree.name)
    return MeasuredServer(name, checkpoint_name, tree.name, draft, flags)


def samples_drafts(work: ServedCellContext, measured: MeasuredServer) -> bool:
    """Return whether the server samples the workload's drafts; False without a draft, at temperature 0, and at top_k 1."""
    if measured.draft is None or not work.workload.temperature or work.workload.top_k == 1:
        return False
    flags = [*measured.speculation_flags, *work.setup.more]
    environment = measured.info.get("environment", {})
    return work.engine.samples_drafts(measured.draft, flags, environment)


def explain_unsupported(work: ServedCellContext, measured: MeasuredServer, draft_config: dict[str, Any]) -> str | None:
    """Return why the engine can't run this cell; None if it can."""
    engine, reason = work.engine, None
    if measured.draft:
        reason = engine.explain_unsupported(parse_shape(measured.tree_name or ""), draft_config)
        if not reason and engine.find_change(draft_config):
            reason = engine.explain_old_version(build_server_plan(work).find_version(), draft_config)
    if not reason and work.image_processor and not engine.takes_images:
        reason = f"{engine.name} takes no pictures with token ids"
    return reason


def _count_request_tokens(work: ServedCellContext) -> int:
    """Return the tokens of the longest prompt and its answer."""
    longest = max(work.longest_prompt, work.warmup_prompts["prompt_ids"].list.len().max() or 0)
    return longest + max(length for length, _ in work.workload.list_loads())


def check_positions(work: ServedCellContext, measured: MeasuredServer, draft_config: dict[str, Any]) -> None:
    """Raises ValueError if the target or the draft has fewer positions than the longest request needs."""
    required = _count_request_tokens(work) + measured.num_draft_tokens
    target = work.manifest.max_position_embeddings
    for name, positions in (("the target", target), ("the draft", draft_config.get("max_position_embeddings", target))):
        if positions < required:
            raise ValueError(
                f"{name} holds {positions} positions (max_position_embeddings), expected at least {required} for the longest "
                f"prompt of {work.workload_name}, its answer and a tree; lower max_new_tokens, choose shorter prompts, or raise "
                "init_draft.max_position_embeddings, which needs no training again"
            )


def build_server_plan(work: ServedCellContext) -> ServerPlan:
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
        vision_patch=settings.vision_patch and target.modality == "image",
        section=SECTION,
        max_concurrency=min(max(caps), prompts) if caps else None,
        request_tokens=_count_request_tokens(work),
        cache_tokens=max(min(cap or prompts, prompts) * (work.longest_prompt + length) for length, cap in loads),
        token_bytes=2 * target.num_layers * target.num_key_value_heads * target.head_dim * dtype_bytes,
    )


def convert_folders(plan: ServerPlan, servers: Iterable[MeasuredServer]) -> ServerPlan:
    """Return the plan with what the engine loads in the place of folders; the servers' flags are changed too.

    Raises:
        ValueError: where a program is too old for a draft, or a file can't be made.
    """
    setup, folder = plan.setup, Path(plan.setup.folder)
    if plan.base_urls:
        return plan
    for server in servers:
        if server.draft:
            plan.engine.check_program(plan.program_path, server.speculation_flags)
        if server.draft and server.draft.family.segment:
            found = plan.engine.convert_folder(Path(server.draft.folder), setup, folder)
            server.speculation_flags = [
                found if word == server.draft.folder else word for word in server.speculation_flags
            ]
    return replace(plan, setup=replace(setup, folder=plan.engine.convert_folder(folder, setup)))


def describe_hardware(work: ServedCellContext, measured: MeasuredServer, gpus: list[gpu_memory.GpuMemory]) -> Hardware:
    settings = work.params.benchmark_served.server
    if measured.config_name in settings.base_urls:
        return {"server": "one that was running; what it runs on isn't known"}
    hardware = cell.describe_hardware("cpu", work.params.target.num_threads)
    if gpus and work.params.target.device != "cpu":
        hardware["gpu"] = ", ".join(gpu.name for gpu in gpus[: settings.tp])
    return hardware


def build_fingerprint(work: ServedCellContext, version: str | None, hardware: Hardware) -> dict[str, Any]:
    """Return what a cell and its baseline must share for a speedup. The context length is left out: it changes no time."""
    target = [work.manifest.model, work.manifest.revision, work.manifest.config_digest]
    requests = [work.prompts.select(*PROMPT_COLUMNS).to_dicts(), work.workload.model_dump(exclude={"until"})]
    return {
        "target": target,
        "setup": asdict(work.setup) | {"folder": target[0], "context_length": None},
        "engine_version": version,
        "workload": hashlib.sha256(json.dumps(requests, sort_keys=True).encode()).hexdigest()[:16],
        "hardware": {key: hardware[key] for key in sorted(hardware) if key != "python"},
    }
