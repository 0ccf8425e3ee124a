"""Estimate of a run: parameters, bytes and GPU-hours, without a GPU, a download or the data.

    python -m stages.reproduce.estimate RECIPE PARAMS [GPU]    # JSON: lines to read, estimates by stage, totals
    python -m stages.reproduce.estimate - PARAMS               # without a recipe: the rows of the data here, and as long

The draft's shape is inferred from the target's as init_draft does. Hours are FLOP and bytes over rates that were measured on an
H200 at the shape of Qwen3-8B. Loading, compiling, replays and check_overfit are left out; every answer counts as long as it may
be, and speculative decoding as plain.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import torch

from stages import init_draft
from stages.draft.eagle3 import DraftConfig
from stages.families.block import training as block_training_start
from stages.families.block.files import list_block_tensor_shapes
from stages.families.block.model import BlockDraftConfig
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.hidden_states import format
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.draft_sections import MOST_BATCH_TOKENS
from stages.params.families import ROOT_FAMILY, BlockSegment
from stages.params.server_urls import expand_urls
from stages.params.units import format_bytes
from stages.reproduce import data_size
from stages.reproduce.block_flop import BlockFlop, BlockWork
from stages.reproduce.data_size import StageCounts
from stages.reproduce.target_size import TargetSize, format_count, get_itemsize, read_target_size
from stages.target.manifest import TargetManifest
from stages.telemetry import stage_log
from stages.telemetry.run_stage import run_stage

# Share of an H200's memory bandwidth, by datasheet; both compute 989 TFLOP/s in bfloat16.
GPUS = {"h200": 1.0, "h100": 3.35 / 4.8}
PEAK_FLOPS = 989e12
# docs/results/2026-11-21-h200-training.md and 2026-11-25-h200-two-gpus.md: shares of the peak
EXTRACTING_SHARES = {False: 0.434, True: 0.559}  # compiled
TRAINING_SHARES = {"eagle3": 0.57, "dflash": 0.540, "dflash2": 0.466, "dspark": 0.461}
GPUS_SHARE = 0.96  # of the time of several GPUs that is used
DISK_BYTES_S = 1.95e9
# A plain step reads 15.14 GB in 4.574 ms on the torch engine and in 5.22 ms on SGLang, and takes at least their own time:
# docs/results/2026-11-22-h200-one-engine.md, 2026-11-20-h200-decoding.md, 2026-11-22-h200-engine.md, 2026-11-21-h200-serving.md.
STEP_BYTES_S = {True: 15.14e9 / 4.574e-3, False: 15.14e9 / 5.22e-3}  # in process, on a server
TORCH_LAYER_S = {False: 0.19e-3 / 7, True: 0.67e-3 / 7}  # of a mixture of experts
SERVER_STEP_S = 1.19e-3
SERVER_START_S = 64


@dataclass
class StageEstimate:
    """Time and disk of all stages of dvc.yaml with one name before the @. None where nothing is known."""

    seconds: float | None = None
    gpu_hours: float | None = None
    disk_bytes: float = 0.0


@dataclass
class RunEstimate:
    """The size of a run; pipeline/reproduce.py reads it."""

    lines: list[str] = field(default_factory=list)
    stages: dict[str, StageEstimate] = field(default_factory=dict)
    disk_bytes: float = 0.0
    download_bytes: float = 0.0
    gpu_hours: float = 0.0
    weight_bytes: float = 0.0  # of the target, in its dtype

    def add_line(self, label: str, value: str, derivation: str) -> None:
        self.lines.append(f"{label}: {value} ({derivation})")

    def add_disk(self, stage: str, label: str, size: float, derivation: str) -> None:
        self.disk_bytes += size
        self.stages.setdefault(stage, StageEstimate()).disk_bytes += size
        self.add_line(label, format_bytes(size), derivation)

    def add_hours(self, label: str, gpu_seconds: float, derivation: str, gpus: int = 1) -> None:
        """Add GPU-seconds of a stage, or of a stage and a workload: `benchmark, eval`. Its `gpus` work at once."""
        stage = self.stages.setdefault(label.partition(",")[0], StageEstimate())
        stage.seconds = (stage.seconds or 0) + gpu_seconds / gpus
        stage.gpu_hours = (stage.gpu_hours or 0) + gpu_seconds / 3600
        self.gpu_hours += gpu_seconds / 3600
        on = f", on {gpus} GPUs" if gpus > 1 else ""
        self.add_line(label, f"{gpu_seconds / 3600:.2g} GPU-hours", derivation + on)


@dataclass(frozen=True)
class RowCounts:
    train: int
    evaluated: int  # of all eval sets, at most
    length: int  # tokens of a row

    def count_stored_tokens(self, p: schema.Params) -> int:
        return ((0 if p.extract_hiddens.online else self.train) + self.evaluated) * self.length


def main(recipe_file: str, params_file: str, gpu: str = "h200") -> None:
    p = schema.load_params(Path(params_file))
    recipe = None if recipe_file == "-" else schema.read_recipe(Path(recipe_file))[0]
    p, row_tokens = (p, recipe.row_tokens) if recipe else data_size.apply_data(p)
    print(json.dumps(asdict(estimate_run(p, recipe.train_rows if recipe else None, row_tokens, gpu))))


def estimate_run(p: schema.Params, train_rows: int | None, row_tokens: int, gpu: str = "h200") -> RunEstimate:
    """Return the estimate; `train_rows` count where params.yaml takes all. Raises ValueError for a target of unknown shape."""
    target = read_target_size(p)
    draft = init_draft.infer_config(p, target.manifest)
    sets = 2 if p.sample_target.eval_temperature else 1
    length = min(row_tokens, p.extract_hiddens.max_length)
    rows = RowCounts(p.sample_target.train_rows or train_rows or 0, sets * _get_eval_rows(p), length)
    result = RunEstimate()
    _add_sizes(result, p, target, draft)
    if not rows.train and p.train_draft.checkpoints:
        advice = (
            "sample_target.train_rows is null, and the data is not here, of the Hub, or refused: aerie preview data"
        )
        result.add_line("training rows", "not counted", advice)
    _add_disk(result, p, rows, target, draft)
    if p.target.device == "cpu":
        result.add_line("GPU", "none", "target.device is cpu; times are those of stages that ran here with this target")
        _add_logged_times(result, p, rows)
    else:
        hours = _Hours(result, p, rows, target, draft, GPUS[gpu])
        if p.sample_target.backend != "keep":
            hours.add_sampling()
        hours.add_extraction()
        hours.add_training()
        hours.add_torch_cells()
        hours.add_served_cells()
        scaled = f", scaled to an {gpu.upper()} by datasheet" if gpu != "h200" else ""
        result.add_line("together", f"{result.gpu_hours:.2g} GPU-hours", f"arithmetic from rates of an H200{scaled}")
    result.add_line("together", format_bytes(result.disk_bytes), "in this folder")
    return result


# Sizes and disk


def count_draft_parameters(draft: DraftConfig) -> dict[str, int]:
    """Return the parameters of an EAGLE-3 draft's fc, layer and head."""
    sizes = {name: math.prod(shape) for name, shape in eagle3_checkpoint.list_tensor_shapes(draft).items()}
    fc, head = sizes["fc.weight"], sizes["lm_head.weight"]
    return {"fc": fc, "head": head, "layer": sum(sizes.values()) - fc - head - sizes["d2t"] - sizes["t2d"]}


