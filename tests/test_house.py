"""The rules of the house that a machine can check. What imports what is import-linter's part, in pyproject.toml."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from benchmarks import readme_picture, readme_served, readme_table
from pipeline import deps
from stages.params.benchmark_sections import BenchmarkServer
from stages.params.schema import Params, load_params
from stages.runtime.import_closure import find_import_closure, find_imported_files, list_modules

ROOT = Path(__file__).parent.parent
NO_STAGES = {"target", "schedule"}  # sections that several stages share, or none reads


def _graph() -> dict[str, dict[str, Any]]:
    """Stage name -> its definition; a foreach's is what it repeats."""
    stages = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
    return {name: stage.get("do", stage) for name, stage in stages.items()}


BASELINE = "_baseline"  # of a stage: the same without a draft, so the same file and section
GRAPH = _graph()
every_stage = pytest.mark.parametrize("stage", GRAPH)


# Dependencies are the import closure


def test_dvc_yaml_lists_the_import_closures() -> None:
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    assert deps.render_code_deps(text, ROOT) == text, "dvc.yaml is stale; run: aerie deps --write"


def files_of(folder: str) -> set[str]:
    """Return the modules of a folder, and the page's templates, style and script below it."""
    parts = (file for ending in ("j2", "css", "js") for file in (ROOT / folder).rglob(f"*.{ending}"))
    templates = {file.relative_to(ROOT).as_posix() for file in parts}
    return list_modules(folder, ROOT) | templates


@every_stage
def test_deps_are_the_import_closure(stage: str) -> None:
    """As DVC reads them: files, and folders of which every module is imported."""
    listed = [dep for dep in GRAPH[stage]["deps"] if dep.startswith("stages/")]
    files = {name for dep in listed for name in ({dep} if dep.endswith((".py", ".j2")) else files_of(dep))}
    assert files == find_import_closure(stage, ROOT)
    assert len(listed) == len(set(listed)), f"stages.{stage}.deps lists a file twice"


@every_stage
def test_a_stage_that_can_see_pictures_depends_on_them(stage: str) -> None:
    """Bug: data/fixed/images was a dep of sample_target alone; a clone and a worker lacked what seven others decode."""
    is_visual = "stages/target/vision.py" in find_import_closure(stage, ROOT)
    assert ("data/fixed/images" in GRAPH[stage]["deps"]) == is_visual, f"stages.{stage}.deps: data/fixed/images"


def test_the_closure_follows_a_name_that_is_a_module() -> None:
    """`from stages.runtime import atomic` names a file, `from stages.runtime.atomic import write_json` names the same one."""
    assert "stages/runtime/atomic.py" in find_imported_files("stages/report.py", ROOT)
    closure = find_import_closure("report", ROOT)
    assert {"stages/report.py", "stages/reporting/page.py", "stages/results/torch_records.py"} <= closure
    untracked = {name for name in closure if name.startswith(("stages/params/", "stages/telemetry/"))}
    computing = {
        "stages/params/load.py",
        "stages/params/tree_shape.py",
        "stages/params/served_trees.py",
    }  # where the sections only hold values
    assert untracked <= computing


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
    files = {file.stem for file in (ROOT / "stages").glob("*.py")} - {"__init__"}
    stages = {stage.removesuffix(BASELINE) for stage in GRAPH}
    assert files == stages
    assert set(Params.model_fields) - NO_STAGES == stages


def test_every_stage_says_what_it_needs_of_the_machine() -> None:
    """Else a run in Prefect is refused; a stage whose numbers are times must say exclusive: true."""
    assert set(load_params(ROOT / "params.yaml").schedule.stages) == set(GRAPH)


# Files that a remedy may say to remove: unfinished work, and archives on the remote that a run packs again.
MAY_BE_REMOVED = {"stages/runtime/scratch.py", "stages/runtime/journal.py", "pipeline/remote/dvc_remote.py"}


@pytest.mark.parametrize(
    "file", sorted(str(f.relative_to(ROOT)) for p in ("stages", "pipeline") for f in (ROOT / p).rglob("*.py"))
)
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


# Parameters: what dvc.yaml tracks exists, and is what the code reads


