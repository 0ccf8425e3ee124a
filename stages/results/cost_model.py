"""The cost of a cycle as a sum of a few terms, fitted to a timing grid: docs/cost.md, version 2.

    cycle(steps, topk, tokens, batch) = cycle                         fixed: launches, the weights read once
                                      + draft step  · steps          a draft's forward, however few rows
                                      + draft row   · rows of drafting beyond each step's first
                                      + verify row  · tokens · batch
                                      + beyond      · rows of verifying beyond the knee, where computing outlasts reading
                                      + sequence    · batch          what each sequence costs: its keys and values, sampling
                                      + prompt      · prompts of other requests that are read meanwhile (cost_served.py)

cost_fit.py fits the terms. This module does not import numpy, so that the table in the terminal appears at once.
"""

from stages.params.tree_shape import TreeShape
from stages.results import interval
from stages.results.record import Record

# In the order in which a fit adds them; the last one, which no tree changes, is added to any number of the others.
TREE_TERMS = ("cycle", "verify row", "draft step", "sequence", "draft row", "beyond")
PROMPT_TERM = "prompt"


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

    def predict_cycle_s(self, tree: TreeShape, batch: int, prompts_read: float = 0.0) -> float:
        given = count_term_units(tree, batch, self.knee, prompts_read)
        return sum(seconds * given[term] for term, seconds in self.seconds.items())


def count_term_units(tree: TreeShape, batch: int, knee: int | None, prompts_read: float) -> dict[str, float]:
    """Return how many units of each term a cycle has. The first draft step has one row a sequence, each later one topk."""
    verified = tree.num_draft_tokens * batch
    return {
        "cycle": 1,
        "verify row": verified,
        "draft step": tree.num_steps,
        "sequence": batch,
        "draft row": (tree.num_steps - 1) * (tree.topk * batch - 1) + batch - 1,
        "beyond": 0 if knee is None else max(0, verified - knee),
        PROMPT_TERM: prompts_read,
    }
