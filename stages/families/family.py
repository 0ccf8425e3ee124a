"""A checkpoint's draft, of whichever family its config.json names.

Letters: V vocabulary, H hidden.
"""

from pathlib import Path

import torch
from torch import Tensor

from stages.draft import checkpoint
from stages.families import registry
from stages.families.draft_files import DraftFiles, LoadedDraft
from stages.params import families, schema
from stages.params.families import DraftFamily
from stages.params.tree_shape import TreeShape
from stages.target.manifest import TargetManifest


def get_files(facts: DraftFamily) -> DraftFiles:
    return registry.get(facts).files


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
