"""Positions for the names of a plot's points: each beside its own point, inside the plot, none over another.

A name takes the cheapest position of a grid. Names and points are never covered; nearness to its own point, distance from
others, lines below it and leaders that cross are costs. Lengths are in points (1/72 inch), y upwards.

Letters: K positions of the grid, N names, M points or lines to keep clear of.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STEP_X, STEP_Y = 3.0, 2.0  # of the grid
REACHES = (32.0, 1000.0)  # from the point to its name; the second where the first has no room
PASSES = 3  # over all names; a later pass sees where all others are
MARK_RADIUS = 4.0  # of a point, with its ring
GAP = 1.0  # between names
LEADER_FROM = 2.5  # a name farther than this from its point's edge has a line to it
CLEARER = 3.0  # and one that is not nearer to its point than to any other by so much
# Costs, as pt of distance: a leader that crosses a leader or a name; a point of a line or a mark below the name; a name at
# another point's edge, or a leader over it; having a leader.
CROSSED, COVERED, STRANGE, LEADER = 40.0, 3.0, 4.0, 1.5
AMBIGUOUS = 15.0  # of a name that is nearer to another point, named or not, than to its own
SAMPLES = 12  # of a leader
SAME = 0.01  # pt; nearer points are one, as a ring and the dot in it
FAR = 9.0  # pt within which another point makes a name ambiguous

Points = np.ndarray  # [any, 2]; of positions: the left and lower ends of a name's box


@dataclass(frozen=True)
class NamedPoint:
    """A point and the size of its name."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Box:
    left: float
    low: float
    right: float
    high: float


@dataclass(frozen=True)
class Label:
    """Where the name of a point lies, and the end of its leader on its box; no leader where it is beside its point."""

    point: NamedPoint
    box: Box
    leader: tuple[float, float] | None


def place_labels(
    points: list[NamedPoint],
    area: Box,
    occupied: list[Box],
    lines: list[list[tuple[float, float]]],
    dots: Iterable[tuple[float, float]] = (),
) -> list[Label | None]:
    """Return a position for each name; None where none is left.

    `occupied` are boxes to keep clear, `lines` better not covered, `dots` points without a name.
    """
    marks = sorted({*dots, *((point.x, point.y) for point in points)})
    placed: list[Label | None] = [None] * len(points)
    below = _sample_lines(lines)
    # Points with the most others around them choose first.
    order = sorted(
        range(len(points)), key=lambda index: (-_count_near(points, points[index]), -points[index].y, points[index].x)
    )
    for _ in range(PASSES):
        for index in order:
            others = [label for number, label in enumerate(placed) if label is not None and number != index]
            positions = (
                _list_free(points[index], points, area, [*occupied, *(label.box for label in others)], reach)
                for reach in REACHES
            )
            placed[index] = _choose_position(points[index], marks, next(filter(len, positions), None), others, below)
    return placed


def _count_near(points: list[NamedPoint], point: NamedPoint) -> int:
    return sum(abs(point.x - other.x) < point.width and abs(point.y - other.y) < 2 * point.height for other in points)


def _sample_lines(lines: Iterable[Sequence[tuple[float, float]]]) -> Points:
    """Return points [M, 2] along lines, at most a grid's step apart."""
    pieces = [np.empty((0, 2))]
    for line in lines:
        for start, end in pairwise(line):
            length = float(np.hypot(end[0] - start[0], end[1] - start[1]))
            pieces.append(np.linspace(start, end, 2 + int(length / STEP_Y)))
    return np.concatenate(pieces)


def _list_free(point: NamedPoint, points: list[NamedPoint], area: Box, occupied: list[Box], reach: float) -> Points:
    """Return the positions within reach that are wholly in the area and cover no point and nothing taken."""
    beside, above = point.width + MARK_RADIUS + 1, point.height / 2 + MARK_RADIUS + 1
    left, right = max(area.left, point.x - point.width - reach), min(area.right, point.x + reach)
    low, high = max(area.low, point.y - point.height - reach), min(area.high, point.y + reach)
    columns = [point.x + MARK_RADIUS + 1, point.x - beside, point.x - point.width / 2, *np.arange(left, right, STEP_X)]
    middles = [point.y, point.y + above, point.y - above]
    rows = [*(middle - point.height / 2 for middle in middles), *np.arange(low, high, STEP_Y)]
    positions = np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)
    ends = positions + np.array((point.width, point.height))
    free = (positions >= (area.left, area.low)).all(axis=1) & (ends <= (area.right, area.high)).all(axis=1)
    marks = [Box(p.x - MARK_RADIUS, p.y - MARK_RADIUS, p.x + MARK_RADIUS, p.y + MARK_RADIUS) for p in points]
    for box in [*occupied, *marks]:
        apart_x = (positions[:, 0] - GAP >= box.right) | (ends[:, 0] + GAP <= box.left)
        apart_y = (positions[:, 1] - GAP >= box.high) | (ends[:, 1] + GAP <= box.low)
        free &= apart_x | apart_y
    return positions[free]


