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
        ('{"meta": {"n": [1]}, "data": [{"prompt": 1}]}', "data"),
        ('{"messages": [{"role": "user"}]}', None),  # a row, in lines
        ('{"messages": []}', None),
        ('{"a": 1}\n{"a": 2}', None),
        ('{"data": [{"prompt": "a', None),
        ("{", None),
        ("", None),
        ("no json", None),
    ],
)
def test_the_key_of_the_rows(text: str, key: str | None) -> None:
    assert json_stream.find_rows_key(text, is_row) == key


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("[1, 2", "", "expected , or ], found the end, at character 5"),
        ("[1,]", "", "Expecting value, at character 3"),
        ('[{"a": tru]', "", "Expecting value, at character 7"),
        ("[1] [2]", "", r"found '\[' after its end"),
        ("[" * 100_000, "", "nested too deep"),
        ('{"a": [{"prompt": 1}], "b": [{"prompt": 2}]}', "a", "found rows under 'a' and under 'b'"),
    ],
)
def test_errors_have_a_position(text: str, key: str, says: str, step: int) -> None:
    step = max(step, len(text) // 1000)
    with pytest.raises(json_stream.JsonArrayError, match=says):
        list(json_stream.iterate_elements(read_in_steps(step, text), key, is_row))
