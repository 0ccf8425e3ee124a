"""What a recipe takes: parameters, bytes and GPU-hours, without a GPU, a download or the data.

    python -m stages.reproduce.estimate RECIPE PARAMS    # JSON: lines to read, disk_bytes, download_bytes, gpu_hours, missing

The target's shape is that of recipes/targets/NAME.json; the draft's is inferred from it as init_draft does. Hours are an
H200's, from rates measured there (`Rates`). What is left out is small beside the rest: loading, compiling, replays,
check_overfit. Nothing is known of how long answers get, so they count as long as they may.
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

TARGETS_FOLDER = RECIPES_FOLDER / "targets"
GIB, GB = 2**30, 1e9
PEAK_FLOPS = 989e12  # FLOP/s of an H200 in bfloat16, by its datasheet
# docs/results/2026-11-21-h200-training.md: shares of PEAK, at the shape of Qwen3-8B
EXTRACTING_SHARE, EXTRACTING_COMPILED_SHARE, TRAINING_SHARE, ONLINE_SHARE = 0.434, 0.559, 0.57, 0.591
# docs/results/2026-11-21-h200-weather-tiny.md: 120 tokens/s of plain decoding, 7 layers; the engine waits for Python
TORCH_LAYER_S = 1 / 120 / 7
# docs/results/2026-11-20-h200-decoding.md: SGLang's plain step at 8B shape reads 15.63 GB in 5.22 ms; it starts in 64 s
SERVED_BYTES_S, SERVER_START_S = 15.63 * GB / 5.22e-3, 64


@dataclass(frozen=True)
class TargetSize:
    """A target by its recorded config."""

    made: TargetManifest
    recorded_from: str
    parameters: int
    active: int  # of them, those a token meets: of a mixture's experts as many as it is sent to
    blocks: int  # of the active, those in the language model's blocks
    mixture: bool

    def kv_bytes(self, dtype: str) -> int:
        """A token's keys and values in all layers."""
        m = self.made
        return 2 * m.num_layers * m.num_key_value_heads * m.head_dim * _get_itemsize(dtype)


@dataclass
class RecipeEstimate:
    lines: list[str] = field(default_factory=list)
    disk_bytes: float = 0.0
    download_bytes: float = 0.0
    gpu_hours: float = 0.0
    missing: list[str] = field(default_factory=list)  # files that the user brings

    def say(self, what: str, value: str, how: str) -> None:
        self.lines.append(f"{what}: {value} ({how})")

    def disk(self, what: str, size: float, how: str) -> None:
        self.disk_bytes += size
        self.say(what, f"{size / GIB:.2f} GiB", how)

    def hours(self, what: str, seconds: float, how: str) -> None:
        self.gpu_hours += seconds / 3600
        self.say(what, f"{seconds / 3600:.2g} GPU-hours", how)


def main(recipe: str, file: str) -> None:
    about, _ = schema.read_recipe(Path(recipe))
    assert about, recipe
    print(json.dumps(vars(estimate_recipe(schema.load_params(Path(file)), about))))


def estimate_recipe(p: schema.Params, recipe: Recipe) -> RecipeEstimate:
    shape = read_target_size(p)
    draft = init_draft.infer_config(p, shape.made)
    found = RecipeEstimate(missing=_list_missing_files(p))
    _add_sizes(found, p, shape, draft)
    _add_disk(found, p, recipe, shape, draft)
    if p.target.device == "cpu":
        found.say("GPU", "none", "target.device is cpu")
    else:
        _add_hours(found, p, recipe, shape, draft)
        found.say("together", f"{found.gpu_hours:.2g} GPU-hours", "of an H200")
    found.say("together", f"{found.disk_bytes / GIB:.2f} GiB", "in this folder")
    return found


# Shapes


