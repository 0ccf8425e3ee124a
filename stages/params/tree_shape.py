"""The shape of a draft tree, from params.yaml to the kernels.

Stages depend on it, as on served_trees.py and load.py, and on no other module of this folder (stages/runtime/import_closure.py):
it computes with parameters. It imports no pydantic, so that engine and replay run without it.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple


def count_candidates(num_steps: int, topk: int) -> int:
    """Return how many candidates an expansion records: k + (num_steps - 1) * k**2 (SGLang 0.5.17 to 0.5.23), 0 for no step."""
    return topk + (num_steps - 1) * topk * topk if num_steps else 0


@dataclass(frozen=True)
class TreeShape:
    """The shape of a draft tree: `t8_2_16` is num_steps 8, topk 2, num_draft_tokens 16 (the root counted, as in SGLang)."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def name(self) -> str:
        return f"t{self.num_steps}_{self.topk}_{self.num_draft_tokens}"

    @property
    def num_candidates(self) -> int:
        """How many candidates its expansion records."""
        return count_candidates(self.num_steps, self.topk)

    @classmethod
    def parse(cls, name: str) -> "TreeShape":
        """Parse a name. Raises ValueError for one that names no tree, or a tree that can't be built."""
        match = re.fullmatch(r"t?([0-9]+)_([0-9]+)_([0-9]+)", name)
        if not match:
            raise ValueError(f"{name!r} is not a tree; write t<num_steps>_<topk>_<num_draft_tokens>, as t8_2_16")
        tree = cls(*map(int, match.groups()))
        if tree.topk == 1 and tree.num_steps and tree.num_draft_tokens != tree.num_steps + 1:
            raise ValueError(
                f"{name}: at topk 1 a tree is a chain of num_steps drafts and the root, as SGLang forces; "
                f"write t{tree.num_steps}_1_{tree.num_steps + 1}"
            )
        tree.check()
        if tree.name != name:  # a tree has one name: it is part of paths
            raise ValueError(f"{name!r} is not the name of a tree; write {tree.name}")
        return tree

    def check(self) -> None:
        """Raise ValueError for a tree that can't be built with any draft."""
        if min(self.num_steps, self.topk) < 1 or self.num_draft_tokens < 2:
            raise ValueError(
                f"{self.name}: expected num_steps and topk of 1 or more, and num_draft_tokens of 2 or more (root counted)"
            )
        if self.num_draft_tokens - 1 > self.num_candidates:
            raise ValueError(
                f"{self.name} has {self.num_draft_tokens - 1} nodes under the root, expected at most the topk + (num_steps - 1) "
                f"* topk**2 = {self.num_candidates} candidates that its expansion records; use at most "
                f"t{self.num_steps}_{self.topk}_{self.num_candidates + 1}"
            )


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
