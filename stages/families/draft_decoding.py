"""The interface of the torch engine's stages to a family of drafts."""

from torch import Tensor
from transformers import PreTrainedModel

from stages.engine.decode import Engine
from stages.engine.proposer import Drafter
from stages.families import registry
from stages.families.draft_files import LoadedDraft
from stages.families.family import check_draft_fits, load_draft
from stages.params import schema
from stages.params.tree_shape import SGLANG_SCORING
from stages.target.manifest import TargetManifest


def build_drafter(draft: LoadedDraft, model: PreTrainedModel, tree_scoring: str = SGLANG_SCORING) -> Drafter:
    """Return a draft beside its target. Raises ValueError where they don't fit each other."""
    name, num_blocks = f"this {draft.family.title} draft", len(model.get_decoder().layers)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if "vocab_size" in draft.config:  # a family with weights
        check_draft_fits(name, draft, "the target", embedding)
    if max(draft.feature_layers, default=0) >= num_blocks:
        raise ValueError(
            f"{name} reads feature layers {draft.feature_layers}, expected ids below {num_blocks}, the target's blocks; take a "
            "draft that was trained for this target"
        )
    return registry.get(draft.family).build_drafter(draft, embedding, head, tree_scoring)


def build_engine(
    params: schema.Params, name: str, model: PreTrainedModel, target: TargetManifest, device: str, end_tokens: list[int]
) -> tuple[Engine, LoadedDraft]:
    """Return the engine of a loaded target with a checkpoint's draft on a device. Raises ValueError where they don't fit."""
    head: Tensor = model.get_output_embeddings().weight.to(device)
    draft = load_draft(params, name, target, head, model.dtype)
    drafter = build_drafter(draft, model, params.benchmark.tree_scoring)
    return Engine(model, end_tokens, drafter, target.logits_scale), draft
