"""Read the images that a row of a chat export names or holds, and have them saved: by path, as bytes or as a `data:` URL.

A missing or unknown image, and one without a mark in the text, drop the row with a one-word reason; see docs/data.md.

A row is foreign, and what it names is copied and shared with the run: so a path must lead, with its links followed, to a plain
file in the data's own folder or in one of fix_data.image_folders, and only what decodes as an image is copied.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stages.data import images
from stages.data.conversations import IMAGE_PLACEHOLDER
from stages.data.json_lines import describe_value, is_text
from stages.runtime import foreign_paths


class DroppedRowError(Exception):
    """A row that can't be used. The message is the reason, one word that the report counts."""

    def __init__(self, reason: str, found: str | None = None, expected: str = "") -> None:
        super().__init__(reason)
        self.found = found  # the offending text, where it is a single one; with `expected`, a description of it
        self.expected = expected  # and what to do; "" where the reason says it


IMAGE_KEYS = ("images", "image")  # of a row
GivenImage = tuple[int, Any]  # its number in the row, from 1, and what the row has
# A mark IMAGE_PLACEHOLDER in a text, in a list of the images of turns: the image is elsewhere in the row.
MARKED_IN_TEXT = object()
SaveImage = Callable[[bytes, str | None], str | None]  # (bytes, extension of their file if any) -> path; None: no image

# What images must be, for messages.
IMAGE_FORM = "a path, bytes or a data: URL"
IMAGE_FILE = "a file; a relative path starts at the data file's folder"
IMAGE_OF_HUB = "bytes: rows of a dataset of the Hub have no folder that a relative path could start at"
IMAGE_OUTSIDE = (
    "a file in the folder of the data, links followed: rows may name no other file of yours; copy the images there, or name "
    "their folder in fix_data.image_folders"
)
IMAGE_NOT_URL = "a file or bytes: what is at a URL may change or vanish; download it, and write the path of the file"
IMAGE_BASE64 = "a whole data: URL, as data:image/png;base64,...; write it again"
IMAGE_BYTES = "PNG, JPEG, WebP or GIF that decodes as a whole, or a file of BMP or TIFF; convert it"
MAX_FILE_BYTES = 1 << 30  # of an image's file
IMAGE_SIZE = "a smaller one: it takes up to 16 bytes of memory a pixel to decode; scale it down"
MARK_OF_IMAGE = (
    f"a mark {IMAGE_PLACEHOLDER} for each image; write it where the image belongs, or give images as parts of a content"
)
SHOWN_PATH = 120  # characters of an image's path or URL in a message


def list_images(row: dict[str, Any]) -> list[Any]:
    """Return what a row has under its own key `images` or `image`; images among the parts of a content are not there."""
    given = row.get("images") if row.get("images") is not None else row.get("image")
    return [] if given is None else given if isinstance(given, list) else [given]


def order_images(row: dict[str, Any], turn_images: list[Any]) -> list[Any]:
    """Return the images of a row, each as it is given, in the order of the turns.

    `turn_images` has for each image what a part of a content holds, None for a part without an image (as TRL's
    `{"type": "image"}`), or MARKED_IN_TEXT. Parts and marks without an image take those under the row's own keys, in turn.
    Where these are more or fewer, they come first, and `check_image_count` tells.
    """
    own = list_images(row)
    lacks_image = [image is None or image is MARKED_IN_TEXT for image in turn_images]
    if sum(lacks_image) == len(own):
        left = iter(own)
        return [next(left) if lacks else image for image, lacks in zip(turn_images, lacks_image, strict=True)]
    if own and (parts := turn_images.count(None)):
        found = f"{len(own)} image(s) under its own key, {parts} part(s) of the type image without one"
        if marks := turn_images.count(MARKED_IN_TEXT):
            found += f" and {marks} mark(s) {IMAGE_PLACEHOLDER} in texts"
        raise DroppedRowError("image_count", found, "as many of these as images under images or image")
    return own + [image for image in turn_images if image is not MARKED_IN_TEXT]


def check_image_count(given: list[GivenImage], texts: Iterable[str]) -> None:
    """Raise DroppedRowError unless the texts have a mark for each of the images, of which there is at least one."""
    marks = sum(text.count(IMAGE_PLACEHOLDER) for text in texts)
    if marks != len(given):
        counted = _name_image(f"{len(given)} image(s), the first", given[0][1])
        found = f"{counted} and {marks} mark(s) {IMAGE_PLACEHOLDER} in the turns"
        raise DroppedRowError("image_count", found, MARK_OF_IMAGE)


