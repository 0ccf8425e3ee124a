"""Check that the folder of a target has weights as safetensors, a config, a tokenizer and a chat template. Reads no weights.

`aerie run`, `aerie stale` and `aerie doctor` check a local folder before anything starts, prepare_target every target.
"""

from pathlib import Path

from stages.params.section import PARAMS_FILE
from stages.params.units import list_first
from stages.runtime import guarded_files

GGUF_SUFFIX = ".gguf"
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # by dtype; others are quantised from these
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
)
TEMPLATE_FILES = ("chat_template*", "additional_chat_templates/*.jinja", "tekken.json")  # tekken.json implies its own
READ_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors", ".py")  # of files that are read
MAX_SHOWN = 4
CONVERSION = (
    'python -c "import glob, torch; from safetensors.torch import save_file; t = {k: v.contiguous().clone() for f in '
    "sorted(glob.glob('pytorch_model*.bin')) for k, v in torch.load(f, weights_only=True).items()}; save_file(t, "
    f"'{WEIGHTS_FILE}', {{'format': 'pt'}})\""
)


def check_file_kinds(folder: Path) -> None:
    """Raise ValueError for anything but a file in the place of one of the target, and for a link to elsewhere.

    Weights may lie on another disk. Reading a pipe may never end, and a link may lead to a private file.
    """
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if path.suffix in READ_SUFFIXES:
            root = None if path.suffix == ".safetensors" else folder
            with guarded_files.guard_parsing(path, "a target", "copy or download the file again", root=root):
                pass


def check_target_folder(model: str, folder: Path, has_template: bool, trust_remote_code: bool) -> None:
    """Raise ValueError where `folder`, of the target `model`, lacks a file that prepare_target needs.

    `has_template` is whether target.chat_template names one. Remote code may bring a template of its own.
    """
    check_file_kinds(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{PARAMS_FILE}: target.model {model} has no config.json, expected a folder of transformers")
    list_weight_files(folder)
    check_tokenizer_files(model, folder)
    if not has_template and not trust_remote_code and not _may_have_template(folder):
        raise ValueError(describe_missing_template(model))


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files of a target's weights, those of the index where there is one. Raises ValueError where one is missing."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / WEIGHTS_FILE).exists():
            found = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", *PICKLE_SUFFIXES))
            raise ValueError(
                f"{folder / WEIGHTS_FILE} not found, expected weights as safetensors, of several files with their {INDEX_FILE}; "
                f"found {list_first(found, MAX_SHOWN)}. Copy or download them; or convert pickles, which run code when they are "
                f"read, where you trust them, in {folder}: {CONVERSION}"
            )
        return [folder / WEIGHTS_FILE]
    files = guarded_files.list_indexed_files(index, "get the target's weights again")
    if missing := [file.name for file in files if not file.exists()]:
        raise ValueError(
            f"{folder} lacks {list_first(missing, MAX_SHOWN)}, files of weights that its {INDEX_FILE} names; get them again"
        )
    return files


def check_tokenizer_files(model: str, folder: Path) -> None:
    """Raise ValueError where the folder of the target `model` has no file of a tokenizer."""
    if not any(path for name in TOKENIZER_FILES for path in folder.glob(name)):
        raise ValueError(
            f"{PARAMS_FILE}: target.model {model} has no tokenizer, expected one of {', '.join(TOKENIZER_FILES)} in {folder}; "
            "copy them there from the model that it was made from"
        )


def describe_missing_template(model: str) -> str:
    """Return the message on a target without a chat template."""
    return (
        f"{PARAMS_FILE}: target.model {model} has no chat template, expected one in its tokenizer_config.json or "
        "chat_template.jinja, by which conversations become prompts (a base model has none); take its instruct version, or "
        "write one to templates/NAME.jinja and set target.chat_template: NAME.jinja"
    )


def _may_have_template(folder: Path) -> bool:
    """Return whether a file of the folder holds a chat template, or can't be read: prepare_target then says what is wrong."""
    if any(path for name in TEMPLATE_FILES for path in folder.glob(name)):
        return True
    configs = [folder / name for name in ("tokenizer_config.json", "processor_config.json")]
    try:
        return any(guarded_files.read_json(config, "").get("chat_template") for config in configs if config.is_file())
    except ValueError:
        return True
