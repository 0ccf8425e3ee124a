"""Exchange a stage's inputs and results with another host through the DVC remote.

    python -m pipeline.remote.dvc_remote offer STAGE     # push its inputs, print the order for another host; null: cached
    python -m pipeline.remote.dvc_remote collect STAGE   # fetch what another host made of it into DVC's cache

A host that gets a StageOrder pulls its files and upstream outputs and nothing else. Results are looked up under the key of
DVC's run-cache, a hash of the command, the parameters and the bytes of all dependencies, so that nothing made from other
inputs is taken for a stage's result.

Its entries are read by private functions of DVC: the public commands (`dvc push --run-cache`) transfer every entry each time, a
file for each run of each stage. tests/pipeline/test_dvc_remote.py fails where a version of DVC has changed one of them.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from ruamel.yaml import YAML

from pipeline.dvc_graph import LOCK_FILE, STAGE_NAME, check_stage_name, open_repo, release_lock
from pipeline.processes import capture_output
from stages.params.section import RUN_PARAMS

TRANSIENT_STATE = "FailedForNow"  # of a stage on another host, if its log says that another attempt may succeed
FILES_FOLDER = "aerie"  # the remote's folder of StageOrder.files, beside DVC's own
UNSENT_FILES = {".dvc", LOCK_FILE.name}  # each host has its own .dvc: the remote's address and credentials
KEPT_FOLDER = ".scratch"  # kept when a stage's folder is used again: training resumes from it
ORDER_PREFIX = "order: "


def _check_path(path: str) -> str:
    if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"path is {path!r}, expected one below the project's folder")
    return path


StageName = Annotated[str, Field(pattern=STAGE_NAME)]
InnerPath = Annotated[str, AfterValidator(_check_path)]


class LockedOutput(BaseModel):
    """An output of a stage in dvc.lock. DVC writes to its path."""

    model_config = ConfigDict(extra="forbid")
    path: InnerPath
    hash: Literal["md5"] = "md5"
    md5: Annotated[str, Field(pattern=r"^[0-9a-f]{32}(\.dir)?$")]  # also names the file in DVC's cache
    size: int | None = None
    nfiles: int | None = None
    isexec: bool | None = None


class LockedStage(BaseModel):
    """A stage of dvc.lock."""

    model_config = ConfigDict(extra="forbid")
    cmd: str | list[str]
    deps: list[dict[str, JsonValue]] = []  # DVC writes to none of these paths; raw data may lie anywhere
    params: dict[str, dict[str, JsonValue]] = {}  # by file and key
    outs: list[LockedOutput] = []


class StageOrder(BaseModel):
    """A stage for another host to run; no path in it leads outside that host's folder for it."""

    model_config = ConfigDict(extra="forbid")
    stage: StageName
    files: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # sha256 of the archive of code, parameters and other data
    upstream: dict[StageName, LockedStage]  # of dvc.lock, the stages whose outputs it needs


def offer_stage(name: str) -> StageOrder | None:
    """Push the inputs of a stage as they are here -> the order, or None if its results are in the cache or were on the remote.

    Raises:
        ValueError: no remote is set, or a push failed.
    """
    with open_repo() as repo:
        (stage,) = repo.stage.collect(name)
        if _is_restorable(repo, stage):
            return None
        outs = list(_list_needed_outputs(repo, stage).values())
        known = YAML(typ="safe").load(LOCK_FILE)["stages"] if LOCK_FILE.exists() else {}
        archive = _pack_files(_list_tracked_files() | _list_untracked_inputs(repo, stage))
        digest = hashlib.sha256(archive).hexdigest()
        fs, root = _get_remote_root(repo)
        with release_lock(repo):
            _push_outputs(repo, outs)
            target = fs.join(root, FILES_FOLDER, f"{digest}.tar.gz")
            if not fs.exists(target):
                temporary = Path(repo.tmp_dir) / f"{digest}-{os.getpid()}.tar.gz"
                temporary.write_bytes(archive)
                fs.put_file(str(temporary), target)
                temporary.unlink()
        owners = sorted({out.stage.addressing for out in outs})
        upstream = {owner: known[owner] for owner in owners if owner in known}
        return StageOrder.model_validate({"stage": name, "files": digest, "upstream": upstream})


