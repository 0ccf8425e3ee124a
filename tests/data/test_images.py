"""Images become files named by their content, from any encoding and under concurrent writers."""

import base64
import hashlib
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
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


@pytest.mark.parametrize(
    "data", [encode_image("BMP"), encode_image("TIFF"), b"", b"\x89PNG", b"<svg/>", b"RIFF1234WAVEfmt "]
)
def test_unknown_kinds_are_not_saved(tmp_path: Path, data: bytes) -> None:
    assert images.save_image(data, tmp_path) is None and not list(tmp_path.iterdir())


@given(data=st.binary(), media=st.sampled_from(["image/png", "", "image/jpeg;charset=x"]), width=st.integers(1, 80))
def test_a_data_url_gives_its_bytes(data: bytes, media: str, width: int) -> None:
    text = base64.b64encode(data).decode()
    folded = "\n".join(text[i : i + width] for i in range(0, len(text), width))  # as e-mail folds it
    assert images.decode_data_url(f"data:{media};base64,{folded}") == data


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:;base64,a", "data:;base64,YW?j", "data:;base64,é", "x"])
def test_a_url_without_base64_is_none(url: str) -> None:
    assert images.decode_data_url(url) is None


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


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"<svg/>", b"GIF89a", b"II*\0\xff\xff\xff\xff"])
def test_unreadable_images_are_not_too_large(data: bytes) -> None:
    assert not images.is_too_large(data)


def test_concurrent_writers_of_one_image(tmp_path: Path) -> None:
    many = [encode_image("PNG", n % 3) for n in range(60)]
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda data: images.save_image(data, tmp_path), many))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(set(names)) and len(set(names)) == 3
