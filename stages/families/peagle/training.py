"""P-EAGLE's training: all depths of all positions in one pass, on depths that are sampled.

Conditional drop-token sampling (paper, section 3; speculators, models/peagle/data.py): the first slot is trained at each of the n
positions that serving drafts from, slot d at a random (n - d) max(r^d, r_min) of those whose slot d - 1 is, so a slot's own
earlier ones are always there. Drawn again for every pack, by train_draft.seed and the pack's index in training. Labels and losses
are EAGLE-3's (training/ttt.py); the loss is the mean over all that is trained, of all depths together, as theirs
(models/peagle/metrics.py), each slot after one that missed weighed by train_draft.reach_floor. The embedding stays the
target's, where speculators trains a copy; the head as EAGLE-3's.

Letters as in training/ttt.py; Q slots after the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftConfig
from stages.families.block import mask_token as mask_tokens
from stages.families.draft_files import LoadedDraft
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.eagle3.training import Training as Eagle3Training
from stages.families.peagle.files import Files, build_peagle_config
from stages.families.peagle.model import PEagleConfig, PEagleDraft
from stages.hidden_states import reader
from stages.hidden_states.reader import TRAIN_FOLDER
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.params.families import PEagleSegment, Segment
from stages.target.manifest import TargetManifest
from stages.training import attention_mask, chunked_loss, packed_rows, ttt
from stages.training.packed_rows import LossOutput, PackIndex, PackObjective, PackRow
from stages.training.trainer import ComputeLoss
from stages.training.ttt import TrainingPack

INITIAL_STD = 0.02


def sample_depths(supervised: Tensor, ratio: float, least_ratio: float, generator: torch.Generator) -> Tensor:
    """Return which of the positions [L, T] bool, supervised at each depth, are trained; one at depth d is so at all before."""
    kept, count = [supervised[0]], int(supervised[0].sum())
    for depth, at_depth in enumerate(supervised[1:], 1):
        pool = (kept[-1] & at_depth).nonzero()[:, 0]
        size = int(max(0, count - depth) * max(ratio**depth, least_ratio))
        drawn = torch.zeros_like(kept[0])
        drawn[pool[torch.randperm(len(pool), generator=generator)[:size]]] = True
        kept.append(drawn)
    return torch.stack(kept)


@dataclass(frozen=True, kw_only=True)
class PEagleObjective(ttt.TrainingObjective):
    """EAGLE-3's objective, with sampled depths."""

    ratio: float = 1.0  # r
    least_ratio: float = 1.0  # r_min
    seed: int = 0

    def build_pack(self, rows: Sequence[PackRow], pack_index: PackIndex, pinned: bool) -> TrainingPack:
        generator = pack_index.seed_generator(self.seed)
        select = partial(sample_depths, ratio=self.ratio, least_ratio=self.least_ratio, generator=generator)
        pack = TrainingPack.from_rows(rows, self.num_steps, self.loss_mask, pinned, select)
        return replace(pack, batch_tokens=self.batch_tokens)

    def weigh_steps(self, counts: Tensor) -> Tensor:
        return (1 / counts.sum().clamp(min=1)).expand(self.num_steps)

    def combine_losses(self, step_loss: Sequence[float], counts: Sequence[float]) -> float:
        return sum(x * n for x, n in zip(step_loss, counts, strict=True)) / max(1.0, sum(counts))


def compute_loss(
    draft: PEagleDraft,
    pack: TrainingPack,
    embedding: Tensor,  # [V, H] the target's, frozen
    head: Tensor,  # [V, H] the target's, frozen
    objective: PEagleObjective,
    counts: Tensor | None = None,  # [L] trained positions of the whole batch; None: of this pack
) -> LossOutput:
    """Compute the loss of a pack. Total losses of the packs of a batch add up to the loss of the batch."""
    if not pack.chunks:
        return packed_rows.compute_zero_loss(draft, pack, objective.num_steps)
    weights = objective.weigh_steps(pack.count_supervised() if counts is None else counts)
    output_head = chunked_loss.OutputHead(draft.normalise_output, draft.lm_head.weight, draft.d2t, draft.t2d)
    states = compute_states(draft, pack, embedding)
    return chunked_loss.compute_chunked_loss(output_head, states, pack, head, weights, objective)


