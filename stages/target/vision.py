"""Pictures as a Qwen-VL target takes them: the patches of each, and its grid, which says how many tokens it stands for.

Through the image processor in the target's own folder, on its PIL backend: that one needs Pillow and nothing more, and
gives the same numbers whatever else is installed. A picture is turned upright and made RGB first, as transformers'
own loading does; `url` is the same picture for a server.

Letters: P patches of all pictures together, D numbers in a patch, I pictures.
"""

import base64
import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoConfig

MAX_CACHED_BYTES = 1 << 30  # of patches that are kept; sizes are kept for all
MAX_PIXELS = 1 << 26  # 8,192 x 8,192, also data/images.py's; decoding takes up to 16 bytes of memory a pixel, 1 GiB
UPRIGHT_ORIENTATIONS, EXIF_ORIENTATION = (None, 1), 0x0112  # the EXIF tag of a picture that lies on its side
PASSTHROUGH_MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
}  # what every server decodes alike
# What Pillow and the processors raise for bytes that are cut or are no picture: truncated chunks are even SyntaxError.
IMAGE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)


class UnreadableImageError(ValueError):
    """A picture that is there and can't be decoded, has too many pixels, or can't be cut into patches."""


@dataclass(frozen=True)
class ImagePatches:
    """Pictures end to end, under Qwen-VL's own names `pixel_values` and `image_grid_thw`."""

    values: Tensor  # [P, D] float32
    grid: Tensor  # [I, 3] int64: frames, rows and columns of patches


class CachedImageProcessor:
    """One target's image processor. May be used from several threads; two that ask at once may decode a picture twice."""

    def __init__(self, folder: str | Path, trust_remote_code: bool) -> None:
        """Raises ValueError where the target in `folder` is none that marks a picture's place by a token."""
        self._source, self._trust = folder, trust_remote_code
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        token = getattr(config, "image_token_id", None)
        if token is None:
            raise ValueError(
                f"{folder}/config.json has no image_token_id, expected that of a target that sees pictures"
            )
        self.token = int(token)  # stands once for each visual embedding
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, ImagePatches] = OrderedDict()  # the longest unused first
        self._bytes = 0
        self._sizes: dict[str, int] = {}

    def see(self, paths: Sequence[str]) -> ImagePatches:
        """Pictures in the order of `paths`, of which there is at least one.

        Raises:
            Unreadable: naming a picture that can't be decoded.
            ValueError: for one that is not there, or where the target's image processor can't be loaded.
        """
        found = [self._picture(path) for path in paths]
        return ImagePatches(torch.cat([one.values for one in found]), torch.cat([one.grid for one in found]))

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """How many visual embeddings, and so tokens, each picture is. Raises as `see` does."""
        return [self._sizes[path] if path in self._sizes else self._size(path) for path in paths]

    def url(self, path: str) -> str:
        """A `data:` URL of the picture as it is seen here. Raises as `see` does.

        A file that any decoder reads as we do goes as it is; one that lies on its side, has transparency or several
        frames is sent as the PNG of what we see, since servers differ in what they make of those.
        """
        image, plain = _open_image(path)
        if plain:
            data, kind = Path(path).read_bytes(), plain
        else:
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            data, kind = buffer.getvalue(), PASSTHROUGH_MEDIA_TYPES["PNG"]
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    def _size(self, path: str) -> int:
        grid = self._picture(path).grid
        self._sizes[path] = int(grid.prod()) // self._processor.merge_size**2
        return self._sizes[path]

    def _picture(self, path: str) -> ImagePatches:
        with self._lock:
            if path in self._kept:
                self._kept.move_to_end(path)
                return self._kept[path]
        processor = self._processor
        image, _ = _open_image(path)
        try:
            out = processor(images=[image], return_tensors="np")
        except IMAGE_ERRORS as error:  # thinner than a 200th of its length
            raise UnreadableImageError(f"{path} can't be cut into patches ({error})") from None
        seen = ImagePatches(torch.tensor(out["pixel_values"]), torch.tensor(out["image_grid_thw"]))
        with self._lock:
            if path not in self._kept:
                self._kept[path] = seen
                self._bytes += seen.values.nbytes
            while self._bytes > MAX_CACHED_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].values.nbytes
        return seen

    @cached_property
    def _processor(self) -> Any:
        # Not by transformers' top-level name, which 5.17 hides where torchvision is not installed.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        try:
            found = AutoImageProcessor.from_pretrained(
                self._source, backend="pil", trust_remote_code=self._trust, local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"{self._source} has no image processor that works with Pillow ({error}); expected the "
                "preprocessor_config.json that the target was published with"
            ) from None
        if not hasattr(found, "merge_size"):
            raise ValueError(
                f"{self._source}: {type(found).__name__} gives no grid of patches; pictures work for Qwen2-VL, Qwen2.5-VL "
                "and Qwen3-VL targets, and those built like them"
            )
        return found


