"""A checkpoint on disk: `draft/` is loaded by engines, `state/` by the next training segment.

What drafts of all kinds share; `draft/` is written and read by `files` of a family (families/draft_files.py). `state/` holds
optimizer moments as safetensors, in shards where they are large, and the training progress as JSON.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.draft.config_types import check_types
from stages.runtime import atomic, guarded_files

DRAFTS_FOLDER = Path("drafts")
MAX_SHARD_BYTES = 2**29  # DVC hashes a file in one thread, and as many files at once as it has threads
STATE_FILES, STATE_INDEX = "optimizer{suffix}.safetensors", "optimizer.safetensors.index.json"


def locate_checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint, which holds `draft/` and `state/`."""
    return DRAFTS_FOLDER / name


FindProblem = Callable[[dict[str, Any], dict[str, Tensor]], str]  # of config.json and tensors; "" for none


def write_draft(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    find_problem: FindProblem,
    left_out: Collection[str] = (),
) -> None:
    """Write `folder`/draft atomically, without the tensors `left_out`. Raises AssertionError for what an engine would misread."""
    assert not (problem := find_problem(config, tensors) or find_nonfinite_values(tensors)), problem
    with atomic.write_folder(folder / "draft") as temporary:
        atomic.write_json(temporary / "config.json", config)
        written = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in left_out}
        save_file(written, temporary / "model.safetensors", {"format": "pt"})


def read_draft(
    folder: Path,
    made_by: str,
    kind: str,
    find_problem: FindProblem,
    complete: Callable[[dict[str, Any], dict[str, Tensor]], None] = lambda config, tensors: None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors of `folder`/draft, to which `complete` adds what is left out of files.

    Raises BrokenArtifactError, a ValueError that names what is missing, unknown or misshapen.
    """
    config, tensors = read_config(folder, made_by), read_tensors(folder / "draft" / "model.safetensors", made_by)
    complete(config, tensors)
    if problem := find_problem(config, tensors):
        raise atomic.BrokenArtifactError(
            f"{folder}/draft is no {kind}: {problem}, by config.json and model.safetensors",
            atomic.format_rerun_hint(made_by),
        )
    return config, tensors


def write_state(folder: Path, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
    """Write `folder`/state atomically: the optimizer's tensors, with an index if there are several shards, and the progress."""
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=STATE_FILES, max_shard_size=MAX_SHARD_BYTES)
    shards = split.filename_to_tensors or {STATE_FILES.format(suffix=""): []}
    with atomic.write_folder(folder / "state") as temporary:
        for file, names in shards.items():
            save_file({name: tensors[name].contiguous() for name in names}, temporary / file)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            atomic.write_json(temporary / STATE_INDEX, index)
        atomic.write_json(temporary / "progress.json", progress)


def read_state(folder: Path, made_by: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors and the training progress.

    Raises BrokenArtifactError as `read_tensors` and `read_progress`.
    """
    index, files = folder / "state" / STATE_INDEX, [folder / "state" / STATE_FILES.format(suffix="")]
    if index.exists():
        files = guarded_files.list_indexed_files(index, atomic.format_rerun_hint(made_by))
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read_tensors(file, made_by)
    return tensors, read_progress(folder, made_by)


def read_progress(folder: Path, made_by: str) -> dict[str, Any]:
    """Return the training progress: the numbers `epoch` and `step`. Raises BrokenArtifactError where one is missing."""
    path = folder / "state" / "progress.json"
    found = atomic.read_json(path, made_by)
    if not all(type(found.get(key)) is int and found[key] >= 0 for key in ("epoch", "step")):
        raise atomic.BrokenArtifactError(
            f"{path}: expected the numbers epoch and step, found {found!r:.60}", atomic.format_rerun_hint(made_by)
        )
    return found


def read_config(folder: Path, made_by: str) -> dict[str, Any]:
    """Return config.json of `folder`/draft. Raises BrokenArtifactError, also for a value of another type."""
    path = folder / "draft" / "config.json"
    config: dict[str, Any] = atomic.read_json(path, made_by)
    with atomic.guard_artifact(path, "config of a draft", made_by):
        check_types(config)
    return config


def read_tensors(path: Path, made_by: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises BrokenArtifactError, a ValueError that names the file and the command to run, where it is missing, broken or holds
    NaN or infinity.
    """
    with atomic.guard_artifact(path, "safetensors", made_by), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        problem = find_nonfinite_values(tensors)
    if problem:
        raise atomic.BrokenArtifactError(
            f"{path}: {problem}", f"{atomic.format_rerun_hint(made_by)}, which names the cause if it happens again"
        )
    return tensors


def find_nonfinite_values(tensors: Mapping[str, Tensor]) -> str:
    """Describe the tensors that hold NaN or infinity, or return an empty string.

    A draft with such weights would decode, accept no draft token, and be reported with tau 1.
    """
    bad = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if not bad:
        return ""
    first, more = tensors[bad[0]], f" (and {len(bad) - 1} more tensors hold some)" if len(bad) > 1 else ""
    count = first.numel() - int(torch.isfinite(first).sum())
    return f"{bad[0]} holds {count} NaN or infinite values of {first.numel()}{more}, expected finite weights"


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, by minimum and maximum: NaN propagates to them, at 1/40 of the cost of isfinite.

    One-byte floats have no aminmax; they are refused elsewhere.
    """
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())


def list_shapes(build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a module by its name, without memory for them."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}


def find_shape_problem(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]]) -> str:
    """Describe wrong names and shapes of tensors, or return an empty string."""
    if set(expected) != set(tensors):
        return f"missing tensors {sorted(set(expected) - set(tensors))}, unknown {sorted(set(tensors) - set(expected))}"
    mismatched = [n for n, s in expected.items() if tuple(tensors[n].shape) != s]
    return "; ".join(f"{n} is {tuple(tensors[n].shape)}, expected {expected[n]}" for n in mismatched)
