"""Check what a run needs: files, datasets, engines, GPUs, disk, and a target that can be used. Each finding says what to do."""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pipeline import freshness, processes, resources
from stages.params.data_sections import PromptSet
from stages.params.engines import ENGINES, find_program
from stages.params.recipe import Recipe
from stages.params.schema import Params
from stages.params.section import PARAMS_FILE
from stages.params.units import GIB, format_bytes

MIN_FREE_BYTES = 2 * GIB  # a run of the embedded target with its cache takes under 1 GiB
VALID_TARGET_FILE = Path(".scratch/valid_target.json")
MARKS = {True: "ok     ", False: "PROBLEM", None: "       "}
WRITTEN_FOLDERS = (".", ".dvc", ".dvc/cache", ".dvc/tmp", ".scratch", "artifacts", "data", "drafts", "logs", "results")
# Weights are not all that a GPU holds: KV cache, activations, a draft.
WEIGHTS_SHARE = 0.9


@dataclass(frozen=True)
class Finding:
    """One line of a report. `ok` is None where the line only informs; `advice` is for a problem."""

    subject: str
    found: str
    ok: bool | None = None
    advice: str = ""

    def __str__(self) -> str:
        advice = f"; {self.advice}" if self.advice and self.ok is False else ""
        return f"{MARKS[self.ok]}  {self.subject}: {self.found}{advice}"


def check_recipe(
    name: str, recipe: Recipe, params: Params, disk_bytes: float, weight_bytes: float
) -> Iterator[Finding]:
    """Yield what a recipe needs, and whether it is here. `weight_bytes` are the target's."""
    yield from check_files(params, recipe.files, f"run: aerie fetch {name}")
    yield from check_datasets(params, f"run: aerie fetch {name}")
    yield from check_engines(params)
    yield from check_gpus(params, weight_bytes)
    yield check_disk(disk_bytes)


def refuse_unmet(name: str, findings: Iterable[Finding]) -> None:
    """Raise ValueError with each need that is not met."""
    unmet = [f"  {finding.subject}: {finding.found}; {finding.advice}" for finding in findings if finding.ok is False]
    if unmet:
        things = "1 thing that is" if len(unmet) == 1 else f"{len(unmet)} things that are"
        raise ValueError("\n".join([f"recipe {name} needs {things} not here, and nothing was changed:", *unmet]))


# Files and datasets


def list_files(params: Params) -> dict[str, str]:
    """Return the files that a run reads and the user brings, by their key in params.yaml."""
    files = {"fix_data.raw": params.fix_data.raw}
    if params.fix_data.tables:
        files["fix_data.tables"] = params.fix_data.tables
    return files | {key: source.from_ for key, source in _list_sets(params).items() if source.is_local}


def check_files(params: Params, known: Collection[str] = (), fetch: str = "") -> Iterator[Finding]:
    """Yield a finding for each file. `known` are those that the command `fetch` gets."""
    for key, path in list_files(params).items():
        found = path if (is_here := Path(path).exists()) else f"{path} not found"
        yield Finding(key, found, is_here, fetch if path in known else "put it there, or correct the key")


def check_datasets(params: Params, fetch: str) -> Iterator[Finding]:
    """Yield a finding for each prompt set of the Hub: read late in a run, they must be in the cache before it."""
    for key, source in _list_sets(params).items():
        if not source.is_local:
            is_here = is_cached(source.from_)
            found = f"dataset {source.from_}{'' if is_here else ' is not in the cache of the Hub'}"
            yield Finding(key, found, is_here, fetch)


