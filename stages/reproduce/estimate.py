"""Estimate of a recipe: parameters, bytes and GPU-hours, without a GPU, a download or the data.

    python -m stages.reproduce.estimate RECIPE PARAMS    # JSON: lines to read, disk_bytes, download_bytes, gpu_hours, missing
    python -m stages.reproduce.estimate - PARAMS         # without a recipe: rows as long as extract_hiddens.max_length allows

The target's shape is that of recipes/targets/NAME.json; the draft's is inferred from it as init_draft does. Hours are
an H200's, from the measured rates below. Loading, compiling, replays and check_overfit are left out: they are small.
How long answers get is not known, so each counts as long as it may be.
"""

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import CONFIG_MAPPING, PretrainedConfig

from stages import init_draft, prepare_target
from stages.draft import checkpoint
from stages.hidden_states import format
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.recipe import RECIPES_FOLDER, Recipe
from stages.target import loading
from stages.target.manifest import TargetManifest
from stages.telemetry.run_stage import run_stage

TARGETS_FOLDER = RECIPES_FOLDER / "targets"
GIB, GB = 2**30, 1e9
PEAK_FLOPS = 989e12  # FLOP/s of an H200 in bfloat16, by its datasheet
# docs/results/2026-11-21-h200-training.md: shares of PEAK_FLOPS, at the shape of Qwen3-8B
EXTRACTING_SHARE, EXTRACTING_COMPILED_SHARE, TRAINING_SHARE, ONLINE_SHARE = 0.434, 0.559, 0.57, 0.591
# docs/results/2026-11-21-h200-weather-tiny.md: 120 tokens/s of plain decoding, 7 layers; the engine waits for Python
TORCH_LAYER_S = 1 / 120 / 7
# docs/results/2026-11-20-h200-decoding.md: SGLang's plain step at 8B shape reads 15.63 GB in 5.22 ms; it starts in 64 s
SERVED_BYTES_S, SERVER_START_S = 15.63 * GB / 5.22e-3, 64


@dataclass(frozen=True)
class TargetSize:
    """Numbers of parameters of a target, by its recorded config."""

    manifest: TargetManifest
    recorded_from: str
    parameters: int
    active: int  # those that one token meets: of a mixture's experts as many as it is sent to
    blocks: int  # active ones in the language model's blocks
    mixture: bool

    def kv_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        m = self.manifest
        return 2 * m.num_layers * m.num_key_value_heads * m.head_dim * _get_itemsize(dtype)


@dataclass
class RecipeEstimate:
    lines: list[str] = field(default_factory=list)
    disk_bytes: float = 0.0
    download_bytes: float = 0.0
    gpu_hours: float = 0.0
    missing: list[str] = field(default_factory=list)  # files that the user brings

    def add_line(self, what: str, value: str, how: str) -> None:
        self.lines.append(f"{what}: {value} ({how})")

    def add_disk(self, what: str, size: float, how: str) -> None:
        self.disk_bytes += size
        self.add_line(what, f"{size / GIB:.2f} GiB", how)

    def add_hours(self, what: str, seconds: float, how: str) -> None:
        self.gpu_hours += seconds / 3600
        self.add_line(what, f"{seconds / 3600:.2g} GPU-hours", how)


@dataclass(frozen=True)
class RowCounts:
    train: int
    stored_train: int  # of them those whose hidden states are stored
    evaluated: int  # rows of one eval set, at most
    sets: int  # of eval rows
    length: int  # tokens of a row


def main(recipe_file: str, params_file: str) -> None:
    p = schema.load_params(Path(params_file))
    recipe = _describe_params(p) if recipe_file == "-" else schema.read_recipe(Path(recipe_file))[0]
    assert recipe, recipe_file
    print(json.dumps(vars(estimate_recipe(p, recipe))))


def _describe_params(p: schema.Params) -> Recipe:
    """Return the description of a recipe of no other rows than the parameters': each as long as they allow."""
    nothing: dict[str, Any] = {
        "pins": {},
        "substitutes": {},
        "notes": [],
        "tolerance": {},
        "beside": [],
        "train_rows": None,
    }
    return Recipe(status="validated only", row_tokens=p.extract_hiddens.max_length, **nothing)


