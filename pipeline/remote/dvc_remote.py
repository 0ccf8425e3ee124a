"""A DVC remote as the place where hosts meet: what a stage needs goes there, what it made comes back from there.

python -m pipeline.remote.dvc_remote offer STAGE     # push what it needs, and say what another host must be told; or: made already
python -m pipeline.remote.dvc_remote collect STAGE   # fetch what another host made of it, for DVC to find in its cache

A host that is told an Order pulls these files and those outputs, and nothing else. What it made is known by DVC's own
name for it, the run-cache's, which names the command, the parameters and the bytes of all dependencies: so nothing is
taken for a stage's result that was made of anything else.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from ruamel.yaml import YAML

from pipeline.dvc_graph import LOCK_FILE, STAGE_NAME, check_stage_name, open_repo

FILES_FOLDER = "aerie"  # the remote's folder of Order.files, beside DVC's own
UNSENT_FILES = {".dvc", LOCK_FILE.name}  # each host has a .dvc of its own: where the remote is, and who it is there
KEPT_FOLDER = ".scratch"  # of a stage's folder that is used again: training goes on where it was ended
ORDER_PREFIX = "order: "


def _check_path(path: str) -> str:
    if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"path is {path!r}, expected one below the project's folder")
    return path


StageName = Annotated[str, Field(pattern=STAGE_NAME)]
InnerPath = Annotated[str, AfterValidator(_check_path)]


class LockedOutput(BaseModel):
    """What a stage made, as dvc.lock has it: DVC writes there."""

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
    deps: list[dict[str, JsonValue]] = []  # DVC writes none of these; raw data may lie anywhere
    params: dict[str, dict[str, JsonValue]] = {}  # by file and key
    outs: list[LockedOutput] = []


class StageOrder(BaseModel):
    """A stage for another host to make; nothing in it names a place outside that host's folder for it."""

    model_config = ConfigDict(extra="forbid")
    stage: StageName
    files: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # sha256 of the archive of code, parameters and other data
    upstream: dict[StageName, LockedStage]  # of dvc.lock, the stages whose outputs it needs


def checked(order: StageOrder) -> StageOrder:
    """Return the order as this host understands it: Ray hands it over without a check.

    Raises:
        ValueError: where it names something that is no stage, no digest, or a place outside its folder.
    """
    return StageOrder.model_validate(order.model_dump(exclude_unset=True, warnings=False))


def offer_stage(name: str) -> StageOrder | None:
    """Push what the stage needs, as it lies here -> the order; None where it has been made before, and is in the cache now.

    Raises:
        ValueError: where no remote is set, or it can't keep what is needed.
    """
    with open_repo() as repo:
        stage = _collect_stage(repo, name)
        if _is_restorable(repo, stage):
            return None
        outs = list(_list_needed_outputs(repo, stage).values())
        _push_outputs(repo, outs)
        archive = _pack_files(_list_tracked_files() | _list_untracked_inputs(repo, stage))
        digest = hashlib.sha256(archive).hexdigest()
        fs, root = _get_remote_root(repo)
        to = fs.join(root, FILES_FOLDER, f"{digest}.tar.gz")
        if not fs.exists(to):
            beside = Path(repo.tmp_dir) / f"{digest}-{os.getpid()}.tar.gz"
            beside.write_bytes(archive)
            fs.put_file(str(beside), to)
            beside.unlink()
        known = YAML(typ="safe").load(LOCK_FILE)["stages"] if LOCK_FILE.exists() else {}
        owners = sorted({out.stage.addressing for out in outs})
        upstream = {owner: known[owner] for owner in owners if owner in known}
        return StageOrder.model_validate({"stage": name, "files": digest, "upstream": upstream})


def collect_stage(name: str) -> None:
    """What another host made of the stage, into our cache.

    Raises:
        ValueError: where the remote has none made of what lies here.
    """
    with open_repo() as repo:
        if not _is_restorable(repo, _collect_stage(repo, name)):
            raise ValueError(
                f"what a worker made of {name} is not on the remote, or not of what lies here; "
                "files that changed while it was at work make it so: run again"
            )


