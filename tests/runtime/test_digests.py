"""Digests of code and of files: what changes them, and that every supported Python finds the same."""

import shutil
import subprocess
from pathlib import Path

import pytest

from stages.runtime.digests import KeptDigests, cut_remarks, digest_code, digest_path
from stages.runtime.stage_code import digest_stage, find_code
from tests.conftest import ROOT

CODE = '''"""A module."""

import os


def scale(x: float) -> float:
    """Return x, scaled."""
    # as in the paper
    text = """one

    two  # no comment
    """
    return x * len(text) + f"{os.sep}#".count("#")  # always one
'''
REMARKED = '''# A licence.
"""Another docstring,
of two lines.
"""
import os

def scale(x: float) -> float:
    text = """one

    two  # no comment
    """


    return x * len(text) + f"{os.sep}#".count("#")
'''


def test_remarks_change_no_digest() -> None:
    assert cut_remarks(CODE) == cut_remarks(REMARKED)


@pytest.mark.parametrize(
    ("old", "new"),
    [("scaled", "scaled"), ("x *", "2 * x *"), ("no comment", "no"), ("one\n\n", "one\n"), ('"#")', '"")')],
)
def test_code_and_the_text_of_strings_do(old: str, new: str) -> None:
    assert (cut_remarks(CODE) == cut_remarks(CODE.replace(old, new))) == (old == new)


def test_every_supported_python_finds_the_same_digests() -> None:
    """A clone with another Python would run everything again, for hours."""
    code = "import sys; from pathlib import Path; from stages.runtime import digests as d; "
    code += "print(*[d.digest_code(f) for f in sorted(Path('stages/training').rglob('*.py'))])"
    expected = " ".join(digest_code(file) for file in sorted((ROOT / "stages/training").rglob("*.py")))
    for version in ("3.11", "3.12", "3.13"):
        python = shutil.which(f"python{version}")
        if (
            python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
        ):  # no shim without a Python
            shown = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
            assert shown.stdout.strip() == expected, (version, shown.stderr)


def test_a_stage_is_all_that_it_imports_but_what_changes_no_result() -> None:
    """`from stages.runtime import atomic` names a file, `from stages.runtime.atomic import write_json` the same one."""
    found = find_code("report", root=ROOT)
    assert {"stages/report.py", "stages/reporting/page.py", "stages/cells/cell.py"} <= found
    assert any(name.endswith(".j2") for name in found)
    assert not {"stages/runtime/atomic.py", "stages/params/schema.py", "stages/telemetry/run_stage.py"} & found
    assert find_code("benchmark_served_baseline", root=ROOT) == find_code("benchmark_served", root=ROOT)
    without = digest_stage("report", KeptDigests(), left_out=["stages/engines/sglang.py"], root=ROOT)
    assert without.keys() == found - {
        "stages/engines/sglang.py",
        "stages/engines/server_startup/sglang_vision_patch.py",
    }  # which it alone imports


def test_a_folder_is_its_bytes_and_names_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "a/inner").mkdir(parents=True)
    (tmp_path / "a/inner/w.safetensors").write_text("weights")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/.cache").mkdir()  # as a download leaves it
    (tmp_path / "b/.cache/note").touch()
    kept = KeptDigests()
    first = digest_path(tmp_path / "a", kept)
    assert first == digest_path(tmp_path / "b", kept)
    (tmp_path / "a/inner/w.safetensors").write_text("another")  # of the same size
    assert first != digest_path(tmp_path / "a", kept)
    assert digest_path(tmp_path / "none", kept) == "missing"
