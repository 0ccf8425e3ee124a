"""What DVC costs a stage that writes much: md5 and hard links of an output of many GB, beside the floor.

    python -m benchmarks.dvc_storage FOLDER [--gb 8] [--shard-mib 256]

FOLDER, on the disk to be measured, becomes a DVC project of two stages: `make` writes random shards, `use` depends on them and
does nothing. Printed: seconds of writing, of DVC around it, of md5 alone by one and by four threads (the floor: each byte is read
once), of a stage that depends on the output, and of a run with nothing to do. What DVC costs grows with the bytes, so
seconds of 100 GB are those of one GB times 100.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MAKE = """
import json, os, sys, time
folder, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
begun = time.perf_counter()
os.makedirs(folder, exist_ok=True)
block = os.urandom(1 << 20)
for n in range(count):
    with open(f"{folder}/shard-{n:05}", "wb") as file:
        for part in range(size >> 20):
            file.write((n * 1000003 + part).to_bytes(8, "big") + block[8:])
        os.fsync(file.fileno())
json.dump(time.perf_counter() - begun, open("write_s.json", "w"))
"""
CONFIG = """[core]
    analytics = false
    no_scm = true
[cache]
    type = "hardlink,symlink"
"""
GRAPH = """stages:
  make: {{cmd: "python make.py data {count} {size}", outs: [data], metrics: [write_s.json: {{cache: false}}]}}
  use: {{cmd: "python -c 'open(chr(117), chr(119)).close()'", deps: [data], outs: [u]}}
"""


def run_dvc(folder: Path, *words: str) -> float:
    begun = time.perf_counter()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "dvc", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        env=os.environ | {"PATH": path},
    )
    return time.perf_counter() - begun


def measure_md5(files: list[Path], threads: int) -> float:
    """Return seconds of md5 of all files."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        assert len(set(pool.map(digest, files))) == len(files)
    return time.perf_counter() - begun


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("folder", type=Path)
    takes.add_argument("--gb", type=float, default=8)
    takes.add_argument("--shard-mib", type=int, default=256)
    told = takes.parse_args()
    size = told.shard_mib << 20
    count = round(told.gb * 1e9 / size)
    gigabytes = count * size / 1e9
    told.folder.mkdir(parents=True)
    run_dvc(told.folder, "init", "--no-scm", "-q")
    (told.folder / ".dvc/config").write_text(CONFIG)
    (told.folder / "make.py").write_text(MAKE)
    (told.folder / "dvc.yaml").write_text(GRAPH.format(count=count, size=size))
    empty = run_dvc(told.folder, "status")
    whole = run_dvc(told.folder, "repro", "make")
    written = json.loads((told.folder / "write_s.json").read_text())
    files = sorted((told.folder / "data").iterdir())
    found = {
        "GB": round(gigabytes, 2),
        "files": count,
        "start of DVC": empty,
        "writing": written,
        "DVC around it": whole - written,
        "md5 alone, 1 thread": measure_md5(files, 1),
        "md5 alone, 4 threads": measure_md5(files, 4),
        "a stage that depends on it": run_dvc(told.folder, "repro", "use"),
        "nothing to do": run_dvc(told.folder, "repro"),
    }
    assert files[0].stat().st_nlink == 2, "the output is no hard link of the cache"
    for name, seconds in found.items():
        rate = f"   {gigabytes / seconds:6.2f} GB/s" if name in ("writing", "DVC around it") or "md5" in name else ""
        print(f"{name:28}{seconds:10.2f}{rate}")


if __name__ == "__main__":
    main()
