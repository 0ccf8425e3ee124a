"""FlashAttention 3 of vLLM's wheel under the name that PyTorch looks for, for machines that reach no package registry.

`benchmarks/gpu_bundle.sh fa3` puts this file beside vLLM's `_vllm_fa3_C`; a machine with a registry installs flash-attn-3 itself.
vLLM's operator (0.26.0) is flash_attn_3::fwd without `attention_chunk`, with attention sinks and context parallelism at its
end. It has no backward, and extraction needs none.
"""

from typing import Any

import _vllm_fa3_C  # type: ignore[import-not-found]  # noqa: F401  registers torch.ops._vllm_fa3_C
import torch

CHUNK = 27  # the position of `attention_chunk` among the arguments
SCALE, QUERY = 23, 0
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? qv, Tensor? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool is_causal, "
    "int window_size_left, int window_size_right, int attention_chunk, float softcap, bool rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin"
)


def run_forward(*arguments: Any) -> list[torch.Tensor]:
    """Return the output, the log-sum-exp and what split kernels leave (empty without a split), by vLLM's operator."""
    given = list(arguments)
    if given.pop(CHUNK):
        raise NotImplementedError("attention_chunk")
    if given[SCALE] is None:
        given[SCALE] = given[QUERY].shape[-1] ** -0.5
    empty = torch.empty(0, device=given[QUERY].device)
    return [empty if made is None else made for made in torch.ops._vllm_fa3_C.fwd(*given, None, 1, 0, None)]


def run_backward(*_: Any) -> None:
    raise NotImplementedError("vLLM's FlashAttention 3 has no backward")


LIBRARY = torch.library.Library("flash_attn_3", "DEF")
LIBRARY.define(f"fwd({ARGUMENTS}) -> Tensor[]")
LIBRARY.define("bwd(Tensor q) -> ()")
LIBRARY.impl("fwd", run_forward, "CUDA")
LIBRARY.impl("bwd", run_backward, "CUDA")
