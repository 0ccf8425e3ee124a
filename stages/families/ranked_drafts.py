"""EAGLE and Medusa: drafts whose static trees are chosen by the measured accuracy of each guess.

A checkpoint is `draft/` with config.json and model.safetensors, and `state/` as of EAGLE-3. config.json has the method, the
shapes, and `rank_accuracy[step][rank]`: the frequency with which that guess of that step was the row's own token, on training
rows; static trees are chosen by it. EAGLE's tensors have the names of the authors' drafts except for the layer (`midlayer`, as
EAGLE-3's); loading them in serving engines is untested.

Letters: L steps (EAGLE's chain, Medusa's heads), P supervised positions, V vocabulary, H hidden.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftConfig
from stages.families.draft_files import DraftFiles, LoadedDraft
from stages.families.draft_training import DraftTraining
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.static_tree import StaticTree, select_best_branches
from stages.hidden_states.reader import HiddenStatesReader
from stages.params import schema
from stages.params.families import Segment
from stages.params.tree_shape import TreeShape
from stages.runtime import distributed
from stages.target.manifest import TargetManifest
from stages.training import ttt
from stages.training.packs import PackLoader, plan_epoch
from stages.training.trainer import Trainer

MAX_MEASURED_RANKS = 10  # guesses of a step whose accuracy is measured, as in Medusa's code
MAX_MEASURED_PACKS = 64


class RankedTraining(DraftTraining):
    """The training of such a family."""

    files: type[DraftFiles]
    # (draft, pack, embedding, head, steps, count) -> each step's `count` likeliest ids [P_k, count], given the row's own tokens
    predict_top_tokens: Callable[[Any, ttt.TrainingPack, Tensor, Tensor, int, int], list[Tensor]]

    @abstractmethod
    def build_config(self, segment: Segment, sizes: DraftConfig, dtype: str) -> dict[str, Any]:
        """Return config.json of an untrained draft with the sizes of e000."""

    @abstractmethod
    def draw_module(
        self, config: dict[str, Any], head: Tensor, root: dict[str, Tensor], seed: int, scale: float
    ) -> nn.Module:
        """Return an untrained draft; `root` are the tensors of e000."""

    def initialise(self, name: str, params: schema.Params, target: TargetManifest, head: Tensor) -> LoadedDraft:
        """The sizes and the vocabulary are those of e000."""
        config, root = eagle3_checkpoint.read_root_draft()
        settings = params.train_draft
        config = self.build_config(settings.checkpoints[name], DraftConfig.from_json(config), settings.compute_dtype)
        module = self.draw_module(config, head, root, settings.seed, target.logits_scale)
        return LoadedDraft(self.facts, module, config, target.feature_layers)

    def complete_config(
        self, draft: LoadedDraft, weights: dict[str, Tensor], trainer: Trainer, rows: HiddenStatesReader
    ) -> dict[str, Any]:
        """Measure on one process how often each rank of each step is the row's own token."""
        settings, device = trainer.settings, trainer.ranks.device
        num_steps = draft.config.get("heads", settings.ttt_steps)  # of an EAGLE, the steps that EAGLE-3 trains
        embedding, head = trainer.training_step.tables
        module = self.files(self.facts).build_module(draft.config, head, 1.0)  # a scale moves no rank
        module.load_state_dict(weights)
        plan = [[pack] for step in plan_epoch(rows.lengths, settings, 0) for pack in step][:MAX_MEASURED_PACKS]
        objective = ttt.TrainingObjective(num_steps, settings.ttt_decay)
        ranks = distributed.RankContext(0, 1, device)
        loader = PackLoader(rows, objective, ranks, trainer.dtype, trainer.online_packs)
        packs = (trainer.fill_hidden_states(pack) for step in loader.load_steps([(0, plan)]) for pack in step.packs)
        accuracy = self.measure_rank_accuracy(draft.config, module.to(device), packs, embedding, head, num_steps)
        return draft.config | {"rank_accuracy": accuracy}

    @torch.no_grad()
    def measure_rank_accuracy(
        self,
        config: dict[str, Any],
        module: Any,
        packs: Iterable[ttt.TrainingPack],
        embedding: Tensor,
        head: Tensor,
        steps: int,
    ) -> list[list[float]]:
        """Return the frequency [L][ranks] with which each guess of each step is the row's own token."""
        count = min(MAX_MEASURED_RANKS, config["draft_vocab_size"])
        hits, counts = torch.zeros(steps, count, dtype=torch.float64), torch.zeros(steps, 1, dtype=torch.float64)
        for pack in packs:
            if not pack.chunks:
                continue
            found = self.predict_top_tokens(module, pack, embedding, head, steps, count)
            for k, ids in enumerate(found):  # [P_k, count]
                labels = pack.ids[pack.query_tokens[: len(ids)] + 2 + k]
                hits[k] += (ids == labels[:, None]).sum(0).double().cpu()
                counts[k] += len(ids)
        return (hits / counts.clamp(min=1)).tolist()


def list_shared_config(method: str, sizes: DraftConfig, dtype: str) -> dict[str, Any]:
    """Return the keys of config.json that both families have."""
    shared = {"method": method, "hidden_size": sizes.hidden_size, "vocab_size": sizes.vocab_size}
    return shared | {"dtype": dtype, "rank_accuracy": None}


def build_static_tree(shape: TreeShape, accuracy: list[list[float]], title: str, device: torch.device) -> StaticTree:
    """Return the best tree by a draft's rank accuracy. Raises ValueError where that was measured less deep."""
    if shape.num_steps > len(accuracy):
        raise ValueError(
            f"{shape.name} is {shape.num_steps} deep, but this {title} draft was measured {len(accuracy)} deep, expected no more "
            "(Medusa: its heads; EAGLE: train_draft.ttt_steps); take a shallower tree"
        )
    branches = select_best_branches(accuracy[: shape.num_steps], shape.num_draft_tokens - 1)
    return StaticTree.from_paths(branches, device)
