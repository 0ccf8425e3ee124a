"""A block draft as a proposer: its context keys and values, in the slots, are extended by the rows that the last cycle
verified, then one forward drafts a block at the bonus token.

Context keys and values are functions of the target's features alone, so nothing of a rejected draft is kept: a cycle's rows are
written behind the verified ones, those beyond its accepted path out of sight of every mask, until the next cycle overwrites them.
The slots' draft cache has the G heads of each of the L layers side by side.

Trees: at topk 1 the chain of the first drafts, as serving engines run it; else the best nodes of the block's candidates
(kernels.py), selected as EAGLE-3's are. The drafts of a chain are the most probable ones, or drawn slot by slot.

Letters: B prompts decoded together, T prompt tokens, M num_draft_tokens, R path length, L layers, G key-value heads of one layer,
E head width, K feature layers, H hidden, D drafts of a block, S num_steps, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, arange, cat, int64, stack

from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput
from stages.engine.proposer import Drafter, DraftingMethod, Proposer
from stages.engine.sampling import compute_probabilities, draw_tokens
from stages.families.block.kernels import FusedBlockExpansion
from stages.families.block.model import BlockContext, BlockDraft, compute_logits
from stages.families.draft_files import LoadedDraft
from stages.params.tree_shape import TreeShape
from stages.trees import draft_tree as trees


class BlockDrafter(Drafter):
    """A block draft for a target."""

    def __init__(
        self,
        draft: Any,  # BlockDraft, or one like it
        embedding: Tensor,  # [V, H] the target's
        head: Tensor,  # [V, H] the target's
        feature_layers: Sequence[int],
        tree_scoring: str,  # a key of draft_tree.TREE_SCORINGS
        offsets: Tensor | None = None,  # [V] of the head's ids to the target's; None: they are the same
    ):
        self.draft, self.feature_layers, self.tree_scoring = draft, feature_layers, tree_scoring
        config = draft.config
        self.module, self.feature_width = draft, draft.fc.in_features
        self.cache_heads = config.num_hidden_layers * config.num_key_value_heads  # the layers' side by side
        self.cache_head_dim = config.head_dim
        self.embedding, self.head = embedding, head
        offsets = embedding.new_zeros(len(head), dtype=int64) if offsets is None else offsets
        self.expansion = FusedBlockExpansion(draft, offsets)

    def build_method(self, shape: TreeShape, draft_temperature: float | None = None) -> "BlockMethod":
        return BlockMethod(self, shape, draft_temperature)

    def count_logits(self, shape: TreeShape) -> int:
        """Return those of a block's slots and of a beam."""
        return (shape.num_steps + shape.topk) * self.draft.config.vocab_size

    def view_context(self, slots: CacheSlots, num_slots: int, length: int) -> BlockContext:
        """Return the first `length` rows of the first slots' caches, by layer."""
        num_heads = self.draft.config.num_key_value_heads
        keys, values = (x[:num_slots, :length].split(num_heads, dim=2) for x in (slots.draft_keys, slots.draft_values))
        return BlockContext(keys, values)

    def extend_context(self, slots: CacheSlots, features: Tensor, positions: Tensor) -> None:
        """Write keys and values of features [B, R, K*H] at positions [B, R] of each slot."""
        new = self.draft.project_context(features.to(self.draft.fc.weight.dtype), positions)
        self.view_context(slots, len(features), slots.capacity).write(new, positions)

    def read_prompt(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, count: int) -> None:
        """Read the first `count` rows of a prompt."""
        assert prefill.features is not None
        self.extend_context(slot, prefill.features[None, :count], slot.positions[None, :count])

    def draft_states(
        self, slots: CacheSlots, state: DecodeState, anchors: Tensor, visible_length: int, num_steps: int
    ) -> Tensor:
        """Read the last cycle's rows -> the drafting states [B, S, H] after the bonus tokens `anchors` [B]."""
        num_slots, count = state.next_tokens.shape
        if slots.has_dynamic_shapes:
            count = int(state.num_verified)
        positions = state.cache_length - state.num_verified + slots.positions[:count]  # [B, R]
        self.extend_context(slots, state.features[:, :count], positions)
        context = self.view_context(slots, num_slots, visible_length)
        hidden = self.draft.forward_cached(self.embedding, anchors, state.cache_length[:, 0], context)
        return self.draft.select_drafting_slots(hidden)[:, :num_steps]


