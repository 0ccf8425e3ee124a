"""A full disk is one line, whichever library met it, and is not left full: real writes onto a tiny file system."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, copy_project

# In a namespace of its own, where also a user who is not root may mount; it is gone with the process.
MOUNTED = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size="$1" aerie-test "$2" && cd "$2" && shift 2 && exec "$@"'


def run_on_full_disk(
    folder: Path, *command: str, size: str = "1m", before: str = "true"
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, which is a file system of `size`, after the shell's `before`; Python finds the project."""
    try:
        can = subprocess.run([*MOUNTED, MOUNT, "sh", size, str(folder), "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here, to mount a small file system with")
    if can.returncode:
        pytest.skip(f"no small file system can be mounted here: {can.stderr.strip()}")
    script = MOUNT.replace("shift 2", f"shift 2 && {before}")
    return subprocess.run(
        [*MOUNTED, script, "sh", size, str(folder), *command],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


STAGE = """
import os
from pathlib import Path
import numpy as np
from stages.runtime import atomic
from stages.telemetry.run_stage import run_stage
numbers = np.random.default_rng(0).integers(0, 1 << 60, 400_000)
out = Path("results/out")
def main() -> None:
    {write}
try:
    run_stage(main)
finally:
    print([str(path) for path in Path().rglob("*") if path.is_file()], os.statvfs(".").f_bavail * 4096 > 900_000)
"""
WRITES = {
    "safetensors": "import torch; from safetensors.torch import save_file\n"
    "    with atomic.write_file(out) as to: save_file({'a': torch.zeros(1 << 20)}, to)",
    "polars": "import polars\n    with atomic.write_file(out) as to: polars.DataFrame({'a': numbers}).write_parquet(to)",
    "text": "atomic.write_text(out, 'x' * 4_000_000)",
    "an error told by another": "try: atomic.write_text(out, 'x' * 4_000_000)\n"
    "    except OSError as error: raise ValueError('broken; delete it') from None",
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_full_disk_is_one_line_and_the_partial_file_is_gone(tmp_path: Path, write: str) -> None:
    """Eight of ten stages ended in a traceback."""
    done = run_on_full_disk(tmp_path, sys.executable, "-c", STAGE.format(write=write))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("aerie: the disk is full, or its quota used: "), (
        done.stderr
    )
    assert (
        "results/out could not be written; it needs more than 1.00 MiB, and 1.00 MiB are free in results ("
        in done.stderr
    )
    assert "What earlier stages made is kept" in done.stderr and "run the same command again" in done.stderr
    assert done.stdout == "[] True\n"


@pytest.mark.parametrize("free_kib", [40, 200])
def test_fix_data_on_a_full_disk_is_one_line(tmp_path: Path, free_kib: int) -> None:
    """Also where a library fails in another process, and where the disk fills while the report is written."""
    source, disk = tmp_path / "source", tmp_path / "disk"
    source.mkdir()
    disk.mkdir()
    copy_project(source)
    fills = f"cp -r {source}/params.yaml {source}/data . && head -c $(( ($(df -k . | tail -1 | awk '{{print $4}}') - {free_kib}) * 1024 )) /dev/zero > filler"  # noqa: E501
    done = run_on_full_disk(disk, sys.executable, "-m", "stages.fix_data", size="24m", before=fills)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("aerie: the disk is full")