def section_inside(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """(the section an annotation holds, whether under names of the user's own), through dict[...], | None, Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for inner in get_args(annotation):
        model, _ = section_inside(inner)
        if model:
            return model, getattr(annotation, "__origin__", None) is dict
    return None, False


@every_stage
def test_tracked_params_exist(stage: str) -> None:
    for tracked in GRAPH[stage]["params"]:
        model: type[BaseModel] | None = Params
        named_by_user = False
        for part in re.findall(r"\$\{[^}]*\}|[^.]+", tracked):
            if named_by_user:
                assert part.startswith("${"), (
                    f"stages.{stage}.params: {tracked}: {part} must be a ${{...}} of the graph"
                )
                named_by_user = False
                continue
            fields = {f.alias or name: f for name, f in (model.model_fields if model else {}).items()}
            assert part in fields, (
                f"stages.{stage}.params: {tracked}: no key {part}; known keys are {', '.join(fields)}"
            )
            model, named_by_user = section_inside(fields[part].annotation)


WHO_NOT_WHAT = {  # computes, or watches
    "train_draft.processes", "train_draft.parallel", "train_draft.report_to", "train_draft.run_name",
    "extract_hiddens.processes", "benchmark_served.server.api_key_env", "benchmark_served.server.start_timeout_s",
}  # fmt: skip


OF_A_DRAFT = {"benchmark_served.interleave", "benchmark_served.server.algorithm"}  # a baseline has none


def test_train_draft_tracks_every_key_but_other_checkpoints() -> None:
    """Tracking the whole section would retrain e003 when e020 is added."""
    tracked = {p for p in GRAPH["train_draft"]["params"] if p.startswith("train_draft.")}
    keys = set(Params.model_fields["train_draft"].annotation.model_fields) - {"checkpoints"}
    keys -= {key.removeprefix("train_draft.") for key in WHO_NOT_WHAT}
    assert tracked == {f"train_draft.{key}" for key in keys} | {"train_draft.checkpoints.${key}"}


def reads(stage: str) -> set[str]:
    """What the stage's file reads of the parameters, as dotted keys: attributes of `load_params()` or of a `Params` argument."""
    tree = ast.parse((ROOT / "stages" / f"{stage.removesuffix(BASELINE)}.py").read_text(encoding="utf-8"))
    roots = {
        arg.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for arg in node.args.args
        if arg.annotation and ast.unparse(arg.annotation) in ("Params", "schema.Params")
    } | {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in ("load_params()", "schema.load_params()")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = {chain.split(".", 1)[1] for chain in chains if chain.split(".")[0] in roots}
    found |= {
        chain.removeprefix("schema.load_params().") for chain in chains if chain.startswith("schema.load_params().")
    }
    return {key for key in found if is_key(key)}


def is_key(chain: str) -> bool:
    """Return whether the first two names of an attribute chain are a section and one of its keys, not a method or property."""
    section, _, rest = chain.partition(".")
    field = Params.model_fields.get(section)
    model = field and section_inside(field.annotation)[0]
    if not model or not rest:
        return field is not None
    return rest.split(".")[0] in {name for key, f in model.model_fields.items() for name in (key, f.alias or key)}


def test_the_reads_of_a_stage_are_found() -> None:
    """Bug: after a rename of `load` none was found, and the next test passed whatever a stage read."""
    assert all(reads(stage) for stage in GRAPH if stage.removesuffix(BASELINE) != "import_draft"), (
        "a stage reads nothing?"
    )


@every_stage
def test_a_stage_reads_only_what_dvc_tracks(stage: str) -> None:
    """`p.section.key` must be tracked, or lie above something tracked (a section that is given a short name)."""
    tracked = [p.split(".${")[0] for p in GRAPH[stage]["params"]]
    for key in sorted(reads(stage) - WHO_NOT_WHAT):
        if stage.endswith(BASELINE) and key in OF_A_DRAFT:
            continue
        covered = any(f"{key}.".startswith(f"{p}.") or f"{p}.".startswith(f"{key}.") for p in tracked)
        assert covered, (
            f"stages/{stage}.py reads {key}; add it to stages.{stage}.params, which tracks {', '.join(tracked)}"
        )


@pytest.mark.parametrize("stage", ["benchmark_served", "serving_costs"])
def test_a_served_stage_tracks_every_key_of_the_server(stage: str) -> None:
    """Bug: a cell was not measured again after a change of benchmark_served.server.vision_patch."""
    keys = {f"benchmark_served.server.{key}" for key in BenchmarkServer.model_fields}
    assert keys - WHO_NOT_WHAT <= set(GRAPH[stage]["params"])


def test_readme_shows_the_very_table_of_a_kept_run() -> None:
    found = readme_table.BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found, "README.md has lost its table; run: python -m benchmarks.readme_table DATE DURATION"
    assert found[2].startswith(readme_table.table(ROOT / found[1]))


def test_readme_shows_the_served_cells_of_a_kept_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = readme_served.SERVED_BLOCK.search(text)
    assert found, "README.md has lost its second table; run: python -m benchmarks.readme_served RECORD CAPTION"
    assert found[2].startswith(readme_served.served_table(ROOT / found[1], readme_served.list_shown_trees(text, ROOT)))


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


def test_the_words_of_the_dialect_are_found() -> None:
    for text in ("nobody's token", '"""Of each turn its row."""', '    """Whether it is."""', "a target that sees"):
        assert DIALECT.search(text)
    assert not DIALECT.search('"""Return what of it is finite."""')


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
