"""The size of a target by its config.json, counted without a GPU or its weights."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from stages.draft import supported_targets
from stages.params import schema
from stages.params.recipe import RECIPES_FOLDER
from stages.params.target_sections import Target
from stages.runtime import guarded_files
from stages.target import foreign_files, gguf_target, loading
from stages.target.manifest import TargetManifest

TARGETS_FOLDER = RECIPES_FOLDER / "targets"


@dataclass(frozen=True)
class TargetSize:
    """Numbers of parameters of a target, by its recorded config."""

    manifest: TargetManifest
    recorded_from: str
    parameters: int
    active: int  # those that one token meets: of a mixture's experts as many as it is sent to
    blocks: int  # active ones in the language model's blocks
    all_blocks: int  # those of the blocks, met or not
    mixture: bool

    def kv_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        m = self.manifest
        return 2 * m.num_layers * m.num_key_value_heads * m.head_dim * get_itemsize(dtype)


def read_target_size(p: schema.Params) -> TargetSize:
    """Return the target's size. Raises ValueError where no config of the target is here."""
    with foreign_files.refuse_unreadable(p.target.model, "a config by which transformers builds its class"):
        config, source = _find_config(p.target)
        if p.target.is_gguf:
            supported_targets.check_target_config(p, config)
        manifest = supported_targets.describe_target(
            p.target.model, p.target.revision, config, TARGETS_FOLDER, p.target.feature_layers
        )
        return TargetSize(manifest, source, *_count_parameters(config))


def _find_config(target: Target) -> tuple[PretrainedConfig, str]:
    """Return the config of recipes/targets/, of the target's own folder, or of the Hugging Face cache, and its origin."""
    model = target.model
    path = TARGETS_FOLDER / f"{model.rstrip('/').rsplit('/', 1)[-1]}.json"
    if path.is_file():
        recorded = guarded_files.read_json(path, f"restore it: git checkout {path}", root=path.parent)
        return CONFIG_MAPPING[recorded["config"]["model_type"]].from_dict(recorded["config"]), recorded["recorded_from"]
    if target.is_gguf and Path(model).is_file():
        return gguf_target.read_gguf_target(Path(model)).model.config, "its own metadata"
    own = target.find_file("config.json")
    if own and guarded_files.read_json(own, foreign_files.REMEDY).get("model_type") in CONFIG_MAPPING:
        return foreign_files.read_config(own.parent), "its own config.json"
    known = ", ".join(sorted(file.stem for file in TARGETS_FOLDER.glob("*.json")))
    raise ValueError(
        f"{path} not found, expected a config.json of {model}, as {known}; run: hf download {model} config.json"
    )


def _count_parameters(config: PretrainedConfig) -> tuple[int, int, int, int, bool]:
    """Return (all, active, active in blocks, all in blocks, whether it has experts), counted on the meta device."""
    with torch.device("meta"):
        model = loading.select_auto_class(config).from_config(config)
    text = config.get_text_config()
    experts = getattr(text, "num_experts", None)
    share = text.num_experts_per_tok / experts if experts else 1.0
    total = active = blocks = all_blocks = 0
    for name, parameter in model.named_parameters():
        met = round(parameter.numel() * (share if ".experts." in name else 1.0))
        total, active = total + parameter.numel(), active + met
        if ".layers." in name and "visual" not in name:
            blocks, all_blocks = blocks + met, all_blocks + parameter.numel()
    return total, active, blocks, all_blocks, bool(experts)


def get_itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def format_count(parameters: int) -> str:
    """Return the count with three digits: 8.19e9."""
    unit = next((unit for unit in (1e9, 1e6) if parameters >= unit), 1e3)
    return f"{parameters / unit:.3g}e{round(math.log10(unit))}"
