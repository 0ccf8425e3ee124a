"""The cost of a cycle as a sum of a few terms, fitted to a timing grid: docs/cost.md, version 1.

    cycle(steps, topk, tokens, batch) = cycle                         fixed: launches, the weights read once
                                      + draft step  · steps          a draft's forward, however few rows
                                      + draft row   · rows of drafting beyond each step's first
                                      + verify row  · tokens · batch
                                      + beyond      · rows of verifying beyond the knee, where computing outlasts reading
                                      + sequence    · batch          what each sequence costs: its keys and values, sampling

What is known of the terms; cost_fit.py finds them. No numpy here: the terminal's table must answer at once.
"""

from dataclasses import asdict, dataclass
from typing import Any

from stages.results import interval

Row = dict[str, Any]

COST_TERMS = ("cycle", "verify row", "draft step", "sequence", "draft row", "beyond")  # in the order they are taken in


@dataclass(frozen=True)
class CostModel:
    seconds: dict[str, float]  # a term's, per unit; a term that the grid can't tell is missing
    knee: int | None  # rows of a verify pass; None where none is seen
    left_out_s: list[float]  # of each point of the grid, as predicted by all others
    error: float  # of those: root mean square, as a share
    error_max: float
    residual: float  # of the points fitted: root mean square, as a share

    @property
    def margin(self) -> float:
        """Half of the 95% interval of a predicted cycle, as a share: Student's t over the points left out."""
        found = interval.compute_margin(self.error, len(self.left_out_s))
        assert found is not None, "cost_fit.FEWEST points at least are fitted"
        return found

    def to_json(self) -> Row:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Row) -> "CostModel":
        return cls(**found)

    def predict_cycle_s(self, steps: int, topk: int, tokens: int, batch: int) -> float:
        given = count_term_units(steps, topk, tokens, batch, self.knee)
        return sum(seconds * given[term] for term, seconds in self.seconds.items())


def count_term_units(steps: int, topk: int, tokens: int, batch: int, knee: int | None) -> dict[str, float]:
    """How much of each term a cycle takes. A first draft step has one row a sequence, each later one topk."""
    verified = tokens * batch
    return {
        "cycle": 1,
        "verify row": verified,
        "draft step": steps,
        "sequence": batch,
        "draft row": (steps - 1) * (topk * batch - 1) + batch - 1,
        "beyond": 0 if knee is None else max(0, verified - knee),
    }
