"""Checkpoints of EAGLE and Medusa: `draft/` with config.json and model.safetensors, `state/` as for EAGLE-3.

config.json has the method, the shapes, and `rank_accuracy[step][rank]`: the frequency with which that guess of that step was
the row's own token, on training rows; static trees are chosen by it. EAGLE's tensors have the names of the authors' drafts
except for the layer (`midlayer`, as EAGLE-3's); loading them in serving engines is untested.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from stages.draft import checkpoint
from stages.draft.eagle3_config import SIZE_KEYS, DraftConfig
from stages.runtime import atomic

CHECKPOINT_METHODS = ("eagle", "medusa")


def build_method_config(method: str, draft: DraftConfig, dtype: str, heads: int | None = None) -> dict[str, Any]:
    """Return the config.json of a new draft, with the shapes of an EAGLE-3 draft's, and for Medusa its vocabulary."""
    assert method in CHECKPOINT_METHODS, method
    shared = {"method": method, "hidden_size": draft.hidden_size, "vocab_size": draft.vocab_size}
    shared |= {"dtype": dtype, "rank_accuracy": None}
    if method == "medusa":
        return {**shared, "draft_vocab_size": draft.draft_vocab_size, "heads": heads}
    layer = {key: getattr(draft, key) for key in SIZE_KEYS if key not in shared}
    rope = {"rope_parameters": draft.rope, "model_type": "llama"}
    return {**shared, **layer, "draft_vocab_size": draft.vocab_size, **rope}


def list_method_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name."""
    h = config["hidden_size"]
    if config["method"] == "medusa":
        d, heads = config["draft_vocab_size"], range(config["heads"])
        blocks = {f"blocks.{k}.{name}": (h, h)[:axes] for k in heads for name, axes in (("weight", 2), ("bias", 1))}
        return {**blocks, **{f"outs.{k}.weight": (d, h) for k in heads}, "d2t": (d,), "t2d": (config["vocab_size"],)}
    q, kv = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    m = config["intermediate_size"]
    return {
        "fc.weight": (h, 2 * h),
        "fc.bias": (h,),
        "midlayer.self_attn.q_proj.weight": (q, h),
        "midlayer.self_attn.k_proj.weight": (kv, h),
        "midlayer.self_attn.v_proj.weight": (kv, h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.mlp.gate_proj.weight": (m, h),
        "midlayer.mlp.up_proj.weight": (m, h),
        "midlayer.mlp.down_proj.weight": (h, m),
    }


def find_method_draft_problem(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Describe missing keys, wrong names or shapes of a draft, or return an empty string."""
    try:
        expected = list_method_shapes(config)
    except KeyError as error:
        return f"config.json lacks {error}"
    return checkpoint.find_shape_problem(tensors, expected)


def write_method_draft(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    found = find_method_draft_problem(config, tensors) or checkpoint.find_nonfinite_values(tensors)
    assert not found, found
    with atomic.write_folder(folder / "draft") as temporary:
        atomic.write_json(temporary / "config.json", config)
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary / "model.safetensors")


def read_method_draft(folder: Path, method: str, made_by: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors. Raises ValueError where they are missing, of another method, or have wrong shapes."""
    config = atomic.read_json(folder / "draft" / "config.json", made_by)
    if (found := config.get("method", "eagle3")) != method:
        raise ValueError(f"{folder}/draft is of the method {found}, expected {method}; name a checkpoint of that")
    tensors = checkpoint.read_tensors(folder / "draft" / "model.safetensors", made_by)
    if wrong := find_method_draft_problem(config, tensors):
        raise atomic.BrokenArtifactError(
            f"{folder}/draft is no draft of {method}: {wrong}", atomic.format_rerun_hint(made_by)
        )
    return config, tensors
