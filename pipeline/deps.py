"""Write the code dependencies of every stage into dvc.yaml: `aerie deps --write`.

DVC reruns a stage when one of its `deps` changes, so the code part of `deps` must be exactly the files that the stage
imports, directly or not (the import closure). This module computes the closure from the import statements and rewrites
the lines of dvc.yaml that begin with `stages/`; everything else in dvc.yaml stays byte for byte.

A folder of which a stage imports every module is written as the folder's name, anything less file by file. Left out are
`stages/params`, since DVC tracks the parameters' values, and `stages/telemetry`, which records seconds and joules and
moves no result.
"""

import ast
import re
from functools import cache
from pathlib import Path

DVC_FILE = Path("dvc.yaml")
CODE = "stages"
NOT_TRACKED = ("stages/params/", "stages/telemetry/")
TEMPLATES = "templates"  # page templates of the modules in the folder above
BASELINE = "_baseline"  # suffix of a stage that runs another stage's module without a draft

_STAGE = re.compile(r"^  ([a-z_]+):\s*(?:#.*)?$")
_CODE_DEP = re.compile(r"^(\s+)- stages/\S+\s*$")


def write_code_deps(root: Path = Path()) -> list[str]:
    """Rewrite dvc.yaml with the import closures -> the stages whose lines changed."""
    file = root / DVC_FILE
    before = file.read_text(encoding="utf-8")
    after = render_code_deps(before, root)
    if after != before:
        file.write_text(after, encoding="utf-8")
    return [stage for stage, lines in code_deps_by_stage(after).items() if lines != code_deps_by_stage(before)[stage]]


def render_code_deps(text: str, root: Path = Path()) -> str:
    """Return the text of dvc.yaml with each stage's code dependencies replaced by its import closure."""
    stage, found, rendered = "", list[str](), set[str]()
    for line in text.splitlines():
        if start := _STAGE.match(line):
            stage = start[1]
        if not (dep := _CODE_DEP.match(line)):
            found.append(line)
        elif stage not in rendered:
            rendered.add(stage)
            found += [f"{dep[1]}- {name}" for name in code_deps(stage, root)]
    return "\n".join(found) + "\n"


def code_deps_by_stage(text: str) -> dict[str, list[str]]:
    """Return the code dependencies that a text of dvc.yaml lists for each stage."""
    found: dict[str, list[str]] = {}
    stage = ""
    for line in text.splitlines():
        if start := _STAGE.match(line):
            stage = start[1]
            found[stage] = []
        elif _CODE_DEP.match(line):
            found[stage].append(line.strip().removeprefix("- "))
    return found


def code_deps(stage: str, root: Path = Path()) -> list[str]:
    """Return the stage's code dependencies in dvc.yaml's order: its own files, then folders and modules by name."""
    closure = import_closure(stage, root)
    own = sorted(name for name in closure if name.count("/") == 1)
    shared = {name for name in closure if name.count("/") > 1}
    folders = {name.rsplit("/", 1)[0] for name in shared}
    whole = {folder for folder in folders if _modules_of(folder, root) <= shared}
    outer = {folder for folder in whole if folder.rsplit("/", 1)[0] not in whole}  # DVC hashes subfolders too
    return own + sorted(outer | {name for name in shared if name.rsplit("/", 1)[0] not in whole})


def import_closure(stage: str, root: Path = Path()) -> set[str]:
    """Return every file of stages/ that the stage's code consists of, page templates included."""
    word = stage.removesuffix(BASELINE)
    found = {file.relative_to(root).as_posix() for file in (root / CODE).glob(f"{word}.*") if file.is_file()}
    pending = {file for file in found if file.endswith(".py")}
    while pending:
        pending = {new for file in pending for new in imported_files(file, root)} - found
        found |= pending
    for folder in {file.rsplit("/", 1)[0] for file in found} - {CODE}:
        found |= {file.relative_to(root).as_posix() for file in (root / folder / TEMPLATES).glob("*") if file.is_file()}
    return {file for file in found if not file.startswith(NOT_TRACKED)}


@cache
def imported_files(file: str, root: Path = Path()) -> frozenset[str]:
    """Return the files of stages/ that one file imports, anywhere in it.

    `from stages.io import atomic` names the module stages/io/atomic.py, `from stages.io.atomic import file` the same.

    Raises:
        ValueError: where the file has a relative import, which this does not follow.
    """
    named: list[str] = []
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{file}:{node.lineno}: relative import; write it from the root, as stages.io.atomic")
            named += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = (f"{name.replace('.', '/')}.py" for name in named if name.split(".")[0] == CODE)
    return frozenset(found for found in files if (root / found).is_file())


def _modules_of(folder: str, root: Path) -> set[str]:
    """Return the modules of a folder, without its empty __init__.py."""
    files = (root / folder).glob("*.py")
    return {file.relative_to(root).as_posix() for file in files if file.name != "__init__.py"}
