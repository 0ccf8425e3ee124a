"""Estimate of a run: parameters, bytes, seconds and GPU-hours, without a GPU, a download or the data.

    python -m stages.reproduce.estimate RECIPE PARAMS [GPU]    # JSON: lines to read, estimates by stage, totals
    python -m stages.reproduce.estimate - PARAMS               # without a recipe: rows as long as those here

The target's shape is that of recipes/targets/NAME.json, or of its own config.json where that is on this machine; the draft's is
inferred from it as init_draft does. Times follow from the rates in measured_rates.py. Loading, compiling, replays and
check_overfit are left out: they are small. How long answers get is not known, so each counts as long as it may be.
"""

import itertools
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from stages import init_draft
from stages.draft import eagle3_checkpoint
from stages.draft.eagle3_config import DraftConfig
from stages.hidden_states import format
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.families import BlockSegment
from stages.params.recipe import Recipe
from stages.params.server_urls import expand_urls
from stages.params.units import format_bytes
from stages.reproduce import block_estimate, measured_rates
from stages.reproduce.block_estimate import BlockSize
from stages.reproduce.measured_rates import GPUS, MEASURED_GPU, SERVER_START_S, Gpu
from stages.reproduce.target_size import RecipeEstimate, TargetSize, format_count, get_itemsize, read_target_size
from stages.target.manifest import TargetManifest
from stages.telemetry.run_stage import run_stage


@dataclass(frozen=True)
class RowCounts:
    train: int
    stored_train: int  # of them those whose hidden states are stored
    evaluated: int  # rows of one eval set, at most
    sets: int  # of eval rows
    length: int  # tokens of a row


def main(recipe_file: str, params_file: str, gpu: str = "h200") -> None:
    p = schema.load_params(Path(params_file))
    recipe = _describe_params(p) if recipe_file == "-" else schema.read_recipe(Path(recipe_file))[0]
    assert recipe, recipe_file
    print(json.dumps(asdict(estimate_recipe(p, recipe, GPUS[gpu]))))


def _describe_params(p: schema.Params) -> Recipe:
    """Return the description of a recipe of no other rows than the parameters'."""
    defaults: dict[str, Any] = {
        "pins": {},
        "substitutes": {},
        "notes": [],
        "tolerance": {},
        "beside": [],
        "files": {},
        "train_rows": None,
    }
    row_tokens = _read_row_tokens(p) or p.extract_hiddens.max_length
    return Recipe(status="validated only", row_tokens=row_tokens, **defaults)


