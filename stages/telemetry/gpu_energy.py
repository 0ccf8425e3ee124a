"""Energy used by GPUs, from the energy counters of their driver (NVML). No sampling, no thread."""

from typing import Any

import pynvml

from stages.runtime.machine import list_named_gpus


class EnergyMeter:
    """Energy of some GPUs since the meter was made. A counter covers all users of a card; MIG slices have none."""

    def __init__(self, indices: list[int] | None) -> None:
        """`indices` are indices into CUDA_VISIBLE_DEVICES; None: all of them."""
        cards = list_visible_cards() if indices != [] else []
        self._cards = cards if indices is None else [cards[index] for index in indices if index < len(cards)]
        self._before = self._read_millijoules()

    def names(self) -> list[str]:
        return [pynvml.nvmlDeviceGetName(card) for card in self._cards]

    def joules(self) -> float | None:
        """Return the energy of all GPUs together; None without a GPU, or if one has no counter."""
        before, now = self._before, self._read_millijoules()
        return None if before is None or now is None else (now - before) / 1000

    def _read_millijoules(self) -> int | None:
        try:
            return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._cards)) if self._cards else None
        except pynvml.NVMLError:
            return None


def list_visible_cards() -> list[Any]:
    """Return NVML's handles of the visible GPUs in CUDA's order, which is NVML's if all GPUs are of one kind."""
    found: list[Any] = []
    try:
        pynvml.nvmlInit()
        named = list_named_gpus()
        for gpu in map(str, range(pynvml.nvmlDeviceGetCount())) if named is None else named:
            by_index = gpu.isdigit()
            card = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(gpu)
            found.append(card)
    except pynvml.NVMLError:  # no driver; or as CUDA, which sees no GPU from the first on that is not there
        pass
    return found
