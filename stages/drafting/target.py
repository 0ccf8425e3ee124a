"""The frozen target: transformers' own class, its decoder's forward, and the hidden states a draft feeds on.

One path for every class that transformers' Auto classes know: dense, mixture of experts, and vision-language. All we ask
of a class is a decoder with a list of `layers`, which is what we hook. A target that sees is entered where it takes
pixels: it puts pictures' embeddings in their tokens' place and, in Qwen3-VL, adds to the first streams (deepstack); its
own `get_rope_index` says where on three axes each token lies.

Letters: B rows, T tokens, N tokens of several documents end to end, M of them that stand for pieces of pictures, H the
target's hidden size, V its vocabulary.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

import stages.drafting.first_calls  # noqa: F401 - its import is its use
from stages.drafting.mrope import axes

DOCUMENTS = "aerie_documents"  # the name of our attention in transformers' registry
FLASH_HEADS = 256  # the widest head of the flash kernel


def load(
    source: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The target in evaluation mode, without gradients, its weights from safetensors only.

    Raises:
        ValueError: naming the source, where its config or its weights are missing, cut or broken.
    """
    logging.disable_progress_bar()  # it prints a bar a tensor
    pinned: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **pinned)
        model = auto_class(config).from_pretrained(
            source, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True, **pinned
        )
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{source}: expected the target's config.json and safetensors, found none that can be read "
            f"({type(error).__name__}: {str(error)[:300]}); get the target's files again, those of a builtin target by: "
            "dvc repro -f -s prepare_target"
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    for weight in model.parameters():
        # On the CPU they lie in the mapped file, anywhere, and sums then round otherwise in one process of ten (docs/LOG.md).
        if weight.data_ptr() % 64:
            weight.data = weight.data.clone()
    return model


def auto_class(config: PretrainedConfig) -> Any:
    """Which of transformers' Auto classes makes this model: a vision-language config names no causal language model."""
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees and hasattr(config, "vision_config") else AutoModelForCausalLM


