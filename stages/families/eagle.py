"""EAGLE: one decoder layer that predicts the target's next hidden state (https://arxiv.org/abs/2401.15077, 2406.16858).

    position p:   embed(token p+1), last hidden of p   --fc, layer-->   predicted hidden of p+1   --head-->   guess for p+2
    next step:    embed(guess),     that hidden        --fc, layer-->   ...                                   guess for p+3

Its input is the target's last hidden state after the final norm; its layer has no norm before the attention, and logits are
the target's head of its output. The loss is SmoothL1 to the target's hidden state of p+1, plus a tenth of the soft
cross-entropy between the logits of both; one step, on the target's own hidden states, without the authors' noise.
EAGLE decodes with a static tree, EAGLE-2, with the same weights, with EAGLE-3's dynamic ones (`EagleProposer`).

Letters as in `draft/eagle3.py`; P supervised positions, L steps.
"""

from typing import Any

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import (
    SIZE_KEYS,
    DraftConfig,
    DraftLayer,
    Eagle3Draft,
    attend_prefix_and_ancestors,
    build_prefix_mask,
    compute_first_state,
)
from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput, VerifyOutput, compute_rope_positions
from stages.engine.proposer import Drafter, DraftingMethod, Proposer
from stages.families import ranked_drafts
from stages.families.draft_files import DraftFiles, LoadedDraft
from stages.families.ranked_drafts import build_static_tree
from stages.families.static_tree import StaticTree
from stages.params.draft_sections import TrainDraft
from stages.params.families import DraftKind, Segment
from stages.params.tree_shape import TreeShape
from stages.training import chunked_loss, packed_rows, ttt
from stages.training.packed_rows import PackObjective
from stages.training.trainer import ComputeLoss
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates

CROSS_ENTROPY_WEIGHT = 0.1  # SmoothL1 has weight 1


