"""Examples of README and docs: parameters are valid, commands are parsed, and the worked example of the guide starts."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML, YAMLError

from pipeline import cli, commands, recipes
from stages.params import schema
from stages.params.recipe import RECIPES_FOLDER
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```\w*\n((?s:.*?))^```$|((?:^    .*\n|^\n)+)", re.MULTILINE)
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(aerie|make|python -m) ([^#|&;`[]*)")
PLACES = {
    "RECIPE": "weather-tiny",
    "STAGE": "report",
    "COMMAND": "run",
    "RUN": "name",
    "stages.NAME": "stages.report",
}  # what a page leaves open


def list_blocks(page: Path) -> list[str]:
    """The blocks of code: between fences, or indented by four."""
    return [
        fenced or re.sub("^    ", "", indented, flags=re.M) for fenced, indented in FENCED.findall(page.read_text())
    ]


def list_parameters() -> Iterator[Any]:
    """Every block of a page that holds sections of params.yaml; one that uses another's anchor with that before it."""
    for page in PAGES:
        before = ""
        for number, block in enumerate(list_blocks(page)):
            try:
                found = YAML(typ="safe").load(before + block if "<<: *" in block and "&" not in block else block)
            except YAMLError:
                continue
            if isinstance(found, dict) and found.keys() & schema.Params.model_fields.keys():
                before = block
                yield pytest.param(found, id=f"{page.stem}-{number}")


def merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def write_params(path: Path, example: dict[str, Any]) -> None:
    whole = YAML(typ="safe").load(path)
    merge(whole, example)
    with Path("params.yaml").open("w") as file:
        YAML(typ="safe").dump(whole, file)


@pytest.mark.parametrize("example", list_parameters())
def test_parameters_of_a_page_are_valid(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the worked example of the guide lacked a key that block drafts need."""
    monkeypatch.chdir(tmp_path)
    write_params(ROOT / "params.yaml", example)
    schema.load_params()


def test_the_worked_example_of_the_guide_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: train_draft.checkpoints.d001.anchors: missing."""
    (example,) = (block for block in list_blocks(ROOT / "docs/guide.md") if block.startswith("target:"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "data/targets/weather-tiny", "smollm2")
    config = Path("smollm2/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 49152}))  # SmolLM2's
    Path("data/raw/mine").mkdir(parents=True)
    Path("data/raw/mine/questions.txt").write_text("".join(f"What is {n} + {n}?\n" for n in range(120)))
    write_params(ROOT / recipes.OWN_PARAMS, YAML(typ="safe").load(example))
    params = commands.check_run_params()
    assert {"e001", "d001"} < set(params.train_draft.checkpoints) and params.benchmark.checkpoints == ["e001"]


def list_commands() -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text()
        lines = [line.removeprefix("$ ") for block in list_blocks(page) for line in block.splitlines()]
        spans = re.findall("`([^`\n]+)`", text)
        for line in dict.fromkeys([*lines, *spans]):
            for part in line.split("&&"):
                if found := COMMAND.match(part.strip()):
                    yield pytest.param(found[1], found[2].strip(), id=f"{page.stem}: {part.strip()}"[:90])


@pytest.mark.parametrize(("program", "words"), list_commands())
def test_a_command_of_a_page_is_known(program: str, words: str) -> None:
    given = [PLACES.get(word, word) for word in shlex.split(words)]
    if program == "make":
        targets = {word for word in given if "=" not in word}
        assert all(re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M) for target in targets)
    elif program == "python -m":
        assert (ROOT / f"{given[0].replace('.', '/')}.py").exists() or (ROOT / given[0]).is_dir() or given[0] == "pip"
    elif given and "--help" not in given:
        group = typer.main.get_command(cli.app)
        context = group.make_context("aerie", list(given), resilient_parsing=True)
        name, command, rest = group.resolve_command(context, list(given))  # type: ignore[attr-defined]
        if rest:  # else the page speaks of the command
            command.make_context(name, list(rest), parent=context)
        if name in ("use", "fetch", "reproduce", "estimate") and rest and not rest[0].startswith("-"):
            assert (ROOT / RECIPES_FOLDER / f"{rest[0]}.yaml").exists() or rest[0] == recipes.OWN
