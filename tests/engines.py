"""Engines of tests: a target with a draft of any family beside it."""

from collections.abc import Iterator
from typing import Any

import torch

from stages.draft.block_draft import BlockDraft
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.engine.proposer import Drafter, DraftingMethod
from stages.families.block.decoding import BlockDrafter
from stages.families.eagle3.decoding import Eagle3Drafter


def build_drafter(model: Any, layers: list[int], draft: Any, tree_scoring: str = "sglang") -> Drafter:
    kind = BlockDrafter if isinstance(draft, BlockDraft) else Eagle3Drafter
    return kind(draft, model, layers, tree_scoring)


def build_engine(
    model: Any,
    end_tokens: list[int],
    layers: list[int],
    draft: Any = None,
    tree_scoring: str = "sglang",
    logits_scale: float = 1.0,
) -> Engine:
    """An engine with a draft that reads `layers`, or without one."""
    drafter = None if draft is None else build_drafter(model, layers, draft, tree_scoring)
    return Engine(model, end_tokens, drafter, logits_scale)


@torch.inference_mode()
def decode_with_method(
    engine: Engine, prompt: list[int], limit: int, method: DraftingMethod, images: Any = None, sampling: Any = None
) -> Iterator[DecodeStep]:
    """The steps of one prompt by a method that no drafter built."""
    yield from engine._decode_alone(DecodeRequest(prompt, limit, images, sampling), method)