class EagleDraft(Eagle3Draft):
    """A draft over the target's whole vocabulary. `head` [V, H] is the target's: frozen, not registered as a parameter.

    Its states are the target's last hidden states, so its logits have the target's `logits_scale`.
    """

    def __init__(self, config: DraftConfig, head: Tensor, logits_scale: float = 1.0):
        super().__init__(config)
        self.head = (head,)  # a tuple, so that the module does not register it
        self.logits_scale = logits_scale

    def _add_layers(self, c: DraftConfig) -> None:
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size)
        self.midlayer = DraftLayer(c, c.hidden_size, qk_norm=False, norms=())

    @classmethod
    def initialise(cls, config: DraftConfig, head: Tensor, seed: int, logits_scale: float = 1.0) -> "EagleDraft":
        """Return random weights from the seed, with `fc` such that the first prediction for p+1 is near the hidden state of p."""
        torch.manual_seed(seed)
        draft = cls(config, head, logits_scale)
        with torch.no_grad():
            for name, weight in draft.named_parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=0.02)
                if name == "fc.weight":
                    weight[:, config.hidden_size :] += torch.eye(config.hidden_size)
            draft.fc.bias.zero_()
        return draft

    def fuse_features(self, features: Tensor) -> Tensor:
        return features

    def build_layer_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([embeds, hidden], dim=-1))  # [..., H]

    def select_residual(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        return mixed

    def normalise_output(self, state: Tensor) -> Tensor:
        return state if self.logits_scale == 1 else state * self.logits_scale

    def logits(self, state: Tensor) -> Tensor:
        return self.normalise_output(state) @ self.head[0].T

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def compute_loss(
    eagle: EagleDraft,
    pack: ttt.TrainingPack,
    embedding: Tensor,
    head: Tensor,
    objective: ttt.TrainingObjective,
    counts: Tensor | None = None,
) -> ttt.LossOutput:
    """Return the loss of one step, as ttt.compute_loss does."""
    assert objective.num_steps == 1
    if not pack.chunks:
        return packed_rows.compute_zero_loss(eagle, pack, 1)
    (states,) = ttt.unroll_states(eagle, pack, pack.last, embedding, 1)
    share = objective.weigh_steps(pack.count_supervised() if counts is None else counts)  # [1]
    all_ids = torch.zeros(len(head), dtype=torch.int64, device=head.device)
    output_head = chunked_loss.OutputHead(eagle.normalise_output, head, all_ids, torch.ones_like(all_ids).bool())
    soft = chunked_loss.compute_chunked_loss(output_head, [states], pack, head, CROSS_ENTROPY_WEIGHT * share, objective)
    expected = pack.last[pack.query_tokens + 1].to(states.dtype)  # of the predicted position
    distance = nn.functional.smooth_l1_loss(states, expected, reduction="none").mean(-1).float().sum()
    loss = CROSS_ENTROPY_WEIGHT * soft.loss_per_step + distance.detach()
    return ttt.LossOutput(soft.total_loss + distance * share[0], loss, soft.argmax_matches)


def predict_top_tokens(
    eagle: EagleDraft, pack: ttt.TrainingPack, embedding: Tensor, head: Tensor, steps: int, count: int
) -> list[Tensor]:
    """Return each step's `count` likeliest ids [P_k, count], given the row's own tokens before."""
    states = ttt.unroll_states(eagle, pack, pack.last, embedding, steps)
    return [(state @ head.T).topk(count).indices for state in states]


class EagleDrafter(Drafter):
    """An EAGLE draft beside its target, one prompt at a time."""

    is_batched = False

    def __init__(self, eagle: EagleDraft, embedding: Tensor, rank_accuracy: list[list[float]], tree_scoring: str):
        self.module, self.eagle, self.embedding = eagle, eagle, embedding
        self.rank_accuracy, self.tree_scoring = rank_accuracy, tree_scoring

    def build_method(self, shape: TreeShape, draft_temperature: float | None = None) -> "EagleMethod":
        tree: StaticTree | TreeShape = shape
        if shape.letter == "s":
            tree = build_static_tree(shape, self.rank_accuracy, "EAGLE", self.embedding.device)
        return EagleMethod(self.eagle, self.embedding, tree, self.tree_scoring)


class EagleMethod(DraftingMethod):
    """An EAGLE draft with a static tree, or the shape of dynamic ones.

    Raises ValueError where the tree does not fit the draft.
    """

    def __init__(self, eagle: EagleDraft, embedding: Tensor, tree: StaticTree | TreeShape, tree_scoring: str):
        c = eagle.config
        self.eagle, self.embedding, self.tree, self.tree_scoring = eagle, embedding, tree, tree_scoring
        if isinstance(tree, TreeShape):
            trees.check_tree(tree, c.vocab_size, c.sliding_window)
        self.num_steps, self.num_draft_tokens = tree.num_steps, tree.num_draft_tokens

    def build_proposer(self, capacity: int) -> "EagleProposer":
        return EagleProposer(self, capacity)


class EagleProposer(Proposer):
    """Extends its own KV cache by the verified rows, and grows a tree from the last of them."""

    def __init__(self, method: EagleMethod, capacity: int):
        eagle, self.method = method.eagle, method
        example, c, path_length = eagle.fc.weight, eagle.config, method.num_steps + 1
        self.keys = example.new_zeros(1, capacity, c.num_key_value_heads, c.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.hidden = example.new_zeros(1, path_length, c.hidden_size)  # of the rows that the last cycle verified
        self.steps = torch.arange(path_length, device=example.device)[None]  # [1, R]
        self.rope_positions = eagle.get_rope_positions(self.steps, None).clone()  # [1, R] or [1, R, 3], same rows
        self.graph_tensors = [self.hidden, self.rope_positions]
        self.grow = _grow_static_tree if isinstance(method.tree, StaticTree) else _grow_dynamic_tree

    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        eagle, count = self.method.eagle, len(prompt)
        positions = eagle.get_rope_positions(slot.positions[None, :count], prefill.positions)[0]  # [T] or [T, 3]
        mixed = eagle.build_layer_input(prefill.embeds[0, 1:], prefill.hidden[:-1])
        keys, values = eagle.compute_keys_values(mixed, eagle.compute_rope(positions[:-1]))
        self.keys[0, : count - 1], self.values[0, : count - 1] = keys, values
        self.hidden[0, 0], self.rope_positions[0, 0] = prefill.hidden[-1], positions[-1]

    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[trees.DraftTree, Tensor]:
        method, eagle, last = self.method, self.method.eagle, (state.num_verified - 1)[0]  # [1]
        rows = (state.cache_length - state.num_verified + self.steps)[0]  # [R]
        embeds = method.embedding[state.next_tokens]  # [1, R, H]
        keys, values = eagle.compute_keys_values(
            eagle.build_layer_input(embeds, self.hidden), eagle.compute_rope(self.rope_positions)
        )
        self.keys.index_copy_(1, rows, keys)
        self.values.index_copy_(1, rows, values)
        prefix = self.keys[:, :visible_length], self.values[:, :visible_length]
        mask = build_prefix_mask(state.cache_length - 1, visible_length, None)  # [1, 1, visible_length]
        positions = self.rope_positions[:, last]  # [1, 1] or [1, 1, 3]
        first = compute_first_state(eagle, embeds[:, last], self.hidden[:, last], positions, *prefix, mask)
        tree = self.grow(method, first, positions, *prefix, mask)
        return tree, torch.cat([state.next_tokens[:, last], tree.tokens], dim=1)

    def update(self, state: DecodeState, output: VerifyOutput) -> None:
        self.hidden.copy_(output.hidden[:, output.path[0]])
        rows = state.cache_length - state.num_verified + self.steps
        self.rope_positions.copy_(compute_rope_positions(rows, state.rope_offset, self.rope_positions))

    def count_state_bytes(self, slots: CacheSlots) -> int:
        return sum(t.nbytes for t in (self.keys, self.values, *self.graph_tensors))


def _grow_dynamic_tree(
    method: EagleMethod, state: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> trees.DraftTree:
    tree, prefix = method.tree, (state, positions, keys, values, mask)
    assert isinstance(tree, TreeShape)
    candidates = expand_candidates(
        method.eagle, method.embedding, *prefix, tree.num_steps, tree.topk, method.tree_scoring
    )
    return trees.build_tree(candidates, tree.num_draft_tokens)


def _grow_static_tree(
    method: EagleMethod, state: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> trees.DraftTree:
    """Grow the tree depth by depth; the draft runs only for branches that continue.

    state [1, 1, H] of step 0, positions [1, 1] or [1, 1, 3], keys and values [1, T, G, E] of the prefix, mask [1, 1, T].
    """
    eagle, static = method.eagle, method.tree
    assert isinstance(static, StaticTree)
    states, own_k, own_v = state[0], None, None  # [Q, H] and [Q, S, G, E] of the branches above
    tokens: list[Tensor] = []
    for depth, level in enumerate(static.levels, 1):
        ranked = trees.select_topk(eagle.logits(states).float(), static.num_ranks)[1]  # [Q, num_ranks]
        tokens.append(ranked[level.parent, level.rank])
        if depth == static.num_steps:
            break
        above = level.parent[level.continues]  # [Q] parents of the branches that continue
        mixed = eagle.build_layer_input(method.embedding[tokens[-1][level.continues]], states[above])  # [Q, H]
        rope = eagle.compute_rope(positions[0] + depth)
        key, value = (x[:, None] for x in eagle.compute_keys_values(mixed, rope))
        own_k = key if own_k is None else torch.cat([own_k[above], key], dim=1)
        own_v = value if own_v is None else torch.cat([own_v[above], value], dim=1)
        visible = mask.expand(-1, len(above), -1)
        attended = attend_prefix_and_ancestors(
            eagle.compute_queries(mixed, rope)[None], keys, values, visible, own_k[None], own_v[None]
        )[0]
        states = eagle.finish_layer(mixed, attended)
    return static.with_tokens(torch.cat(tokens))


class Files(DraftFiles):
    """Eagle's files."""

    def describe(self, config: dict[str, Any]) -> DraftKind:
        return DraftKind(self.facts, len(config["rank_accuracy"]))

    def build_module(self, config: dict[str, Any], head: Tensor, logits_scale: float) -> nn.Module:
        return EagleDraft(DraftConfig.from_json(config), head, logits_scale)


class Training(ranked_drafts.RankedTraining):
    """Eagle's start and objective."""

    files = Files
    predict_top_tokens = staticmethod(predict_top_tokens)

    def build_config(self, segment: Segment, sizes: DraftConfig, dtype: str) -> dict[str, Any]:
        shared = ranked_drafts.list_shared_config("eagle", sizes, dtype)
        layer = {key: getattr(sizes, key) for key in SIZE_KEYS if key not in shared}  # of e000's sizes
        rope = {"rope_parameters": sizes.rope, "model_type": "llama"}
        return {**shared, **layer, "draft_vocab_size": sizes.vocab_size, **rope}

    def draw_module(
        self, config: dict[str, Any], head: Tensor, root: dict[str, Tensor], seed: int, scale: float
    ) -> nn.Module:
        return EagleDraft.initialise(DraftConfig.from_json(config), head, seed, scale)

    def build_objective(
        self, draft: LoadedDraft, segment: Segment, settings: TrainDraft, logits_scale: float
    ) -> tuple[PackObjective, ComputeLoss]:
        return ttt.TrainingObjective.of_settings(settings, 1, logits_scale), compute_loss


def build_drafter(draft: LoadedDraft, embedding: Tensor, head: Tensor, tree_scoring: str) -> Drafter:
    assert isinstance(draft.module, EagleDraft)
    return EagleDrafter(draft.module, embedding, draft.config["rank_accuracy"], tree_scoring)
