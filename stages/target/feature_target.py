"""Compute hidden states of documents, to be stored or, where none are (extract_hiddens.online), while a draft trains.

Letters: N tokens of several documents end to end, M image tokens among them, H the target's hidden size.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from transformers import PreTrainedModel

from stages.params.target_sections import Target
from stages.target import hooks, loading, manifest, multimodal, packed_forward
from stages.target.vision import CachedImageProcessor

FA3_MODULE = "flash_attn_interface"  # of the package flash-attn-3
HOPPER = 9  # the compute capability that FlashAttention 3 runs on
MAX_DIFFERENCE = 0.02  # between two kernels in bfloat16, of the norm


def activate_flash_attention_3(device: torch.device) -> bool:
    """Replace PyTorch's flash kernel by FlashAttention 3 in this process, where it is installed on a Hopper; return whether.

    PyTorch calls it for `_flash_attention_forward` from then on, in compiled code too (torch.nn.attention, torch 2.11). On an
    H200 its forward takes half of the time (docs/results/2026-11-27-h200-sweep-8b.md). A kernel that fails, or computes something
    else than PyTorch's, is left out with a warning.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    if importlib.util.find_spec(FA3_MODULE) is None or not hasattr(attention, "activate_flash_attention_impl"):
        return False
    if attention.current_flash_attention_impl() == "FA3":
        return True
    try:
        expected = attend_two_documents(device)
        with warnings.catch_warnings():
            # That is the purpose.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            attention.activate_flash_attention_impl("FA3")
        difference = float((attend_two_documents(device) - expected).norm() / expected.norm())
        if not difference < MAX_DIFFERENCE:
            raise RuntimeError(
                f"its output is {difference:.2g} away from PyTorch's kernel, expected less than {MAX_DIFFERENCE}"
            )
    except (ImportError, RuntimeError, OSError, ValueError, TypeError) as error:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        warnings.warn(
            f"FlashAttention 3 is installed and can't be used ({type(error).__name__}: {error}); PyTorch's kernel is used",
            stacklevel=2,
        )
        return False
    return True


def attend_two_documents(device: torch.device) -> Tensor:
    """Return causal attention [24, 2, 64] of two short documents by the flash kernel in use."""
    generator = torch.Generator(device).manual_seed(1)
    query, key, value = (
        torch.randn(24, heads, 64, device=device, dtype=torch.bfloat16, generator=generator) for heads in (2, 1, 1)
    )
    borders = torch.tensor([0, 11, 24], device=device, dtype=torch.int32)
    forward = torch.ops.aten._flash_attention_forward
    return forward(query, key, value, borders, borders, 13, 13, 0.0, True, False)[0].float()


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
        activate_flash_attention_3(model.device)
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
