"""The error by which a reader of rows says that one can't be used, and why."""


class DroppedRowError(Exception):
    """A row that can't be used. The message is the reason, one word that the report counts."""

    def __init__(self, reason: str, found: str | None = None, expected: str = "") -> None:
        super().__init__(reason)
        self.found = found  # the offending text, where it is a single one; with `expected`, a description of it
        self.expected = expected  # and what to do; "" where the reason says it
