"""The interfaces of a family of drafts, by which stages read, train, check, import, decode and replay its drafts.

A family is an entry of stages/params/families.py and a module of this folder, which has what stages ask of it:

    Files            files      config.json and weights; published drafts
    Training         training   an untrained draft and its objective (draft_training.py)
    build_overfit    overfit    a draft that learns one row, for check_overfit (overfit_run.py)
    build_drafter    decoding   the draft beside its target in the torch engine (draft_decoding.py)
    build_replay     replay     the draft on stored hidden states (draft_replay.py)

A large family is a folder with a module for each part, named as in the second column. A stage imports a module only when it
meets such a draft, so that it is an input of the stages that run it and of no others: the decoding of no draft depends on a
loss.

Letters: V vocabulary, H hidden.
"""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from stages.draft import checkpoint
from stages.draft.published_files import PublishedDraft
from stages.params import families, schema
from stages.params.draft_sections import ImportedCheckpoint
from stages.params.families import DraftFamily, DraftKind
from stages.params.tree_shape import TreeShape
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

    @abstractmethod
    def read(self, folder: Path, made_by: str, target: TargetManifest, head: Tensor) -> LoadedDraft:
        """Return the draft of `folder`/draft in float32 on the CPU; `head` [V, H] is the target's.

        Raises BrokenArtifactError, a ValueError that names what is missing, unknown or misshapen.
        """

    @abstractmethod
    def read_config(self, folder: Path, made_by: str) -> dict[str, Any]:
        """Return config.json of `folder`/draft, all of whose files are checked. Raises as `read`."""

    @abstractmethod
    def write(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write `folder`/draft atomically. Raises AssertionError for what an engine would misread."""

    def describe(self, config: dict[str, Any]) -> DraftKind:
        """Return what of a draft's sizes decides which shapes it drafts."""
        return DraftKind(self.facts)

    def read_published(
        self, folder: Path, item: ImportedCheckpoint, params: schema.Params, target: TargetManifest
    ) -> PublishedDraft:
        """Return a published draft as engines interpret it. Raises ValueError for one that can't be run, or of another target."""
        raise AssertionError(f"no draft of {self.facts.title} is imported")


def get_part(facts: DraftFamily, part: str, name: str) -> Any:
    """Return what a family's module, or the one of a part of it, has by a name."""
    return getattr(importlib.import_module(f"stages.families.{facts.module.format(part)}"), name)


def get_files(facts: DraftFamily) -> DraftFiles:
    return cast(DraftFiles, get_part(facts, "files", "Files")(facts))


def find_family(folder: Path, made_by: str) -> DraftFamily:
    """Return the family of `folder`/draft by its config.json. Raises BrokenArtifactError where that is missing or broken."""
    return families.find_family(checkpoint.read_config(folder, made_by))


def load_draft(
    params: schema.Params, name: str, target: TargetManifest, head: Tensor, dtype: torch.dtype
) -> LoadedDraft:
    """Return a checkpoint's draft ready to decode or to be replayed, on the device of `head` [V, H].

    Raises as `DraftFiles.read`.
    """
    folder, made_by = checkpoint.locate_checkpoint(name), params.get_making_stage(name)
    files = get_files(find_family(folder, made_by))
    return files.read(folder, made_by, target, head).freeze(head.device, dtype)


def check_draft_fits(name: str, draft: LoadedDraft, model: str, embedding: Tensor) -> None:
    """Raise ValueError for a draft of a target with another vocabulary or width; embedding [V, H] is that of `model`."""
    sizes = draft.config["vocab_size"], draft.config["hidden_size"]
    if sizes != tuple(embedding.shape):
        raise ValueError(
            f"{name} is for a target of {sizes[0]} tokens and width {sizes[1]}, expected {model}'s {len(embedding)} and "
            f"{embedding.shape[1]}; train or import a draft for this target"
        )


def explain_unsupported(name: str, shape: TreeShape) -> str | None:
    """Return why a checkpoint's draft can't draft a shape, by its config.json alone; None if it can.

    None too where config.json is missing or broken, which loading the draft names.
    """
    try:
        config = checkpoint.read_config(checkpoint.locate_checkpoint(name), "train_draft")
        kind = get_files(families.find_family(config)).describe(config)
    except ValueError:
        return None
    return kind.explain_ungrown(shape)
