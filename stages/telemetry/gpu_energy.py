"""Energy used by GPUs, from NVML's own energy counters (the library comes with the driver). No sampling, no thread."""

import ctypes
import os
from typing import Any

NVML_LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE in nvml.h


class EnergyMeter:
    """Energy of some GPUs since the meter was made. A counter covers all users of a card; MIG slices have none."""

    def __init__(self, which: list[int] | None) -> None:
        """`which` are indices into CUDA_VISIBLE_DEVICES; None: all of them."""
        self._nvml: Any = _load_nvml() if which != [] else None
        cards = _list_visible_handles(self._nvml) if self._nvml else []
        self._cards = cards if which is None else [cards[place] for place in which if place < len(cards)]
        self._before = [self._millijoules(card) for card in self._cards]

    def names(self) -> list[str]:
        found = []
        for card in self._cards:
            name = ctypes.create_string_buffer(NAME_BYTES)
            _succeeded(self._nvml.nvmlDeviceGetName(card, name, NAME_BYTES))
            found.append(name.value.decode())
        return found

    def joules(self) -> float | None:
        """Return the energy of all GPUs together; None without a GPU, or if one has no counter."""
        now = [self._millijoules(card) for card in self._cards]
        pairs = list(zip(now, self._before, strict=True))
        if not pairs or any(after is None or before is None for after, before in pairs):
            return None
        return sum(after - before for after, before in pairs) / 1000

    def _millijoules(self, card: Any) -> Any:
        count = ctypes.c_ulonglong()
        return (
            count.value
            if _succeeded(self._nvml.nvmlDeviceGetTotalEnergyConsumption(card, ctypes.byref(count)))
            else None
        )


def _load_nvml() -> Any:
    """Return NVML, initialised; None on a machine without it."""
    try:
        nvml = ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return None
    return nvml if _succeeded(nvml.nvmlInit_v2()) else None


def _list_visible_handles(nvml: Any) -> list[Any]:
    """Return handles of the visible GPUs in CUDA's order, which is NVML's if all GPUs are of one kind."""
    count = ctypes.c_uint()
    if not _succeeded(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))):
        return []
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = list(map(str, range(count.value))) if wanted is None else [word.strip() for word in wanted.split(",")]
    found = []
    for word in filter(None, words):
        card = ctypes.c_void_p()
        if word.isdigit():
            asked = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(card))
        else:
            asked = nvml.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(card))
        if not _succeeded(asked):
            break  # as CUDA, which sees none from the first on that isn't there
        found.append(card)
    return found


def _succeeded(status: int) -> bool:
    return status == 0  # NVML_SUCCESS
