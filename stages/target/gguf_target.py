"""A target from a GGUF file, as llama.cpp serves it: config, tokenizer and weights, by tables of the architectures known here.

The weights of a GGUF file are quantised in blocks. Each is computed from its block (dequantised), and later stages and engines
read the folder that comes out, in bfloat16, as any other target's. It answers nearly as the file does in llama.cpp, and not as
the original weights: so target.json and the report say what the weights are.

Every tensor and every key of the architecture is read, known to change nothing, or refused by name. transformers' own loader
(5.23) skips those that it does not know, and draws missing weights at random.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from stages.params.section import PARAMS_FILE
from stages.params.units import list_first
from stages.runtime.guarded_files import is_parser_error
from stages.target.gguf_reader import GgufFile, read_gguf
from stages.target.gguf_tokenizer import SPECIAL_TOKENS, build_tokenizer, list_end_tokens

MAX_NAMES = 4  # of tensors and keys in a message
KEYS = {  # of a config, by a file's; what they are without one is in _read_config
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
YARN_KEYS = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "original_context_length": "original_max_position_embeddings",
}
EXPERT_KEYS = {"expert_used_count": "num_experts_per_tok"}
QWEN_EXPERTS = {**EXPERT_KEYS, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
NEEDED = (
    "context_length", "embedding_length", "block_count", "attention.head_count", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
NO_CHANGE = {"tensor_data_layout"}

OUTER = {"model.embed_tokens": ("token_embd",), "model.norm": ("output_norm",), "lm_head": ("output",)}
LAYER = {
    "input_layernorm": ("attn_norm",),
    "self_attn.q_proj": ("attn_q",),
    "self_attn.k_proj": ("attn_k",),
    "self_attn.v_proj": ("attn_v",),
    "self_attn.o_proj": ("attn_output",),
    "self_attn.q_norm": ("attn_q_norm",),
    "self_attn.k_norm": ("attn_k_norm",),
    "post_attention_layernorm": ("ffn_norm",),
    "mlp.gate_proj": ("ffn_gate",),
    "mlp.up_proj": ("ffn_up",),
    "mlp.down_proj": ("ffn_down",),
    "mlp.gate": ("ffn_gate_inp",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),  # [experts, width, hidden] each
    "mlp.experts.down_proj": ("ffn_down_exps",),
    "mlp.shared_expert.gate_proj": ("ffn_gate_shexp",),
    "mlp.shared_expert.up_proj": ("ffn_up_shexp",),
    "mlp.shared_expert.down_proj": ("ffn_down_shexp",),
    "mlp.shared_expert_gate": ("ffn_gate_inp_shexp",),
}
NORMED_TWICE = {
    "post_attention_layernorm": ("post_attention_norm",),
    "pre_feedforward_layernorm": ("ffn_norm",),
    "post_feedforward_layernorm": ("post_ffw_norm",),
}


@dataclass(frozen=True)
class Architecture:
    """How a model type of transformers reads the files of one of llama.cpp's architectures."""

    model_type: str
    keys: dict[str, str] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)  # of the config
    no_change: frozenset[str] = frozenset()
    pairs_rows: bool = False  # rotary pairs of attn_q and attn_k lie side by side, in transformers half a head apart
    adds_one: bool = False  # to the weights of norms


ARCHITECTURES = {
    "llama": Architecture("llama", pairs_rows=True),
    "llama with experts": Architecture("mixtral", EXPERT_KEYS | {"expert_count": "num_local_experts"}, pairs_rows=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture(
        "qwen2_moe", QWEN_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    ),
    "qwen3moe": Architecture("qwen3_moe", QWEN_EXPERTS, fixed={"norm_topk_prob": True}),
    # llama.cpp reads Phi-3's sliding window and computes without, as transformers' default
    "phi3": Architecture(
        "phi3",
        tensors={"self_attn.qkv_proj": ("attn_qkv",), "mlp.gate_up_proj": ("ffn_up",)},
        no_change=frozenset({"attention.sliding_window"}),
    ),
    "gemma": Architecture("gemma", adds_one=True),
    "gemma3": Architecture("gemma3_text", {"attention.sliding_window": "sliding_window"}, NORMED_TWICE, adds_one=True),
}
GEMMA3_27B_BLOCKS = 62  # its attention is scaled by hidden_size / heads


@dataclass(frozen=True)
class GgufTarget:
    """A file whose keys and tensors are all accounted for."""

    file: GgufFile
    architecture: Architecture
    model: PreTrainedModel  # on the meta device
    tensors: dict[str, tuple[str, ...]]  # the file's, by those of the model

    def read_weight(self, name: str) -> Tensor:
        """Return a weight of the model in bfloat16."""
        parts = [self.file.read_tensor(each) for each in self.tensors[name]]
        weight = torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]
        config = self.model.config
        if self.architecture.pairs_rows and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2)
        if self.architecture.adds_one and name.endswith("norm.weight"):
            weight = weight - 1
        return weight.reshape(self.model.get_parameter(name).shape).to(torch.bfloat16)