class BlockMethod(DraftingMethod):
    """Trees of one shape. Raises ValueError for one that can't be built with the draft, or whose drafts can't be sampled."""

    def __init__(self, drafter: BlockDrafter, tree: TreeShape, draft_temperature: float | None = None):
        """draft_temperature: None for greedy drafts."""
        drafter.draft.check_tree(tree)
        if draft_temperature is not None and tree.topk > 1:
            raise ValueError(
                f"{tree.name}: topk is {tree.topk} and benchmark.draft_sampling sampled, expected a chain; set it to greedy, or "
                f"take t{tree.num_steps}_1_{tree.num_steps + 1}"
            )
        self.drafter, self.tree, self.draft_temperature = drafter, tree, draft_temperature
        self.num_steps, self.num_draft_tokens = tree.num_steps, tree.num_draft_tokens

    def build_proposer(self, capacity: int) -> "BlockProposer":
        return BlockProposer(self)


class BlockProposer(Proposer):
    """Keeps its state in the slots and in `features` of the state that passes share; it has no tensors of its own."""

    def __init__(self, method: BlockMethod):
        self.drafter, self.tree, self.draft_temperature = method.drafter, method.tree, method.draft_temperature
        self.feature_layers = method.drafter.feature_layers
        depths = arange(self.tree.num_draft_tokens, device=self.drafter.embedding.device)[None]  # [1, M]
        self.chain_parents, self.chain_depths = (depths - 1).clamp(min=0), depths
        self.chain_mask = trees.build_ancestor_mask(self.chain_parents)

    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        """Read a prompt but for its last row, which the first cycle reads."""
        assert prefill.features is not None
        state.features[0, 0] = prefill.features[-1]
        if last := len(prefill.features) - 1:  # [T, K*H]
            self.drafter.read_prompt(slot, prompt, prefill, last)

    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[trees.DraftTree, Tensor]:
        draft, head = self.drafter.draft, self.drafter.head
        roots = state.next_tokens.gather(1, state.num_verified - 1)  # [B, 1]
        states = self.drafter.draft_states(slots, state, roots[:, 0], visible_length, self.tree.num_steps)
        if self.draft_temperature is not None:
            tree = self._build_chain(*self._sample_drafts(slots, state, states, roots[:, 0], self.draft_temperature))
        elif self.tree.topk == 1:
            tree = self._build_chain(draft.draft_greedily(states, roots[:, 0], head))
        else:
            candidates = self.drafter.expansion.expand(
                compute_logits(states, head), states, roots[:, 0], self.tree.topk, self.drafter.tree_scoring
            )
            tree = trees.build_tree(candidates, self.tree.num_draft_tokens)
        return tree, cat([roots, tree.tokens], dim=1)

    def _sample_drafts(
        self, slots: CacheSlots, state: DecodeState, states: Tensor, anchors: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Draw drafts [B, S] from drafting states [B, S, H] at anchors [B], each after the one before.

        Returns them and the distributions [B, S, V] that they were drawn from.
        """
        draft, head, (num_slots, count, _) = self.drafter.draft, self.drafter.head, states.shape
        rows = slots.locate_rows(state.output_length + slots.positions[:count])  # [B, S] of the drafts' numbers
        uniforms = slots.draft_uniforms.flatten(0, 1)[rows, 0]
        logits = compute_logits(states, head)
        if not draft.is_conditional:
            probabilities = compute_probabilities(logits, temperature)
            drawn = draw_tokens(probabilities.flatten(0, 1), uniforms.flatten())
            return drawn.view(num_slots, count), probabilities
        shortlist, tokens, distributions = draft.build_shortlist(logits), [anchors], []
        for slot in range(count):
            of_slot = shortlist.select((slice(None), slot))
            scores = draft.condition_shortlist(of_slot, states[:, slot], tokens[-1])
            distributions.append(compute_probabilities(scores, temperature))
            drawn = draw_tokens(distributions[-1], uniforms[:, slot])
            tokens.append(of_slot.get_tokens(drawn[:, None])[:, 0])
        return stack(tokens[1:], 1), shortlist.spread(stack(distributions, 1), logits.shape[-1], 0.0)

    def _build_chain(self, tokens: Tensor, probabilities: Tensor | None = None) -> trees.DraftTree:
        """Return the trees of chains with tokens [B, M-1]; probabilities [B, M-1, V]: what they were drawn from."""
        count = len(tokens)
        parents, depths = (x.repeat(count, 1) for x in (self.chain_parents, self.chain_depths))
        numbers = depths[:, 1:] - 1
        return trees.DraftTree(numbers, tokens, parents, self.chain_mask.repeat(count, 1, 1), depths, probabilities)

    def count_state_bytes(self, slots: CacheSlots) -> int:
        features = slots.states[self.tree.num_steps + 1].features
        return slots.draft_keys.nbytes + slots.draft_values.nbytes + features.nbytes


def build_drafter(draft: LoadedDraft, embedding: Tensor, head: Tensor, tree_scoring: str) -> Drafter:
    assert isinstance(draft.module, BlockDraft)
    return BlockDrafter(draft.module, embedding, head, draft.feature_layers, tree_scoring)
