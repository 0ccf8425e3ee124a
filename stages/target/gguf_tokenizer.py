"""The tokenizer that a GGUF file describes, built to give the tokens that llama.cpp gives.

transformers' own differ by its version: those before 5.20 know no splits, and later ones take GPT-2's for those they do not know.
Checked beside llama.cpp: docs/results/2026-11-28-windows.md.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.tokenization_utils_base import generate_merges

METASPACE = "\u2581"  # SentencePiece's blank
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Tokens that llama.cpp ends an answer at whatever the keys say (llama-vocab.cpp), where the file marks them as control
END_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "< EOT >",
    "<|end_of_text|>", "<end_of_utterance>",
}  # fmt: skip

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER, UPPER = rf"{WORD}*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+", rf"{WORD}+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
REST, SHORT = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN = rf"{LOWER}|{UPPER}|\p{{N}}{REST}"
GPT4O = rf"{LOWER}{SHORT}|{UPPER}{SHORT}|\p{{N}}{{1,3}}{REST}"
# llama.cpp's names of splits: by an expression, as GPT-2's, and those of it that part digits first
EXPRESSIONS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("jina-v5-nano", "dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    "tekken": TEKKEN,
}
GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum"}
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
# Of these a word that is a token is not merged from parts.
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}


def build_tokenizer(keys: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file with these keys. Raises ValueError, which says what is not known of it."""
    found = {
        key.removeprefix("tokenizer.ggml."): value for key, value in keys.items() if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = found.get("model"), found["tokens"]
    if kind == "gpt2":
        backend = _build_byte_level(found)
    elif kind == "llama":
        backend = _build_sentencepiece(found, keys["general.architecture"].startswith("gemma"))
    else:
        raise ValueError(f"its tokenizer is {kind!r} (tokenizer.ggml.model), expected gpt2 or llama")
    known, types = backend.get_vocab(with_added_tokens=False), found.get("token_type", ())
    marked = [(text, mark) for text, mark in zip(tokens, types, strict=False) if text and text in known]
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text, mark in marked if mark == CONTROL]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text, mark in marked if mark == USER_DEFINED])
    ids = {name: found.get(f"{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[text for text, mark in marked if mark == CONTROL],
        chat_template=keys.get("tokenizer.chat_template"),
        **{name: tokens[number] for name, number in ids.items() if number is not None and number < len(tokens)},
    )


def list_end_tokens(keys: dict[str, Any]) -> list[int]:
    """Return the ids at which llama.cpp ends an answer: eos, end of turn, end of message, and those known by their text."""
    named = [keys.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = keys["tokenizer.ggml.tokens"], keys.get("tokenizer.ggml.token_type", ())
    by_text = [
        i for i, (text, mark) in enumerate(zip(tokens, types, strict=False)) if mark == CONTROL and text in END_TEXTS
    ]
    return list(dict.fromkeys(number for number in (*named, *by_text) if number is not None))


def _build_byte_level(found: dict[str, Any]) -> Tokenizer:
    split = found.get("pre")
    first: list[pre_tokenizers.PreTokenizer]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in EXPRESSIONS)
    if split in EXPRESSIONS:
        first = [pre_tokenizers.Split(Regex(EXPRESSIONS[split]), "isolated")]
    elif split in DIGITS:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif split in GPT2:
        first = []
    else:
        known = ", ".join(sorted({*EXPRESSIONS, *GPT2, *DIGITS}))
        raise ValueError(
            f"its tokenizer splits text as {split!r} (tokenizer.ggml.pre), expected {known}; with another one its prompts would "
            "have other tokens"
        )
    vocab = {text: number for number, text in enumerate(found["tokens"])}
    merges = [(merge[:cut], merge[cut + 1 :]) for merge in found["merges"] if (cut := merge.find(" ", 1)) > 0]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=split in WHOLE_WORDS))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(found: dict[str, Any], is_gemma: bool) -> Tokenizer:
    """Return a tokenizer of merges by score. Gemma's tokens of blanks hold real ones, and its merges go by position."""
    tokens = [METASPACE * len(text) if is_gemma and text and not text.strip(" ") else text for text in found["tokens"]]
    vocab = {text: number for number, text in enumerate(tokens)}
    scores = (
        {text: -number for text, number in vocab.items()}
        if is_gemma
        else dict(zip(tokens, found["scores"], strict=True))
    )
    unknown = found.get("unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab,
            generate_merges(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # A text has a blank before it, also where it begins with one.
    prefixed = found.get("add_space_prefix", True)
    blank = [normalizers.Prepend(METASPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*blank, normalizers.Replace(" ", METASPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    parts = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)
    return backend
