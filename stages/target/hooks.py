"""Capture the residual streams and inputs of a decoder with forward hooks.

Every class that transformers' Auto classes know is hooked the same way: dense, mixture of experts and vision-language. The only
requirement is a decoder with a list of `layers`.

Letters: B rows, T tokens, H the target's hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


@contextmanager
def tap_residual_streams(
    model: PreTrainedModel, layers: list[int], keep: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Inside the block, each decoder forward calls keep(k, stream) with the residual stream entering the k-th of `layers`.

    The stream is taken at the output of block i - 1, as transformers' `hidden_states[i]` and SGLang 0.5.17 do. The two ends
    differ only under deepstack: what Qwen3-VL adds to image tokens between block i - 1 and block i is left out.
    """
    blocks = model.get_decoder().layers

    def entering(k: int) -> Callable:
        return lambda _module, args, kwargs: keep(k, args[0] if args else kwargs["hidden_states"])

    def leaving(k: int) -> Callable:
        return lambda _module, _args, out: keep(k, out[0] if isinstance(out, tuple) else out)

    with ExitStack() as stack:
        for k, i in enumerate(sorted(layers)):
            stack.enter_context(
                blocks[i - 1].register_forward_hook(leaving(k))
                if i
                else blocks[0].register_forward_pre_hook(entering(k), with_kwargs=True)
            )
        yield


@contextmanager
def capture_residual_streams(model: PreTrainedModel, layers: list[int]) -> Iterator[list[Tensor]]:
    """Inside the block, each decoder forward appends the residual streams [B, T, H] entering `layers`, low to high."""
    caught: list[Tensor] = []
    with tap_residual_streams(model, layers, lambda _, stream: caught.append(stream)):
        yield caught


def tap_decoder_inputs(model: PreTrainedModel, keep: Callable[[Tensor, Tensor], None]) -> RemovableHandle:
    """Inside the block, each forward of a multimodal target calls keep(embeds [B, T, H], positions [B, T, 3]).

    These are its decoder's inputs: embeddings with those of images in place, and rotary positions.
    """

    def tap(_module: Any, _args: Any, kwargs: Any) -> None:
        keep(kwargs["inputs_embeds"], kwargs["position_ids"][-3:].permute(1, 2, 0))  # without the text positions

    return model.get_decoder().register_forward_pre_hook(tap, with_kwargs=True)
