"""Plots of the page, as inline SVGs, each with an overlay of points that name their numbers.

matplotlib draws with placeholder colours, which are replaced by CSS variables, so that plots follow the light, dark and
print styles. matplotlib and numpy are imported where they draw: the terminal's table must appear at once.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.cells.replay_records import ReplayedTree
from stages.cells.training_records import HeldOutCurve, TrainingReport

INK_COLOUR, FAINT_COLOUR = "#010101", "#020202"
NAME_SIZE = 8  # pt
SERIES_COLOURS = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306")
CSS_VARIABLES = {INK_COLOUR: "var(--ink)", FAINT_COLOUR: "var(--line)"} | {
    colour: f"var(--s{i})" for i, colour in enumerate(SERIES_COLOURS)
}
MATPLOTLIB_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "aerie", "font.family": "sans-serif", "font.size": 10.5, "text.color": INK_COLOUR,
    "axes.edgecolor": FAINT_COLOUR, "axes.labelcolor": INK_COLOUR, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "axes.grid": True, "grid.color": FAINT_COLOUR, "grid.linewidth": 0.6, "xtick.color": INK_COLOUR,
    "ytick.color": INK_COLOUR, "xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False, "lines.linewidth": 1.6,
    "lines.markersize": 4, "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip


@dataclass(frozen=True)
class PlotPoint:
    """A point of a plot, in its axes' units, and the text that is shown where the pointer hovers over it."""

    x: float
    y: float
    text: str
    name: str | None = None  # written beside it


# Draws on matplotlib's axes; returns the points that have a tooltip.
DrawPlot = Callable[[Any], Sequence[PlotPoint]]


def render_svg(draw: DrawPlot, title: str, height: float = 3.3) -> Any:
    """Return what `draw` draws as markup, 4.7 by `height` inches: a picture with a title, and its points over it.

    The XML prologue, metadata, name spaces, the fixed size and group ids are removed: one page holds several plots. The
    points are an SVG of their own, since what is inside an element of role img is hidden from screen readers.
    """
    from markupsafe import Markup, escape
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(MATPLOTLIB_STYLE):
        figure = Figure(figsize=(4.7, height), layout="tight")
        axes = figure.subplots()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        points = draw(axes)
        axes.margins(x=0.03)
        if labels := axes.get_legend_handles_labels()[1]:
            axes.legend(ncols=count_legend_columns(len(labels)), handlelength=1.5, columnspacing=1)
        if any(point.name for point in points):
            _write_names(axes, [point for point in points if point.name])
        svg = save_svg(figure)
    overlay = _render_points(points, axes, svg, title)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"|(?<=<svg) width="[^"]*"| height="[^"]*"(?= viewBox)', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = svg.replace("<svg ", '<svg role="img" ', 1).replace(">", f">\n<title>{escape(title)}</title>", 1)
    return Markup(f'<div class="plot">{svg}{overlay}</div>')  # matplotlib has escaped every text in it


def _write_names(axes: Any, points: Sequence[PlotPoint]) -> None:
    """Write the names of points beside them, with a line from each point to a name that found no room there."""
    import textalloc

    figure, legend = axes.figure, axes.get_legend()
    figure.draw_without_rendering()  # the layout; names may not move it
    figure.set_layout_engine("none")
    paths = [path.T for path in _list_paths(axes)]
    if legend:  # the position that it chose is kept, and names stay out of its frame
        frame = legend.get_window_extent()
        legend.set_loc(tuple(axes.transAxes.inverted().transform((frame.x0, frame.y0))))
        rows = [[(frame.x0, y), (frame.x1, y)] for y in range(int(frame.y0), int(frame.y1) + 1, NAME_SIZE)]
        paths += [axes.transData.inverted().transform(row).T for row in rows]
    groups = _group_near(points, axes.transData.transform, NAME_SIZE * figure.dpi / 72)
    textalloc.allocate(
        axes,
        [group[0].x for group in groups],
        [group[0].y for group in groups],
        ["\n".join(str(point.name) for point in group) for group in groups],
        x_scatter=[path[0][0] for path in paths if path.shape[1] == 1],
        y_scatter=[path[1][0] for path in paths if path.shape[1] == 1],
        x_lines=[path[0] for path in paths if path.shape[1] > 1],
        y_lines=[path[1] for path in paths if path.shape[1] > 1],
        textsize=NAME_SIZE, textcolor=INK_COLOUR, linecolor=INK_COLOUR, linewidth=0.5, draw_all=False,
        avoid_label_lines_overlap=True, avoid_crossing_label_lines=True,
    )  # fmt: skip


def _group_near(points: Sequence[PlotPoint], to_pixels: Any, near: float) -> list[list[PlotPoint]]:
    """Return the points in groups, the upper first; names of points within `near` pixels of each other are one text."""
    groups: list[list[PlotPoint]] = []
    for point in sorted(points, key=lambda point: (-point.y, point.x)):
        x, y = to_pixels((point.x, point.y))
        for group in groups:
            last_x, last_y = to_pixels((group[-1].x, group[-1].y))
            if abs(x - last_x) < near and abs(y - last_y) < near:
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def _list_paths(axes: Any) -> Iterator[Any]:
    """Yield the lines of the axes in its units, [N, 2] each: drawn lines, intervals, and marks as paths of one point."""
    for line in axes.lines:
        if line.get_linestyle() != "None":
            yield line.get_xydata()
        yield from (xy[None] for xy in line.get_xydata() if line.get_marker() != "None")
    for collection in axes.collections:
        yield from collection.get_segments()


