"""Break-even of speculation: where the speedup along an axis (concurrency, or tokens of an answer) crosses 1."""

import math
from collections.abc import Sequence
from itertools import pairwise

SpeedupPoint = tuple[float, float]  # (position on the axis, speedup)


def find_crossings(points: Sequence[SpeedupPoint]) -> list[float]:
    """Return where the speedup crosses 1, interpolated linearly over log(axis); the points are in the axis's order.

    A speedup of exactly 1 counts as faster, as in `describe_crossings`.
    """
    found = []
    for (x0, y0), (x1, y1) in pairwise(points):
        if (y0 >= 1) != (y1 >= 1):
            found.append(math.exp(math.log(x0) + (1 - y0) / (y1 - y0) * math.log(x1 / x0)))
    return found


def describe_crossings(points: Sequence[SpeedupPoint], axis: str) -> str:
    """Return the crossings of at least one point in words, as "faster up to a concurrency of 45.3, slower beyond"."""
    found, start = find_crossings(points), points[0][1] >= 1
    ends = f"{points[0][0]:g} to {points[-1][0]:g}" if len(points) > 1 else f"{points[0][0]:g}"
    if not found:
        x, y = min(points, key=lambda p: p[1]) if start else max(points, key=lambda p: p[1])
        at = f"{y:.3g}× at {x:g}"
        if start:
            return f"faster at every {axis} measured, {ends}: at least {at}"
        return f"slower at every {axis} measured, {ends}: at best {at}"
    spans = [f"{_name_pace(start == (n % 2 == 0))} up to {x:.3g}" for n, x in enumerate(found)]
    spans[0] = spans[0].replace("up to ", f"up to {_choose_article(axis)} {axis} of ", 1)
    return ", ".join([*spans, f"{_name_pace(start == (len(found) % 2 == 0))} beyond"])


def _name_pace(pays: bool) -> str:
    return "faster" if pays else "slower"


def _choose_article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
