"""JSON answers: found in prose and fences, repaired where there is one reading, and never with another value."""

import json
import random
from typing import Any

import pytest

from stages.data.tables import json_answers
from stages.data.tables.schema_check import JudgedAnswer
from tests.data.tables import damaged_tables

VALUE = '{"users": [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Bo, the \\"third\\""}], "total": 1.50}'
LINES = '{\n  "a": [1, 2],\n  "b": null\n}'
CASES = [
    ("as it should be", VALUE, VALUE, "clean"),
    ("a fence", f"```json\n{LINES}\n```", LINES, "repaired:fence"),
    ("prose and fence", f"Sure:\n\n```json\n{LINES}\n```\nAnything else?", LINES, "repaired:fence,prose"),
    ("prose with brackets", f"See [1] and {{name}}:\n{VALUE}", VALUE, "repaired:prose"),
    ("trailing commas", '{"a": [1, 2,], "b": 3,}', '{"a": [1, 2], "b": 3}', "repaired:trailing_comma"),
    ("Python literals", '{"a": True, "b": None}', '{"a": true, "b": null}', "repaired:literals"),
    ("single quotes", "{'a': 'it is \"so\"'}", '{"a": "it is \\"so\\""}', "repaired:quotes"),
    ("an apostrophe in single quotes", "{'a': 'it's'}", None, "dropped:not_json"),
    ("keys without quotes", "{a: 1, b_2: [2]}", '{"a": 1, "b_2": [2]}', "repaired:bare_keys"),
    ("comments", '{"a": 1, // one\n "b": "//no"}', '{"a": 1, \n "b": "//no"}', "repaired:comment"),
    ("a comma missing between objects", '[{"a": 1}\n{"a": 2}]', '[{"a": 1},\n{"a": 2}]', "repaired:missing_comma"),
    ("a comma missing between keys", '{"a": 1\n"b": 2}', '{"a": 1,\n"b": 2}', "repaired:missing_comma"),
    ("a closing bracket missing", '{"users": [{"id": 1}, {"id": 2}]', '{"users": [{"id": 1}, {"id": 2}]}',
     "repaired:brackets"),
    ("cut in the last row", '{"users": [{"id": 1}, {"id": 2', '{"users": [{"id": 1}]}', "repaired:cut_row"),
    ("cut in a fence", '```json\n[{"id": 1}, {"id": 2', '[{"id": 1}]', "repaired:fence,cut_row"),
    ("incomplete in a closed fence", '```json\n[{"id": 1}, {"id": 2\n```', None, "dropped:not_json"),
    ("cut in the first row", '{"users": [{"id": 1', None, "dropped:cut"),
    ("an object cut at a number", '{"a": 1', None, "dropped:cut"),
    ("a key twice", '{"a": 1, "a": 2}', None, "dropped:repeated_key"),
    ("two values", f"{VALUE}\n{VALUE}", None, "dropped:several_values"),
    ("not a number", '{"a": NaN}', None, "dropped:not_json"),
    ("a line break in a text", '{"a": "x\ny"}', None, "dropped:not_json"),
    ("prose", "I can't help with that.", None, "dropped:no_json"),
    ("nothing", "", None, "dropped:no_json"),
    ("too deep", "[" * 100_000, None, "dropped:nested_too_deep"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fixed", "verdict"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_repairs(text: str, fixed: str | None, verdict: str) -> None:
    assert json_answers.repair_json(text, "strip") == JudgedAnswer(text if fixed is None else fixed, verdict)
    if fixed is not None:
        json.loads(fixed)
        assert json_answers.repair_json(fixed, "strip") == JudgedAnswer(fixed, "clean")


def test_keep_repairs_the_value_only() -> None:
    text = 'Sure, {"a": 1,} is it.\nBye.'
    assert json_answers.repair_json(text, "keep") == JudgedAnswer(
        'Sure, {"a": 1} is it.\nBye.', "repaired:trailing_comma"
    )
    assert json_answers.repair_json(f"Sure:\n```json\n{LINES}\n```", "keep").verdict == "clean"


def as_python(value: Any) -> str:
    return repr(value)


HARMLESS = {
    "none": lambda rng, text, value: text,
    "fence": lambda rng, text, value: f"```json\n{text}\n```",
    "prose": lambda rng, text, value: f"Here it is:\n\n{text}\n\nHope this helps!",
    "python": lambda rng, text, value: as_python(value),
    "trailing commas": lambda rng, text, value: (
        json.dumps(value, indent=2, ensure_ascii=False).replace("\n]", ",\n]").replace("\n}", ",\n}")
    ),
}
LOSSES = {
    "cut": lambda rng, text, value: text[: rng.randrange(1, len(text))],
    "character lost": lambda rng, text, value: (lambda at: text[:at] + text[at + 1 :])(rng.randrange(len(text))),
    "commas twice": lambda rng, text, value: json.dumps(value, ensure_ascii=False, separators=(",,", ": ")),
}


def test_damaged_json_of_10_schemas() -> None:
    """No accepted answer has another value; a cut may lose whole rows. A lost character that leaves JSON can't be seen."""
    rng, repaired, harmless = random.Random(5), 0, 0
    for n in range(400):
        value = damaged_tables.SCHEMAS[rng.choice(list(damaged_tables.SCHEMAS))](rng)
        text = json.dumps(value, ensure_ascii=False, indent=rng.choice([None, 2]))
        kind = [*HARMLESS, *LOSSES][n % 8]
        damaged = (HARMLESS | LOSSES)[kind](rng, text, value)
        result = json_answers.repair_json(damaged, "strip")
        harmless += kind in HARMLESS
        if result.verdict.startswith("dropped"):
            assert kind not in ("none", "fence", "prose"), damaged
            continue
        repaired += kind in HARMLESS
        made = json.loads(result.text)
        if kind == "cut":
            assert damaged_tables.is_part(made, value), (damaged, result)
        elif kind != "character lost":
            assert damaged_tables.equals(made, value), (kind, damaged, result)
        elif result.verdict == "clean":
            assert made == json.loads(damaged)
    assert repaired >= 0.9 * harmless