def estimate_recipe(p: schema.Params, recipe: Recipe) -> RecipeEstimate:
    target = read_target_size(p)
    draft = init_draft.infer_config(p, target.manifest)
    result, rows = RecipeEstimate(missing=_list_missing_files(p)), _count_rows(p, recipe)
    _add_sizes(result, p, target, draft)
    _add_disk(result, p, rows, target, draft)
    if p.target.device == "cpu":
        result.add_line("GPU", "none", "target.device is cpu")
    else:
        _add_hours(result, p, rows, target, draft)
        result.add_line("together", f"{result.gpu_hours:.2g} GPU-hours", "of an H200")
    result.add_line("together", f"{result.disk_bytes / GIB:.2f} GiB", "in this folder")
    return result


# Shapes


def read_target_size(p: schema.Params) -> TargetSize:
    """Return the target's size. Raises ValueError where no config of the target is recorded."""
    path = TARGETS_FOLDER / f"{p.target.model.rstrip('/').rsplit('/', 1)[-1]}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in TARGETS_FOLDER.glob("*.json")))
        raise ValueError(f"{path} not found, expected a recorded config.json of {p.target.model}; there are {known}")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    config: PretrainedConfig = CONFIG_MAPPING[recorded["config"]["model_type"]].from_dict(recorded["config"])
    manifest = prepare_target.describe_target(
        p.target.model, p.target.revision, config, path.parent, p.target.feature_layers
    )
    return TargetSize(manifest, recorded["recorded_from"], *_count_parameters(config))


def _count_parameters(config: PretrainedConfig) -> tuple[int, int, int, bool]:
    """Return (all, active, active in blocks, whether it has experts), counted on the meta device."""
    with torch.device("meta"):
        model = loading.select_auto_class(config).from_config(config)
    text = config.get_text_config()
    experts = getattr(text, "num_experts", None)
    share = text.num_experts_per_tok / experts if experts else 1.0
    total = active = blocks = 0
    for name, parameter in model.named_parameters():
        met = round(parameter.numel() * (share if ".experts." in name else 1.0))
        total, active = total + parameter.numel(), active + met
        blocks += met if ".layers." in name and "visual" not in name else 0
    return total, active, blocks, bool(experts)


def count_draft_parameters(draft: dict[str, Any]) -> dict[str, int]:
    """Return the parameters of a draft's fc, layer and head by its config.json."""
    sizes = {name: torch.Size(shape).numel() for name, shape in checkpoint.list_tensor_shapes(draft).items()}
    fc, head = sizes["fc.weight"], sizes["lm_head.weight"]
    return {"fc": fc, "head": head, "layer": sum(sizes.values()) - fc - head - sizes["d2t"] - sizes["t2d"]}


def _add_sizes(result: RecipeEstimate, p: schema.Params, target: TargetSize, draft: dict[str, Any]) -> None:
    manifest, size = target.manifest, _get_itemsize(p.target.dtype)
    experts = f", {format_count(target.active)} of them active" if target.mixture else ""
    result.add_line(
        "target", f"{manifest.model}, {format_count(target.parameters)} parameters{experts}", target.recorded_from
    )
    kv = target.kv_bytes(p.target.dtype)
    how = (
        f"2 * {manifest.num_layers} layers * {manifest.num_key_value_heads} heads * {manifest.head_dim} * {size} bytes"
    )
    result.add_line("KV cache", f"{kv:,} bytes a token", how)
    total, rope = sum(count_draft_parameters(draft).values()), draft["rope_parameters"]["rope_type"]
    within, vocabulary = draft["intermediate_size"], draft["draft_vocab_size"]
    how = f"inferred: {manifest.hidden_size} wide, {within} within, vocabulary {vocabulary}, {rope} RoPE"
    result.add_line("draft", f"{format_count(total)} parameters", how)
    held = {"target": target.parameters * size, "draft": total * size}
    if p.benchmark_served.workloads and (tokens := p.benchmark_served.server.max_total_tokens):
        held[f"{tokens:,} tokens of KV cache"] = tokens * kv
    how = ", ".join(f"{what} {bytes_ / GIB:.2f}" for what, bytes_ in held.items())
    result.add_line("GPU memory", f"{sum(held.values()) / GIB:.2f} GiB and more", how)


# Disk


