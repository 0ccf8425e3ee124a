"""Compute hidden states of documents, to be stored or, where none are (extract_hiddens.online), while a draft trains.

Letters: N tokens of several documents end to end, M image tokens among them, H the target's hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.params.target_sections import Target
from stages.target import flash_attention, hooks, loading, manifest, multimodal, packed_forward
from stages.target.vision import CachedImageProcessor


class TargetHiddenStates(NamedTuple):
    """The hidden states that a stored row would hold, as ordinary tensors: autograd may keep them."""

    features: Tensor  # [N, KH]
    last: Tensor  # [N, H]
    image_embeddings: Tensor | None  # [M, H], of a multimodal target


class FeatureTarget:
    """A target and its image processor. Threads may call `build_inputs` during another's forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[int],
        image_processor: CachedImageProcessor | None,
        compile_tokens: int | None = None,
    ) -> None:
        """Choose the fastest attention kernel; compile the target's blocks for `compile_tokens` tokens, where given."""
        self.model, self.layers, self.image_processor = model, layers, image_processor
        flash_attention.activate_flash_attention_3(model.device)
        self.supports_packing = packed_forward.supports_packing(model)
        if compile_tokens and self.supports_packing:
            packed_forward.compile_blocks(model, compile_tokens)

    @classmethod
    def load(
        cls,
        target: manifest.TargetManifest,
        settings: Target,
        device: str,
        compile_tokens: int | None = None,
        layers: list[int] | None = None,
    ) -> "FeatureTarget":
        """Load the target with features of `layers`, of all that are stored where None."""
        folder, trust = str(manifest.resolve_weights_folder(target)), settings.trust_remote_code
        model = loading.load_target(folder, settings.dtype, device, trust)
        processor = None if target.image_token_id is None else CachedImageProcessor(folder, trust)
        return cls(model, layers or target.feature_layers, processor, compile_tokens)

    def build_inputs(
        self, names: Sequence[str], documents: Sequence[Tensor], image_paths: Mapping[str, Sequence[str]]
    ) -> multimodal.MultimodalInputs | None:
        """Return the inputs of documents, ids [T] each, with the images of their names; None for a text target.

        Raises ValueError as `build_multimodal_inputs` and `CachedImageProcessor.load_patches` do.
        """
        processor = self.image_processor
        if processor is None:
            return None
        patches = [processor.load_patches(image_paths[n]) if image_paths.get(n) else None for n in names]
        return multimodal.build_multimodal_inputs(self.model, [f"row {name}" for name in names], documents, patches)

    def forward(
        self,
        ids: Tensor,
        lengths: list[int],
        inputs: multimodal.MultimodalInputs | None,
        keep: Callable[[int, Tensor], None],
    ) -> Tensor | None:
        """Run the target over documents end to end, ids [N] on its device; return the image tokens' embeddings [M, H].

        Calls keep(part, [N, H]) as soon as a part is computed: those of the feature layers from 0 on, low to high, then the
        last hidden state after the final norm. Raises ValueError where the class skips the block that a feature layer leaves.
        """
        embeddings: list[Tensor] = []
        kept: set[int] = set()

        def keep_embeddings(embeds: Tensor, _positions: Tensor) -> None:
            assert inputs is not None
            image_tokens = multimodal.copy_to_device(inputs.image_token_mask.nonzero()[:, 0], ids.device)  # [M]
            embeddings.append(packed_forward.unpad_stream(embeds, lengths)[image_tokens])

        def keep_stream(part: int, stream: Tensor) -> None:
            kept.add(part)
            keep(part, packed_forward.unpad_stream(stream, lengths))

        input_tap = hooks.tap_decoder_inputs(self.model, keep_embeddings) if inputs is not None else nullcontext()
        with hooks.tap_residual_streams(self.model, self.layers, keep_stream), input_tap:
            last = packed_forward.forward_documents(self.model, ids, lengths, self.supports_packing, inputs)
        if missing := [layer for part, layer in enumerate(sorted(self.layers)) if part not in kept]:
            raise ValueError(
                f"{type(self.model).__name__} skipped the blocks before feature layers {missing}, expected each to run: their "
                "residual streams would be stored as they were in memory. Take others: target.feature_layers"
            )
        keep(len(self.layers), last)
        return embeddings[0] if embeddings else None

    def compute_hidden_states(
        self, ids: Tensor, lengths: list[int], inputs: multimodal.MultimodalInputs | None
    ) -> TargetHiddenStates:
        """Return all hidden states of documents end to end, ids [N] on the target's device."""
        parts: dict[int, Tensor] = {}
        embeddings = self.forward(ids, lengths, inputs, parts.__setitem__)
        last = parts.pop(len(self.layers))
        # Cloned, since autograd may not keep tensors made in inference mode.
        features = torch.cat([parts[part] for part in sorted(parts)], dim=-1)
        return TargetHiddenStates(features, last.clone(), None if embeddings is None else embeddings.clone())
