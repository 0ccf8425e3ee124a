"""The committed export regenerates, has the stated damage, and its repairs equal the undamaged answers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAW = ROOT / "data/raw/weather_toon.jsonl"


def test_the_committed_file_regenerates_byte_for_byte() -> None:
    command = [sys.executable, "-m", "tests.toy.damaged_exports"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    assert made == RAW.read_bytes(), "run: python -m tests.toy.damaged_exports > data/raw/weather_toon.jsonl"
