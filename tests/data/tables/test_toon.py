"""Repaired TOON answers compared with the forecasts before they were damaged.

The truth is the forecast itself (`dataclasses.asdict`), never a decoder's reading of its text, and a second decoder
(`toons`, Rust) must agree with the first on everything accepted.
"""

import dataclasses
import datetime as dt
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import toon_format
import toons
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.data.tables import toon
from stages.data.tables.schema_check import JudgedAnswer
from stages.data.tables.table_schema import TableFile, TableValue, load_table_file
from stages.toy import weather
from tests.toy import damaged_exports

FORECAST = weather.WeatherForecast(
    "Oslo",
    "C",
    (
        weather.WeatherDay("2026-02-27", -3, 5, 20, "cloudy"),
        weather.WeatherDay("2026-02-28", -1, 3, 80, "snow"),
        weather.WeatherDay("2026-03-01", 0, 8, 0, "sunny"),
    ),
)
TEXT = """place: Oslo
unit: C
days[3]{date,low,high,rain,sky}:
  2026-02-27,-3,5,20,cloudy
  2026-02-28,-1,3,80,snow
  2026-03-01,0,8,0,sunny"""
WEATHER = load_table_file(Path(__file__).parents[3] / "data/tables/weather.yaml")
DAYS = WEATHER.keys["days"]
assert isinstance(DAYS, TableValue)
ROWS = DAYS.rows
HEADER = "days[3]{date,low,high,rain,sky}:"


def build_document(forecast: weather.WeatherForecast) -> dict[str, Any]:
    document = dataclasses.asdict(forecast)
    return document | {"days": list(document["days"])}


def judge(
    text: str, days: int | None, surrounding: Literal["strip", "keep"], schema: TableFile | None = WEATHER
) -> JudgedAnswer:
    """Return the verdict on an answer to a question for so many days, or for no number of days."""
    return toon.repair_toon(text, surrounding, schema, "Forecast." if days is None else f"A forecast of {days} days.")


def decode_with_both(text: str) -> Any:
    """Return the decoded `text`; both decoders must agree."""
    first, second = toon_format.loads(text), toons.loads(text)
    assert first == second, f"toon_format reads {first}, toons {second}, of {text!r}"
    return first


# --- malformations and their verdicts --------------------------------------------------------------------------------