def read_target_size(p: schema.Params) -> TargetSize:
    """Raises ValueError where no config of the target is recorded."""
    path = TARGETS_FOLDER / f"{p.target.model.rstrip('/').rsplit('/', 1)[-1]}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in TARGETS_FOLDER.glob("*.json")))
        raise ValueError(f"{path} not found, expected a recorded config.json of {p.target.model}; there are {known}")
    kept = json.loads(path.read_text(encoding="utf-8"))
    config: PretrainedConfig = CONFIG_MAPPING[kept["config"]["model_type"]].from_dict(kept["config"])
    made = prepare_target.describe_target(
        p.target.model, p.target.revision, config, path.parent, p.target.feature_layers
    )
    return TargetSize(made, kept["recorded_from"], *_count_parameters(config))


def _count_parameters(config: PretrainedConfig) -> tuple[int, int, int, bool]:
    """(all, active, active in blocks, whether there are experts), counted on a model without memory."""
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
    """Of a draft's parts by its config.json: fc, the layer, the head."""
    sizes = {name: torch.Size(shape).numel() for name, shape in checkpoint.list_tensor_shapes(draft).items()}
    fc, head = sizes["fc.weight"], sizes["lm_head.weight"]
    return {"fc": fc, "head": head, "layer": sum(sizes.values()) - fc - head - sizes["d2t"] - sizes["t2d"]}


def _add_sizes(found: RecipeEstimate, p: schema.Params, shape: TargetSize, draft: dict[str, Any]) -> None:
    made, size = shape.made, _get_itemsize(p.target.dtype)
    experts = f", {format_count(shape.active)} of them active" if shape.mixture else ""
    found.say("target", f"{made.model}, {format_count(shape.parameters)} parameters{experts}", shape.recorded_from)
    kv = shape.kv_bytes(p.target.dtype)
    how = f"2 * {made.num_layers} layers * {made.num_key_value_heads} heads * {made.head_dim} * {size} bytes"
    found.say("KV cache", f"{kv:,} bytes a token", how)
    total, rope = sum(count_draft_parameters(draft).values()), draft["rope_parameters"]["rope_type"]
    within, vocabulary = draft["intermediate_size"], draft["draft_vocab_size"]
    how = f"inferred: {made.hidden_size} wide, {within} within, vocabulary {vocabulary}, {rope} RoPE"
    found.say("draft", f"{format_count(total)} parameters", how)
    held = {"target": shape.parameters * size, "draft": total * size}
    if p.benchmark_served.workloads and (tokens := p.benchmark_served.server.max_total_tokens):
        held[f"{tokens:,} tokens of KV cache"] = tokens * kv
    how = ", ".join(f"{what} {bytes_ / GIB:.2f}" for what, bytes_ in held.items())
    found.say("GPU memory", f"{sum(held.values()) / GIB:.2f} GiB and more", how)


# Disk


def _add_disk(
    found: RecipeEstimate, p: schema.Params, recipe: Recipe, shape: TargetSize, draft: dict[str, Any]
) -> None:
    made, total = shape.made, sum(count_draft_parameters(draft).values())
    token = _count_token_bytes(p, made)
    length = min(recipe.row_tokens, p.extract_hiddens.max_length)
    train = 0 if p.extract_hiddens.online else _get_train_rows(p, recipe)
    sets = 2 if p.sample_target.eval_temperature else 1
    rows = train + sets * _get_eval_rows(p)
    how = f"{train:,} + {sets} * {_get_eval_rows(p):,} rows * {length:,} tokens * {token:,.1f} bytes"
    found.disk("hidden states", rows * length * token, how)
    segments = p.train_draft.checkpoints
    weights = _get_itemsize(p.train_draft.dtype)
    # e000 is float32; a segment keeps its draft, float32 weights and two moments, and one more of each while it runs.
    kept = len(segments) + 1 if segments else 0
    how = f"{format_count(total)} * (4 + {kept} * ({weights} + 12)) bytes"
    found.disk("checkpoints", total * (4 + kept * (weights + 12)), how)
    if imported := p.import_draft.checkpoints:
        found.disk("imported drafts", 2 * total * len(imported), f"{len(imported)} * {format_count(total)} * 2 bytes")
        found.download_bytes += 2 * total * len(imported)
    if made.model.startswith("builtin/"):
        found.disk("target", 4 * shape.parameters, f"{format_count(shape.parameters)} * 4 bytes")
    else:
        found.download_bytes += 2 * shape.parameters
        how = f"target and drafts, 2 bytes each; {_get_free_cache_bytes() / GIB:.0f} GiB are free in the Hugging Face cache"
        found.say("to download, unless it is there", f"{found.download_bytes / GIB:.1f} GiB", how)


