"""The interface of the stages that read and write drafts to a family of drafts: config.json and weights, published drafts.

Letters: V vocabulary, H hidden.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.draft import checkpoint
from stages.draft.published_files import PublishedDraft
from stages.params import schema
from stages.params.draft_sections import ImportedCheckpoint
from stages.params.families import DraftFamily, DraftKind
from stages.target.manifest import TargetManifest


@dataclass(frozen=True)
class LoadedDraft:
    """A draft of any family."""

    family: DraftFamily
    module: nn.Module  # without parameters where the family has no weights
    config: dict[str, Any]  # config.json
    feature_layers: list[int]  # of the target, that it reads

    def freeze(self, device: str | torch.device, dtype: torch.dtype) -> "LoadedDraft":
        """Return the draft on a device, without gradients."""
        module = self.module.to(device, dtype).requires_grad_(False)
        return LoadedDraft(self.family, module, self.config, self.feature_layers)


class DraftFiles(ABC):
    """The files of a family's drafts."""

    def __init__(self, facts: DraftFamily):
        self.facts = facts

    def find_problem(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
        """Describe missing keys, wrong names or shapes of a draft, or return an empty string."""
        try:
            expected = checkpoint.list_shapes(lambda: self.build_module(config, torch.empty(0), 1.0))
        except KeyError as error:
            return f"config.json lacks {error}"
        except (ValueError, RuntimeError) as error:  # of sizes whose product is beyond any memory
            return str(error)
        return checkpoint.find_shape_problem(tensors, expected)

    @abstractmethod
    def build_module(self, config: dict[str, Any], head: Tensor, logits_scale: float) -> nn.Module:
        """Return a draft without weights; head [V, H] and the scale of its logits are the target's."""

    def list_feature_layers(self, config: dict[str, Any], target: TargetManifest) -> list[int]:
        """Return the feature layers of the target that the draft reads: all that are stored."""
        return target.feature_layers

    def describe(self, config: dict[str, Any]) -> DraftKind:
        """Return what of a draft's sizes decides which shapes it drafts."""
        return DraftKind(self.facts)

    def read_checked(self, folder: Path, made_by: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and the tensors of `folder`/draft.

        Raises BrokenArtifactError, a ValueError that names what is missing, unknown or misshapen.
        """
        return checkpoint.read_draft(folder, made_by, f"{self.facts.title} draft", self.find_problem)

    def read(self, folder: Path, made_by: str, target: TargetManifest, head: Tensor) -> LoadedDraft:
        """Return the draft of `folder`/draft in float32 on the CPU; `head` [V, H] is the target's. Raises as `read_checked`."""
        config, tensors = self.read_checked(folder, made_by)
        module = self.build_module(config, head, target.logits_scale)
        module.load_state_dict(tensors)
        return LoadedDraft(self.facts, module, config, self.list_feature_layers(config, target))

    def write(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write `folder`/draft atomically. Raises AssertionError for what an engine would misread."""
        checkpoint.write_draft(folder, config, tensors, self.find_problem)

    def read_published(
        self, folder: Path, item: ImportedCheckpoint, params: schema.Params, target: TargetManifest
    ) -> PublishedDraft:
        """Return a published draft as engines interpret it. Raises ValueError for one that can't be run, or of another target."""
        raise AssertionError(f"no draft of {self.facts.title} is imported")
