"""Names of points: beside their own, inside the plot, none over another."""

import itertools

import numpy as np
import pytest

from stages.reporting.labels import CLEARER, LEADER_FROM, MARK_RADIUS, Box, Label, NamedPoint, place_labels

AREA = Box(40, 30, 340, 180)  # about that of the page's plots
LEGEND = Box(280, 35, 335, 90)


def measure_gap(box: Box, point: NamedPoint) -> float:
    """The distance from a point's edge to a box, written out."""
    dx = max(box.left - point.x, 0.0, point.x - box.right)
    dy = max(box.low - point.y, 0.0, point.y - box.high)
    return float(np.hypot(dx, dy)) - MARK_RADIUS


def overlap(a: Box, b: Box) -> bool:
    return a.left < b.right and b.left < a.right and a.low < b.high and b.low < a.high


def name_points(points: np.ndarray) -> list[NamedPoint]:
    return [NamedPoint(float(x), float(y), 33.4, 8.0) for x, y in points]


def crowd(seed: int) -> list[NamedPoint]:
    """30 points, most of them in three columns a few points wide, as trees of as many draft tokens are; two at one position."""
    draw = np.random.default_rng(seed)
    columns = draw.choice([90.0, 140.0, 250.0], 28) + draw.uniform(-5, 5, 28)
    points = np.column_stack([columns, draw.uniform(60, 170, 28)])
    return name_points(np.concatenate([points, points[:1], [[338.0, 178.0]]]))


def label_all(points: list[NamedPoint]) -> list[Label]:
    found = place_labels(points, AREA, [LEGEND], [[(40.0, 50.0), (340.0, 170.0)]])
    assert None not in found
    return [label for label in found if label]


@pytest.mark.parametrize("seed", range(4))
def test_near_points_have_names_that_cover_nothing_and_stay_in_the_plot(seed: int) -> None:
    """Bug: names were moved down until none covered another, below the axis and far from their points, over other points."""
    points = crowd(seed)
    labels = label_all(points)
    assert [label.point for label in labels] == points
    for label in labels:
        box = label.box
        assert AREA.left <= box.left and box.right <= AREA.right and AREA.low <= box.low and box.high <= AREA.high
        assert not overlap(box, LEGEND) and min(measure_gap(box, point) for point in points) >= 0
    assert not [pair for pair in itertools.combinations([label.box for label in labels], 2) if overlap(*pair)]


@pytest.mark.parametrize("seed", range(4))
def test_a_name_without_a_leader_is_beside_its_own_point(seed: int) -> None:
    points = crowd(seed)
    for label in label_all(points):
        if label.leader:
            x, y = label.leader
            assert label.box.left <= x <= label.box.right and label.box.low <= y <= label.box.high
            continue
        own = measure_gap(label.box, label.point)
        positions = {(point.x, point.y) for point in points} - {(label.point.x, label.point.y)}
        others = [measure_gap(label.box, NamedPoint(x, y, 0, 0)) for x, y in positions]
        assert own <= LEADER_FROM and own + CLEARER <= min(others)


def test_a_point_alone_has_its_name_at_its_right() -> None:
    (label,) = label_all(name_points(np.array([[100.0, 100.0]])))
    assert label.leader is None and 0 <= label.box.left - 100 - MARK_RADIUS <= LEADER_FROM
    assert label.box.low < 100 < label.box.high


def test_where_no_room_is_left_a_name_is_left_out() -> None:
    points = name_points(np.array([[30.0, 20.0], [32.0, 22.0], [34.0, 18.0]]))
    found = place_labels(points, Box(0, 0, 85, 40), [], [])
    shown = [label.box for label in found if label]
    assert len(shown) > 0 and not [pair for pair in itertools.combinations(shown, 2) if overlap(*pair)]
    assert place_labels(points, Box(25, 15, 40, 25), [], []) == [None] * 3


def test_a_name_in_a_column_of_points_is_nearest_to_its_own() -> None:
    """Bug: the name of the lowest of three rings lay beside a dot without a name, that of the middle one beside the lowest."""
    points = name_points(np.array([[130.0, 138.5], [130.0, 129.9], [130.0, 123.8]]))
    dots = [(130.0, 144.6), (130.0, 149.0), (108.0, 108.5), (103.0, 105.6), (108.0, 130.0), (155.0, 143.0)]
    found = place_labels(points, AREA, [LEGEND], [], [*dots, (130.0, 138.5)])
    for label in filter(None, found):
        others = {*dots, *((point.x, point.y) for point in points)} - {(label.point.x, label.point.y)}
        assert measure_gap(label.box, label.point) <= min(
            measure_gap(label.box, NamedPoint(*xy, 0, 0)) for xy in others
        )
    assert None not in found