def compute_states(draft: PEagleDraft, pack: TrainingPack, embedding: Tensor) -> list[Tensor]:
    """Return the last layer's output of each depth, [P_k, H], in one pass over the T rows and the slots after them."""
    num_rows, (num_queries, *num_slots) = len(pack.ids), pack.queries_per_step
    table, queries = draft.choose_embedding(embedding), pack.query_tokens
    embeds = table[nn.functional.pad(pack.ids[1:], (0, 1))]
    embeds, fused = draft.append_slots(embeds, pack.features, table, sum(num_slots))
    depths = [pack.position, *(pack.position[queries[:n]] + d for d, n in enumerate(num_slots, 1))]
    asked = torch.cat([queries, torch.arange(num_rows, len(embeds), device=queries.device)])
    every_row, last = replace(pack, query_tokens=torch.arange(num_rows, device=queries.device)), len(draft.layers)

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, slots = (k[:num_rows], v[:num_rows]), [x[num_rows:].split(num_slots) for x in (k, v)]
        of_slots = attention_mask.build_pack_attention(pack, *rows)
        of_rows = of_slots if i == last else attention_mask.build_pack_attention(every_row, *rows)
        first, *later = q.split([num_queries if i == last else num_rows, *num_slots])
        attended = [of_rows.attend(first, [], [])]
        for d, query in enumerate(later, 1):
            own_keys, own_values = ([x[: len(query)] for x in of_depth[:d]] for of_depth in slots)
            attended.append(of_slots.attend(query, own_keys, own_values))
        return torch.cat(attended)

    states = draft.run_layers(embeds, fused, torch.cat(depths), attend, lambda x: x.index_select(0, asked))
    return list(states.split(pack.queries_per_step))


def initialise_draft(config: PEagleConfig, seed: int, root: dict[str, Tensor]) -> PEagleDraft:
    """Return a draft with random weights, whose vocabulary and head are those of e000's tensors `root`.

    fc begins as the mean of the three features, as e000's (init_draft). speculators draws mask_hidden fifty times as large, which
    learns slower here: a toy's chain of seven on one row came to 4.1 tokens a cycle in 100 steps, so to 6.5.
    """
    draft, generator = PEagleDraft(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=INITIAL_STD, generator=generator)
        parts = draft.fc.in_features // config.hidden_size
        draft.fc.weight += torch.eye(config.hidden_size).repeat(1, parts) / parts
        for own, name in ((draft.lm_head.weight, "lm_head.weight"), (draft.d2t, "d2t"), (draft.t2d, "t2d")):
            own.copy_(root[name])
    return draft


class Training(Eagle3Training):
    """P-EAGLE's start and objective."""

    tables = ("lm_head", "embed_tokens", "mask_hidden")

    def initialise(self, name: str, params: schema.Params, target: TargetManifest, head: Tensor) -> LoadedDraft:
        """The sizes, the vocabulary and the head are those of e000."""
        segment, (root_config, root) = params.train_draft.checkpoints[name], eagle3_checkpoint.read_root_draft()
        assert isinstance(segment, PEagleSegment), name
        try:
            tokenizer, held = mask_tokens.load_tokenizer(params, target), reader.list_tokens(TRAIN_FOLDER)
            mask_token = mask_tokens.choose_mask_token(tokenizer, target, held)
            sizes = replace(DraftConfig.from_json(root_config), norm_output=False)  # no step follows another
            config = PEagleConfig(**vars(sizes), num_hidden_layers=segment.layers, ptd_token_id=mask_token)
            draft = initialise_draft(config, params.train_draft.seed, root)
        except ValueError as error:
            raise ValueError(f"params.yaml: train_draft.checkpoints.{name}: {error}") from None
        layers = Files(self.facts).list_feature_layers(root_config, target)
        ids = layers, target.num_layers, target.eos_token_ids
        return LoadedDraft(
            self.facts, draft, build_peagle_config(config, *ids, params.train_draft.compute_dtype), layers
        )

    def build_objective(
        self, draft: LoadedDraft, segment: Segment, settings: TrainDraft, logits_scale: float
    ) -> tuple[PackObjective, ComputeLoss]:
        assert isinstance(segment, PEagleSegment)
        objective = PEagleObjective.of_settings(settings, settings.ttt_steps, logits_scale)
        ratios = segment.down_sample_ratio, segment.down_sample_ratio_min
        return replace(objective, ratio=ratios[0], least_ratio=ratios[1], seed=settings.seed), compute_loss
