"""params.yaml as a file: the committed one loads as it is written, and a broken one is refused with its line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stages.params import schema
from tests.conftest import ROOT
from tests.params.params_edits import LEAVES, NUMBERS, READ, REAL, edit_params_text, read_refusal


def test_the_committed_file_loads_as_it_is_written() -> None:
    """Each value of the file is the value of the attribute: nothing is renamed, cast or filled in."""
    whole = schema.load_params().model_dump(by_alias=True)
    for segment, end in zip(whole["train_draft"]["checkpoints"].values(), (3, 9), strict=True):
        assert segment.pop("method") == "eagle3" and segment.pop("horizon_epochs") == end
    whole["train_draft"]["dtype"] = None
    assert whole == READ
    assert len(LEAVES) > 60 and len(NUMBERS) > 35


def test_loading_costs_no_torch() -> None:
    """`make run` and the flows check the file first; torch would take seconds."""
    code = (
        "import sys; from stages import params; sys.exit(bool({'torch', 'transformers', 'polars'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(REAL.splitlines(), 1) if line.startswith(text))


@pytest.mark.parametrize("key", ["seed: 7", "e003: {from: e000, epochs: 3}"])
def test_a_key_given_twice_is_refused_with_its_line(key: str) -> None:
    """Most parsers take the last one in silence."""
    indent = re.search(rf"^( *){re.escape(key)}", REAL, re.MULTILINE)[1]  # type: ignore[index]
    edit_params_text((key, f"{key}\n{indent}{key}"))
    where = line_of(indent + key) + 1
    assert read_refusal().startswith(
        f'params.yaml is not valid YAML (line {where}: found duplicate key "{key.split(":")[0]}"'
    )
    assert "http" not in read_refusal() and "\n" not in read_refusal()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (REAL.replace("  seed: 7", "\tseed: 7", 1).encode(), f"line {line_of('  seed: 7')}: "),
        (REAL.encode() + b"\n[", r"line \d+: could not find expected"),
        (b"target: \xff", "'utf-8' codec"),
        (b"target: 2026-13-01", "month must be in 1..12"),
        (b"a: 1\n---\nb: 1", "line 2: "),
        (b"!!python/object:os.system {}", "line 1: could not determine a constructor"),
    ],
    ids=["tab", "rest", "no UTF-8", "no such day", "two documents", "python object"],
)
def test_invalid_yaml_is_one_line_that_says_where(content: bytes, says: str) -> None:
    Path("params.yaml").write_bytes(content)
    message = read_refusal()
    assert re.match(rf"params\.yaml is not valid YAML:? \(?({says})", message), message
    assert message.endswith("; correct it") and "\n" not in message
