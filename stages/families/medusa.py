"""Medusa: K heads that predict the next K tokens from one hidden state at once (https://arxiv.org/abs/2401.10774).

    last hidden h of position p:   head k:   out_k(h + silu(block_k(h)))   ->  guess for token p + 1 + k,   k = 1 .. K

Blocks are initialised with zeros and outs with the target's head, so an untrained head predicts the target's token p + 1.
Outs have the draft's vocabulary, as EAGLE-3's head. The labels of head k are those of EAGLE-3's step k - 1 on the same
positions (`training/ttt.py`): the target's distribution, where the paper takes a token drawn from it. Decoding:
`MedusaProposer`.

Letters: K heads, P supervised positions, H hidden, D draft vocabulary, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftConfig
from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput, VerifyOutput
from stages.engine.proposer import Drafter, DraftingMethod, Proposer
from stages.families import ranked_drafts
from stages.families.draft_files import DraftFiles, LoadedDraft
from stages.families.ranked_drafts import build_static_tree
from stages.families.static_tree import StaticTree
from stages.params.draft_sections import TrainDraft
from stages.params.families import DraftKind, MedusaSegment, Segment
from stages.params.tree_shape import TreeShape
from stages.training import chunked_loss, packed_rows, ttt
from stages.training.packed_rows import PackObjective
from stages.training.trainer import ComputeLoss
from stages.trees import draft_tree as trees


class MedusaDraft(nn.Module):
    """The heads. `outs` are the linear layers to logits; checkpoints have their tensors by that name."""

    d2t: Tensor  # [D] int64 offsets: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        hidden, count, vocabulary = config["hidden_size"], config["heads"], config["draft_vocab_size"]
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        self.outs = nn.ModuleList(nn.Linear(hidden, vocabulary, bias=False) for _ in range(count))
        self.register_buffer("d2t", torch.zeros(vocabulary, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    @classmethod
    def initialise(
        cls, config: dict[str, Any], head: Tensor, d2t: Tensor, t2d: Tensor, logits_scale: float = 1.0
    ) -> "MedusaDraft":
        """Return untrained heads for a target with `head` [V, H], with a draft's vocabulary."""
        draft = cls(config)
        draft.d2t.copy_(d2t)
        draft.t2d.copy_(t2d)
        with torch.no_grad():
            for block, out in zip(draft.blocks, draft.outs, strict=True):
                nn.init.zeros_(block.weight)
                nn.init.zeros_(block.bias)
                out.weight.copy_(head[d2t + torch.arange(len(d2t))] * logits_scale)
        return draft

    def compute_head_input(self, index: int, hidden: Tensor) -> Tensor:
        """Return the input [..., H] of out `index`, from 0, for hidden [..., H]."""
        return hidden + nn.functional.silu(self.blocks[index](hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [1, H] -> [K, D]."""
        states = [self.compute_head_input(k, hidden) for k in range(len(self.outs))]
        return torch.cat([out(state) for out, state in zip(self.outs, states, strict=True)])

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft token ids -> target token ids, any shape."""
        return draft_ids + self.d2t[draft_ids]


def compute_loss(
    medusa: MedusaDraft,
    pack: ttt.TrainingPack,
    embedding: Tensor,
    head: Tensor,
    objective: ttt.TrainingObjective,
    counts: Tensor | None = None,
) -> ttt.LossOutput:
    """Return the loss as ttt.compute_loss does; a step is a head."""
    if not pack.chunks:
        return packed_rows.compute_zero_loss(medusa, pack, objective.num_steps)
    weights = objective.weigh_steps(pack.count_supervised() if counts is None else counts)
    parts = []
    for k, out in enumerate(medusa.outs):
        of_head = pack.select_step(k)
        states = medusa.compute_head_input(k, pack.last[of_head.query_tokens].to(out.weight.dtype))
        output_head = chunked_loss.OutputHead(nn.Identity(), out.weight, medusa.d2t, medusa.t2d)
        weight = weights[k : k + 1]
        parts.append(chunked_loss.compute_chunked_loss(output_head, [states], of_head, head, weight, objective))
    hits = (part.argmax_matches[0] for part in parts)
    wide = [nn.functional.pad(x, (0, len(pack.query_tokens) - len(x))) for x in hits]
    total, losses = torch.stack([part.total_loss for part in parts]).sum(), [part.loss_per_step for part in parts]
    return ttt.LossOutput(total, torch.cat(losses), torch.stack(wide))


def predict_top_tokens(
    medusa: MedusaDraft, pack: ttt.TrainingPack, embedding: Tensor, head: Tensor, steps: int, count: int
) -> list[Tensor]:
    """Return the `count` likeliest target ids [P_k, count] of each of the first `steps` heads, at its supervised positions."""
    found = []
    for k, width in enumerate(pack.queries_per_step[:steps]):
        out = medusa.outs[k]
        logits = out(medusa.compute_head_input(k, pack.last[pack.query_tokens[:width]].to(out.weight.dtype)))
        found.append(medusa.to_target(logits.topk(count).indices))
    return found


class MedusaDrafter(Drafter):
    """Medusa's heads beside their target, one prompt at a time."""

    is_batched = False

    def __init__(self, medusa: MedusaDraft, embedding: Tensor):
        self.module, self.medusa, self.embedding = medusa, medusa, embedding

    def build_method(self, shape: TreeShape, draft_temperature: float | None = None) -> "MedusaMethod":
        tree = build_static_tree(shape, self.medusa.config["rank_accuracy"], "Medusa", self.embedding.device)
        return MedusaMethod(self.medusa, tree)


class MedusaMethod(DraftingMethod):
    """Trained Medusa heads and a static tree."""

    def __init__(self, medusa: MedusaDraft, tree: StaticTree):
        self.medusa, self.tree = medusa, tree
        self.num_steps, self.num_draft_tokens = tree.num_steps, tree.num_draft_tokens

    def build_proposer(self, capacity: int) -> "MedusaProposer":
        return MedusaProposer(self)


class MedusaProposer(Proposer):
    """Proposes from the hidden state of the last verified token."""

    def __init__(self, method: MedusaMethod):
        weight = method.medusa.outs[0].weight
        self.method, self.hidden = method, weight.new_zeros(1, weight.shape[1])
        self.graph_tensors = [self.hidden]

    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        self.hidden.copy_(prefill.hidden[-1:])

    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[trees.DraftTree, Tensor]:
        medusa, static = self.method.medusa, self.method.tree
        ranked = trees.select_topk(medusa.logits(self.hidden).float(), static.num_ranks)[1]  # [K, num_ranks]
        tokens = medusa.to_target(ranked[static.depths[0, 1:] - 1, static.ranks])  # [M-1]
        roots = state.next_tokens.gather(1, state.num_verified - 1)  # [1, 1]
        return static.with_tokens(tokens), torch.cat([roots, tokens[None]], dim=1)

    def update(self, state: DecodeState, output: VerifyOutput) -> None:
        last = output.path.gather(1, state.num_verified - 1)  # [1, 1]
        self.hidden.copy_(output.hidden[0, last[0]])

    def count_state_bytes(self, slots: CacheSlots) -> int:
        return self.hidden.nbytes


class Files(DraftFiles):
    """Medusa's files."""

    def describe(self, config: dict[str, Any]) -> DraftKind:
        return DraftKind(self.facts, config["heads"])

    def build_module(self, config: dict[str, Any], head: Tensor, logits_scale: float) -> nn.Module:
        return MedusaDraft(config)


class Training(ranked_drafts.RankedTraining):
    """Medusa's start and objective."""

    files = Files
    predict_top_tokens = staticmethod(predict_top_tokens)
    tables = ("outs.",)

    def build_config(self, segment: Segment, sizes: DraftConfig, dtype: str) -> dict[str, Any]:
        assert isinstance(segment, MedusaSegment)
        shared = ranked_drafts.list_shared_config("medusa", sizes, dtype)
        return {**shared, "draft_vocab_size": sizes.draft_vocab_size, "heads": segment.heads}

    def draw_module(
        self, config: dict[str, Any], head: Tensor, root: dict[str, Tensor], seed: int, scale: float
    ) -> nn.Module:
        return MedusaDraft.initialise(config, head, root["d2t"], root["t2d"], scale)

    def build_objective(
        self, draft: LoadedDraft, segment: Segment, settings: TrainDraft, logits_scale: float
    ) -> tuple[PackObjective, ComputeLoss]:
        return ttt.TrainingObjective.of_settings(settings, draft.config["heads"], logits_scale), compute_loss


def build_drafter(draft: LoadedDraft, embedding: Tensor, head: Tensor, tree_scoring: str) -> Drafter:
    assert isinstance(draft.module, MedusaDraft)
    return MedusaDrafter(draft.module, embedding)
