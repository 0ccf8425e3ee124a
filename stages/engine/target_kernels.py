"""A decoder's pass over a tree in few kernels, for blocks with Llama's architecture.

transformers' modules run any target one operation at a time: about 50 small kernels a block, between which a GPU mostly
waits. Most targets share one architecture: norm, projections, optional head norms, RoPE, attention, norm, gated MLP. It is
run here with the model's own weights and rotary module, and its own MLP module where that differs (experts).
`FusedDecoder.build_if_supported` compares with the model's own forward to find out whether a model has this architecture.

Letters: M tokens, H hidden, A query heads, G key-value heads, E head width, I the MLP's width, T nodes of a tree.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.engine import kernels_torch
from stages.engine.kv_cache import KVCache
from stages.target.multimodal import is_multimodal

if TYPE_CHECKING:  # transformers' model classes take seconds to import
    from transformers import PreTrainedModel

KNOWN_BLOCK_WEIGHTS = {
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight",
    "self_attn.k_norm.weight", *(f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")),
}  # fmt: skip
GATED_MLP_WEIGHTS = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
SUPPORTED_HEAD_DIMS = (16, 32, 64, 128, 256)  # of the GPU kernels


@dataclass(frozen=True)
class BlockWeights:
    """Weights of one block."""

    attention_norm: Tensor  # [H] before attention
    qkv: Tensor  # [(A + 2G) * E, H]
    bias: Tensor | None
    head_norms: tuple[Tensor, Tensor, float] | None  # of queries and keys [E], and their eps
    out: Tensor  # [H, A * E]
    mlp_norm: Tensor  # [H] before the MLP
    gate_up: Tensor | None  # [2I, H]; None: another MLP, whose module is called
    down: Tensor | None  # [H, I]
    mlp: Any


def select_kernels(device: torch.device) -> Any:
    """Return the kernels module for a device."""
    if device.type != "cuda":
        return kernels_torch
    from stages.engine import kernels_triton  # needs triton, installed with torch's CUDA builds only

    return kernels_triton


class FusedDecoder:
    """A decoder on fused kernels."""

    def __init__(self, model: "PreTrainedModel"):
        """Raise ValueError naming the first difference from the supported architecture."""
        self.decoder, self.kernels = model.get_decoder(), select_kernels(model.device)
        self.is_multimodal = is_multimodal(model)
        blocks, config = self.decoder.layers, self.decoder.config
        self.eps, self.scale = config.rms_norm_eps, blocks[0].self_attn.scaling
        self.head_dim = blocks[0].self_attn.head_dim
        if self.kernels is not kernels_torch and self.head_dim not in SUPPORTED_HEAD_DIMS:
            raise ValueError(f"heads are {self.head_dim} wide, expected one of {SUPPORTED_HEAD_DIMS}")
        self.blocks = [self._read_block(block) for block in blocks]

    @classmethod
    def build_if_supported(cls, model: "PreTrainedModel", cache: KVCache) -> "FusedDecoder | None":
        """Return the fused decoder, or None where the model's own modules must run it.

        Names of weights are checked first, then numbers: a few tokens through both, behind an empty cache.
        """
        try:
            found = cls(model)
            return found if found.matches_decoder(cache) else None
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None

    @torch.inference_mode()
    def matches_decoder(self, cache: KVCache) -> bool:
        """Return whether a chain of eight tokens has the same result as the decoder's own forward, behind an empty cache."""
        device = self.decoder.embed_tokens.weight.device
        count = 8
        rows = torch.arange(count, device=device)
        ids = (rows * 7919 + 11) % self.decoder.embed_tokens.num_embeddings
        chain = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        out = self.decoder(
            input_ids=ids[None],
            position_ids=rows[None],
            attention_mask=chain[None, None],
            past_key_values=cache.bind(rows, count),
            use_cache=True,
        )
        expected = out.last_hidden_state[0].float()
        fused, _ = self.forward(ids, rows, chain[None], rows[:1], rows, cache, [])
        difference = (fused.float() - expected).norm(dim=-1) / expected.norm(dim=-1)  # [M]
        # Half precision rounds differently in every kernel, and a router may choose another expert for a token; another
        # architecture differs in every token.
        return bool(difference.median() < (1e-4 if self.decoder.dtype == torch.float32 else 0.1))

    def _read_block(self, block: nn.Module) -> BlockWeights:
        names = {name for name, _ in block.named_parameters() if not name.startswith("mlp.")}
        if unknown := names - KNOWN_BLOCK_WEIGHTS:
            raise ValueError(f"a block has {sorted(unknown)}, unknown to this architecture")
        attention, mlp = block.self_attn, block.mlp
        gated = {name for name, _ in mlp.named_parameters()} == GATED_MLP_WEIGHTS and _is_silu(mlp.act_fn)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        norms = [getattr(attention, f"{x}_norm", None) for x in "qk"]
        if any(norm is not None and norm.weight.shape != (self.head_dim,) for norm in norms):
            raise ValueError("the query norm is not per head")
        biases = [p.bias.detach() for p in projections if p.bias is not None]
        return BlockWeights(
            attention_norm=block.input_layernorm.weight,
            qkv=fuse_linear_weights(projections),
            bias=torch.cat(biases) if biases else None,
            head_norms=_pair_norms(norms[0], norms[1], self.eps),
            out=attention.o_proj.weight,
            mlp_norm=block.post_attention_layernorm.weight,
            gate_up=fuse_linear_weights([mlp.gate_proj, mlp.up_proj]) if gated else None,
            down=mlp.down_proj.weight if gated else None,
            mlp=mlp,
        )

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        ancestor_mask: Tensor,
        length: Tensor,
        rows: Tensor,
        cache: KVCache,
        layers: list[int],
        slot_capacity: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """ids, positions, rows [M], ancestor_mask [B, N, N], length [B] -> last hidden [M, H], streams [M, H] entering `layers`.

        B prompts of N nodes each, M in all; the cache rows of prompt b start at b * slot_capacity.
        """
        k, streams = self.kernels, {}
        embeds = self.decoder.embed_tokens(ids[None])  # [1, M, H]
        rope_positions = positions.expand(3, 1, -1) if self.is_multimodal else positions[None]
        cos, sin = (x.reshape(-1, self.head_dim) for x in self.decoder.rotary_emb(embeds, rope_positions))
        first, stream, added = torch.zeros_like(ids), embeds[0], None
        for number, (block, layer) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            stream, x = k.add_rms_norm(stream, block.attention_norm, self.eps, added)
            if number in layers:
                streams[number] = stream
            q = k.rotate_and_cache(
                k.matmul(x, block.qkv, block.bias), block.head_norms, cos, sin, layer.keys[0], layer.values[0], rows
            )
            attended = k.attend_tree(
                q, layer.keys[0], layer.values[0], length, ancestor_mask, first, self.scale, slot_capacity
            )
            stream, x = k.add_rms_norm(stream, block.mlp_norm, self.eps, k.matmul(attended.flatten(1), block.out))
            if block.gate_up is not None:
                added = k.matmul(k.gated_matmul(x, block.gate_up), block.down)
            else:
                mlp_output = block.mlp(x[None])
                added = (mlp_output[0] if isinstance(mlp_output, tuple) else mlp_output)[0]  # some add router logits
        _, hidden = k.add_rms_norm(stream, self.decoder.norm.weight, self.eps, added)
        return hidden, [streams[number] for number in sorted(layers)]


def _pair_norms(query_norm: Any, key_norm: Any, eps: float) -> tuple[Tensor, Tensor, float] | None:
    return None if query_norm is None or key_norm is None else (query_norm.weight, key_norm.weight, eps)


def _is_silu(function: Any) -> bool:
    probe = torch.linspace(-4, 4, 33)
    return torch.allclose(function(probe), F.silu(probe))


def fuse_linear_weights(parts: list[nn.Linear]) -> Tensor:
    """Return the weights of linear layers of one input as one tensor, of which the layers' own weights become views."""
    whole = torch.cat([part.weight.detach() for part in parts])
    start = 0
    for part in parts:
        part.weight.data = whole[start : start + len(part.weight)]
        start += len(part.weight)
    return whole
