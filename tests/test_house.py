"""The rules of the house that a machine can check. What imports what is import-linter's part, in pyproject.toml."""

import ast
import json
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import pytest
from ruamel.yaml import YAML

from benchmarks import params_page, readme_picture, readme_table
from pipeline import dvc_graph
from stages.params import stage_inputs
from stages.params.engines import ENGINES
from stages.params.schema import Params, load_params
from stages.runtime import stage_code

ROOT = Path(__file__).parent.parent
NO_STAGES = {"target", "schedule"}  # sections that several stages share, or none reads


def _graph() -> dict[str, dict[str, Any]]:
    """Stage name -> its definition; a foreach's is what it repeats."""
    stages = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
    return {name: stage.get("do", stage) for name, stage in stages.items()}


MODULES = sorted(str(f.relative_to(ROOT)) for p in ("stages", "pipeline") for f in (ROOT / p).rglob("*.py"))
BASELINE = "_baseline"  # of a stage: the same without a draft, so the same file and section
GRAPH = {name: stage for name, stage in _graph().items() if name != "inputs"}
every_stage = pytest.mark.parametrize("stage", GRAPH)


# Sizes

# The lines of Python that a room may have: what goes in, something goes out. Second, where a room is larger than that, what it
# has now, which may only fall.
ROOMS = {
    "pipeline": (5200, 5222),
    "stages/params": (2700, 3018),
    "stages/runtime stages/telemetry": (1600, 1814),
    "stages/data": (4700,),
    "stages/prompts stages/sampling": (1700,),
    "stages/target": (2800,),
    "stages/hidden_states": (1300,),
    "stages/draft stages/families": (6000, 6703),
    "stages/training": (1900, 2049),
    "stages/trees stages/replay": (1200,),
    "stages/engine": (3000,),
    "stages/engines stages/measuring": (4300, 4375),
    "stages/cells": (2300, 2422),
    "stages/reporting": (2700,),
    "stages/published stages/reproduce stages/grading stages/toy": (2200, 2261),
    "tests": (31_000, 31067),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget(room: str) -> None:
    files = [file for folder in room.split() for file in (ROOT / folder).rglob("*.py")]
    found = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    budget, *present = ROOMS[room]
    assert found <= max(ROOMS[room]), f"{room} has {found} lines of {budget}: what goes in, something goes out"
    assert not present or budget < found, f"{room} has {found} lines of {budget}: leave out what it had"


# What stages depend on


def test_inputs_are_written_for_the_stages_of_the_graph() -> None:
    named = {one.name for one in stage_inputs.list_instances(load_params(ROOT / "params.yaml"))}
    assert set(dvc_graph.list_stages(ROOT)) == named | {"inputs"}


@every_stage
def test_a_stage_depends_on_its_inputs(stage: str) -> None:
    items = "".join(f"-${{item.{name}}}" for name in stage_inputs.DECLARED[stage].items)
    shown = [re.sub(r"\$\{(item|key)\}", "${item}", dep) for dep in GRAPH[stage]["deps"]]
    if items.count("item") == 1:
        items = "-${item}"
    assert f"artifacts/inputs/{stage}{items}.json" in shown


@every_stage
def test_a_stage_that_can_see_pictures_depends_on_them(stage: str) -> None:
    """Bug: data/fixed/images was a dep of sample_target alone; a clone and a worker lacked what seven others decode."""
    is_visual = "stages/target/vision.py" in stage_code.find_code(stage, root=ROOT)
    is_visual = is_visual and stage != "prepare_prompts"  # which lets the target write text, and copies pictures' paths
    assert ("data/fixed/images" in GRAPH[stage]["deps"]) == is_visual, f"stages.{stage}.deps: data/fixed/images"


# Engines and what they are asked are in one room


ENGINE_ROOM = ("stages/engines/", "stages/params/engines.py")
ENGINE_WORDS = {word for engine in ENGINES.values() for word in (engine.name, engine.title, engine.program) if word}
PACKAGES = {"torch", "transformers"}  # which are also packages: as elements of lists and arguments of calls
OTHER_MEANINGS = {
    "stages/params/tree_shape.py": {"sglang"},  # a way to score trees
    "stages/params/data_sections.py": {"transformers"},  # a backend: transformers in the stage's own process
}


def _list_engine_words(tree: ast.AST) -> set[str]:
    """Return the names of engines that a module has as constants, or compares with by way of the registry's facts."""
    packages = {
        id(word)
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Call)
        for word in (node.args if isinstance(node, ast.Call) else node.elts)
        if isinstance(word, ast.Constant) and word.value in PACKAGES
    }
    constants = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ENGINE_WORDS and id(node) not in packages
    }
    compared = {
        ast.unparse(side)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if re.fullmatch(r"(\w+\.)*(TORCH|ENGINE)(\.name)?", ast.unparse(side))
    }
    return constants | compared


