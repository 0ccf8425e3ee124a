"""Engines of tests: a target with a draft of any family beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.engine.proposer import Drafter, DraftingMethod
from stages.families.block.decoding import BlockDrafter
from stages.families.block.model import BlockDraft
from stages.families.eagle3.decoding import Eagle3Drafter

LLAMA_CPP = Path(__file__).parents[1] / "serving-env/llama.cpp"
# f16 attention parts at near ties
EXACT_LLAMA_CPP = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
needs_llama_cpp = pytest.mark.skipif(
    not LLAMA_CPP.exists(), reason="no llama-server: make serving-env ENGINE=llama.cpp"
)


def link_llama_cpp(project: Path) -> None:
    (project / "serving-env").mkdir(exist_ok=True)
    (project / "serving-env/llama.cpp").symlink_to(LLAMA_CPP)


def build_drafter(model: Any, layers: list[int], draft: Any, tree_scoring: str = "sglang") -> Drafter:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if isinstance(draft, BlockDraft):
        return BlockDrafter(draft, embedding, head, layers, tree_scoring)
    return Eagle3Drafter(draft, embedding, layers, tree_scoring)


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
