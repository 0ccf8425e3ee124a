"""The section of what Prefect runs at once, and where: schedule."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from stages.params.section import Count, Name, NonNegative, Section, Text, get_named

CountOrAll = Annotated[
    Annotated[int, Field(ge=0), Tag("a number")] | Annotated[Literal["all"], Tag("a text")],
    Discriminator(lambda value: "a text" if isinstance(value, str) else "a number"),
]


class StageResources(Section):
    """What a stage takes of the machine while it runs."""

    gpus: CountOrAll
    exclusive: bool


class Schedule(Section):
    """What Prefect runs at once, and again: docs/scheduling.md. No stage reads it."""

    slots: Count
    attempts: Count
    retry_pause_s: NonNegative
    runner: Literal["local", "workers", "ray"]
    ray_address: Text | None
    remote_stages: list[Name]
    form_may_set: list[Annotated[str, Field(pattern=r"^[a-z_]+(\.([A-Za-z0-9_]+|\*))+$")]]
    stages: dict[Name, StageResources]

    @model_validator(mode="after")
    def remote_stages_exist(self) -> "Schedule":
        for name in self.remote_stages:
            get_named(self.stages, name, "schedule.stages")
        return self

    def needs(self, stage: str) -> StageResources:
        """Of a stage of dvc.yaml, a cell too; a file that `dvc add` keeps takes a slot. Raises ValueError for others."""
        if stage.endswith(".dvc"):
            return StageResources(gpus=0, exclusive=False)
        return get_named(self.stages, stage.partition("@")[0], "schedule.stages")
