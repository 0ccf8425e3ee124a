"""Sizes and options of an EAGLE-3 draft, apart from the model: files need these, and no tensors."""

from dataclasses import dataclass, fields
from typing import Any

from stages.draft.config_types import check_types

SIZE_KEYS = (  # keys of config.json that give the sizes of the layer
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
REQUIRED_KEYS = (*SIZE_KEYS, "model_type", "rope_parameters")


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and options of the draft layer. `eagle3_checkpoint` writes them into config.json."""

    hidden_size: int  # H, the target's
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V
    draft_vocab_size: int  # D
    max_position_embeddings: int
    rms_norm_eps: float
    rope: dict[str, Any]  # the target's rope_parameters: rope_theta, rope_type, ...
    # Options, by the engines' names; config.json lists those that are on.
    fc_norm: bool = False  # EAGLE-3.1: RMSNorm of each feature layer before fc
    norm_before_fc: bool = False  # one RMSNorm of the three concatenated features
    norm_output: bool = False  # EAGLE-3.1: the recurrent state is the output after the final norm
    norm_before_residual: bool = False  # the residual is the normed hidden state (speculators' drafts)
    qk_norm: bool = False  # RMSNorm of queries and keys per head, as in Qwen3
    sliding_window: int | None = None  # W

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "DraftConfig":
        """Return the fields found in a draft's config.json; its other keys are ignored.

        Raises ValueError for a missing key and a wrong value.
        """
        check_types(config)
        if missing := [key for key in REQUIRED_KEYS if config.get(key) is None]:
            raise ValueError(f"config.json lacks {missing[0]!r}")
        values = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        return cls(**values, rope=config["rope_parameters"], qk_norm=config["model_type"] == "qwen3")
