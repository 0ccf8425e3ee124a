"""Block drafts: one forward of a small transformer proposes a whole block from the target's features.

DFlash, https://arxiv.org/abs/2602.06036 (z-lab/dflash), DFlash2 (speculators, models/dflash2) and DSpark (deepseek-ai/DeepSpec):
the same layers with another label of each slot and other heads. Tensor names and shapes as SGLang's `DFlashDraftModel`,
`DFlash2DraftModel` and `Qwen3DSparkModel` and vLLM load them.

A block starts at an **anchor**, the last verified token, at position a. Its rows are the target's embedding of the anchor and
of the mask token; slot i has rotary position a + i. Positions count tokens, those of images too, on one axis, also of a target
whose own have three (mrope): engines give block drafts no others. Per layer:

    c   = hidden_norm(fc(features))                                       once per context token, for all layers
    x   = input_layernorm(h)                                              block rows only
    q   = q_norm(q_proj x)    k_b = k_norm(k_proj x)    v_b = v_proj x
    k_c = k_norm(k_proj c)    v_c = v_proj c                              the same weights
    h  += o_proj(attention(q, [k_c; k_b], [v_c; v_b]))     h += mlp(post_attention_layernorm(h))

A slot sees the context before its anchor, strictly, since the anchor's own features do not exist while drafting, and all slots
of its own block, later ones too. Two blocks of 3 slots, anchors 2 and 4 of one document:

                  context 0 1 2 3 4 5    block of 2    block of 4
    anchor 2:             1 1 . . . .      1 1 1         . . .       three rows alike
    anchor 4:             1 1 1 1 . .      . . .         1 1 1       three rows alike

A layer with a sliding window of W sees of these the last W positions up to the slot's own, and a causal layer no later slot.
Engines take sliding layers as causal and others as not, unless is_causal says one for all. Anchor 4 with a window of 3, causal:

    slot 0 at 4:          . . 1 1 . .      . . .         1 . .
    slot 1 at 5:          . . . 1 . .      . . .         1 1 .
    slot 2 at 6:          . . . . . .      . . .         1 1 1

Layouts, which differ in the labels alone. Draft d (from 0) is always the token at a + 1 + d:

    dflash   fill-in: slot i predicts its own position a + i; slot 0 predicts nothing, so a block of B slots drafts B - 1
    dflash2  the same
    dspark   sample from anchor: slot i predicts a + i + 1, so a block of B slots drafts B

Heads: all read the target's lm_head. DSpark adds a Markov head, bias w2 w1[previous token] on the logits, and a confidence
head, which estimates the probability that a draft is accepted given that its predecessors were. DFlash2 adds a candidate
selector, which scores the most probable tokens of a slot by the draft before it, and convolutions along the slots of a block:

    u = the normed input of a sublayer      k_side = base_side + kernel_projection(u)_side        side 0, 1: before and after it
    out[slot, c] = sum over taps t of k[slot, t, c // group] in[slot - t, c], nothing before slot 0
    h += conv_1(sublayer(conv_0(u)))                                                              context rows have none

Context keys and values depend on target features alone, never on an earlier block; so they are computed once (`BlockContext`).

Dimensions: N requests, S context tokens, R anchors, B slots of a block, D drafts of a block, L layers, K feature layers,
H hidden, V vocabulary, A attention heads, G key-value heads, E head width, r rank of the Markov head or selector, C candidates.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftAttention, DraftLayer, RMSNorm
from stages.draft.rotary import RotaryModule
from stages.families.block.config import EVERYTHING, BlockDraftConfig, Sight
from stages.params.tree_shape import TreeShape
from stages.trees.draft_tree import check_tree

# Attention of block rows: queries [N, Q, A, E], keys and values [N, S + Q, G, E] -> [N, Q, A, E].
BlockAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


class BlockContext(NamedTuple):
    """Normed and rotated keys and values of context tokens, by layer."""

    keys: tuple[Tensor, ...]  # L tensors [N, S, G, E]
    values: tuple[Tensor, ...]

    def write(self, new: "BlockContext", positions: Tensor) -> None:
        """Write the tokens of `new` [N, J] in place at positions [N, J]: after a cycle, the anchor and its accepted drafts.

        Rows beyond the accepted drafts may be written too, since a later cycle overwrites them before it sees them.
        """
        request = torch.arange(len(positions), device=positions.device)[:, None]
        for cached, written in zip((*self.keys, *self.values), (*new.keys, *new.values), strict=True):
            cached[request, positions] = written


class BlockLayer(DraftLayer):
    """One Qwen3 layer."""

    def __init__(self, c: BlockDraftConfig):
        super().__init__(c, c.hidden_size, qk_norm=True, norms=("input_layernorm",))
        self.attention_conv, self.mlp_conv = (BlockConvolution(c) if c.conv_kernel_size else None for _ in range(2))

    def prepare_attention(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [N, Q, A, E], keys and values [N, S + Q, G, E] of block rows [N, Q, H] after the context's."""
        x = self.input_layernorm(hidden)
        if self.attention_conv is not None:
            x = self.attention_conv(x, x, 0)
        own_k, own_v = self.self_attn.compute_keys_values(x, rope)
        query = self.self_attn.compute_queries(x, rope)
        return query, torch.cat([keys, own_k], 1), torch.cat([values, own_v], 1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [N, Q, H] from its input and attended [N, Q, A, E]."""
        if self.attention_conv is None or self.mlp_conv is None:
            return super().finish(hidden, attended)
        out = self.self_attn.o_proj(attended.flatten(-2))
        hidden = hidden + self.attention_conv(out, self.input_layernorm(hidden), 1)
        x = self.post_attention_layernorm(hidden)
        return hidden + self.mlp_conv(self.mlp(self.mlp_conv(x, x, 0)), x, 1)


class BlockConvolution(nn.Module):
    """DFlash2's convolution along the slots of a block, before and after a sublayer."""

    def __init__(self, c: BlockDraftConfig):
        super().__init__()
        self.block_size, self.group_size = c.block_size, c.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, c.conv_kernel_size, c.hidden_size))  # [side, tap, H]
        self.base_kernel.data[:, 0] = 1  # a slot's own row: the convolution changes nothing
        groups = c.hidden_size // c.conv_group_size
        self.kernel_projection = nn.Linear(c.hidden_size, 2 * c.conv_kernel_size * groups, bias=False)

    def forward(self, inputs: Tensor, sublayer_input: Tensor, side: int) -> Tensor:
        """Return inputs [N, Q, H], whole blocks of rows, mixed by the kernels that the normed sublayer input [N, Q, H] gives."""
        base = self.base_kernel[side]  # [taps, H]
        projection = self.kernel_projection.weight.unflatten(0, (2, -1))[side]
        dynamic = nn.functional.linear(sublayer_input, projection)  # [N, Q, taps * groups]
        dynamic = dynamic.unflatten(-1, (len(base), -1))
        kernels = base + dynamic.repeat_interleave(self.group_size, -1)  # [N, Q, taps, H]
        blocks = inputs.unflatten(1, (-1, self.block_size))
        mixed = torch.zeros_like(inputs)
        for tap, kernel in enumerate(kernels.unbind(2)):
            shifted = nn.functional.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size]
            mixed = mixed + kernel * shifted.flatten(1, 2)
        return mixed


