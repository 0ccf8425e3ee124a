"""How durations are written for readers."""


def format_duration(seconds: float) -> str:
    """Return `14.2 s`, `5 min 12 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left} s"
