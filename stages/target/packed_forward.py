"""Run a target over several documents packed end to end, without padding, attention kept inside each document.

Letters: B rows, T tokens, N tokens of several documents end to end, M image tokens among them, H the target's hidden
size, V its vocabulary.
"""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from stages.target.multimodal import (
    MultimodalInputs,
    build_multimodal_inputs,
    build_pixel_kwargs,
    copy_to_device,
    is_multimodal,
)

DOCUMENT_ATTENTION = "aerie_documents"  # the name of our attention in transformers' registry
MAX_FLASH_HEAD_DIM = 256  # the widest head of the flash kernel


@torch.inference_mode()
def forward_documents(
    model: PreTrainedModel,
    ids: Tensor,
    lengths: list[int],
    packed: bool,
    inputs: MultimodalInputs | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """Return the last hidden states [N, H] after the final norm of documents end to end, ids [N]. No LM head.

    `packed`: run them as one row, attention kept inside each document (see `supports_packing`); otherwise as rows padded to
    the longest. Tapped streams (`hooks`) have the same layout; `unpad_stream` makes [N, H] of either. `inputs` are those of a
    multimodal target; without them documents have no images. `cache` keeps keys and values, and returns those of the documents.
    """
    if inputs is None and is_multimodal(model):
        documents, count = ids.cpu().split(lengths), len(lengths)
        inputs = build_multimodal_inputs(model, [f"document {n}" for n in range(count)], documents, [None] * count)
    rows = ids[None] if packed else pad_sequence(list(ids.split(lengths)), batch_first=True)  # [1, N] or [B, T]
    kwargs: dict[str, Tensor] = {} if inputs is None else build_pixel_kwargs(model, inputs)
    if packed:
        text_positions = torch.cat([torch.arange(length) for length in lengths])[None]  # [1, N], each document from 0
        positions = text_positions if inputs is None else torch.cat([text_positions, inputs.positions])[:, None]
        kwargs["position_ids"] = copy_to_device(positions, ids.device)
    elif inputs is not None:
        by_row = pad_sequence(list(inputs.positions.T.split(lengths)), batch_first=True)  # [B, T, 3]
        kwargs["position_ids"] = copy_to_device(by_row.permute(2, 0, 1).contiguous(), ids.device)
    forward = model.get_decoder() if inputs is None else model.base_model
    with _separate_documents(model, lengths) if packed else nullcontext():
        out = forward(input_ids=rows, use_cache=cache is not None, past_key_values=cache, **kwargs)
        return unpad_stream(out.last_hidden_state, lengths)


@contextmanager
def _separate_documents(model: PreTrainedModel, lengths: list[int]) -> Iterator[None]:
    """Inside the block the decoder's attention stays inside documents of these lengths; the vision tower is unchanged."""
    borders = copy_to_device(torch.tensor([0, *lengths]).cumsum(0).int(), model.device)
    flash_kwargs = {f"cu_seq_lens_{x}": borders for x in "qk"} | {f"max_length_{x}": max(lengths) for x in "qk"}
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    with decoder.register_forward_pre_hook(  # transformers passes these to every attention
        lambda _module, args, kwargs: (args, {**kwargs, **flash_kwargs}), with_kwargs=True
    ):
        decoder.config._attn_implementation = DOCUMENT_ATTENTION
        try:
            yield
        finally:
            decoder.config._attn_implementation = before


def compile_blocks(model: PreTrainedModel, tokens: int) -> None:
    """Compile the decoder's blocks with torch.compile, one compiled graph for all blocks and lengths.

    Compilation happens here, on two documents of `tokens` tokens together: the compiler specialises on the first shapes it
    sees, and every process must round alike.
    """
    torch._dynamo.config.specialize_float = True  # as in training/compile_on_cuda.py
    for block in model.get_decoder().layers:
        block.forward = torch.compile(block.forward, dynamic=True)
    ids, half = _make_text_ids(model, torch.arange(tokens)), tokens // 2
    forward_documents(model, ids, [half, tokens - half], packed=True)


def unpad_stream(stream: Tensor, lengths: list[int]) -> Tensor:
    """Return a decoder stream, [1, N, H] packed or [B, T, H] padded, as [N, H] of the documents end to end."""
    if len(stream) == 1:
        return stream[0]
    return torch.cat([row[:length] for row, length in zip(stream, lengths, strict=True)])


def supports_packing(model: PreTrainedModel) -> bool:
    """Return whether this model's classes keep packed documents apart, by comparing two documents alone and packed.

    Most classes take our attention. Those with state beside attention (linear attention), or an attention of their own,
    fail the comparison and are padded.
    """
    ids = _make_text_ids(model, torch.arange(24) * 7919 + 11)
    try:
        together = forward_documents(model, ids, [11, 13], packed=True)
        alone = [forward_documents(model, document, [len(document)], packed=False) for document in ids.split([11, 13])]
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        warnings.warn(f"packed documents: {type(error).__name__}: {error}", stacklevel=2)
        return False
    difference = (together - torch.cat(alone)).float().norm(dim=-1) / torch.cat(alone).float().norm(dim=-1)  # [24]
    # Half precision rounds differently in every kernel, and a router may flip for a token; attention across documents
    # changes all tokens of the second by far more. A token without an embedding (padding) has 0 of 0.
    return bool(difference[11:].nanmedian() < (1e-3 if model.dtype == torch.float32 else 0.1))


def _make_text_ids(model: PreTrainedModel, numbers: Tensor) -> Tensor:
    """Return numbers [N] as token ids on the model's device, without image tokens."""
    ids = numbers % model.get_input_embeddings().num_embeddings
    if is_multimodal(model):
        ids[ids == model.config.image_token_id] = 0
    return ids.to(model.device)


def _attend_documents(
    module: Any,
    query: Tensor,  # [1, heads, N, D]
    key: Tensor,  # [1, key-value heads, N, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention [1, N, heads, D] inside each document; transformers calls it as an attention interface."""
    unknown = sorted(name for name in ("s_aux", "softcap", "position_bias") if others.get(name) is not None)
    if attention_mask is not None:  # transformers makes none for our attention, so the class has one of its own
        unknown.append("a mask of the class's own")
    if sliding_window is None and _is_windowed(module):
        unknown.append("a window that the class gives to its mask alone")
    if cu_seq_lens_q is None or max_length_q is None or unknown:
        raise NotImplementedError(f"attention with {unknown or 'no document borders'}")
    if (
        query.is_cuda
        and query.element_size() == 2
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= MAX_FLASH_HEAD_DIM
    ):
        heads_last = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, heads, D] each
        out = torch.ops.aten._flash_attention_forward(
            *heads_last, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, 0.0, True, False, scale=scaling,
            window_size_left=None if sliding_window is None else sliding_window - 1,
        )[0]  # fmt: skip
        return out[None], None
    return _attend_per_document(query, key, value, scaling, sliding_window, cu_seq_lens_q)[None], None


def _is_windowed(module: Any) -> bool:
    """Return whether the config says that this attention sees a window, or a chunk, of the tokens before it."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return kinds[module.layer_idx] in ("sliding_attention", "chunked_attention")
    return getattr(config, "sliding_window", None) is not None


@torch.compiler.disable  # it would recompile for every number of documents
def _attend_per_document(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, borders: Tensor
) -> Tensor:
    """Return causal attention [N, heads, D] with one call per document, where no kernel takes borders (CPU, float32)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.empty_like(query)
    for first, end in itertools.pairwise(borders.tolist()):
        q, k, v = (t[:, :, first:end] for t in (query, key, value))
        mask = None
        if window is not None and window < end - first:
            distance = torch.arange(end - first, device=query.device)
            distance = distance[:, None] - distance  # [T, T]
            mask = (distance >= 0) & (distance < window)
        out[:, :, first:end] = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
        )
    return out[0].transpose(0, 1)


AttentionInterface.register(DOCUMENT_ATTENTION, _attend_documents)
