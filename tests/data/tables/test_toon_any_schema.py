"""TOON without a schema file: documents of 10 schemas, damaged, against the documents themselves and a second decoder."""

import pytest
import toon_format
import toons

from stages.data.tables import toon
from stages.data.tables.schema_check import JudgedAnswer
from tests.data.tables import damaged_tables

USERS = "users[3]{id,name}:\n  1,Ada\n  2,Grace Hopper\n  3,Bo"
DEEP = "site:\n  name: north\n  tags[2]: a,b\n  at:\n    x: 1\n  staff[2]{id,at{x,y}}:\n    1,2,3\n    2,3,4"
LIST = "events[2]:\n  - kind: a\n    n: 1\n  - kind: b\n    notes[2]: x,y"
CASES = [
    ("a table", USERS, USERS, "clean"),
    ("nested objects, groups of fields, lists", DEEP, DEEP, "clean"),
    ("a list of objects", LIST, LIST, "clean"),
    ("prose that passes as a key", f"Here is what you want:\n{USERS}", USERS, "repaired:prose"),
    ("a key and a table between prose", f"Yes.\n\nsite: north\n{USERS}\n\nAll done, thanks!",
     f"site: north\n{USERS}", "repaired:prose"),
    ("two fenced tables with prose between", f"A:\n```\n{USERS}\n```\nand B:\n```\ntags[2]: a,b\n```",
     f"{USERS}\ntags[2]: a,b", "repaired:fence,prose"),
    ("two tables with prose between", f"{USERS}\nAnd the teams are these.\nteams[1]{{id}}:\n  7",
     f"{USERS}\nteams[1]{{id}}:\n  7", "repaired:prose"),
    ("too few declared", USERS.replace("[3]", "[2]"), USERS, "repaired:count"),
    ("too many declared, at the end of the text", USERS.replace("[3]", "[4]"), None, "dropped:count_or_cut"),
    ("too many declared, and a last cell that can't be cut", USERS.replace("[3]", "[4]").replace("Bo", '"B:o"'),
     USERS.replace("Bo", '"B:o"'), "repaired:count"),
    ("a list with a wrong count", "tags[3]: a,b\nn: 1", "tags[2]: a,b\nn: 1", "repaired:count"),
    ("a list with a value that may hold the comma", "tags[2]: New York, NY,Oslo\nn: 1", None, "dropped:two_readings"),
    ("a list cut", "n: 1\ntags[3]: a,b", None, "dropped:count_or_cut"),
    ("cut in the last row", USERS[:-3], USERS.replace("3", "2", 1).rpartition("\n")[0], "repaired:cut_row,count"),
    ("cut in a quoted cell", USERS.replace("Bo", '"Bo, Al'), USERS.replace("3", "2", 1).rpartition("\n")[0],
     "repaired:cut_row,count"),
    ("cut in the fenced last cell", f"```\n{USERS}", None, "dropped:count_or_cut"),
    ("cut before the last cell, where tabs are delimiters", "```\na[1\t]{x\ty}:\n  1\t", None, "dropped:count_or_cut"),
    ("one value with a comma, or two", "a[1|]{x|y}:\n  Paris, France\nn: 1", None, "dropped:two_readings"),
    ("rows that are not indented, and prose with a comma", "u[2]{id,name}:\n1,Ada\n2,Bo\n\nHope this helps, thanks!",
     "u[2]{id,name}:\n  1,Ada\n  2,Bo", "repaired:prose,indent"),
    ("one row less than declared, not indented, and prose", "u[3]{id,name}:\n1,Ada\n2,Bo\nBye, then", None, "dropped:broken_row"),
    ("a row too short in the middle", USERS.replace("2,Grace Hopper", "2"), None, "dropped:row_width"),
    ("pipes where commas are declared", USERS.replace("1,", "1|").replace("2,", "2|").replace("3,", "3|"),
     "users[3|]{id|name}:\n  1|Ada\n  2|Grace Hopper\n  3|Bo", "repaired:delimiter"),
    ("rows that two delimiters split", "a[2|]{x|y}:\n  1,u;v\n  2,u;w", None, "dropped:two_readings"),
    ("a cell too many, or a comma in a cell", USERS.replace("Bo", "Bo,Al"), None, "dropped:row_width"),
    ("a key like the others", f"{USERS}\nnote: all of the north", f"{USERS}\nnote: all of the north", "clean"),
    ("a true minus among numbers", "a[2]{x}:\n  −3\n  4", "a[2]{x}:\n  -3\n  4", "repaired:typography"),
    ("a true minus among texts", "a[2]{x}:\n  −3\n  up", None, "dropped:minus_or_text"),
    ("a comment with the cells of a row", USERS.replace("  2,", "  #2,").replace("[3]", "[4]"), None,
     "dropped:comment_or_row"),
    ("a line that is not indented, of one column", "a[1]{x}:\nup\ndown", None, "dropped:broken_row"),
    ("JSON", '{"users": [{"id": 1}, {"id": 2}]}', "users[2]{id}:\n  1\n  2", "repaired:json"),
    ("a header cut, which decodes as text", "m[2]:\n  - [1]: 1\n  - [1", None, "dropped:not_toon"),
    ("prose", "The answer is: no", None, "dropped:no_table"),
    ("a footnote", "It is so [1].\n\n[1]: a page", None, "dropped:no_table"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fixed", "verdict"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_without_a_schema(text: str, fixed: str | None, verdict: str) -> None:
    result = toon.repair_toon(text, "strip")
    assert result == JudgedAnswer(text if fixed is None else fixed, verdict)
    if fixed is not None:
        assert toon.repair_toon(fixed, "strip") == JudgedAnswer(fixed, "clean")
        assert toons.loads(fixed) == toon_format.loads(fixed)


# --- damages ---------------------------------------------------------------------------------------------------------


def check_damages(seed: int, count: int) -> None:
    """No accepted answer differs from the undamaged one, valid ones are kept, nine tenths of the repairable are repaired."""
    repairable = repaired = 0
    for schema, kind, truth, damaged in damaged_tables.iterate_cases(seed, count):
        result = toon.repair_toon(damaged.text, "strip")
        where = f"{schema}, {kind}: {damaged.text!r} became {result}"
        is_dropped = result.verdict.startswith("dropped:")
        assert not (kind == "none" and result.verdict != "clean"), where
        repairable += damaged.is_repairable
        repaired += damaged.is_repairable and not is_dropped
        if is_dropped:
            assert result.text == damaged.text
            continue
        made = toon_format.loads(result.text)
        assert damaged_tables.equals(made, toons.loads(result.text)), where
        assert toon.repair_toon(result.text, "strip") == JudgedAnswer(result.text, "clean"), where
        is_unseen = result.verdict == "clean" and damaged.outcome != "same"  # still valid, with other content
        is_shorter = damaged.outcome == "shorter" and damaged_tables.is_part(made, truth)
        assert damaged_tables.equals(made, truth) or is_shorter or is_unseen, where
    assert repaired >= 0.9 * repairable > 0


def test_damaged_tables_of_10_schemas() -> None:
    check_damages(seed=0, count=600)
