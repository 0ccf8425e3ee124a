"""Explain in one line what the machine lacks: disk, memory, a GPU, or permission. No torch: errors are known by name and text."""

import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from stages.params.units import format_bytes

ERRORS = (errno.ENOSPC, errno.EDQUOT)
# safetensors, polars and the Hub's client raise their own errors, with Rust's messages for these error numbers.
WORDS = re.compile(r"No space left on device|Disk quota exceeded|\(os error (?:28|122)\)")
# The note that stages/runtime/atomic.py adds.
WRITING = re.compile(r"writing (?P<path>.+), which needs more than (?P<needed>\d+) bytes")


KEPT = "What earlier stages made is kept, and what this one had finished; its partial file is removed. "


def explain_full_disk(error: BaseException, kept: str = KEPT) -> str | None:
    """Return one line about the full disk or used quota that caused `error`; None for other errors. `kept` is a part of it."""
    causes = list(_list_causes(error))
    full = next(
        (cause for cause in causes if getattr(cause, "errno", None) in ERRORS or WORDS.search(str(cause))), None
    )
    if full is None:
        return None
    notes = [note for cause in causes for note in getattr(cause, "__notes__", ())]
    noted = next(filter(None, map(WRITING.fullmatch, notes)), None)
    path = Path(noted["path"] if noted else getattr(full, "filename", None) or ".")
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    what = f"{path} could not be written" if path != Path() else "a file could not be written"
    needed = f"; it needs more than {format_bytes(int(noted['needed']))}" if noted else ""
    free = format_bytes(shutil.disk_usage(folder).free)
    return (
        f"the disk is full, or its quota used: {what}{needed}, and {free} are free in {folder} "
        f"({full}). {kept}Free space there and run the same command again"
    )


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors it was raised from or during, even if `from None` hides them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# What takes less memory in each stage; with the first word of a stage's name in dvc.yaml.
LESS_MEMORY = {
    "prepare_target": "target.dtype: bfloat16, or target.device: cpu",
    "sample_target": "a smaller sample_target.batch_size or max_new_tokens",
    "extract_hiddens": "a smaller extract_hiddens.batch_tokens",
    "init_draft": "a smaller init_draft.draft_vocab_size",
    "check_overfit": "a smaller init_draft.draft_vocab_size or train_draft.ttt_steps",
    "train_draft": "a smaller train_draft.batch_tokens (with more packs_per_step the steps stay as large), or parallel: fsdp",
    "replay_trees": "a smaller replay_trees.memory_gib",
    "time_cycles": "a smaller time_cycles.context or largest num_draft_tokens, of a server a smaller mem_fraction",
    "benchmark": "a smaller concurrency or max_new_tokens of the workload, or a larger benchmark.num_gpus_per_model",
    "benchmark_served": "a smaller benchmark_served.servers.*.mem_fraction or max_batch",
}
OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|not enough memory|can't allocate memory|Cannot allocate memory|std::bad_alloc"
    r"|can't start new thread"  # a thread's stack is memory too
)
NO_GPU = re.compile(
    r"Found no NVIDIA driver|not compiled with CUDA|No CUDA GPUs are available|no CUDA-capable device|invalid device ordinal"
    r"|driver on your system is too old|CUDA driver version is insufficient"
)
NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR)


def is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _matches(OUT_OF_MEMORY, error)
    )


def explain_machine_error(error: BaseException, stage: str) -> str | None:
    """Return one line about what this machine lacks for `stage`, and what to set; None for any other error."""
    if full := explain_full_disk(error):
        return full
    message = " ".join(str(error).split())
    if is_out_of_memory(error):
        return f"{stage} is out of memory ({message[:200] or type(error).__name__}); {advise_less_memory(stage)}"
    if _matches(NO_GPU, error):
        return (
            f"{stage} cannot use the GPU that target.device names ({message[:200]}); set target.device: cpu in params.yaml, or "
            "install a driver and its PyTorch: make run TORCH=cu130"
        )
    return _explain_refused_file(error)


def explain_file_error(error: BaseException) -> str | None:
    """Return one line about a disk that is full or a file that may not be read or written, for commands; None for others."""
    return explain_full_disk(error, kept="") or _explain_refused_file(error)


def _explain_refused_file(error: BaseException) -> str | None:
    if not isinstance(error, OSError) or error.errno not in NOT_PERMITTED or not error.filename:
        return None
    path = error.filename2 or error.filename
    return f"{path}: {error.strerror}; make it readable and writable for this user, or move it away, and run again"


def advise_less_memory(stage: str) -> str:
    """Return what to do where a stage of dvc.yaml is out of memory."""
    kind = stage.partition("@")[0]
    less = LESS_MEMORY.get(kind) or LESS_MEMORY.get(
        kind.removesuffix("_baseline"), "smaller sizes of the stage's section"
    )
    return f"set {less} in params.yaml, or end what else uses it"


def _matches(pattern: re.Pattern[str], error: BaseException) -> bool:
    """Return whether the error is torch's or the system's (not ours, which are ValueErrors), and says this."""
    return isinstance(error, RuntimeError | AssertionError | OSError) and bool(pattern.search(str(error)))