def collect_stage(name: str) -> None:
    """Fetch another host's results of a stage into the cache. Raises ValueError if the remote has none of the inputs here."""
    with open_repo() as repo:
        (stage,) = repo.stage.collect(name)
        if not _is_restorable(repo, stage):
            raise ValueError(
                f"what a worker made of {name} is not on the remote, or of other files than these; run again"
            )


def unpack_order(order: StageOrder) -> None:
    """Fill the current folder with the order's files and upstream outputs, after emptying it except for .dvc and .scratch.

    Raises:
        ValueError: the remote lacks them, or an output of the project would lie outside the current folder.
    """
    for old in Path().iterdir():
        if old.name not in (".dvc", KEPT_FOLDER):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    with open_repo() as repo:
        fs, root = _get_remote_root(repo)
        archive = Path(repo.tmp_dir) / "files.tar.gz"
        fs.get_file(fs.join(root, FILES_FOLDER, f"{order.files}.tar.gz"), str(archive))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != order.files:
            raise ValueError(f"{FILES_FOLDER}/{order.files}.tar.gz has the digest {found}; remove it and run again")
        _unpack_files(archive)
        archive.unlink()
    with LOCK_FILE.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump({"schema": "2.0", "stages": order.model_dump(exclude_unset=True)["upstream"]}, file)
    with open_repo() as repo:
        _check_inside(repo)
        (stage,) = repo.stage.collect(order.stage)
        needed = _list_needed_outputs(repo, stage)
        if any(out.def_path == RUN_PARAMS.parent.as_posix() for out in needed.values()):
            needed[str(RUN_PARAMS)] = None  # beside the inputs of the stage itself
        if needed:
            repo.pull(targets=sorted(needed))


def push_results(name: str) -> None:
    """Push the stage's outputs and its entry of the run-cache to the remote."""
    with open_repo() as repo:
        (stage,) = repo.stage.collect(name)
        _push_outputs(repo, stage.outs)
        local_folder, fs, remote_folder = _locate_run_cache(repo, stage)
        for entry in local_folder.iterdir():
            fs.put_file(str(entry), fs.join(remote_folder, entry.name))


def check_remote() -> str:
    """Return the default remote's address. Raises ValueError if there is none."""
    with open_repo() as repo:
        fs, root = _get_remote_root(repo)
        return str(fs.unstrip_protocol(root))


def list_remotes() -> dict[str, str]:
    """Return the address of every remote by its name."""
    with open_repo() as repo:
        return {name: remote["url"] for name, remote in repo.config["remote"].items()}


def _get_remote_root(repo: Any) -> tuple[Any, str]:
    """Return the default remote's file system and its folder."""
    odb = repo.cloud.get_remote_odb(None, "push", hash_name="md5-dos2unix")
    return odb.fs, odb.path


def _locate_run_cache(repo: Any, stage: Any) -> tuple[Path, Any, str]:
    """Return (folder here, the remote's file system, folder there) of the stage's entries in the run-cache.

    Raises ValueError where DVC keeps no run-cache of the stage.
    """
    from dvc.stage.cache import _can_hash, _get_stage_hash

    if not _can_hash(stage):
        raise ValueError(f"{stage.addressing} can't be made elsewhere, for DVC keeps no run-cache of it")
    key = str(_get_stage_hash(stage))
    fs, root = _get_remote_root(repo)
    return Path(repo.stage_cache.cache_dir, key[:2], key), fs, fs.join(root, "runs", key[:2], key)


def _is_restorable(repo: Any, stage: Any) -> bool:
    """Return whether DVC can restore the stage without running it, fetching its results from the remote if they are there."""
    stage.save_deps()
    local_folder, fs, remote_folder = _locate_run_cache(repo, stage)
    if not local_folder.exists():
        for entry in fs.find(remote_folder) if fs.exists(remote_folder) else []:
            local_folder.mkdir(parents=True, exist_ok=True)
            temporary = local_folder.with_name(f"{local_folder.name}.{os.getpid()}")
            fs.get_file(entry, str(temporary))
            os.replace(temporary, local_folder / fs.name(entry))
    entry = repo.stage_cache._load(stage)  # of the newest run with these inputs
    cached = entry and repo.stage_cache._create_stage(entry)
    if cached and not cached.outs_cached():
        with release_lock(repo):
            for wanted in cached.get_used_objs().values():
                repo.cloud.pull(wanted)
    return bool(cached and cached.outs_cached())


