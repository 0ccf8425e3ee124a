"""The section of the methods table, benchmark_methods: four kinds of rows."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from stages.params.section import Count, Name, Section
from stages.params.tree_sections import TreeName


class DynamicRow(Section):
    """A row with a dynamic tree: the likeliest branches grow."""

    method: Literal[
        "eagle3", "eagle2", "eagle", "medusa"
    ]  # eagle and medusa need StaticRow; listed here for error messages
    checkpoint: Name
    tree: TreeName


class StaticRow(Section):
    """A row with a static tree of `nodes` (root counted), at most `depth` deep, chosen by the accuracies of the checkpoint."""

    method: Literal["eagle", "medusa"]
    checkpoint: Name
    depth: Count
    nodes: Annotated[int, Field(ge=2)]


class NgramRow(Section):
    method: Literal["ngram", "lookahead"]  # lookahead needs LookaheadRow; listed here for error messages
    longest: Count
    shortest: Count
    length: Count

    @model_validator(mode="after")
    def in_order(self) -> "NgramRow":
        if self.shortest > self.longest:
            raise ValueError(f"shortest is {self.shortest}, expected at most longest, {self.longest}; lower it")
        return self


class LookaheadRow(Section):
    method: Literal["lookahead"]
    window: Count
    level: Annotated[int, Field(ge=2)]
    guesses: Count


MethodRow = DynamicRow | StaticRow | NgramRow | LookaheadRow


def _discriminate_row(value: Any) -> str:
    """Return the union tag of a row's method; an unknown method gets the class whose error lists all methods."""
    found = value.get("method") if isinstance(value, dict) else getattr(value, "method", None)
    return {"eagle": "a static row", "medusa": "a static row", "lookahead": "a row ahead"}.get(str(found), "a row")


class BenchmarkMethods(Section):
    """Rows of the methods table, by names that the user chose."""

    workload: Name  # one of benchmark.torch_workloads
    # NAME: {method: eagle3 or eagle2, checkpoint: e009, tree: t8_2_16}, or {method: eagle or medusa, checkpoint:
    # medusa9, depth: 4, nodes: 16} (root counted)
    with_draft: dict[
        Name,
        Annotated[
            Annotated[DynamicRow, Tag("a row")] | Annotated[StaticRow, Tag("a static row")],
            Discriminator(_discriminate_row),
        ],
    ]
    # NAME: {method: ngram, longest: 3, shortest: 1, length: 8}, or {method: lookahead, window: 5, level: 4, guesses:
    # 5}
    without_draft: dict[
        Name,
        Annotated[
            Annotated[NgramRow, Tag("a row")] | Annotated[LookaheadRow, Tag("a row ahead")],
            Discriminator(_discriminate_row),
        ],
    ]
