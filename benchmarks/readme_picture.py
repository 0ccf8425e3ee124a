"""Draw the README's picture: tau and speedup by tree, with their 95% intervals.

A file of its own is shown as an image, so it brings its background and both palettes: a browser picks one by its own colour
scheme, which need not be GitHub's.
"""

import hashlib
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from stages.cells.table import ResultRow
from stages.reporting import plots
from stages.reporting.text import format_tree

SIZE = 8.4, 4.2  # inches: as wide as the text of a README on GitHub
PAPER_COLOUR = "#040404"  # a placeholder, as those of stages/reporting/plots.py
STYLE = """<style>
svg {
  --paper: #fff; --ink: #1d2126; --line: #dfe3e8;
  --s0: #0b63b5; --s1: #c2510c; --s2: #2c8552; --s3: #8b4bb5; --s4: #a8801a; --s5: #4a5a6a;
}
@media (prefers-color-scheme: dark) {
  svg {
    --paper: #14171b; --ink: #e3e6ea; --line: #2f353d;
    --s0: #6cb1f5; --s1: #f5a066; --s2: #6fcf97; --s3: #c79bee; --s4: #dcb95a; --s5: #a5b3c2;
  }
}
</style>
<rect width="100%" height="100%" rx="6" style="fill: var(--paper)"/>
"""


def render_picture(rows: list[ResultRow], origin: str) -> str:
    """Return the picture as SVG; `origin` says what it is drawn from."""
    with rc_context(plots.MATPLOTLIB_STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        trees = list(dict.fromkeys(str(row.tree) for row in rows))
        checkpoints = sorted({str(row.checkpoint) for row in rows}, reverse=True)
        for number, checkpoint in enumerate(checkpoints):
            shift = 0.36 * ((number + 0.5) / len(checkpoints) - 0.5)
            style = {"color": plots.SERIES_COLOURS[number % len(plots.SERIES_COLOURS)]}
            for row in (row for row in rows if row.checkpoint == checkpoint):
                style["markerfacecolor"] = PAPER_COLOUR if row.is_replayed else style["color"]
                label = checkpoint + (": tau replayed, speedup predicted" if row.is_replayed else ": measured")
                y = trees.index(str(row.tree)) + shift
                _draw_point(left, y, (row.tau, row.tau_low, row.tau_high), style, label)
                _draw_point(right, y, (row.speedup, row.speedup_low, row.speedup_high), style, label)
        _label_axes(figure, left, right, trees)
        svg = plots.save_svg(figure).replace(PAPER_COLOUR, "var(--paper)")
    head, body = svg.split(">", 1)
    title = "tau and speedup by tree, with 95% intervals"
    return f'{head} role="img">\n<title>{title}</title>\n<desc>{origin}</desc>\n{STYLE}{body}'


def _draw_point(
    axes: Any, y: float, figure: tuple[float | None, float | None, float | None], style: dict[str, str], label: str
) -> None:
    value, low, high = figure
    if low is not None:
        axes.hlines(y, low, high, color=style["color"], linewidth=1.3)
    if value is not None:
        axes.plot(value, y, "o", markersize=5.5, label=label, **style)


def _label_axes(figure: Any, left: Any, right: Any, trees: list[str]) -> None:
    left.set(xlabel="tau: tokens per verify pass")
    right.set(xlabel="speedup over plain decoding")
    right.axvline(1, color=plots.INK_COLOUR, linewidth=0.9)
    left.set_yticks(range(len(trees)), [format_tree(tree) for tree in trees])
    left.invert_yaxis()
    for axes in (left, right):
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.06, y=0.06)
    drawn = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.1, wspace=0.04)
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=2, handletextpad=0.1)


def describe_origin(record: Path) -> str:
    """Return the record's name and digest, by which a picture and its table are known to belong together."""
    return f"{record.name}, sha256 {hashlib.sha256(record.read_bytes()).hexdigest()}"


def write_picture(record: Path) -> None:
    """Draw a copied benchmark.csv beside it."""
    picture = render_picture(ResultRow.read_csv(record, "report"), describe_origin(record))
    record.with_suffix(".svg").write_text(picture, encoding="utf-8")