def _list_needed_outputs(repo: Any, stage: Any) -> dict[str, Any]:
    """Return the outputs of other stages that a stage depends on, by the path of the output or of the part it depends on."""
    outs = [out for out in repo.index.outs if out.use_cache and out.stage.addressing != stage.addressing]
    found = {}
    for dep in stage.deps:
        for out in outs:
            if Path(dep.fs_path).is_relative_to(out.fs_path):
                found[dep.fs_path] = out
            elif Path(out.fs_path).is_relative_to(dep.fs_path):
                found[out.fs_path] = out
    return found


def _check_inside(repo: Any) -> None:
    """Check every output. Raises ValueError if DVC would check one out outside the repository, as a .dvc file can demand."""
    for out in repo.index.outs:
        if out.use_cache and not Path(out.fs_path).resolve().is_relative_to(Path(repo.root_dir).resolve()):
            raise ValueError(f"{out.stage.addressing} has the output {out.def_path}, expected one below the project")


def _push_outputs(repo: Any, outs: list[Any]) -> None:
    """Push outputs, also those with `push: false` in dvc.yaml: another host cannot run a stage without its inputs."""
    for out in outs:
        for wanted in out.get_used_objs().values():
            if failed := repo.cloud.push(wanted).failed:
                raise ValueError(f"{len(failed)} files of {out} could not be pushed; see above, and run again")


def _list_tracked_files() -> set[Path]:
    """Return the files that git tracks, with their changes here; untracked ones (an .env) are never sent."""
    listed = capture_output(["git", "ls-files", "-z", "--cached", "--", "."])
    found = {Path(name) for name in listed.split("\0") if name}
    return {path for path in found if path.is_file() and path.parts[0] not in UNSENT_FILES}


def _list_untracked_inputs(repo: Any, stage: Any) -> set[Path]:
    """Return the files that the stage depends on and no stage makes, also those that git ignores."""
    outs = [out.fs_path for out in repo.index.outs if out.use_cache]
    deps = [Path(dep.fs_path) for dep in stage.deps]
    found = [file for dep in deps for file in ([dep] if dep.is_file() else dep.rglob("*")) if file.is_file()]
    # A watched folder outside the project is each host's own.
    inner = [file for file in found if file.is_relative_to(repo.root_dir)]
    return {file.relative_to(repo.root_dir) for file in inner if not any(file.is_relative_to(out) for out in outs)}


def _pack_files(files: set[Path]) -> bytes:
    """Return a .tar.gz of the files whose bytes depend on paths, contents and the executable bit alone."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for file in sorted(files):
            about = tarfile.TarInfo(file.as_posix())
            about.size, about.mode = file.stat().st_size, 0o755 if os.access(file, os.X_OK) else 0o644
            with file.open("rb") as content:
                archive.addfile(about, content)
    return gzip.compress(plain.getvalue(), mtime=0)


def _unpack_files(archive: Path) -> None:
    """Unpack plain files below the current folder, which has no links. tarfile's own filter came with Python 3.11.4.

    Raises:
        ValueError: the archive holds anything else.
    """
    with tarfile.open(archive) as files:
        for member in files:
            path, content = Path(member.name), files.extractfile(member) if member.isfile() else None
            if content is None or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"an archive holds {member.name}, which aerie never uploads; check the remote")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
            path.chmod(member.mode & 0o755)


def main(words: list[str]) -> None:
    action, name = words
    try:
        check_stage_name(name)
        if action == "offer":
            order = offer_stage(name)
            print(ORDER_PREFIX + json.dumps(order and order.model_dump(exclude_unset=True)), flush=True)
        else:
            collect_stage(name)
    except ValueError as error:
        sys.exit(f"aerie: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
