"""Write the code dependencies of every stage into dvc.yaml: `aerie deps --write`.

DVC reruns a stage when one of its `deps` changes, so the code part of `deps` must be exactly the files that the stage
imports, directly or not: its import closure (stages/runtime/import_closure.py). In dvc.yaml they stand between the comment
`# code, written by: aerie deps --write` and the bracket that ends the list; everything else in dvc.yaml stays byte for byte.

A folder of which a stage imports every module is written as the folder's name, anything less file by file.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from stages.runtime.import_closure import find_import_closure, list_modules

DVC_FILE = Path("dvc.yaml")
WIDTH = 128

_STAGE = re.compile(r"^  ([a-z_]+):\s*(?:#.*)?$", re.MULTILINE)
_CODE = re.compile(r"^(?P<indent> +)# code, written by: aerie deps --write\n(?P<deps>(?:(?! *\]).*\n)*)", re.MULTILINE)


def write_code_deps(root: Path = Path()) -> list[str]:
    """Rewrite dvc.yaml with the import closures -> the stages whose dependencies changed."""
    file = root / DVC_FILE
    before = file.read_text(encoding="utf-8")
    after = render_code_deps(before, root)
    if after != before:
        file.write_text(after, encoding="utf-8")
    old = dict(list_code_deps(before))
    return [stage for stage, deps in list_code_deps(after) if deps != old[stage]]


def render_code_deps(text: str, root: Path = Path()) -> str:
    """Return the text of dvc.yaml with each stage's code dependencies replaced by its import closure."""

    def render(found: re.Match[str]) -> str:
        indent, names = found["indent"], ", ".join(code_deps(_stage_at(text, found.start()), root)) + ","
        wrapped = textwrap.fill(
            names,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return f"{indent}# code, written by: aerie deps --write\n{wrapped}\n"

    return _CODE.sub(render, text)


def list_code_deps(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each stage and the code dependencies that a text of dvc.yaml lists for it."""
    for found in _CODE.finditer(text):
        yield _stage_at(text, found.start()), [name for name in re.split(r"[,\s]+", found["deps"]) if name]


def code_deps(stage: str, root: Path = Path()) -> list[str]:
    """Return the stage's code dependencies in dvc.yaml's order: its own files, then folders and modules by name."""
    closure = find_import_closure(stage, root)
    own = sorted(name for name in closure if name.count("/") == 1)
    shared = {name for name in closure if name.count("/") > 1}
    folders = {name.rsplit("/", 1)[0] for name in shared}
    whole = {folder for folder in folders if list_modules(folder, root) <= shared}
    outer = {folder for folder in whole if folder.rsplit("/", 1)[0] not in whole}  # DVC hashes subfolders too
    return own + sorted(outer | {name for name in shared if name.rsplit("/", 1)[0] not in whole})


def _stage_at(text: str, offset: int) -> str:
    """Return the stage whose definition holds this offset of dvc.yaml."""
    return [found[1] for found in _STAGE.finditer(text, 0, offset)][-1]


if __name__ == "__main__":
    print("\n".join(write_code_deps()) or "nothing changed")
