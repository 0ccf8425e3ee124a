"""A target of a real size that answers as the embedded one does: its weights in a corner of larger matrices.

    python3 -m benchmarks.widened_target FOLDER [--shape 1b]

A cycle costs what it costs at that size, and answers end and drafts are accepted as they do on real text, which no target of
random weights offers: greedily it repeats itself, so that every draft is accepted and all answers have one length.

What keeps the function, but for rounding; n is the embedded size, N the other:

    residual stream   n features, then zeros: the mean of squares is n/N as large, so norms weigh sqrt(n/N) as much
    rotary position   feature j of n turns as fast as feature j·N/n of N, in each half of a head
    attention         scores are divided by sqrt(N), not sqrt(n), and q and k are normalized over N: k's norm weighs sqrt(n/N)
    epsilon           one for all norms, so q and k are scaled to be as small against it as the residual stream is
    query heads       of a key-value head: the first have the embedded weights, further ones add nothing
    further blocks    random, and add nothing: attention's output and the MLP's have weights of zero
    vocabulary        further tokens have a logit of zero
"""

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import random_target

SOURCE = Path("data/targets/weather-tiny")
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
TEXT_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def write_target(folder: Path, shape: str, device: str, dtype: torch.dtype, source: Path = SOURCE) -> None:
    """Write the widened target as a folder that transformers, SGLang and vLLM load."""
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = widen(small, shape, device, dtype)
    model.generation_config = small.generation_config
    model.save_pretrained(folder, max_shard_size="2GB")
    for name in TEXT_FILES:
        shutil.copy(source / name, folder)


@torch.no_grad()
def widen(small: PreTrainedModel, shape: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of that shape which computes what `small`, a Qwen3, does. Raises ValueError where it does not fit."""
    config = build_config(small.config, shape)
    model = random_target.build_model(config, device, dtype)
    weights, own = model.state_dict(), small.state_dict()
    own["lm_head.weight"] = (
        own["model.embed_tokens.weight"] if small.config.tie_word_embeddings else own["lm_head.weight"]
    )
    blocks = place_blocks(small.config.num_hidden_layers, config.num_hidden_layers)
    for number in range(config.num_hidden_layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{number}.{name}.weight"].zero_()
    for name, weight in own.items():
        words = name.split(".")
        if words[1] == "layers":
            words[2] = str(blocks[int(words[2])])
        corner = scatter_weight(name, weight.to(device), small.config, config)
        target = weights[".".join(words)]
        target.zero_()
        target[tuple(slice(size) for size in corner.shape)] = corner.to(dtype)
    return model


def build_config(small: Qwen3Config, shape: str) -> Qwen3Config:
    """Return the config of the shape, with the positions, end token and epsilon that keep the function of `small`."""
    config = random_target.build_config(shape, small.max_position_embeddings)
    short = [f"{name} {getattr(config, name)}" for name in SIZES if getattr(config, name) < getattr(small, name)]
    queries, least = count_group_queries(config), count_group_queries(small)
    if short or queries < least or config.head_dim % small.head_dim:
        raise ValueError(
            f"shape {shape} can't hold the target, found {', '.join(short) or 'other heads'}; expected no size below its own, "
            f"at least {least} query heads for a key-value head, and a head_dim that is a multiple of {small.head_dim}"
        )
    config.rope_parameters = small.rope_parameters
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / config.hidden_size
    config.eos_token_id, config.pad_token_id = small.eos_token_id, small.pad_token_id
    return config


def count_group_queries(config: Qwen3Config) -> int:
    """Return the query heads of a key-value head."""
    return config.num_attention_heads // config.num_key_value_heads


def place_blocks(few: int, many: int) -> list[int]:
    """Return where each of `few` blocks stands among `many`: evenly, the first at the beginning."""
    return [number * many // few for number in range(few)]


def scatter_weight(name: str, weight: Tensor, small: Qwen3Config, config: Qwen3Config) -> Tensor:
    """Return a weight with the heads' features in their places, scaled; what is left of its matrix is zero."""
    kind = name.split(".")[-2]
    queries = count_group_queries(small), count_group_queries(config)
    ratio = small.hidden_size / config.hidden_size
    wide = small.head_dim / config.head_dim
    if kind in ("q_proj", "k_proj"):
        weight = weight.unflatten(0, (-1, small.head_dim)).transpose(0, 1)  # [feature, head, hidden]
        heads = scatter_rows(weight * (ratio / wide) ** 0.5, config.head_dim).transpose(0, 1)
        return (pad_groups(heads, *queries) if kind == "q_proj" else heads).flatten(0, 1)
    if kind == "v_proj":
        rows = weight.unflatten(0, (-1, small.head_dim))  # [head, feature, hidden]
        return torch.nn.functional.pad(rows, (0, 0, 0, config.head_dim - small.head_dim)).flatten(0, 1)
    if kind == "o_proj":
        columns = weight.unflatten(1, (-1, small.head_dim))  # [hidden, head, feature]
        heads = torch.nn.functional.pad(columns, (0, config.head_dim - small.head_dim)).transpose(0, 1)
        return pad_groups(heads, *queries).transpose(0, 1).flatten(1, 2)
    if kind == "q_norm":
        return scatter_rows(weight, config.head_dim)
    if kind == "k_norm":
        return scatter_rows(weight * wide**0.5, config.head_dim)
    return weight * ratio**0.5 if "norm" in kind else weight


def pad_groups(heads: Tensor, few: int, many: int) -> Tensor:
    """Return query heads [head, ...] of groups of `few` in groups of `many`, those added zero."""
    groups = heads.unflatten(0, (-1, few))
    added = groups.new_zeros(groups.shape[0], many - few, *groups.shape[2:])
    return torch.cat((groups, added), dim=1).flatten(0, 1)


def scatter_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Return `weight` [n, ...] as [head_dim, ...]: row j of each half in row j · head_dim / n of that half."""
    half = weight.shape[0] // 2
    wide = weight.new_zeros(head_dim, *weight.shape[1:])
    rows = torch.arange(half, device=weight.device) * (head_dim // weight.shape[0])
    wide[rows], wide[head_dim // 2 + rows] = weight[:half], weight[half:]
    return wide


if __name__ == "__main__":
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("folder", type=Path)
    takes.add_argument("--shape", default="1b", choices=random_target.SHAPES)
    takes.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = takes.parse_args()
    write_target(o.folder, o.shape, o.device, torch.float32 if o.device == "cpu" else torch.bfloat16)
