"""The committed export regenerates, has the stated damage, and its repairs equal the undamaged answers."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import toon_format
import toons

from stages.data.tables import toon
from stages.data.tables.table_schema import load_table_file
from stages.toy import weather
from tests.toy import damaged_exports

ROOT = Path(__file__).parents[2]
RAW = ROOT / "data/raw/weather_toon.jsonl"


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
