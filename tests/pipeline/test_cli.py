"""The command line: `aerie COMMAND` and `python -m pipeline COMMAND` are one program, and its help reads as documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from tests.conftest import ROOT


def test_every_command_is_in_one_group_of_the_help() -> None:
    """Bug: `card`, which was in no group, was shown among the commands for several hosts."""
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(cli.typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [["start"], ["worker", "--limit", "0"], ["worker", "--limit", "many"], ["drop"]])
def test_unknown_arguments_end_with_1_and_name_the_help(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run_command_line(words)
    assert isinstance(ended.value.code, str)
    assert re.fullmatch(rf"aerie: .+ Found: {' '.join(words)}; run: aerie.* --help", ended.value.code)


def test_starting_it_imports_nothing_heavy() -> None:
    code = "import sys, pipeline.cli, pipeline.commands; print(*{'torch', 'dvc', 'prefect', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_a_terminal_of_latin_1_is_shown_the_table(tmp_path: Path) -> None:
    """Bug: a dash of the table ended the command: 'latin-1' codec can't encode character."""
    (tmp_path / "results/report").mkdir(parents=True)
    (tmp_path / "results/report/table.txt").write_text("tau 5.19 ± 0.79 – →\n", encoding="utf-8")
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "pipeline", "table"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, done.stdout.decode("latin-1")) == (0, "tau 5.19 ± 0.79 ? ?\n"), done.stderr
