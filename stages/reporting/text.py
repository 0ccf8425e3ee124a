"""Words and columns that the page, the terminal and the README share."""

from stages.cells.interval import Interval
from stages.cells.record import Column, TableRow
from stages.params import units
from stages.params.tree_shape import parse_shape

ONE_PROMPT, ONE_REPEAT = "one prompt", "one repeat"  # why a figure has no interval


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


def mark_times(texts: dict[str, str]) -> dict[str, str]:
    """Return texts of columns with the multiplication sign that a page has, and a terminal may not."""
    return {name: text.replace("x", "×") for name, text in texts.items()}


def format_column(row: TableRow, name: str, column: Column, why_no_interval: str) -> str:
    """Return the text of a field of a row, with its interval, or the reason why it has none."""
    value = row[name]
    if column.high:
        has_value = row[name.removesuffix("_low")] is not None
        return format_interval(value, row[column.high], why_no_interval) if has_value else ""
    text = format_number(value, column.decimals, column.factor) + ("" if value is None else column.suffix)
    if value is None or column.ends is None:
        return text
    low, high = (row[end] for end in column.ends)
    if column.is_spread:
        return f"{text} {format_spread(value, low, high, why_no_interval)}"
    return f"{text} ({format_interval(low, high, why_no_interval)})"
