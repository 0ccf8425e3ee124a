"""Images become files named by their content, from any encoding and under concurrent writers."""

import hashlib
import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from stages.data import images


def encode_image(kind: str, colour: int = 0) -> bytes:
    """Return an image encoded by Pillow, an independent writer."""
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (colour, 5, 5)).save(file, kind)
    return file.getvalue()


KINDS = {"PNG": ".png", "JPEG": ".jpg", "GIF": ".gif", "WEBP": ".webp"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_a_file_named_by_its_content(tmp_path: Path, kind: str) -> None:
    data = encode_image(kind)
    name = images.save_image(data, tmp_path)
    assert name == hashlib.sha256(data).hexdigest() + KINDS[kind] and (tmp_path / name).read_bytes() == data
    assert images.save_image(data, tmp_path) == name and [p.name for p in tmp_path.iterdir()] == [name]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int) -> bytes:
    """Return a PNG of a hundred bytes whose header has the size; its pixel rows are missing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(10))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings(
    "error::PIL.Image.DecompressionBombWarning"
)  # Bug: Pillow's warning was all that the stage said
@pytest.mark.parametrize(
    ("width", "height", "is_too_large"),
    [(8192, 8192, False), (8193, 8192, True), (13000, 13000, True), (60000, 60000, True), (1, 1, False)],
)
def test_a_small_file_of_many_pixels_is_too_large(width: int, height: int, is_too_large: bool) -> None:
    """Bug: decoding a PNG of half a megabyte with 169 megapixels took 2.6 GB."""
    assert images.is_too_large(png_of(width, height)) == is_too_large
