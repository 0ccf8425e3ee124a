"""A target from a GGUF file, as llama.cpp serves it: config, tokenizer and weights, read by transformers' own loader.

The weights of a GGUF file are quantised in blocks. transformers computes each from its block (dequantises it), and later
stages and engines read the folder that comes out, in bfloat16, as any other target's. It answers nearly as the file does in
llama.cpp, and not as the original weights: so target.json and the report say what the weights are.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

T = TypeVar("T")
LEAST_SHARE = 0.01  # of the weights, for a type to be named: norms are F32 in every file


def read_gguf_config(file: Path) -> PretrainedConfig:
    """Return the config of a GGUF file. Raises ValueError where transformers can't read the file."""
    return _explain_failure(file, lambda: AutoConfig.from_pretrained(file.parent, gguf_file=file.name))


def write_gguf_target(file: Path, folder: Path) -> str:
    """Write the file's config, tokenizer and weights in bfloat16 to `folder`; return what the weights are, in words.

    Raises ValueError where transformers can't read the file, as of an architecture that its loader does not know.
    """
    logging.disable_progress_bar()  # one step per tensor
    options = {}
    if packed := getattr(transformers, "GgufConfig", None):  # from 5.20 on weights stay packed unless asked otherwise
        options["quantization_config"] = packed(dequantize=True)
    model = _explain_failure(
        file,
        lambda: AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16, **options),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = _explain_failure(file, lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    tokenizer.save_pretrained(folder)
    return f"dequantised from {', '.join(_list_types(file))}"


def _list_types(file: Path) -> list[str]:
    """Return the types of the file's weights, as Q4_1, by their share."""
    from gguf import GGUFReader

    sizes = Counter[str]()
    for tensor in GGUFReader(file).tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    return [name for name, size in sizes.most_common() if size >= LEAST_SHARE * sizes.total()]


def _explain_failure(file: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:  # the reader of GGUF, transformers and NumPy each raise their own
        words = " ".join(str(error).split())
        raise ValueError(
            f"{file}: expected a GGUF file that transformers can read, found {type(error).__name__}: {words[:300]}; get the file "
            "again, or take the model's own folder or id as target.model"
        ) from None
