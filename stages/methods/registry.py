"""Registry of the methods that train_draft trains besides EAGLE-3 and block drafts: EAGLE and Medusa.

Letters: L steps (EAGLE's chain, Medusa's heads), P supervised positions, V vocabulary, H hidden.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stages.draft.eagle3_config import DraftConfig
from stages.methods import eagle, medusa
from stages.methods.eagle import EagleDraft
from stages.methods.medusa import MedusaDraft
from stages.training import ttt

MAX_MEASURED_RANKS = 10  # guesses of a step whose accuracy is measured, as in Medusa's code

LossFunction = Callable[[Any, ttt.TrainingPack, Tensor, Tensor, ttt.TrainingObjective, Tensor | None], ttt.LossOutput]


class DraftInputs(NamedTuple):
    """The inputs from which methods build their drafts; each method takes some of them."""

    config: dict[str, Any]  # of a checkpoint
    head: Tensor  # [V, H] the target's
    logits_scale: float  # of the target's class
    d2t: Tensor | None = None  # the draft vocabulary; this and the seed for new weights
    t2d: Tensor | None = None
    seed: int = 0


def _initialise_eagle(inputs: DraftInputs) -> EagleDraft:
    return EagleDraft.initialise(DraftConfig.from_json(inputs.config), inputs.head, inputs.seed, inputs.logits_scale)


def _build_eagle(inputs: DraftInputs) -> EagleDraft:
    return EagleDraft(DraftConfig.from_json(inputs.config), inputs.head, inputs.logits_scale)


def _initialise_medusa(inputs: DraftInputs) -> MedusaDraft:
    assert inputs.d2t is not None and inputs.t2d is not None
    return MedusaDraft.initialise(inputs.config, inputs.head, inputs.d2t, inputs.t2d, inputs.logits_scale)


def _build_medusa(inputs: DraftInputs) -> MedusaDraft:
    return MedusaDraft(inputs.config)


class TrainableMethod(NamedTuple):
    """Constructors and loss of a method's draft."""

    initialise: Callable[[DraftInputs], nn.Module]
    build_uninitialised: Callable[[DraftInputs], nn.Module]
    compute_loss: LossFunction
    predict_top_tokens: Callable[[Any, ttt.TrainingPack, Tensor, Tensor, int, int], list[Tensor]]


TRAINABLE_METHODS = {
    "eagle": TrainableMethod(_initialise_eagle, _build_eagle, eagle.compute_loss, eagle.predict_top_tokens),
    "medusa": TrainableMethod(_initialise_medusa, _build_medusa, medusa.compute_loss, medusa.predict_top_tokens),
}


def build_draft(config: dict[str, Any], tensors: dict[str, Tensor], head: Tensor, logits_scale: float) -> Any:
    """Return a draft from a checkpoint's config.json and tensors, and the target's head with the scale of its logits."""
    draft = TRAINABLE_METHODS[config["method"]].build_uninitialised(DraftInputs(config, head, logits_scale))
    draft.load_state_dict(tensors)
    return draft


def get_max_steps(config: dict[str, Any], ttt_steps: int) -> int:
    """Return how many steps of guesses can be measured: Medusa's heads, or for EAGLE the steps that EAGLE-3 trains."""
    return config["heads"] if config["method"] == "medusa" else ttt_steps


@torch.no_grad()
def measure_rank_accuracy(
    config: dict[str, Any], module: Any, packs: Iterable[ttt.TrainingPack], embedding: Tensor, head: Tensor, steps: int
) -> list[list[float]]:
    """Return the frequency [L][ranks] with which each guess of each step is the row's own token; packs have `steps` steps."""
    count = min(MAX_MEASURED_RANKS, config["draft_vocab_size"])
    hits, counts = torch.zeros(steps, count, dtype=torch.float64), torch.zeros(steps, 1, dtype=torch.float64)
    for pack in packs:
        if not pack.chunks:
            continue
        found = TRAINABLE_METHODS[config["method"]].predict_top_tokens(module, pack, embedding, head, steps, count)
        for k, ids in enumerate(found):  # [P_k, count]
            labels = pack.ids[pack.query_tokens[: len(ids)] + 2 + k]
            hits[k] += (ids == labels[:, None]).sum(0).double().cpu()
            counts[k] += len(ids)
    return (hits / counts.clamp(min=1)).tolist()
