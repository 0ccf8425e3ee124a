"""EAGLE-3 in the torch engine: its KV cache, in the slots, is extended by the verified rows, then it grows trees.

Letters: B prompts decoded together, T prompt tokens, M num_draft_tokens, R path length, H hidden.
"""

from collections.abc import Sequence

from torch import Tensor, cat

from stages.draft.eagle3 import Eagle3Draft, build_prefix_mask, compute_first_state
from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput
from stages.engine.proposer import Drafter, DraftingMethod, Proposer
from stages.families.draft_files import LoadedDraft
from stages.families.eagle3.kernels import DraftCache, DraftRows, FusedDraft
from stages.params.families import BLOCK_TITLES
from stages.params.tree_shape import TreeShape
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates


class Eagle3Drafter(Drafter):
    """A draft for a target."""

    def __init__(
        self,
        draft: Eagle3Draft,
        embedding: Tensor,  # [V, H] the target's
        feature_layers: Sequence[int],
        tree_scoring: str,  # a key of draft_tree.TREE_SCORINGS
    ):
        self.draft, self.feature_layers, self.tree_scoring = draft, feature_layers, tree_scoring
        self.module, self.feature_width = draft, draft.fc.in_features
        self.cache_heads, self.cache_head_dim = draft.config.num_key_value_heads, draft.config.head_dim
        self.rope_axes = () if draft.frequency_axes is None else (3,)
        self.embedding = embedding
        self.fused_draft: FusedDraft | None = None  # on a GPU whose cycles are captured: `use_fused_kernels`

    def build_method(self, shape: TreeShape, draft_temperature: float | None = None) -> "Eagle3Method":
        """Raise ValueError for sampled drafts, which EAGLE-3's trees don't have."""
        if draft_temperature is not None:
            raise ValueError(
                f"benchmark.draft_sampling is sampled and the draft is EAGLE-3's, expected a block draft, {BLOCK_TITLES}; set "
                "it to greedy"
            )
        return Eagle3Method(self, shape)

    def count_logits(self, shape: TreeShape) -> int:
        return shape.topk * self.draft.config.draft_vocab_size

    def use_fused_kernels(self) -> None:
        self.fused_draft = FusedDraft.build_if_supported(self.draft, self.embedding)

    def extend_cache(
        self, slots: CacheSlots, embeds: Tensor, features: Tensor, positions: Tensor, rows: Tensor
    ) -> Tensor:
        """Write keys and values of cache rows [B, R]: embeds [B, R, H] of the tokens after them, features [B, R, 3H].

        Returns the fused features [B, R, H].
        """
        draft = self.draft
        fused = draft.fuse_features(features.to(draft.fc.weight.dtype))
        new = draft.compute_keys_values(draft.build_layer_input(embeds, fused), draft.compute_rope(positions))
        for kept, written in zip((slots.draft_keys, slots.draft_values), new, strict=True):
            kept.flatten(0, 1).index_copy_(0, rows.flatten(), written.flatten(0, 1))
        return fused

    def read_prompt(self, slot: CacheSlots, prefill: PrefillOutput, state: DecodeState) -> None:
        """Read a prompt but for its last row, which the first cycle reads."""
        assert prefill.features is not None
        features, count = prefill.features, len(prefill.features)  # [T, 3H]
        # [1, T] or [1, T, 3]
        positions = self.draft.get_rope_positions(slot.positions[None, :count], prefill.positions)
        state.features[0, 0], state.rope_positions[0, 0] = features[-1], positions[0, -1]
        if count > 1:
            rows = slot.positions[None, : count - 1]
            self.extend_cache(slot, prefill.embeds[:, 1:], features[None, :-1], positions[:, :-1], rows)

    def expand_candidates(
        self, slots: CacheSlots, state: DecodeState, last: Tensor, tree: TreeShape, visible_length: int
    ) -> trees.Candidates:
        """Read the last cycles' rows and expand from row last [B, 1] of each prompt, the last verified one."""
        num_slots, count = state.next_tokens.shape
        if slots.has_dynamic_shapes:
            count = int(state.num_verified)
        tokens, features, positions = (x[:, :count] for x in (state.next_tokens, state.features, state.rope_positions))
        rows = slots.locate_rows(state.cache_length - state.num_verified + slots.positions[:count])  # [B, R]
        if self.fused_draft is not None:
            inputs = tokens.flatten(), features.flatten(0, 1), positions.flatten(0, 1), rows.flatten()
            first = last if slots.num_slots == 1 else slots.numbers[:num_slots] * count + last  # [B, 1] of B * R
            keys, values = (x[:num_slots].flatten(0, 1).transpose(0, 1) for x in (slots.draft_keys, slots.draft_values))
            cache = DraftCache(keys, values, state.cache_length[:, 0], slots.capacity)
            return self.fused_draft.expand_candidates(
                DraftRows(*inputs, first[:, 0]), cache, tree.num_steps, tree.topk, self.tree_scoring
            )
        embeds = self.embedding[tokens]  # [B, R, H]
        fused = self.extend_cache(slots, embeds, features, positions, rows)
        window, last_rows = self.draft.config.sliding_window, (slots.numbers[:num_slots], last)
        attends_to_all = window is None and slots.has_dynamic_shapes
        mask = None if attends_to_all else build_prefix_mask(state.cache_length - 1, visible_length, window)
        keys, values = (x[:num_slots, :visible_length] for x in (slots.draft_keys, slots.draft_values))
        prefix = keys, values, mask
        last_positions = positions[last_rows]  # [B, 1] or [B, 1, 3]
        first_state = compute_first_state(self.draft, embeds[last_rows], fused[last_rows], last_positions, *prefix)
        return expand_candidates(
            self.draft,
            self.embedding,
            first_state,
            last_positions,
            *prefix,
            tree.num_steps,
            tree.topk,
            self.tree_scoring,
        )