class LayerParts(NamedTuple):
    """How the parts of a layer around its attention are run: training on a GPU compiles them."""

    project_context: Callable[..., tuple[Tensor, Tensor]] = DraftAttention.compute_keys_values
    prepare_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = BlockLayer.prepare_attention
    finish: Callable[..., Tensor] = BlockLayer.finish


PLAIN_PARTS = LayerParts()


class MarkovHead(nn.Module):
    """DSpark's vanilla Markov head: a bias of rank r on the logits, from the token before."""

    def __init__(self, c: BlockDraftConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = nn.Linear(c.markov_rank, c.vocab_size, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """Return the bias [..., V] after the tokens `previous` [...]."""
        return self.markov_w2(self.markov_w1(previous))


class CandidateSelector(nn.Module):
    """DFlash2's selector: the best candidates of a slot by its own logits, scored again by the token before."""

    def __init__(self, c: BlockDraftConfig):
        super().__init__()
        self.top_k = c.selector_top_k
        self.predecessor_codebook, self.successor_codebook = (
            nn.Parameter(torch.randn(c.vocab_size, c.selector_rank)) for _ in range(2)
        )
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)

    def list_candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best C of a slot's own logits [..., V] and their ids, by ascending id, as ties are broken."""
        candidates = logits.topk(self.top_k, dim=-1).indices.sort(dim=-1).values  # [..., C]
        return logits.gather(-1, candidates), candidates

    def score_candidates(self, logits: Tensor, candidates: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """Return the conditioned logits of candidates from their `logits`, both [..., C], after the tokens `previous` [...]."""
        context = self.predecessor_codebook[previous] * self.hidden_projection(states)  # [..., r]
        return logits + (context[..., None, :] * self.successor_codebook[candidates]).sum(-1)


class Shortlist(NamedTuple):
    """The choice of slots' drafts: the whole vocabulary, or a selector's candidates."""

    logits: Tensor  # [..., V] of the slots' own, or [..., C] of a selector's candidates
    ids: Tensor | None  # [..., C] of the candidates, ascending; None: the whole vocabulary

    def select(self, index: Any) -> "Shortlist":
        """Return the part at an index of the dimensions before the last."""
        return Shortlist(self.logits[index], None if self.ids is None else self.ids[index])

    def get_tokens(self, indices: Tensor) -> Tensor:
        """Return the tokens at indices [..., K] of the shortlist, whose dimensions may broadcast."""
        return indices if self.ids is None else self.ids.expand(*indices.shape[:-1], -1).gather(-1, indices)

    def spread(self, values: Tensor, vocab_size: int, fill_value: float) -> Tensor:
        """Scatter values [..., V] or [..., C] of the shortlist to [..., V]; tokens that are not in it get `fill_value`."""
        if self.ids is None:
            return values
        full = values.new_full((*values.shape[:-1], vocab_size), fill_value)
        return full.scatter(-1, self.ids.expand(values.shape), values)


class ConfidenceHead(nn.Module):
    """A linear estimate of the acceptance of a draft."""

    def __init__(self, c: BlockDraftConfig):
        super().__init__()
        size = c.hidden_size + (c.markov_rank if c.confidence_head_with_markov else 0)
        self.proj = nn.Linear(size, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [...] of inputs [..., H] or [..., H + r]."""
        return self.proj(inputs)[..., 0]


class BlockDraft(RotaryModule):
    """Weights and operations of a block draft. Callers pass in the target's embedding and head."""

    def __init__(self, config: BlockDraftConfig):
        super().__init__()
        config.check()
        self.config = c = config
        self.fc = nn.Linear(len(c.feature_layers) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = MarkovHead(c) if c.markov_rank else None
        self.confidence_head = ConfidenceHead(c) if c.confidence_head else None
        self.candidate_selector = CandidateSelector(c) if c.selector_rank else None
        self.register_rope(c.rope, c.head_dim)

    def compute_rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., 1, E/2] for positions [...], in the weights' dtype; angles are float32."""
        return self.compute_cos_sin(positions[..., None], self.fc.weight.dtype)

    def project_context(self, features: Tensor, positions: Tensor, parts: LayerParts = PLAIN_PARTS) -> BlockContext:
        """Return keys and values of context tokens from features [N, S, K*H] and positions [N, S] in their documents."""
        context, rope = self.hidden_norm(self.fc(features)), self.compute_rope(positions)
        pairs = [parts.project_context(layer.self_attn, context, rope) for layer in self.layers]
        keys, values = zip(*pairs, strict=True)
        return BlockContext(keys, values)

    def forward_blocks(
        self,
        embedding: Tensor,  # [V, H] the target's
        anchor_tokens: Tensor,  # [N, R]
        anchor_positions: Tensor,  # [N, R] in their documents
        context: BlockContext,
        attentions: Sequence[BlockAttention],  # of each layer, over [S context rows | R * B block rows]
        parts: LayerParts = PLAIN_PARTS,
    ) -> Tensor:
        """Return the hidden states [N, R, B, H] of R blocks of each of N requests, after the final norm."""
        size = self.config.block_size
        is_anchor = torch.arange(size, device=anchor_tokens.device) == 0
        ids = torch.where(is_anchor, anchor_tokens[..., None], self.config.mask_token_id)  # [N, R, B]
        positions = anchor_positions[..., None] + torch.arange(size, device=anchor_tokens.device)
        hidden, rope = embedding[ids.flatten(1)], self.compute_rope(positions.flatten(1))
        for layer, attend, keys, values in zip(self.layers, attentions, *context, strict=True):
            attended = attend(*parts.prepare_attention(layer, hidden, rope, keys, values))
            hidden = parts.finish(layer, hidden, attended)
        return self.norm(hidden).unflatten(1, (-1, size))

    def forward_pack(
        self,
        embedding: Tensor,  # [V, H]
        ids: Tensor,  # [S] of packed documents
        positions: Tensor,  # [S] in their documents
        documents: Tensor,  # [S]
        anchors: Tensor,  # [R] indices into the pack
        context: BlockContext,  # of the pack, N = 1
        attentions: Sequence[BlockAttention] | None = None,  # of each layer; default: dense masks
        parts: LayerParts = PLAIN_PARTS,
    ) -> Tensor:
        """Return the hidden states [R, B, H] of the blocks at anchors of packed documents: training and replay.

        Blocks do not see each other, so anchors may be split into chunks at will.
        """
        if attentions is None:
            size = self.config.block_size
            attentions = build_attentions(
                self.config,
                lambda sight: build_dense_attention(build_block_mask(anchors, documents, size, sight)[None]),
            )
        rows = ids[anchors][None], positions[anchors][None]
        return self.forward_blocks(embedding, *rows, context, attentions, parts)[0]

    def forward_cached(
        self, embedding: Tensor, anchor_tokens: Tensor, lengths: Tensor, context: BlockContext
    ) -> Tensor:
        """Return the hidden states [N, B, H] of one block a request: decoding.

        The anchor [N] of a request stands at position lengths [N], the number of its verified tokens; `context` holds the keys
        and values of these, and anything after.
        """
        slots = torch.arange(self.config.block_size, device=lengths.device)
        position = (lengths[:, None] + slots)[..., None]  # [N, B, 1] of each slot
        index = torch.arange(context.keys[0].shape[1], device=lengths.device)  # [T]

        def build(sight: Sight) -> BlockAttention:
            in_context = (index < lengths[:, None, None]) & is_seen(position, index, sight)  # [N, B, T]
            return build_dense_attention(torch.cat([in_context, is_seen(position, position.mT, sight)], -1))

        attentions = build_attentions(self.config, build)
        return self.forward_blocks(embedding, anchor_tokens[:, None], lengths[:, None], context, attentions)[:, 0]

    def check_tree(self, tree: TreeShape) -> None:
        """Raise ValueError for a tree that can't be built from its blocks."""
        c = self.config
        check_tree(tree, c.vocab_size)
        if c.selector_top_k and tree.topk > c.selector_top_k:
            raise ValueError(
                f"{tree.name}: topk is {tree.topk}, expected at most {c.selector_top_k}, the candidates of the draft's selector "
                "(selector_top_k); lower topk"
            )
        if tree.num_steps > c.num_drafts:
            raise ValueError(
                f"{tree.name}: num_steps is {tree.num_steps}, expected at most {c.num_drafts}, the drafts of a block; lower "
                "num_steps, or train a wider block"
            )

    def select_drafting_slots(self, hidden: Tensor) -> Tensor:
        """Return the states [..., D, H] that predict drafts, of a block's hidden states [..., B, H]."""
        return hidden[..., self.config.family.first_slot :, :]

    @property
    def is_conditional(self) -> bool:
        """Return whether a draft depends on the one before: with a Markov head or a candidate selector."""
        return self.markov_head is not None or self.candidate_selector is not None

    def compute_logits(self, states: Tensor, previous: Tensor, head: Tensor) -> Tensor:
        """Return logits [..., V] of drafting states [..., H], each after the token `previous` [...]; head [V, H]."""
        shortlist = self.build_shortlist(compute_logits(states, head))
        return shortlist.spread(self.condition_shortlist(shortlist, states, previous), len(head), -torch.inf)

    def build_shortlist(self, logits: Tensor) -> Shortlist:
        """Return a slot's candidate tokens by its own logits [..., V]: the selector's, or the whole vocabulary."""
        selector = self.candidate_selector
        return Shortlist(logits, None) if selector is None else Shortlist(*selector.list_candidates(logits))

    def condition_shortlist(self, shortlist: Shortlist, states: Tensor, previous: Tensor) -> Tensor:
        """Return the shortlist's logits after the tokens `previous` [...], by the Markov head or the selector.

        `previous` and `states` may broadcast.
        """
        if shortlist.ids is not None and self.candidate_selector is not None:
            return self.candidate_selector.score_candidates(shortlist.logits, shortlist.ids, states, previous)
        return shortlist.logits if self.markov_head is None else shortlist.logits + self.markov_head(previous)

    def draft_greedily(self, states: Tensor, anchor_tokens: Tensor, head: Tensor) -> Tensor:
        """Return the most probable drafts [..., D] of drafting states [..., D, H]; slot by slot where they are conditional."""
        logits = compute_logits(states, head)  # of all slots at once: the head is the largest matrix
        if not self.is_conditional:
            return logits.argmax(-1)
        shortlist, drafts = self.build_shortlist(logits), [anchor_tokens]
        for slot in range(states.shape[-2]):
            slot_shortlist = shortlist.select((..., slot, slice(None)))
            best = self.condition_shortlist(slot_shortlist, states[..., slot, :], drafts[-1]).argmax(-1, keepdim=True)
            drafts.append(slot_shortlist.get_tokens(best)[..., 0])
        return torch.stack(drafts[1:], -1)


def compute_logits(states: Tensor, head: Tensor) -> Tensor:
    """Return the logits [..., V] of states [..., H] by one product: of a view torch may make one for each of the first axis, and
    each of them reads the head.
    """
    return (states.flatten(0, -2) @ head.T).unflatten(0, states.shape[:-1])


def build_block_mask(anchors: Tensor, documents: Tensor, block_size: int, sight: Sight = EVERYTHING) -> Tensor:
    """Return the mask [R*B, S + R*B] bool drawn above, of anchors [R] into packed documents [S]."""
    index = torch.arange(len(documents), device=documents.device)
    context = (index < anchors[:, None]) & (documents == documents[anchors, None])  # [R, S]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device).repeat_interleave(block_size, 1)  # [R, R*B]
    mask = torch.cat([context, own], 1).repeat_interleave(block_size, 0)
    positions = (anchors[:, None] + torch.arange(block_size, device=anchors.device)).flatten()  # [R*B] in the pack
    return mask & is_seen(positions[:, None], torch.cat([index, positions]), sight)


def is_seen(query: Tensor, key: Tensor, sight: Sight) -> Tensor:
    """Return whether a slot at position `query` sees position `key`, where the mask of a full layer lets it; bool, broadcast."""
    seen = torch.ones_like(query - key, dtype=torch.bool)
    if sight.window is not None:
        seen = seen & (key > query - sight.window)
    return seen & (key <= query) if sight.is_causal else seen


def build_attentions(c: BlockDraftConfig, build: Callable[[Sight], BlockAttention]) -> list[BlockAttention]:
    """Return the attention of each layer; layers that see the same share theirs."""
    built = {sight: build(sight) for sight in dict.fromkeys(c.layer_sights)}
    return [built[sight] for sight in c.layer_sights]


def build_dense_attention(mask: Tensor) -> BlockAttention:
    """Return attention with a mask [N, Q, S + Q] bool; grouped heads share keys without copies."""

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        by_head = (x.transpose(1, 2) for x in (query, keys, values))
        out = nn.functional.scaled_dot_product_attention(*by_head, attn_mask=mask[:, None], enable_gqa=True)
        return out.transpose(1, 2)

    return attend
