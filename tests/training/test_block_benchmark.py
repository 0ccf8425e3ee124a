"""benchmarks/training.py on a CPU: it runs for block drafts, and its FLOP are those of the packs that were trained on."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import training

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("method", "size", "drafts"), [("dflash", 16, 15), ("dflash2", 16, 15), ("dspark", 7, 7)])
def test_the_benchmark_counts_what_it_trains(
    method: str,
    size: int,
    drafts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two packs of one row of 2,048 tokens a step, eight blocks each, so that nearly all drafts are valid."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = "--hidden 128 --vocab 400 --tokens 8192 --batch-tokens 2048 --packs-per-step 2 --anchors 8 --layers 1 --epochs 1"
    monkeypatch.setattr(
        sys, "argv", ["training", "--method", method, "--device", "cpu", "--dtype", "float32", *words.split()]
    )
    training.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["steps"], found["anchors"], found["rows"]) == (method, 4, 8, 4)
    assert found["drafts_per_block"] == pytest.approx(drafts, abs=0.5)
    kernels = 2 * (2 * 2 * 128 // 16) if method == "dflash2" else 0  # of both convolutions
    row = 128 * (128 + 128 + 2 * 128 + 3 * 384 + kernels)
    assert found["of_a_block"]["layers"] == pytest.approx(6 * size * row / 1e9, abs=1e-3)
    blocks, tokens = 16, 4096  # of a step
    expected = blocks * found["gflop_per_block"] + tokens * found["gflop_per_context_token"]
    assert found["tflop_per_step"] == pytest.approx(expected / 1e3, abs=1e-3)
    assert {"first_step_s", "steady_step_s", "blocks_per_s", "mfu", "steady_mfu"} <= set(found)
