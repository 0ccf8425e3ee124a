"""A recipe's block about itself: what it reproduces, and what of it can be compared."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.params.section import Count, Name, Section, Text

RECIPES_FOLDER = Path("recipes")


class RecipeCells(Section):
    """A cell of ours, but for its tree, which is the published row's; without a checkpoint the engine's plain decoding."""

    engine: Literal["torch", "sglang", "vllm"]
    workload: Name
    checkpoint: Name | None


class PublishedMatch(Section):
    """Published numbers, by their settings, and the cells of ours that are laid beside them."""

    publication: Text  # a file in published/
    rows: Annotated[dict[str, str | float | None], Field(min_length=1)]  # settings that its rows have
    cells: RecipeCells
    assumed: dict[str, str | float]  # settings that nobody stated, and what they are taken for
    measures: dict[
        str, str
    ]  # a published metric -> the measure of ours that is defined as it is (literature/comparison.py)


class Recipe(Section):
    """What a recipe says of itself, in its block `recipe`; the rest of it are keys of params.yaml."""

    status: Annotated[str, Field(pattern=r"^(validated only|ran on \d{4}-\d\d-\d\d, \S.*)$")]
    pins: dict[str, Text]  # an engine or a package -> its version
    substitutes: dict[Literal["target", "draft", "data"], str]  # what stands in for what isn't to be had
    notes: list[str]
    train_rows: Count | None  # for the estimate, where sample_target.train_rows is null; null: nothing is trained
    row_tokens: Count  # and how long a row is on average, prompt and answer
    tolerance: dict[str, Annotated[float, Field(ge=0, lt=1)]]  # of a metric, as a share; others have none
    beside: list[PublishedMatch]

    @model_validator(mode="after")
    def a_target_is_named(self) -> "Recipe":
        for n, match in enumerate(self.beside):
            if "target" not in match.rows:
                raise ValueError(f"beside.{n}.rows has no target, expected it as {match.publication} calls it; name it")
        return self
