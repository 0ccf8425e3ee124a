"""The context shared by the decodings of a torch cell: engine, prompts, images, tokenizer and sampling."""

from dataclasses import dataclass
from typing import Any

import polars as pl
import torch

from stages.engine import memory_estimate, sampling
from stages.engine.decode import Engine
from stages.engine.device_placement import place_model
from stages.engine.memory_estimate import MemoryEstimate
from stages.engine.sampling import SamplingParams
from stages.families import family
from stages.families.draft_decoding import build_engine
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.families import SHAPES
from stages.params.tree_shape import TreeShape
from stages.prompts.workload_prompts import WorkloadPrompt
from stages.runtime import distributed
from stages.target import chat_template, head_check, loading, manifest, vision
from stages.target.vision import ImagePatches


@dataclass(frozen=True)
class TorchCellContext:
    """The data that every decoding of a cell needs."""

    params: schema.Params
    workload: Workload
    tree: TreeShape
    ranks: distributed.RankContext
    engine: Engine
    images: dict[str, ImagePatches | None]  # by prompt id
    tokenizer: Any  # None if no text is needed
    prompts: pl.DataFrame  # workload_prompts.PROMPTS_SCHEMA
    warmup_prompts: pl.DataFrame
    in_turns: bool  # whether prompts are decoded one at a time, both ways in turns; else in loads

    @property
    def samples_drafts(self) -> bool:
        """Return whether drafts are sampled; at temperature 0 they are greedy in any case."""
        return self.params.benchmark.draft_sampling == "sampled" and self.workload.temperature > 0

    @property
    def longest_prompt(self) -> int:
        """Return the tokens of the longest prompt of a first turn."""
        return max(int(rows["prompt_ids"].list.len().max() or 0) for rows in (self.prompts, self.warmup_prompts))


def build_context(
    params: schema.Params,
    workload: Workload,
    checkpoint_name: str,
    tree: TreeShape,
    ranks: distributed.RankContext,
    prompts: pl.DataFrame,
    warmup: pl.DataFrame,
    in_turns: bool,
) -> TorchCellContext:
    """Load target, draft, images and tokenizer."""
    paths = dict(pl.concat([prompts, warmup]).select("id", "images").iter_rows())
    folder = manifest.resolve_weights_folder(manifest.read_manifest())
    # Images are decoded before any clock runs, since a server's client sends them decoded too.
    images = vision.load_image_patches(folder, params.target.trust_remote_code, paths)
    engine, tokenizer = _build_engine(params, workload, checkpoint_name, ranks), None
    if workload.grade or prompts["later"].is_not_null().any():
        template = manifest.read_manifest().chat_template
        tokenizer = chat_template.load_tokenizer(folder, params.target.trust_remote_code, template)
    return TorchCellContext(params, workload, tree, ranks, engine, images, tokenizer, prompts, warmup, in_turns)


def _build_engine(
    params: schema.Params, workload: Workload, checkpoint_name: str, ranks: distributed.RankContext
) -> Engine:
    target, settings = manifest.read_manifest(), params.benchmark
    first = torch.device(ranks.device).index or 0
    # The process's own GPU is the first.
    gpus = [f"cuda:{first + n * settings.processes}" for n in range(settings.num_gpus_per_model)]
    on_one_device = ranks.device == "cpu" or (len(gpus) == 1 and settings.max_gpu_memory is None)
    load_device = ranks.device if on_one_device else "cpu"
    folder = str(manifest.resolve_weights_folder(target))
    model = loading.load_target(folder, params.target.dtype, load_device, params.target.trust_remote_code)
    if not on_one_device:
        place_model(model, gpus, settings.max_gpu_memory)
    head_check.check_drawn_logits(model, workload.temperature, target.logits_scale)
    end_tokens = [] if workload.ignore_eos else target.eos_token_ids
    return build_engine(params, checkpoint_name, model, target, ranks.device, end_tokens)[0]