def _add_disk(
    result: RecipeEstimate, p: schema.Params, rows: RowCounts, target: TargetSize, draft: dict[str, Any]
) -> None:
    manifest, total = target.manifest, sum(count_draft_parameters(draft).values())
    token, stored = _count_token_bytes(p, manifest), rows.stored_train + rows.sets * rows.evaluated
    counts = f"{rows.stored_train:,} + {rows.sets} * {rows.evaluated:,} rows"
    how = f"{counts} * {rows.length:,} tokens * {token:,.1f} bytes"
    result.add_disk("hidden states", stored * rows.length * token, how)
    segments, weights = p.train_draft.checkpoints, _get_itemsize(p.train_draft.dtype)
    # e000 is float32; a segment keeps its draft, float32 weights and two moments, and another set while it runs.
    kept = len(segments) + 1 if segments else 0
    how = f"{format_count(total)} * (4 + {kept} * ({weights} + 12)) bytes"
    result.add_disk("checkpoints", total * (4 + kept * (weights + 12)), how)
    if imported := p.import_draft.checkpoints:
        size = 2 * total * len(imported)
        result.add_disk("imported drafts", size, f"{len(imported)} * {format_count(total)} * 2 bytes")
        result.download_bytes += size
    if manifest.model.startswith("builtin/"):
        result.add_disk("target", 4 * target.parameters, f"{format_count(target.parameters)} * 4 bytes")
    else:
        result.download_bytes += 2 * target.parameters
        how = f"target and drafts, 2 bytes each; {_get_free_cache_bytes() / GIB:.0f} GiB are free in the Hugging Face cache"
        result.add_line("to download, unless it is there", f"{result.download_bytes / GIB:.1f} GiB", how)


def _get_free_cache_bytes() -> int:
    """Return the free bytes where the Hugging Face cache is, or will be made."""
    cache = Path(constants.HF_HUB_CACHE).absolute()
    return shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free


def _count_token_bytes(p: schema.Params, manifest: TargetManifest) -> float:
    """Return the bytes of one token's hidden states. For a multimodal target every token counts as an image token."""
    names = {"fp8": format.FP8} | {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
    dtype, is_multimodal = names[p.extract_hiddens.dtype], manifest.image_token_id is not None
    visual = format.count_visual_bytes(manifest.hidden_size, dtype) if is_multimodal else 0
    return format.count_token_bytes(manifest.hidden_size, dtype, is_multimodal) + visual


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
    result: RecipeEstimate, p: schema.Params, rows: RowCounts, target: TargetSize, draft: dict[str, Any]
) -> None:
    length, train = rows.length, rows.train
    if p.sample_target.backend != "keep":
        _add_sampling(
            result, p, target, train + rows.sets * rows.evaluated, min(length, p.sample_target.max_new_tokens)
        )
    stored, flop = rows.stored_train + rows.sets * rows.evaluated, compute_target_flop(target, length)
    share = EXTRACTING_COMPILED_SHARE if p.extract_hiddens.compile else EXTRACTING_SHARE
    note = "; measured on dense targets only" if target.mixture else ""
    how = f"{stored:,} rows * {length:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s"
    result.add_hours("extract_hiddens", stored * length * flop / (share * PEAK_FLOPS), how + note)
    if segments := p.train_draft.checkpoints:
        epochs = sum(segment.epochs for segment in segments.values())
        flop, share = compute_train_flop(target.manifest, draft, p.train_draft.ttt_steps), TRAINING_SHARE
        if p.extract_hiddens.online:
            flop, share = flop + compute_target_flop(target, length), ONLINE_SHARE
        how = f"{epochs} epochs * {train:,} rows * {length:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%}"
        result.add_hours("train_draft", epochs * train * length * flop / (share * PEAK_FLOPS), how)
    _add_torch_cells(result, p, target)
    _add_served_cells(result, p, target)


def compute_target_flop(target: TargetSize, length: int) -> float:
    """Return the FLOP of one token's forward pass through the blocks, in rows of `length`, half of which it attends to."""
    manifest = target.manifest
    return 2 * target.blocks + 2 * length * manifest.num_attention_heads * manifest.head_dim * manifest.num_layers


def compute_train_flop(manifest: TargetManifest, draft: dict[str, Any], steps: int) -> float:
    """Return the FLOP of training on one token.

    Counted are forward and backward of layer and head in each of `steps`, fc without its input's gradient, and the
    target's head. Attention, 2% at 2,048 tokens, is left out: 16.1 GFLOP for Qwen3-8B, measured with attention as
    16.46.
    """
    parts = count_draft_parameters(draft)
    return (
        6 * steps * (parts["layer"] + parts["head"]) + 4 * parts["fc"] + 2 * manifest.vocab_size * manifest.hidden_size
    )