def write_gguf_target(path: Path, folder: Path) -> str:
    """Write the file's config, tokenizer and weights in bfloat16 to `folder`; return what the weights are, in words.

    Raises ValueError as read_gguf_target, and for a tokenizer that is not known.
    """
    target = read_gguf_target(path)
    logging.disable_progress_bar()
    with _name_file(path):
        tokenizer = build_tokenizer(target.file.keys)
        weights = {name: target.read_weight(name) for name in target.tensors}
    tokenizer.save_pretrained(folder)
    if target.model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    target.model.load_state_dict(weights, assign=True)
    target.model.tie_weights()
    target.model.save_pretrained(folder)
    return f"dequantised from {', '.join(target.file.list_types())}"


def read_gguf_target(path: Path) -> GgufTarget:
    """Return what the file says, its weights unread.

    Raises ValueError for a file that is broken, one of several, or of an architecture, key or tensor that is not known here.
    """
    file = read_gguf(path)
    with _name_file(path):
        return _account(file)


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Turn what is raised in the block into a ValueError that names the key of params.yaml and the file."""
    try:
        yield
    except Exception as error:  # keys of a wrong type, and classes of transformers that refuse a config, raise anything
        if not is_parser_error(error):
            raise
        words = " ".join(str(error).split())[:600]
        found = words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"
        raise ValueError(
            f"{PARAMS_FILE}: target.model {path}: {found}. Take the model's own folder or id as target.model"
        ) from None


def _account(file: GgufFile) -> GgufTarget:
    if (count := file.keys.get("split.count", 1)) > 1:
        join = f"llama-gguf-split --merge FIRST-OF-{count:05d}.gguf ALL.gguf"
        raise ValueError(f"expected one file with all tensors, found one of {count}; join them: {join}")
    name = file.keys.get("general.architecture")
    if file.keys.get(f"{name}.expert_count") and name == "llama":
        name = "llama with experts"
    if name not in ARCHITECTURES:
        raise ValueError(f"its general.architecture is {name!r}, expected one of {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    config = _read_config(file, name.split()[0], architecture)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    expected = dict(model.state_dict())
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    tensors = {name: _name_tensors(name, {**LAYER, **architecture.tensors}) for name in expected}
    needed = {each for names in tensors.values() for each in names}
    kind = f"{name} of {config.num_hidden_layers} blocks"
    if missing := sorted(needed - file.tensors.keys()):
        raise ValueError(f"it lacks {list_first(missing, MAX_NAMES)}, expected every tensor of a {kind}")
    if unknown := sorted(file.tensors.keys() - needed - {"rope_freqs.weight"}):
        raise ValueError(f"it has {list_first(unknown, MAX_NAMES)}, which a {kind} has not")
    for name, names in tensors.items():
        shapes = [file.tensors[each].shape for each in names]
        joined = (*shapes[0][:-2], sum(s[-2] for s in shapes), shapes[0][-1]) if len(shapes) > 1 else shapes[0]
        if tuple(d for d in joined if d > 1) != tuple(d for d in expected[name].shape if d > 1):
            raise ValueError(
                f"its {' and '.join(names)} {shapes[0]}, expected {tuple(expected[name].shape)} in all by its keys"
            )
    return GgufTarget(file, architecture, model, tensors)


def _name_tensors(name: str, layer: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the file's tensors that make up one of the model."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = name, "weight"
    if stem in OUTER:
        return tuple(f"{leaf}.{kind}" for leaf in OUTER[stem])
    _, _, number, rest = stem.split(".", 3)
    return tuple(f"blk.{number}.{leaf}.{kind}" for leaf in layer[rest])


def _read_config(file: GgufFile, name: str, architecture: Architecture) -> PretrainedConfig:
    """Return the config that the keys describe."""
    own = {key.removeprefix(f"{name}."): value for key, value in file.keys.items() if key.startswith(f"{name}.")}
    found = {attribute: own.pop(key) for key, attribute in (KEYS | architecture.keys).items() if key in own}
    found = {key: _merge_layers(key, value) for key, value in found.items()}
    needed = {key: KEYS[key] for key in NEEDED} | (EXPERT_KEYS if "expert_used_count" in architecture.keys else {})
    if lacking := [key for key, attribute in needed.items() if attribute not in found]:
        raise ValueError(f"it lacks {', '.join(f'{name}.{key}' for key in lacking)}")
    numbers = {int(parts[1]) for each in file.tensors if (parts := each.split("."))[0] == "blk" and parts[1].isdigit()}
    blocks = found["num_hidden_layers"]
    if blocks != len(numbers) or blocks != max(numbers) + 1:  # before a class is built of it
        raise ValueError(f"its {name}.block_count is {blocks}, found tensors of {len(numbers)} blocks")
    heads, hidden, tokens = found["num_attention_heads"], found["hidden_size"], file.keys["tokenizer.ggml.tokens"]
    found.setdefault("num_key_value_heads", heads)
    found.setdefault("head_dim", hidden // heads)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(found.pop("rope_theta", 10_000.0))}
    rope |= _read_scaling(own, found["max_position_embeddings"])
    if "rope_freqs.weight" in file.tensors:
        if rope["rope_type"] != "default" or not architecture.pairs_rows:
            raise ValueError("it has rope_freqs.weight, expected in a llama without rope.scaling only")
        rope |= _read_llama3(file.read_tensor("rope_freqs.weight"), rope["rope_theta"], found["head_dim"])
    for key, expected in _list_expected(found, len(tokens)).items():
        if key in own and (value := own.pop(key)) != expected:
            raise ValueError(f"its {name}.{key} is {value}, expected {expected}")
    local = float(own.pop("rope.freq_base_swa", 10_000.0)) if name == "gemma3" else None
    if unknown := sorted(own.keys() - NO_CHANGE - architecture.no_change):
        listed = list_first([f"{name}.{key} ({str(own[key])[:40]})" for key in unknown], MAX_NAMES)
        raise ValueError(f"it has {listed}, whose part in the model is not known here")
    if name == "gemma3":
        found["query_pre_attn_scalar"] = hidden // heads if blocks == GEMMA3_27B_BLOCKS else found["head_dim"]
        if "sliding_window" not in found:
            found["layer_types"] = ["full_attention"] * blocks
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    ends = list_end_tokens(file.keys)
    if not ends:
        raise ValueError("it names no end of an answer, expected tokenizer.ggml.eos_token_id")
    special = {f"{name}_id": file.keys.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    special |= {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    del special["unk_token_id"]
    biases = (
        {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
        if architecture.model_type == "llama"
        else {}
    )
    return CONFIG_MAPPING[architecture.model_type](
        **found, **special, **architecture.fixed, **{key: tensor in file.tensors for key, tensor in biases.items()},
        rope_parameters=rope, vocab_size=len(tokens), tie_word_embeddings="output.weight" not in file.tensors,
    )  # fmt: skip


def _merge_layers(key: str, value: Any) -> Any:
    """Return the number that all blocks have. Raises ValueError where they differ, or for none above 0."""
    values = value if isinstance(value, list) else [value]
    if len(set(values)) != 1 or isinstance(values[0], str | bool) or not 0 < values[0] < math.inf:
        raise ValueError(f"its {key} is {str(value)[:80]}, expected one number above 0 for all blocks")
    return values[0]


def _list_expected(found: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return what further keys say where they change nothing."""
    width = dict.fromkeys(("attention.value_length", "attention.key_length_swa", "attention.value_length_swa",
                           "rope.dimension_count", "rope.dimension_count_swa"), found["head_dim"])  # fmt: skip
    experts = {"expert_count": 0, "expert_used_count": 0, "expert_gating_func": 1}  # softmax
    return {**width, **experts, "vocab_size": num_tokens, "attention.causal": True, "pooling_type": 0}


