"""The summary's picture: chosen trees are marked and named, speedups stand beside, and points tell their numbers."""

from matplotlib.figure import Figure

from stages.cells.prediction import PredictedSpeedup
from stages.cells.replay_records import ReplayedTree
from stages.cells.table import ResultRow
from stages.reporting import overview
from stages.reporting.overview import TreeLine
from stages.reporting.plots import PlotPoint


def tree(steps: int, topk: int, tokens: int, tau: float) -> ReplayedTree:
    known = {"checkpoint": "e009", "temperature": 0.0, "tau_low": tau - 0.5, "tau_high": tau + 0.5}
    return ReplayedTree.model_construct(num_steps=steps, topk=topk, num_draft_tokens=tokens, tau=tau, **known)


def guess(tokens: int, speedup: float, steps: int = 5) -> PredictedSpeedup:
    return PredictedSpeedup.model_construct(
        num_steps=steps, topk=2, num_draft_tokens=tokens, speedup=speedup, low=None, high=None
    )


def row(name: str, tokens: int, speedup: float, source: str = "measured") -> ResultRow:
    ends = {"speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1}
    return ResultRow.model_construct(tree=name, topk=2, num_draft_tokens=tokens, speedup=speedup, source=source, **ends)


def names(plot_points: list[PlotPoint]) -> dict[str, tuple[float, float]]:
    return {point.name: (point.x, point.y) for point in plot_points if point.name}


def test_chosen_trees_are_named_and_ringed_and_all_tell_their_numbers() -> None:
    trees = [tree(5, 2, 8, 3.0), tree(8, 2, 8, 2.5), tree(8, 2, 16, 3.5), tree(8, 1, 9, 2.0)]
    axes = Figure().subplots()
    plot_points = overview.draw_chosen_trees(axes, trees, [trees[1], trees[2]])
    assert names(plot_points) == {"8_2_8": (8, 2.5), "8_2_16": (16, 3.5)}
    rings = [line.get_xydata().tolist() for line in axes.lines if line.get_markersize() == 8]
    assert rings == [[[8, 2.5], [16, 3.5]]]
    assert {point.text for point in plot_points} == {
        "5_2_8: tau 3.00 (2.50-3.50)", "8_2_16: tau 3.50 (3.00-4.00)", "8_1_9: tau 2.00 (1.50-2.50)",
        "8_2_8: tau 2.50 (2.00-3.00)",
    }  # fmt: skip
    plot_points = overview.draw_chosen_trees(Figure().subplots(), trees, [])
    assert set(names(plot_points)) == {"5_2_8", "8_2_16"}  # the front


def test_the_line_of_predictions_rises_to_its_peak_and_falls() -> None:
    """Bug: at widths with chains alone the line fell and rose again, a zigzag."""
    speeds = {2: 1.05, 4: 1.5, 5: 1.48, 6: 1.55, 7: 1.3, 8: 1.5, 9: 1.2, 11: 1.1, 12: 1.45, 16: 1.4, 20: 1.4, 24: 1.2}
    lines = [TreeLine(tree(3, 2, tokens, 2.0), guess(tokens, speed), None) for tokens, speed in speeds.items()]
    axes = Figure().subplots()
    overview.draw_tree_speedups(axes, lines[::-1], [])
    (line,) = (line for line in axes.lines if line.get_label() == "fastest predicted")
    drawn = line.get_xydata().tolist()
    assert drawn == [[tokens, speeds[tokens]] for tokens in (2, 4, 6, 8, 12, 16, 20, 24)]


def test_speedups_say_whether_they_were_measured_and_are_named() -> None:
    lines = [
        TreeLine(tree(5, 2, 8, 3.0), guess(8, 1.2), None),
        TreeLine(tree(8, 2, 8, 2.5), guess(8, 1.1, steps=8), None),
        TreeLine(tree(8, 2, 16, 3.5), guess(16, 1.3), None),
    ]
    rows = [row("t8_2_16", 16, 1.25), row("t5_2_16", 16, 1.25), row("t5_2_8", 8, 1.0, source="replayed")]
    axes = Figure().subplots()
    plot_points = overview.draw_tree_speedups(axes, lines, rows)
    assert [(point.x, point.text) for point in plot_points] == [
        (8, "5_2_8: 1.20×, predicted"), (16, "5_2_16: 1.30×, predicted"), (15.55, "8_2_16: 1.25× (1.15-1.35), measured"),
        (16.45, "5_2_16: 1.25× (1.15-1.35), measured"), (8, "5_2_8: 1.00× (0.90-1.10), predicted"),
    ]  # fmt: skip
    assert names(plot_points) == {"8_2_16": (15.55, 1.25), "5_2_16": (16.45, 1.25), "5_2_8": (8, 1.0)}
