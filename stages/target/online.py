"""Compute hidden states while a draft trains, where none are stored (extract_hiddens.online).

Letters: N tokens of several documents end to end, M image tokens among them, H the target's hidden size.
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
    """The hidden states that a stored row would hold, as ordinary tensors: autograd may keep them."""

    features: Tensor  # [N, 3H]
    last: Tensor  # [N, H]
    image_embeddings: Tensor | None  # [M, H], of a multimodal target


class OnlineTarget:
    """A target and its image processor. Threads may call `build_inputs` during another's forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[int],
        image_processor: CachedImageProcessor | None,
        compile_tokens: int | None = None,
    ) -> None:
        """Compile the target's blocks for `compile_tokens` tokens, where given."""
        self.model, self.layers, self.image_processor = model, layers, image_processor
        self.supports_packing = packed_forward.supports_packing(model)
        if compile_tokens and self.supports_packing:
            packed_forward.compile_blocks(model, compile_tokens)

    @classmethod
    def load(
        cls,
        folder: str,
        dtype: str,
        device: str,
        trust_remote_code: bool,
        layers: list[int],
        compile_tokens: int | None = None,
    ) -> "OnlineTarget":
        model = loading.load_target(folder, None, dtype, device, trust_remote_code)
        processor = CachedImageProcessor(folder, trust_remote_code) if multimodal.is_multimodal(model) else None
        return cls(model, layers, processor, compile_tokens)

    def build_inputs(
        self, names: Sequence[str], documents: Sequence[Tensor], images: Sequence[Sequence[str] | None]
    ) -> multimodal.MultimodalInputs | None:
        """Return the inputs of documents, ids [T] each, by the paths of their images; None for a text target.

        Raises ValueError as `build_multimodal_inputs` and `CachedImageProcessor.load_patches` do.
        """
        if self.image_processor is None:
            return None
        patches = [self.image_processor.load_patches(paths) if paths else None for paths in images]
        return multimodal.build_multimodal_inputs(self.model, [f"row {name}" for name in names], documents, patches)

    def __call__(
        self, ids: Tensor, lengths: list[int], inputs: multimodal.MultimodalInputs | None
    ) -> OnlineHiddenStates:
        """Run the target over documents end to end, ids [N] on its device."""
        streams: dict[int, Tensor] = {}
        embeds: list[Tensor] = []

        def keep(part: int, stream: Tensor) -> None:
            streams[part] = packed_forward.unpad_stream(stream, lengths)

        input_tap = (
            nullcontext()
            if inputs is None
            else hooks.tap_decoder_inputs(self.model, lambda given, _: embeds.append(given))
        )
        with hooks.tap_residual_streams(self.model, self.layers, keep), input_tap:
            last = packed_forward.forward_documents(self.model, ids, lengths, self.supports_packing, inputs)
        # Cloned, since autograd may not keep tensors made in inference mode.
        features = torch.cat([streams[part] for part in sorted(streams)], dim=-1)
        if inputs is None:
            return OnlineHiddenStates(features, last.clone(), None)
        image_tokens = multimodal.copy_to_device(inputs.image_token_mask.nonzero()[:, 0], ids.device)
        image_embeddings = packed_forward.unpad_stream(embeds[0], lengths)[image_tokens].clone()
        return OnlineHiddenStates(features, last.clone(), image_embeddings)