def _read_scaling(own: dict[str, Any], positions: int) -> dict[str, Any]:
    """Return RoPE's scaling by transformers' names, and take its keys out of `own`."""
    keys = {key.removeprefix("rope.scaling."): own.pop(key) for key in list(own) if key.startswith("rope.scaling.")}
    kind, factor = keys.pop("type", "linear"), float(keys.pop("factor", 1.0))
    keys.pop("finetuned", None)
    for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        if (value := keys.pop(key, 1.0)) != 1:
            raise ValueError(f"its rope.scaling.{key} is {value}, expected 1")
    found: dict[str, Any] = {}
    if kind == "yarn":
        found = {name: keys.pop(key) for key, name in YARN_KEYS.items() if key in keys}
        found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": positions, **found}
    elif kind == "linear" and factor != 1:
        found = {"rope_type": "linear", "factor": factor}
    keys.pop("original_context_length", None)
    if keys or kind not in ("none", "linear", "yarn"):
        raise ValueError(f"its rope.scaling is {kind} with {sorted(keys)}, expected none, linear or yarn")
    return found


def _read_llama3(factors: Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Return Llama 3.1's scaling of RoPE from what divides its frequencies, [E/2]: the file has it nowhere else.

    Raises ValueError where the original length is no power of two, or the other factors are not 1 and 4, as they all have.
    """
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factor = round(float(factors.max()), 4)
    for original in (2**power for power in range(5, 21)):
        smooth = ((original / waves - 1) / 3).clamp(0, 1)
        if factors.shape == waves.shape and torch.allclose(
            1 / ((1 - smooth) / factor + smooth), factors.double(), rtol=1e-4
        ):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original}  # fmt: skip
    raise ValueError("its rope_freqs.weight are not those of Llama 3.1's scaling of RoPE")
