"""A decoder's pass over a tree in few kernels, where its blocks are built as Llama's are.

transformers' own modules run any target, an operation at a time: some 50 small kernels a block, in which a GPU waits more
than it reads. Most targets are of one build, though: norm, projections, norms of heads or none, rotation, attention, norm,
gated MLP. Here that build is run from the model's own weights, its own rotary module and its own MLP where that is another
(experts). Whether a model is of it is asked of the model itself: `FusedDecoder.of` compares with its own forward.

Letters: M tokens, H hidden, A query heads, G key-value heads, E head width, I the MLP's width, T nodes of a tree.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from stages.engine import kernels_torch
from stages.engine.kv_cache import KVCache
from stages.target.multimodal import is_multimodal

KNOWN_BLOCK_WEIGHTS = {
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight",
    "self_attn.k_norm.weight", *(f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")),
}  # fmt: skip
GATED_MLP_WEIGHTS = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
SUPPORTED_HEAD_DIMS = (16, 32, 64, 128, 256)  # of heads, that GPU kernels take


@dataclass(frozen=True)
class BlockWeights:
    """One block's weights."""

    before: Tensor  # [H] the norm before attention
    qkv: Tensor  # [(A + 2G) * E, H]
    bias: Tensor | None
    norms: tuple[Tensor, Tensor, float] | None  # of queries and keys [E], and their eps
    out: Tensor  # [H, A * E]
    after: Tensor  # [H] the norm after attention
    gate_up: Tensor | None  # [2I, H]; None: an MLP of another build, called as it is
    down: Tensor | None  # [H, I]
    mlp: Any


def select_kernels(device: torch.device) -> Any:
    """What does the work between the products there."""
    if device.type != "cuda":
        return kernels_torch
    from stages.engine import kernels_triton  # needs triton, which torch brings for GPUs only

    return kernels_triton


class FusedDecoder:
    """A decoder of that build."""

    def __init__(self, model: PreTrainedModel):
        """Raises ValueError naming what is not of the build."""
        self.decoder, self.kernels, self.axes = model.get_decoder(), select_kernels(model.device), is_multimodal(model)
        blocks, config = self.decoder.layers, self.decoder.config
        self.eps, self.scale = config.rms_norm_eps, blocks[0].self_attn.scaling
        self.width = blocks[0].self_attn.head_dim
        if self.kernels is not kernels_torch and self.width not in SUPPORTED_HEAD_DIMS:
            raise ValueError(f"heads are {self.width} wide, of {SUPPORTED_HEAD_DIMS} the kernels know")
        self.blocks = [self._block(block) for block in blocks]

    @classmethod
    def of(cls, model: PreTrainedModel, store: KVCache) -> "FusedDecoder | None":
        """The model's blocks, if they are of this build; None where its own modules must run it.

        Asked by names first, then by numbers: a few tokens through both, behind an empty cache.
        """
        try:
            found = cls(model)
            return found if found.agrees(store) else None
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None

    @torch.inference_mode()
    def agrees(self, store: KVCache) -> bool:
        """Whether a chain of eight tokens comes out as the decoder's own forward has it, behind an empty cache."""
        device = self.decoder.embed_tokens.weight.device
        count = 8
        places = torch.arange(count, device=device)
        ids = (places * 7919 + 11) % self.decoder.embed_tokens.num_embeddings
        chain = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        theirs = self.decoder(
            input_ids=ids[None], position_ids=places[None], attention_mask=chain[None, None],
            past_key_values=store.cache(places, count), use_cache=True,
        ).last_hidden_state[0].float()  # fmt: skip
        mine, _ = self.forward(ids, places, chain[None], places[:1], places, store, [])
        difference = (mine.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # [M]
        # Halves round differently in every kernel, and a router may flip for a token; another build differs in all of them.
        return bool(difference.median() < (1e-4 if self.decoder.dtype == torch.float32 else 0.1))

    def _block(self, block: nn.Module) -> BlockWeights:
        names = {name for name, _ in block.named_parameters() if not name.startswith("mlp.")}
        if unknown := names - KNOWN_BLOCK_WEIGHTS:
            raise ValueError(f"a block has {sorted(unknown)}, which this build has not")
        attention, mlp = block.self_attn, block.mlp
        gated = {name for name, _ in mlp.named_parameters()} == GATED_MLP_WEIGHTS and _is_silu(mlp.act_fn)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        norms = [getattr(attention, f"{x}_norm", None) for x in "qk"]
        if any(norm is not None and norm.weight.shape != (self.width,) for norm in norms):
            raise ValueError("queries are not normed head by head")
        biases = [p.bias.detach() for p in projections if p.bias is not None]
        return BlockWeights(
            block.input_layernorm.weight, fuse_linear_weights(projections), torch.cat(biases) if biases else None,
            (norms[0].weight, norms[1].weight, self.eps) if norms[0] is not None and norms[1] is not None else None,
            attention.o_proj.weight, block.post_attention_layernorm.weight,
            fuse_linear_weights([mlp.gate_proj, mlp.up_proj]) if gated else None, mlp.down_proj.weight if gated else None, mlp,
        )  # fmt: skip

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        tree: Tensor,
        length: Tensor,
        rows: Tensor,
        store: KVCache,
        layers: list[int],
        each: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """ids, positions, rows [M], tree [B, N, N], length [B] -> last hidden [M, H], the streams [M, H] entering `layers`.

        B prompts of N nodes each, M in all; prompt b's rows of the store begin at b * each.
        """
        k, streams = self.kernels, {}
        embeds = self.decoder.embed_tokens(ids[None])  # [1, M, H]
        turns = positions.expand(3, 1, -1) if self.axes else positions[None]
        cos, sin = (x.reshape(-1, self.width) for x in self.decoder.rotary_emb(embeds, turns))
        first, stream, more = torch.zeros_like(ids), embeds[0], None
        for number, (block, layer) in enumerate(zip(self.blocks, store.layers, strict=True)):
            stream, x = k.add_rms_norm(stream, block.before, self.eps, more)
            if number in layers:
                streams[number] = stream
            q = k.rotate_and_cache(
                k.matmul(x, block.qkv, block.bias), block.norms, cos, sin, layer.keys[0], layer.values[0], rows
            )
            attended = k.attend_tree(q, layer.keys[0], layer.values[0], length, tree, first, self.scale, each)
            stream, x = k.add_rms_norm(stream, block.after, self.eps, k.matmul(attended.flatten(1), block.out))
            if block.gate_up is not None:
                more = k.matmul(k.gated_matmul(x, block.gate_up), block.down)
            else:
                more = block.mlp(x[None])
                more = (more[0] if isinstance(more, tuple) else more)[0]  # with a router's logits, of some
        _, hidden = k.add_rms_norm(stream, self.decoder.norm.weight, self.eps, more)
        return hidden, [streams[number] for number in sorted(layers)]


def _is_silu(function: Any) -> bool:
    probe = torch.linspace(-4, 4, 33)
    return torch.allclose(function(probe), F.silu(probe))


def fuse_linear_weights(parts: list[nn.Linear]) -> Tensor:
    """The weights of products of one input, as one; the parts become views of it, so that there is one copy of them."""
    whole = torch.cat([part.weight.detach() for part in parts])
    at = 0
    for part in parts:
        part.weight.data = whole[at : at + len(part.weight)]
        at += len(part.weight)
    return whole
