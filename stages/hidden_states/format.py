"""The format of stored hidden states: a few large safetensors shards and an index, rows unpadded.   docs/hiddens.md

A shard holds rows end to end: `features` [N, KH] (the streams of K feature layers, in the order of target.feature_layers),
`last` [N, H] (after the final norm), `ids` [N] int32 and `mask` (one bit per token: 1 for tokens of the assistant).
`index.parquet` gives each row's shard, offset and length, its checksum, and whether all its numbers are finite. Size: (K + 1)H
numbers, 4 bytes and a bit per token; with EAGLE-3's three layers 32.8 kB at H = 4096 in bfloat16. Drafts of several families
read their own layers of one extraction (`select_features`).

In fp8 (e4m3) the numbers of a token come in K + 1 parts (each layer's, and the last hidden's), each divided by its own float32
scale: `features_scale` [N, K] and `last_scale` [N, 1]. The norm of a residual stream grows from block to block, so a single
scale would waste the low part's precision. Scales add 4 bytes per part and token; 16.4 kB at K = 3 and H = 4096.

Shards of a multimodal target also hold `positions` [N, 3] int32 (rotary positions), `pictured` (one bit per token: the mask
of image tokens) and `visual` [M, H], the embeddings of the image tokens end to end, in fp8 with `visual_scale` [M, 1]. The
index then has the range of each row's image tokens. Shards of a text target have none of these.

Letters: N tokens of a shard, T tokens of a row, M image tokens, K feature layers, H the target's hidden size.
"""

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import polars as pl
import torch
from torch import Tensor

INDEX_SCHEMA = pl.Schema(
    {
        "id": pl.String,
        "shard": pl.String,
        "offset": pl.Int64,  # of the row's first token in its shard
        "length": pl.Int64,  # T
        "prompt_length": pl.Int64,  # tokens before the answer
        "finish_reason": pl.String,
        "checksum": pl.UInt32,  # crc32 of id, prompt_length, finish_reason, dtype, features, last hidden, ids, mask, scales
        "finite": pl.Boolean,
    }
)
VISUAL_RANGE = ("visual_offset", "visual_length")
MULTIMODAL_INDEX_SCHEMA = pl.Schema({**INDEX_SCHEMA, **dict.fromkeys(VISUAL_RANGE, pl.Int64)})
MADE_BY = "extract_hiddens"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}
FP8 = DTYPES["fp8"]
FP8_MAX = torch.finfo(FP8).max  # 448
VISUAL_TENSORS = ("visual", "visual_scale")  # one line per image token; all other tensors have one per token
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    FP8: "F8_E4M3",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class RowHeader:
    """Everything of a row but its hidden states."""

    id: str
    ids: Tensor  # [T] int32
    mask: Tensor  # [T] bool: tokens of the assistant
    prompt_length: int
    finish_reason: str
    image_token_mask: Tensor | None = None  # [T] bool, of a multimodal target

    @property
    def num_image_tokens(self) -> int:
        """M."""
        return 0 if self.image_token_mask is None else int(self.image_token_mask.sum())


@dataclass(frozen=True, kw_only=True)
class HiddenStatesRow(RowHeader):
    """One row, unpadded, on the CPU."""

    features: Tensor  # [T, KH]
    last: Tensor  # [T, H]
    positions: Tensor | None = None  # [T, 3] int32: this and the next of a multimodal target
    image_embeddings: Tensor | None = None  # [M, H]


