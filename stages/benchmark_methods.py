"""benchmark_methods: one row of the table of methods, on the torch engine.   python -m stages.benchmark_methods ROW

EAGLE-3, EAGLE-2, EAGLE, Medusa, lookahead and prompt lookup differ only in how they propose the tree of a cycle. The verify
pass, acceptance, the cache and the plain decoding that each is compared with are the torch engine's. The first turns of a
workload's prompts are decoded one at a time, and repeated as `benchmark` repeats them (`repeats`, `until`). Nothing is graded,
because every method's output equals plain decoding's. docs/methods.md
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl
import torch

from stages.data import workload_prompts
from stages.data.workload_prompts import WorkloadPrompt
from stages.draft import checkpoint, eagle3_checkpoint
from stages.draft.loading import load_eagle3_draft
from stages.engine import sampling
from stages.engine.cell_context import time_decode
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeStep
from stages.engine.proposer import DraftingMethod
from stages.engine.sampling import SamplingParams
from stages.methods import method_checkpoint, registry
from stages.methods.eagle_proposer import EagleMethod
from stages.methods.lookahead import LookaheadMethod
from stages.methods.medusa_proposer import MedusaMethod
from stages.methods.prompt_lookup import PromptLookupMethod
from stages.methods.static_tree import StaticTree, select_best_branches
from stages.params import schema, stage_inputs
from stages.params.benchmark_sections import Workload
from stages.params.methods_section import DynamicRow, LookaheadRow, MethodRow, NgramRow, StaticRow
from stages.params.section import get_named
from stages.params.tree_shape import TreeShape
from stages.results import method_records, metrics, stopping, torch_records
from stages.results.torch_records import MethodPromptRow
from stages.target import head_check, loading, manifest, vision
from stages.target.vision import ImagePatches
from stages.telemetry import gpu_energy
from stages.telemetry.run_stage import run_stage

DECODING_KINDS = ("plain", "speculative")


@dataclass(frozen=True)
class MethodRunContext:
    """A method and the prompts' images, ready to decode."""

    engine: Engine
    method: DraftingMethod
    images: dict[str, ImagePatches | None]  # by prompt id
    workload: Workload

    @property
    def max_new_tokens(self) -> int:
        assert isinstance(self.workload.max_new_tokens, int), "checked by params.Params"
        return self.workload.max_new_tokens

    def start_decoding(self, kind: str, prompt: WorkloadPrompt, repeat: int) -> Iterator[DecodeStep]:
        ids, limit, images = prompt.prompt_ids, self.max_new_tokens, self.images[prompt.id]
        sampling_params = _make_sampling_params(self.workload, prompt.id, repeat)
        if kind == "plain":
            return self.engine.decode_plain(ids, limit, images, sampling_params)
        return self.engine.decode_with_method(ids, limit, self.method, images, sampling_params)


def main(name: str) -> None:
    p = stage_inputs.read_params("benchmark_methods", name)
    torch.set_num_threads(p.benchmark.num_threads)
    meter, started = gpu_energy.EnergyMeter(p.target.gpus()), time.perf_counter()
    settings, workload = p.get_method_row(name), p.benchmark_methods.workload
    w = get_named(p.benchmark.workloads, workload, "benchmark.workloads")
    prompts, warm = workload_prompts.read_prompts(workload)
    work = _build_context(p, settings, w, pl.concat([prompts, warm]))
    prompt_lengths = pl.concat([prompts, warm])["prompt_ids"].list.len()
    work.engine.slots.reserve_length(int(prompt_lengths.max() or 0) + work.max_new_tokens)
    for prompt in workload_prompts.list_rows(warm):  # not counted: first calls allocate memory and select kernels
        for kind in DECODING_KINDS:
            list(work.start_decoding(kind, prompt, 0))
    answers, ended = stopping.decode_repeats(
        w, partial(_decode_repeat, work, workload_prompts.list_rows(prompts), p.target.device)
    )
    measured = metrics.compute_cell_metrics(
        [answer.row for answer in answers], work.method.num_steps, work.method.num_draft_tokens, w.prompts
    )
    method_records.write_method_cell(
        {
            **_describe_row(p, name, work.method),
            **_describe_answers(work, answers, measured),
            "stopping": ended.model_dump(),
            **_describe_models(p, work),
            "hardware": torch_records.describe_hardware(p.target.device, p.benchmark.num_threads),
            "versions": torch_records.list_versions("torch", "transformers"),
            "seconds": round(time.perf_counter() - started, 2),
            "seed": w.seed,
            "gpus": meter.names(),
            "joules": meter.joules(),
        }
    )
    print(
        f"{name}: tau {measured.tau:.3f}, speedup {measured.speedup:.2f} -> {method_records.locate_method_cell(name)}"
    )


