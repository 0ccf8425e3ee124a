"""Costs that could be true, for tests: grids whose times are a known sum of terms, with noise where it is asked for."""

import random
from typing import Any

from stages.cells import cost_fit, timing_grid
from stages.cells.timing_grid import CycleTime, TimingGrid
from stages.params.tree_sections import TimeCycles
from stages.params.tree_shape import TreeShape

TRUTH = {"cycle": 3.0e-3, "step": 0.6e-3, "row": 0.02e-3, "token": 0.05e-3, "sequence": 0.0}  # seconds
PLAIN_S = 2.4e-3
HARDWARE = {"cpu": "Made-up CPU, 2 cores", "system": "Linux", "python": "3.11.9"}  # as of made_up_results' cells
TREES = TimeCycles(
    engines=["torch"], workload="eval", checkpoints=["e000"],
    num_steps=[1, 3, 6, 10], topk=[1, 2, 4], num_draft_tokens=[2, 4, 8, 16, 32, 64],
    context=128, warmup=1, cycles=2, repeats=5, batches=[1],
).list_trees()  # fmt: skip


def seconds(tree: TreeShape, batch: int = 1, truth: dict[str, float] = TRUTH) -> float:
    """A cycle's, told out row by row: of each draft step the first row is in the step's own time."""
    drafted = [batch] + [batch * tree.topk] * (tree.num_steps - 1)
    total = truth["cycle"] + truth["sequence"] * batch + truth["token"] * tree.num_draft_tokens * batch
    total += truth.get("tree", 0.0) * (tree.topk > 1)
    return total + sum(truth["step"] + truth["row"] * (rows - 1) for rows in drafted)


def grid(
    trees: list[TreeShape] = TREES, batches: tuple[int, ...] = (1,), noise: float = 0.0, truth: dict[str, float] = TRUTH
) -> list[CycleTime]:
    rng = random.Random(5)
    return [
        CycleTime(
            num_steps=tree.num_steps, topk=tree.topk, num_draft_tokens=tree.num_draft_tokens, batch=batch,
            cycle_s=seconds(tree, batch, truth) * (1 + rng.gauss(0, noise)), error=0.0, samples=10,
        )
        for batch in batches for tree in trees
    ]  # fmt: skip


def made_up(
    checkpoint: str = "e000", model: str = "builtin/weather-tiny", points: list[CycleTime] | None = None, **keys: Any
) -> TimingGrid:
    """Return a made-up timing grid of the torch engine; `keys` replace its fields."""
    points = grid() if points is None else points
    made = {
        "definitions": timing_grid.COST_DEFINITIONS, "engine": "torch", "workload": None, "max_new_tokens": None,
        "checkpoint": checkpoint, "draft": {"model_type": "llama", "draft_vocab_size": 320},
        "target": [model, None, "3f1c"],
        "settings": {"context": 128, "repeats": 5, "dtype": "float32", "tree_scoring": "sglang"},
        "plain": [{"batch": 1, "step_s": PLAIN_S, "error": 0.01, "samples": 10}], "grid": points,
        "fit": cost_fit.fit_cost_model(points), "hardware": HARDWARE, "versions": {"torch": "2.13.0"},
        "seconds": 5.1,
    }  # fmt: skip
    return TimingGrid.model_validate(made | keys)
