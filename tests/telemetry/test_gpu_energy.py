"""telemetry/gpu_energy.py against a compiled library with NVML's own signatures, and the line that a stage logs."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from stages.telemetry.gpu_energy import EnergyMeter

# Three cards; the third has no counter, as slices of a card have none. Each look at one takes 1500 mJ more.
NVML = """
#include <string.h>
typedef struct { int number; unsigned long long spent; } *nvmlDevice_t;
static struct { int number; unsigned long long spent; } cards[] = {{0, 7000000000ULL}, {1, 20}, {2, 0}};
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *card) {
  if (index > 2) return 2; *card = (nvmlDevice_t)&cards[index]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *card) {
  if (strcmp(uuid, "GPU-one")) return 6; *card = (nvmlDevice_t)&cards[1]; return 0; }
int nvmlDeviceGetName(nvmlDevice_t card, char *name, unsigned int length) {
  strncpy(name, card->number ? "Other" : "Card", length); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t card, unsigned long long *spent) {
  if (card->number == 2) return 3; *spent = (card->spent += 1500); return 0; }
"""


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler here")
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "nvml.so", tmp_path / "nvml.c"], check=True)
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(tmp_path / "nvml.so")))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_joules_are_the_difference_of_the_gpus_own_counters(cards: None) -> None:
    meter = EnergyMeter([0, 1])
    assert meter.names() == ["Card", "Other"]
    assert meter.joules() == 3.0  # a look each, since the first
    assert EnergyMeter([1]).joules() == 1.5


def test_a_gpu_without_an_energy_counter_makes_the_sum_unknown(cards: None) -> None:
    meter = EnergyMeter(None)
    assert meter.names() == ["Card", "Other", "Other"] and meter.joules() is None


@pytest.mark.parametrize(
    ("visible", "which", "names"),
    [
        ("1,0", [0], ["Other"]),
        ("GPU-one, 0", None, ["Other", "Card"]),
        ("0,GPU-gone,1", None, ["Card"]),  # as CUDA: none from the first on that isn't there
        ("", None, []),
    ],
)
def test_the_gpus_are_those_that_cuda_would_show(
    cards: None, monkeypatch: pytest.MonkeyPatch, visible: str, which: list[int] | None, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert EnergyMeter(which).names() == names
