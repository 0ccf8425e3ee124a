"""The schema of structured answers: every mistake in the file is one clear line, and each rule of it does something."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.data.tables import toon
from stages.data.tables.schema_check import JudgedAnswer
from stages.data.tables.table_schema import TableFile, load_table_file

ROOT = Path(__file__).parents[3]


def schema(text: str) -> TableFile:
    return TableFile.model_validate(YAML(typ="safe").load(text))


def judge(text: str, tables: TableFile, question: str = "") -> JudgedAnswer:
    return toon.repair_toon(text, "strip", tables, question)


ITEM = "keys: {items: {type: table, columns: {n: {type: integer}, t: %s}}}"
MISTAKES = [
    ("type: texts", ITEM % "{type: texts}",
     r"keys\.items\.table\.columns\.t: Input tag 'texts' .* expected tags: 'text', "),
    ("a misspelt key", ITEM % "{type: text, choises: [a]}",
     r"keys\.items\.table\.columns\.t\.text: unknown key choises"),
    ("a misspelt key of the file", "keis: {a: {type: any}}",
     r"unknown key keis"),
    ("an unknown unit", ITEM % "{type: number, unit: degC, names: {f: degF}}",
     r"items\.t: no conversion from degF to degC, expected one in units"),
    ("one name for two columns", ITEM % "{type: text, names: {n: null}}", r"names has n, which is also a name of n"),
    ("a rule on no column", "root: {type: table, columns: {low: {type: integer}}, ordered: [low, hihg]}",
     "ordered names the column hihg"),
    ("a broken pattern", ITEM % "{type: text, pattern: '('}", "expected a regular expression"),
    ("a wrong fraction", "units: {a: {to: b, scale: x}}\nkeys: {a: {type: any}}", r"units\.a\.scale.*5/9"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_table_file(path)
    assert str(error.value).startswith(str(path)) and "pydantic" not in str(error.value)


SENSORS = schema("""
units: {degF: {to: degC, scale: 5/9, offset: -160/9}, kPa: {to: Pa, scale: 1000}}
keys:
  site: {type: text, names: {location: null}}
  readings:
    type: table
    columns:
      id: {type: integer, cast: true}
      temperature: {type: number, unit: degC, decimals: 2, minimum: -50, maximum: 60, names: {temp: null, temp_f: degF}}
      pressure: {type: integer, unit: Pa, optional: true, missing: [N/A], names: {p: kPa}}
      ok: {type: boolean, cast: true, optional: true}
    unique: [id]
    rows: {minimum: 1, maximum: 3, asked: 'last (\\d+) readings'}
  notes: {type: list, items: {type: text}, optional: true, maximum: 2}
  meta: {type: object, keys: {by: {type: text, pattern: '[A-Z]\\w+'}}, other_keys: keep, optional: true}
""")
GOOD = "site: north\nreadings[2]{id,temperature}:\n  1,20.5\n  2,21"
RULES = [
    ("as it should be", GOOD, GOOD, "clean"),
    ("renamed", GOOD.replace("site", "location").replace("temperature", "temp"), GOOD, "repaired:columns"),
    ("converted", GOOD.replace("{id,temperature}", "{id,temp_f}").replace("20.5", "68.9").replace("21", "69.8"),
     GOOD, "repaired:unit,columns"),
    ("text for a number", GOOD.replace("  1,", '  "1",'), GOOD, "repaired:cast"),
    ("text for a number without cast", GOOD.replace("20.5", '"20.5"'), None, "dropped:wrong_value"),
    ("out of range", GOOD.replace("20.5", "61"), None, "dropped:wrong_value"),
    ("a column twice, by two names", "site: n\nreadings[1]{id,temp,temp_f}:\n  1,2,3", None, "dropped:wrong_columns"),
    ("an optional column, its word for null", "site: n\nreadings[1]{id,temperature,pressure,ok}:\n  1,2,N/A,yes",
     "site: n\nreadings[1]{id,temperature,pressure,ok}:\n  1,2,null,true", "repaired:missing,cast"),
    ("an id twice", GOOD.replace("  2,", "  1,"), None, "dropped:repeated_value"),
    ("too many rows", GOOD.replace("[2]", "[4]") + "\n  3,1\n  4,1", None, "dropped:row_count"),
    ("more rows than asked for", "Q1" + GOOD, None, "dropped:row_count"),
    ("a list and an object", GOOD + "\nnotes[2]: a,b\nmeta:\n  by: Ada\n  at: 9",
     GOOD + "\nnotes[2]: a,b\nmeta:\n  by: Ada\n  at: 9", "clean"),
    ("a text of another pattern", GOOD + "\nmeta:\n  by: ada", None, "dropped:wrong_value"),
    ("prose that passes as a key", f"Here:\n{GOOD}\nNote: all well", GOOD, "repaired:prose"),
    ("types say what an unquoted comma is", "site: n\nreadings[1]{id,temperature}:\n  1,2,3", None, "dropped:row_width"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fixed", "verdict"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_each_rule_does_something(text: str, fixed: str | None, verdict: str) -> None:
    question = "The last 1 readings?" if text.startswith("Q1") else "The last readings?"
    text = text.removeprefix("Q1")
    result = judge(text, SENSORS, question)
    assert result == JudgedAnswer(text if fixed is None else fixed, verdict)
    if fixed is not None:
        assert judge(fixed, SENSORS, question) == JudgedAnswer(fixed, "clean")