@dataclass(frozen=True)
class IndexEntry:
    """One row of index.parquet."""

    id: str
    shard: str
    offset: int
    length: int
    prompt_length: int
    finish_reason: str
    checksum: int
    finite: bool
    visual_offset: int | None = None  # this and the next of a multimodal target
    visual_length: int | None = None

    @property
    def tokens(self) -> slice:
        """The row's tokens in its shard."""
        return slice(self.offset, self.offset + self.length)

    @property
    def image_tokens(self) -> slice:
        """The row's image tokens in its shard."""
        start = self.visual_offset or 0
        return slice(start, start + (self.visual_length or 0))

    def to_record(self) -> dict[str, Any]:
        """Return the columns of the index that this row has."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class StoredHiddenStates:
    """Hidden states of consecutive tokens as stored; fields are named as the shard's tensors. Scales exist in fp8 only."""

    features: Tensor  # [N, KH]
    last: Tensor  # [N, H]
    features_scale: Tensor | None = None  # [N, K] float32
    last_scale: Tensor | None = None  # [N, 1] float32
    positions: Tensor | None = None  # [N, 3] int32: this and the next two of a multimodal target
    visual: Tensor | None = None  # [M, H]
    visual_scale: Tensor | None = None  # [M, 1] float32

    def select_tokens(self, tokens: slice, image_tokens: slice) -> "StoredHiddenStates":
        """Return a range of the tokens, and the range of the image tokens among them."""
        return StoredHiddenStates(
            **{n: t[image_tokens if n in VISUAL_TENSORS else tokens] for n, t in self.list_tensors().items()}
        )

    def select_features(self, indices: Sequence[int]) -> "StoredHiddenStates":
        """Return the block with the features of these of its K layers, by index among those stored."""
        stored, width = count_feature_layers(self.features, self.last), self.last.shape[-1]
        if not stored or [*indices] == [*range(stored)]:
            return self
        features = torch.cat([self.features[:, i * width : (i + 1) * width] for i in indices], dim=-1)
        scale = None if self.features_scale is None else self.features_scale[:, indices]
        return replace(self, features=features, features_scale=scale)

    def list_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def list_tensor_shapes(
    tokens: int, image_tokens: int, num_feature_layers: int, hidden_size: int, dtype: torch.dtype, is_multimodal: bool
) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of each tensor of `StoredHiddenStates`, for so many tokens."""
    shapes = {"features": (dtype, [tokens, num_feature_layers * hidden_size]), "last": (dtype, [tokens, hidden_size])}
    scales = {
        "features_scale": (torch.float32, [tokens, num_feature_layers]),
        "last_scale": (torch.float32, [tokens, 1]),
    }
    if is_multimodal:
        shapes |= {"positions": (torch.int32, [tokens, 3]), "visual": (dtype, [image_tokens, hidden_size])}
        scales["visual_scale"] = (torch.float32, [image_tokens, 1])
    return shapes | scales if dtype == FP8 else shapes


def list_shard_shapes(
    tokens: int, image_tokens: int | None, num_feature_layers: int, hidden_size: int, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of each tensor of a shard; `image_tokens` is None of a text target."""
    is_multimodal, bits = image_tokens is not None, (torch.uint8, [-(-tokens // 8)])
    shapes = list_tensor_shapes(tokens, image_tokens or 0, num_feature_layers, hidden_size, dtype, is_multimodal)
    shapes |= {"ids": (torch.int32, [tokens]), "mask": bits}
    return shapes | {"pictured": bits} if is_multimodal else shapes


class DecodedHiddenStates(NamedTuple):
    """The hidden states of a row: the fields that `HiddenStatesRow` adds to its header."""

    features: Tensor  # [N, KH]
    last: Tensor  # [N, H]
    positions: Tensor | None  # [N, 3]
    image_embeddings: Tensor | None  # [M, H]


def count_feature_layers(features: Tensor, last: Tensor) -> int:
    """Return K of features [N, KH] and last [N, H]; 0 where only tokens are stored, with a width of 0."""
    return features.shape[-1] // max(1, last.shape[-1])


def count_token_bytes(
    num_feature_layers: int, hidden_size: int, dtype: torch.dtype, is_multimodal: bool = False
) -> float:
    """Return the stored bytes per token: (K + 1)H numbers, in fp8 K + 1 float32 scales, an int32 id and a bit.

    A multimodal target adds three int32 positions and another bit.
    """
    parts = num_feature_layers + 1
    scales = 4 * parts if dtype == FP8 else 0
    return parts * hidden_size * dtype.itemsize + scales + 4 + 1 / 8 + (12 + 1 / 8 if is_multimodal else 0)


def count_visual_bytes(hidden_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of an image token beyond those of any token: H numbers, in fp8 a float32 scale."""
    return hidden_size * dtype.itemsize + (4 if dtype == FP8 else 0)


def encode_numbers(numbers: Tensor, dtype: torch.dtype, parts: int = 1) -> tuple[Tensor, Tensor | None]:
    """Convert numbers [N, W] to `dtype`; in fp8 return also the float32 scales [N, parts] that `decode_numbers` applies.

    The largest number of a part becomes e4m3's largest, 448. Every number x of the part is then restored within
    max(|x| / 16, scale / 1024): three mantissa bits, and below 2**-6 steps of 2**-9. A part that holds NaN or infinity has
    a scale of the same kind.
    """
    if dtype != FP8:
        return numbers.to(dtype), None
    split = numbers.float().unflatten(-1, (parts, -1))  # [N, parts, W / parts]
    scale = (split.abs().amax(-1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)  # [N, parts]
    return (split / scale[..., None]).to(FP8).flatten(-2), scale


def decode_numbers(tensor: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return stored numbers [N, W] as `dtype`, multiplied by the scales [N, parts] of fp8."""
    if scale is None:
        return tensor.to(dtype)
    return (tensor.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)


def encode_block(
    features: Tensor, last: Tensor, positions: Tensor | None, image_embeddings: Tensor | None, dtype: torch.dtype
) -> StoredHiddenStates:
    """Return hidden states [N, KH], [N, H] and [M, H] as stored in `dtype`."""
    features, features_scale = encode_numbers(features, dtype, count_feature_layers(features, last))
    last, last_scale = encode_numbers(last, dtype)
    visual = (None, None) if image_embeddings is None else encode_numbers(image_embeddings, dtype)
    return StoredHiddenStates(features, last, features_scale, last_scale, positions, *visual)


def decode_block(block: StoredHiddenStates, dtype: torch.dtype) -> DecodedHiddenStates:
    """Return the block's numbers as `dtype`."""
    return DecodedHiddenStates(
        decode_numbers(block.features, block.features_scale, dtype),
        decode_numbers(block.last, block.last_scale, dtype),
        block.positions,
        None if block.visual is None else decode_numbers(block.visual, block.visual_scale, dtype),
    )


def convert_stored(block: StoredHiddenStates, dtype: torch.dtype) -> StoredHiddenStates:
    """Return the block in another stored dtype; unchanged, to the bit, where it has that dtype."""
    return block if block.last.dtype == dtype else encode_block(*decode_block(block, torch.float32), dtype)


def find_finite_tokens(block: StoredHiddenStates) -> Tensor:
    """Return a mask [N] of tokens whose stored numbers are all finite: a number too large for float16 is not."""
    if block.features_scale is not None and block.last_scale is not None:
        return torch.isfinite(block.features_scale).all(-1) & torch.isfinite(block.last_scale).all(-1)
    return torch.isfinite(block.features).all(-1) & torch.isfinite(block.last).all(-1)


def compute_checksum(header: RowHeader, block: StoredHiddenStates, with_dtype: bool = True) -> int:
    """Return the crc32 of a whole row as stored, and of its dtype, by which the same bytes are other numbers."""
    head = header.id, header.prompt_length, header.finish_reason, *([str(block.last.dtype)] if with_dtype else [])
    total = zlib.crc32(repr(head).encode(errors="backslashreplace"))
    tokens = [block.features, block.last, header.ids, header.mask, block.features_scale, block.last_scale]
    for tensor in (*tokens, header.image_token_mask, block.positions, block.visual, block.visual_scale):
        total = total if tensor is None else zlib.crc32(view_bytes(tensor), total)
    return total


def is_checksum(stored: int, header: RowHeader, block: StoredHiddenStates) -> bool:
    """Return whether a row's checksum is this one, or was of an earlier version, without the dtype."""
    return any(stored == compute_checksum(header, block, with_dtype) for with_dtype in (True, False))


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, copied only where it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
