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
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

import torch

from stages import init_draft
from stages.draft import checkpoint
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.families.block import training as block_training_start
from stages.families.block.model import BlockDraft, BlockDraftConfig
from stages.families.peagle.model import PEagleConfig, PEagleDraft
from stages.hidden_states import format
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.draft_sections import MOST_BATCH_TOKENS
from stages.params.engines import expand_urls
from stages.params.families import ROOT_FAMILY, BlockSegment, PEagleSegment
from stages.params.units import format_bytes
from stages.reproduce import data_size
from stages.reproduce.block_flop import BlockCounts, count_block_flop
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
USED_SHARES = {False: 1.0, True: 0.96}  # of the time of one GPU, and of several
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

    def add_seconds(self, stage: str, seconds: float) -> StageEstimate:
        found = self.stages.setdefault(stage, StageEstimate())
        found.seconds = (found.seconds or 0) + seconds
        return found

    def add_hours(self, label: str, gpu_seconds: float, derivation: str, gpus: int = 1) -> None:
        """Add GPU-seconds of a stage, or of a stage and a workload: `benchmark, eval`. Its `gpus` work at once."""
        stage = self.add_seconds(label.partition(",")[0], gpu_seconds / gpus)
        stage.gpu_hours = (stage.gpu_hours or 0) + gpu_seconds / 3600
        self.gpu_hours += gpu_seconds / 3600
        on = f", on {gpus} GPUs" if gpus > 1 else ""
        self.add_line(label, f"{gpu_seconds / 3600:.2g} GPU-hours", derivation + on)


def main(recipe_file: str, params_file: str, gpu: str = "h200") -> None:
    p = schema.load_params(Path(params_file))
    recipe = None if recipe_file == "-" else schema.read_recipe(Path(recipe_file))[0]
    p, row_tokens = (p, recipe.row_tokens) if recipe else data_size.apply_data(p)
    print(json.dumps(asdict(estimate_run(p, recipe.train_rows if recipe else None, row_tokens, gpu))))


def estimate_run(p: schema.Params, train_rows: int | None, row_tokens: int, gpu: str = "h200") -> RunEstimate:
    """Return the estimate; `train_rows` count where params.yaml takes all. Raises ValueError for a target of unknown shape."""
    target = read_target_size(p)
    sets = 2 if p.sample_target.eval_temperature else 1
    rows = p.sample_target.train_rows or train_rows or 0
    evaluated, length = sets * _get_eval_rows(p), min(row_tokens, p.extract_hiddens.max_length)
    run = _Run(p, target, init_draft.infer_config(p, target.manifest), GPUS[gpu], rows, evaluated, length)
    result = run.result
    run.add_sizes()
    if not rows and p.train_draft.checkpoints:
        advice = (
            "sample_target.train_rows is null, and the data is not here, of the Hub, or refused: aerie preview data"
        )
        result.add_line("training rows", "not counted", advice)
    run.add_disk()
    if p.target.device == "cpu":
        result.add_line("GPU", "none", "target.device is cpu; times are those of stages that ran here with this target")
        run.add_logged_times()
    else:
        run.add_sampling()
        run.add_extraction()
        run.add_training()
        run.add_torch_cells()
        run.add_served_cells()
        scaled = f", scaled to an {gpu.upper()} by datasheet" if gpu != "h200" else ""
        hours = f"{result.gpu_hours:.2g} GPU-hours"
        result.add_line("together", hours, f"arithmetic from rates of an H200{scaled}")
    result.add_line("together", format_bytes(result.disk_bytes), "in this folder")
    return result


def count_draft_parameters(draft: DraftConfig) -> dict[str, int]:
    """Return the parameters of an EAGLE-3 or P-EAGLE draft's fc, layers and head."""
    shapes = checkpoint.list_shapes(
        lambda: PEagleDraft(draft) if isinstance(draft, PEagleConfig) else Eagle3Draft(draft)
    )
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    fc, head = sizes["fc.weight"], sizes["lm_head.weight"]
    return {"fc": fc, "head": head, "layer": sum(sizes.values()) - fc - head - sizes["d2t"] - sizes["t2d"]}


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


def _get_eval_rows(p: schema.Params) -> int:
    """Return the most rows that one eval set can have."""
    return p.sample_target.eval_rows or p.fix_data.eval_rows or 0


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


