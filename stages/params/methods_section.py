"""The section of the table of methods: benchmark_methods, by rows of four kinds."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from stages.params.section import Count, Name, Section
from stages.params.tree_sections import TreeShape


class DynamicRow(Section):
    """A row of the table of methods: a tree grown by how likely its branches are."""

    method: Literal["eagle3", "eagle2", "eagle", "medusa"]  # the last two are StaticRow's: for whoever misspells one
    checkpoint: Name
    tree: Annotated[str, AfterValidator(lambda name: TreeShape.parse(name).name)]


class StaticRow(Section):
    """A tree of `nodes`, the root counted, and at most `depth` guesses deep, chosen once by the checkpoint's accuracies."""

    method: Literal["eagle", "medusa"]
    checkpoint: Name
    depth: Count
    nodes: Annotated[int, Field(ge=2)]


class NgramRow(Section):
    method: Literal["ngram", "lookahead"]  # the last is LookaheadRow's
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
    """By its method; with an unknown one, or one that stands in the other list, what tells of all that may stand there."""
    found = value.get("method") if isinstance(value, dict) else getattr(value, "method", None)
    return {"eagle": "a static row", "medusa": "a static row", "lookahead": "a row ahead"}.get(str(found), "a row")


class BenchmarkMethods(Section):
    """Rows of the table of methods, by names of the user's own."""

    workload: Name
    with_draft: dict[
        Name,
        Annotated[
            Annotated[DynamicRow, Tag("a row")] | Annotated[StaticRow, Tag("a static row")],
            Discriminator(_discriminate_row),
        ],
    ]
    without_draft: dict[
        Name,
        Annotated[
            Annotated[NgramRow, Tag("a row")] | Annotated[LookaheadRow, Tag("a row ahead")],
            Discriminator(_discriminate_row),
        ],
    ]