def _add_sampling(result: RecipeEstimate, p: schema.Params, target: TargetSize, rows: int, tokens: int) -> None:
    if p.sample_target.backend == "transformers":
        batches = -(-rows // p.sample_target.batch_size)
        step = TORCH_LAYER_S * target.manifest.num_layers
        how = f"{batches:,} batches * {tokens:,} tokens * {1e3 * step:.1f} ms, {1e3 * TORCH_LAYER_S:.2f} a layer"
    else:
        batches = -(-rows // p.sample_target.server.concurrency)
        step = _estimate_served_step(p, target, p.sample_target.server.concurrency, tokens)
        how = (
            f"{batches:,} times {p.sample_target.server.concurrency} at once * {tokens:,} tokens * {1e3 * step:.1f} ms"
        )
    result.add_hours("sample_target", batches * tokens * step, how)


def _count_prompts(p: schema.Params, workload: Workload) -> int:
    """Return how many prompts are sent. A question with several turns counts as two, as MT-bench's have."""
    return (workload.num_prompts or _get_eval_rows(p)) * (2 if workload.turns == "all" else 1)


def _add_torch_cells(result: RecipeEstimate, p: schema.Params, target: TargetSize) -> None:
    step = TORCH_LAYER_S * target.manifest.num_layers
    for name in p.benchmark.torch_workloads:
        workload = p.benchmark.workloads[name]
        prompts = _count_prompts(p, workload) * workload.most_repeats + workload.warmup
        cells = len(p.benchmark.checkpoints) * len(p.benchmark.trees)
        seconds, loads = 0.0, []
        for tokens, cap in workload.list_loads():
            at_once = min(prompts, cap or prompts)
            seconds += cells * prompts / at_once * tokens * 2 * step
            loads.append(f"{prompts:,} prompts * {tokens:,} tokens" + (f" / {at_once} at once" if at_once > 1 else ""))
        how = f"{cells} cells * {' + '.join(loads)} * 2 * {1e3 * step:.1f} ms: speculative counted as plain"
        result.add_hours(f"benchmark, {name}", seconds, how)


def _add_served_cells(result: RecipeEstimate, p: schema.Params, target: TargetSize) -> None:
    served = p.benchmark_served
    cells = 1 + len(served.checkpoints) * len(served.trees) * (2 if served.interleave else 1)
    for name in served.workloads:
        workload = p.benchmark.workloads[name]
        prompts = _count_prompts(p, workload) + workload.warmup
        loads = []
        for tokens, cap in workload.list_loads():
            at_once = min(prompts, cap or prompts)
            context = (workload.input_tokens or 0) + tokens
            seconds = prompts / at_once * tokens * _estimate_served_step(p, target, at_once, context)
            seconds += (
                prompts
                * (workload.input_tokens or 0)
                * compute_target_flop(target, context)
                / (EXTRACTING_SHARE * PEAK_FLOPS)
            )
            loads.append(max(seconds, 0 if workload.request_rate == "inf" else prompts / workload.requests_per_second))
        seconds = cells * (SERVER_START_S + workload.most_repeats * sum(loads)) * served.server.tp
        load = f"({SERVER_START_S} s + {workload.most_repeats} * {sum(loads):.0f} s of load)"
        how = f"{cells} servers * {load}: speculative counted as plain"
        result.add_hours(f"benchmark_served, {name}", seconds, how)


def _estimate_served_step(p: schema.Params, target: TargetSize, at_once: int, context: int) -> float:
    """Return seconds: the weights that `at_once` tokens meet, and their contexts, are read once."""
    weights = min(target.parameters, target.active * at_once)
    return (
        weights * _get_itemsize(p.target.dtype) + at_once * context * target.kv_bytes(p.target.dtype)
    ) / SERVED_BYTES_S


def _list_missing_files(p: schema.Params) -> list[str]:
    """Return the raw data and the workloads' prompt sets that do not exist here."""
    wanted = {workload.prompts for workload in p.benchmark.workloads.values()} & set(p.prepare_prompts.sets)
    files = [p.prepare_prompts.sets[name].from_ for name in sorted(wanted) if p.prepare_prompts.sets[name].is_file]
    return [name for name in [p.fix_data.raw, *files] if not Path(name).exists()]


def format_count(parameters: int) -> str:
    """Return the count with three digits: 8.19e9."""
    unit = next((unit for unit in (1e9, 1e6) if parameters >= unit), 1e3)
    return f"{parameters / unit:.3g}e{round(math.log10(unit))}"


def _get_itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


if __name__ == "__main__":
    run_stage(main)
