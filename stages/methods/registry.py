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


class TrainableMethod(NamedTuple):
    """Constructors and loss of a method's draft."""

    # config, head [V, H], d2t, t2d, seed, logits_scale
    initialise: Callable[[dict[str, Any], Tensor, Tensor, Tensor, int, float], nn.Module]
    build_uninitialised: Callable[[dict[str, Any], Tensor, float], nn.Module]  # config, head, logits_scale
    compute_loss: LossFunction
    predict_top_tokens: Callable[[Any, ttt.TrainingPack, Tensor, Tensor, int, int], list[Tensor]]


TRAINABLE_METHODS = {
    "eagle": TrainableMethod(
        lambda config, head, _d2t, _t2d, seed, scale: EagleDraft.initialise(
            DraftConfig.from_json(config), head, seed, scale
        ),
        lambda config, head, scale: EagleDraft(DraftConfig.from_json(config), head, scale),
        eagle.compute_loss,
        eagle.predict_top_tokens,
    ),
    "medusa": TrainableMethod(
        lambda config, head, d2t, t2d, _seed, scale: MedusaDraft.initialise(config, head, d2t, t2d, scale),
        lambda config, _head, _scale: MedusaDraft(config),
        medusa.compute_loss,
        medusa.predict_top_tokens,
    ),
}


def build_draft(config: dict[str, Any], tensors: dict[str, Tensor], head: Tensor, logits_scale: float) -> Any:
    """Return a draft from a checkpoint's config.json and tensors, and the target's head with the scale of its logits."""
    draft = TRAINABLE_METHODS[config["method"]].build_uninitialised(config, head, logits_scale)
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
