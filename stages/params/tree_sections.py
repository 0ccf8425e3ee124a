"""Draft trees by name, and the sections that list them: replay_trees, time_trees."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from stages.params.section import Count, Grid, Positive, Section, SomeNames, _check_unique

MIN_TIMED_TREES = 8  # trees of time_trees: a fit has up to six terms


def _check_tree_names(names: list[str]) -> list[str]:
    for name in names:
        TreeShape.parse(name)
    return names


TreeNames = Annotated[list[str], AfterValidator(_check_tree_names), AfterValidator(_check_unique)]


class TreeShape(BaseModel):
    """A draft tree by name: `t8_2_16` is num_steps 8, topk 2, num_draft_tokens 16 (the root counted, as in SGLang)."""

    model_config = ConfigDict(frozen=True)
    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def name(self) -> str:
        return f"t{self.num_steps}_{self.topk}_{self.num_draft_tokens}"

    @classmethod
    def parse(cls, name: str) -> "TreeShape":
        """Raises ValueError for a name that is no tree or a tree that cannot be built."""
        match = re.fullmatch(r"t?([0-9]+)_([0-9]+)_([0-9]+)", name)
        if not match:
            raise ValueError(f"{name!r} is not a tree; write t<num_steps>_<topk>_<num_draft_tokens>, as t8_2_16")
        steps, topk, tokens = map(int, match.groups())
        if steps < 1 or topk < 1 or tokens < 2:
            raise ValueError(
                f"{name}: num_steps and topk must be at least 1 and num_draft_tokens at least 2 (root counted)"
            )
        if topk == 1 and tokens != steps + 1:
            raise ValueError(
                f"{name}: at topk 1 a tree is a chain of num_steps drafts and the root, as SGLang forces; "
                f"write t{steps}_1_{steps + 1}"
            )
        if tokens - 1 > (most := count_candidates(steps, topk)):
            raise ValueError(
                f"{name}: num_draft_tokens - 1 = {tokens - 1} nodes, but topk + (num_steps - 1) * topk**2 = {most} candidates "
                f"are all that exist; use at most t{steps}_{topk}_{most + 1}"
            )
        tree = cls(num_steps=steps, topk=topk, num_draft_tokens=tokens)
        if tree.name != name:  # one tree, one name: the name is in every path
            raise ValueError(f"{name!r} is not the name of a tree; write {tree.name}")
        return tree


def count_candidates(steps: int, topk: int) -> int:
    """How many nodes an expansion records: k + (steps - 1) * k**2 (SGLang 0.5.17 to 0.5.23)."""
    return topk + (steps - 1) * topk * topk


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
        if not self.trees():
            raise ValueError(
                f"no tree of num_steps {self.num_steps}, topk {self.topk} and num_draft_tokens {self.num_draft_tokens} can be "
                "built: num_draft_tokens - 1 is above topk + (num_steps - 1) * topk**2 in each; write smaller num_draft_tokens"
            )
        return self

    def watched(self) -> list[TreeShape]:
        """The trees of `trace_trees`; the grid needn't have them."""
        return [TreeShape.parse(name) for name in self.trace_trees]

    def trees(self) -> list[TreeShape]:
        """Every tree of the grid that can be built, by topk, steps, tokens."""
        return list_tree_shapes(self.num_steps, self.topk, self.num_draft_tokens)


def list_tree_shapes(steps: list[int], topks: list[int], tokens: list[int]) -> list[TreeShape]:
    return [
        TreeShape(num_steps=s, topk=k, num_draft_tokens=m)
        for k in sorted(set(topks))
        for s in sorted(set(steps))
        for m in ([s + 1] if k == 1 else sorted(set(tokens)))
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
    def enough_trees_to_judge_the_fit(self) -> "TimeTrees":
        if len(self.trees()) < MIN_TIMED_TREES:
            raise ValueError(
                f"num_steps {self.num_steps}, topk {self.topk} and num_draft_tokens {self.num_draft_tokens} make "
                f"{len(self.trees())} trees, expected at least {MIN_TIMED_TREES}: each is left out once, to see how well the others predict it; write longer lists"
            )
        return self

    def trees(self) -> list[TreeShape]:
        """Every tree of the grid that can be built, by topk, steps, tokens."""
        return list_tree_shapes(self.num_steps, self.topk, self.num_draft_tokens)

    def list_settings(self) -> dict[str, Any]:
        """Return the settings by the names that timing files record: the grid's lists as `steps` and `tokens`."""
        recorded_names = {"num_steps": "steps", "num_draft_tokens": "tokens"}
        settings = self.model_dump(exclude={"checkpoints"})
        return {recorded_names.get(key, key): value for key, value in settings.items()}
