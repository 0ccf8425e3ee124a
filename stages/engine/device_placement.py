"""One copy of a target on several cards, block after block, and how much of each may be taken.

Embedding, final norm, head, vision tower and the draft are at home, on the first card; blocks lie where there is room, in
order, with their keys and values. What a block is given is brought to its card, and the last one's output home. So the
engine sees one model; but a pass over several cards can't be recorded as one CUDA graph, and is called.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.engine.cuda_graphs import measure_free_memory
from stages.engine.memory_estimate import GIB, count_weight_bytes


def place_model(model: PreTrainedModel, cards: Sequence[torch.device | str], most: float | None = None) -> None:
    """Move a model that lies on the CPU to these cards, of each of which at most `most` GiB may be taken.

    Raises ValueError with the numbers where its weights alone are more than that.
    """
    decoder = model.get_decoder()
    blocks: nn.ModuleList = decoder.layers
    sizes = [count_weight_bytes(block) for block in blocks]
    rest = count_weight_bytes(model) - sum(sizes)
    owners = assign_blocks(rest, sizes, len(cards))
    held = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == n) for n in range(len(cards))]
    held[0] += rest
    for card, size in zip(cards, held, strict=True):
        room = measure_usable_memory(torch.device(card), most)
        if size > room:
            raise ValueError(
                f"the target's weights are {sum(held) / GIB:.1f} GiB, {size / GIB:.1f} of them for {card}, of which "
                f"{room / GIB:.1f} may be taken; raise benchmark.max_gpu_memory or num_gpus_per_model"
            )
        limit_gpu_memory(torch.device(card), most)
    decoder.layers = nn.ModuleList()  # the rest alone
    try:
        model.to(cards[0])
    finally:
        decoder.layers = blocks
    for block, owner in zip(blocks, owners, strict=True):
        block.to(cards[owner])
    if len(cards) > 1:
        hook_input_transfers([*blocks, decoder.norm])


def assign_blocks(rest: int, blocks: Sequence[int], cards: int) -> list[int]:
    """The card of each block, by sizes: in order and as even as whole blocks allow, `rest` on the first card before them."""
    whole, at, found = rest + sum(blocks), rest, []
    for size in blocks:
        found.append(min(cards - 1, (2 * at + size) * cards // (2 * whole)))  # where its middle lies
        at += size
    return found


def hook_input_transfers(modules: Sequence[nn.Module]) -> None:
    """Each is given its tensors where its weights are. What all blocks are given alike is brought to a card once."""
    seen: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def bring(name: str, value: Any, device: torch.device) -> Any:
        if isinstance(value, tuple):
            return tuple(bring(f"{name}.{n}", one, device) for n, one in enumerate(value))
        if not isinstance(value, Tensor) or value.device == device:
            return value
        if (name, device) not in seen or seen[name, device][0] is not value:
            seen[name, device] = value, value.to(device)
        return seen[name, device][1]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        device = next(module.parameters()).device
        moved = tuple(one.to(device) if isinstance(one, Tensor) else one for one in args)  # streams: new for each block
        return moved, {name: bring(name, value, device) for name, value in kwargs.items()}

    for module in modules:
        module.register_forward_pre_hook(enter, with_kwargs=True)


def limit_gpu_memory(device: torch.device, most: float | None) -> None:
    """Let this process take no more than `most` GiB of the card."""
    if most is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, most * GIB / torch.cuda.mem_get_info(device)[1]), device)


def measure_usable_memory(device: torch.device, most: float | None) -> float:
    """Bytes of the card that may be taken: what is free, or `most` GiB where that is less. A CPU isn't asked what is free."""
    free = float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")
    return free if most is None else min(free, most * GIB)


def measure_remaining_memory(model: PreTrainedModel, most: float | None) -> float:
    """Bytes that can still be taken of all cards it lies on."""
    cards = {weight.device for weight in model.parameters()}
    return sum(
        measure_free_memory(card)
        if most is None or card.type != "cuda"
        else min(measure_free_memory(card), most * GIB - torch.cuda.memory_allocated(card))
        for card in cards
    )