def check_lost_images(row: dict[str, Any], texts: Iterable[str]) -> None:
    """Raise DroppedRowError where a row without an image has a key for images, and its texts have marks of some.

    Without such a key the text speaks of a mark.
    """
    keys = [key for key in IMAGE_KEYS if key in row]
    if keys and (marks := sum(text.count(IMAGE_PLACEHOLDER) for text in texts)):
        found = f"no image under {' and '.join(keys)}, and {marks} mark(s) {IMAGE_PLACEHOLDER} in the turns"
        raise DroppedRowError(
            "image_count", found, "an image for each mark: without it the answer is to another question"
        )


def store_image(image: Any, description: str, folder: str | None, roots: Sequence[Path], save_image: SaveImage) -> str:
    """Save an image by its content and return the path. `description` says which image of the row it is, for messages.

    Read are files of `folder`, where relative paths start, and of `roots` alone; None: there are no files. They are copied too:
    another image under the old name would otherwise change no row, and no stage would rerun.
    """
    data, extension, name = _read_image_bytes(image, description), None, _name_image(description, image)
    if data is None:
        file = _resolve_image_path(image, description, folder)
        extension, name = file.suffix.lower(), _name_image(description, str(file))
        data = _read_image_file(file, name, [*([] if folder is None else [Path(folder)]), *roots])
    if images.is_too_large(data):
        raise DroppedRowError("image_too_large", f"{name} has more than {images.MAX_PIXELS:,} pixels", IMAGE_SIZE)
    path = save_image(data, extension)
    if path is None:
        # Of a file nothing is shown.
        begin = f" that begin with {data[:8].hex(' ')}" if data and extension is None else ""
        raise DroppedRowError("image_bytes", f"{name} has {len(data):,} bytes{begin}", IMAGE_BYTES)
    return path


def _read_image_file(file: Path, name: str, roots: Sequence[Path]) -> bytes:
    """Return the bytes of a plain file in one of `roots`. Raise DroppedRowError for any other."""
    try:
        with foreign_paths.open_file(file, roots) as content:
            if (size := os.fstat(content.fileno()).st_size) <= MAX_FILE_BYTES:
                return content.read()
    except foreign_paths.ForeignPathError as error:
        if error.is_outside:
            raise DroppedRowError("image_outside", f"{name} is outside of the data's folder", IMAGE_OUTSIDE) from None
        raise DroppedRowError("image_missing", f"{name} {error}", IMAGE_FILE) from None
    except OSError as error:  # of the disk
        raise DroppedRowError("image_missing", f"{name} can't be read ({error.strerror})", IMAGE_FILE) from None
    raise DroppedRowError("image_missing", f"{name} has {size:,} bytes", IMAGE_FILE)


def _read_image_bytes(image: Any, description: str) -> bytes | None:
    """Return the bytes of an image given as bytes, as the Hub's {bytes, path} or as a `data:` URL; else None."""
    if isinstance(image, dict):
        image = image.get("bytes")
    if isinstance(image, str) and image[:5].lower() == "data:":
        data = images.decode_data_url(image)
        if data is None:
            raise DroppedRowError("image_bytes", f"{_name_image(description, image)} is no valid base64", IMAGE_BASE64)
        return data
    return bytes(image) if isinstance(image, bytes | bytearray) else None


def _resolve_image_path(image: Any, description: str, folder: str | None) -> Path:
    """Return the path of a file, from the project's root. Raise DroppedRowError for a URL: its content may change or vanish."""
    path = image.get("path") if isinstance(image, dict) else image
    if not isinstance(path, str):
        raise DroppedRowError("image_missing", f"{description} is {describe_value(image)}", IMAGE_FORM)
    name = _name_image(description, path)
    if not path.strip():
        raise DroppedRowError(
            "image_missing", f"{description} is an empty path", f"{IMAGE_FORM}; null where there is none"
        )
    if not is_text(path) or "\0" in path:
        raise DroppedRowError("image_missing", f"{name} is no path", IMAGE_FORM)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) and not path.startswith("file://"):
        raise DroppedRowError("image_url", f"{name} is a URL", IMAGE_NOT_URL)
    file = Path(path.removeprefix("file://"))
    if folder is None and not file.is_absolute():
        raise DroppedRowError("image_missing", f"{name} is a relative path", IMAGE_OF_HUB)
    return Path(folder or "") / file


def _name_image(description: str, image: Any) -> str:
    """Return `description` with the path or URL of the image, where it has one; the middle of a long one is left out."""
    given = image.get("path") if isinstance(image, dict) else image
    if not isinstance(given, str):
        return description
    half = SHOWN_PATH // 2
    shown = given if len(given) <= SHOWN_PATH else f"{given[:half]}…{given[-half:]}"
    return f"{description}, {shown!r},"