def load_image_patches(
    folder: str | Path, trust_remote_code: bool, images: dict[str, list[str] | None]
) -> dict[str, ImagePatches | None]:
    """Each one's pictures by its name. The target in `folder` need not see where there are none. Raises as `CachedImageProcessor` does."""
    if not any(images.values()):
        return dict.fromkeys(images)
    eyes = CachedImageProcessor(folder, trust_remote_code)
    return {name: eyes.see(paths) if paths else None for name, paths in images.items()}


def expand_image_tokens(ids: list[int], token: int, sizes: list[int]) -> list[int]:
    """A rendered prompt's ids with each picture's one `token` repeated as often as the picture has embeddings.

    Raises:
        ValueError: where the template wrote the token for another number of pictures.
    """
    if (found := ids.count(token)) != len(sizes):
        raise ValueError(
            f"the chat template wrote {found} picture tokens, expected {len(sizes)}, one for each picture; it must render "
            "content in parts, of type image and text: take the target's own, or correct target.chat_template"
        )
    left = iter(sizes)
    return [one for known in ids for one in ([known] * next(left) if known == token else [known])]


def collapse_image_tokens(ids: list[int], token: int, sizes: list[int]) -> list[int]:
    """The inverse of `expand_image_tokens`."""
    found, left, place = list[int](), iter(sizes), 0
    while place < len(ids):
        found.append(ids[place])
        place += next(left) if ids[place] == token else 1
    return found


def _open_image(path: str) -> tuple[Image.Image, str | None]:
    """The picture decoded, upright and RGB; and its media type where the file says just that to every decoder."""
    try:
        with Image.open(path) as file:
            if file.width * file.height > MAX_PIXELS:  # before getexif, which decodes a PNG
                raise _too_large(path, f"{file.width} x {file.height} = {file.width * file.height} pixels")
            plain = file.mode == "RGB" and "transparency" not in file.info and not getattr(file, "is_animated", False)
            plain = plain and file.getexif().get(EXIF_ORIENTATION) in UPRIGHT_ORIENTATIONS
            return ImageOps.exif_transpose(file).convert("RGB"), PASSTHROUGH_MEDIA_TYPES.get(
                file.format or ""
            ) if plain else None
    except FileNotFoundError:
        raise ValueError(f"{path} not found, expected a picture; run: dvc repro fix_data") from None
    except UnreadableImageError:
        raise
    except Image.DecompressionBombError as error:  # over Pillow's own limit
        raise _too_large(path, f"too many pixels ({error})") from None
    except IMAGE_ERRORS as error:
        raise UnreadableImageError(f"{path} can't be decoded as a picture ({error})") from None


def _too_large(path: str, found: str) -> UnreadableImageError:
    """Return the error for a picture of which a small file would fill the memory."""
    return UnreadableImageError(
        f"{path} has {found}, expected at most {MAX_PIXELS}: decoding more takes over a GiB of memory; make the picture "
        "smaller (targets shrink it anyway) and run: dvc repro fix_data"
    )
