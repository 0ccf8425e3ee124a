"""The committed export regenerates, has the stated damage, and its repairs equal the undamaged answers."""

import base64
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import toon_format
import toons
from PIL import Image

from stages.data.tables import toon
from stages.data.tables.table_schema import load_table_file
from stages.toy import weather, weather_maps
from tests.toy import damaged_exports

ROOT = Path(__file__).parents[2]
RAW = ROOT / "data/raw/weather_toon.jsonl"
MAPS = ROOT / "data/raw/weather_maps.jsonl"


def rows() -> list[dict]:
    return [json.loads(line) for line in RAW.read_text().splitlines()]


def clean_by_number() -> list[list[dict[str, str]]]:
    return list(
        itertools.islice(weather.generate_conversations(damaged_exports.EXPORT_SEED), damaged_exports.EXPORT_ROWS)
    )


def test_the_committed_file_regenerates_byte_for_byte() -> None:
    command = [sys.executable, "-m", "tests.toy.damaged_exports"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    assert made == RAW.read_bytes(), "run: python -m tests.toy.damaged_exports > data/raw/weather_toon.jsonl"


def test_every_accepted_answer_equals_the_undamaged_one_in_both_decoders() -> None:
    clean, accepted, dropped = clean_by_number(), 0, 0
    schema = load_table_file(ROOT / "data/tables/weather.yaml")
    for row in rows():
        truth = clean[int(row["id"].split("-")[1])]
        turns = row["conversations"]
        if len(turns) != len(truth):  # a turn was lost: that is for the stage, not for the repair of one answer
            continue
        for question, answer, message in zip(truth, turns[1:], truth[1:], strict=False):
            if answer["from"] != "gpt":
                continue
            result = toon.repair_toon(answer["value"], "strip", schema, question["content"])
            if result.verdict.startswith("dropped:"):
                dropped += 1
                assert answer["value"] != message["content"]
                continue
            accepted += 1
            assert toons.loads(result.text) == toon_format.loads(result.text) == toon_format.loads(message["content"])
    assert accepted > 2_000 and dropped > 50


def test_the_committed_maps_regenerate_pixel_for_pixel() -> None:
    """Byte for byte except the PNGs, whose compression depends on the zlib that Pillow was built with."""

    def taken_apart(row: dict) -> tuple[dict, list[np.ndarray]]:
        maps = []
        for part in (p for m in row["messages"] if isinstance(m["content"], list) for p in m["content"]):
            if part["type"] == "image_url":
                head, _, data = part["image_url"]["url"].partition(",")
                assert head == "data:image/png;base64"
                maps.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))
                part["image_url"] = None
        return row, maps

    committed = [json.loads(line) for line in MAPS.read_text().splitlines()]
    made = list(damaged_exports.export_maps(damaged_exports.MAPS_EXPORT_SEED, damaged_exports.MAPS_EXPORT_ROWS))
    assert len(committed) == damaged_exports.MAPS_EXPORT_ROWS and MAPS.stat().st_size < 500_000
    again = "run: python -m tests.toy.damaged_exports maps > data/raw/weather_maps.jsonl"
    drawn = [
        m
        for _, maps in itertools.islice(weather_maps.generate_conversations(damaged_exports.MAPS_EXPORT_SEED), 20)
        for m in maps
    ]
    shown = []
    for old, new in zip(committed, made, strict=True):
        (rest, maps), (rest_, maps_) = taken_apart(old), taken_apart(new)
        assert rest == rest_, again
        assert all(np.array_equal(a, b) for a, b in zip(maps, maps_, strict=True)), again
        shown += maps
    assert sum(any(np.array_equal(p, d) for p in shown[:30]) for d in drawn) > 15  # some questions lost theirs
