"""The sections of benchmark cells: workloads, and the engines that run them (benchmark, benchmark_served)."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from stages.params.load import Load
from stages.params.section import (
    TEXT_OR_NUMBER,
    Count,
    CountOrGrid,
    Name,
    Names,
    NonNegative,
    Positive,
    Section,
    Seed,
    Share,
    SomeNames,
    Text,
    get_named,
)
from stages.params.server_urls import ConfigurationUrls
from stages.params.tree_sections import TreeNames
from stages.params.tree_shape import TreeShape

Rate = Annotated[Annotated[Positive, Tag("a number")] | Annotated[Literal["inf"], Tag("a text")], TEXT_OR_NUMBER]


FEWEST_COMPARED_REPEATS = 3  # an interval over two repeats is 12.7 standard errors to either side


class RepeatUntil(Section):
    """Repeats until the speedup is known well enough: docs/workloads.md."""

    half_width: Share  # of the speedup's 95% interval, as a share of the speedup
    most_repeats: Annotated[int, Field(ge=FEWEST_COMPARED_REPEATS)]


class Workload(Section):
    """The prompts of cells, and how requests arrive: docs/workloads.md."""

    prompts: Name
    num_prompts: CountOrGrid | None
    start: Annotated[int, Field(ge=0)]
    stop: Count | None
    turns: Literal["first", "all"]
    input_tokens: Count | None
    max_new_tokens: CountOrGrid
    length_range: Annotated[float, Field(ge=0, le=1)]
    ignore_eos: bool
    temperature: NonNegative
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Count | None
    request_rate: Rate
    concurrency: CountOrGrid | None
    warmup: Annotated[int, Field(ge=0)]
    repeats: Count
    until: RepeatUntil | None  # None: `repeats`, no more
    deadline_s: Positive
    grade: bool
    seed: Seed

    @model_validator(mode="after")
    def keys_agree(self) -> "Workload":
        is_random = self.prompts == "random"
        if is_random != (self.input_tokens is not None):
            raise ValueError(
                f"input_tokens is {self.input_tokens} with prompts: {self.prompts}, expected a number for random, else null: "
                "other prompts have their own lengths"
            )
        if is_random and self.num_prompts is None:
            raise ValueError("num_prompts is null with prompts: random, expected a number: random prompts have no end")
        if isinstance(self.num_prompts, list) and len(self.num_prompts) != len(self.list_concurrencies()):
            raise ValueError(
                f"num_prompts is {self.num_prompts} with concurrency {self.concurrency}, expected a number for each concurrency; "
                "write as many, or one number for all"
            )
        if not is_random and self.length_range != 1:
            raise ValueError(
                f"length_range is {self.length_range} with prompts: {self.prompts}, expected 1: only random prompts "
                "have drawn lengths"
            )
        if self.until and self.until.most_repeats < self.repeats:
            raise ValueError(
                f"until.most_repeats is {self.until.most_repeats}, expected at least repeats, {self.repeats}, the fewest"
            )
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"stop is {self.stop}, expected more than start, {self.start}; no prompt is between")
        return self

    def list_settings(self) -> dict[str, Any]:
        """Return the settings under the names that fingerprints hash: `begin` for `start`, so that old cells stay valid."""
        old_names = {"start": "begin", "stop": "end"}
        return {old_names.get(key, key): value for key, value in self.model_dump().items()}

    @property
    def fewest_repeats(self) -> int:
        """Return the repeats before a measurement may end."""
        return max(self.repeats, FEWEST_COMPARED_REPEATS) if self.until else self.repeats

    @property
    def most_repeats(self) -> int:
        return self.until.most_repeats if self.until else self.repeats

    @property
    def half_width(self) -> float | None:
        """Return how well the speedup is to be known; None where the number of repeats is fixed."""
        return self.until.half_width if self.until else None

    @property
    def requests_per_second(self) -> float:
        return math.inf if self.request_rate == "inf" else self.request_rate

    @property
    def is_sequential(self) -> bool:
        """Return whether the torch engine runs it prompt by prompt; otherwise it is measured in loads, as on a server."""
        is_single = self.concurrency == 1 and not isinstance(self.max_new_tokens, list)
        return is_single and self.prompts != "random" and not self.ignore_eos

    def list_loads(self) -> list[Load]:
        """Return one load, or several of a sweep."""
        lengths = self.max_new_tokens if isinstance(self.max_new_tokens, list) else [self.max_new_tokens]
        return [Load(length, limit) for length in lengths for limit in self.list_concurrencies()]

    def list_concurrencies(self) -> list[int | None]:
        return list(self.concurrency) if isinstance(self.concurrency, list) else [self.concurrency]

    @property
    def most_prompts(self) -> int | None:
        """Return the prompts of the largest load; None: all that there are."""
        return max(self.num_prompts) if isinstance(self.num_prompts, list) else self.num_prompts

    def limit_prompts(self, concurrency: int | None) -> int | None:
        """Return the prompts of the loads at one concurrency, the first of all; None: all that there are."""
        if not isinstance(self.num_prompts, list):
            return self.num_prompts
        return self.num_prompts[self.list_concurrencies().index(concurrency)]


class Benchmark(Section):
    workloads: Annotated[dict[Name, Workload], Field(min_length=1)]
    mode: Literal["both", "eagle", "baseline"]
    allow_unsandboxed_code: bool  # HumanEval answers run even where the kernel can't keep them from the user's files
    torch_workloads: Names
    tree_scoring: Literal["sglang", "eagle"]
    draft_sampling: Literal["greedy", "sampled"]
    num_threads: Count
    num_gpus_total: Count
    num_gpus_per_model: Count
    max_gpu_memory: Positive | None
    checkpoints: SomeNames
    trees: Annotated[TreeNames, Field(min_length=1)]

    @model_validator(mode="after")
    def torch_engine_supports_it(self) -> "Benchmark":
        for name in self.torch_workloads:
            rate = get_named(self.workloads, name, "benchmark.workloads").request_rate
            if rate != "inf":
                raise ValueError(
                    f"torch_workloads: workload {name} has request_rate {rate} (expected inf): the torch engine has no "
                    "arrival times; take it out of benchmark.torch_workloads, or serve it (benchmark_served)"
                )
            if isinstance(self.workloads[name].num_prompts, list):
                raise ValueError(
                    f"torch_workloads: workload {name} has a list of num_prompts, expected one number: the torch engine has as "
                    "many at each concurrency; take it out of benchmark.torch_workloads, or write a number"
                )
            if self.mode != "both" and self.workloads[name].until:
                raise ValueError(
                    f"mode is {self.mode}, expected both while workload {name} has `until`, which waits for a speedup; set its "
                    "until to null and repeats to a number"
                )
        if self.samples_drafts:
            for tree in (tree for tree in map(TreeShape.parse, self.trees) if tree.topk > 1):
                raise ValueError(
                    f"trees: {tree.name} has topk {tree.topk} and draft_sampling is sampled, expected chains "
                    f"(t{tree.num_steps}_1_{tree.num_steps + 1}): only of chains is a draft verified by the ratio of both "
                    "probabilities; take it out, or set draft_sampling to greedy"
                )
        if self.num_gpus_total % self.num_gpus_per_model:
            raise ValueError(
                f"num_gpus_total is {self.num_gpus_total}, expected a multiple of num_gpus_per_model, "
                f"{self.num_gpus_per_model}, the GPUs that hold one copy of the target; correct one of them"
            )
        return self

    @property
    def samples_drafts(self) -> bool:
        """Return whether drafts are sampled for some workload of the torch engine: none is at temperature 0."""
        return self.draft_sampling == "sampled" and any(
            self.workloads[name].temperature for name in self.torch_workloads
        )

    def is_decoded_one_by_one(self, name: str) -> bool:
        """Return whether the torch engine runs a workload prompt by prompt, both ways; otherwise it is measured in loads."""
        return self.mode == "both" and get_named(self.workloads, name, "benchmark.workloads").is_sequential

    @property
    def processes(self) -> int:
        """Number of copies of the target, each with a share of the prompts."""
        return self.num_gpus_total // self.num_gpus_per_model


class BenchmarkServer(Section):
    """The engine's server: started for each cell, or already running."""

    base_urls: ConfigurationUrls
    model: Text | None
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None
    command: list[Text]
    algorithm: Text
    tp: Count
    mem_fraction: Share
    max_total_tokens: Count | None
    max_batch: Count | None
    torch_compile: bool
    launch_args: list[str]
    vision_patch: bool
    start_timeout_s: Positive


class ServingCosts(Section):
    """Cycles of benchmark_served's engine, timed with simulated acceptance."""

    workloads: Names
    checkpoint: Name
    trees: TreeNames
    accept_length: Annotated[float, Field(gt=1)]  # tokens a cycle


class BenchmarkServed(Section):
    engine: Literal["sglang", "vllm"]
    workloads: Names
    checkpoints: Names
    trees: TreeNames
    interleave: bool
    server: BenchmarkServer