def _choose_position(
    point: NamedPoint, marks: list[tuple[float, float]], low: Points | None, others: list[Label], below: Points
) -> Label | None:
    """Return the label at the cheapest of the positions `low` [K, 2]; None without any. `marks` are all points."""
    if low is None:
        return None
    own, size = np.array((point.x, point.y)), np.array((point.width, point.height))
    high = low + size
    ends = np.clip(own, low, high)  # [K, 2]: the nearest points of the boxes
    gaps = np.linalg.norm(ends - own, axis=1) - MARK_RADIUS
    strangers = [np.array(xy) for xy in marks if np.linalg.norm(own - xy) > SAME]
    nearness = [np.linalg.norm(np.clip(xy, low, high) - xy, axis=1) - MARK_RADIUS for xy in strangers]
    nearest = np.min([np.full(len(low), np.inf), *nearness], axis=0)
    has_leader = (gaps > LEADER_FROM) | (nearest < gaps + CLEARER)
    aside, up = np.abs(low + size / 2 * (0, 1) - own).T
    cost = gaps + 0.02 * aside + 0.05 * up  # of equal positions the right one, as one reads
    cost += COVERED * _count_inside(below, low, high) + AMBIGUOUS * (nearest < gaps)
    cost += STRANGE * np.clip(FAR - nearest, 0, FAR) / FAR
    cost += CROSSED * (_count_inside(_sample_lines(_list_leaders(others)), low, high) > 0)
    cost += has_leader * (LEADER + _price_leaders(own, ends, strangers, others))
    best = int(np.argmin(cost))
    box = Box(*map(float, low[best]), *map(float, high[best]))
    return Label(point, box, (float(ends[best][0]), float(ends[best][1])) if has_leader[best] else None)


def _price_leaders(own: np.ndarray, ends: Points, strangers: list[np.ndarray], others: list[Label]) -> np.ndarray:
    """Return what leaders from a point to `ends` [K, 2] cost by what they cross [K]."""
    cost = np.zeros(len(ends))
    along = own + (ends - own) * np.linspace(0, 1, SAMPLES)[:, None, None]  # [SAMPLES, K, 2]
    for start, end in _list_leaders(others):
        cost += CROSSED * _cross(own, ends, np.array(start), np.array(end))
    for box in (label.box for label in others):
        is_below = (along >= (box.left, box.low)) & (along <= (box.right, box.high))
        cost += CROSSED * is_below.all(axis=2).any(axis=0)
    for xy in strangers:
        if np.linalg.norm(xy - own) > 2 * MARK_RADIUS:  # else no leader leaves without touching it
            cost += STRANGE * (np.linalg.norm(along - xy, axis=2) < MARK_RADIUS).any(axis=0)
    return cost


def _list_leaders(labels: list[Label]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return [((label.point.x, label.point.y), label.leader) for label in labels if label.leader]


def _count_inside(points: Points, low: Points, high: Points) -> np.ndarray:
    """Return how many of the points [M, 2] each box covers [K]."""
    points = points[((points >= low.min(axis=0)) & (points <= high.max(axis=0))).all(axis=1)]
    return ((points >= low[:, None]) & (points <= high[:, None])).all(axis=2).sum(axis=1)


def _cross(start: np.ndarray, ends: Points, other_start: np.ndarray, other_end: np.ndarray) -> np.ndarray:
    """Return whether the lines from `start` to `ends` [K, 2] cross another line [K]."""

    def turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Return the sign of the turn at b on the way from a to c."""
        (ab, ac) = (b - a, c - a)
        return np.sign(ab[..., 0] * ac[..., 1] - ab[..., 1] * ac[..., 0])

    is_beside = turn(start, ends, other_start) * turn(start, ends, other_end) < 0
    return is_beside & (turn(other_start, other_end, start) * turn(other_start, other_end, ends) < 0)
