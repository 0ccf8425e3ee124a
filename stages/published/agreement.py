"""Agreement of a published table with ours where the numbers themselves can't be compared: shape and order over trees.

Another target, draft or machine moves all numbers of a table. What a reader takes from it, which tree is better than which, may
still hold: the rank correlation over trees, and the sign of each difference that lies outside our intervals.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stages.published.comparison import PublishedComparison

MIN_TREES = 5  # of fewer the correlation says nothing
MIN_CORRELATION = 0.8


@dataclass(frozen=True)
class SeriesAgreement:
    """How one metric of one draft runs over trees, in a publication and here."""

    trees: int
    correlation: float  # Spearman's, of the published numbers and ours
    differences: int  # pairs of trees that differ by more than both our intervals, and in print
    agreeing: int  # of them those with the same sign

    @property
    def is_consistent(self) -> bool:
        return self.correlation >= MIN_CORRELATION and self.agreeing == self.differences > 0

    def __str__(self) -> str:
        return (
            f"order over {self.trees} trees: rank correlation {self.correlation:.2f}, {self.agreeing} of {self.differences} "
            "differences outside our intervals have the published sign"
        )


def add_agreement(comparisons: Iterable[PublishedComparison]) -> list[PublishedComparison]:
    """Return the comparisons in their order; those of a series of at least MIN_TREES trees with its agreement."""
    ordered = list(comparisons)
    series: dict[tuple[object, ...], list[PublishedComparison]] = {}
    for comparison in ordered:
        if comparison.own is not None and comparison.published.setting.tree is not None:
            series.setdefault(_get_series(comparison), []).append(comparison)
    judged = {key: judge_series(members) for key, members in series.items()}
    return [
        replace(comparison, agreement=judged.get(_get_series(comparison)) if comparison.own else None)
        for comparison in ordered
    ]


def _get_series(comparison: PublishedComparison) -> tuple[object, ...]:
    """Return what the numbers of a series share: all but tree, and the label, which names trees."""
    row = comparison.published
    setting = row.setting.model_dump(exclude={"tree", "label"})
    return row.publication, row.metric, row.unit, *(str(value) for value in setting.values())


def judge_series(members: list[PublishedComparison]) -> SeriesAgreement | None:
    """Return how a series agrees; None if it has too few trees, or one side does not vary."""
    from scipy.stats import spearmanr  # half a second to import

    trees = {member.published.setting.tree for member in members}
    published_values = [member.published_value for member in members]
    own_values = [member.own.value for member in members if member.own]
    if len(trees) < MIN_TREES or len(set(published_values)) < 2 or len(set(own_values)) < 2:
        return None
    differences = agreeing = 0
    for first, second in itertools.combinations(members, 2):
        assert first.own and second.own, "a series has numbers of ours"
        printed = first.published_value - second.published_value
        own = first.own.value - second.own.value
        if printed and abs(own) > (first.own.spread or 0.0) + (second.own.spread or 0.0):
            differences += 1
            agreeing += (printed > 0) == (own > 0)
    return SeriesAgreement(len(trees), float(spearmanr(published_values, own_values).statistic), differences, agreeing)