@dataclass(frozen=True)
class _Run:
    """The run to estimate, and what was estimated."""

    p: schema.Params
    target: TargetSize
    draft: DraftConfig
    bandwidth: float  # of the GPU, as a share of an H200's
    train_rows: int
    eval_rows: int  # of all eval sets, at most
    length: int  # tokens of a row
    result: RunEstimate = field(default_factory=RunEstimate)

    @cached_property
    def stored_tokens(self) -> int:
        return ((0 if self.p.extract_hiddens.online else self.train_rows) + self.eval_rows) * self.length

    @cached_property
    def token_bytes(self) -> float:
        """Return the bytes of one token's hidden states. For a multimodal target every token counts as an image token."""
        m, name = self.target.manifest, self.p.extract_hiddens.dtype
        dtype, is_multimodal = format.FP8 if name == "fp8" else getattr(torch, name), m.image_token_id is not None
        visual = format.count_visual_bytes(m.hidden_size, dtype) if is_multimodal else 0
        return format.count_token_bytes(len(m.feature_layers), m.hidden_size, dtype, is_multimodal) + visual

    @cached_property
    def eagle3_parameters(self) -> int:
        return sum(count_draft_parameters(self.draft).values())

    def build_block_config(self, name: str) -> BlockDraftConfig | None:
        """Return the shape of a segment's block draft, None for other families; the mask token changes no size and is 0."""
        segment = self.p.train_draft.checkpoints[name]
        if not isinstance(segment, BlockSegment):
            return None
        return block_training_start.choose_sizes(segment, self.draft, self.target.manifest, mask_token_id=0)

    def build_eagle_config(self, name: str) -> DraftConfig:
        """Return the shape of a segment's draft of another family; those without a count of their own count as EAGLE-3's."""
        segment = self.p.train_draft.checkpoints[name]
        if not isinstance(segment, PEagleSegment):
            return self.draft
        return PEagleConfig(**vars(self.draft), num_hidden_layers=segment.layers)

    def count_parameters(self, name: str) -> int:
        if config := self.build_block_config(name):
            return sum(math.prod(shape) for shape in checkpoint.list_shapes(lambda: BlockDraft(config)).values())
        return sum(count_draft_parameters(self.build_eagle_config(name)).values())

    # Sizes and disk

    def add_sizes(self) -> None:
        p, m, result = self.p, self.target.manifest, self.result
        active = f", {format_count(self.target.active)} of them active" if self.target.mixture else ""
        itemsize, parameters = get_itemsize(p.target.dtype), self.target.parameters
        result.weight_bytes = parameters * itemsize
        size = f"{format_count(parameters)} parameters{active}, {format_bytes(result.weight_bytes)}"
        result.add_line("target", f"{m.model}, {size}", self.target.recorded_from)
        kv = f"2 * {m.num_layers} layers * {m.num_key_value_heads} heads * {m.head_dim} * {itemsize} bytes"
        result.add_line("KV cache", f"{self.target.kv_bytes(p.target.dtype):,} bytes a token", kv)
        shape = f"{m.hidden_size} wide, {self.draft.intermediate_size} within, vocabulary {self.draft.draft_vocab_size}"
        shape = f"inferred: {shape}, {self.draft.rope['rope_type']} RoPE"
        result.add_line("draft", f"{format_count(self.eagle3_parameters)} parameters", shape)
        itemsize = get_itemsize(p.train_draft.compute_dtype)
        for name in p.train_draft.list_fresh_drafts():
            total = self.count_parameters(name)
            # Weights, gradient and both moments are float32; below it there are weights and a gradient in the dtype too.
            held = total * (16 if itemsize == 4 else 16 + 2 * itemsize) + 2 * m.vocab_size * m.hidden_size * itemsize
            memory = f"training holds {format_bytes(held)} with the target's embedding and head, and activations"
            result.add_line(f"draft of {name}", f"{format_count(total)} parameters", memory)

    def add_disk(self) -> None:
        p, m, result, total = self.p, self.target.manifest, self.result, self.eagle3_parameters
        layers = f"{len(m.feature_layers)} feature layers and the last in {p.extract_hiddens.dtype}"
        derivation = f"{self.stored_tokens:,} tokens * {self.token_bytes:,.1f} bytes: {layers}"
        result.add_disk("extract_hiddens", "hidden states", self.stored_tokens * self.token_bytes, derivation)
        if p.init_draft.checkpoints:
            result.add_disk("init_draft", "checkpoint e000", 4 * total, f"{format_count(total)} * 4 bytes")
        if segments := p.train_draft.checkpoints:
            # A segment keeps its draft, float32 weights and two moments; while it runs, another set.
            sizes, each = list(map(self.count_parameters, segments)), get_itemsize(p.train_draft.compute_dtype) + 12
            kept = sum(sizes) + max(sizes)
            derivation = f"{format_count(kept)} parameters * {each} bytes"
            result.add_disk("train_draft", "checkpoints", kept * each, derivation)
        if imported := [draft for draft in p.import_draft.checkpoints.values() if not draft.builtin]:
            derivation = f"{len(imported)} * {format_count(total)} * 2 bytes"
            result.add_disk("import_draft", "imported drafts", 2 * total * len(imported), derivation)
            result.download_bytes += 2 * total * sum(not Path(draft.model).is_dir() for draft in imported)
        parameters = self.target.parameters
        if p.target.is_embedded:
            result.add_disk("prepare_target", "target", 4 * parameters, f"{format_count(parameters)} * 4 bytes")
        elif not Path(m.model).exists():
            result.download_bytes += 2 * parameters
        if result.download_bytes:
            download = format_bytes(result.download_bytes)
            result.add_line("to download, unless it is there", download, "target and imported drafts, 2 bytes each")

    # Times

    def add_logged_times(self) -> None:
        """Add the time of each stage of tokens that has run here with this target, by this machine's log."""
        p = self.p
        if not data_size.is_of_target_here(p):
            return
        seconds = {run.stage: run.seconds for run in stage_log.read_log()}  # of the last run of each
        sampled, hiddens = (StageCounts.read(f"results/{name}_report.json") for name in ("sample", "hiddens"))
        answers = (self.train_rows + self.eval_rows) * min(self.length, p.sample_target.max_new_tokens)
        work = {
            "sample_target": (answers, sampled.count_tokens()),
            "extract_hiddens": (self.stored_tokens, hiddens.count_tokens()),
        }
        for name, segment in p.train_draft.checkpoints.items():
            epochs = segment.count_epochs(self.train_rows or 1)
            trained = StageCounts.read(f"results/train/{name}.json").epochs[-epochs:]
            tokens = epochs * self.train_rows * self.length
            work[f"train_draft@{name}"] = tokens, sum(epoch.tokens for epoch in trained)
        for stage, (tokens, done) in work.items():
            if done and seconds.get(stage):
                rate = done / seconds[stage]
                self.result.add_seconds(stage.partition("@")[0], tokens / rate)
                derivation = f"{tokens:,} tokens at {rate:,.0f} tokens/s of its last run here"
                self.result.add_line(stage, f"{tokens / rate:,.0f} s", derivation)

    def add_sampling(self) -> None:
        sampling = self.p.sample_target
        if sampling.backend == "keep":
            return
        tokens = min(self.length, sampling.max_new_tokens)
        gpus, at_once = 1, sampling.batch_size or 512
        if not sampling.is_in_process:
            gpus = _count_sampling_gpus(self.p)
            at_once = max(1, sampling.server.concurrency // gpus)  # of one GPU
        step = estimate_step(False, self.p, self.target, self.bandwidth, at_once, tokens)
        batches = -(-(self.train_rows + self.eval_rows) // (at_once * gpus))
        derivation = f"{batches:,} times {at_once} at once * {tokens:,} tokens * {1e3 * step:.1f} ms"
        self.result.add_hours("sample_target", batches * tokens * step * gpus, derivation, gpus)

    def add_extraction(self) -> None:
        gpus, tokens = self.p.extract_hiddens.processes, self.stored_tokens
        share = EXTRACTING_SHARES[self.p.extract_hiddens.compile]
        flop = compute_target_flop(self.target, self.length)
        seconds = tokens * flop / (share * PEAK_FLOPS) / USED_SHARES[gpus > 1]
        derivation = f"{tokens:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s"
        written = tokens * self.token_bytes
        if written / DISK_BYTES_S > seconds / gpus:
            seconds = written / DISK_BYTES_S * gpus
            derivation = f"{written / 1e9:,.0f} GB at {DISK_BYTES_S / 1e9} GB/s of the disk, the GPUs wait"
        self.result.add_hours("extract_hiddens", seconds, derivation, gpus)

    def add_training(self) -> None:
        """Add the hours of each segment; families without a rate of their own count as EAGLE-3's."""
        training, gpus, tokens = self.p.train_draft, self.p.train_draft.processes, self.train_rows * self.length
        online = compute_target_flop(self.target, self.length) if self.p.extract_hiddens.online else 0.0
        for name, segment in training.checkpoints.items() if tokens else ():
            config, epochs = self.build_block_config(name), segment.count_epochs(self.train_rows)
            if config and isinstance(segment, BlockSegment):
                # On one token: full packs, all positions supervised, whole blocks.
                blocks = min(segment.anchors / (training.batch_tokens or MOST_BATCH_TOKENS), 1)
                seen = self.length / 2 + segment.block_size  # keys of a row, on average
                work = BlockCounts(1, blocks, blocks * segment.num_drafts, blocks * segment.block_size * seen)
                flop = count_block_flop(config, reads_target=bool(segment.family.loss.l1)).dot(work)
            else:
                flop = compute_train_flop(self.target.manifest, self.build_eagle_config(name), training.ttt_steps)
            share = TRAINING_SHARES.get(segment.method, TRAINING_SHARES[ROOT_FAMILY.name])
            second = flop / share + online / EXTRACTING_SHARES[self.p.extract_hiddens.compile]
            seconds = epochs * tokens * second / PEAK_FLOPS / USED_SHARES[gpus > 1]
            derivation = f"{epochs} epochs * {tokens:,} tokens * {flop / 1e9:.2f} GFLOP at {share:.1%}"
            if online:
                derivation += f" and the target's {online / 1e9:.2f} GFLOP"
            else:
                read = epochs * tokens * self.token_bytes / max(seconds / gpus, 1)
                derivation += f"; the disk must give {read / 1e9:.1f} GB/s, unless memory holds the hidden states"
            self.result.add_hours(f"train_draft, {name}", seconds, derivation, gpus)

    def add_torch_cells(self) -> None:
        b = self.p.benchmark
        cells, ways = len(b.checkpoints) * len(b.trees), 2 if b.mode == "both" else 1
        for name in b.torch_workloads:
            seconds = self.estimate_loads(True, b.workloads[name])
            derivation = f"{cells} cells * {ways} ways * {seconds:.0f} s of plain decoding"
            gpu_seconds = cells * ways * seconds * b.num_gpus_per_model
            # Prompts are divided over the copies of the target; the sum of GPU-seconds stays.
            self.result.add_hours(f"benchmark, {name}", gpu_seconds, derivation, b.num_gpus_total)

    def add_served_cells(self) -> None:
        served, timed = self.p.benchmark_served, self.p.time_cycles
        cells = len(served.checkpoints) * len(served.trees) * (2 if served.interleave else 1)
        grids = (1 + len(timed.trees)) * len(timed.checkpoints)
        stages = [("time_cycles", grids, engine, timed.workload) for engine in timed.served_engines]
        for kind, count in (("benchmark_served", cells), ("benchmark_served_baseline", 1)):
            stages += [(kind, count, *pair) for pair in product(served.engines, served.workloads)]
        for stage, servers, engine, name in stages:
            tp, load = served.get_server(engine).tp, self.estimate_loads(False, self.p.benchmark.workloads[name])
            derivation = f"{servers} servers * ({SERVER_START_S} s + {load:.0f} s of plain decoding)"
            self.result.add_hours(f"{stage}, {engine}, {name}", servers * (SERVER_START_S + load) * tp, derivation, tp)

    def estimate_loads(self, in_process: bool, workload: Workload) -> float:
        """Return the seconds of all loads of a workload and their repeats: plain decoding, or the time its arrivals take."""
        total = 0.0
        for tokens, cap in workload.list_loads():
            prompts = workload.limit_prompts(cap) or _get_eval_rows(self.p)
            prompts *= 2 if workload.turns == "all" else 1  # as the questions of MT-bench have
            prompts += min(workload.warmup, prompts)
            at_once, context = min(prompts, cap or prompts), (workload.input_tokens or 0) + tokens
            step = estimate_step(in_process, self.p, self.target, self.bandwidth, at_once, context)
            arriving = 0 if workload.request_rate == "inf" else prompts / workload.requests_per_second
            total += max(prompts / at_once * tokens * step, arriving)
        return workload.repeats * total


if __name__ == "__main__":
    run_stage(main)
