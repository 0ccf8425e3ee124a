"""YAML of other people, by every reader that has some: one line that names the file."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stages.data.hub_datasets import read_hub_pin
from stages.data.tables.table_schema import load_table_file
from stages.params.schema import load_params, read_recipe
from stages.published.tables import read_publication

READERS = [load_params, read_recipe, load_table_file, read_publication, read_hub_pin]
DEEP = ["a: " + "[" * 100_000, "- " * 100_000 + "x", "a: " + "[" * 900 + "]" * 900]


@pytest.mark.parametrize("text", DEEP, ids=["brackets", "lists", "closed"])
@pytest.mark.parametrize("read", READERS)
def test_too_deep_nesting_is_one_line(tmp_path: Path, read: Callable[[Path], object], text: str) -> None:
    """Bug: a hundred thousand levels ended Python by a segmentation fault in the YAML parser."""
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"theirs\.yaml is not valid YAML \(line 1: expected at most 32 levels"
    ) as error:
        read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prefix", ["", "-", "0x"])
@pytest.mark.parametrize("read", READERS)
def test_a_number_too_large_to_reckon_with_is_one_line(
    tmp_path: Path, read: Callable[[Path], object], prefix: str
) -> None:
    """Bug: a published number, and the sizes of a workload, ended in a traceback where they became a float."""
    path = tmp_path / "theirs.yaml"
    path.write_text(f"a: {prefix}{'9' * 400}")
    with pytest.raises(ValueError, match=r"theirs\.yaml .*line 1: expected at most 20 digits of a number"):
        read(path)
