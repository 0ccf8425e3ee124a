"""Placement of one target on several GPUs, block after block, within a memory limit for each.

Embedding, final norm, head, vision tower and the draft are on the first device; blocks are distributed in order, with their
keys and values. A block's inputs are moved to its device, and the last block's output back to the first. The engine uses it
like any model, but a pass over several devices can't be captured as one CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.engine.cuda_graphs import measure_free_memory
from stages.engine.memory_estimate import count_weight_bytes
from stages.params.units import GIB, format_bytes


def place_model(
    model: PreTrainedModel, devices: Sequence[torch.device | str], max_memory_gib: float | None = None
) -> None:
    """Move a model from the CPU to these devices, using at most `max_memory_gib` of each.

    Raises ValueError with the numbers where its weights alone exceed that.
    """
    decoder = model.get_decoder()
    blocks: nn.ModuleList = decoder.layers
    sizes = [count_weight_bytes(block) for block in blocks]
    rest = count_weight_bytes(model) - sum(sizes)
    owners = assign_blocks(rest, sizes, len(devices))
    needed = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == n) for n in range(len(devices))]
    needed[0] += rest
    for device, size in zip(devices, needed, strict=True):
        usable = measure_usable_memory(torch.device(device), max_memory_gib)
        if size > usable:
            raise ValueError(
                f"the target's weights are {format_bytes(sum(needed))}, {format_bytes(size)} of them for {device}, of which "
                f"{format_bytes(usable)} may be taken; raise benchmark.max_gpu_memory or num_gpus_per_model"
            )
        limit_gpu_memory(torch.device(device), max_memory_gib)
    decoder.layers = nn.ModuleList()  # so that model.to moves everything but the blocks
    try:
        model.to(devices[0])
    finally:
        decoder.layers = blocks
    for block, owner in zip(blocks, owners, strict=True):
        block.to(devices[owner])
    if len(devices) > 1:
        hook_input_transfers([*blocks, decoder.norm])


def assign_blocks(rest: int, blocks: Sequence[int], num_devices: int) -> list[int]:
    """Return the device index of each block, given sizes in bytes: in order, as even as whole blocks allow, `rest` first."""
    total, offset, owners = rest + sum(blocks), rest, []
    for size in blocks:
        owners.append(min(num_devices - 1, (2 * offset + size) * num_devices // (2 * total)))  # by the block's middle
        offset += size
    return owners


def hook_input_transfers(modules: Sequence[nn.Module]) -> None:
    """Move each module's inputs to its weights' device; keyword arguments shared by all blocks are moved once a device."""
    moved: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def move_shared(name: str, value: Any, device: torch.device) -> Any:
        if isinstance(value, tuple):
            return tuple(move_shared(f"{name}.{n}", one, device) for n, one in enumerate(value))
        if not isinstance(value, Tensor) or value.device == device:
            return value
        if (name, device) not in moved or moved[name, device][0] is not value:
            moved[name, device] = value, value.to(device)
        return moved[name, device][1]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        device = next(module.parameters()).device
        streams = tuple(one.to(device) if isinstance(one, Tensor) else one for one in args)  # differ for each block
        return streams, {name: move_shared(name, value, device) for name, value in kwargs.items()}

    for module in modules:
        module.register_forward_pre_hook(enter, with_kwargs=True)


def limit_gpu_memory(device: torch.device, max_memory_gib: float | None) -> None:
    """Limit this process to `max_memory_gib` of a GPU."""
    if max_memory_gib is not None and device.type == "cuda":
        fraction = max_memory_gib * GIB / torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)


def measure_usable_memory(device: torch.device, max_memory_gib: float | None) -> float:
    """Return the bytes that may be used: free memory (unlimited on a CPU), or `max_memory_gib` where that is less."""
    free = float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")
    return free if max_memory_gib is None else min(free, max_memory_gib * GIB)


def measure_remaining_memory(model: PreTrainedModel, max_memory_gib: float | None) -> float:
    """Return the bytes that can still be allocated on all devices of a model."""
    devices = {weight.device for weight in model.parameters()}
    return sum(
        measure_free_memory(device)
        if max_memory_gib is None or device.type != "cuda"
        else min(measure_free_memory(device), max_memory_gib * GIB - torch.cuda.memory_allocated(device))
        for device in devices
    )
