"""The first cosine of a process, made by two threads at once, is every other's.

The bug: MKL chose its code at that call, twice at once, and one of ten or twenty processes got other last bits.
"""

import subprocess
import sys

import pytest

import stages.draft.eagle3

STORY = """
import hashlib, torch
import stages.draft.eagle3
torch.set_num_threads(2)
angles = torch.arange(40_000, dtype=torch.float32)[:, None] * 0.37 ** torch.arange(16)
parts = [getattr(angles, name)() for name in ("cos", "sin", "exp", "tanh")]
print(hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest())
"""


def test_what_computes_makes_the_first_calls_when_it_is_imported() -> None:
    assert stages.draft.eagle3 and "stages.runtime.mkl_first_calls" in sys.modules


@pytest.mark.long
def test_every_process_computes_the_same() -> None:
    digests = {subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True).stdout for _ in range(100)}
    assert len(digests) == 1 and len(digests.pop().strip()) == 64
