"""Tiny random targets that see, and documents with pictures for them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.target import hooks, loading, multimodal, packed_forward
from stages.target.multimodal import ImagePatches
from tests.target.test_target_forward import LAYERS, SIGHT, save_random_model

CLASSES = ["qwen3 vl", "qwen3 vl moe", "qwen2.5 vl", "qwen2 vl"]
TOKEN, START, END = 90, 92, 93
MERGE = SIGHT["spatial_merge_size"]
CHUNKED, INTERLEAVED = [0, 0, 1, 2], [0, 1, 2, 0]
LAYOUT = {  # of sections [2, 1, 1]
    "qwen3 vl": INTERLEAVED, "qwen3 vl moe": INTERLEAVED, "qwen2.5 vl": CHUNKED, "qwen2 vl": CHUNKED,
}  # fmt: skip
TAPPED = [2, LAYERS // 2, LAYERS - 3]
# Rows and columns of pieces of each picture of a document, the text's lengths before, between and after them.
DOCUMENTS: list[tuple[list[tuple[int, int]], list[int]]] = [
    ([(2, 3)], [4, 5]),
    ([], [9]),
    ([(1, 2), (3, 2)], [1, 3, 6]),
    ([(4, 4)], [2, 3]),
]


def load(folder: Path, name: str) -> Any:
    save_random_model(folder, name, False)
    return loading.load_target(str(folder), "float32", "cpu")


def document(shape: tuple[list[tuple[int, int]], list[int]], seed: int) -> tuple[Tensor, ImagePatches | None]:
    """ids [T] of a text with pictures, each between its two marks, and noise for pictures."""
    g = torch.Generator().manual_seed(seed)
    pictures, texts = shape
    ids = [torch.randint(7, 80, (texts[0],), generator=g)]
    for (rows, columns), text in zip(pictures, texts[1:], strict=True):
        marks = torch.tensor([START] + [TOKEN] * (rows * columns) + [END])
        ids += [marks, torch.randint(7, 80, (text,), generator=g)]
    if not pictures:
        return torch.cat(ids), None
    grid = torch.tensor([[1, rows * MERGE, columns * MERGE] for rows, columns in pictures])
    width = 3 * SIGHT["temporal_patch_size"] * SIGHT["patch_size"] ** 2
    return torch.cat(ids), ImagePatches(torch.randn(int(grid.prod(-1).sum()), width, generator=g), grid)


def documents() -> list[tuple[Tensor, ImagePatches | None]]:
    return [document(shape, seed) for seed, shape in enumerate(DOCUMENTS)]


def positions_of(shape: tuple[list[tuple[int, int]], list[int]]) -> list[tuple[int, int, int]]:
    """By hand: a picture's pieces share its time, and text goes on after its larger side.

    Qwen2-VL, section 2.1, https://arxiv.org/abs/2409.12191.
    """
    pictures, texts = shape
    found: list[tuple[int, int, int]] = []
    now = 0
    for number, text in enumerate(texts):
        if number:
            rows, columns = pictures[number - 1]
            found.append((now,) * 3)  # its first mark
            now += 1
            found += [(now, now + r, now + c) for r in range(rows) for c in range(columns)]
            now += max(rows, columns)
            found.append((now,) * 3)
            now += 1
        found += [(now + i,) * 3 for i in range(text)]
        now += text
    return found


def alone(model: Any, ids: Tensor, shown: ImagePatches | None) -> dict[str, Tensor]:
    """transformers' own forward of one document."""
    types = (ids == TOKEN).int()[None]
    given = {} if shown is None else {"pixel_values": shown.pixel_values, "image_grid_thw": shown.image_grid_thw}
    with torch.inference_mode():
        whole = model(input_ids=ids[None], mm_token_type_ids=types, output_hidden_states=True, use_cache=False, **given)
    return {
        "features": torch.cat([whole.hidden_states[i][0] for i in TAPPED], dim=-1),  # [T, 3H]
        "last": whole.hidden_states[-1][0],
        "embeds": whole.hidden_states[0][0],
        "logits": whole.logits[0],
    }


def forward(model: Any, some: list[tuple[Tensor, ImagePatches | None]], packed: bool = True) -> dict[str, Tensor]:
    """Our forward of documents end to end, all that is kept of it."""
    lengths = [len(ids) for ids, _ in some]
    view = multimodal.build_multimodal_inputs(
        model, [str(n) for n in range(len(some))], [i for i, _ in some], [p for _, p in some]
    )
    streams: dict[int, Tensor] = {}
    given: list[tuple[Tensor, Tensor]] = []
    with (
        hooks.tap_residual_streams(model, TAPPED, streams.__setitem__),
        hooks.tap_decoder_inputs(model, lambda *both: given.append(both)),
    ):
        last = packed_forward.forward_documents(model, torch.cat([i for i, _ in some]), lengths, packed, view)
    ((embeds, positions),) = given
    return {
        "features": torch.cat([packed_forward.unpad_stream(streams[k], lengths) for k in range(3)], dim=-1),
        "last": last,
        "embeds": packed_forward.unpad_stream(embeds, lengths),
        "positions": packed_forward.unpad_stream(positions, lengths),
        "pictured": view.image_token_mask,
    }
