"""Read the header of a GGUF file, each count and offset checked against the file's size, and its weights by name.

Format: github.com/ggml-org/ggml, docs/gguf.md. The gguf package's own reader is slow (8 s of a Gemma), trusts the counts, and
ends in errors of NumPy; its dequantisation is used.
"""

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from stages.runtime import guarded_files

VERSIONS = (2, 3)
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # by type of value
STRING, ARRAY = 8, 9
BLOCKS_OF_A_ROW = 1 << 10
LEAST_SHARE = 0.01  # of the weights, for a type to be named: norms are F32 in every file


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. Its shape is PyTorch's: the last dimension has neighbours in memory."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int  # bytes


@dataclass(frozen=True)
class GgufFile:
    """A file's keys and tensors."""

    path: Path
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor in float32, computed from its blocks."""
        tensor = self.tensors[name]
        size = GGML_QUANT_SIZES[tensor.kind][1]  # of a block
        data = np.fromfile(self.path, np.uint8, tensor.size, offset=tensor.start)
        # dequantize takes 16 rows at a time: long ones, whatever the tensor's own are, or it takes twice as long
        values = dequantize(data.reshape(-1, gcd(tensor.size // size, BLOCKS_OF_A_ROW) * size), tensor.kind)
        return torch.from_numpy(np.array(values, np.float32)).reshape(tensor.shape)

    def list_types(self) -> list[str]:
        """Return the types of the weights, as Q4_1, by their share."""
        sizes = Counter[str]()
        for tensor in self.tensors.values():
            sizes[tensor.kind.name] += prod(tensor.shape)
        return [name for name, size in sizes.most_common() if size >= LEAST_SHARE * sizes.total()]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file. Raises BrokenArtifactError where it is cut, or no GGUF file."""
    guard = guarded_files.guard_parsing(path, "GGUF", "get the file again")
    with guard, path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(data).read(path)


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def read(self, path: Path) -> GgufFile:
        magic, version, num_tensors, num_keys = self.unpack("4sIQQ")
        if magic != b"GGUF" or version not in VERSIONS:
            raise ValueError(f"{magic!r}, version {version} (GGUF, {' or '.join(map(str, VERSIONS))})")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):  # each name is another, so bytes that are no header end at once
            (name,), (kind,) = self.read_strings(1), self.unpack("I")
            if not name or name in keys:
                raise ValueError(f"the key {name!r} a second time" if name else "a key without name")
            keys[name] = self.read_values(*self.unpack("IQ")) if kind == ARRAY else self.read_values(kind, 1)[0]
        alignment = keys.get("general.alignment", 32)
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            tensor = self.read_tensor_info()
            if not tensor.name or tensor.name in tensors:
                raise ValueError(f"the tensor {tensor.name!r} a second time")
            tensors[tensor.name] = tensor
        start = -(-self.at // alignment) * alignment
        placed = {n: GgufTensor(n, t.shape, t.kind, start + t.start, t.size) for n, t in tensors.items()}
        if beyond := [t for t in placed.values() if t.start + t.size > len(self.data)]:
            end = max(t.start + t.size for t in beyond)
            raise ValueError(
                f"{len(self.data)} bytes where its tensors need {end}: {len(beyond)} of {len(placed)} are cut, as "
                f"{beyond[0].name} {beyond[0].shape}"
            )
        return GgufFile(path, keys, placed)

    def unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def read_strings(self, count: int) -> list[str]:
        """Return strings; of a vocabulary without a call for each, which takes three times as long."""
        data, at, found, unpack = self.data, self.at, [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = unpack(data, at)
            at += 8 + length
            found.append(data[at - length : at])
        if at > len(data):
            raise ValueError(f"strings that end at {at} of {len(data)}")
        self.at = at
        return [str(text, "utf-8") for text in found]

    def read_values(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return self.read_strings(count)
        if kind not in NUMBERS:
            raise ValueError(f"a value of the unknown type {kind}")
        return list(self.unpack(f"{count}{NUMBERS[kind]}"))

    def read_tensor_info(self) -> GgufTensor:
        (name,), (dimensions,) = self.read_strings(1), self.unpack("I")
        shape = self.unpack(f"{dimensions}Q")[::-1] or (1,)
        number, start = self.unpack("IQ")
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"{name} of {kind.name} with the shape {shape}")
        dequantize(np.zeros((1, size), np.uint8), kind)  # raises for a type that the gguf package can't dequantise
        return GgufTensor(name, shape, kind, start, prod(shape) // block * size)
