"""GPU memory, as a driver of our own says it."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.engines import gpu_memory
from stages.measuring import measured_server, measurement_lock
from stages.telemetry import gpu_energy

USED_MIB, TOTAL_MIB = (1024, 71885), 143771


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_memory(card: int, version: int) -> SimpleNamespace:
        return SimpleNamespace(used=USED_MIB[card] * 2**20, total=TOTAL_MIB * 2**20)

    names = {
        "nvmlDeviceGetName": lambda card: "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": read_memory,
        "nvmlMemory_v2": 2,
    }
    monkeypatch.setattr(gpu_energy, "pynvml", SimpleNamespace(**names))
    monkeypatch.setattr(gpu_energy, "list_visible_cards", lambda: [0, 1])


def test_memory_that_another_holds_is_named(two_gpus: None) -> None:
    gpu_memory.check_free_memory(gpu_memory.list_visible_gpus()[:1], 0.9)
    with pytest.raises(
        ValueError, match=r"GPU 1 \(NVIDIA H200\) has 70\.2 GiB of 140 GiB free, expected at least 0\.9 of it"
    ):
        gpu_memory.check_free_memory(gpu_memory.list_visible_gpus(), 0.9)


def test_memory_beside_other_stages_servers_is_not_waited_for(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measured_server, "RELEASE_S", 0.2)
    gpus_before = [gpu._replace(used=0.0) for gpu in gpu_memory.list_visible_gpus()]
    with measurement_lock.start_server():
        assert measured_server.wait_for_release(gpus_before) == pytest.approx(71.2, abs=0.1)
    assert not capsys.readouterr().out
    measured_server.wait_for_release(gpus_before)
    assert "GiB are still in use 0.2 s after the server's end, 0 B were before" in capsys.readouterr().out