def _get_free_cache_bytes() -> int:
    """Bytes; of the nearest folder above where the cache isn't yet."""
    cache = Path(constants.HF_HUB_CACHE).absolute()
    return shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free


def _count_token_bytes(p: schema.Params, made: TargetManifest) -> float:
    """Of hidden states on disk; of a target that sees as if every token stood for a piece of a picture."""
    names = {"fp8": format.FP8} | {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
    dtype, sees = names[p.extract_hiddens.dtype], made.image_token_id is not None
    return format.count_token_bytes(made.hidden_size, dtype, sees) + (
        format.count_visual_bytes(made.hidden_size, dtype) if sees else 0
    )


def _get_train_rows(p: schema.Params, recipe: Recipe) -> int:
    return p.sample_target.train_rows or recipe.train_rows or 0


def _get_eval_rows(p: schema.Params) -> int:
    """At most so many: fewer where the data has fewer."""
    return p.sample_target.eval_rows or p.fix_data.eval_rows or 0


# Hours


def _add_hours(
    found: RecipeEstimate, p: schema.Params, recipe: Recipe, shape: TargetSize, draft: dict[str, Any]
) -> None:
    length = min(recipe.row_tokens, p.extract_hiddens.max_length)
    train, sets = _get_train_rows(p, recipe), 2 if p.sample_target.eval_temperature else 1
    rows = train + sets * _get_eval_rows(p)
    if p.sample_target.backend != "keep":
        _add_sampling(found, p, shape, rows, min(length, p.sample_target.max_new_tokens))
    stored = rows - (train if p.extract_hiddens.online else 0)
    flop, share = (
        compute_target_flop(shape, length),
        EXTRACTING_COMPILED_SHARE if p.extract_hiddens.compile else EXTRACTING_SHARE,
    )
    how = f"{stored:,} rows * {length:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s"
    found.hours("extract_hiddens", stored * length * flop / (share * PEAK_FLOPS), how + _note_mixture(shape))
    if segments := p.train_draft.checkpoints:
        epochs = sum(segment.epochs for segment in segments.values())
        flop, share = compute_train_flop(shape.made, draft, p.train_draft.ttt_steps), TRAINING_SHARE
        if p.extract_hiddens.online:
            flop, share = flop + compute_target_flop(shape, length), ONLINE_SHARE
        how = f"{epochs} epochs * {train:,} rows * {length:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%}"
        found.hours("train_draft", epochs * train * length * flop / (share * PEAK_FLOPS), how)
    _add_torch_cells(found, p, shape)
    _add_served_cells(found, p, shape)


def compute_target_flop(shape: TargetSize, length: int) -> float:
    """Of one token's forward through the blocks, in rows of `length`: weights, and half of the row attended to."""
    made = shape.made
    return 2 * shape.blocks + 2 * length * made.num_attention_heads * made.head_dim * made.num_layers


def compute_train_flop(made: TargetManifest, draft: dict[str, Any], steps: int) -> float:
    """Of training on one token: forward and backward of layer and head in each step, fc without its input's gradient, the
    teacher's head. Attention, 2% at 2,048, is left out. 16.1 GFLOP for Qwen3-8B (16.46 with attention, as measured)."""
    parts = count_draft_parameters(draft)
    return 6 * steps * (parts["layer"] + parts["head"]) + 4 * parts["fc"] + 2 * made.vocab_size * made.hidden_size


def _add_sampling(found: RecipeEstimate, p: schema.Params, shape: TargetSize, rows: int, tokens: int) -> None:
    if p.sample_target.backend == "transformers":
        batches = -(-rows // p.sample_target.batch_size)
        step = TORCH_LAYER_S * shape.made.num_layers
        how = f"{batches:,} batches * {tokens:,} tokens * {1e3 * step:.1f} ms, {1e3 * TORCH_LAYER_S:.2f} a layer"
    else:
        batches = -(-rows // p.sample_target.server.concurrency)
        step = _estimate_served_step(p, shape, p.sample_target.server.concurrency, tokens)
        how = (
            f"{batches:,} times {p.sample_target.server.concurrency} at once * {tokens:,} tokens * {1e3 * step:.1f} ms"
        )
    found.hours("sample_target", batches * tokens * step, how)


def _count_prompts(p: schema.Params, w: Workload) -> int:
    """Of a question with several turns two: MT-bench has no more."""
    return (w.num_prompts or _get_eval_rows(p)) * (2 if w.turns == "all" else 1)


def _add_torch_cells(found: RecipeEstimate, p: schema.Params, shape: TargetSize) -> None:
    step = TORCH_LAYER_S * shape.made.num_layers
    for name in p.benchmark.torch_workloads:
        w = p.benchmark.workloads[name]
        prompts = _count_prompts(p, w) * w.repeats + w.warmup
        cells = len(p.benchmark.checkpoints) * len(p.benchmark.trees)
        seconds, loads = 0.0, []
        for tokens, cap in w.list_loads():
            at_once = min(prompts, cap or prompts)
            seconds += cells * prompts / at_once * tokens * 2 * step
            loads.append(f"{prompts:,} prompts * {tokens:,} tokens" + (f" / {at_once} at once" if at_once > 1 else ""))
        how = f"{cells} cells * {' + '.join(loads)} * 2 * {1e3 * step:.1f} ms: speculative counted as plain"
        found.hours(f"benchmark, {name}", seconds, how)


def _add_served_cells(found: RecipeEstimate, p: schema.Params, shape: TargetSize) -> None:
    served = p.benchmark_served
    cells = 1 + len(served.checkpoints) * len(served.trees) * (2 if served.interleave else 1)
    for name in served.workloads:
        w = p.benchmark.workloads[name]
        prompts = _count_prompts(p, w) + w.warmup
        loads = []
        for tokens, cap in w.list_loads():
            at_once = min(prompts, cap or prompts)
            context = (w.input_tokens or 0) + tokens
            seconds = prompts / at_once * tokens * _estimate_served_step(p, shape, at_once, context)
            seconds += (
                prompts * (w.input_tokens or 0) * compute_target_flop(shape, context) / (EXTRACTING_SHARE * PEAK_FLOPS)
            )
            loads.append(max(seconds, 0 if w.request_rate == "inf" else prompts / w.requests_per_second))
        seconds = cells * (SERVER_START_S + w.repeats * sum(loads)) * served.server.tp
        how = f"{cells} servers * ({SERVER_START_S} s + {w.repeats} * {sum(loads):.0f} s of load): speculative counted as plain"
        found.hours(f"benchmark_served, {name}", seconds, how)


def _estimate_served_step(p: schema.Params, shape: TargetSize, at_once: int, context: int) -> float:
    """Seconds: the weights that `at_once` tokens meet, and their contexts, are read once."""
    met = min(shape.parameters, shape.active * at_once)
    return (met * _get_itemsize(p.target.dtype) + at_once * context * shape.kv_bytes(p.target.dtype)) / SERVED_BYTES_S


def _note_mixture(shape: TargetSize) -> str:
    return "; measured on dense targets only" if shape.mixture else ""


def _list_missing_files(p: schema.Params) -> list[str]:
    """The raw data, and prompt sets that a workload asks for, where they aren't here."""
    wanted = {w.prompts for w in p.benchmark.workloads.values()} & set(p.prepare_prompts.sets)
    files = [p.prepare_prompts.sets[name].from_ for name in sorted(wanted) if p.prepare_prompts.sets[name].is_file]
    return [name for name in [p.fix_data.raw, *files] if not Path(name).exists()]


def format_count(parameters: int) -> str:
    """In three digits, as model cards have them."""
    unit = next((unit for unit in (1e9, 1e6) if parameters >= unit), 1e3)
    return f"{parameters / unit:.3g}e{round(math.log10(unit))}"


def _get_itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


if __name__ == "__main__":
    schema.run_stage(main)
