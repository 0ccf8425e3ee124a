"""The interface of the torch engine's stages to a family of drafts."""

from collections.abc import Callable
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from stages.engine.decode import Engine
from stages.engine.proposer import Drafter
from stages.families.family import LoadedDraft, check_draft_fits, get_part, load_draft
from stages.params import schema
from stages.params.tree_shape import SGLANG_SCORING
from stages.target.manifest import TargetManifest

# Of a family: (draft, the target's model, a key of draft_tree.TREE_SCORINGS) -> the draft beside its target.
BuildDrafter = Callable[[LoadedDraft, PreTrainedModel, str], Drafter]


def build_drafter(draft: LoadedDraft, model: PreTrainedModel, tree_scoring: str = SGLANG_SCORING) -> Drafter:
    """Return a draft beside its target. Raises ValueError where they don't fit each other."""
    name, num_blocks = f"this {draft.family.title} draft", len(model.get_decoder().layers)
    if "vocab_size" in draft.config:  # a family with weights
        check_draft_fits(name, draft, "the target", model.get_input_embeddings().weight)
    if max(draft.feature_layers, default=0) >= num_blocks:
        raise ValueError(
            f"{name} reads feature layers {draft.feature_layers}, expected ids below {num_blocks}, the target's blocks; take a "
            "draft that was trained for this target"
        )
    return cast(BuildDrafter, get_part(draft.family, "decoding", "build_drafter"))(draft, model, tree_scoring)


def build_engine(
    params: schema.Params, name: str, model: PreTrainedModel, target: TargetManifest, device: str, end_tokens: list[int]
) -> tuple[Engine, LoadedDraft]:
    """Return the engine of a loaded target with a checkpoint's draft on a device. Raises ValueError where they don't fit."""
    head: Tensor = model.get_output_embeddings().weight.to(device)
    draft = load_draft(params, name, target, head, model.dtype)
    drafter = build_drafter(draft, model, params.benchmark.tree_scoring)
    return Engine(model, end_tokens, drafter, target.logits_scale), draft
