"""Documents of 10 schemas, written by two TOON encoders, and the ways in which models damage such text.

The truth is the document itself, never a reading of the damaged text. A damage says what a repair may make of it: the same
document, or the document without what was cut off, or nothing but a drop.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import toon_format
import toons

NAMES = ["Ada", "Grace Hopper", "Zoë", "Łukasz", "李雷", "O'Brien", "Jean-Luc", "Smith, Ann", "de la Cruz, María"]
CITIES = ["Oslo", "New York, NY", "São Paulo", "Paris, France", "Łódź", "Nome"]
WORDS = [
    "nail", "screw", "bolt (M4)", "washer", "left, right", "tape: wide", 'so-called "glue"', "# 5", "- x", "x,y", "50%",
]  # fmt: skip
STATES = ["open", "closed", "on hold", "n/a"]


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES)


def _price(rng: random.Random) -> float:
    return rng.randrange(1, 100_000) / 100


def _rows(rng: random.Random, make: Callable[[int], Any], least: int = 2) -> list[Any]:
    return [make(n) for n in range(1, rng.randrange(least, 8) + 1)]


def _order(rng: random.Random, n: int) -> dict[str, Any]:
    return {"id": n * 7, "customer": {"name": _name(rng), "city": rng.choice(CITIES)}, "total": _price(rng)}


SCHEMAS: dict[str, Callable[[random.Random], Any]] = {
    "users": lambda r: {"users": _rows(r, lambda n: {"id": n, "name": _name(r), "active": r.random() < 0.5})},
    "orders": lambda r: {"orders": _rows(r, lambda n: _order(r, n)), "currency": "EUR"},
    "root_table": lambda r: _rows(r, lambda n: {"n": n, "city": r.choice(CITIES), "people": r.randrange(10**6)}),
    "tags": lambda r: {
        "title": "Tags of a post",
        "tags": _rows(r, lambda n: r.choice(STATES)),
        "sizes": _rows(r, lambda n: n * n),
    },
    "mixed_list": lambda r: {
        "events": _rows(r, lambda n: {"kind": "a", "n": n} if n % 2 else {"kind": "b", "note": r.choice(WORDS)})
    },
    "keyed": lambda r: {
        "stock": {f"item{n}": {"count": r.randrange(50), "price": _price(r)} for n in range(1, r.randrange(3, 7))}
    },
    "nulls": lambda r: {
        "tasks": _rows(
            r, lambda n: {"id": n, "done": r.choice([True, False, None]), "due": r.choice([None, "2026-02-03"])}
        )
    },
    "hard_texts": lambda r: {"quotes": _rows(r, lambda n: {"who": _name(r), "said": r.choice(WORDS), "page": n})},
    "matrix": lambda r: {"matrix": _rows(r, lambda n: [n, n + 1, r.randrange(9)]), "name": "m"},
    "nested_tables": lambda r: {
        "groups": _rows(
            r, lambda n: {"name": f"g{n}", "members": _rows(r, lambda m: {"id": m, "name": _name(r)}), "size": n}
        )
    },
}

Outcome = Literal["same", "shorter", "drop"]  # the most that a repair may make of the text; a drop is always allowed


@dataclass(frozen=True)
class DamagedText:
    """A text and what may become of it."""

    text: str
    outcome: Outcome
    is_repairable: bool  # from the text alone there is one reading


@dataclass(frozen=True)
class WrittenTable:
    """A table in an encoder's text: header and rows by line."""

    start: int  # of the header
    count: int
    delimiter: str
    rows: tuple[int, ...]


def find_written_tables(lines: list[str]) -> list[WrittenTable]:
    """Return the tables in an encoder's output, which has as many rows as declared, right below the header."""
    tables = []
    for at, line in enumerate(lines):
        found = re.fullmatch(r"\s*(?:- )?.*\[(\d+)([|\t]?)\]\{.*\}:", line)
        if found:
            tables.append(
                WrittenTable(at, int(found[1]), found[2] or ",", tuple(range(at + 1, at + 1 + int(found[1]))))
            )
    return tables


