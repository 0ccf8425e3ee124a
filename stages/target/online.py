"""The target while a draft is trained: hidden states made when they are wanted, where none are stored.

Letters: N tokens of several documents end to end, M of them that stand for pieces of pictures, H the target's hidden size.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.target import hooks, loading, multimodal, packed_forward
from stages.target.vision import CachedImageProcessor


class OnlineHiddenStates(NamedTuple):
    """What a row of hidden states holds on disk; gradients may be taken beside them."""

    features: Tensor  # [N, 3H]
    last: Tensor  # [N, H]
    visual: Tensor | None  # [M, H], of a target that sees


class OnlineTarget:
    """A target and its eyes. `look` may be called by several threads, beside the forward of one."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[int],
        eyes: CachedImageProcessor | None,
        compile_tokens: int | None = None,
    ) -> None:
        """`compile_tokens`: compile the target's blocks, on so many tokens."""
        self.model, self.layers, self.eyes, self.packed = model, layers, eyes, packed_forward.supports_packing(model)
        if compile_tokens and self.packed:
            packed_forward.compile_blocks(model, compile_tokens)

    @classmethod
    def load(
        cls, folder: str, dtype: str, device: str, trust_remote_code: bool, layers: list[int],
        compile_tokens: int | None = None,
    ) -> "OnlineTarget":  # fmt: skip
        model = loading.load_target(folder, None, dtype, device, trust_remote_code)
        return cls(
            model,
            layers,
            CachedImageProcessor(folder, trust_remote_code) if multimodal.is_multimodal(model) else None,
            compile_tokens,
        )

    def look(
        self, names: Sequence[str], documents: Sequence[Tensor], images: Sequence[Sequence[str] | None]
    ) -> multimodal.MultimodalInputs | None:
        """What documents, ids [T] each, hold beside tokens, by the paths of their pictures; None for a target of text.

        Raises ValueError as `target.look` and `CachedImageProcessor.see` do.
        """
        if self.eyes is None:
            return None
        shown = [self.eyes.see(paths) if paths else None for paths in images]
        return multimodal.build_multimodal_inputs(self.model, [f"row {name}" for name in names], documents, shown)

    def __call__(self, ids: Tensor, lengths: list[int], view: multimodal.MultimodalInputs | None) -> OnlineHiddenStates:
        """Documents end to end, ids [N] on the target's device."""
        streams: dict[int, Tensor] = {}
        embeds: list[Tensor] = []

        def keep(part: int, stream: Tensor) -> None:
            streams[part] = packed_forward.unpad_stream(stream, lengths)

        sight = (
            nullcontext()
            if view is None
            else hooks.tap_decoder_inputs(self.model, lambda given, _: embeds.append(given))
        )
        with hooks.tap_residual_streams(self.model, self.layers, keep), sight:
            last = packed_forward.forward_documents(self.model, ids, lengths, self.packed, view)
        # Copies, since autograd may not keep what was made in inference mode.
        features = torch.cat([streams[part] for part in sorted(streams)], dim=-1)
        if view is None:
            return OnlineHiddenStates(features, last.clone(), None)
        pieces = multimodal.copy_to_device(view.pictured.nonzero()[:, 0], ids.device)
        return OnlineHiddenStates(
            features, last.clone(), packed_forward.unpad_stream(embeds[0], lengths)[pieces].clone()
        )
