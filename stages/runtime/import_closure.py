"""The import closure of a stage: the files of stages/ that its code consists of, found in the import statements.

It decides what DVC reruns (pipeline/deps.py writes it into dvc.yaml) and which unfinished work a stage may resume
(stages/runtime/scratch.py digests it). Left out are `stages/params`, whose values DVC tracks, but for loads, the shapes of
trees and which of them engines run, which are computed there, and `stages/telemetry`, which moves no result.
"""

import ast
from functools import cache
from pathlib import Path

CODE = "stages"
NOT_TRACKED = ("stages/params/", "stages/telemetry/")
TRACKED = {"stages/params/load.py", "stages/params/served_trees.py", "stages/params/tree_shape.py"}
TEMPLATES = "templates"  # the page templates of a folder's modules
BASELINE = "_baseline"  # suffix of a stage of dvc.yaml that runs another stage's module without a draft


def find_import_closure(stage: str, root: Path = Path()) -> set[str]:
    """Return the files, relative to the root and with `/`, page templates included. Raises ValueError for a relative import."""
    word = stage.removesuffix(BASELINE)
    found = {file.relative_to(root).as_posix() for file in (root / CODE).glob(f"{word}.*") if file.is_file()}
    pending = {file for file in found if file.endswith(".py")}
    while pending:
        followed = {file for file in pending if _is_tracked(file)}
        pending = {new for file in followed for new in find_imported_files(file, root)} - found
        found |= pending
    for folder in {file.rsplit("/", 1)[0] for file in found} - {CODE}:
        found |= {file.relative_to(root).as_posix() for file in (root / folder / TEMPLATES).glob("*") if file.is_file()}
    return {file for file in found if _is_tracked(file)}


def _is_tracked(file: str) -> bool:
    return file in TRACKED or not file.startswith(NOT_TRACKED)


@cache
def find_imported_files(file: str, root: Path = Path()) -> frozenset[str]:
    """Return the files of stages/ that one file imports, anywhere in it.

    `from stages.runtime import atomic` names the module stages/runtime/atomic.py, `from stages.runtime.atomic import
    write_json` the same one.
    """
    named: list[str] = []
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(
                    f"{file}:{node.lineno}: relative import; write it from the root, as stages.runtime.atomic"
                )
            named += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = (f"{name.replace('.', '/')}.py" for name in named if name.split(".")[0] == CODE)
    return frozenset(found for found in files if (root / found).is_file())


def list_modules(folder: str, root: Path = Path()) -> set[str]:
    """Return the modules of a folder, without its empty __init__.py."""
    files = (root / folder).glob("*.py")
    return {file.relative_to(root).as_posix() for file in files if file.name != "__init__.py"}
