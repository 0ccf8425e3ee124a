"""The 95% intervals of tau, speedups and means, and standard errors of times, as docs/metrics.md, "Intervals", defines them.

Turns, repeats and cycles of one prompt are correlated. So an interval is over **clusters** (prompts, or conversations:
`get_conversation`), never over requests or cycles. Figures that pool clusters of unequal size (tau, speedup) use the
delete-one-cluster jackknife and Student's t with Bell and McCaffrey's degrees of freedom (2002): the number of clusters less
one if all have one size, fewer if some hold most of the cycles. Fewer than two clusters have no interval. numpy and scipy are
imported in functions, so that the table in the terminal appears at once.

Letters: C clusters, P prompts, R repeats, T trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

SHARE = 0.95
MEDIAN_TO_MEAN = 1.253  # the standard error of a median over that of a mean, of normal values
FEW_VALUES = 6  # below it quartiles say too little of the spread
QUARTILES_APART = 1.349  # in standard deviations, of normal values


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


class TimeEstimate(NamedTuple):
    """A typical value and its standard error as a share of it; None for a single value."""

    value: float
    error: float | None


# Student's t


def compute_t_quantile(freedom: float, share: float = SHARE) -> float:
    """Return the t that `share` of Student's distribution lies within, to both sides."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + share) / 2))


def compute_mean_interval(values: Sequence[float], share: float = SHARE) -> Interval | None:
    """Return the t interval of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    middle, half = fmean(values), compute_t_quantile(len(values) - 1, share) * stdev(values) / math.sqrt(len(values))
    return Interval(middle - half, middle + half)


# Standard errors of times, as shares


def estimate_median(seconds: Sequence[float]) -> TimeEstimate:
    """Return the median of cycles or steps: whatever else runs on a machine makes one slower, never faster.

    Its error is from the quartiles, so that an outlier does not inflate it. Those of few values are too close together: there
    it is the error of their mean, where that is larger.
    """
    import numpy as np

    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    if len(seconds) < 2:
        return TimeEstimate(middle, None)
    spread = MEDIAN_TO_MEAN * (high - low) / QUARTILES_APART
    if len(seconds) < FEW_VALUES:
        spread = max(spread, stdev(seconds))
    return TimeEstimate(middle, spread / math.sqrt(len(seconds)) / middle)


def estimate_repeats(seconds: Sequence[float]) -> TimeEstimate:
    """Return the mean of the repeats of a load without the fastest and the slowest; of fewer than three the mean.

    A machine that is slow for a minute slows whole repeats, so these lie in two groups, and a median of few jumps from one
    group to the other. Its error is that of the mean of all.
    """
    kept = sorted(seconds)[1:-1] or seconds
    middle = fmean(kept)
    return TimeEstimate(middle, stdev(seconds) / math.sqrt(len(seconds)) / middle if len(seconds) > 1 else None)


def compute_margin(error: float | None, samples: int) -> float | None:
    """Return half of the 95% interval, in the unit of the standard error of so many samples; None if that is unknown."""
    return None if error is None or samples < 2 else compute_t_quantile(samples - 1) * error


# Pooled over clusters


def compute_tau_intervals(accepted: np.ndarray, cycles: np.ndarray, num_steps: Sequence[int]) -> list[Interval | None]:
    """Return each tree's interval from accepted drafts [C, T] and verify cycles [C, T]; `num_steps` [T].

    The ends are clipped to the range of tau, 1 to num_steps + 1. Clusters without a cycle are left out.
    """
    import numpy as np

    drafts, passes = accepted.astype(float), cycles.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):  # with fewer than two clusters, which give no interval
        middle = drafts.sum(0) / passes.sum(0)
        leave_one_out = (drafts.sum(0) - drafts) / (passes.sum(0) - passes)
    half = _compute_jackknife_half(leave_one_out, middle, passes)
    ends = np.stack([middle - half, middle + half]).clip(0, np.asarray(num_steps)) + 1
    return [None if math.isnan(low) else Interval(low, high) for low, high in ends.T.tolist()]


def compute_speedup_interval(
    tokens: np.ndarray, seconds: np.ndarray, plain_tokens: np.ndarray, plain_seconds: np.ndarray
) -> Interval | None:
    """Return the interval of (tokens / seconds) / (plain_tokens / plain_seconds), pooled; each is [P, R].

    Prompts vary and machines drift independently: the half-widths over prompts and over repeats add by their squares, as
    shares. The noise of single answers is in both, so the interval errs on the wide side. With one repeat it is over prompts
    alone; with one prompt there is none.
    """
    import numpy as np

    sums = [np.asarray(values, dtype=float) for values in (tokens, seconds, plain_tokens, plain_seconds)]
    prompts, repeats = sums[0].shape
    if prompts < 2:
        return None
    over_prompts = _compute_log_speedup_half([values.sum(1) for values in sums])
    over_repeats = _compute_log_speedup_half([values.sum(0) for values in sums]) if repeats > 1 else 0.0
    middle, half = _compute_log_speedup([values.sum() for values in sums]), math.hypot(over_prompts, over_repeats)
    return Interval(math.exp(middle - half), math.exp(middle + half))


def compute_ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Return the interval of mean(above) / mean(below), of positive values in pairs, a pair a cluster."""
    import numpy as np

    if len(above) < 2:
        return None
    x, y = np.array(above, dtype=float), np.array(below, dtype=float)
    middle, leave_one_out = np.log(x.sum() / y.sum()), np.log((x.sum() - x) / (y.sum() - y))
    half = float(_compute_jackknife_half(leave_one_out, middle, y))
    return Interval(float(np.exp(middle - half)), float(np.exp(middle + half)))


