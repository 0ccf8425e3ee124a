"""EAGLE-3's files; the model is draft/eagle3.py."""

from pathlib import Path
from typing import Any

from torch import Tensor

from stages.draft import eagle3_checkpoint, published_eagle3_formats
from stages.draft.eagle3 import Eagle3Draft
from stages.draft.published_files import PublishedDraft
from stages.families.family import DraftFiles, LoadedDraft
from stages.params import schema
from stages.params.draft_sections import ImportedCheckpoint
from stages.target import manifest
from stages.target.manifest import TargetManifest


class Files(DraftFiles):
    """EAGLE-3 drafts; e000, from which every family starts, is one (init_draft)."""

    def read(self, folder: Path, made_by: str, target: TargetManifest, head: Tensor) -> LoadedDraft:
        config, tensors = eagle3_checkpoint.read_eagle3_draft(folder, made_by)
        layers = eagle3_checkpoint.read_feature_layers(config, target.num_layers)
        return LoadedDraft(self.facts, Eagle3Draft.from_checkpoint(config, tensors), config, layers)

    def read_config(self, folder: Path, made_by: str) -> dict[str, Any]:
        return eagle3_checkpoint.read_eagle3_draft(folder, made_by)[0]

    def write(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        eagle3_checkpoint.write_eagle3_draft(folder, config, tensors)

    def read_published(
        self, folder: Path, item: ImportedCheckpoint, params: schema.Params, target: TargetManifest
    ) -> PublishedDraft:
        return published_eagle3_formats.read_published_draft(
            folder, target, lambda: manifest.read_embedding_and_head(target), item.model, item.rope_theta
        )
