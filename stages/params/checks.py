"""Checks of params.yaml against what it names: raw data, folders of models, the target's vocabulary, chat template and feature
layers, GPUs.
"""

import os
import re
import shutil
from collections.abc import Iterator
from glob import glob
from pathlib import Path

from stages.params import target_files
from stages.params.data_sections import fits_file
from stages.params.schema import Params
from stages.params.section import PARAMS_FILE, suggest_name
from stages.params.units import list_first
from stages.runtime import guarded_files

# Devices of NVIDIA's driver, of Jetson, of WSL and of ROCm.
GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd")
HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"  # owner/name, or builtin/NAME
SMALL_DRAFT_VOCAB = 4096  # below, a draft's vocabulary is told of
MAX_SHOWN_FILES = 20  # in a message
TEMPLATES_FOLDER = Path("templates")  # of target.chat_template


def check_raw(params: Params) -> None:
    """Raise ValueError for missing raw conversations, and for names of their files that fit none, or of which two fit one."""
    fix, raw = params.fix_data, Path(params.fix_data.raw)
    if not raw.exists():
        is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", fix.raw) and not raw.suffix and raw.parts[0] != "data"
        more = f"; for the dataset {fix.raw} of the Hub write a file NAME.hub.yaml" if is_id else ""
        raise ValueError(f"{PARAMS_FILE}: fix_data.raw is {raw}, which does not exist; give a file or a folder{more}")
    columns = [name for name in fix.columns or {} if name != "*"]  # which fits any
    files = _list_raw_files(raw) if fix.eval_file or columns else []
    for key, names in {"eval_file": fix.eval_file or [], "columns": columns}.items():
        for name in names:
            if not any(fits_file(name, file) for file in files):
                raise ValueError(
                    f"{PARAMS_FILE}: fix_data.{key} names {name}{suggest_name(name, files)}, expected the path of a file or a "
                    f"folder as seen from fix_data.raw, or a pattern, found {list_first(files, MAX_SHOWN_FILES)} in {raw}; "
                    "correct it"
                )
    for file in files:
        if len(fitting := fix.find_column_names(raw / file if raw.is_dir() else raw)) > 1:
            raise ValueError(
                f"{PARAMS_FILE}: fix_data.columns has {' and '.join(fitting)} for {file}, expected one; name the file itself"
            )


def _list_raw_files(raw: Path) -> list[str]:
    """Return the files of fix_data.raw that are not hidden, as seen from there."""
    names = [path.relative_to(raw) for path in raw.rglob("*") if path.is_file()] if raw.is_dir() else [Path(raw.name)]
    return sorted(name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts))


def check_params(params: Params) -> None:
    """Raise ValueError for missing data, folders, files, GPUs and layers that params.yaml names."""
    for check in CHECKS:
        check(params)


def check_target(params: Params) -> None:
    """Raise ValueError for a target that is not here, or that does not fit the parameters or this machine."""
    for check in TARGET_CHECKS:
        check(params)


def list_problems(params: Params) -> Iterator[str]:
    """Yield what each check of `check_params` refuses. Without data that is missing: pipeline/preflight.py says where to
    get it.
    """
    for check in CHECKS if Path(params.fix_data.raw).exists() else TARGET_CHECKS:
        try:
            check(params)
        except ValueError as error:
            yield str(error)


def check_target_path(params: Params) -> None:
    """Raise ValueError for a target whose folder or GGUF file is missing."""
    model, is_file = params.target.model, params.target.is_gguf
    is_here = Path(model).is_file() if is_file else Path(model).is_dir() or re.fullmatch(HUB_ID, model)
    if not is_here:
        parent = Path(model).parent
        known = [path.as_posix() for path in parent.iterdir() if path.is_dir() or is_file] if parent.is_dir() else []
        raise ValueError(
            f"{PARAMS_FILE}: target.model is {model}, expected a {'file' if is_file else 'folder'}, found none "
            f"there{suggest_name(model, known)}; correct the path (~ is not expanded), or name a Hugging Face id (owner/name)"
        )


def check_device(params: Params) -> None:
    """Raise ValueError for a GPU that this machine lacks."""
    device, runner = params.target.device, params.schedule.runner
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    is_absent = not (any(map(glob, GPU_DEVICES)) or shutil.which("nvidia-smi"))
    if device != "cpu" and runner == "local" and (is_hidden or is_absent):
        raise ValueError(
            f"{PARAMS_FILE}: target.device is {device}, expected a GPU, found none here or in CUDA_VISIBLE_DEVICES; set "
            "target.device: cpu, or run where there is one"
        )


def check_target_settings(params: Params) -> None:
    """Raise ValueError for a chat template that can't be read, and feature layers that a target that is here, or a draft that is
    to be trained, does not have.
    """
    read_chat_template(params.target.chat_template)
    if (layers := params.target.feature_layers) is not None:
        if (num_layers := _find_number(params, "num_hidden_layers")) is not None:
            check_target_layers(params.target.model, layers, num_layers)
        check_segment_layers(params, layers)


