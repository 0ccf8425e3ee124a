"""The section `schedule`: which stages Prefect runs at once, and where."""

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from stages.params.section import TEXT_OR_NUMBER, Count, Name, NonNegative, Section, get_named

CountOrAll = Annotated[
    Annotated[int, Field(ge=0), Tag("a number")] | Annotated[Literal["all"], Tag("a text")], TEXT_OR_NUMBER
]


class StageResources(Section):
    """The resources that a stage occupies while it runs."""

    gpus: CountOrAll
    exclusive: bool


class Schedule(Section):
    """Concurrency, retries and hosts of stages: docs/scheduling.md. No stage reads it."""

    slots: Count
    attempts: Count
    retry_pause_s: NonNegative
    runner: Literal["local", "workers"]
    remote_stages: list[Name]
    form_may_set: list[Annotated[str, Field(pattern=r"^[a-z_]+(\.([A-Za-z0-9_]+|\*))+$")]]
    stages: dict[Name, StageResources]

    @model_validator(mode="after")
    def remote_stages_exist(self) -> "Schedule":
        for name in self.remote_stages:
            get_named(self.stages, name, "schedule.stages")
        return self

    def get_needs(self, stage: str) -> StageResources:
        """Return the resources of a stage of dvc.yaml (cells included) or of a `.dvc` file. Raises ValueError for others."""
        if stage.endswith(".dvc"):
            return StageResources(gpus=0, exclusive=False)
        return get_named(self.stages, stage.partition("@")[0], "schedule.stages")