def _compute_log_speedup(sums: Sequence[np.ndarray]) -> np.ndarray:
    import numpy as np

    tokens, seconds, plain_tokens, plain_seconds = (np.log(values) for values in sums)
    return tokens - seconds - plain_tokens + plain_seconds


def _compute_log_speedup_half(sums: Sequence[np.ndarray]) -> float:
    """Half of the interval of the speedup's logarithm, over clusters; four of [C]."""
    totals = [values.sum() for values in sums]
    leave_one_out = _compute_log_speedup([total - values for total, values in zip(totals, sums, strict=True)])
    _, seconds, _, plain_seconds = sums
    weights = seconds / seconds.sum() + plain_seconds / plain_seconds.sum()
    return float(_compute_jackknife_half(leave_one_out, _compute_log_speedup(totals), weights))


def _compute_jackknife_half(leave_one_out: np.ndarray, whole: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return half of the interval of an estimate `whole` [...]; NaN with fewer than two clusters.

    It follows from the estimates without each cluster, `leave_one_out` [C, ...], of `weights` [C, ...].
    """
    import numpy as np
    from scipy.special import stdtrit

    counted = weights > 0
    clusters = counted.sum(0)
    squares = _sum_clusters(np.where(counted, leave_one_out - whole, 0.0) ** 2)
    enough = clusters > 1
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt((clusters - 1) / clusters * squares)
        freedom = _compute_degrees_of_freedom(weights / _sum_clusters(weights))
    return np.where(enough, stdtrit(freedom, (1 + SHARE) / 2) * error, np.nan)


def _compute_degrees_of_freedom(shares: np.ndarray) -> np.ndarray:
    """Return Satterthwaite's degrees of freedom of the jackknife's variance, of clusters with these shares [C, ...] of all.

    The variance is a quadratic form in the clusters' own figures, sum of w (x - mean)^2 with w = (share / (1 - share))^2.
    If those figures have equal variance, it has the mean tr B and the variance 2 tr B^2, and so (tr B)^2 / tr B^2 degrees.
    """
    weights = (shares / (1 - shares)) ** 2
    s, w = _sum_clusters(shares**2), _sum_clusters(weights)
    cross, squares = _sum_clusters(weights * shares), _sum_clusters(weights**2)
    trace = w - 2 * cross + w * s
    of_square = (
        (1 + 2 * s) * squares - 4 * _sum_clusters(weights**2 * shares) + 2 * w * _sum_clusters(weights * shares**2)
        + 2 * cross**2 - 4 * w * s * cross + (w * s) ** 2
    )  # fmt: skip
    return trace**2 / of_square


def _sum_clusters(values: np.ndarray) -> np.ndarray:
    """Return the sum over clusters [C, ...] -> [...], in the same order whatever is beside a column.

    `sum(0)` adds a single column in another order than several: the last digit of an interval then depends on other trees.
    """
    import numpy as np

    return np.cumsum(np.concatenate([np.zeros((1, *values.shape[1:])), values]), axis=0)[-1]


def get_cluster(prompts: str, row_id: str) -> str:
    """Return the cluster of a workload's row; `prompts` is eval, random or a prompt set's name.

    In the eval split each answer of a conversation is a row. In a set a row is a question with its later turns.
    """
    return get_conversation(row_id) if prompts == "eval" else row_id


def get_conversation(row_id: str) -> str:
    """Return the conversation of a sampled row, whose id is "<conversation id>.<number of the answer>" (sampling/requests.py)."""
    conversation, _, number = row_id.rpartition(".")
    return conversation if conversation and number.isdecimal() else row_id


def sum_by_cluster(names: Sequence[str], values: np.ndarray) -> np.ndarray:
    """Return the values [N, ...] added up by their clusters' names [N]: [C, ...], in the order of first appearance."""
    import numpy as np

    row_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    found = np.zeros((len(row_of), *values.shape[1:]), dtype=values.dtype)
    np.add.at(found, [row_of[name] for name in names], values)
    return found
