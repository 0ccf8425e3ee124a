"""The summary's picture: chosen trees are marked and named, speedups stand beside, and points tell their numbers."""

from matplotlib.figure import Figure

from stages.cells.replay_records import ReplayedTree
from stages.reporting import overview
from stages.reporting.plots import PlotPoint


def tree(steps: int, topk: int, tokens: int, tau: float) -> ReplayedTree:
    known = {"checkpoint": "e009", "temperature": 0.0, "tau_low": tau - 0.5, "tau_high": tau + 0.5}
    return ReplayedTree.model_construct(num_steps=steps, topk=topk, num_draft_tokens=tokens, tau=tau, **known)


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
