"""The fields of the forms in Prefect's pages, and the keys of params.yaml that they set.

The page refuses what does not match the patterns below, which become part of its form; the run refuses in its first
second what cannot be: a tree that cannot be built, a name that params.yaml does not have.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pipeline import form_permissions
from pipeline.recipes import list_recipes
from stages.params.engines import DEFAULT_KIND, EngineKind
from stages.params.schema import Params
from stages.params.section import ROOT_CHECKPOINT, Count, Name
from stages.params.tree_shape import TreeShape

TREE_NAME_PATTERN = r"^t[1-9][0-9]*_[1-9][0-9]*_[1-9][0-9]*$"


def _check_rising(epochs: list[int]) -> list[int]:
    if sorted(set(epochs)) != epochs:
        raise ValueError(f"epochs are {epochs}, expected each above the one before: each goes on from it; sort them")
    return epochs


TreeName = Annotated[str, Field(pattern=TREE_NAME_PATTERN), AfterValidator(lambda name: TreeShape.parse(name).name)]
Epochs = Annotated[list[Count], AfterValidator(_check_rising)]
TREE_NAME_HELP = "tSTEPS_TOPK_TOKENS, as t8_2_16"  # drawn as Markdown, where t<num_steps>_... would be a tag
AS_PARAMS_HELP = "none: as params.yaml has them"


class Changes(BaseModel):
    """Differences from params.yaml. With any of them the run has a workspace of its own."""

    model_config = ConfigDict(extra="forbid")
    trees: list[TreeName] = Field(
        default=[], description=f"{TREE_NAME_HELP}, to time on the torch engine; {AS_PARAMS_HELP}"
    )
    epochs: Epochs = Field(
        default=[],
        description=f"after which epochs of training a checkpoint is saved and measured, as 3, 9; {AS_PARAMS_HELP}",
    )
    workloads: list[Name] = Field(default=[], description=f"for the torch engine; {AS_PARAMS_HELP}")
    other: dict[str, Any] = Field(
        default={},
        description='any other keys, as {"train_draft.learning_rate": 0.0003}; commands, flags, addresses and paths outside '
        "the project only where schedule.form_may_set of params.yaml names them",
    )

    def build_sections(self, params: Params) -> dict[str, dict[str, Any]]:
        """Return the keys by section, as a recipe has them. Raises ValueError for an unknown key, or one a form may not set."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.other.items():
            section, *inner = key.split(".")
            if section not in Params.model_fields or not inner or "" in inner:
                raise ValueError(f"other: {key!r} is no key of params.yaml; write section.key, as train_draft.seed")
            values = found.setdefault(section, {})
            for part in inner[:-1]:
                values = values.setdefault(part, {})
                if not isinstance(values, dict):
                    raise ValueError(f"other: {key!r} is below a key that is given a value too; write one of the two")
            values[inner[-1]] = value
        form_permissions.check_form(found, params)
        for key, names in {"trees": self.trees, "torch_workloads": self.workloads}.items():
            if names:
                found.setdefault("benchmark", {})[key] = list(dict.fromkeys(names))
        if self.epochs:
            _build_segments(self.epochs, params, found)
        return found


def _build_segments(epochs: list[int], params: Params, found: dict[str, dict[str, Any]]) -> None:
    """Add a chain of segments to `found`, and to every list of checkpoints; imported ones and other methods' stay."""
    names = [f"e{epoch:03d}" for epoch in epochs]
    pairs = zip([ROOT_CHECKPOINT, *names], names, [0, *epochs], epochs, strict=False)
    segments = {name: {"from": start, "epochs": last - first} for start, name, first, last in pairs}
    others = {
        name: s.model_dump(by_alias=True) for name, s in params.train_draft.checkpoints.items() if not s.family.has_root
    }
    found.setdefault("train_draft", {})["checkpoints"] = {**segments, **others}
    found.setdefault("init_draft", {})["checkpoints"] = [ROOT_CHECKPOINT]
    lists = {
        "replay_trees": params.replay_trees.checkpoints,
        "benchmark": params.benchmark.checkpoints,
        "benchmark_served": params.benchmark_served.checkpoints,
    }
    for section, present in lists.items():
        kept = [name for name in present if name in others or name in params.import_draft.checkpoints]
        found.setdefault(section, {})["checkpoints"] = [*names, *kept]


class Sweep(BaseModel):
    """A cell for every tree with every checkpoint under every workload."""

    model_config = ConfigDict(extra="forbid")
    trees: list[TreeName] = Field(min_length=1, description=f"{TREE_NAME_HELP}; a chain is t8_1_9")
    checkpoints: list[Name] = Field(default=[], description=f"trained or imported ones; {AS_PARAMS_HELP}")
    workloads: list[Name] = Field(default=[], description=AS_PARAMS_HELP)
    engine: EngineKind = Field(default=DEFAULT_KIND, description="torch; served: benchmark_served.engines")

    def build_sections(self) -> dict[str, dict[str, Any]]:
        """Return the keys by section, as a recipe has them."""
        section, workloads_key = (
            ("benchmark_served", "workloads") if self.engine == "served" else ("benchmark", "torch_workloads")
        )
        given = {"trees": self.trees, "checkpoints": self.checkpoints, workloads_key: self.workloads}
        return {section: {key: list(dict.fromkeys(names)) for key, names in given.items() if names}}


def _check_recipe_name(name: str) -> str:
    """Return the name if recipes/ has it, since it becomes a path. Raises ValueError for any other."""
    if name not in (known := list_recipes()):
        raise ValueError(f"there is no recipe {name!r}; known are {', '.join(known)}")
    return name


RecipeName = Annotated[str, AfterValidator(_check_recipe_name)]
