"""Pictures kept as files named by their content, whether they came as bytes or as files: one picture is one file.

So another picture under an old name is another path in the rows, and every stage that reads the rows runs again.
Bytes must be what a vision tower's processor reads: PNG, JPEG, WebP, GIF, told by the first bytes and never by a given
name or media type, both of which exports get wrong. A file of another kind keeps its extension; sample_target decodes it
or counts it as unreadable.
"""

import base64
import binascii
import hashlib
import os
import re
import struct
import threading
from pathlib import Path

from PIL import Image

DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
MAGIC_BYTES = {
    ".png": rb"\x89PNG\r\n\x1a\n",
    ".jpg": rb"\xff\xd8\xff",
    ".gif": rb"GIF8[79]a",
    ".webp": rb"RIFF.{4}WEBP",
}
MAX_PIXELS = 1 << 26  # 8,192 x 8,192, also target/vision.py's; decoding takes up to 16 bytes of memory a pixel, 1 GiB
EXTENSION = re.compile(r"\.[a-z0-9]{1,8}")
MAGIC_PATTERNS = {extension: re.compile(magic, re.DOTALL) for extension, magic in MAGIC_BYTES.items()}


def decode_data_url(url: str) -> bytes | None:
    """The bytes in a `data:` URL; None where it holds no base64."""
    head = DATA_URL.match(url)
    if head is None:
        return None
    try:
        return base64.b64decode("".join(url[head.end() :].split()), validate=True)
    except (binascii.Error, ValueError):  # the second for letters beyond ASCII
        return None


def name_image(data: bytes) -> str | None:
    """The name a picture is kept under, `<sha256>.<extension>`; None where it is no picture that we know."""
    extension = next((extension for extension, magic in MAGIC_PATTERNS.items() if magic.match(data)), None)
    return None if extension is None else hashlib.sha256(data).hexdigest() + extension


def save_image(data: bytes, folder: Path, extension: str | None = None) -> str | None:
    """Write a picture into `folder`, which exists; its name there, or None where it is none that we know.

    `extension` is that of the file it came as: a file is kept whatever its kind.

    Several processes and threads may keep the same picture at once: each writes a file of its own and renames it.
    """
    name = name_image(data)
    if name is None and extension is not None:
        name = hashlib.sha256(data).hexdigest() + (extension if EXTENSION.fullmatch(extension) else "")
    if name is not None and not (folder / name).exists():
        part = folder / f".{name}.{os.getpid()}.{threading.get_ident()}.part"
        try:
            part.write_bytes(data)
            os.replace(part, folder / name)
        finally:
            part.unlink(missing_ok=True)  # where the disk was full
    return name


def is_too_large(path: Path) -> bool:
    """Return whether the picture at `path` has more than MAX_PIXELS, by its header: nothing is decoded.

    A file that Pillow can't read at all isn't too large; whoever decodes it says what is wrong with it.
    """
    try:
        with Image.open(path) as file:
            return file.width * file.height > MAX_PIXELS
    except Image.DecompressionBombError:  # over Pillow's own limit
        return True
    except (OSError, ValueError, SyntaxError, EOFError, struct.error):
        return False
