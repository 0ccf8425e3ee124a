"""Sizes, durations and lists in words, for messages and pages."""

from collections.abc import Iterable

GIB = 2**30


def format_bytes(count: float) -> str:
    """Return a size with three digits, in the largest unit up to GiB that leaves at least 1: 512 B, 1.50 KiB, 80.0 GiB."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024 or unit == "GiB":
            break
    decimals = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:,.{decimals}f} {unit}"


def format_gib(size: float) -> str:
    """Return a size given in GiB as `format_bytes` does."""
    return format_bytes(size * GIB)


def format_duration(seconds: float) -> str:
    """Return `14.2 s`, `5 min 12 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left} s"


def list_first(names: Iterable[object], limit: int) -> str:
    """Return the first names of a list and how many follow: `a, b and 3 more`; `none` for an empty one."""
    shown = list(map(str, names))
    more = f" and {len(shown) - limit:,} more" if len(shown) > limit else ""
    return (", ".join(shown[:limit]) or "none") + more
