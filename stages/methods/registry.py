"""What train_draft learns beside EAGLE-3's draft: EAGLE's layer and Medusa's heads, by name.

Letters: L steps (EAGLE's chain, Medusa's heads), P taught positions, V vocabulary, H hidden.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftConfig
from stages.methods import eagle, medusa
from stages.methods.eagle import EagleDraft
from stages.methods.medusa import MedusaDraft
from stages.training import ttt

MAX_MEASURED_RANKS = 10  # guesses of a step whose accuracy is measured, as Medusa's authors do

LossFunction = Callable[[Any, ttt.TrainingPack, Tensor, Tensor, ttt.TrainingObjective, Tensor | None], ttt.LossOutput]


class TrainableMethod(NamedTuple):
    fresh: Callable[[dict[str, Any], Tensor, Tensor, Tensor, int], nn.Module]  # config, head [V, H], d2t, t2d, seed
    bare: Callable[[dict[str, Any], Tensor], nn.Module]  # config, head: whatever its weights are
    forward: LossFunction
    guesses: Callable[[Any, ttt.TrainingPack, Tensor, Tensor, int, int], list[Tensor]]


TRAINABLE_METHODS = {
    "eagle": TrainableMethod(
        lambda config, head, _d2t, _t2d, seed: EagleDraft.fresh(DraftConfig.from_json(config), head, seed),
        lambda config, head: EagleDraft(DraftConfig.from_json(config), head),
        eagle.compute_loss,
        eagle.predict_top_tokens,
    ),
    "medusa": TrainableMethod(
        lambda config, head, d2t, t2d, _seed: MedusaDraft.fresh(config, head, d2t, t2d),
        lambda config, _head: MedusaDraft(config),
        medusa.compute_loss,
        medusa.predict_top_tokens,
    ),
}


def build_draft(config: dict[str, Any], tensors: dict[str, Tensor], head: Tensor) -> Any:
    """From a checkpoint's config.json and tensors, and the target's head."""
    made = TRAINABLE_METHODS[config["method"]].bare(config, head)
    made.load_state_dict(tensors)
    return made


def get_max_steps(config: dict[str, Any], ttt_steps: int) -> int:
    """How deep its guesses can be measured: EAGLE's as deep as EAGLE-3's are taught."""
    return config["heads"] if config["method"] == "medusa" else ttt_steps


@torch.no_grad()
def measure_rank_accuracy(
    config: dict[str, Any], module: Any, packs: Iterable[ttt.TrainingPack], embedding: Tensor, head: Tensor, steps: int
) -> list[list[float]]:
    """How often each of the best guesses of each step is the row's own token: [L][ranks]; packs are of `steps` steps."""
    count = min(MAX_MEASURED_RANKS, config["draft_vocab_size"])
    hits, taught = torch.zeros(steps, count, dtype=torch.float64), torch.zeros(steps, 1, dtype=torch.float64)
    for pack in packs:
        if not pack.chunks:
            continue
        found = TRAINABLE_METHODS[config["method"]].guesses(module, pack, embedding, head, steps, count)
        for k, ids in enumerate(found):  # [P_k, count]
            said = pack.ids[pack.query_tokens[: len(ids)] + 2 + k]
            hits[k] += (ids == said[:, None]).sum(0).double().cpu()
            taught[k] += len(ids)
    return (hits / taught.clamp(min=1)).tolist()