def _read_row_tokens(p: schema.Params) -> int | None:
    """Return the mean length of the rows that were extracted here with this target, None if none were."""
    try:
        target = json.loads(Path("artifacts/target/target.json").read_text(encoding="utf-8"))
        report = json.loads(Path("results/hiddens_report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if target.get("model") != p.target.model or not report.get("rows_out"):
        return None
    return math.ceil(report["tokens"] / report["rows_out"])


def estimate_recipe(p: schema.Params, recipe: Recipe, gpu: Gpu = MEASURED_GPU) -> RecipeEstimate:
    target = read_target_size(p)
    draft = init_draft.infer_config(p, target.manifest)
    result = RecipeEstimate()
    rows = _count_rows(p, recipe)
    _add_sizes(result, p, target, draft)
    block_estimate.add_sizes(result, p, target.manifest, draft)
    if not rows.train and p.train_draft.checkpoints:
        result.add_line(
            "training rows", "not counted", "sample_target.train_rows is null, and the data is not read here"
        )
    _add_disk(result, p, rows, target, draft)
    if p.target.device == "cpu":
        result.add_line("GPU", "none", "target.device is cpu")
    else:
        _add_hours(result, p, gpu, rows, target, draft)
        result.add_line("together", f"{result.gpu_hours:.2g} GPU-hours", gpu.origin)
    result.add_line("together", format_bytes(result.disk_bytes), "in this folder")
    return result


# Sizes


def count_draft_parameters(draft: DraftConfig) -> dict[str, int]:
    """Return the parameters of a draft's fc, layer and head."""
    sizes = {name: torch.Size(shape).numel() for name, shape in eagle3_checkpoint.list_tensor_shapes(draft).items()}
    fc, head = sizes["fc.weight"], sizes["lm_head.weight"]
    return {"fc": fc, "head": head, "layer": sum(sizes.values()) - fc - head - sizes["d2t"] - sizes["t2d"]}


def _add_sizes(result: RecipeEstimate, p: schema.Params, target: TargetSize, draft: DraftConfig) -> None:
    manifest, size = target.manifest, get_itemsize(p.target.dtype)
    experts = f", {format_count(target.active)} of them active" if target.mixture else ""
    result.add_line(
        "target", f"{manifest.model}, {format_count(target.parameters)} parameters{experts}", target.recorded_from
    )
    kv = target.kv_bytes(p.target.dtype)
    derivation = (
        f"2 * {manifest.num_layers} layers * {manifest.num_key_value_heads} heads * {manifest.head_dim} * {size} bytes"
    )
    result.add_line("KV cache", f"{kv:,} bytes a token", derivation)
    total, rope = sum(count_draft_parameters(draft).values()), draft.rope["rope_type"]
    within, vocabulary = draft.intermediate_size, draft.draft_vocab_size
    derivation = f"inferred: {manifest.hidden_size} wide, {within} within, vocabulary {vocabulary}, {rope} RoPE"
    result.add_line("draft", f"{format_count(total)} parameters", derivation)
    result.weight_bytes = target.parameters * size
    held = {"target": result.weight_bytes, "draft": total * size}
    if p.benchmark_served.workloads and (tokens := p.benchmark_served.server.max_total_tokens):
        held[f"{tokens:,} tokens of KV cache"] = tokens * kv
    derivation = ", ".join(f"{what} {format_bytes(bytes_)}" for what, bytes_ in held.items())
    result.add_line("GPU memory", f"{format_bytes(sum(held.values()))} and more", derivation)


# Disk


def _add_disk(
    result: RecipeEstimate, p: schema.Params, rows: RowCounts, target: TargetSize, draft: DraftConfig
) -> None:
    manifest, total = target.manifest, sum(count_draft_parameters(draft).values())
    token, stored = _count_token_bytes(p, manifest), rows.stored_train + rows.sets * rows.evaluated
    counts = f"{rows.stored_train:,} + {rows.sets} * {rows.evaluated:,} rows"
    layers = f"{len(manifest.feature_layers)} feature layers and the last in {p.extract_hiddens.dtype}"
    derivation = f"{counts} * {rows.length:,} tokens * {token:,.1f} bytes: {layers}"
    result.add_disk("extract_hiddens", "hidden states", stored * rows.length * token, derivation)
    if p.init_draft.checkpoints:
        result.add_disk("init_draft", "checkpoint e000", 4 * total, f"{format_count(total)} * 4 bytes")
    if segments := p.train_draft.checkpoints:
        # A segment keeps its draft, float32 weights and two moments; while it runs, another set.
        sizes = [_count_segment_parameters(p, name, manifest, draft) for name in segments]
        kept = [*sizes, max(sizes)]
        weights = get_itemsize(p.train_draft.dtype)
        counts = " + ".join(f"{format_count(size)} * {kept.count(size)}" for size in dict.fromkeys(kept))
        derivation = (
            f"{counts} * ({weights} + 12) bytes" if len(set(kept)) == 1 else f"({counts}) * ({weights} + 12) bytes"
        )
        result.add_disk("train_draft", "checkpoints", sum(kept) * (weights + 12), derivation)
    if imported := p.import_draft.checkpoints:
        size = 2 * total * len(imported)
        result.add_disk("import_draft", "imported drafts", size, f"{len(imported)} * {format_count(total)} * 2 bytes")
        result.download_bytes += size
    if manifest.model.startswith("builtin/"):
        result.add_disk(
            "prepare_target", "target", 4 * target.parameters, f"{format_count(target.parameters)} * 4 bytes"
        )
    else:
        result.download_bytes += 2 * target.parameters
        free = format_bytes(_get_free_cache_bytes())
        derivation = f"target and drafts, 2 bytes each; {free} are free in the Hugging Face cache"
        result.add_line("to download, unless it is there", format_bytes(result.download_bytes), derivation)


def _count_segment_parameters(p: schema.Params, name: str, manifest: TargetManifest, draft: DraftConfig) -> int:
    """Return the parameters of a segment's draft; those of other methods than blocks count as EAGLE-3's."""
    if isinstance(p.train_draft.checkpoints[name], BlockSegment):
        return BlockSize.of_config(block_estimate.build_segment_config(name, p, draft, manifest)).total
    return sum(count_draft_parameters(draft).values())


def _get_free_cache_bytes() -> int:
    """Return the free bytes where the Hugging Face cache is, or will be made."""
    cache = Path(constants.HF_HUB_CACHE).absolute()
    return shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free


def _count_token_bytes(p: schema.Params, manifest: TargetManifest) -> float:
    """Return the bytes of one token's hidden states. For a multimodal target every token counts as an image token."""
    names = {"fp8": format.FP8} | {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
    dtype, is_multimodal = names[p.extract_hiddens.dtype], manifest.image_token_id is not None
    visual = format.count_visual_bytes(manifest.hidden_size, dtype) if is_multimodal else 0
    return format.count_token_bytes(len(manifest.feature_layers), manifest.hidden_size, dtype, is_multimodal) + visual


def _count_rows(p: schema.Params, recipe: Recipe) -> RowCounts:
    train, length = (
        p.sample_target.train_rows or recipe.train_rows or 0,
        min(recipe.row_tokens, p.extract_hiddens.max_length),
    )
    sets = 2 if p.sample_target.eval_temperature else 1
    return RowCounts(train, 0 if p.extract_hiddens.online else train, _get_eval_rows(p), sets, length)


def _get_eval_rows(p: schema.Params) -> int:
    """Return the most rows that one eval set can have."""
    return p.sample_target.eval_rows or p.fix_data.eval_rows or 0


# Hours


def _add_hours(
    result: RecipeEstimate, p: schema.Params, gpu: Gpu, rows: RowCounts, target: TargetSize, draft: DraftConfig
) -> None:
    if p.sample_target.backend != "keep":
        tokens = min(rows.length, p.sample_target.max_new_tokens)
        _add_sampling(result, p, gpu, target, rows.train + rows.sets * rows.evaluated, tokens)
    _add_extraction(result, p, gpu, rows, target)
    _add_training(result, p, gpu, rows, target, draft)
    _add_block_training(result, p, gpu, rows, target, draft)
    _add_torch_cells(result, p, target, gpu)
    _add_served_cells(result, p, target, gpu)


def _add_extraction(result: RecipeEstimate, p: schema.Params, gpu: Gpu, rows: RowCounts, target: TargetSize) -> None:
    length, stored = rows.length, rows.stored_train + rows.sets * rows.evaluated
    flop, gpus = compute_target_flop(target, length), p.extract_hiddens.processes
    share = measured_rates.EXTRACTING_COMPILED_SHARE if p.extract_hiddens.compile else measured_rates.EXTRACTING_SHARE
    note = "; measured on dense targets only" if target.mixture else ""
    peak = f"{share:.1%} of {gpu.peak_flops / 1e12:.0f} TFLOP/s"
    derivation = f"{stored:,} rows * {length:,} tokens * {flop / 1e9:.2f} GFLOP at {peak}"
    seconds = stored * length * flop / (share * gpu.peak_flops)
    seconds = measured_rates.scale_to_gpus(seconds, gpus, measured_rates.TWO_GPUS_EXTRACTING)
    written = stored * length * _count_token_bytes(p, target.manifest)
    if written / measured_rates.DISK_BYTES_S > seconds / gpus:
        seconds = written / measured_rates.DISK_BYTES_S * gpus
        derivation = f"{written / 1e9:,.0f} GB at {measured_rates.DISK_BYTES_S / 1e9} GB/s of the disk, the GPUs wait"
    result.add_hours("extract_hiddens", seconds, derivation + note, gpus)


def _add_training(
    result: RecipeEstimate, p: schema.Params, gpu: Gpu, rows: RowCounts, target: TargetSize, draft: DraftConfig
) -> None:
    length, train, gpus = rows.length, rows.train, p.train_draft.processes
    segments = p.train_draft.checkpoints.values()
    if not (epochs := sum(one.epochs for one in segments if not isinstance(one, BlockSegment))):
        return
    flop = compute_train_flop(target.manifest, draft, p.train_draft.ttt_steps)
    share = measured_rates.TRAINING_SHARE
    if p.extract_hiddens.online:
        flop, share = flop + compute_target_flop(target, length), measured_rates.ONLINE_SHARE
    derivation = f"{epochs} epochs * {train:,} rows * {length:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%}"
    seconds = epochs * train * length * flop / (share * gpu.peak_flops)
    seconds = measured_rates.scale_to_gpus(seconds, gpus, measured_rates.TWO_GPUS_TRAINING)
    derivation += _describe_reading(p, target, epochs * train * length, seconds / gpus)
    result.add_hours("train_draft", seconds, derivation, gpus)


def _describe_reading(p: schema.Params, target: TargetSize, tokens: float, seconds: float) -> str:
    """Return what reading the hidden states of `tokens` in `seconds` asks of the disk, if they are stored."""
    if p.extract_hiddens.online:
        return ""
    read = tokens * _count_token_bytes(p, target.manifest) / max(seconds, 1)
    return f"; the disk must give {read / 1e9:.1f} GB/s, unless memory holds the hidden states"


def _add_block_training(
    result: RecipeEstimate, p: schema.Params, gpu: Gpu, rows: RowCounts, target: TargetSize, draft: DraftConfig
) -> None:
    """Add the hours of each segment of a block draft: its blocks, and the context that they read."""
    gpus = p.train_draft.processes
    for name, segment in p.train_draft.checkpoints.items():
        if not isinstance(segment, BlockSegment) or not rows.train:
            continue
        config = block_estimate.build_segment_config(name, p, draft, target.manifest)
        work, flop = (
            block_estimate.estimate_epoch(p, segment, rows.train, rows.length),
            block_estimate.compute_block_flop(segment, config),
        )
        total, context = flop.count(work), flop.token * work.tokens
        share = measured_rates.BLOCK_TRAINING_SHARES[segment.method]
        derivation = (
            f"{segment.epochs} epochs * ({work.blocks:,.0f} blocks * {(total - context) / work.blocks / 1e9:.1f} GFLOP + "
            f"{work.tokens:,} tokens * {flop.token / 1e9:.2f} GFLOP) at {share:.1%}"
        )
        seconds = segment.epochs * total / (share * gpu.peak_flops)
        if p.extract_hiddens.online:
            compiled = p.extract_hiddens.compile
            own = measured_rates.EXTRACTING_COMPILED_SHARE if compiled else measured_rates.EXTRACTING_SHARE
            of_target = compute_target_flop(target, rows.length)
            derivation += f", and the target's {of_target / 1e9:.2f} GFLOP a token at {own:.1%}"
            seconds += segment.epochs * work.tokens * of_target / (own * gpu.peak_flops)
        seconds = measured_rates.scale_to_gpus(seconds, gpus, measured_rates.TWO_GPUS_TRAINING)
        derivation += _describe_reading(p, target, segment.epochs * work.tokens, seconds / gpus)
        result.add_hours(f"train_draft, {name}", seconds, derivation, gpus)


def compute_target_flop(target: TargetSize, length: int) -> float:
    """Return the FLOP of one token's forward pass through the blocks, in rows of `length`, half of which it attends to."""
    manifest = target.manifest
    return 2 * target.blocks + 2 * length * manifest.num_attention_heads * manifest.head_dim * manifest.num_layers


def compute_train_flop(manifest: TargetManifest, draft: DraftConfig, steps: int) -> float:
    """Return the FLOP of training on one token.

    Counted are forward and backward of layer and head in each of `steps`, fc without its input's gradient, and the
    target's head. Attention, 2% at 2,048 tokens, is left out: 16.1 GFLOP for Qwen3-8B, measured with attention as
    16.46.
    """
    parts = count_draft_parameters(draft)
    return (
        6 * steps * (parts["layer"] + parts["head"]) + 4 * parts["fc"] + 2 * manifest.vocab_size * manifest.hidden_size
    )


def _add_sampling(
    result: RecipeEstimate, p: schema.Params, gpu: Gpu, target: TargetSize, rows: int, tokens: int
) -> None:
    if p.sample_target.backend == "transformers":
        gpus, at_once = 1, p.sample_target.batch_size
        step = measured_rates.estimate_generate_step(p, target, gpu, at_once, tokens)
    else:
        gpus = _count_sampling_gpus(p)
        at_once = max(1, p.sample_target.server.concurrency // gpus)  # of one GPU
        step = measured_rates.estimate_served_step(p, target, gpu, at_once, tokens)
    batches = -(-rows // (at_once * gpus))
    together = f"{at_once} at once" + (f" on each of {gpus} GPUs" if gpus > 1 else "")
    derivation = f"{batches:,} times {together} * {tokens:,} tokens * {1e3 * step:.1f} ms"
    seconds = batches * tokens * step
    result.add_hours("sample_target", seconds * gpus, derivation, gpus)


def _count_sampling_gpus(p: schema.Params) -> int:
    """Return the GPUs of the servers that sample: one for each URL, or those of a machine, which the stage fills with servers.

    A machine has as many as extract_hiddens uses, and those of one server at least.
    """
    server = p.sample_target.server
    if server.launch is None:
        return max(1, len(expand_urls(server.base_urls)))
    flags = {"--tp", "--tp-size", "--tensor-parallel-size", "--dp", "--dp-size", "--data-parallel-size"}
    words = [part for word in server.launch_args for part in word.split("=", 1)]
    own = math.prod(int(value) for flag, value in itertools.pairwise(words) if flag in flags and value.isdigit())
    return max(own, p.extract_hiddens.processes)


def _count_prompts(p: schema.Params, workload: Workload, concurrency: int | None) -> int:
    """Return how many prompts a load sends. A question with several turns counts as two, as MT-bench's have."""
    return (workload.limit_prompts(concurrency) or _get_eval_rows(p)) * (2 if workload.turns == "all" else 1)


def _add_torch_cells(result: RecipeEstimate, p: schema.Params, target: TargetSize, gpu: Gpu = MEASURED_GPU) -> None:
    for name in p.benchmark.torch_workloads:
        workload = p.benchmark.workloads[name]
        cells = len(p.benchmark.checkpoints) * len(p.benchmark.trees)
        ways = 2 if p.benchmark.mode == "both" else 1
        seconds, loads = 0.0, []
        for tokens, cap in workload.list_loads():
            prompts = _count_prompts(p, workload, cap) * workload.most_repeats + workload.warmup
            at_once = min(prompts, cap or prompts)
            context = (workload.input_tokens or 0) + tokens
            step = measured_rates.estimate_torch_step(p, target, gpu, at_once, context)
            seconds += cells * prompts / at_once * tokens * ways * step
            together = f" / {at_once} at once" if at_once > 1 else ""
            loads.append(f"{prompts:,} prompts * {tokens:,} tokens{together} * {1e3 * step:.1f} ms")
        derivation = f"{cells} cells * {ways} * ({' + '.join(loads)}): speculative counted as plain"
        # Prompts are divided over the copies of the target; the sum of GPU-seconds stays.
        result.add_hours(
            f"benchmark, {name}", seconds * p.benchmark.num_gpus_per_model, derivation, p.benchmark.num_gpus_total
        )


def _add_served_cells(result: RecipeEstimate, p: schema.Params, target: TargetSize, gpu: Gpu) -> None:
    served = p.benchmark_served
    cells = len(served.checkpoints) * len(served.trees) * (2 if served.interleave else 1)
    timed = p.serving_costs
    stages = [("benchmark_served", name, cells) for name in served.workloads]
    stages += [("benchmark_served_baseline", name, 1) for name in served.workloads]
    stages += [("serving_costs", name, 1 + len(timed.trees)) for name in timed.workloads]
    for stage, name, servers in stages:
        workload = p.benchmark.workloads[name]
        once = sum(_list_load_seconds(p, target, gpu, workload))
        load = workload.most_repeats * once
        repeated = f"{workload.most_repeats} * {once:.0f} s of load"
        derivation = f"({SERVER_START_S} s + {repeated}): speculative counted as plain"
        seconds = servers * (SERVER_START_S + load) * served.server.tp
        result.add_hours(f"{stage}, {name}", seconds, f"{servers} servers * {derivation}", served.server.tp)


def _list_load_seconds(p: schema.Params, target: TargetSize, gpu: Gpu, workload: Workload) -> list[float]:
    """Return the seconds of each load of a served workload: prefill and plain decoding, or the time its arrivals take."""
    loads = []
    for tokens, cap in workload.list_loads():
        prompts = _count_prompts(p, workload, cap)
        prompts += min(workload.warmup, prompts)
        at_once = min(prompts, cap or prompts)
        context = (workload.input_tokens or 0) + tokens
        seconds = prompts / at_once * tokens * measured_rates.estimate_served_step(p, target, gpu, at_once, context)
        prefill = compute_target_flop(target, context) / (measured_rates.EXTRACTING_SHARE * gpu.peak_flops)
        seconds += prompts * (workload.input_tokens or 0) * prefill
        loads.append(max(seconds, 0 if workload.request_rate == "inf" else prompts / workload.requests_per_second))
    return loads


if __name__ == "__main__":
    run_stage(main)
