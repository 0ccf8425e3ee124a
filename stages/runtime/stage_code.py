"""The code of a stage: the files of stages/ that its modules import, directly or not.

It decides what an edit of code reruns (stages/params/stage_inputs.py) and which unfinished work a stage may resume
(stages/runtime/scratch.py).
"""

import ast
from collections.abc import Collection
from pathlib import Path

from stages.runtime.digests import KeptDigests, digest_code

CODE = "stages"
# What changes no result: checks of params.yaml, what runs, logs and watches a stage, the table of families (listed by name).
NOT_TRACKED = ("stages/params/", "stages/runtime/", "stages/telemetry/", "stages/families/registry.py")
TRACKED = {  # what these rooms hold that computes
    "stages/params/tree_shape.py",
    "stages/runtime/distributed.py",
    "stages/runtime/mkl_first_calls.py",
}
TEMPLATES = "templates"  # the page templates of a folder's modules
BASELINE = "_baseline"  # suffix of a stage of dvc.yaml that runs another stage's module without a draft


def digest_stage(
    stage: str, kept: KeptDigests, families: Collection[str] = (), left_out: Collection[str] = (), root: Path = Path()
) -> dict[str, str]:
    """Return a digest of each file of a stage's code by its name.

    `families` are the modules of the families of drafts that this instance runs, which it imports by name; `left_out` are
    modules that it imports and never runs, as those of another engine.
    """
    key = stage, frozenset(families), frozenset(left_out), root  # of all cells of a stage and a family
    if key not in kept.code:
        files = sorted(find_code(stage, kept, families, left_out, root))
        kept.code[key] = {file: kept.find("code", root / file, digest_code) for file in files}
    return kept.code[key]


def find_code(
    stage: str,
    kept: KeptDigests | None = None,
    families: Collection[str] = (),
    left_out: Collection[str] = (),
    root: Path = Path(),
) -> set[str]:
    """Return the files, relative to `root` and with `/`, page templates included. Raises ValueError for a relative import."""
    kept = kept or KeptDigests()
    word = stage.removesuffix(BASELINE)
    found = {file.relative_to(root).as_posix() for file in (root / CODE).glob(f"{word}.*") if file.is_file()}
    found |= set(families)
    pending = {file for file in found if file.endswith(".py")}
    while pending:
        named = {name for file in pending if _is_tracked(file) for name in find_imports(file, kept, root)}
        pending = {name for name in named - found - set(left_out) if (root / name).is_file()}
        found |= pending
    for folder in {file.rsplit("/", 1)[0] for file in found} - {CODE}:
        found |= {file.relative_to(root).as_posix() for file in (root / folder / TEMPLATES).glob("*") if file.is_file()}
    return {file for file in found if _is_tracked(file)}


def _is_tracked(file: str) -> bool:
    return file in TRACKED or not file.startswith(NOT_TRACKED)


def find_imports(file: str, kept: KeptDigests, root: Path = Path()) -> list[str]:
    """Return the files of stages/ that one file may import, anywhere in it; not all are there."""
    return kept.find("imports", root / file, _read_imports).split()


def _read_imports(file: Path) -> str:
    """Return the files that a module's imports may name.

    `from stages.runtime import atomic` names the module stages/runtime/atomic.py, `from stages.runtime.atomic import
    write_json` the same one.
    """
    named: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{file}:{node.lineno}: relative import; write stages.NAME")
            named += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return " ".join(sorted({f"{name.replace('.', '/')}.py" for name in named if name.split(".")[0] == CODE}))
