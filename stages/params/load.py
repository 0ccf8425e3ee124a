"""The load of an engine, from params.yaml to the report: how long answers may be, and how many requests are sent at once.

Stages depend on it, as on tree_shape.py (stages/runtime/import_closure.py): it computes with parameters. It imports no pydantic.
"""

import math
from typing import NamedTuple


class Load(NamedTuple):
    """A load of an engine: the only one of a workload, or one of a sweep."""

    max_new_tokens: int
    concurrency: int | None  # None: no limit

    @property
    def sort_key(self) -> tuple[int, float]:
        """Return the key by which loads are ordered: the longest answers last, of these no limit last."""
        return self.max_new_tokens, math.inf if self.concurrency is None else self.concurrency

    def __str__(self) -> str:
        """Return the load as logs, labels and headings name it: "200 tokens, concurrency 64"."""
        concurrency = "unlimited concurrency" if self.concurrency is None else f"concurrency {self.concurrency}"
        return f"{self.max_new_tokens} tokens, {concurrency}"

    def shorten(self) -> str:
        """Return the load as tables name it: "200 x 64"."""
        return f"{self.max_new_tokens} x {'no limit' if self.concurrency is None else self.concurrency}"
