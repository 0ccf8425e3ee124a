"""Read the files of a target's folder by libraries that parse bytes of others: every failure is one line that names the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from stages.params import target_files
from stages.runtime.guarded_files import is_parser_error, read_json
from stages.telemetry.machine_errors import explain_machine_error

COUNTED = ("layers", "heads", "experts", "n_layer", "n_head")  # ends of keys of a config
MOST_PARTS = 100_000
REMEDY = "get the target's files again, those of a builtin target by: dvc repro -f -s prepare_target"


@contextmanager
def refuse_unreadable(file: str, expected: str) -> Iterator[None]:
    """Raise ValueError, of one line that names `file`, where the block fails: a library there parses bytes of others.

    Such libraries raise anything: errors of JSON and of types, KeyError, AssertionError, panics of Rust. An error of our own in
    the block stays, and one of the machine (memory, disk, a GPU, permission).
    """
    try:
        yield
    except BaseException as error:
        if not is_parser_error(error) or _is_ours(error) or explain_machine_error(error, ""):
            raise
        words = " ".join(str(error).split())
        found = f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__
        raise ValueError(f"{file}: expected {expected}, found none that can be read ({found}); {REMEDY}") from error


def _is_ours(error: BaseException) -> bool:
    """Return whether our own code has raised this ValueError, which then names its file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    spec = trace and trace.tb_frame.f_globals.get("__spec__")  # its name is no __main__ where a module is run
    return isinstance(error, ValueError) and str(spec and spec.name).startswith("stages.")


def read_config(folder: Path | str, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the target's config. Raises ValueError naming the file, where it is missing, cut or broken."""
    file = Path(folder) / "config.json"
    if file.is_file():
        _check_counts(file, read_json(file, REMEDY))
    with refuse_unreadable(str(file), "the config of a transformers model"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _check_counts(file: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError for more layers, heads or experts than any model has: an object for each would fill the memory."""
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_counts(file, value)
        elif key.endswith(COUNTED) and isinstance(value, int | float) and value > MOST_PARTS:
            raise ValueError(f"{file}: {key} is {str(value)[:40]}, expected at most {MOST_PARTS}; correct it")


def iterate_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, the open file of weights that has it) of each tensor of a target. Raises ValueError naming a broken file."""
    for file in target_files.list_weight_files(folder):
        with refuse_unreadable(str(file), "safetensors"), safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors) for name in tensors.keys())  # noqa: SIM118 - not a dict