def check_target_files(params: Params) -> None:
    """Raise ValueError for a local target that lacks a file which prepare_target needs."""
    target, folder = params.target, Path(params.target.model)
    if folder.is_dir():
        has_template = target.chat_template is not None
        target_files.check_target_folder(target.model, folder, has_template, target.trust_remote_code)


def check_vocab_of_target(params: Params) -> None:
    """Raise ValueError for a draft vocabulary larger than that of a target that is here."""
    is_trained = params.target.is_embedded and params.prepare_target.weights == "train"
    if not is_trained and (size := _find_number(params, "vocab_size")) is not None:
        params.init_draft.choose_vocab_size(size)


def list_remarks(params: Params) -> Iterator[str]:
    """Yield what is known before a run, and would be told hours later by its results."""
    wanted, size = params.init_draft.draft_vocab_size, _find_number(params, "vocab_size")
    if params.init_draft.makes_fresh_draft and wanted and size and wanted < min(SMALL_DRAFT_VOCAB, size):
        yield (
            f"init_draft.draft_vocab_size is {wanted} of the target's {size} tokens, and no other can be drafted; null takes "
            f"{params.init_draft.model_copy(update={'draft_vocab_size': None}).choose_vocab_size(size)}"
        )
    if unused := params.list_unused_checkpoints():
        yield (
            f"{', '.join(unused)}: made, and neither replayed nor measured; add it to benchmark.checkpoints, and to "
            "replay_trees.checkpoints where its family is replayed"
        )


def read_chat_template(name: str | None) -> str | None:
    """Return the text of the chat template that replaces the target's own. Raises ValueError where it is missing or invalid."""
    if name is None:
        return None
    path = TEMPLATES_FOLDER / name
    if not path.is_file():
        known = sorted(file.name for file in TEMPLATES_FOLDER.glob("*.jinja"))
        raise ValueError(
            f"{PARAMS_FILE}: target.chat_template is {name}{suggest_name(name, known)}, expected the name of a file in "
            f"{TEMPLATES_FOLDER}/, which has {', '.join(known) or 'none'}; put it there"
        )
    import jinja2  # where a template is named

    with guarded_files.guard_parsing(path, "Jinja in UTF-8", "correct it"):
        text = path.read_text(encoding="utf-8")
        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
    return text


def check_target_layers(model: str, layers: list[int], num_layers: int) -> None:
    """Raise ValueError for feature layers that are not increasing, or that the target `model` does not have."""
    if layers[0] < 0 or layers != sorted(set(layers)) or layers[-1] >= num_layers:
        raise ValueError(
            f"{PARAMS_FILE}: target.feature_layers is {layers}, expected increasing ids below {num_layers}, the number of "
            f"{model}'s layers: id i is the residual stream entering block i; correct it, or set it to null"
        )


def _find_number(params: Params, key: str) -> int | None:
    """Return a number of the target's config.json; None where that is not here."""
    if (path := params.target.find_file("config.json")) is None:
        return None
    try:
        config = guarded_files.read_json(path, "")
        number = config.get("text_config", config)[key]
    except (ValueError, KeyError, TypeError, AttributeError):  # prepare_target says what is wrong
        return None
    return number if isinstance(number, int) else None


def check_segment_layers(params: Params, stored: list[int]) -> None:
    """Raise ValueError where a draft is to be trained that reads feature layers which are not `stored`."""
    for name, segment in params.train_draft.checkpoints.items():
        read = getattr(segment, "feature_layers", None)
        if missing := [layer for layer in read or [] if layer not in stored]:
            raise ValueError(
                f"{PARAMS_FILE}: train_draft.checkpoints.{name}.feature_layers is {read}, expected some of target.feature_layers "
                f"{stored}, or null; write {sorted({*stored, *missing})} there"
            )


def check_sliding_window(params: Params, window: int) -> None:
    """Raise ValueError where the torch engine is to decode more tokens than layers of the target see."""
    wanted_lengths = {"time_cycles.context": params.time_cycles.context}
    for name in params.benchmark.torch_workloads:
        lengths = [length for length, _ in params.benchmark.workloads[name].list_loads()]
        wanted_lengths[f"benchmark.workloads.{name}.max_new_tokens"] = max(lengths)
    if long := [f"{key} {length}" for key, length in wanted_lengths.items() if length >= window]:
        raise ValueError(
            f"{PARAMS_FILE}: layers of target.model {params.target.model} see {window} tokens (sliding_window), expected prompts "
            f"and answers of the torch engine within them, found {', '.join(long)}; lower that, or measure the workload by "
            "benchmark_served"
        )


TARGET_CHECKS = (check_target_path, check_device, check_target_settings, check_target_files, check_vocab_of_target)
CHECKS = (check_raw, *TARGET_CHECKS)