ROW = "  2026-02-28,-1,3,80,snow"
TABLE = [
    ("as it should be", TEXT, "clean"),
    ("fence", f"```toon\n{TEXT}\n```", "repaired:fence"),
    ("prose that passes as a key, before", f"Here is the forecast:\n{TEXT}", "repaired:prose"),
    ("prose that passes as a key, after", f"{TEXT}\nNote: values in C", "repaired:prose"),
    ("prose and fence", f"Sure:\n```toon\n{TEXT}\n```\nBye.", "repaired:fence,prose"),
    ("wrong count, rows complete", TEXT.replace("[3]", "[5]"), "repaired:count"),
    ("truncated last row", TEXT.removesuffix(",0,sunny"), "dropped:row_width"),
    ("truncated inside the last cell", TEXT.removesuffix("ny"), "dropped:wrong_value"),
    ("truncated between rows", TEXT.removesuffix("\n  2026-03-01,0,8,0,sunny"), "dropped:row_count"),
    ("truncated before the rows", TEXT[: TEXT.index("\n  ")], "dropped:no_table"),
    ("extra cell", TEXT.replace(ROW, ROW + ",5"), "dropped:row_width"),
    ("trailing comma", TEXT.replace(ROW, ROW + ","), "repaired:trailing_comma"),
    ("trailing comma for the last cell", TEXT.replace(ROW, "  2026-02-28,-1,3,80,"), "dropped:wrong_value"),
    ("decimal comma", TEXT.replace(",8,0,", ",8,5,0,"), "dropped:row_width"),
    ("space before the braces", TEXT.replace("]{", "] {"), "repaired:header_space"),
    ("no colon", TEXT.replace("}:", "}"), "repaired:header_colon"),
    ("[3,]", TEXT.replace("[3]", "[3,]"), "repaired:old_dialect"),
    ("literal [N]", TEXT.replace("[3]", "[N]"), "repaired:count"),
    ("comment, which passes", TEXT.replace(ROW, f"  # snow!\n{ROW}"), "repaired:comment"),
    ("empty table", f"place: Oslo\nunit: C\n{HEADER.replace('3', '0')}", "dropped:no_table"),
    ("true minus", TEXT.replace("-3", "−3"), "repaired:typography"),
    ("smart quotes", TEXT.replace("Oslo", "“Oslo”").replace("snow", "“snow”"), "repaired:typography"),
    ("unit in a cell", TEXT.replace("-3,5", "-3,5 C"), "dropped:wrong_value"),
    ("true, which Python counts as 1", TEXT.replace("8,0,", "8,true,"), "dropped:wrong_value"),
    ("a quoted number", TEXT.replace("-3,5", '-3,"5"'), "dropped:wrong_value"),
    ("repeated document", f"{TEXT}\n{TEXT}", "dropped:repeated_table"),
    ("prose between the rows", TEXT.replace(ROW, f"{ROW}\nand then"), "dropped:broken_row"),
    # and what only the schema sees
    ("rain over 100", TEXT.replace(",80,", ",180,"), "dropped:wrong_value"),
    ("low above high", TEXT.replace("0,8,0", "9,8,0"), "dropped:wrong_order"),
    ("a day left out", TEXT.replace("2026-02-27", "2026-02-26"), "dropped:dates_jump"),
    ("a key too many", TEXT.replace("unit: C", "unit: C\nsource: radar"), "dropped:wrong_keys"),
    ("other columns", TEXT.replace("low,high", "min,max"), "dropped:wrong_columns"),
    ("carriage returns, which pass", TEXT.replace("\n", "\r\n"), "repaired:line_ends"),
    ("an empty answer", "", "dropped:no_table"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "verdict"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_malformation_table(text: str, verdict: str) -> None:
    result = judge(text, 3, "strip")
    assert result.verdict == verdict
    if verdict.startswith("dropped"):
        assert result.text == text
    else:
        assert decode_with_both(result.text) == build_document(FORECAST)


@pytest.mark.parametrize("text", [TEXT.replace("[3]", count) for count in ("[2]", "[4]", "[N]", "")])
def test_a_wrong_count_is_not_corrected_where_the_horizon_is_unknown_or_disagrees(text: str) -> None:
    assert judge(text, None, "strip").verdict == "dropped:count_unsure"
    assert judge(text, 4, "strip").verdict == "dropped:row_count"


# --- every truncation, every corruption ------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [3, None])
def test_no_truncated_answer_is_accepted(horizon: int | None) -> None:
    accepted = [n for n in range(len(TEXT)) if not judge(TEXT[:n], horizon, "strip").verdict.startswith("dropped")]
    assert accepted == []
    assert judge(TEXT, horizon, "strip").verdict == "clean"


CORRUPTIONS = (
    damaged_exports.SURROUNDING_CORRUPTIONS | damaged_exports.SPELLING_CORRUPTIONS | damaged_exports.LOSS_CORRUPTIONS
)


@pytest.mark.parametrize("name", sorted(damaged_exports.SURROUNDING_CORRUPTIONS | damaged_exports.SPELLING_CORRUPTIONS))
def test_corruptions_that_keep_the_data_are_repaired(name: str) -> None:
    """Without this, a repair that drops everything would satisfy the property above."""
    for seed in range(20):
        text = CORRUPTIONS[name](random.Random(seed), TEXT)
        result = judge(text, 3, "strip")
        assert text != TEXT and result.verdict.startswith("repaired:"), (text, result)
        assert decode_with_both(result.text) == build_document(FORECAST)


@pytest.mark.parametrize("horizon", [3, None])
@pytest.mark.parametrize("name", sorted(damaged_exports.LOSS_CORRUPTIONS))
def test_corruptions_that_lose_data_are_dropped(name: str, horizon: int | None) -> None:
    for seed in range(50):
        text = CORRUPTIONS[name](random.Random(seed), TEXT)
        assert text != TEXT
        assert judge(text, horizon, "strip").verdict.startswith("dropped:"), text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lines=st.lists(st.sampled_from(TEXT.split("\n")) | st.text(max_size=30), max_size=9), keep=st.booleans())
@example(lines=["days[2]{date,low,high,rain,sky}:"], keep=False)
@example(lines=["{", "}"], keep=True)
@example(lines=['{"place": "\\ud800"}'], keep=False)
def test_any_text_gets_a_verdict(lines: list[str], keep: bool) -> None:
    text = "\n".join(lines)
    result = judge(text, None, "keep" if keep else "strip")
    kind, _, detail = result.verdict.partition(":")
    assert (kind, detail == "") in {("clean", True), ("repaired", False), ("dropped", False)}
    if kind != "dropped":
        decode_with_both(judge(result.text, None, "strip").text)


# --- questions, and our own encoder ----------------------------------------------------------------------------------


def test_to_toon_writes_what_the_reference_encoder_writes() -> None:
    rng = random.Random(1)
    for _ in range(200):
        place, unit = rng.choice(list(weather.CLIMATES)), rng.choice("CF")
        first = dt.date(2026, 1, 1) + dt.timedelta(rng.randrange(365))
        forecast = weather.WeatherForecast(
            place, unit, weather._make_days(rng, place, unit, first, rng.randrange(1, 7))
        )
        assert weather.format_toon(forecast) == toon_format.dumps(build_document(forecast))