def unpack_order(order: StageOrder) -> None:
    """The order's files and the outputs its stage needs, in the current folder, which has a .dvc and is otherwise emptied.

    Raises:
        ValueError: where the remote hasn't got them, or an output of the project would lie outside the current folder.
    """
    order = checked(order)
    for old in Path().iterdir():
        if old.name not in (".dvc", KEPT_FOLDER):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    with open_repo() as repo:
        fs, root = _get_remote_root(repo)
        archive = Path(repo.tmp_dir) / "files.tar.gz"
        fs.get_file(fs.join(root, FILES_FOLDER, f"{order.files}.tar.gz"), str(archive))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != order.files:
            raise ValueError(
                f"{FILES_FOLDER}/{order.files}.tar.gz on the remote is of digest {found}; remove it and run again"
            )
        _unpack_files(archive)
        archive.unlink()
    with LOCK_FILE.open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump({"schema": "2.0", "stages": order.model_dump(exclude_unset=True)["upstream"]}, file)
    with open_repo() as repo:
        _check_inside(repo)
        if paths := sorted(_list_needed_outputs(repo, _collect_stage(repo, order.stage))):
            repo.pull(targets=paths)


def push_results(name: str) -> None:
    """What the stage has made here, and DVC's word of what it was made of, to the remote."""
    with open_repo() as repo:
        stage = _collect_stage(repo, name)
        _push_outputs(repo, stage.outs)
        here, fs, there = _locate_run_cache(repo, stage)
        for entry in here.iterdir():
            fs.put_file(str(entry), fs.join(there, entry.name))


def check_remote() -> str:
    """The default remote's address. Raises ValueError where there is none."""
    with open_repo() as repo:
        fs, root = _get_remote_root(repo)
        return str(fs.unstrip_protocol(root))


def list_remote_folders() -> dict[str, str]:
    """The remotes that are folders of this machine, or mounted here."""
    with open_repo() as repo:
        return {name: about["url"] for name, about in repo.config["remote"].items() if Path(about["url"]).is_absolute()}


def _collect_stage(repo: Any, name: str) -> Any:
    """With the hashes of its dependencies, which its name in the run-cache is made of."""
    (stage,) = repo.stage.collect(name)
    return stage


def _get_remote_root(repo: Any) -> tuple[Any, str]:
    """The remote's file system, and its folder."""
    odb = repo.cloud.get_remote_odb(None, "push", hash_name="md5-dos2unix")
    return odb.fs, odb.path


def _locate_run_cache(repo: Any, stage: Any) -> tuple[Path, Any, str]:
    """Where its entries in the run-cache are: here, the remote's file system, and there."""
    from dvc.stage.cache import _get_stage_hash

    key = _get_stage_hash(stage)
    fs, root = _get_remote_root(repo)
    return Path(repo.stage_cache.cache_dir, key[:2], key), fs, fs.join(root, "runs", key[:2], key)


def _is_restorable(repo: Any, stage: Any) -> bool:
    """Whether DVC can bring the stage back without running it, after a look at the remote."""
    from dvc.stage.cache import _can_hash

    stage.save_deps()
    if not _can_hash(stage):
        raise ValueError(f"{stage.addressing} can't be made elsewhere, for DVC keeps no run-cache of it")
    here, fs, there = _locate_run_cache(repo, stage)
    if not here.exists():
        for entry in fs.find(there) if fs.exists(there) else []:
            here.mkdir(parents=True, exist_ok=True)
            beside = here.with_name(f"{here.name}.{os.getpid()}")
            fs.get_file(entry, str(beside))
            os.replace(beside, here / fs.name(entry))
    entry = repo.stage_cache._load(stage)
    if not entry:
        return False
    made = repo.stage_cache._create_stage(entry)
    if not made.outs_cached():
        for wanted in made.get_used_objs().values():
            repo.cloud.pull(wanted)
    return bool(made.outs_cached())


