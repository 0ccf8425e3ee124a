"""Build and train targets small enough for a laptop: transformers' Qwen3 classes, a BPE tokenizer, a chat template.

Results depend on the seed and a fixed number of steps, not on the clock. Matrices are trained with Muon, which needs about
half the steps of AdamW at this size (docs/LOG.md, 2026-11-21), other weights with AdamW.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from stages.toy import weather

TARGET_NAMES = ("weather-tiny", "weather-tiny-moe")  # multimodal_target.TARGET_NAME is the third
CORPUS_SIZE = 6_000  # conversations; one epoch is about 500 steps of 2,048 tokens
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML, as Qwen3's template renders it without tools and thinking.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# One token per digit, as in Qwen: a draft must predict each digit of a number, which is hard.
PRETOKENIZER_PATTERN = r"\p{N}|[^\S\n]?\p{L}+|\n[ ]*|[^\s\p{L}\p{N}]+|\s+"


def start_training(
    name: str, seed: int, steps: int, batch_tokens: int, learning_rate: float
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Iterator[tuple[int, float]]]:
    """Return a target of TARGET_NAMES, its tokenizer, and its training, an iterator of (step, loss)."""
    corpus = make_corpus(seed)
    tokenizer = build_tokenizer(render_conversations(corpus[:2000]))
    model = build_model(tokenizer, seed, name)
    rows = encode_conversations(tokenizer, corpus)
    return model, tokenizer, train_target(model, rows, seed, steps, batch_tokens, learning_rate)


def build_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the texts of `render_conversations`, with ChatML as its template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # sorted: the set's own order differs between runs
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    special: dict[str, Any] = {"eos_token": TURN_END, "pad_token": END_OF_TEXT, "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, name: str = TARGET_NAMES[0]) -> PreTrainedModel:
    """Return a randomly initialised Qwen3 of hidden size 128.

    Seven layers are the fewest with three different feature layers [2, n//2, n-3]. weather-tiny-moe routes each token to two
    of eight experts that together are as wide as the dense MLP: the same FLOPs per token, four times the weights. SGLang
    0.5.17 requires of this architecture a head dim of 64 (its RoPE kernel) and an untied lm_head.
    """
    torch.manual_seed(seed)
    if name == "weather-tiny":
        return Qwen3ForCausalLM(Qwen3Config(**build_decoder_config(tokenizer)))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    served_by_sglang = {
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    }
    sizes = build_decoder_config(tokenizer) | experts | served_by_sglang
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, use_sliding_window=False))


def build_decoder_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the config keys that the decoders of all embedded targets share."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def render_conversations(conversations: list[list[dict[str, str]]]) -> Iterator[str]:
    """Yield each conversation in ChatML, as CHAT_TEMPLATE renders it."""
    for messages in conversations:
        yield "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def encode_conversations(
    tokenizer: PreTrainedTokenizerFast, conversations: list[list[dict[str, str]]]
) -> list[tuple[Tensor, Tensor]]:
    """Return for each conversation ids [T] and labels [T], -100 outside the assistant's turns (end tokens are inside)."""
    encoded = tokenizer(list(render_conversations(conversations)))["input_ids"]
    return [(torch.tensor(ids), label_assistant_tokens(tokenizer, ids)) for ids in encoded]


def label_assistant_tokens(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> Tensor:
    """Return labels [T]: the ids, -100 outside the assistant's turns."""
    start, assistant = tokenizer.convert_tokens_to_ids(TURN_START), tokenizer.encode("assistant")[0]
    inside, labels = False, []
    for position, token in enumerate(ids):
        if token == start:
            inside = ids[position + 1] == assistant
        labels.append(token if inside else -100)
    return torch.tensor(labels)


def train_target(
    model: PreTrainedModel,
    rows: list[tuple[Tensor, Tensor]],
    seed: int,
    steps: int,
    batch_tokens: int,
    learning_rate: float,
    build_inputs: Callable[[list[int]], dict[str, Tensor]] = lambda batch: {},
) -> Iterator[tuple[int, float]]:
    """Train in place for exactly `steps` steps; yield (step, loss) after each.

    `build_inputs` returns the model's inputs besides ids, for a batch of row indices.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=learning_rate, momentum=0.95, weight_decay=0.01)
    adamw = torch.optim.AdamW(others, lr=learning_rate / 5, betas=(0.9, 0.95), weight_decay=0.0)
    base_rates = {muon: learning_rate, adamw: learning_rate / 5}
    batches = itertools.cycle(_batch_by_length(rows, batch_tokens, seed))
    for step in range(steps):
        batch = next(batches)
        ids = nn.utils.rnn.pad_sequence([rows[i][0] for i in batch], batch_first=True)  # [B, T]
        labels = nn.utils.rnn.pad_sequence([rows[i][1] for i in batch], batch_first=True, padding_value=-100)  # [B, T]
        # Linear warmup over 20 steps, linear decay to 2% over the last 40%.
        scale = min(1.0, (step + 1) / 20) * min(1.0, max(0.02, (steps - step) / (0.4 * steps)))
        for optimizer, base_rate in base_rates.items():
            for group in optimizer.param_groups:
                group["lr"] = base_rate * scale
        output = model.model(input_ids=ids, use_cache=False, **build_inputs(batch))
        hidden = output.last_hidden_state[:, :-1]  # [B, T-1, H]
        supervised = labels[:, 1:] != -100
        loss = nn.functional.cross_entropy(model.lm_head(hidden[supervised]), labels[:, 1:][supervised])
        muon.zero_grad()
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        yield step, loss.item()


def make_corpus(seed: int) -> list[list[dict[str, str]]]:
    return list(itertools.islice(weather.generate_conversations(seed), CORPUS_SIZE))


def _batch_by_length(rows: list[tuple[Tensor, Tensor]], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return batches of row indices of similar length, which need little padding, shuffled by the seed."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(rows)), key=lambda i: len(rows[i][0])):
        if (len(batches[-1]) + 1) * len(rows[index][0]) > batch_tokens and batches[-1]:
            batches.append([])
        batches[-1].append(index)
    random.Random(seed).shuffle(batches)
    return batches