def encode(rng: random.Random, document: Any) -> str | None:
    """Return a document as one of the encoders writes it; None where the two decoders read that differently."""
    library = rng.choice([toon_format, toons])
    text = str(library.dumps(document, delimiter=rng.choice([",", ",", "|", "\t"])))
    readings = []
    for decoder in (toon_format, toons):
        try:
            readings.append(decoder.loads(text))
        except ValueError:
            return None
    return text if all(equals(reading, document) for reading in readings) else None


def equals(first: Any, second: Any) -> bool:
    """Return whether two documents are equal in every value, type and order; 1 and 1.0 are one number, 1 and True are not."""
    return json.dumps(_normalise(first)) == json.dumps(_normalise(second))


def _normalise(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normalise(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normalise(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_part(made: Any, truth: Any) -> bool:
    """Return whether `made` is `truth` without some rows and what comes after a cut; every value that is left is right."""
    if isinstance(made, dict) and isinstance(truth, dict):
        return list(made) == list(truth)[: len(made)] and all(is_part(inner, truth[key]) for key, inner in made.items())
    if isinstance(made, list) and isinstance(truth, list):
        rest = iter(truth)
        return all(any(is_part(row, other) for other in rest) for row in made)
    return equals(made, truth)


Damage = Callable[[random.Random, str], DamagedText | None]


def _each_table(
    change: Callable[[random.Random, list[str], WrittenTable], bool | None], outcome: Outcome = "same"
) -> Damage:
    """Return a damage of one table. `change` edits the lines, and returns whether one reading is left; None: not applicable."""

    def damage(rng: random.Random, text: str) -> DamagedText | None:
        lines = text.split("\n")
        tables = find_written_tables(lines)
        if not tables:
            return None
        is_repairable = change(rng, lines, rng.choice(tables))
        return None if is_repairable is None else DamagedText("\n".join(lines), outcome, is_repairable)

    return damage


def _whole(change: Callable[[random.Random, str], str]) -> Damage:
    return lambda rng, text: DamagedText(change(rng, text), "same", True)


def _set_count(rng: random.Random, lines: list[str], table: WrittenTable, written: str) -> None:
    lines[table.start] = re.sub(
        r"\[\d+([|\t]?)\]\{", lambda m: f"[{written}{m[1]}]{{" if written else "{", lines[table.start]
    )


def _count_down(rng: random.Random, lines: list[str], table: WrittenTable) -> bool:
    _set_count(rng, lines, table, str(rng.randrange(table.count)))
    texts = [lines[row].strip() for row in table.rows]
    return all(one != two for one, two in itertools.pairwise(texts))


def _count_up(rng: random.Random, lines: list[str], table: WrittenTable) -> bool:
    """At the end of the text, more rows declared than written may also be a cut; a closing fence says that it is none."""
    is_fenced = rng.random() < 0.5
    _set_count(rng, lines, table, str(table.count + rng.randrange(1, 4)))
    is_last = table.rows[-1] == len(lines) - 1
    if is_fenced:
        lines[:] = ["```toon", *lines, "```"]
    return is_fenced or not is_last


def _no_count(rng: random.Random, lines: list[str], table: WrittenTable) -> bool | None:
    if table.delimiter != ",":
        return None  # the delimiter is declared there too
    written = rng.choice(["", "N"])
    if not written and re.match(r"\s*(?:- )?\[", lines[table.start]):
        return None  # nothing is left of the header's name
    _set_count(rng, lines, table, written)
    return True


def _split(row: str, delimiter: str) -> list[str]:
    mark = re.escape(delimiter)
    return re.findall(rf'(?:"(?:[^"\\]|\\.)*"|[^{mark}"])+|(?<={mark})(?={mark}|$)', row.strip(" "))


def _change_delimiter(rng: random.Random, lines: list[str], table: WrittenTable) -> bool | None:
    """Write the rows with another delimiter than declared, quoting what holds it."""
    new = rng.choice([mark for mark in ",|;\t" if mark != table.delimiter])
    if len(_split(lines[table.rows[0]], table.delimiter)) < 2:
        return None
    for row in table.rows:
        cells = _split(lines[row], table.delimiter)
        quoted = [json.dumps(cell, ensure_ascii=False) if new in cell and cell[:1] != '"' else cell for cell in cells]
        lines[row] = "  " * ((len(lines[row]) - len(lines[row].lstrip(" "))) // 2) + new.join(quoted)
    return True


def _cut(rng: random.Random, text: str) -> DamagedText | None:
    """Cut inside the last row of a table at the end: what is left has fewer cells than the header."""
    lines = text.split("\n")
    tables = find_written_tables(lines)
    if not tables or tables[-1].count < 2 or tables[-1].rows[-1] != len(lines) - 1:
        return None
    table = tables[-1]
    row = lines[rng.choice(table.rows[1:])]
    index = lines.index(row, table.rows[0])
    indent = len(row) - len(row.lstrip(" "))
    kept = row[: rng.randrange(indent + 1, len(row))]
    is_open = len(_split(row, table.delimiter)) > len(_split(kept, table.delimiter)) or kept.count('"') % 2 == 1
    fence = ["```toon"] if rng.random() < 0.3 else []
    return DamagedText(
        "\n".join([*fence, *lines[:index], kept]), "shorter", is_open and not kept.endswith(table.delimiter)
    )


def _cut_anywhere(rng: random.Random, text: str) -> DamagedText:
    return DamagedText(text[: rng.randrange(1, len(text))], "shorter", False)


def _lose_cell(rng: random.Random, lines: list[str], table: WrittenTable) -> bool:
    row = rng.choice(table.rows)
    cells = _split(lines[row], table.delimiter)
    del cells[rng.randrange(len(cells))]
    lines[row] = lines[row][: len(lines[row]) - len(lines[row].lstrip(" "))] + table.delimiter.join(cells)
    return False  # of the last row it may be a cut, and only that row is given up


def _add_cell(rng: random.Random, lines: list[str], table: WrittenTable) -> bool | None:
    """Add a cell anywhere in a row; of a table with one column that would be a value that holds a delimiter."""
    row = rng.choice(table.rows)
    cells = _split(lines[row], table.delimiter)
    if len(cells) < 2:
        return None
    cells.insert(rng.randrange(len(cells) + 1), rng.choice(["7", "extra", "0.5", "true", "x y", rng.choice(cells)]))
    lines[row] = lines[row][: len(lines[row]) - len(lines[row].lstrip(" "))] + table.delimiter.join(cells)
    return False


def _lose_row(rng: random.Random, lines: list[str], table: WrittenTable) -> bool:
    del lines[rng.choice(table.rows)]
    return False


def _repeat_row(rng: random.Random, lines: list[str], table: WrittenTable) -> bool:
    row = rng.choice(table.rows)
    lines.insert(row, lines[row])
    return False


def _each_row(change: Callable[[str, WrittenTable], str]) -> Damage:
    def damage(rng: random.Random, lines: list[str], table: WrittenTable) -> bool:
        for row in table.rows:
            lines[row] = change(lines[row], table)
        return True

    return _each_table(damage)


def _comment(rng: random.Random, lines: list[str], table: WrittenTable) -> bool:
    lines.insert(
        table.start, lines[table.start][: len(lines[table.start]) - len(lines[table.start].lstrip())] + "# the table"
    )
    return True


def _header(pattern: str, new: str) -> Damage:
    def damage(rng: random.Random, lines: list[str], table: WrittenTable) -> bool | None:
        changed = re.sub(pattern, new, lines[table.start], count=1)
        is_changed = changed != lines[table.start]
        lines[table.start] = changed
        return True if is_changed else None

    return _each_table(damage)


BEFORE = ["Here is the table:\n\n", "Sure! Here you go:\n", "Of course.\n\n", "Here are the results you asked for:\n"]
AFTER = [
    "\n\nHope this helps!",
    "\n\nLet me know if you need anything else.",
    "\nThat is all, thanks.",
    "\n\nBest,\nyour bot",
]


def _flatten_and_add_prose(rng: random.Random, text: str) -> DamagedText | None:
    """Prose after rows that are not indented: a closing formula with a comma must not become a row."""
    flat = _each_row(lambda row, table: row.lstrip(" "))(rng, text)
    if flat is None:
        return None
    is_flat_column = re.search(r"\{[^,|\t{}]*\}:\n(?! )", flat.text) is not None  # of one column any line may be a row
    return DamagedText(flat.text + rng.choice(AFTER), "same", not is_flat_column)


def _indent_all(text: str, unit: str) -> str:
    return re.sub(r"^(?:  )+", lambda m: unit * (len(m[0]) // 2), text, flags=re.MULTILINE)


def _write_json(rng: random.Random, text: str) -> str:
    return json.dumps(toon_format.loads(text), indent=rng.choice([None, 2]), ensure_ascii=False)


DAMAGES: dict[str, Damage] = {
    "none": _whole(lambda r, t: t),
    "fence": _whole(lambda r, t: f"```{r.choice(['', 'toon', 'text'])}\n{t}\n```"),
    "prose before": _whole(lambda r, t: r.choice(BEFORE) + t),
    "prose after": _whole(lambda r, t: t + r.choice(AFTER)),
    "prose and fence": _whole(lambda r, t: f"{r.choice(BEFORE)}```toon\n{t}\n```{r.choice(AFTER)}"),
    "count too low": _each_table(_count_down),
    "count too high": _each_table(_count_up),
    "no count": _each_table(_no_count),
    "rows with another delimiter": _each_table(_change_delimiter),
    "tabs as indentation": _whole(lambda r, t: _indent_all(t, "\t")),
    "four spaces": _whole(lambda r, t: _indent_all(t, "    ")),
    "all lines indented": _whole(lambda r, t: "  " + t.replace("\n", "\n  ")),
    "rows not indented": _each_row(lambda row, table: row.lstrip(" ")),
    "rows not indented, prose after": _flatten_and_add_prose,
    "carriage returns": _whole(lambda r, t: t.replace("\n", "\r\n")),
    "blank lines": _each_row(lambda row, table: row + "\n"),
    "comment": _each_table(_comment),
    "trailing delimiters": _each_row(lambda row, table: row + table.delimiter),
    "space in the header": _header(r"(\[\d+[|\t]?\])\{", r"\1 {"),
    "no colon": _header(r"\}:$", "}"),
    "[#N]": _header(r"\[(\d+)([|\t]?)\]\{", r"[#\1\2]{"),
    "last row cut": _cut,
    "cut anywhere": _cut_anywhere,
    "cell lost": _each_table(_lose_cell, "shorter"),
    "cell too many": _each_table(_add_cell, "drop"),
    "row lost": _each_table(_lose_row, "shorter"),
    "row repeated": _each_table(_repeat_row, "drop"),
    "JSON instead": _whole(lambda r, t: _write_json(r, t)),
}  # fmt: skip


def iterate_cases(seed: int, count: int) -> Iterator[tuple[str, str, Any, DamagedText]]:
    """Yield (schema, damage, truth, damaged text), each damage as often, of schemas drawn from those that it applies to."""
    rng = random.Random(seed)
    for kind in itertools.islice(itertools.cycle(DAMAGES), count):
        damaged = None
        while damaged is None:
            schema = rng.choice(list(SCHEMAS))
            truth = SCHEMAS[schema](rng)
            text = encode(rng, truth)
            damaged = None if text is None else DAMAGES[kind](rng, text)
        yield schema, kind, truth, damaged
