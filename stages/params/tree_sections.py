"""Tree shapes by name, and the sections that list them: replay_trees, time_trees."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from stages.params.section import Count, Grid, Positive, Section, SomeNames, _check_unique

MIN_TIMED_TREES = 8  # trees of time_trees: a fit has up to six terms


def _check_tree_names(names: list[str]) -> list[str]:
    for name in names:
        TreeShape.parse(name)
    return names


TreeNames = Annotated[list[str], AfterValidator(_check_tree_names), AfterValidator(_check_unique)]


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


class ReplayTrees(Section):
    checkpoints: SomeNames
    tree_scoring: Literal["sglang", "eagle"]
    num_steps: Grid
    topk: Grid
    num_draft_tokens: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    trace_trees: TreeNames
    memory_gib: Positive

    @model_validator(mode="after")
    def some_tree_exists(self) -> "ReplayTrees":
        if not self.list_trees():
            raise ValueError(
                f"no tree of num_steps {self.num_steps}, topk {self.topk} and num_draft_tokens {self.num_draft_tokens} can be "
                "built: num_draft_tokens - 1 is above topk + (num_steps - 1) * topk**2 in each; write smaller num_draft_tokens"
            )
        return self

    def traced_trees(self) -> list[TreeShape]:
        """Return the trees of `trace_trees`; they may be outside the grid."""
        return [TreeShape.parse(name) for name in self.trace_trees]

    def list_trees(self) -> list[TreeShape]:
        """Return every tree of the grid that can be built, ordered by topk, num_steps, num_draft_tokens."""
        return _list_buildable_trees(self.num_steps, self.topk, self.num_draft_tokens)


def _list_buildable_trees(num_steps: list[int], topks: list[int], num_draft_tokens: list[int]) -> list[TreeShape]:
    return [
        TreeShape(s, k, m)
        for k in sorted(set(topks))
        for s in sorted(set(num_steps))
        for m in ([s + 1] if k == 1 else sorted(set(num_draft_tokens)))
        if m - 1 <= count_candidates(s, k)
    ]


class TimeTrees(Section):
    """The timing grid of the torch engine."""

    checkpoints: SomeNames
    num_steps: Grid
    topk: Grid
    num_draft_tokens: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    context: Count
    warmup: Annotated[int, Field(ge=0)]
    cycles: Count
    repeats: Count

    @model_validator(mode="after")
    def has_enough_trees_for_a_fit(self) -> "TimeTrees":
        count = len(self.list_trees())
        if count < MIN_TIMED_TREES:
            raise ValueError(
                f"num_steps {self.num_steps}, topk {self.topk} and num_draft_tokens {self.num_draft_tokens} make {count} trees, "
                f"expected at least {MIN_TIMED_TREES}: each is left out once, to see how well the others predict it; write "
                "longer lists"
            )
        return self

    def list_trees(self) -> list[TreeShape]:
        """Return every tree of the grid that can be built, ordered by topk, num_steps, num_draft_tokens."""
        return _list_buildable_trees(self.num_steps, self.topk, self.num_draft_tokens)

    def list_settings(self) -> dict[str, Any]:
        """Return the settings by the names that timing files record: the grid's lists as `steps` and `tokens`."""
        recorded_names = {"num_steps": "steps", "num_draft_tokens": "tokens"}
        settings = self.model_dump(exclude={"checkpoints"})
        return {recorded_names.get(key, key): value for key, value in settings.items()}
