"""Digests of files: of their bytes, and of code without its remarks. Kept in `.scratch` by a file's size, time and inode."""

import hashlib
import io
import json
import tokenize
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

KEPT_DIGESTS = Path(".scratch/digests.json")
STATEMENT_STARTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)  # the token before
THREADS = 8  # of a folder's files; hashing and reading release the interpreter


@dataclass
class KeptDigests:
    """Facts on files that are kept between processes: a file of the same size, time and inode is not read again."""

    known: dict[str, list[str]] = field(default_factory=dict)  # "kind path" -> its state, what was found
    used: dict[str, list[str]] = field(default_factory=dict)
    code: dict[tuple[object, ...], dict[str, str]] = field(
        default_factory=dict
    )  # digest_stage's, of this look at the files

    @classmethod
    def read(cls) -> "KeptDigests":
        try:
            return cls(json.loads(KEPT_DIGESTS.read_bytes()))
        except (OSError, ValueError):
            return cls()

    def find(self, kind: str, file: Path, compute: Callable[[Path], str]) -> str:
        """Return what `compute` finds in a file, from memory where the file is as it was."""
        found = file.stat()
        name, state = f"{kind} {file.absolute()}", f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
        known = self.used.get(name) or self.known.get(name)
        if known is None or known[0] != state:
            known = [state, compute(file)]
        self.used[name] = known
        return known[1]

    def write(self) -> None:
        """Keep what was used, and what is known of other files; nothing where the disk is full or read-only."""
        from stages.runtime import atomic  # the rest needs no package, so that any Python can compare digests

        together = self.known | self.used
        if together != self.known:
            with suppress(OSError):
                atomic.write_json(KEPT_DIGESTS, together)


def digest_file(file: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def digest_path(path: Path, kept: KeptDigests) -> str:
    """Return a digest of a file, or of a folder's files with their names; "missing" where there is neither.

    Hidden files are left out: a download's notes and git's change without the data. The place does not count, so a clone and
    another host find the same.
    """
    if not path.is_dir():
        return kept.find("bytes", path, digest_file) if path.exists() else "missing"
    files = sorted(_list_files(path))
    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(lambda file: kept.find("bytes", file, digest_file), files)
        lines = [f"{file.relative_to(path).as_posix()} {found}\n" for file, found in zip(files, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _list_files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _list_files(entry)
        elif entry.exists():
            yield entry


def digest_code(file: Path) -> str:
    """Return the first 16 digits of the sha256 of a file; of a module without its remarks."""
    content = file.read_bytes()
    if file.suffix == ".py":
        content = cut_remarks(content.decode()).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def cut_remarks(text: str) -> str:
    """Return a module's text without comments, docstrings and blank lines, the same on every supported Python.

    They are cut by position: a dump of the syntax tree differs between versions. Lines within a string stay as they are.
    """
    lines, cut = text.split("\n"), set[int]()
    last, docstring = tokenize.NEWLINE, None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row = token.start[0] - 1
        if token.type == tokenize.COMMENT:
            lines[row] = lines[row][: token.start[1]]
        elif token.type in (tokenize.NL, tokenize.NEWLINE):
            lines[row] = lines[row].rstrip()
            if token.type == tokenize.NEWLINE and docstring is not None:
                cut |= set(range(docstring, row + 1))
            elif not lines[row]:
                cut.add(row)
        if token.type not in (tokenize.COMMENT, tokenize.NL):  # a string that is a statement of its own
            docstring = row if token.type == tokenize.STRING and last in STATEMENT_STARTS else None
            last = token.type
    return "\n".join(line for row, line in enumerate(lines) if row not in cut).rstrip("\n")