def _render_points(points: Sequence[PlotPoint], axes: Any, svg: str, title: str) -> str:
    """Return an SVG of the size of `svg` with a circle per point; axes must have been drawn, which sets their position."""
    from markupsafe import escape

    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size, "matplotlib writes a viewBox"
    width, height = map(float, size.groups())
    to_figure = axes.transData + axes.figure.transFigure.inverted()
    circles = []
    for point in dict.fromkeys(replace(point, name=None) for point in points):
        x, y = to_figure.transform((point.x, point.y))
        attributes = f'cx="{width * x:.1f}" cy="{height * (1 - y):.1f}" r="7"'
        circles.append(f"<circle {attributes}><title>{escape(point.text)}</title></circle>")
    if not circles:
        return ""
    label = escape(f"Points of: {title}")
    return f'<svg class="points" role="group" aria-label="{label}" {size[0]}>{"".join(circles)}</svg>'


def save_svg(figure: Any) -> str:
    """Return a figure as an SVG element whose colours are CSS variables, without prologue and metadata."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for colour, variable in CSS_VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def count_legend_columns(series: int) -> int:
    return 1 + series // 7


def cycle_styles() -> Iterator[dict[str, str]]:
    """Yield a style per series: another colour each, then the same colours with other marks and lines."""
    for marker, line in itertools.cycle((("o", "-"), ("s", "--"), ("^", ":"))):
        for colour in SERIES_COLOURS:
            yield {"color": colour, "marker": marker, "linestyle": line}


def make_tree_point(tree: ReplayedTree, suffix: str = "") -> PlotPoint:
    """Return the point of a tree in a plot of tau against num_draft_tokens; `suffix` is added to its text."""
    interval = "" if tree.tau_low is None or tree.tau_high is None else f" ({tree.tau_low:.2f}-{tree.tau_high:.2f})"
    name = tree.tree.removeprefix("t")
    return PlotPoint(tree.num_draft_tokens, tree.tau, f"{name}: tau {tree.tau:.2f}{interval}{suffix}")


def draw_lines(axes: Any, lines: dict[str, list[PlotPoint]], xlabel: str, ylabel: str) -> list[PlotPoint]:
    """Draw a line through the points of each name; one without points keeps its style. Return all points."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    for (name, points), style in zip(lines.items(), cycle_styles(), strict=False):
        if points:
            axes.plot([point.x for point in points], [point.y for point in points], **style, label=name)
    return [point for points in lines.values() for point in points]


def draw_tau_by_tokens(axes: Any, trees: list[ReplayedTree], steps: int | None = None) -> list[PlotPoint]:
    """Draw a line per topk, at the best num_steps of each point or at `steps`. A topk always has the same colour."""
    best: dict[int, dict[int, ReplayedTree]] = {topk: {} for topk in sorted({t.topk for t in trees})}
    for tree in sorted(trees, key=lambda t: t.tau, reverse=True):
        if steps in (None, tree.num_steps):
            best[tree.topk].setdefault(tree.num_draft_tokens, tree)
    lines = {f"topk {topk}": [make_tree_point(found[n]) for n in sorted(found)] for topk, found in best.items()}
    which = "the best num_steps" if steps is None else f"num_steps {steps}"
    return draw_lines(axes, lines, "num_draft_tokens", f"tau, at {which}")


def draw_loss(axes: Any, trained: dict[str, TrainingReport]) -> list[PlotPoint]:
    """Draw a line per checkpoint, starting where the checkpoint it continues ended; dotted the loss on eval answers."""
    ends: dict[str, int] = {}
    last: dict[str, float] = {}
    plot_points: list[PlotPoint] = []
    order: list[str] = []  # parents before children
    while len(order) < len(trained):
        order += [n for n, t in trained.items() if n not in order and (t.from_ in order or t.from_ not in trained)]
    for name, colour in zip(order, itertools.cycle(SERIES_COLOURS), strict=False):
        parent, epochs = trained[name].from_, trained[name].epochs
        start, losses = ends.get(parent, 0), [epoch.loss for epoch in epochs]
        joined = [(start, last[parent])] if parent in last else []
        points = [*joined, *enumerate(losses, start + 1)]
        axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.plot(points[-1][0], points[-1][1], "o", color=colour)
        held_out = [(n, x.held_out.loss) for n, x in enumerate(epochs, start + 1) if x.held_out]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), color=colour, linestyle="dotted")
        ends[name], last[name] = start + len(epochs), losses[-1]
        plot_points += [
            PlotPoint(epoch, loss, f"{name}: loss {loss:.4f} after epoch {epoch}") for epoch, loss in points
        ]
    axes.set(xlabel="epoch", ylabel="loss")
    return plot_points


def draw_held_out(axes: Any, curves: list[HeldOutCurve]) -> list[PlotPoint]:
    """Draw what a chain of three accepts of eval answers after each epoch."""
    lines = {
        curve.name: [
            PlotPoint(x, y, f"{curve.name}: {y:.2f} tokens a cycle after epoch {x}")
            for x, y in zip(curve.epochs, curve.accept_lengths, strict=True)
        ]
        for curve in curves
    }
    return draw_lines(axes, lines, "epoch", "tokens a cycle, chain of 3")


def draw_accuracy(axes: Any, trained: dict[str, TrainingReport]) -> list[PlotPoint]:
    lines = {
        name: [
            PlotPoint(step, 100 * share, f"{name}: {100 * share:.1f}% at step {step}")
            for step, share in enumerate(report.epochs[-1].step_accuracy, 1)
        ]
        for name, report in trained.items()
    }
    return draw_lines(axes, lines, "training-time-test step", "accuracy after the last epoch (%)")
