"""Check what a run needs of this machine and checkout: `aerie doctor`. Changes nothing, downloads nothing."""

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipeline import dvc_graph, preflight, recipes, reproduce, resources
from pipeline.preflight import Finding, check_files
from pipeline.remote import dvc_remote
from stages.params import checks
from stages.params.engines import SERVED, find_program
from stages.params.schema import Params, load_params, read_recipe
from stages.params.section import PARAMS_FILE
from stages.params.units import format_bytes
from stages.telemetry.machine_errors import explain_file_error

PACKAGES = ("torch", "transformers", "datasets", "polars", "safetensors", "dvc", "prefect", "typer")


def report_findings(recipe: str | None = None) -> Iterator[str]:
    """Yield a line for each finding and a summary. Raises SystemExit(1) after the last if any is a problem."""
    problems = 0
    for finding in check_all(recipe):
        problems += finding.ok is False
        yield str(finding)
    yield "nothing is in the way of a run" if not problems else f"{problems} problem(s), see above"
    if problems:
        sys.exit(1)


def check_all(recipe: str | None = None) -> Iterator[Finding]:
    """Yield what is found here for params.yaml, or for it with the recipe's keys."""
    yield from _check_packages()
    yield from _check_hardware()
    yield from _check_engines()
    with contextlib.ExitStack() as stack:
        name, file = str(PARAMS_FILE), PARAMS_FILE
        path: Path | None = None
        fetched: tuple[Collection[str], str] = ((), "")
        try:
            if recipe:
                name = f"{PARAMS_FILE} with {recipe}"
                path = recipes.locate_recipe(recipe)
                block, _ = read_recipe(path)
                fetched = (block.files if block else (), f"run: aerie fetch {recipe}")
                file, _ = stack.enter_context(recipes.merge_recipe(recipe))
            params = load_params(file)
            # Beside the other checks: it imports torch and transformers. A run of an embedded target is known to be small.
            is_small = params.target.is_embedded
            threads = stack.enter_context(ThreadPoolExecutor(1))
            estimate = None if is_small else threads.submit(reproduce.estimate_params, path, file)
        except ValueError as error:
            yield Finding(name, str(error), False)
            yield preflight.check_disk(None)
        else:
            problems = list(_list_problems(params, file))
            yield from (Finding(name, problem.removeprefix(f"{PARAMS_FILE}: "), False) for problem in problems)
            if not problems:
                yield Finding(name, f"valid, target {params.target.model}", True)
            yield from (Finding("trees", line) for line in params.describe_left_out_trees())
            yield from check_files(params, *fetched)
            yield from (Finding("note", line) for line in checks.list_remarks(params))
            yield from _check_estimate(estimate)
    yield from preflight.check_writable()
    yield from _check_dvc()


def _list_problems(params: Params, file: Path) -> Iterator[str]:
    """Yield what `aerie run` refuses of valid parameters, but a missing file that `check_files` names."""
    yield from checks.list_problems(params)
    # A GGUF file is checked with the size of a run, by one process that reads it.
    if not params.target.is_gguf:
        try:
            preflight.check_target_config(params, file)
        except ValueError as error:
            yield str(error)


def _check_packages() -> Iterator[Finding]:
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("Python", platform.python_version(), supported, "aerie needs 3.11, 3.12 or 3.13")
    for name in PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name), True)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed", False, "run: make run")


def _check_hardware() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("CPU", f"{os.cpu_count()} cores, {format_bytes(memory)} of memory")
    gpus = resources.list_gpus()
    yield Finding("GPUs", ", ".join(gpus) if gpus else "none; the torch stages run on the CPU")


def _check_engines() -> Iterator[Finding]:
    for name in SERVED:
        if location := find_program(name):
            yield Finding(name, location)
        else:
            stages = "benchmark_served, time_cycles and sample_target.server.launch"
            yield Finding(name, f"not found; needed by {stages}: make serving-env ENGINE={name}")


def _check_estimate(sized: Future[reproduce.RunEstimate] | None) -> Iterator[Finding]:
    """Check the free disk against the bytes that a run writes, by reproduce's estimate; None: of an embedded target."""
    if sized is None:
        yield preflight.check_disk(None)
        return
    try:
        estimate = sized.result()
    except ValueError as error:
        yield preflight.check_disk(None)
        problem = str(error).splitlines()[-1]
        # A wrong parameter is the user's to correct; a target that is not recorded has no size before it is fetched.
        is_wrong = problem.startswith("params.yaml: ")
        yield Finding("size of a run", problem if is_wrong else f"not known: {problem}", False if is_wrong else None)
        return
    yield preflight.check_disk(estimate.disk_bytes)
    for line in estimate.lines:
        subject, _, found = line.partition(": ")
        yield Finding(subject, found)


def _check_dvc() -> Iterator[Finding]:
    """Check dvc.yaml, and name the remotes. DVC reads both in this process."""
    try:
        yield Finding("dvc.yaml", f"{len(dvc_graph.list_stages())} stages", True)
        listed = dvc_remote.list_remotes()
    except (ValueError, OSError) as error:
        yield Finding("dvc.yaml", explain_file_error(error) or str(error), False)
        return
    found = ", ".join(f"{name} ({url})" for name, url in listed.items())
    yield Finding("DVC remote", found or "none; results stay on this machine (docs/sharing.md)")
