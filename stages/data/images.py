"""Save images as files named by their content, whether they came as bytes or as files.

Another image under an old name is thus another path in the rows, and every stage that reads the rows reruns.
Bytes must decode as PNG, JPEG, WebP or GIF, which vision processors read, whatever exports call them; a file may also be BMP or
TIFF, and keeps its extension.
"""

import base64
import binascii
import hashlib
import io
import os
import re
import struct
import threading
from pathlib import Path

from PIL import Image

DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
MAGIC_PATTERNS = {
    ".png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    ".jpg": re.compile(rb"\xff\xd8\xff"),
    ".gif": re.compile(rb"GIF8[79]a"),
    ".webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")  # of Pillow's decoders: others may start programs, as EPS does
FILE_FORMATS = (*FORMATS, "BMP", "TIFF")
MAX_PIXELS = 1 << 26  # 8,192 x 8,192; decoding takes up to 16 bytes a pixel, 1 GiB
EXTENSION = re.compile(r"\.[a-z0-9]{1,8}")
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limits, a warning and an error, which MAX_PIXELS replaces


def decode_data_url(url: str) -> bytes | None:
    """Return the bytes in a `data:` URL; None where it is not valid base64."""
    head = DATA_URL.match(url)
    if head is None:
        return None
    try:
        return base64.b64decode("".join(url[head.end() :].split()), validate=True)
    except (binascii.Error, ValueError):  # ValueError: characters beyond ASCII
        return None


def save_image(data: bytes, folder: Path, extension: str | None = None) -> str | None:
    """Write an image into the existing `folder` and return its name; None for bytes that do not decode as a known kind.

    `extension` is that of the file the image came as, None for bytes.
    Processes and threads may save the same image at once: each writes its own temporary file and renames it.
    """
    kind = next((kind for kind, magic in MAGIC_PATTERNS.items() if magic.match(data)), None)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS if extension is None else FILE_FORMATS) as file:
            file.load()
    except Exception:  # decoders raise many types
        return None
    if kind is None:
        kind = extension if EXTENSION.fullmatch(extension or "") else ""
    name = f"{hashlib.sha256(data).hexdigest()}{kind}"
    if not (folder / name).exists():
        temporary = folder / f".{name}.{os.getpid()}.{threading.get_ident()}.part"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, folder / name)
        finally:
            temporary.unlink(missing_ok=True)  # left where the disk was full
    return name


def is_too_large(data: bytes) -> bool:
    """Return whether an image has more than MAX_PIXELS, by its header: nothing is decoded.

    False for bytes that Pillow can't read: the stage that decodes them reports why.
    """
    try:
        with Image.open(io.BytesIO(data)) as file:
            return file.width * file.height > MAX_PIXELS
    except (OSError, ValueError, SyntaxError, EOFError, struct.error):
        return False
