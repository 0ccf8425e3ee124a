"""Process images as a Qwen-VL target takes them: patches, and a grid that gives the number of image tokens.

Uses the image processor in the target's own folder on its PIL backend, which needs only Pillow and gives the same numbers
whatever else is installed. Images are first turned upright and converted to RGB, as transformers' own loading does.

Letters: P patches of all images together, D numbers in a patch, I images.
"""

import base64
import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from stages.runtime.limited_call import call_limited
from stages.target import foreign_files
from stages.target.multimodal import ImagePatches

MAX_CACHED_BYTES = 1 << 30  # of cached patches; token counts are cached for all images
UPRIGHT_ORIENTATIONS, EXIF_ORIENTATION = (None, 1), 0x0112  # EXIF tag of the orientation
# Formats that every server decodes alike.
PASSTHROUGH_MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
# Raised by Pillow and the processors for truncated or foreign bytes: truncated PNG chunks are SyntaxError.
IMAGE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error)


class UnreadableImageError(ValueError):
    """An existing image that cannot be decoded or cut into patches. fix_data has left out those of too many pixels."""


class CachedImageProcessor:
    """One target's image processor with a cache; thread-safe, though concurrent calls may decode an image twice."""

    def __init__(self, folder: str | Path, trust_remote_code: bool) -> None:
        self._source, self._trust = folder, trust_remote_code
        # Once per image embedding.
        self.image_token_id: int = foreign_files.read_config(folder, trust_remote_code).image_token_id
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, ImagePatches] = OrderedDict()  # least recently used first
        self._cached_bytes = 0
        self._token_counts: dict[str, int] = {}

    def load_patches(self, paths: Sequence[str]) -> ImagePatches:
        """Return the patches of at least one image, in the order of `paths`.

        Raises UnreadableImageError naming an image that cannot be decoded, and ValueError for one that does not exist or where
        the target's image processor cannot be loaded.
        """
        images = [self._load_image_patches(path) for path in paths]
        return ImagePatches(
            torch.cat([image.pixel_values for image in images]), torch.cat([image.image_grid_thw for image in images])
        )

    def count_image_tokens(self, paths: Sequence[str]) -> list[int]:
        """Return the number of image tokens of each image. Raises as `load_patches` does."""
        for path in paths:
            if path not in self._token_counts:
                grid = self._load_image_patches(path).image_grid_thw
                self._token_counts[path] = int(grid.prod()) // self._processor.merge_size**2
        return [self._token_counts[path] for path in paths]

    def build_data_url(self, path: str) -> str:
        """Return the image, as processed here, as a `data:` URL for a server. Raises as `load_patches` does.

        A file that every decoder reads alike is sent unchanged. One with a rotation, transparency or several frames is sent
        as a PNG of our decoding, since servers treat those differently.
        """
        image, media_type = _open_image(path)
        if media_type:
            data = Path(path).read_bytes()
        else:
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            data, media_type = buffer.getvalue(), PASSTHROUGH_MEDIA_TYPES["PNG"]
        return f"data:{media_type};base64,{base64.b64encode(data).decode()}"

    def _load_image_patches(self, path: str) -> ImagePatches:
        with self._lock:
            if path in self._cache:
                self._cache.move_to_end(path)
                return self._cache[path]
        processor = self._processor
        image, _ = _open_image(path)
        try:
            out = processor(images=[image], return_tensors="np")
        except IMAGE_ERRORS as error:  # such as an aspect ratio above 200
            raise UnreadableImageError(f"{path} can't be cut into patches ({error})") from None
        patches = ImagePatches(torch.tensor(out["pixel_values"]), torch.tensor(out["image_grid_thw"]))
        with self._lock:
            if path not in self._cache:
                self._cache[path] = patches
                self._cached_bytes += patches.pixel_values.nbytes
            while self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].pixel_values.nbytes
        return patches

    @cached_property
    def _processor(self) -> Any:
        # Not from transformers' top level: 5.17 hides it there where torchvision is not installed.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        file = f"{self._source}/preprocessor_config.json"
        with foreign_files.refuse_unreadable(file, "the settings of an image processor that works with Pillow"):
            found = AutoImageProcessor.from_pretrained(
                self._source, backend="pil", trust_remote_code=self._trust, local_files_only=True
            )
        # Settings of a wrong type or size come to light here.
        remedy = f"expected {file} as the target was published with"
        call_limited(lambda: bool(found(images=[Image.new("RGB", (64, 64))])), "cutting an image into patches", remedy)
        if not hasattr(found, "merge_size"):
            raise ValueError(
                f"{self._source}: {type(found).__name__} gives no grid of patches; images work for Qwen2-VL, Qwen2.5-VL "
                "and Qwen3-VL targets, and those built like them"
            )
        return found


def load_image_patches(
    folder: str | Path, trust_remote_code: bool, images: dict[str, list[str] | None]
) -> dict[str, ImagePatches | None]:
    """Return each document's patches by its name. Without any image the target in `folder` may be a text target.

    Raises as `CachedImageProcessor` does.
    """
    if not any(images.values()):
        return dict.fromkeys(images)
    processor = CachedImageProcessor(folder, trust_remote_code)
    return {name: processor.load_patches(paths) if paths else None for name, paths in images.items()}


def expand_image_tokens(ids: list[int], image_token_id: int, counts: list[int]) -> list[int]:
    """Return a rendered prompt's ids with the single token of each image repeated once per image embedding.

    Raises ValueError where the template rendered another number of images.
    """
    if (found := ids.count(image_token_id)) != len(counts):
        raise ValueError(
            f"the chat template wrote {found} image tokens, expected {len(counts)}, one for each image; it must render "
            "content in parts, of type image and text: take the target's own, or correct target.chat_template"
        )
    left = iter(counts)
    return [one for known in ids for one in ([known] * next(left) if known == image_token_id else [known])]


def collapse_image_tokens(ids: list[int], image_token_id: int, counts: list[int]) -> list[int]:
    """Invert `expand_image_tokens`."""
    found, left, position = list[int](), iter(counts), 0
    while position < len(ids):
        found.append(ids[position])
        position += next(left) if ids[position] == image_token_id else 1
    return found


def _open_image(path: str) -> tuple[Image.Image, str | None]:
    """Return the image, upright and RGB, and its media type where every decoder reads the file alike."""
    try:
        with Image.open(path) as file:
            plain = file.mode == "RGB" and "transparency" not in file.info and not getattr(file, "is_animated", False)
            plain = plain and file.getexif().get(EXIF_ORIENTATION) in UPRIGHT_ORIENTATIONS
            media_type = PASSTHROUGH_MEDIA_TYPES.get(file.format or "") if plain else None
            return ImageOps.exif_transpose(file).convert("RGB"), media_type
    except FileNotFoundError:
        raise ValueError(f"{path} not found, expected an image; run: dvc repro fix_data") from None
    except IMAGE_ERRORS as error:
        raise UnreadableImageError(f"{path} can't be decoded as an image ({error})") from None