@pytest.mark.parametrize("file", MODULES)
def test_no_module_names_an_engine_but_those_of_engines(file: str) -> None:
    """An engine's name elsewhere is a branch that the next engine needs too; ask `registry.get(name)` or its facts."""
    found = _list_engine_words(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    allowed = OTHER_MEANINGS.get(file, set())
    assert file.startswith(ENGINE_ROOM) or found <= allowed


# One word everywhere


@every_stage
def test_a_stage_is_one_word_everywhere(stage: str) -> None:
    word = stage.removesuffix(BASELINE)
    assert (ROOT / "stages" / f"{word}.py").is_file(), f"dvc.yaml has {stage}; write stages/{word}.py"
    assert word in Params.model_fields, f"dvc.yaml has {stage}; give it a section in params.yaml and stages/params"
    command = GRAPH[stage]["cmd"]
    made = json.dumps([GRAPH[stage]["outs"], GRAPH[stage].get("metrics")])
    told_its_name = ' "$DVC_STAGE"' if re.search(r"\$\{(item|key)", made) else ""
    assert command == f"python -m stages.{word}{told_its_name}", f"stages.{stage}.cmd is {command!r}"
    assert GRAPH[stage].get("desc"), f"stages.{stage} has no desc; say in a line what becomes what"


def test_every_stage_file_and_section_is_in_the_graph() -> None:
    files = {file.stem for file in (ROOT / "stages").glob("*.py")} - {"__init__", "inputs"}
    stages = {stage.removesuffix(BASELINE) for stage in GRAPH}
    assert files == stages
    assert set(Params.model_fields) - NO_STAGES == stages


def test_every_stage_says_what_it_needs_of_the_machine() -> None:
    """Else a run in Prefect is refused; a stage whose numbers are times must say exclusive: true."""
    assert set(load_params(ROOT / "params.yaml").schedule.stages) == set(GRAPH)


# Files that a remedy may say to remove: unfinished work, and archives on the remote that a run packs again.
MAY_BE_REMOVED = {"stages/runtime/scratch.py", "stages/runtime/journal.py", "pipeline/remote/dvc_remote.py"}


@pytest.mark.parametrize("file", MODULES)
def test_no_message_says_to_remove_what_the_user_made(file: str) -> None:
    """Bug: `delete FOLDER and run ...` was said of the user's own import folder, and of lines of their data."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Raise) and node.exc and file not in MAY_BE_REMOVED:
            message = " ".join(
                n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            )
            assert not re.search(r"\b(delete|remove|erase|rm|unlink)\b", message, re.I), (
                f"{file}:{node.lineno}: {message}"
            )


def test_init_files_are_empty() -> None:
    found = [file for package in ("stages", "pipeline") for file in (ROOT / package).rglob("__init__.py")]
    assert len(found) >= 2
    for file in found:
        if file != ROOT / "stages/__init__.py":
            assert file.read_text() == "", f"{file.relative_to(ROOT)} must be empty: re-exports make import cycles"


def test_importing_stages_imports_nothing_but_where_a_run_forks_them() -> None:
    """stages/__init__.py is the one that is not empty: it is what every stage's command line runs first."""
    code = "import sys, stages; print([name for name in sys.modules if name.startswith('stages.')])"
    clean = {name: value for name, value in os.environ.items() if name != "AERIE_FORK_SERVER"}
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert shown.stdout == "[]\n"


def test_the_page_of_all_keys_is_of_this_schema() -> None:
    assert params_page.render_page() == params_page.PAGE.read_text(encoding="utf-8"), (
        "run: python -m benchmarks.params_page"
    )


def test_readme_shows_the_very_table_of_a_kept_run() -> None:
    found = readme_table.BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found, "README.md has lost its table; run: python -m benchmarks.readme_table DATE DURATION"
    assert found[2].startswith(readme_table.table(ROOT / found[1]))


def test_readme_shows_a_picture_of_the_same_run() -> None:
    """A picture of another run than the table would be believed; a large one, or one that asks a host, would not be shown."""
    found = readme_table.BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found
    record = ROOT / found[1]
    picture = record.with_suffix(".svg")
    text = picture.read_text(encoding="utf-8")
    assert f"]({picture.relative_to(ROOT).as_posix()})" in found[2] and picture.stat().st_size < 60_000
    assert f"<desc>{readme_picture.describe_origin(record)}</desc>" in text
    assert not re.search(r"<script|<image|@import|url\((?!#)|(?<!xmlns=\")(?<!xlink=\")https?:", text)
    assert "#0101" not in text and "prefers-color-scheme: dark" in text


# Prose: words and openings that mark the first layout's dialect. Plain technical English names the subject instead.
DIALECT = re.compile(
    r"\b(nobody|nobody's|whoever|learnt by heart|lies beside|stands beside|that sees)\b"
    r"|^\s*(class )?\"\"\"(Of|What|Whether|Who) ",
    re.IGNORECASE | re.MULTILINE,
)
PROSE = [
    *(
        file
        for folder in ("stages", "pipeline")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".j2")
    ),
    *(file for file in (ROOT / "docs").glob("*.md") if file.name != "LOG.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "params.yaml", "dvc.yaml")),
]


@pytest.mark.parametrize("file", PROSE, ids=lambda file: str(file.relative_to(ROOT)))
def test_prose_is_plain_technical_english(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    found = [(text.count("\n", 0, match.start()) + 1, match[0].strip()) for match in DIALECT.finditer(text)]
    assert not found, f"{file.relative_to(ROOT)}: name the subject, use the field's term: {found}"


def _list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        linked = page.parent / path if path else page
        assert linked.exists(), path
        assert not anchor or anchor in _list_anchors(linked), f"{path}#{anchor}"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name
)
def test_code_that_a_page_names_is_there(page: Path) -> None:
    """Bug: files were moved, and pages named the old places. NAME is the reader's; a tag is of the past."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:stages|pipeline|tests|benchmarks)/[\w./-]+)`(?!.*\n?.*at the tag)", text)
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """An import circle makes the order of imports matter, and its modules one that nobody can read alone."""
    graph = grimp.build_graph("stages", "pipeline", exclude_type_checking_imports=True)
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()