# Methods


def _build_context(p: schema.Params, settings: MethodRow, w: Workload, prompts: pl.DataFrame) -> MethodRunContext:
    target = manifest.read_manifest()
    model = loading.load_target(
        str(manifest.resolve_weights_folder(target)), p.target.dtype, p.target.device, p.target.trust_remote_code
    )
    head_check.check_drawn_logits(model, w.temperature, target.logits_scale)
    draft, layers = None, list[int]()
    if settings.method == "eagle3":
        assert isinstance(settings, DynamicRow)
        draft, config = load_eagle3_draft(p, settings.checkpoint, p.target.device, model.dtype)
        layers = eagle3_checkpoint.read_feature_layers(config, target.num_layers)
    scoring, scale = p.benchmark.tree_scoring, target.logits_scale
    engine = Engine(model, target.eos_token_ids, layers, draft, scoring, scale)
    images = dict(prompts.select("id", "images").iter_rows())
    return MethodRunContext(
        engine,
        _build_method(p, settings, engine),
        vision.load_image_patches(manifest.resolve_weights_folder(target), p.target.trust_remote_code, images),
        w,
    )


def _build_method(p: schema.Params, settings: MethodRow, engine: Engine) -> DraftingMethod:
    """Return the row's method. Raises ValueError where its checkpoint is of another method or for another target."""
    if isinstance(settings, NgramRow):
        return PromptLookupMethod(settings.longest, settings.shortest, settings.length, engine.device)
    if isinstance(settings, LookaheadRow):
        return LookaheadMethod(settings.window, settings.level, settings.guesses, engine.device)
    tree = TreeShape.parse(settings.tree) if isinstance(settings, DynamicRow) else None
    if engine.draft is not None and tree is not None:
        return engine.get_tree_method(tree)
    name = settings.checkpoint
    method = "medusa" if settings.method == "medusa" else "eagle"
    config, tensors = method_checkpoint.read_method_draft(
        checkpoint.locate_checkpoint(name), method, p.get_making_stage(name)
    )
    module = (
        registry.build_draft(config, tensors, engine.lm_head, engine.logits_scale)
        .to(engine.device, engine.model.dtype)
        .requires_grad_(False)
    )
    if isinstance(settings, DynamicRow):
        assert tree is not None
        return EagleMethod(module, engine.embedding, tree, p.benchmark.tree_scoring)
    static = _build_static_tree(settings, config["rank_accuracy"], engine.device)
    if method == "eagle":
        return EagleMethod(module, engine.embedding, static, p.benchmark.tree_scoring)
    return MedusaMethod(module, static, *reversed(engine.embedding.shape))


def _build_static_tree(settings: StaticRow, accuracy: list[list[float]], device: torch.device) -> StaticTree:
    """Return the best tree by the checkpoint's rank accuracy. Raises ValueError where that was measured less deep."""
    if settings.depth > len(accuracy):
        raise ValueError(
            f"benchmark_methods: depth is {settings.depth}, but {settings.checkpoint} was measured {len(accuracy)} deep, "
            "expected no more (medusa: its heads; eagle: train_draft.ttt_steps); lower it"
        )
    return StaticTree.from_paths(select_best_branches(accuracy[: settings.depth], settings.nodes - 1), device)


# Measurement


@dataclass(frozen=True)
class MethodAnswer:
    """An answer, decoded both ways."""

    row: MethodPromptRow
    accepted: list[int]  # drafts in each verify cycle


