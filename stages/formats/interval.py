"""The 95% interval of a mean over a few repeats: Student's t, since a bootstrap of three values knows too little."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def of_mean(values: Sequence[float], share: float = 0.95) -> tuple[float, float] | None:
    """(low, high); None for fewer than two values, which say nothing of how they scatter."""
    if len(values) < 2:
        return None
    half = student(len(values) - 1, share) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def student(freedom: int, share: float = 0.95) -> float:
    """The t that `share` of Student's distribution lies within, to both sides."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < share:
        high *= 2
    for _ in range(60):  # halves, to a double's last bits
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), a finite sum for a whole number of degrees: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
