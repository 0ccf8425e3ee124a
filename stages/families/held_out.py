"""How a draft in training does on answers that it does not learn: those of the eval split, at temperature 0.

Accuracy in training does not tell what decoding accepts (docs/training.md). So after each epoch the draft's weights are scored
on answers kept out: loss and accuracy by the objective that trains it, and by replay (families/draft_replay.py) the tokens that a
verify cycle commits with a chain of three drafts, as replay_trees computes them. Nothing is learned from these answers, so their
code and their rows are no input of train_draft; only `keep: best` looks at the scores.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stages.data import row_lengths
from stages.families import registry
from stages.families.draft_files import LoadedDraft
from stages.hidden_states.format import HiddenStatesRow
from stages.hidden_states.reader import EVAL_FOLDER, HiddenStatesReader
from stages.params.tree_shape import SGLANG_SCORING, TreeShape
from stages.replay.replay import ReplayBatch
from stages.target.manifest import TargetManifest
from stages.training.packed_rows import PackIndex
from stages.training.trainer import HeldOutScores, Trainer

CHAIN_STEPS = 3  # the shape in which drafts are compared, t3_1_4
MOST_TOKENS = 1 << 16  # of answers and prompts: some seconds
REPLAY_MEMORY = 1 << 30  # bytes


class HeldOutAnswers:
    """Answers of the eval split, and a draft that takes each epoch's weights."""

    def __init__(self, draft: LoadedDraft, trainer: Trainer, target: TargetManifest, layer_indices: Sequence[int]):
        """`draft` has a copy of the module that the trainer trains, which it may shard."""
        reader = HiddenStatesReader(EVAL_FOLDER, layer_indices)
        every = max(1, math.ceil(sum(reader.lengths) / MOST_TOKENS))
        rows = (reader.read_row(i, trainer.dtype) for i in range(0, len(reader), every))
        numbers = (replace(r, features=r.features.to(trainer.dtype), last=r.last.to(trainer.dtype)) for r in rows)
        self._rows = sorted(numbers, key=lambda row: len(row.ids))
        self._trainer, self._target = trainer, target
        self._draft = replace(draft, module=draft.module.to(trainer.ranks.device, trainer.dtype))

    def score(self, weights: dict[str, Tensor]) -> HeldOutScores:
        """Return the scores of the draft with these weights, those of `Trainer.gather_state`."""
        self._draft.module.load_state_dict(weights)
        loss, accuracy = self._compute_loss()
        return HeldOutScores(loss, accuracy, self._replay_chain(), len(self._rows))

    def _compute_loss(self) -> tuple[float, float]:
        """Return the loss, and how often the first step's argmax is the label.

        Gradients are on, though none is taken: without them a GPU would compile every function once more.
        """
        objective, device = self._trainer.objective, self._trainer.ranks.device
        totals = torch.zeros(3, objective.num_steps, dtype=torch.float64, device=device)
        for index, rows in enumerate(_split_rows(self._rows, self._trainer.settings.batch_tokens or MOST_TOKENS)):
            pack = objective.build_pack(rows, PackIndex(0, index, 0), pinned=False).to(device)
            counts = pack.count_supervised()
            found = self._trainer.training_step.compute_loss(
                self._draft.module, pack, *self._trainer.training_step.tables, objective, counts
            )
            totals += torch.stack(
                [found.loss_per_step.detach().double(), found.argmax_matches.sum(1).double(), counts.double()]
            )
        loss, matches, counts = totals.cpu()
        step_loss = (loss / counts.clamp(min=1)).tolist()
        return objective.combine_losses(step_loss, counts.tolist()), float(matches[0] / counts[0].clamp(min=1))

    @torch.inference_mode()
    def _replay_chain(self) -> float | None:
        """Return tau of a chain of three drafts, of fewer where a block has fewer; None of a family that is not replayed."""
        if (build_replay := registry.get(self._draft.family).build_replay) is None:
            return None
        replayed = build_replay(self._draft, *self._trainer.training_step.tables, self._target, SGLANG_SCORING)
        steps = min(CHAIN_STEPS, replayed.most_steps or CHAIN_STEPS)
        trees = [TreeShape(steps, 1, steps + 1)]
        capacity = replayed.compute_capacity(trees, REPLAY_MEMORY)
        accepted, cycles = 0, 0
        for rows in _split_rows(self._rows, capacity.tokens):
            batch = ReplayBatch.collate(rows, self._trainer.ranks.device)
            found = replayed.replay(batch, trees, capacity.positions, [])
            accepted, cycles = accepted + int(found.accepted.sum()), cycles + int(found.cycles.sum())
        return (accepted + cycles) / max(1, cycles)


def _split_rows(rows: list[HiddenStatesRow], tokens: int) -> list[list[HiddenStatesRow]]:
    """Split rows of ascending lengths into batches of at most so many tokens, padding included, or of one row."""
    return [rows[batch] for batch in row_lengths.split_ascending([len(row.ids) for row in rows], tokens)]