def count_segment_parameters(p: schema.Params, name: str, manifest: TargetManifest, draft: DraftConfig) -> int:
    """Return the parameters of a segment's draft; those of families without a count of their own count as EAGLE-3's."""
    if config := build_block_config(p, name, manifest, draft):
        return sum(math.prod(shape) for shape in list_block_tensor_shapes(config).values())
    return sum(count_draft_parameters(draft).values())


def build_block_config(
    p: schema.Params, name: str, manifest: TargetManifest, draft: DraftConfig
) -> BlockDraftConfig | None:
    """Return the shape of a segment's block draft, None for other families; the mask token changes no size and is 0."""
    segment = p.train_draft.checkpoints[name]
    if not isinstance(segment, BlockSegment):
        return None
    return block_training_start.choose_sizes(segment, draft, manifest, mask_token_id=0)


def _add_sizes(result: RunEstimate, p: schema.Params, target: TargetSize, draft: DraftConfig) -> None:
    manifest = target.manifest
    experts = f", {format_count(target.active)} of them active" if target.mixture else ""
    result.weight_bytes = target.parameters * get_itemsize(p.target.dtype)
    size = f"{format_count(target.parameters)} parameters{experts}, {format_bytes(result.weight_bytes)}"
    result.add_line("target", f"{manifest.model}, {size}", target.recorded_from)
    heads = f"{manifest.num_layers} layers * {manifest.num_key_value_heads} heads * {manifest.head_dim}"
    kv = f"2 * {heads} * {get_itemsize(p.target.dtype)} bytes"
    result.add_line("KV cache", f"{target.kv_bytes(p.target.dtype):,} bytes a token", kv)
    total = sum(count_draft_parameters(draft).values())
    shape = f"{manifest.hidden_size} wide, {draft.intermediate_size} within, vocabulary {draft.draft_vocab_size}"
    result.add_line("draft", f"{format_count(total)} parameters", f"inferred: {shape}, {draft.rope['rope_type']} RoPE")
    itemsize = get_itemsize(p.train_draft.dtype)
    for name in p.train_draft.list_fresh_drafts():
        total = count_segment_parameters(p, name, manifest, draft)
        # Weights, gradient and both moments are float32; below it there are weights and a gradient in the dtype too.
        held = total * (16 if itemsize == 4 else 16 + 2 * itemsize)
        held += 2 * manifest.vocab_size * manifest.hidden_size * itemsize
        memory = f"training holds {format_bytes(held)} with the target's embedding and head, and activations"
        result.add_line(f"draft of {name}", f"{format_count(total)} parameters", memory)


