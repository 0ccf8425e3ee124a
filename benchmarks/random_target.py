"""Targets of random weights at real sizes, made in seconds and without a network: weights, tokenizer, conversations.

The tokenizer has one token for each character, so lengths of prompts are exact and the ids of an answer follow from its text:
those of ASCII, and as fillers as many of the characters from U+10000 on as the vocabulary takes.

Answers are not uniform over the vocabulary, or no draft would ever be accepted and a served cell would be refused: the head gives
nine tenths of the probability to COMMON_TOKENS fillers, which of them depends on the context, so that a draft learns something
in a few steps. The end token has the probability, at temperature 1, that makes answers as long as asked on average; lengths are
then geometric. At temperature 0 answers end by length.
"""

import itertools
import json
import math
import random
import string
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from stages.toy.text_targets import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START

# hidden, intermediate, blocks, heads, key-value heads, head width, vocabulary
SHAPES = {
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),  # Qwen3-8B
    "1b": (2048, 6144, 28, 16, 8, 128, 151936),  # Qwen3-1.7B, its head untied
    "tiny": (64, 128, 7, 4, 2, 16, 640),
    "small": (256, 512, 9, 8, 4, 64, 640),  # the smallest that benchmarks/widened_target.py fills
}
POSITIONS = 163_840
COMMON_TOKENS, COMMON_SHARE = 16, 0.9
CALIBRATION = (4, 256)  # rows and tokens
WORDS = "the of and to in is it for on with as at by from or an be this that which sea wind rain north harbour light"


def build_config(shape: str, positions: int = POSITIONS) -> Qwen3Config:
    """Return the config of a shape of SHAPES."""
    hidden, intermediate, blocks, heads, groups, width, vocab = SHAPES[shape]
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=width, vocab_size=vocab, max_position_embeddings=positions,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, tie_word_embeddings=False,
    )  # fmt: skip


def build_model(
    config: Qwen3Config, device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Return a model of random weights, normal with a deviation of 0.02."""
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    return model.requires_grad_(False)


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of exactly `vocab_size` tokens, with ChatML as its template."""
    special = [END_OF_TEXT, TURN_START, TURN_END]
    points = (n for n in itertools.count(0x10000) if n & 0xFFFE != 0xFFFE)  # U+nFFFE and U+nFFFF are no characters
    fillers = map(chr, itertools.islice(points, vocab_size - len(special) - len(string.printable)))
    bpe = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate([*string.printable, *fillers])}, merges=[])
    )
    bpe.decoder = decoders.Fuse()  # without spaces between tokens
    bpe.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END_OF_TEXT, padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == vocab_size
    return tokenizer


@torch.no_grad()
def shape_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, mean_answer: int) -> None:
    """Give the target its common tokens, and its end token the probability 1 / `mean_answer`; 0: next to none."""
    hidden_size, vocab = model.config.hidden_size, model.config.vocab_size
    # Every embedding shares a direction, which reaches the head, since blocks add about as much as an embedding has.
    embedding = model.get_input_embeddings().weight
    embedding.normal_().add_(torch.randn(hidden_size, device=embedding.device, dtype=embedding.dtype))
    for block in model.get_decoder().layers:
        for weight in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
            weight.mul_(0.7 / len(model.get_decoder().layers) ** 0.5)
    first = len(string.printable)
    common = torch.arange(first, first + COMMON_TOKENS, device=embedding.device)
    ids = common[torch.randint(COMMON_TOKENS, CALIBRATION, device=embedding.device)]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1).float()  # [N, H]
    mean = hidden.mean(0)
    direction, head = mean / mean.dot(mean), model.get_output_embeddings().weight  # logit 1 on average
    odds = COMMON_SHARE / (1 - COMMON_SHARE)
    head[common] += (math.log(odds * vocab / COMMON_TOKENS) * direction).to(head.dtype)
    logits = hidden @ head.float().T  # [N, V]
    end = tokenizer.eos_token_id
    margin = logits[:, end] - torch.cat([logits[:, :end], logits[:, end + 1 :]], 1).logsumexp(1)  # [N]
    low, high = -50.0, 50.0
    for _ in range(60):  # the bias that gives the end token its mean probability
        middle = (low + high) / 2
        found = torch.sigmoid(margin + middle).mean().item()
        low, high = (middle, high) if found < (1 / mean_answer if mean_answer else 1e-9) else (low, middle)
    head[end] += (low * direction).to(head.dtype)


def write_target(folder: Path, shape: str, mean_answer: int, device: str, dtype: torch.dtype) -> None:
    """Write a target as a folder that transformers, SGLang and vLLM load."""
    config = build_config(shape)
    tokenizer = build_tokenizer(config.vocab_size)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = build_model(config, device, dtype)
    shape_answers(model, tokenizer, mean_answer)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(folder, max_shard_size="2GB")  # several shards: they are hashed side by side
    tokenizer.save_pretrained(folder)


def write_conversations(path: Path, lengths: Iterator[tuple[int, int]], seed: int) -> None:
    """Write a conversation of one turn for each (characters of its question, of its answer)."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for asked, answered in lengths:
            turns = [{"role": role, "content": _write_text(rng, size)} for role, size in
                     (("user", asked), ("assistant", answered))]  # fmt: skip
            file.write(json.dumps({"messages": turns}) + "\n")


def _write_text(rng: random.Random, size: int) -> str:
    words = WORDS.split()
    text = " ".join(rng.choice(words) for _ in range(size // 2 + 1))
    return text[: size - 1] + "."
