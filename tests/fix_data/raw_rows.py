"""Raw rows, their parameters and what fix_data makes of them, for its tests: every row is kept or counted as dropped."""

import json
import random
from pathlib import Path
from typing import Any

import polars as pl
from ruamel.yaml import YAML

from stages import fix_data
from stages.data import conversations
from stages.runtime import atomic
from stages.toy import weather
from tests.conftest import edit_params

RAW = Path("data/raw/weather_toon.jsonl")
TABLE = weather.format_toon(
    weather.WeatherForecast("Oslo", "C", (weather.WeatherDay("2026-01-01", -9, -2, 40, "snow"),))
)


def set_params(**changes: str) -> None:
    """Change keys of fix_data in params.yaml; values as YAML has them."""
    edit_params(Path(), {"fix_data": {key: YAML(typ="safe").load(value) for key, value in changes.items()}})


def write_raw(rows: list[Any]) -> None:
    RAW.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def row(*turns: str, system: str | None = "Weather desk.", **more: Any) -> dict[str, Any]:
    """Return a ShareGPT row of alternating turns, starting with the human."""
    head = [{"from": "system", "value": system}] if system is not None else []
    names = ("human", "gpt")
    return {"conversations": head + [{"from": names[i % 2], "value": turn} for i, turn in enumerate(turns)], **more}


def questions(count: int) -> list[dict[str, Any]]:
    """Return rows that differ in their question only."""
    return [row(f"Forecast {n} for Oslo, 1 day.", TABLE, id=f"q{n}") for n in range(count)]


def outcome() -> tuple[pl.DataFrame, pl.DataFrame, dict[str, Any]]:
    fix_data.main()
    train, evaluation = (
        conversations.read_table(path, conversations.FIXED_SCHEMA, "fix_data")
        for path in (fix_data.TRAIN_FILE, fix_data.EVAL_FILE)
    )
    return train, evaluation, atomic.read_json(fix_data.REPORT, "fix_data")


ASK = "Forecast for Oslo, 1 day."
CUT = TABLE.removesuffix(",snow")


def pairs(count: int, of: int = 1, length: int = 400) -> list[dict[str, Any]]:
    """Return rows with random questions and answers."""
    rng = random.Random(of)

    def words(n: int) -> str:
        return "".join(rng.choices("abcdefghijklmnop 雨晴雪", k=n))

    return [{"id": f"{of}-{n}", "prompt": f"{n} {words(60)}", "answer": words(length)} for n in range(count)]


def set_lines(**changes: str) -> None:
    """Set parameters, with answers: text."""
    set_params(answers="text", **changes)


def nested(levels: int) -> str:
    """Return JSON of that depth, which json.dumps could not write."""
    return '{"a":' * levels + "1" + "}" * levels