class Eagle3Method(DraftingMethod):
    """Trees of one shape. Raises ValueError for one that can't be built with the draft."""

    def __init__(self, drafter: Eagle3Drafter, tree: TreeShape):
        config = drafter.draft.config
        trees.check_tree(tree, config.draft_vocab_size, config.sliding_window)
        self.drafter, self.tree = drafter, tree
        self.num_steps, self.num_draft_tokens = tree.num_steps, tree.num_draft_tokens

    @property
    def num_scratch_rows(self) -> int:
        """Return how many rows a cycle may write: fused kernels keep the keys of beams behind the draft's prefix."""
        return max(super().num_scratch_rows, (self.num_steps - 1) * self.tree.topk)

    def build_proposer(self, capacity: int) -> "Eagle3Proposer":
        return Eagle3Proposer(self)


class Eagle3Proposer(Proposer):
    """Keeps its state in the slots and in the state that passes share: `features` and `rope_positions`."""

    def __init__(self, method: Eagle3Method):
        self.drafter, self.tree = method.drafter, method.tree
        self.feature_layers = method.drafter.feature_layers

    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        self.drafter.read_prompt(slot, prefill, state)

    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[trees.DraftTree, Tensor]:
        last = state.num_verified - 1  # [B, 1]
        candidates = self.drafter.expand_candidates(slots, state, last, self.tree, visible_length)
        tree = trees.build_tree(candidates, self.tree.num_draft_tokens)
        return tree, cat([state.next_tokens.gather(1, last), tree.tokens], dim=1)

    def count_state_bytes(self, slots: CacheSlots) -> int:
        features = slots.states[self.tree.num_steps + 1].features
        return slots.draft_keys.nbytes + slots.draft_values.nbytes + features.nbytes


def build_drafter(draft: LoadedDraft, embedding: Tensor, head: Tensor, tree_scoring: str) -> Drafter:
    assert isinstance(draft.module, Eagle3Draft)
    return Eagle3Drafter(draft.module, embedding, draft.feature_layers, tree_scoring)
