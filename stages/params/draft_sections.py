"""The sections of stages that make drafts: init_draft, check_overfit, train_draft, import_draft."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.params.families import BUILTINS, AnySegment, DraftFamily, Segment
from stages.params.section import (
    BUILTIN,
    ROOT_CHECKPOINT,
    Count,
    Eagle3FeatureLayers,
    Name,
    NonNegative,
    Positive,
    RootCheckpoints,
    Section,
    Seed,
    Source,
    suggest_name,
)

USUAL_DRAFT_VOCAB = 32_000  # of published drafts
STEPS_PER_EPOCH = 1000  # of packs whose size follows from the rows: more and smaller steps train better, to a point
FEWEST_BATCH_TOKENS, MOST_BATCH_TOKENS = 512, 16384


class InitDraft(Section):
    checkpoints: RootCheckpoints  # []: nothing is trained, and the graph has neither init_draft nor check_overfit
    # the three of target.feature_layers that the draft reads; null: the stored ones where they are three, else
    # EAGLE-3's own
    feature_layers: Eagle3FeatureLayers | None = None
    # the most frequent tokens of the training answers; null: 32000, or all of a target with fewer
    draft_vocab_size: Count | None = None
    # a JSON file in draft_configs/ whose keys override those inferred from the target: docs/drafts.md
    draft_config_path: Annotated[str, Field(pattern=r"^draft_configs/[^/]+$")] | None = None
    fc_norm: bool = False  # EAGLE-3.1: norm each feature layer before the fusion; SGLang and vLLM load it
    norm_output: bool = False  # EAGLE-3.1: a step passes its normed state to the next; SGLang and vLLM load it
    sliding_window: Count | None = None  # positions that a draft step attends to, itself counted; null: all
    # a published draft to start from, a Hugging Face id or a folder; null: the target's head, other weights random from seed
    from_: Annotated[Source | None, Field(alias="from")] = None
    revision: str | None = None  # of a Hugging Face id in `from`: branch, tag or commit
    seed: Seed = 3

    def list_conflicts(self) -> Iterator[str]:
        if self.revision is not None and self.from_ is None:
            yield f"revision is {self.revision!r}, expected null while from is null; name the draft in from"
        for key in ("draft_vocab_size", "feature_layers", "fc_norm", "norm_output"):
            if self.from_ is not None and (value := getattr(self, key)):
                yield f"{key} is {value} while from names a published draft, which has its own; leave it out"

    @property
    def makes_fresh_draft(self) -> bool:
        """Return whether e000 is made, and not from a published draft, which has its own sizes and feature layers."""
        return bool(self.checkpoints) and self.from_ is None

    def choose_vocab_size(self, target_vocab_size: int) -> int:
        """Return the size of a new draft's vocabulary: that of params.yaml, else the usual one, or all where there are fewer.

        Raises ValueError for more tokens than the target has.
        """
        if (size := self.draft_vocab_size or 0) > target_vocab_size:
            expected = f"expected at most the target's {target_vocab_size} tokens"
            raise ValueError(f"params.yaml: init_draft.draft_vocab_size is {size}, {expected}")
        return size or min(USUAL_DRAFT_VOCAB, target_vocab_size)

    def choose_feature_layers(self, stored: list[int], default: list[int]) -> list[int]:
        """Return the feature layers that the draft reads, of those `stored`; `default` are EAGLE-3's own.

        Raises ValueError where not all of them are stored.
        """
        chosen = self.feature_layers or (stored if len(stored) == len(default) else default)
        if missing := [i for i in chosen if i not in stored]:
            key = "is" if self.feature_layers else "is null, which means EAGLE-3's"
            raise ValueError(
                f"params.yaml: init_draft.feature_layers {key} {chosen}, expected three of target.feature_layers {stored}: "
                f"add {', '.join(map(str, missing))} there ({sorted({*stored, *chosen})}), or name three of these"
            )
        return chosen


class CheckOverfit(Section):
    steps: Count = 200
    learning_rate: Positive = 0.0003
    # tokens per verify cycle to reach on that row, at most ttt_steps + 1, scaled to what perfect guesses reach; 1.0
    # demands nothing; null: 1 + 5/7 of ttt_steps (docs/metrics.md)
    min_tau: Annotated[float, Field(ge=1)] | None = None

    def choose_min_tau(self, ttt_steps: int) -> float:
        return 1 + 5 / 7 * ttt_steps if self.min_tau is None else self.min_tau


def _list_differences(name: str, segment: Segment, parent: str, start: Segment) -> Iterator[str]:
    """Yield where a segment is of another method, or of other sizes, than the one it starts from."""
    if segment.method != start.method:
        yield (
            f"checkpoints.{name} is of {segment.method}, expected {start.method} as {parent}, or from: {ROOT_CHECKPOINT}"
        )
        return
    for key, expected in start.sizes.items():
        if (found := segment.sizes[key]) != expected:
            expected, found = ("null" if x is None else x for x in (expected, found))
            yield f"checkpoints.{name}.{key} is {found}, expected {expected} as {parent}, or from: {ROOT_CHECKPOINT}"


class TrainDraft(Section):
    # one chained stage each: `epochs` more from `from`, where e000 is made by init_draft; epochs null: 1 to 20 by the
    # rows; {}: none. Of another method: {from: e000, epochs: 9, method: eagle}, or medusa with heads: 4, or peagle with
    # layers: 2; block drafts: {from: e000, epochs: 9, method: dflash, layers: 2, block_size: 8, anchors: 64}, or dspark,
    # with markov_rank: 32, or dflash2 (docs/training.md)
    checkpoints: dict[Name, AnySegment]
    ttt_steps: Count = 7  # training-time test, EAGLE-3 section 3.1
    ttt_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # weight of step k is decay**k
    # weight of a step after one that missed the target's token, where decoding never comes; 1: as any other
    reach_floor: Annotated[float, Field(ge=0, le=1)] = 0.3
    # aligned: as the draft is used in serving; eagle: as in the papers, two tokens early
    mask: Literal["aligned", "eagle"] = "aligned"
    # ce: soft cross-entropy; lk_alpha, lk_lambda: by acceptance (docs/training.md)
    loss: Literal["ce", "lk_alpha", "lk_lambda"] = "ce"
    # of the computation: master weights and moments stay float32; null: float32 beside such a target, else bfloat16
    dtype: Literal["float32", "bfloat16"] | None = None
    # muon: matrices by Muon, norms, biases and vocabulary tables by AdamW; adamw: all by AdamW
    optimizer: Literal["muon", "adamw"] = "muon"
    muon_learning_rate: Positive = 0.004
    muon_weight_decay: NonNegative = 0.5
    learning_rate: Positive | None = None  # of AdamW; null: 0.001 beside Muon, 0.0003 alone
    weight_decay: NonNegative = 0.0  # of AdamW
    # false: EAGLE-3's head stays as it starts; null: true where it is not the target's rows (init_draft.from)
    train_head: bool | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None  # null: 10, of short schedules a tenth of the steps
    # after the warm-up: linear or cosine, to zero at the end of horizon_epochs; or constant
    schedule: Literal["constant", "cosine", "linear"] = "linear"
    # epochs from e000 to zero; null: each checkpoint's own, so that a later one changes none before it
    horizon_epochs: Count | None = None
    grad_clip: Positive = 0.5
    # last: a checkpoint is its last epoch; best: that of its epochs whose chain accepts most of the eval answers
    keep: Literal["last", "best"] = "last"
    # of a pack: rows end to end without padding; null: by the rows, 512 to 16,384 (docs/training.md)
    batch_tokens: Count | None = None
    packs_per_step: Count = 1  # packs of one optimizer step, divided over processes
    processes: Count = 1  # GPUs of this host; for several hosts start the stage with torchrun
    # ddp: every process has all weights; fsdp: weights and moments are sharded
    parallel: Literal["ddp", "fsdp"] = "ddp"
    # [tensorboard, wandb]: curves in runs/ or at wandb.ai; packages: docs/training.md
    report_to: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    # name of a run there; null: its checkpoint's name
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = None
    seed: Seed = 5

    def list_conflicts(self) -> Iterator[str]:
        """Yield names that are taken, segments that don't go on from their parent, and a horizon without a use."""
        if ROOT_CHECKPOINT in self.checkpoints:
            yield f"checkpoints.{ROOT_CHECKPOINT} is made by init_draft; choose another name"
        for name, segment in self.checkpoints.items():
            seen = [name]
            while (parent := self.checkpoints[seen[-1]].from_) in self.checkpoints:  # Params names one that is not made
                if parent in seen:
                    yield f"checkpoints {' -> '.join([*seen, parent])} form a cycle; start one from e000"
                    return
                seen.append(parent)
            if start := self.checkpoints.get(segment.from_):
                yield from _list_differences(name, segment, segment.from_, start)
                if start.epochs is None:
                    yield f"checkpoints.{segment.from_}.epochs is null, expected a number: {name} starts from it"
            if segment.epochs is None and (segment.from_ != ROOT_CHECKPOINT or self.horizon_epochs):
                yield (
                    f"checkpoints.{name}.epochs is null, expected a number: it follows from the rows only from {ROOT_CHECKPOINT} "
                    "and without horizon_epochs"
                )
        if self.schedule == "constant" and self.horizon_epochs is not None:
            yield f"schedule is constant and horizon_epochs {self.horizon_epochs}, expected null: no rate falls there"

    @model_validator(mode="after")
    def horizon_holds_every_checkpoint(self) -> "TrainDraft":
        """Write into each segment where its schedule ends, so that the stage of a checkpoint depends on it."""
        for name, segment in list(self.checkpoints.items()) if self.schedule != "constant" else ():
            if segment.epochs is None:
                continue  # the stage knows its rows, and so its end
            end = self.count_epochs(name)
            horizon = segment.horizon_epochs or self.horizon_epochs or end
            if end > horizon:
                raise ValueError(
                    f"checkpoints.{name} is of {end} epochs, expected at most horizon_epochs {horizon}; raise it"
                )
            self.checkpoints[name] = segment.model_copy(update={"horizon_epochs": horizon})
        return self

    @property
    def compute_dtype(self) -> str:
        assert self.dtype is not None, "Params fills it in"
        return self.dtype

    def choose_batch_tokens(self, tokens: int, longest: int) -> int:
        """Return the tokens of a pack on rows of so many `tokens`, of which the longest has `longest`.

        Null is a power of two by which an epoch has about STEPS_PER_EPOCH steps. The longest row fits where it may, since a
        longer one is computed again in backward.
        """
        if self.batch_tokens is not None:
            return self.batch_tokens
        least = max(FEWEST_BATCH_TOKENS, 2 ** math.ceil(math.log2(longest)))
        wanted = 2 ** round(math.log2(tokens / STEPS_PER_EPOCH / self.packs_per_step))
        return min(max(least, wanted), MOST_BATCH_TOKENS)

    def list_fresh_drafts(self) -> list[str]:
        """Return the segments that start from an untrained draft which serving engines run, besides EAGLE-3's, e000."""
        return [
            name
            for name, segment in self.checkpoints.items()
            if segment.from_ == ROOT_CHECKPOINT and segment.family.is_replayed and not segment.family.has_root
        ]

    def count_epochs(self, name: str) -> int:
        """Return the epochs of a checkpoint from e000."""
        epochs = 0
        while name in self.checkpoints:
            epochs, name = epochs + (self.checkpoints[name].epochs or 0), self.checkpoints[name].from_
        return epochs


class ImportedCheckpoint(Section):
    """A published draft used as a checkpoint, whose config's RoPE theta `rope_theta` overrides, or a family without weights."""

    # an id or a folder; or builtin/ngram, suffix or lookahead, for which nothing is downloaded or trained
    model: Source
    revision: str | None = None
    rope_theta: Positive | None = None

    def list_conflicts(self) -> Iterator[str]:
        if self.model.startswith(BUILTIN) and self.builtin is None:
            nearest = suggest_name(self.model, BUILTINS)
            yield f"model is {self.model}{nearest}, expected {' or '.join(BUILTINS)}, or a published draft"

    @property
    def builtin(self) -> DraftFamily | None:
        """Return the family that has no weights; None of a published draft."""
        return BUILTINS.get(self.model)


class ImportDraft(Section):
    checkpoints: dict[Name, ImportedCheckpoint]  # NAME: {model: an id or a folder, revision: null, rope_theta: null}
