"""GPU memory, as an nvidia-smi of our own says it."""

import tempfile
from pathlib import Path

import pytest

from stages.engines import gpu_memory
from stages.measuring import measured_server, measurement_lock

OUTPUT = "0, GPU-aa, NVIDIA H200, 1024, 143771\n1, GPU-bb, NVIDIA H200, 71885, 143771\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<END\n{OUTPUT}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("chosen", "used"), [(None, [1.0, 70.2]), ("1", [70.2]), ("GPU-bb,0", [70.2, 1.0]), ("", []), ("7", [])]
)
def test_only_gpus_of_cuda_visible_devices_are_listed(
    chosen: str | None, used: list[float], smi: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [round(gpu.used, 1) for gpu in gpu_memory.list_visible_gpus()] == used


def test_memory_that_another_holds_is_named(smi: None) -> None:
    gpu_memory.check_free_memory(gpu_memory.list_visible_gpus()[:1], 0.9)
    with pytest.raises(
        ValueError, match=r"GPU 1 \(NVIDIA H200\) has 70\.2 GiB of 140 GiB free, expected at least 0\.9 of it"
    ):
        gpu_memory.check_free_memory(gpu_memory.list_visible_gpus(), 0.9)


def test_memory_beside_other_stages_servers_is_not_waited_for(
    smi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measured_server, "RELEASE_S", 0.2)
    gpus_before = [gpu._replace(used=0.0) for gpu in gpu_memory.list_visible_gpus()]
    with measurement_lock.start_server():
        assert measured_server.wait_for_release(gpus_before) == pytest.approx(71.2, abs=0.1)
    assert not capsys.readouterr().out
    measured_server.wait_for_release(gpus_before)
    assert "GiB are still in use 0.2 s after the server's end, 0 B were before" in capsys.readouterr().out
