"""Measured rates of an H200, and the seconds that follow from them by FLOP and bytes.

Every rate names the page of docs/results that it was measured on. Other GPUs are scaled by their datasheets.
"""

from dataclasses import dataclass

from stages.params import schema
from stages.reproduce.target_size import TargetSize, get_itemsize

GB, MS = 1e9, 1e-3


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU's datasheet."""

    name: str
    peak_flops: float  # FLOP/s in bfloat16, dense
    bandwidth: float  # bytes/s of its memory

    @property
    def bandwidth_share(self) -> float:
        return self.bandwidth / MEASURED_GPU.bandwidth

    @property
    def origin(self) -> str:
        """Return where arithmetic with this GPU comes from."""
        if self is MEASURED_GPU:
            return f"arithmetic from rates of an {self.name}"
        return f"arithmetic from rates of an {MEASURED_GPU.name}, scaled to an {self.name} by datasheet"


MEASURED_GPU = Gpu("H200", 989e12, 4.8e12)
GPUS = {"h200": MEASURED_GPU, "h100": Gpu("H100", 989e12, 3.35e12)}  # both SXM

# docs/results/2026-11-21-h200-training.md: shares of the peak, at the shape of Qwen3-8B, and of two GPUs' time that is used
EXTRACTING_SHARE, EXTRACTING_COMPILED_SHARE, TRAINING_SHARE, ONLINE_SHARE = 0.434, 0.559, 0.57, 0.591
TWO_GPUS_EXTRACTING, TWO_GPUS_TRAINING = 1.95 / 2, 1.92 / 2
# docs/results/2026-11-25-h200-two-gpus.md: of block drafts, by method, from step to step
BLOCK_TRAINING_SHARES = {"dflash": 0.540, "dflash2": 0.466, "dspark": 0.461}
DISK_BYTES_S = 1.95e9  # the same page: what the disk of that machine took
QWEN3_8B_BYTES = (
    15.14 * GB
)  # of a plain step at its shape: blocks and head in bfloat16, as `_count_step_bytes` counts them
# docs/results/2026-11-22-h200-one-engine.md: the torch engine's plain step at that shape takes 4.574 ms: 0.127 a layer
TORCH_BYTES_S = QWEN3_8B_BYTES / (4.574 * MS)
# docs/results/2026-11-22-h200-engine.md: steps of targets of 7 layers and a few million parameters, which read almost nothing
TORCH_LAYER_S, TORCH_MIXTURE_LAYER_S = 0.19 * MS / 7, 0.67 * MS / 7
# The same page: 25.2 ms a step of EAGLE's engine, which runs transformers' modules one kernel at a time, as `generate` does
TRANSFORMERS_LAYER_S = 25.2 * MS / 36
# docs/results/2026-11-20-h200-decoding.md: SGLang's plain step at that shape takes 5.22 ms; it starts in 64 s the first time
SERVED_BYTES_S, SERVER_START_S = QWEN3_8B_BYTES / (5.22 * MS), 64
# docs/results/2026-11-21-h200-serving.md: SGLang's plain step of a tiny target, so its own overhead
SERVED_STEP_S = 1.19 * MS


def estimate_torch_step(p: schema.Params, target: TargetSize, gpu: Gpu, at_once: int, context: int) -> float:
    """Return the seconds of a plain step of the torch engine."""
    layer = TORCH_MIXTURE_LAYER_S if target.mixture else TORCH_LAYER_S
    read = _count_step_bytes(p, target, at_once, context)
    return max(read / (TORCH_BYTES_S * gpu.bandwidth_share), layer * target.manifest.num_layers)


def estimate_served_step(p: schema.Params, target: TargetSize, gpu: Gpu, at_once: int, context: int) -> float:
    """Return the seconds of a plain step of SGLang: by bytes read, and where many prompts are at once by FLOP."""
    compute = at_once * 2 * target.blocks / (EXTRACTING_SHARE * gpu.peak_flops)
    read = _count_step_bytes(p, target, at_once, context)
    return max(read / (SERVED_BYTES_S * gpu.bandwidth_share), compute, SERVED_STEP_S)


def estimate_generate_step(p: schema.Params, target: TargetSize, gpu: Gpu, at_once: int, context: int) -> float:
    """Return the seconds of a step of transformers' `generate`, which waits for Python."""
    waiting = TRANSFORMERS_LAYER_S * target.manifest.num_layers
    return max(waiting, estimate_served_step(p, target, gpu, at_once, context))


def _count_step_bytes(p: schema.Params, target: TargetSize, at_once: int, context: int) -> float:
    """Return the bytes that a step reads: the weights that `at_once` tokens meet, once, and their contexts."""
    weights = min(target.all_blocks, target.blocks * at_once) + target.manifest.vocab_size * target.manifest.hidden_size
    return weights * get_itemsize(p.target.dtype) + at_once * context * target.kv_bytes(p.target.dtype)


def scale_to_gpus(gpu_seconds: float, gpus: int, efficiency: float) -> float:
    """Return the seconds of all GPUs together: that of two was measured, that of more is assumed to be the same."""
    return gpu_seconds / (efficiency if gpus > 1 else 1.0)