def is_cached(dataset: str) -> bool:
    """Return whether some revision of a dataset lies in the Hub's cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{dataset.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.iterdir())


def _list_sets(params: Params) -> dict[str, PromptSet]:
    sets = params.prepare_prompts.sets
    used_sets = {workload.prompts for workload in params.benchmark.workloads.values()} & set(sets)
    return {f"prepare_prompts.sets.{name}.from": sets[name] for name in sorted(used_sets)}


# The machine


def check_engines(params: Params) -> Iterator[Finding]:
    """Yield a finding for each engine that a stage starts: in serving-env or on the PATH."""
    served, sampling = params.benchmark_served, params.sample_target
    wanted: dict[str, str] = {}
    launch = sampling.server.launch if sampling.backend == "server" else None
    if launch and ENGINES[launch].program:
        wanted["sample_target.server.launch"] = launch
    for engine in params.list_served_engines():
        server = served.get_server(engine)
        if not server.command and not server.base_urls:
            wanted[f"benchmark_served or time_cycles, {engine}"] = engine
    for key, name in wanted.items():
        location = find_program(name)
        found = f"{name} in {location}" if location else f"{name} is neither in serving-env/ nor on the PATH"
        yield Finding(key, found, location is not None, f"run: make serving-env ENGINE={name}")


def check_gpus(params: Params, weight_bytes: float) -> Iterator[Finding]:
    """Yield whether the GPUs are here that target.device asks for, and hold a copy of the target."""
    if params.target.device == "cpu":
        return
    served = params.benchmark_served
    tps = [served.get_server(engine).tp for engine in params.list_served_engines()]
    needed = max(params.benchmark.num_gpus_per_model, *tps)
    gpus = resources.list_gpu_memory()
    enough = len(gpus) >= needed
    names = ", ".join(f"{gpu.name} ({format_bytes(gpu.total_bytes)})" for gpu in gpus) or "none"
    advice = f"run on a machine with {needed} or more, or set target.device: cpu for a target that is small enough"
    yield Finding("GPUs", f"{names}, expected {needed} for target.device {params.target.device}", enough, advice)
    if enough:
        room = sum(gpu.total_bytes for gpu in gpus[:needed]) * WEIGHTS_SHARE
        found = f"{format_bytes(weight_bytes)} of weights on {needed} GPU{'s' if needed > 1 else ''}"
        advice = "spread a copy over more GPUs: benchmark.num_gpus_per_model, benchmark_served.servers.*.tp"
        yield Finding("GPU memory", found, weight_bytes <= room, advice)


def check_writable() -> Iterator[Finding]:
    """Yield a problem where a run can't write here: a read-only file system, or folders of another user."""
    refused = [
        folder for folder in WRITTEN_FOLDERS if Path(folder).is_dir() and not os.access(folder, os.W_OK | os.X_OK)
    ]
    if not refused:
        return
    if any(os.statvfs(folder).f_flag & os.ST_RDONLY for folder in refused):
        advice = "mount it for writing, or work in a copy on another disk"
        yield Finding("writing", f"{Path.cwd()} is on a read-only file system", False, advice)
    else:
        advice = "make them this user's: sudo chown -R $USER ."
        yield Finding("writing", f"no permission to write in {', '.join(refused)}", False, advice)


def check_disk(needed_bytes: float | None) -> Finding:
    """Return whether what a run writes here fits; for a run whose size is not known (None), whether MIN_FREE_BYTES are free."""
    free = shutil.disk_usage(".").free
    needed = MIN_FREE_BYTES if needed_bytes is None else needed_bytes
    about = "" if needed_bytes is None else f", a run writes about {format_bytes(needed)}"
    advice = "make room, or lower sample_target.train_rows, or set extract_hiddens.online"
    return Finding("disk", f"{format_bytes(free)} free here{about}", free >= needed, advice)


# The target


def check_target_config(params: Params, file: Path = PARAMS_FILE) -> None:
    """Raise ValueError for a target that prepare_target refuses by its config or GGUF file; `file` holds the parameters.

    A process that imports transformers checks it, 4 s and more, and nothing is downloaded: once for the same parameters, code
    and file. Nothing is started for embedded targets, or where neither is on this machine: prepare_target then checks.
    """
    target, path = params.target, Path(params.target.model)
    read = path if target.is_gguf and path.is_file() else target.find_file("config.json")
    if target.is_embedded or read is None:
        return
    look = freshness.digest_paths(["stages", str(file), str(read)]) + version("transformers")
    if (known := freshness.read_known(VALID_TARGET_FILE)) is None or known["look"] != look:
        processes.run_silent("stages.draft.supported_targets", file, read if target.is_gguf else read.parent)
        freshness.write_known(VALID_TARGET_FILE, {"look": look})