def _make_sampling_params(w: Workload, name: str, repeat: int) -> SamplingParams | None:
    """Return the parameters that `benchmark` uses for the first turn of the same repeat."""
    return sampling.make_sampling_params(w.temperature, w.top_p, w.top_k, f"{w.seed}:{name}:{repeat}:0")


def _decode_repeat(
    work: MethodRunContext, prompts: list[WorkloadPrompt], device: str, repeat: int
) -> list[MethodAnswer]:
    """Decode every prompt once both ways; the kind of decoding that goes first alternates over prompts and repeats."""
    return [
        _decode_prompt(
            work, prompt, repeat, DECODING_KINDS if (index + repeat) % 2 == 0 else DECODING_KINDS[::-1], device
        )
        for index, prompt in enumerate(prompts)
    ]


def _decode_prompt(
    work: MethodRunContext, prompt: WorkloadPrompt, repeat: int, order: tuple[str, ...], device: str
) -> MethodAnswer:
    """Decode a prompt both ways, in `order`."""
    timed = {kind: time_decode(partial(work.start_decoding, kind, prompt, repeat), device) for kind in order}
    speculative, plain = timed["speculative"], timed["plain"]
    output, plain_output, cycles = speculative.tokens, plain.tokens, speculative.cycles
    row = MethodPromptRow(
        id=prompt.id,
        repeat=repeat,
        prompt_tokens=len(prompt.prompt_ids),
        output_tokens=len(output),
        cycles=len(cycles),
        accepted=sum(s.num_accepted for s in cycles),
        identical=output == plain_output,
        finish_reason="stop" if output[-1] in work.engine.end_tokens else "length",
        prefill_latency_s=speculative.prefill_s,
        e2e_latency_s=speculative.total_s,
        baseline_output_tokens=len(plain_output),
        baseline_prefill_latency_s=plain.prefill_s,
        baseline_e2e_latency_s=plain.total_s,
        process_s=speculative.process_s,
        baseline_process_s=plain.process_s,
    )
    return MethodAnswer(row, [step.num_accepted for step in cycles])


# Keys of the record, method_records.MethodCell


def _describe_row(p: schema.Params, name: str, method: DraftingMethod) -> dict[str, Any]:
    """Return what was measured: the row's settings, and where."""
    settings = p.get_method_row(name)
    return {
        "row": name,
        "method": settings.method,
        "checkpoint": getattr(settings, "checkpoint", None),
        "settings": settings.model_dump(exclude={"method", "checkpoint"}),
        "num_steps": method.num_steps,
        "workload": p.benchmark_methods.workload,
        "engine": "torch",
        "definitions": torch_records.DEFINITIONS,
    }


def _describe_answers(
    work: MethodRunContext, answers: list[MethodAnswer], measured: torch_records.CellMetrics
) -> dict[str, Any]:
    """Return how the answers were sampled, what they measure, and a row for each."""
    w, rows = work.workload, [answer.row for answer in answers]
    accepted = [answer.accepted for answer in answers]
    return {
        "temperature": w.temperature,
        "top_p": w.top_p,
        "top_k": w.top_k,
        "metrics": measured.model_dump(include=set(method_records.METHOD_METRICS)),
        "histogram": metrics.count_accepted_lengths(accepted, work.method.num_steps),
        "repeats": [speeds.model_dump() for speeds in metrics.summarise_repeats(rows, w.prompts)],
        "prompts": [row.model_dump() for row in rows],
    }


def _describe_models(p: schema.Params, work: MethodRunContext) -> dict[str, Any]:
    """Return the sizes of the method and of the target."""
    method, slots = work.method, work.engine.slots.idle[0]
    return {
        "memory": {
            "weights": method.weight_bytes,
            "state": slots.proposers[method].count_state_bytes(slots),
        },
        "parameters": method.num_parameters,
        "mixture": any(".experts." in key for key, _ in work.engine.model.named_parameters()),
        "model": p.target.model,
    }


if __name__ == "__main__":
    run_stage(main)