def default_feature_layers(num_layers: int) -> list[int]:
    """EAGLE-3's three layers, as ids of the residual stream *entering* block i: [2, n//2, n-3] (SGLang, vLLM, EAGLE)."""
    return [2, num_layers // 2, num_layers - 3]


def facts(whole: PretrainedConfig) -> dict[str, Any]:
    """The shapes in a config that a draft depends on, under the manifest's names, whatever the class calls them.

    A vision-language config keeps them in its text config, except for those it only has outside. Raises ValueError
    naming the key, where a config has none of the names we know for it.
    """
    config = whole.get_text_config()
    heads, hidden = _needed(config, "num_attention_heads"), _needed(config, "hidden_size")
    turning = rope(config)
    if "mrope_section" in turning:
        turning["mrope_interleaved"] = interleaved(config)
    return {
        "hidden_size": hidden,
        "intermediate_size": _needed(config, "intermediate_size", "moe_intermediate_size"),
        "num_layers": _needed(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": _first(config, "num_key_value_heads") or heads,
        "head_dim": _first(config, "head_dim") or hidden // heads,  # absent or null in half of the classes
        "vocab_size": _needed(config, "vocab_size"),
        "rms_norm_eps": _needed(config, "rms_norm_eps"),
        "rope": turning,
        "max_position_embeddings": _needed(config, "max_position_embeddings"),
        "tie_word_embeddings": tied(whole),
    }


def tied(whole: PretrainedConfig) -> bool:
    """Whether embedding and head are one table. transformers reads the outer config, and its text config where that is silent."""
    outer = _first(whole, "tie_word_embeddings")
    return bool(outer if outer is not None else _first(whole.get_text_config(), "tie_word_embeddings"))


def rope(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary embedding's parameters in transformers 5's spelling, from either spelling.

    Older configs, and those of remote code, say `rope_theta` and `rope_scaling` (whose kind is `rope_type` or `type`).
    """
    found = dict(_first(config, "rope_parameters") or {})
    if "rope_theta" not in found:
        found = {**(_first(config, "rope_scaling") or {}), **found}
        found["rope_theta"] = _first(config, "rope_theta") or 10_000.0
    kind = found.pop("type", "default")
    found.setdefault("rope_type", kind)
    if found["rope_type"] == "mrope":  # Qwen2-VL's name for the default with mrope_section
        found["rope_type"] = "default"
    return found


def interleaved(config: PretrainedConfig) -> bool:
    """Whether this class deals its frequencies to the three axes in turns (see `mrope`), which few configs say.

    Asked of its own rotary module: moved on one axis alone, which frequencies turn? Raises ValueError for a third way.
    """
    with torch.device("meta"):
        module = type(AutoModel.from_config(config).rotary_emb)
    moved = torch.eye(3, dtype=torch.int64)[:, None]  # [3, 1, 3]: the n-th token moved on axis n
    _, sin = module(config)(torch.empty(1, dtype=torch.float32), moved)  # [1, 3, E], its halves alike
    found = sin[0, :, : sin.shape[-1] // 2].argmax(0)  # [E / 2]
    for way in (False, True):
        if torch.equal(found, axes({**rope(config), "mrope_interleaved": way}, sin.shape[-1])):
            return way
    raise ValueError(
        f"the target's {module.__name__} deals frequencies to the axes as {found.tolist()}, expected mrope_section "
        f"{rope(config)['mrope_section']} chunked or interleaved; such a model can't be a target yet"
    )


def _first(config: Any, *names: str) -> Any:
    """The first of these keys that the config has and that is not null."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _needed(config: Any, *names: str) -> Any:
    found = _first(config, *names)
    if found is None:
        raise ValueError(
            f"the target's config ({type(config).__name__}) has no {' or '.join(names)}; such a model can't be a target yet"
        )
    return found


@contextmanager
def tapped(model: PreTrainedModel, layers: list[int], keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the block, each decoder forward calls keep(k, stream) with the residual stream entering the k-th of `layers`.

    That is taken where the block before is left, as `hidden_states[i]` of transformers and as SGLang 0.5.17 captures it.
    Only deepstack tells the two apart: what Qwen3-VL adds to pictures' tokens between block i - 1 and block i is not in,
    what it added before is.
    """
    blocks = model.get_decoder().layers

    def entering(k: int) -> Callable:
        return lambda _module, args, kwargs: keep(k, args[0] if args else kwargs["hidden_states"])

    def leaving(k: int) -> Callable:
        return lambda _module, _args, out: keep(k, out[0] if isinstance(out, tuple) else out)

    handles = [
        blocks[i - 1].register_forward_hook(leaving(k)) if i
        else blocks[0].register_forward_pre_hook(entering(k), with_kwargs=True)
        for k, i in enumerate(sorted(layers))
    ]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capture(model: PreTrainedModel, layers: list[int]) -> Iterator[list[Tensor]]:
    """Inside the block, each decoder forward leaves the residual streams [B, T, H] entering `layers`, low to high."""
    caught: list[Tensor] = []
    with tapped(model, layers, lambda _, stream: caught.append(stream)):
        yield caught


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, ids: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, T] -> features [B, T, 3H] (low, mid, high) and the last hidden [B, T, H] after the final norm.

    No LM head. Rows are causal, so what pads a row's end can't reach its tokens; the caller drops those positions.
    """
    with capture(model, layers) as caught:
        last = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat(caught, dim=-1), last


# What a target that sees is given beside tokens


class Pictures(Protocol):
    """Of one document, in the order of its tokens (`pixels.Pixels`)."""

    @property
    def values(self) -> Tensor: ...  # [patches, D]

    @property
    def grid(self) -> Tensor: ...  # [images, 3] patches in time, height and width


@dataclass(frozen=True)
class View:
    """What documents end to end hold beside their tokens, on the CPU."""

    positions: Tensor  # [3, N] int64: rotary positions, each document's from 0
    pictured: Tensor  # [N] bool: tokens that stand for a piece of a picture
    values: Tensor | None  # [patches, D] of all pictures
    grid: Tensor | None  # [images, 3]


def sees(model: PreTrainedModel) -> bool:
    """Whether this target is entered with pixels, and with positions on three axes."""
    return hasattr(model.base_model, "get_rope_index")


def look(
    model: PreTrainedModel, names: Sequence[str], documents: Sequence[Tensor], pictures: Sequence[Pictures | None]
) -> View:
    """Documents, ids [T] on the CPU each, with the pictures of each -> what the target is given of them.

    Positions are the target's own. Raises ValueError naming a document that has not one token for each embedding.
    """
    whole: Any = model.base_model
    token, merge = model.config.image_token_id, model.config.vision_config.spatial_merge_size
    positions, pictured = [], []
    for name, ids, shown in zip(names, documents, pictures, strict=True):
        pieces = ids == token
        needed = 0 if shown is None else int(shown.grid.prod(-1).sum()) // merge**2
        if int(pieces.sum()) != needed:
            raise ValueError(
                f"{name} has {int(pieces.sum())} tokens {token} for pictures' pieces, expected {needed} for its "
                f"{0 if shown is None else len(shown.grid)} pictures; sample it again: dvc repro -f -s sample_target"
            )
        where, _ = whole.get_rope_index(
            ids[None].long(), mm_token_type_ids=pieces[None].int(), image_grid_thw=None if shown is None else shown.grid
        )
        positions.append(where[:, 0])
        pictured.append(pieces)
    all_shown = [shown for shown in pictures if shown is not None]
    return View(
        torch.cat(positions, dim=1),
        torch.cat(pictured),
        torch.cat([shown.values for shown in all_shown]) if all_shown else None,
        torch.cat([shown.grid for shown in all_shown]) if all_shown else None,
    )


def pixels(model: PreTrainedModel, view: View) -> dict[str, Tensor]:
    """The view's pictures under the names by which the model takes them."""
    if view.values is None or view.grid is None:
        return {}
    return {"pixel_values": to(view.values, model.device), "image_grid_thw": to(view.grid, model.device)}


@contextmanager
def entered(model: PreTrainedModel, keep: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Inside the block, each forward of a target that sees calls keep(embeds [B, T, H], positions [B, T, 3]).

    That is what its decoder is given: embeddings with pictures' in their place, and rotary positions.
    """

    def tap(_module: Any, _args: Any, kwargs: Any) -> None:
        keep(kwargs["inputs_embeds"], kwargs["position_ids"][-3:].permute(1, 2, 0))  # a fourth is the text's, for masks

    handle = model.get_decoder().register_forward_pre_hook(tap, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# Documents end to end, without padding


@torch.inference_mode()
def forward_documents(
    model: PreTrainedModel, ids: Tensor, lengths: list[int], packed: bool, view: View | None = None
) -> Tensor:
    """Documents end to end, ids [N] -> their last hidden states [N, H] after the final norm. No LM head, no cache.

    `packed`: as one row, attention kept inside each document (see `packs`); otherwise as rows padded to the longest,
    whose padding is dropped. Streams that are `tapped` have the same two layouts: `unpadded` makes [N, H] of either.
    `view` is for a target that sees; without it these are texts.
    """
    if view is None and sees(model):
        documents = ids.cpu().split(lengths)
        view = look(model, [f"document {n}" for n in range(len(lengths))], documents, [None] * len(lengths))
    rows = ids[None] if packed else pad_sequence(list(ids.split(lengths)), batch_first=True)  # [1, N] or [B, T]
    given: dict[str, Tensor] = {} if view is None else pixels(model, view)
    if packed:
        places = torch.cat([torch.arange(length) for length in lengths])[None]  # [1, N], each document from 0
        positions = places if view is None else torch.cat([places, view.positions])[:, None]  # [4, 1, N]
        given["position_ids"] = to(positions, ids.device)
    elif view is not None:
        by_row = pad_sequence(list(view.positions.T.split(lengths)), batch_first=True)  # [B, T, 3]
        given["position_ids"] = to(by_row.permute(2, 0, 1).contiguous(), ids.device)
    whole = model.get_decoder() if view is None else model.base_model
    with _apart(model, lengths) if packed else nullcontext():
        return unpadded(whole(input_ids=rows, use_cache=False, **given).last_hidden_state, lengths)


@contextmanager
def _apart(model: PreTrainedModel, lengths: list[int]) -> Iterator[None]:
    """Inside the block the decoder keeps documents of these lengths, in one row, apart; a vision tower is told nothing."""
    borders = to(torch.tensor([0, *lengths]).cumsum(0).int(), model.device)
    longest = max(lengths)
    told = {  # the names transformers hands down to every attention
        "cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _module, args, kwargs: (args, {**kwargs, **told}), with_kwargs=True
    )
    try:
        with _attention(model, DOCUMENTS):
            yield
    finally:
        handle.remove()


def to(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on `device`, without waiting for what the device has still to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def compile_blocks(model: PreTrainedModel, tokens: int) -> None:
    """Let torch.compile fuse what lies between the matrix products of a block, one code for all blocks and lengths.

    Made ready here, on one document of `tokens` tokens: the compiler takes hints from the first shapes it sees, and
    every process must round as every other.
    """
    for block in model.get_decoder().layers:
        block.forward = torch.compile(block.forward, dynamic=True)
    ids, half = _text(model, torch.arange(tokens)), tokens // 2
    forward_documents(model, ids, [half, tokens - half], packed=True)


def unpadded(stream: Tensor, lengths: list[int]) -> Tensor:
    """A stream as the decoder has it, [1, N, H] packed or [B, T, H] padded, as [N, H] of the documents end to end."""
    if len(stream) == 1:
        return stream[0]
    return torch.cat([row[:length] for row, length in zip(stream, lengths, strict=True)])


def packs(model: PreTrainedModel) -> bool:
    """Whether this model's classes keep documents apart when they lie end to end in one row: asked of the model itself.

    Two short documents, each alone and both together. Most classes take our attention; one that carries state from
    token to token in another way (a linear attention), or has an attention of its own, shows here, and is padded.
    """
    ids = _text(model, torch.arange(24) * 7919 + 11)
    try:
        together = forward_documents(model, ids, [11, 13], packed=True)
        alone = [forward_documents(model, document, [len(document)], packed=False) for document in ids.split([11, 13])]
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        warnings.warn(f"documents end to end: {type(error).__name__}: {error}", stacklevel=2)
        return False
    difference = (together - torch.cat(alone)).float().norm(dim=-1) / torch.cat(alone).float().norm(dim=-1)  # [24]
    # Halves round differently in every kernel, and a router may flip for a token; documents that see each other differ
    # in all tokens of the second, by far more.
    return bool(difference[11:].median() < (1e-3 if model.dtype == torch.float32 else 0.1))


def _text(model: PreTrainedModel, numbers: Tensor) -> Tensor:
    """Numbers [N] as token ids on the model's device, none of which stands for a picture."""
    ids = numbers % model.get_input_embeddings().num_embeddings
    if sees(model):
        ids[ids == model.config.image_token_id] = 0
    return ids.to(model.device)


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside the block the decoder's attention is that of `name`; a vision tower keeps its own."""
    config = model.get_decoder().config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


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
    """Causal attention [1, N, heads, D] inside each document; transformers calls it as one of its attentions."""
    unknown = sorted(name for name in ("s_aux", "softcap", "position_bias") if others.get(name) is not None)
    if cu_seq_lens_q is None or max_length_q is None or unknown:
        raise NotImplementedError(f"attention with {unknown or 'no document borders'}")
    if query.is_cuda and query.element_size() == 2 and query.shape[-1] % 8 == 0 and query.shape[-1] <= FLASH_HEADS:
        heads_last = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, heads, D] each
        out = torch.ops.aten._flash_attention_forward(
            *heads_last, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, 0.0, True, False,
            scale=scaling, window_size_left=None if sliding_window is None else sliding_window - 1,
        )[0]  # fmt: skip
        return out[None], None
    return _one_by_one(query, key, value, scaling, sliding_window, cu_seq_lens_q)[None], None


@torch.compiler.disable  # it would be compiled anew for every number of documents
def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, borders: Tensor
) -> Tensor:
    """The same where no kernel takes borders (CPUs, float32): a call a document. [N, heads, D]"""
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


AttentionInterface.register(DOCUMENTS, _attend_documents)
