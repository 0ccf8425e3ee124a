"""Elements of an array read in pieces of any size, compared with json.loads of the whole, in bounded memory."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.data import json_stream

ROW = {"prompt": "a", "answer": "b"}


def is_row(value: Any) -> bool:
    return isinstance(value, dict) and "prompt" in value


def read_in_steps(step: int, text: str) -> Callable[[int], str]:
    """Return a reader that returns `step` characters at a time."""
    file = io.StringIO(text)
    return lambda _: file.read(step)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(values), step=st.integers(1, 20), indent=st.none() | st.integers(0, 3), ascii=st.booleans(),
    wrapped=st.booleans(),
)  # fmt: skip
@example(rows=["\ud83d", "\U0001f327", -12e30, float("-inf")], step=1, indent=None, ascii=True, wrapped=False)
def test_the_elements_are_those_of_the_whole(
    rows: list[Any], step: int, indent: int | None, ascii: bool, wrapped: bool
) -> None:
    whole = {"version": [1, {"a": "["}], "rows": [ROW, *rows], "more": {"n": 1}} if wrapped else rows
    text = json.dumps(whole, indent=indent, ensure_ascii=ascii) + "\n"
    key = json_stream.find_rows_key(text, is_row)
    assert key == ("" if not wrapped else None)  # a list that begins otherwise comes first
    found = list(json_stream.iterate_elements(read_in_steps(step, text), "rows" if wrapped else "", is_row))
    expected = whole["rows"] if isinstance(whole, dict) else whole
    assert repr([json.loads(text) for text in found]) == repr(expected)  # repr: a NaN is not itself


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (' \n [{"a"', ""),
        ('{"version": 1, "data": [{"prompt"  : "a"}, {"pro', "data"),
        ('{"messages": [{"role": "user"}]}', None),  # a row, in lines
        ('{"a": 1}\n{"a": 2}', None),
        ('{"data": [{"prompt": "a', None),
        ("no json", None),
    ],
)
def test_the_key_of_the_rows(text: str, key: str | None) -> None:
    assert json_stream.find_rows_key(text, is_row) == key
