"""A target from a GGUF file, as llama.cpp serves it: config, tokenizer and weights, read by transformers' own loader.

The weights of a GGUF file are quantised in blocks. transformers computes each from its block (dequantises it), and later
stages and engines read the folder that comes out, in bfloat16, as any other target's. It answers nearly as the file does in
llama.cpp, and not as the original weights: so target.json and the report say what the weights are.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import transformers
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

if TYPE_CHECKING:
    from gguf import GGUFReader
try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # before 5.20
    GGUF_PRE_TOKENIZER_SPLITS = {}

METASPACE = "\u2581"  # SentencePiece's blank
# llama.cpp's names of splits (llama-vocab.cpp): as GPT-2's, those that part digits first, and those of tokens that are words
GPT2_SPLITS = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum"}
DIGIT_SPLITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
WHOLE_WORD_SPLITS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
T = TypeVar("T")
LEAST_SHARE = 0.01  # of the weights, for a type to be named: norms are F32 in every file


def read_gguf_config(file: Path) -> PretrainedConfig:
    """Return the config of a GGUF file. Raises ValueError where transformers can't read the file."""
    return _explain_failure(file, lambda: AutoConfig.from_pretrained(file.parent, gguf_file=file.name))


def write_gguf_target(file: Path, folder: Path) -> str:
    """Write the file's config, tokenizer and weights in bfloat16 to `folder`; return what the weights are, in words.

    Raises ValueError where transformers can't read the file, as of an architecture that its loader does not know.
    """
    from gguf import GGUFReader

    logging.disable_progress_bar()  # one step per tensor
    options = {}
    if packed := getattr(transformers, "GgufConfig", None):  # from 5.20 on weights stay packed unless asked otherwise
        options["quantization_config"] = packed(dequantize=True)
    reader = _explain_failure(file, lambda: GGUFReader(file))
    tokenizer = _explain_failure(file, lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    _correct_tokenizer(file, reader, tokenizer.backend_tokenizer)
    model = _explain_failure(
        file,
        lambda: AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16, **options),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"dequantised from {', '.join(_list_types(reader))}"


def _correct_tokenizer(file: Path, reader: "GGUFReader", tokenizer: Tokenizer) -> None:
    """Correct what transformers 5.23 makes of the file's tokenizer, so that texts have the tokens that the model was trained on.

    SentencePiece: a text has a blank before it, also where it begins with one. Byte-level: text is split before tokens are
    merged; transformers knows some of llama.cpp's names of splits, and takes GPT-2's for all others (SmolLM2 had other tokens
    in 1% of GSM8K's questions: "  3" as two blanks and a digit); and of Llama 3 a word that is a token is not merged from parts.

    Raises:
        ValueError: for a split that is known to neither.
    """
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        begins = reader.get_field("tokenizer.ggml.add_space_prefix")
        blank = [normalizers.Prepend(METASPACE)] if begins is None or begins.contents() else []
        tokenizer.normalizer = normalizers.Sequence([*blank, normalizers.Replace(" ", METASPACE)])
        tokenizer.pre_tokenizer = None
    kind, split = (
        field.contents() if (field := reader.get_field(f"tokenizer.ggml.{key}")) else None for key in ("model", "pre")
    )
    if split in WHOLE_WORD_SPLITS:
        tokenizer.model.ignore_merges = True
    if kind != "gpt2" or split in GGUF_PRE_TOKENIZER_SPLITS or split in GPT2_SPLITS:
        return
    if split not in DIGIT_SPLITS:
        raise ValueError(
            f"{file}: its tokenizer splits text as {split!r} (tokenizer.ggml.pre), expected one that transformers or aerie "
            f"knows: {', '.join(sorted({*GGUF_PRE_TOKENIZER_SPLITS, *GPT2_SPLITS, *DIGIT_SPLITS}))}; with another one its "
            "prompts would have other tokens. Take the model's own folder or id as target.model"
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def _list_types(reader: "GGUFReader") -> list[str]:
    """Return the types of the file's weights, as Q4_1, by their share."""
    sizes = Counter[str]()
    for tensor in reader.tensors:
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
