"""The section `schedule`: which stages Prefect runs at once, and where."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from stages.params.section import TEXT_OR_NUMBER, Count, Name, NonNegative, Section, get_named, suggest_name

CountOrAll = Annotated[
    Annotated[int, Field(ge=0), Tag("a number")] | Annotated[Literal["all"], Tag("a text")], TEXT_OR_NUMBER
]


class StageResources(Section):
    """The resources that a stage occupies while it runs."""

    gpus: CountOrAll
    exclusive: bool


DEFAULT_NEEDS = {
    name: StageResources.model_validate({"gpus": gpus, "exclusive": exclusive})
    for gpus, exclusive, names in (
        (0, False, ("fix_data", "prepare_target", "init_draft", "import_draft", "report")),
        ("all", False, ("sample_target", "extract_hiddens", "train_draft")),
        (1, False, ("prepare_prompts", "check_overfit", "replay_trees")),
        (1, True, ("benchmark",)),
        ("all", True, ("time_cycles", "benchmark_served", "benchmark_served_baseline")),
    )
    for name in names
}
MEASURING = ("replay_trees", *(name for name, needs in DEFAULT_NEEDS.items() if needs.exclusive))


def _add_default_needs(named: Any) -> Any:
    return DEFAULT_NEEDS | named if isinstance(named, dict) else named


class Schedule(Section):
    """Concurrency, retries and hosts of stages: docs/scheduling.md. No stage reads it."""

    slots: Count = 2  # stages at once, over all runs on this machine
    attempts: Count = 3  # attempts of a stage that fails by the network or a server; other failures are final
    retry_pause_s: NonNegative = 20  # before the second attempt; twice that before the third
    # local: all stages here; workers: `remote_stages` on hosts of a work pool
    runner: Literal["local", "workers"] = "local"
    # others run here; train_draft may be added: its hidden states are then sent too
    remote_stages: list[Name] = Field(default_factory=lambda: list(MEASURING))
    # keys that run commands or leave the project, but that the web forms may set, as
    # [benchmark_served.servers.*.launch_args]: by all who have the password; docs/security.md
    form_may_set: list[Annotated[str, Field(pattern=r"^[a-z_]+(\.([A-Za-z0-9_]+|\*))+$")]] = Field(default_factory=list)
    # gpus: number of visible GPUs, or all; without any GPU such stages run one at a time. exclusive: no other stage runs on
    # this machine, since it would change what is timed. Stages that are not named need what they need by default
    stages: Annotated[dict[Name, StageResources], BeforeValidator(_add_default_needs)] = Field(default_factory=dict)

    def list_conflicts(self) -> Iterator[str]:
        for name in self.remote_stages:
            if name not in self.stages:
                yield f"remote_stages: no stage {name}{suggest_name(name, self.stages)}; there are {', '.join(self.stages)}"

    def get_needs(self, stage: str) -> StageResources:
        """Return the resources of a stage of dvc.yaml (cells included) or of a `.dvc` file. Raises ValueError for others."""
        if stage.endswith(".dvc") or stage == "inputs":
            return StageResources(gpus=0, exclusive=False)
        return get_named(self.stages, stage.partition("@")[0], "schedule.stages")
