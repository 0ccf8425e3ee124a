"""A block draft's files."""

from pathlib import Path
from typing import Any

from torch import Tensor

from stages.draft import checkpoint
from stages.draft.published_files import PublishedDraft
from stages.families.block import published
from stages.families.block.config import find_block_draft_problem, parse_block_config
from stages.families.block.model import BlockDraft
from stages.families.family import DraftFiles, LoadedDraft
from stages.params import schema
from stages.params.draft_sections import ImportedCheckpoint
from stages.params.families import DraftKind
from stages.target import chat_template, manifest
from stages.target.manifest import TargetManifest


class Files(DraftFiles):
    """DFlash, DFlash2 and DSpark drafts."""

    def read(self, folder: Path, made_by: str, target: TargetManifest, head: Tensor) -> LoadedDraft:
        config, tensors = checkpoint.read_draft(folder, made_by, "block draft", find_block_draft_problem)
        draft = BlockDraft(parse_block_config(config))
        draft.load_state_dict(tensors)
        return LoadedDraft(self.facts, draft, config, list(draft.config.feature_layers))

    def read_config(self, folder: Path, made_by: str) -> dict[str, Any]:
        return checkpoint.read_draft(folder, made_by, "block draft", find_block_draft_problem)[0]

    def write(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        checkpoint.write_draft(folder, config, tensors, find_block_draft_problem)

    def describe(self, config: dict[str, Any]) -> DraftKind:
        parsed = parse_block_config(config)
        return DraftKind(self.facts, parsed.num_drafts, parsed.selector_top_k or None)

    def read_published(
        self, folder: Path, item: ImportedCheckpoint, params: schema.Params, target: TargetManifest
    ) -> PublishedDraft:
        """Compare the draft's mask token with the target's tokenizer, too."""
        tokenizer = chat_template.load_tokenizer(
            manifest.resolve_weights_folder(target), params.target.trust_remote_code, target.chat_template
        )
        return published.read_published_block_draft(
            folder, target, tokenizer, lambda: manifest.read_embedding_and_head(target), item.rope_theta
        )
