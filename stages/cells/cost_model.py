"""The cost of a cycle as a sum of a few terms, fitted to a timing grid: docs/cost.md, version 6.

    cycle(tree, batch)                = cycle                         fixed: launches, the weights read once
                                      + tree        · (topk > 1)     building and masking a tree, which a chain does without
                                      + draft step  · num_steps      a draft's forward, however few rows
                                      + draft row   · rows of drafting beyond each step's first
                                      + verify row  · num_draft_tokens · batch
                                      + beyond      · rows of verifying beyond the knee, where computing outlasts reading
                                      + sequence    · batch          what each sequence costs: its keys and values, sampling
                                      + prefill     · passes that read prompts of other requests meanwhile
                                      + prompt      · prompts that they read

cost_fit.py fits the terms. This module does not import numpy, so that the table in the terminal appears at once.
"""

import math

from stages.cells import interval
from stages.cells.record import Record
from stages.params.tree_shape import TreeShape

# In the order in which a fit adds them; those below, which don't grow with a tree, are added to any number of these.
TREE_TERMS = ("cycle", "verify row", "draft step", "sequence", "draft row", "beyond")
BRANCH_TERM = "tree"
ARRIVAL_TERMS = (("prompt",), ("prefill",), ("prefill", "prompt"))


class PromptArrivals(Record):
    """Prompts of other requests that arrive while a request is decoded, in a closed loop of N requests at once, R in all.

    A request that ends is followed by another, but for the last N. An engine reads all prompts that wait in one pass, so the
    passes of a step are at most one. They are counted where the steps of each request are known; else, as in a prediction,
    they are those of a Poisson process while requests are followed.
    """

    per_step: float = 0.0  # prompts a cycle, or a plain step, over the whole answer
    followed: float = 0.0  # (R - N) / R, the share of requests that another one follows
    counted_passes: float | None = None  # that read prompts, per step (cycle_times.py)

    @property
    def passes(self) -> float:
        """Return the passes that read prompts, per step."""
        if self.counted_passes is not None:
            return self.counted_passes
        return self.followed * -math.expm1(-self.per_step / self.followed) if self.followed else 0.0

    def stretch(self, tau: float) -> "PromptArrivals":
        """Return arrivals per cycle, where these are per plain step: an answer has `tau` times fewer cycles than steps."""
        return PromptArrivals(per_step=self.per_step * tau, followed=self.followed)


class CostModel(Record):
    """Fitted terms."""

    seconds: dict[str, float]  # of a term, per unit; without terms that the grid can't determine
    knee: int | None  # rows of a verify pass; None without a knee
    left_out_s: list[float]  # each point of the grid, predicted by all others
    error: float  # of these predictions: root mean square, as a share
    error_max: float
    residual: float  # of the fitted points: root mean square, as a share

    @property
    def margin(self) -> float:
        """Return half of the 95% interval of a predicted cycle, as a share: Student's t over the points left out."""
        found = interval.compute_margin(self.error, len(self.left_out_s))
        assert found is not None, "a fit has at least cost_fit.MIN_POINTS points"
        return found

    def predict_cycle_s(self, tree: TreeShape, batch: int, arrivals: PromptArrivals | None = None) -> float:
        given = count_term_units(tree, batch, self.knee, arrivals or PromptArrivals())
        return sum(seconds * given[term] for term, seconds in self.seconds.items())


def count_term_units(tree: TreeShape, batch: int, knee: int | None, arrivals: PromptArrivals) -> dict[str, float]:
    """Return how many units of each term a cycle has. The first draft step has one row a sequence, each later one topk."""
    verified = tree.num_draft_tokens * batch
    return {
        "cycle": 1,
        "tree": int(tree.topk > 1),
        "verify row": verified,
        "draft step": tree.num_steps,
        "sequence": batch,
        "draft row": (tree.num_steps - 1) * (tree.topk * batch - 1) + batch - 1,
        "beyond": 0 if knee is None else max(0, verified - knee),
        "prefill": arrivals.passes,
        "prompt": arrivals.per_step,
    }