def _add_disk(result: RunEstimate, p: schema.Params, rows: RowCounts, target: TargetSize, draft: DraftConfig) -> None:
    manifest, total = target.manifest, sum(count_draft_parameters(draft).values())
    token, tokens = _count_token_bytes(p, manifest), rows.count_stored_tokens(p)
    layers = f"{len(manifest.feature_layers)} feature layers and the last in {p.extract_hiddens.dtype}"
    derivation = f"{tokens:,} tokens * {token:,.1f} bytes: {layers}"
    result.add_disk("extract_hiddens", "hidden states", tokens * token, derivation)
    if p.init_draft.checkpoints:
        result.add_disk("init_draft", "checkpoint e000", 4 * total, f"{format_count(total)} * 4 bytes")
    if segments := p.train_draft.checkpoints:
        # A segment keeps its draft, float32 weights and two moments; while it runs, another set.
        sizes = [count_segment_parameters(p, name, manifest, draft) for name in segments]
        each = get_itemsize(p.train_draft.dtype) + 12
        kept = sum(sizes) + max(sizes)
        result.add_disk("train_draft", "checkpoints", kept * each, f"{format_count(kept)} parameters * {each} bytes")
    if imported := p.import_draft.checkpoints:
        size = 2 * total * len(imported)
        result.add_disk("import_draft", "imported drafts", size, f"{len(imported)} * {format_count(total)} * 2 bytes")
        result.download_bytes += 2 * total * sum(not Path(draft.model).is_dir() for draft in imported.values())
    if manifest.model.startswith("builtin/"):
        size = 4 * target.parameters
        result.add_disk("prepare_target", "target", size, f"{format_count(target.parameters)} * 4 bytes")
    elif not Path(manifest.model).exists():
        result.download_bytes += 2 * target.parameters
    if result.download_bytes:
        download = format_bytes(result.download_bytes)
        result.add_line("to download, unless it is there", download, "target and imported drafts, 2 bytes each")


