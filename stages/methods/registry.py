"""What train_draft learns beside EAGLE-3's draft: EAGLE's layer and Medusa's heads, by name.

Letters: L steps (EAGLE's chain, Medusa's heads), P taught positions, V vocabulary, H hidden.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftConfig
from stages.methods import eagle, medusa
from stages.methods.eagle import Eagle
from stages.methods.medusa import Medusa
from stages.training import ttt

RANKS = 10  # guesses of a step whose accuracy is measured, as Medusa's authors do

Forward = Callable[[Any, ttt.Pack, Tensor, Tensor, ttt.Objective, Tensor | None], ttt.Result]


class Rival(NamedTuple):
    fresh: Callable[[dict[str, Any], Tensor, Tensor, Tensor, int], nn.Module]  # config, head [V, H], d2t, t2d, seed
    bare: Callable[[dict[str, Any], Tensor], nn.Module]  # config, head: whatever its weights are
    forward: Forward
    guesses: Callable[[Any, ttt.Pack, Tensor, Tensor, int, int], list[Tensor]]


RIVALS = {
    "eagle": Rival(
        lambda config, head, _d2t, _t2d, seed: Eagle.fresh(DraftConfig.from_json(config), head, seed),
        lambda config, head: Eagle(DraftConfig.from_json(config), head),
        eagle.forward,
        eagle.guesses,
    ),
    "medusa": Rival(
        lambda config, head, d2t, t2d, _seed: Medusa.fresh(config, head, d2t, t2d),
        lambda config, _head: Medusa(config),
        medusa.forward,
        medusa.guesses,
    ),
}


def of(config: dict[str, Any], tensors: dict[str, Tensor], head: Tensor) -> Any:
    """From a checkpoint's config.json and tensors, and the target's head."""
    made = RIVALS[config["method"]].bare(config, head)
    made.load_state_dict(tensors)
    return made


def most_steps(config: dict[str, Any], ttt_steps: int) -> int:
    """How deep its guesses can be measured: EAGLE's as deep as EAGLE-3's are taught."""
    return config["heads"] if config["method"] == "medusa" else ttt_steps


@torch.no_grad()
def rank_accuracy(
    config: dict[str, Any], module: Any, packs: Iterable[ttt.Pack], embedding: Tensor, head: Tensor, steps: int
) -> list[list[float]]:
    """How often each of the best guesses of each step is the row's own token: [L][ranks]; packs are of `steps` steps."""
    count = min(RANKS, config["draft_vocab_size"])
    hits, taught = torch.zeros(steps, count, dtype=torch.float64), torch.zeros(steps, 1, dtype=torch.float64)
    for pack in packs:
        if not pack.chunks:
            continue
        found = RIVALS[config["method"]].guesses(module, pack, embedding, head, steps, count)
        for k, ids in enumerate(found):  # [P_k, count]
            said = pack.ids[pack.asked[: len(ids)] + 2 + k]
            hits[k] += (ids == said[:, None]).sum(0).double().cpu()
            taught[k] += len(ids)
    return (hits / taught.clamp(min=1)).tolist()
