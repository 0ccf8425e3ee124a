"""Words and columns that the page, the terminal and the README share."""

from stages.params import units
from stages.params.tree_shape import parse_shape
from stages.results.interval import Interval

ONE_PROMPT, ONE_REPEAT, UNCOUNTED = "one prompt", "one repeat", "not by request"  # why a figure has no interval


def format_tree(name: str) -> str:
    """Return a shape's name as tables write it (TreeShape.label)."""
    return parse_shape(name).label


def align_columns(lines: list[tuple[str, ...]]) -> list[str]:
    """Return the lines with their first column aligned to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(t.rjust(w) if i else t.ljust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]


def format_number(value: float | None, digits: int = 2, times: float = 1.0) -> str:
    """Return `times * value` with that many decimals, and a dash for None."""
    return "–" if value is None else f"{times * value:.{digits}f}"


def format_gib(value: float | None) -> str:
    """Return a size given in GiB, in the unit that fits it, and a dash for None."""
    return "–" if value is None else units.format_gib(value)


def format_interval(low: float | None, high: float | None, missing: str = "") -> str:
    return missing if low is None or high is None else f"{low:.2f}-{high:.2f}"


def format_spread(value: float, low: float | None, high: float | None, missing: str) -> str:
    """Return what follows a value that has an interval: "± 0.21".

    An interval that was clipped is not symmetric, and written as its ends, "(1.00-1.21)"; without one it is the reason.
    """
    if low is None or high is None or abs((low + high) / 2 - value) >= 0.005:
        return f"({format_interval(low, high, missing)})"
    return f"± {Interval(low, high).half:.2f}"
