"""P-EAGLE's files, and published drafts of both known forms, read into ours:

    AWS (amazon/gpt-oss-120b-p-eagle)    flat, ptd_token_id                          midlayer.*, layers.1.*, mask_hidden [1, 3H]
    speculators                          speculators_model_type, mask_token_id       layers.0.*, mask_hidden [1, 1, 3H]

Ours is the first, which vLLM loads with `method: eagle3, parallel_drafting: true`; speculators' form it maps to the same
(transformers_utils/configs/speculators/algos.py, update_peagle), whose default of norm_before_residual is false here. Trainers of
both train a copy of the target's embedding, which is kept where it differs. NVIDIA's Automodel writes pard_token.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from stages.draft import published_files
from stages.draft.published_files import PublishedDraft, ReadEmbeddingAndHead
from stages.families.block import mask_token
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.eagle3 import files as eagle3_files
from stages.families.eagle3.files import REQUIRED_VALUES
from stages.families.peagle.model import MASK_TOKEN_KEY, PEagleConfig, PEagleDraft
from stages.params import schema
from stages.params.draft_sections import ImportedCheckpoint
from stages.target.manifest import TargetManifest

MASK_TOKEN_KEYS = (MASK_TOKEN_KEY, "mask_token_id", "pard_token")
EMBEDDING = "embed_tokens.weight"


def build_peagle_config(c: PEagleConfig, *args: Any) -> dict[str, Any]:
    """Return config.json; the other arguments are those of `build_eagle3_config`."""
    own = {key: getattr(c, key) for key in ("num_hidden_layers", MASK_TOKEN_KEY)}
    return eagle3_checkpoint.build_eagle3_config(c, *args) | own


class Files(eagle3_files.Files):
    """P-EAGLE drafts."""

    config_type, draft_type = PEagleConfig, PEagleDraft
    published_defaults = MappingProxyType[str, Any]({})
    required_values = MappingProxyType({key: x for key, x in REQUIRED_VALUES.items() if key != "num_hidden_layers"})

    def list_feature_layers(self, config: dict[str, Any], target: TargetManifest) -> list[int]:
        """Raise ValueError for a target of images, whose embeddings vLLM gives no draft of the kind."""
        if target.modality != "text":
            raise ValueError(
                f"{self.facts.title} drafts for targets of text alone, expected one, and {target.model} reads images"
            )
        return super().list_feature_layers(config, target)

    def read_published(
        self, folder: Path, item: ImportedCheckpoint, params: schema.Params, target: TargetManifest
    ) -> PublishedDraft:
        """Compare the draft's mask token with the target's tokenizer, too."""
        found, tokenizer = (
            super().read_published(folder, item, params, target),
            mask_token.load_tokenizer(params, target),
        )
        with published_files.name_config(folder):
            note = mask_token.check_published_mask_token(found.config[MASK_TOKEN_KEY], tokenizer, target)
        return replace(found, notes=[*found.notes, *filter(None, [note])])

    def read_more(
        self, raw: dict[str, Any], tensors: dict[str, Tensor], read_tables: ReadEmbeddingAndHead, notes: list[str]
    ) -> dict[str, Any]:
        """Give the tensors the names and shapes of ours. Raises ValueError for no mask token, and for several."""
        found = {raw[key] for key in MASK_TOKEN_KEYS if raw.get(key) is not None}
        if len(found) != 1:
            raise ValueError(f"mask tokens {sorted(found)}, expected one, as {' or '.join(MASK_TOKEN_KEYS)}")
        num_layers = raw.get("num_hidden_layers") or 1
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
        for i in range(1, num_layers):  # vLLM makes this norm in every layer, and uses that of the first
            tensors.pop(f"layers.{i}.hidden_norm.weight", None)
        more: dict[str, Any] = {"num_hidden_layers": num_layers, MASK_TOKEN_KEY: found.pop()}
        if raw.get("norm_output"):
            notes.append("norm_output is true, without effect where no step follows another")
            more["norm_output"] = False
        if (own := tensors.get(EMBEDDING)) is not None:
            target = read_tables()[0]
            more["own_embedding"] = own.shape == target.shape and not torch.equal(
                own.float(), target.to(own.dtype).float()
            )
        return more
