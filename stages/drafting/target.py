"""The frozen target: transformers' own class, its decoder's forward, and the hidden states a draft feeds on.

Letters: B rows, T tokens, H the target's hidden size, V its vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging


def load(
    source: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The target in evaluation mode, without gradients, its weights from safetensors only."""
    logging.disable_progress_bar()  # it prints a bar a tensor
    model = AutoModelForCausalLM.from_pretrained(
        source,
        revision=revision,
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
    )
    return model.to(device).eval().requires_grad_(False)


def default_feature_layers(num_layers: int) -> list[int]:
    """EAGLE-3's three layers, as ids of the residual stream *entering* block i: [2, n//2, n-3] (SGLang, vLLM, EAGLE)."""
    return [2, num_layers // 2, num_layers - 3]


@contextmanager
def capture(model: PreTrainedModel, layers: list[int]) -> Iterator[list[Tensor]]:
    """Inside the block, each decoder forward leaves the residual streams [B, T, H] entering `layers`, low to high."""
    caught: list[Tensor] = []

    def keep(_module, args, kwargs):
        caught.append(args[0] if args else kwargs["hidden_states"])

    blocks = model.get_decoder().layers
    handles = [blocks[i].register_forward_pre_hook(keep, with_kwargs=True) for i in sorted(layers)]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, ids: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, T] -> features [B, T, 3H] (low, mid, high) and the last hidden [B, T, H] after the final norm.

    No LM head. Rows are causal, so what pads a row's end can't reach its tokens; the caller drops those positions.
    """
    with capture(model, layers) as caught:
        last = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat(caught, dim=-1), last