def _list_needed_outputs(repo: Any, stage: Any) -> dict[str, Any]:
    """What a stage depends on: paths of outputs, or of parts of them, and the output that each is of."""
    outs = [out for out in repo.index.outs if out.use_cache and out.stage.addressing != stage.addressing]
    found = {}
    for dep in stage.deps:
        for out in outs:
            if _is_within(dep.fs_path, out.fs_path):
                found[dep.fs_path] = out
            elif _is_within(out.fs_path, dep.fs_path):
                found[out.fs_path] = out
    return found


def _check_inside(repo: Any) -> None:
    """Raises ValueError where DVC would check out an output outside the repository, as a .dvc file can name one."""
    for out in repo.index.outs:
        if out.use_cache and not _is_within(os.path.realpath(out.fs_path), os.path.realpath(repo.root_dir)):
            raise ValueError(
                f"{out.stage.addressing} has the output {out.def_path}, expected one below the project's folder; correct it "
                "on the host that sent it"
            )


def _push_outputs(repo: Any, outs: list[Any]) -> None:
    """Also those that dvc.yaml keeps from `dvc push`: who lets another host make a stage lets it have what that needs."""
    for out in outs:
        for wanted in out.get_used_objs().values():
            if failed := repo.cloud.push(wanted).failed:
                raise ValueError(f"{len(failed)} files of {out} could not be pushed; see above, and run again")


def _is_within(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _list_tracked_files() -> set[Path]:
    """The files that git keeps, as they lie here; what it was never told of (an .env) goes nowhere."""
    asked = ["git", "ls-files", "-z", "--cached", "--", "."]
    said = subprocess.run(asked, capture_output=True, text=True)
    if said.returncode:
        raise ValueError(f"{' '.join(asked)}: {said.stderr.strip()}")
    found = {Path(name) for name in said.stdout.split("\0") if name}
    return {path for path in found if path.is_file() and path.parts[0] not in UNSENT_FILES}


def _list_untracked_inputs(repo: Any, stage: Any) -> set[Path]:
    """The files that the stage depends on and no stage makes, also those that git ignores."""
    outs = [out.fs_path for out in repo.index.outs if out.use_cache]
    deps = [Path(dep.fs_path) for dep in stage.deps]
    found = [file for dep in deps for file in ([dep] if dep.is_file() else dep.rglob("*")) if file.is_file()]
    mine = [
        file for file in found if _is_within(str(file), repo.root_dir)
    ]  # a watched folder elsewhere is the host's own
    return {file.relative_to(repo.root_dir) for file in mine if not any(_is_within(str(file), out) for out in outs)}


def _pack_files(files: set[Path]) -> bytes:
    """The same bytes for the same files, whenever and wherever they were written."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for file in sorted(files):
            about = tarfile.TarInfo(file.as_posix())
            about.size, about.mode = file.stat().st_size, 0o755 if os.access(file, os.X_OK) else 0o644
            with file.open("rb") as content:
                archive.addfile(about, content)
    return gzip.compress(plain.getvalue(), mtime=0)


def _unpack_files(archive: Path) -> None:
    """Plain files below the current folder, where no link leads out of it. tarfile's own filter came with Python 3.11.4.

    Raises ValueError for anything else.
    """
    with tarfile.open(archive) as files:
        for member in files:
            place, content = Path(member.name), files.extractfile(member) if member.isfile() else None
            if content is None or place.is_absolute() or ".." in place.parts:
                raise ValueError(
                    f"an archive on the remote holds {member.name}, which no run packs; whose remote is it?"
                )
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                shutil.copyfileobj(content, file)
            place.chmod(member.mode & 0o755)


def main(words: list[str]) -> None:
    what, name = words
    try:
        check_stage_name(name)
        if what == "offer":
            order = offer_stage(name)
            print(ORDER_PREFIX + json.dumps(order and order.model_dump(exclude_unset=True)), flush=True)
        else:
            collect_stage(name)
    except ValueError as error:
        sys.exit(f"aerie: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
