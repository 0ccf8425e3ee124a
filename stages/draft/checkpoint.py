"""A draft checkpoint on disk: `draft/` is what engines load, `state/` is what the next training segment needs.

`draft/` holds config.json and model.safetensors exactly as SGLang's `LlamaForCausalLMEagle3` (0.5.17 to 0.5.23) and
vLLM load them. SGLang ignores unknown names and leaves missing ones random, without a word, so names, shapes and the
vocabulary maps are checked on every write and read. `state/` holds the optimizer's moments as safetensors and where
the run stood as JSON. Which layers feed the draft: no list is written, since both engines default to EAGLE-3's
[2, n//2, n-3]; other layers are written in each engine's own convention (research/specforge.md 2.1).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.runtime import atomic

DRAFTS_FOLDER = Path("drafts")
NORM_OPTIONS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
# vLLM has a draft layer with q/k norms under this name. SGLang has none and would leave them out without a word; an
# architecture that it doesn't know it refuses.
QK_NORM_CONFIG = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}


def locate_checkpoint(name: str) -> Path:
    return DRAFTS_FOLDER / name


SIZE_KEYS = (  # what of config.json the shapes and numbers of the layer are
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


def list_tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft with its shape, by config.json."""
    h, d, v = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    q, kv = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    m = config["intermediate_size"]
    options: dict[str, tuple[int, ...]] = {}
    if config.get("norm_before_fc"):
        options["input_norm.weight"] = (3 * h,)
    if config.get("fc_norm"):
        options |= {f"fc_norm.{layer}.weight": (h,) for layer in range(3)}
    if config["model_type"] == QK_NORM_CONFIG["model_type"]:
        options |= {f"midlayer.self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
    return {
        "fc.weight": (h, 3 * h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.mlp.gate_proj.weight": (m, h),
        "midlayer.mlp.up_proj.weight": (m, h),
        "midlayer.mlp.down_proj.weight": (h, m),
        "norm.weight": (h,),
        "lm_head.weight": (d, h),
        "d2t": (d,),
        "t2d": (v,),
        **options,
    }


def build_config(
    shape: dict[str, Any],
    rope: dict[str, Any],
    feature_layers: list[int],
    num_layers: int,
    eos_token_ids: list[int],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json of a draft: `shape` has the sizes of `list_tensor_shapes`, rope is the target's rope_parameters.

    RoPE is written in both spellings: transformers 5 reads rope_parameters, SGLang and vLLM may read rope_theta and
    rope_scaling. With `mrope_section` there, and `mrope_interleaved` beside it, they give the draft the target's positions
    on three axes; without, plain ones. `options` are drafting's DraftConfig's, written where they are on, as engines read
    them; which engine reads which: docs/drafts.md.
    """
    on = {name: value for name, value in (options or {}).items() if value}
    plain = rope.get("rope_type", "default") == "default" and "mrope_section" not in rope
    scaling = None if plain else {k: v for k, v in rope.items() if k != "rope_theta"}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": rope,
        **shape,
    }
    if feature_layers != [2, num_layers // 2, num_layers - 3]:
        # SGLang adds one to the ids in eagle_config; vLLM takes its top-level list as it is.
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in feature_layers],
        }
        config["eagle_aux_hidden_state_layer_ids"] = feature_layers
    config |= {name: True for name in NORM_OPTIONS if name in on}
    if "sliding_window" in on:  # vLLM takes the window of a layer that is named sliding
        config |= {"sliding_window": on["sliding_window"], "layer_types": ["sliding_attention"]}
    return config | QK_NORM_CONFIG if "qk_norm" in on else config


def write_draft(place: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Atomically write `place`/draft. Raises AssertionError where names, shapes, maps or weights would mislead an engine."""
    assert not (found := find_draft_problem(config, tensors) or not_finite(tensors)), found
    with atomic.write_folder(place / "draft") as temporary:
        atomic.write_json(temporary / "config.json", config)
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, temporary / "model.safetensors", {"format": "pt"}
        )


def read_draft(place: Path, made_by: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of `place`/draft. Raises ValueError naming what is missing, misshapen or unknown."""
    config = atomic.read_json(place / "draft" / "config.json", made_by)
    tensors = read_tensors(place / "draft" / "model.safetensors", made_by)
    if found := find_draft_problem(config, tensors):
        raise atomic.Broken(f"{place}/draft is no EAGLE-3 draft: {found}", atomic.rerun(made_by))
    return config, tensors


def write_state(place: Path, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
    """Atomically write `place`/state: the optimizer's tensors, and where training stood (plain JSON)."""
    with atomic.write_folder(place / "state") as temporary:
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary / "optimizer.safetensors")
        atomic.write_json(temporary / "progress.json", progress)


def read_state(place: Path, made_by: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return read_tensors(place / "state" / "optimizer.safetensors", made_by), read_progress(place, made_by)


def read_progress(place: Path, made_by: str) -> dict[str, Any]:
    """Return where training stood. Raises Broken where the file does not say it."""
    path = place / "state" / "progress.json"
    found = atomic.read_json(path, made_by)
    if not all(isinstance(found.get(key), int) for key in ("epoch", "step")):
        raise atomic.Broken(f"{path}: expected the numbers epoch and step, found {found!r:.60}", atomic.rerun(made_by))
    return found


def read_tensors(path: Path, made_by: str) -> dict[str, Tensor]:
    """Raises ValueError naming the file and what to run, where it is missing or broken, or holds NaN or infinity."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise atomic.Broken(f"{path} not found", f"run: dvc repro {made_by}") from None
    except (SafetensorError, OSError) as error:
        raise atomic.Broken(f"{path} is cut or broken ({error})", atomic.rerun(made_by)) from None
    if found := not_finite(tensors):
        raise atomic.Broken(f"{path}: {found}", f"{atomic.rerun(made_by)}, which names the cause where it comes again")
    return tensors


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Say which weights are NaN or infinite, or return an empty string. A draft with such weights decodes, accepts nothing,
    and would be reported as one of tau 1.
    """
    bad = [name for name, tensor in tensors.items() if not _finite(tensor)]
    if not bad:
        return ""
    first, more = tensors[bad[0]], f" (and {len(bad) - 1} more tensors hold some)" if len(bad) > 1 else ""
    count = first.numel() - int(torch.isfinite(first).sum())
    return f"{bad[0]} holds {count} NaN or infinite values of {first.numel()}{more}, expected finite weights"


def _finite(tensor: Tensor) -> bool:
    """Extremes are NaN where any value is, and cost a fortieth of isfinite. One-byte floats, which have none, are refused
    elsewhere.
    """
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())


def find_shape_problem(
    config: dict[str, Any], tensors: dict[str, Tensor], expect: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]]
) -> str:
    """What is wrong with the tensors' names and shapes, or an empty string."""
    try:
        expected = expect(config)
    except KeyError as error:
        return f"config.json lacks {error}"
    if set(expected) != set(tensors):
        return f"missing tensors {sorted(set(expected) - set(tensors))}, unknown {sorted(set(tensors) - set(expected))}"
    wrong = [n for n, s in expected.items() if tuple(tensors[n].shape) != s]
    return "; ".join(f"{n} is {tuple(tensors[n].shape)}, expected {expected[n]}" for n in wrong)


def find_draft_problem(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """What is wrong with a draft, or an empty string."""
    if wrong := find_shape_problem(config, tensors, list_tensor_shapes):
        return wrong
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return f"d2t is {d2t.dtype} and t2d {t2d.dtype}, expected int64 offsets and bool"
    if not torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(len(d2t))):
        return "d2t + arange does not list the tokens that t2d marks"
    return ""