def _count_token_bytes(p: schema.Params, manifest: TargetManifest) -> float:
    """Return the bytes of one token's hidden states. For a multimodal target every token counts as an image token."""
    names = {"fp8": format.FP8} | {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
    dtype, is_multimodal = names[p.extract_hiddens.dtype], manifest.image_token_id is not None
    visual = format.count_visual_bytes(manifest.hidden_size, dtype) if is_multimodal else 0
    return format.count_token_bytes(len(manifest.feature_layers), manifest.hidden_size, dtype, is_multimodal) + visual


def _get_eval_rows(p: schema.Params) -> int:
    """Return the most rows that one eval set can have."""
    return p.sample_target.eval_rows or p.fix_data.eval_rows or 0


def _add_logged_times(result: RunEstimate, p: schema.Params, rows: RowCounts) -> None:
    """Add the time of each stage of tokens that has run here with this target, by this machine's log."""
    if not data_size.is_of_target_here(p):
        return
    seconds = {run.stage: run.seconds for run in stage_log.read_log()}  # of the last run of each
    sampled, hiddens = (StageCounts.read(f"results/{name}_report.json") for name in ("sample", "hiddens"))
    answers = (rows.train + rows.evaluated) * min(rows.length, p.sample_target.max_new_tokens)
    work = {
        "sample_target": (answers, sampled.count_tokens()),
        "extract_hiddens": (rows.count_stored_tokens(p), hiddens.count_tokens()),
    }
    for name, segment in p.train_draft.checkpoints.items():
        epochs = StageCounts.read(f"results/train/{name}.json").epochs
        done = sum(epoch.tokens for epoch in epochs[-segment.epochs :])
        work[f"train_draft@{name}"] = segment.epochs * rows.train * rows.length, done
    for stage, (tokens, done) in work.items():
        if done and seconds.get(stage):
            rate = done / seconds[stage]
            estimate = result.stages.setdefault(stage.partition("@")[0], StageEstimate())
            estimate.seconds = (estimate.seconds or 0) + tokens / rate
            result.add_line(
                stage, f"{tokens / rate:,.0f} s", f"{tokens:,} tokens at {rate:,.0f} tokens/s of its last run here"
            )


# Hours


def compute_target_flop(target: TargetSize, length: int) -> float:
    """Return the FLOP of one token's forward pass through the blocks, in rows of `length`, half of which it attends to."""
    manifest = target.manifest
    return 2 * target.blocks + 2 * length * manifest.num_attention_heads * manifest.head_dim * manifest.num_layers


def compute_train_flop(manifest: TargetManifest, draft: DraftConfig, steps: int) -> float:
    """Return the FLOP of training EAGLE-3 on one token.

    Counted are forward and backward of layer and head in each of `steps`, fc without its input's gradient, and the target's
    head. Attention is left out: 16.1 GFLOP for Qwen3-8B, measured with attention as 16.46.
    """
    parts = count_draft_parameters(draft)
    head = 2 * manifest.vocab_size * manifest.hidden_size
    return steps * (6 * parts["layer"] + 4 * parts["head"]) + 4 * parts["fc"] + head


def estimate_step(
    in_process: bool, p: schema.Params, target: TargetSize, bandwidth: float, at_once: int, context: int
) -> float:
    """Return the seconds of a plain step, in process or on a server: the weights that `at_once` tokens meet, and their contexts.

    `bandwidth` is the share of an H200's.
    """
    m = target.manifest
    weights = min(target.all_blocks, target.blocks * at_once) + m.vocab_size * m.hidden_size
    read = weights * get_itemsize(p.target.dtype) + at_once * context * target.kv_bytes(p.target.dtype)
    own = TORCH_LAYER_S[target.mixture] * m.num_layers if in_process else SERVER_STEP_S
    compute = at_once * 2 * target.blocks / (EXTRACTING_SHARES[False] * PEAK_FLOPS)
    return max(read / (STEP_BYTES_S[in_process] * bandwidth), compute, own)


@dataclass(frozen=True)
class _Hours:
    result: RunEstimate
    p: schema.Params
    rows: RowCounts
    target: TargetSize
    draft: DraftConfig
    bandwidth: float

    def add_sampling(self) -> None:
        p, count = self.p, self.rows.train + self.rows.evaluated
        tokens = min(self.rows.length, p.sample_target.max_new_tokens)
        gpus, at_once = 1, p.sample_target.batch_size or 512
        if not p.sample_target.is_in_process:
            gpus = count_sampling_gpus(p)
            at_once = max(1, p.sample_target.server.concurrency // gpus)  # of one GPU
        step = estimate_step(False, p, self.target, self.bandwidth, at_once, tokens)
        batches = -(-count // (at_once * gpus))
        derivation = f"{batches:,} times {at_once} at once * {tokens:,} tokens * {1e3 * step:.1f} ms"
        self.result.add_hours("sample_target", batches * tokens * step * gpus, derivation, gpus)

    def add_extraction(self) -> None:
        gpus, tokens = self.p.extract_hiddens.processes, self.rows.count_stored_tokens(self.p)
        share = EXTRACTING_SHARES[self.p.extract_hiddens.compile]
        flop = compute_target_flop(self.target, self.rows.length)
        seconds = self._divide(tokens * flop / (share * PEAK_FLOPS), gpus)
        derivation = f"{tokens:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s"
        written = tokens * _count_token_bytes(self.p, self.target.manifest)
        if written / DISK_BYTES_S > seconds / gpus:
            seconds = written / DISK_BYTES_S * gpus
            derivation = f"{written / 1e9:,.0f} GB at {DISK_BYTES_S / 1e9} GB/s of the disk, the GPUs wait"
        self.result.add_hours("extract_hiddens", seconds, derivation, gpus)

    def add_training(self) -> None:
        """Add the hours of each segment; families without a rate of their own count as EAGLE-3's."""
        p, manifest, tokens = self.p, self.target.manifest, self.rows.train * self.rows.length
        online = compute_target_flop(self.target, self.rows.length) if p.extract_hiddens.online else 0.0
        for name, segment in p.train_draft.checkpoints.items() if tokens else ():
            config = build_block_config(p, name, manifest, self.draft)
            if config and isinstance(segment, BlockSegment):
                # On one token: full packs, all positions supervised, whole blocks.
                blocks = min(segment.anchors / (p.train_draft.batch_tokens or MOST_BATCH_TOKENS), 1)
                seen = self.rows.length / 2 + segment.block_size  # keys of a row, on average
                work = BlockWork(1, blocks, blocks * segment.num_drafts, blocks * segment.block_size * seen)
                flop = BlockFlop.of_config(config, reads_target=bool(segment.family.loss.l1)).count(work)
            else:
                flop = compute_train_flop(manifest, self.draft, p.train_draft.ttt_steps)
            share = TRAINING_SHARES.get(segment.method, TRAINING_SHARES[ROOT_FAMILY.name])
            second = flop / share + online / EXTRACTING_SHARES[p.extract_hiddens.compile]
            seconds = self._divide(segment.epochs * tokens * second / PEAK_FLOPS, p.train_draft.processes)
            of_target = f" and the target's {online / 1e9:.2f} GFLOP" if online else ""
            derivation = (
                f"{segment.epochs} epochs * {tokens:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%}{of_target}"
            )
            if not online:
                read = segment.epochs * tokens * _count_token_bytes(p, manifest)
                read /= max(seconds / p.train_draft.processes, 1)
                derivation += f"; the disk must give {read / 1e9:.1f} GB/s, unless memory holds the hidden states"
            self.result.add_hours(f"train_draft, {name}", seconds, derivation, p.train_draft.processes)

    def _divide(self, gpu_seconds: float, gpus: int) -> float:
        return gpu_seconds / (GPUS_SHARE if gpus > 1 else 1.0)

    def add_torch_cells(self) -> None:
        b = self.p.benchmark
        cells, ways = len(b.checkpoints) * len(b.trees), 2 if b.mode == "both" else 1
        for name in b.torch_workloads:
            workload = b.workloads[name]
            seconds = workload.repeats * sum(self._list_load_seconds(True, workload))
            derivation = f"{cells} cells * {ways} ways * {seconds:.0f} s of plain decoding"
            gpu_seconds = cells * ways * seconds * b.num_gpus_per_model
            # Prompts are divided over the copies of the target; the sum of GPU-seconds stays.
            self.result.add_hours(f"benchmark, {name}", gpu_seconds, derivation, b.num_gpus_total)

    def add_served_cells(self) -> None:
        served, timed = self.p.benchmark_served, self.p.serving_costs
        cells = len(served.checkpoints) * len(served.trees) * (2 if served.interleave else 1)
        stages = [("benchmark_served", name, cells) for name in served.workloads]
        stages += [("benchmark_served_baseline", name, 1) for name in served.workloads]
        stages += [("serving_costs", name, 1 + len(timed.trees)) for name in timed.workloads]
        for engine, (stage, name, servers) in product(served.engines, stages):
            workload, tp = self.p.benchmark.workloads[name], served.servers[engine].tp
            load = workload.repeats * sum(self._list_load_seconds(False, workload))
            derivation = f"{servers} servers * ({SERVER_START_S} s + {load:.0f} s of plain decoding)"
            self.result.add_hours(f"{stage}, {engine}, {name}", servers * (SERVER_START_S + load) * tp, derivation, tp)

    def _list_load_seconds(self, in_process: bool, workload: Workload) -> Iterator[float]:
        """Yield the seconds of each load of a workload: plain decoding, or the time its arrivals take."""
        for tokens, cap in workload.list_loads():
            prompts = workload.limit_prompts(cap) or _get_eval_rows(self.p)
            prompts *= 2 if workload.turns == "all" else 1  # as the questions of MT-bench have
            prompts += min(workload.warmup, prompts)
            at_once = min(prompts, cap or prompts)
            context = (workload.input_tokens or 0) + tokens
            step = estimate_step(in_process, self.p, self.target, self.bandwidth, at_once, context)
            arriving = 0 if workload.request_rate == "inf" else prompts / workload.requests_per_second
            yield max(prompts / at_once * tokens * step, arriving)


def count_sampling_gpus(p: schema.Params) -> int:
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


if __name__ == "__main__":
    run_stage(main)
