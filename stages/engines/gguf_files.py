"""GGUF files of a target and a draft, which llama.cpp loads: made by its own converter, once for each content and type.

    convert_hf_to_gguf.py TARGET --outtype bf16                          the target
    convert_hf_to_gguf.py DRAFT --target-model-dir TARGET --outtype bf16  the draft, with the target's vocabulary
    llama-quantize target-bf16.gguf target-q4_0.gguf q4_0                where a smaller type is asked for

The converter comes with `make serving-env ENGINE=llama.cpp`, and runs as a process of its own (`python -m` this module).
"""

import hashlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from stages.params.engines import find_program, list_environments
from stages.params.target_files import GGUF_TYPES
from stages.runtime import atomic
from stages.target import manifest

FOLDER = Path(".scratch/gguf")
ENVIRONMENT = list_environments("llama.cpp")[0]
CONVERTER = ENVIRONMENT / "converter/convert_hf_to_gguf.py"
TRUST = "trust"  # the first argument of this module, where the user trusts the target's code
SHOWN_LINES = 8  # of the log of a converter that fails


def make_gguf(
    folder: Path, dtype: str, quantised: str | None, trust_remote_code: bool, target: Path | None = None
) -> Path:
    """Return the GGUF file of a target's folder, or of a draft's whose target is in folder `target`, made if it is missing.

    Raises:
        ValueError: where there is no converter, or it cannot convert the model.
    """
    inputs = [manifest.digest_files(each, "*.json", "*.jinja") + manifest.sample_weights(each)
              for each in (folder, target) if each]  # fmt: skip
    outtype = GGUF_TYPES[dtype]
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    path = FOLDER / f"{digest}-{outtype}.gguf"
    if not path.exists():
        convert(folder, path, outtype, target, trust_remote_code)
    if quantised is None:
        return path.absolute()
    smaller = FOLDER / f"{digest}-{quantised}.gguf"
    if not smaller.exists():
        with atomic.write_file(smaller) as temporary:
            program = "llama-quantize"
            run_tool(
                [find_program("llama.cpp", program) or program, str(path), str(temporary), quantised],
                f"{folder} as {quantised}",
            )
    return smaller.absolute()


def convert(folder: Path, path: Path, outtype: str, target: Path | None, trust_remote_code: bool) -> None:
    """Write a GGUF file. Raises ValueError where it can't."""
    if not CONVERTER.exists():
        raise ValueError(
            f"llama.cpp loads GGUF files, and its converter is not here ({CONVERTER}); run: make serving-env ENGINE=llama.cpp"
        )
    print(f"converting {folder} to GGUF, {outtype} -> {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    more = ["--target-model-dir", str(target)] if target else []
    with atomic.write_file(path) as temporary:
        files = [str(folder), *more, "--outtype", outtype, "--outfile", str(temporary)]
        trust = TRUST if trust_remote_code else "no"
        run_tool([sys.executable, "-m", "stages.engines.gguf_files", trust, *files], str(folder))


def run_tool(command: list[str], subject: str) -> None:
    """Run a tool of llama.cpp. Raises ValueError with the last lines of what it prints if it fails."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ValueError(f"{command[0]} can't be run ({error}); run: make serving-env ENGINE=llama.cpp") from None
    for line in completed.stdout.splitlines():
        if line.startswith("note: "):
            print(line, flush=True)
    if completed.returncode:
        tail = "\n  ".join((completed.stderr or completed.stdout).splitlines()[-SHOWN_LINES:])
        raise ValueError(
            f"llama.cpp can't convert {subject}; take another engine (benchmark_served.engines). It says:\n  {tail}"
        )


def run_converter(trust: str, *arguments: str) -> None:
    """Run llama.cpp's converter in this process. It trusts the code of every model; here target.trust_remote_code decides.

    It knows how a tokenizer splits text by a digest of its output, and refuses one that it does not know. Prompts are sent as
    token ids here, so such a tokenizer is converted as one that splits as GPT-2's does, with a note.
    """
    packages = next(ENVIRONMENT.glob("lib/python3*/site-packages"), None)
    sys.path += [str(packages)] if packages else []  # sentencepiece, after this project's own packages
    sys.path.insert(0, str(CONVERTER.parent.absolute()))
    os.environ["HF_HUB_OFFLINE"] = "1"
    for loader in (AutoConfig, AutoTokenizer):
        load = loader.from_pretrained
        loader.from_pretrained = lambda *words, _load=load, **keys: _load(
            *words, **keys | {"trust_remote_code": trust == TRUST}
        )
    from conversion import base  # type: ignore[import-not-found]  # llama.cpp's, not a package of ours

    find_split = base.TextModel.get_vocab_base_pre

    def find_or_guess(self: object, tokenizer: object) -> str:
        try:
            return str(find_split(self, tokenizer))
        except NotImplementedError:
            print("note: llama.cpp does not know how this tokenizer splits text; prompts as token ids are not affected")
            return "gpt-2"

    base.TextModel.get_vocab_base_pre = find_or_guess
    sys.argv = [str(CONVERTER), *arguments]
    runpy.run_path(str(CONVERTER), run_name="__main__")


if __name__ == "__main__":
    run_converter(*sys.argv[1:])
