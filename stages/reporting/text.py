"""Words and columns that the page and the terminal share."""


def format_tree(name: str) -> str:
    """The seed's notation. A chain's root was not counted there, so its own name for it follows: 8_1_9 (8_1_8)."""
    steps, topk, tokens = name.removeprefix("t").split("_")
    return f"{steps}_{topk}_{tokens}" + (f" ({steps}_1_{steps})" if topk == "1" else "")


def align_columns(lines: list[tuple[str, ...]]) -> list[str]:
    """First column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(t.rjust(w) if i else t.ljust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    ]


def format_number(value: float | None, digits: int = 2, times: float = 1.0) -> str:
    """A number to so many decimals, and a dash for what isn't known."""
    return "–" if value is None else f"{times * value:.{digits}f}"


ONE_PROMPT, ONE_REPEAT, UNCOUNTED = "one prompt", "one repeat", "not by request"  # why there is no interval


def format_interval(low: float | None, high: float | None, none: str = "") -> str:
    """Return an interval, or `none` where there is none; ends of a CSV may be "" too."""
    return none if low in (None, "") or high in (None, "") else f"{low:.2f}-{high:.2f}"