def explain_unsupported(
    params: schema.Params, workload_name: str, checkpoint_name: str, shape: TreeShape
) -> str | None:
    """Return why a cell can't be measured, by the config.json of its draft alone; None if it can."""
    if reason := family.explain_unsupported(checkpoint_name, shape):
        return reason
    if shape.letter in "snl" and not params.benchmark.is_decoded_one_by_one(workload_name):
        return f"{SHAPES[shape.letter]} are decoded one prompt at a time"
    return None


def estimate_memory(work: TorchCellContext) -> MemoryEstimate:
    """Estimate the memory of the largest load, or of the longest prompt alone. Raises ValueError if it can't be decoded."""
    loads, prompts, world = work.workload.list_loads(), len(work.prompts), work.ranks.world
    slots = max(-(-min(cap or prompts, prompts) // world) for _, cap in loads)  # of a process
    tokens = work.longest_prompt + max(length for length, _ in loads)
    samples = work.workload.temperature > 0
    return memory_estimate.estimate_memory(work.engine, tokens, slots, work.tree, samples, work.samples_drafts)


def make_sampling_params(work: TorchCellContext, prompt_id: str, repeat: int, turn: int) -> SamplingParams | None:
    """Return the sampling of one answer, seeded by the workload's seed and the answer's position; None at temperature 0."""
    workload = work.workload
    seed = f"{workload.seed}:{prompt_id}:{repeat}:{turn}"
    shape = workload.temperature, workload.top_p, workload.top_k
    return sampling.make_sampling_params(*shape, seed, work.samples_drafts)


def check_gpus(params: schema.Params) -> None:
    """Raises ValueError if fewer GPUs are visible than the stage is to use."""
    needed = params.benchmark.num_gpus_total
    if needed > 1 and params.target.device.startswith("cuda") and (found := torch.cuda.device_count()) < needed:
        raise ValueError(
            f"benchmark.num_gpus_total is {needed}, this stage sees {found} GPUs; lower it, or raise "
            "schedule.stages.benchmark.gpus (CUDA_VISIBLE_DEVICES, where you set it)"
        )


def measure_divergence_margin(
    work: TorchCellContext, turn: "QuestionTurn", output: list[int], plain_output: list[int]
) -> float | None:
    """Return the logit margin where two answers part, None if they do not: a near-tie is rounding, a wide one a defect."""
    if output == plain_output:
        return None
    shared = next(
        (i for i, (a, b) in enumerate(zip(output, plain_output, strict=False)) if a != b),
        min(len(output), len(plain_output)),
    )
    return work.engine.measure_margin(turn.ids, plain_output[:shared], work.images[turn.question.id])


@dataclass(frozen=True)
class QuestionTurn:
    """A turn, ready to decode."""

    question: WorkloadPrompt
    number: int  # from 0
    messages: list[dict[str, str]] | None  # of the prompt; None for random prompts
    ids: list[int]  # of the prompt


def get_first_turn(question: WorkloadPrompt) -> QuestionTurn:
    return QuestionTurn(question, 0, question.messages, question.prompt_ids)


def build_next_turn(work: TorchCellContext, turn: QuestionTurn, answer: list[int]) -> QuestionTurn | None:
    """Return the turn that follows the answer of `turn`, which is given as token ids; None after the last turn."""
    later = turn.question.later or []
    if turn.messages is None or turn.number >= len(later):
        return None
    answer_message = {"role": "assistant", "content": decode_text(work, answer)}
    messages = [*turn.messages, answer_message, {"role": "user", "content": later[turn.number]}]
    ids = chat_template.encode_prompt(work.tokenizer, messages, work.params.sample_target.thinking)
    return QuestionTurn(turn.question, turn.number + 1, messages, ids)


def decode_text(work: TorchCellContext, ids: list[int]) -> str:
    """Return an answer without the target's special tokens, as a server would send it."""
    text: str = work.tokenizer.decode(ids, skip_special_tokens=True)
    return text
