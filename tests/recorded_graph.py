"""The real graph and the real DVC without the work: a recorder in place of the stages' commands."""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import dvc.output
from dvc.output import Output
from dvc.repo import Repo, lock_repo
from fsspec.implementations.memory import MemoryFileSystem

from stages import inputs

# Outputs that say less than all that their stage reads, and what they do depend on; tests/test_pictured_stages.py compares.
TELLS_OF = {"results/overfit_pass.json": {"data/hiddens/train", "drafts/e000/draft"}}


class Recorder:
    """Stands in for the commands of all stages but `inputs`: notes who runs, writes what depends on all it was given."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.names: set[str] = set()  # of all stages
        self.meanwhile: dict[str, Callable[[], None]] = {}  # what happens while a stage is at work

    def __call__(self, stage: Any, dry: bool = False, run_env: Any = None) -> None:
        if stage.addressing == "inputs":
            inputs.main()
            return
        self.ran.append(stage.addressing)
        self.meanwhile.pop(stage.addressing, lambda: None)()
        for out in map(str, stage.outs):
            deps = [dep for dep in stage.deps if out not in TELLS_OF or str(dep) in TELLS_OF[out]]
            path = Path(stage.wdir) / out
            file = path if path.suffix else path / "part"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._digest(stage.cmd, deps) + out)

    @staticmethod
    def _digest(command: str, deps: list[Any]) -> str:
        digest = hashlib.sha256(command.encode())
        for dep in sorted(deps, key=str):
            path = Path(dep.fs_path)
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                digest.update(b"" if file.is_dir() else file.name.encode() + file.read_bytes())
        return digest.hexdigest()

    def repro(self, root: Path, **how: bool) -> set[str]:
        self.ran.clear()
        with opened(root) as repo, lock_repo(repo):  # one index for both
            self.names = {stage.addressing for stage in repo.index.stages} - {
                "inputs"
            }  # DVC drops its index when a stage runs
            repo.reproduce(**how)
        MemoryFileSystem.store.clear()  # where DVC stages folders: it would look through those of all tests before
        MemoryFileSystem.pseudo_dirs[:] = [""]
        assert len(self.ran) == len(set(self.ran))
        return set(self.ran)


@contextmanager
def opened(root: Path) -> Iterator[Repo]:
    """DVC, standing in `root`: it reads the dvc.yaml, and names the stages, of where it stands."""
    with chdir(root), Repo() as repo:
        yield repo


def names(root: Path) -> set[str]:
    with opened(root) as repo:
        return {stage.addressing for stage in repo.index.stages}


def parse_json_or_yaml(parse: Callable[..., Any], text: str, path: str) -> Any:
    return json.loads(text) if text.startswith("{") else parse(text, path)


def parsed_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Parse each text once, whichever copy of the project it is read in; `path` is only for errors."""

    @lru_cache(maxsize=16)
    def pickled(text: str) -> bytes:
        return pickle.dumps(parse_json_or_yaml(parse, text, "a copy of the project"))

    return lambda text, path, typ="safe": pickle.loads(pickled(text))


def validated_once(validate: Callable[..., Any]) -> Callable[..., None]:
    """Validate each text of dvc.yaml and dvc.lock once, likewise."""
    seen: set[tuple[int, str]] = set()

    def once(data: Any, schema: Any, text: str, **more: Any) -> None:
        if (id(schema), text) not in seen:
            validate(data, schema, text=text, **more)
            seen.add((id(schema), text))

    return once


def digested_once(compute: Callable[[Path], str]) -> Callable[[Path], str]:
    """Compute what depends on a file's bytes alone once for the same bytes."""
    seen: dict[bytes, str] = {}

    def once(file: Path) -> str:
        content = file.read_bytes()
        if content not in seen:
            seen[content] = compute(file)
        return seen[content]

    return once


def build_quietly(output: Output, *given: Any, no_progress_bar: bool = False, **how: Any) -> tuple[Any, Any, Any]:
    """Hash a dependency or an output as DVC does, without its bar, which names the file: longer than to hash it once."""
    how.setdefault("checksum_jobs", output.fs.hash_jobs)
    return dvc.output.build(*given, **how)


def located_once(locate: Callable[..., Any]) -> Callable[..., Any]:
    """Look a path's file system up once: it is as it stands in dvc.yaml, in every copy. Paths of other schemes each time."""
    seen: dict[str, tuple[Any, dict[str, Any], str]] = {}

    def once(config: Any, **given: Any) -> tuple[Any, dict[str, Any], str]:
        if given.keys() != {"url"} or "://" in given["url"] or "checksum_jobs" in config.get("core", {}):
            return locate(config, **given)
        if given["url"] not in seen:
            seen[given["url"]] = locate(config, **given)
        kind, options, path = seen[given["url"]]
        return kind, dict(options), path

    return once
