"""The sections of benchmark cells: workloads, and the engines that run them (benchmark, benchmark_served)."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag

from stages.params.engines import SERVED, ConfigurationUrls, ServedEngine
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
    _check_unique,
    get_named,
)
from stages.params.tree_sections import ShapeNames
from stages.params.tree_shape import SGLANG_SCORING, Load, ScoringName, parse_shape

Rate = Annotated[Annotated[Positive, Tag("a number")] | Annotated[Literal["inf"], Tag("a text")], TEXT_OR_NUMBER]


class RepeatUntil(Section):
    """Repeats until the speedup is known well enough: docs/workloads.md."""

    half_width: Share = 0.05  # of the speedup's 95% interval, as a share of the speedup
    most_seconds: Positive = 60  # of measured decoding, plain and speculative: no repeat begins after


class Workload(Section):
    """The prompts of cells, and how requests arrive: docs/workloads.md."""

    # eval: the eval split; written: questions that the target writes; random: the eval split's tokens at given lengths; or a name
    # of prepare_prompts.sets
    prompts: Name
    num_prompts: CountOrGrid | None = 80  # null: all; a list: a number for each concurrency
    start: Annotated[int, Field(ge=0)] = 0  # index of the first prompt of the set
    stop: Count | None = None  # index after the last; null: the set's end
    # of conversations: first turn only; or all, each after the engine's own earlier answers
    turns: Literal["first", "all"] = "first"
    input_tokens: Count | None = None  # length of random prompts
    max_new_tokens: CountOrGrid = 512  # a list is a sweep: one load each
    # 0.5: lengths of random prompts and their answers are drawn from 50% to 100% of those above
    length_range: Annotated[float, Field(ge=0, le=1)] = 1.0
    ignore_eos: bool = False  # true: answers continue to max_new_tokens
    # above 0 answers are sampled with `seed`; verification keeps the target's distribution
    temperature: NonNegative = 0.0
    # sampled from the likeliest tokens of this total probability; 1: all
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count | None = None  # and from at most so many tokens; null: all
    request_rate: Rate = "inf"  # requests per second, Poisson; inf: all at once
    concurrency: CountOrGrid | None = 1  # requests in flight at once; a list is a sweep; null: no limit
    warmup: Annotated[int, Field(ge=0)] = 1  # unmeasured requests before
    repeats: Count = 3  # of the whole load at most; intervals are over repeats
    # fewer repeats where a cell measures plain decoding too: until the speedup is known; null: always `repeats`
    until: RepeatUntil | None = RepeatUntil()
    deadline_s: Positive = 600  # timeout of one request
    # grade answers of gsm8k and math500 by the set's own; of humaneval by running the generated code
    grade: bool = False
    seed: Seed = 42

    def list_conflicts(self) -> Iterator[str]:
        is_random = self.prompts == "random"
        if is_random != (self.input_tokens is not None):
            yield f"input_tokens is {self.input_tokens} with prompts: {self.prompts}, expected a number for random, else null"
        if self.prompts in ("random", "written") and self.num_prompts is None:
            yield f"num_prompts is null with prompts: {self.prompts}, expected a number: they have no end"
        if isinstance(self.num_prompts, list) and len(self.num_prompts) != len(self.list_concurrencies()):
            yield f"num_prompts is {self.num_prompts} with concurrency {self.concurrency}, expected a number for each, or one"
        if not is_random and self.length_range != 1:
            yield f"length_range is {self.length_range} with prompts: {self.prompts}, expected 1, or random prompts"
        if self.stop is not None and self.stop <= self.start:
            yield f"stop is {self.stop}, expected more than start, {self.start}; no prompt is between"

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
    # prompts and how requests arrive; of benchmark_served too
    workloads: Annotated[dict[Name, Workload], Field(min_length=1)]
    # both; eagle: only speculative decoding, without a speedup; baseline: only plain decoding (docs/workloads.md)
    mode: Literal["both", "eagle", "baseline"] = "both"
    # true: workloads of humaneval may be graded, which runs programs that the target wrote
    run_generated_code: bool = False
    torch_workloads: Names  # workloads for the torch engine, which interleaves plain and speculative decoding
    tree_scoring: ScoringName = SGLANG_SCORING  # as replay_trees.tree_scoring
    # above temperature 0; greedy: the likeliest drafts, as SGLang with DFlash and vLLM's default; sampled: drawn, as
    # SGLang with DSpark or DFlash2 and vLLM's draft_sample_method: probabilistic. Block drafts' chains only
    # (docs/trees.md)
    draft_sampling: Literal["greedy", "sampled"] = "greedy"
    # CPU threads of the torch engine's decoding, here and in time_cycles: tokens one at a time
    # gain by more only for targets of a GiB and more
    num_threads: Count = 1
    num_gpus_total: Count = 1  # GPUs of this host; prompts are divided over the copies of the target
    num_gpus_per_model: Count = 1  # GPUs of one copy, for a target larger than a GPU; each holds consecutive layers
    max_gpu_memory: Positive | None = None  # GiB of each GPU for weights, caches and everything else; null: all
    checkpoints: SomeNames  # others of replay_trees.checkpoints: in the table with replayed tau and predicted speedup
    # t<num_steps>_<topk>_<num_draft_tokens>; of other families s<depth>_<nodes>, n<longest>_<shortest>_<length>,
    # l<window>_<level>_<guesses> (docs/methods.md). A cell whose draft can't draft the shape is left out, and says why
    trees: Annotated[ShapeNames, Field(min_length=1)]

    def list_conflicts(self) -> Iterator[str]:
        for name in self.torch_workloads:
            rate = get_named(self.workloads, name, "benchmark.workloads").request_rate
            if rate != "inf":
                yield f"torch_workloads: {name} has request_rate {rate}, expected inf; serve it (benchmark_served)"
        for tree in map(parse_shape, self.trees if self.samples_drafts else []):
            if tree.topk > 1:
                yield f"trees: {tree.name} has topk {tree.topk}, expected chains while draft_sampling is sampled"
        if self.num_gpus_total % self.num_gpus_per_model:
            yield f"num_gpus_total is {self.num_gpus_total}, expected a multiple of num_gpus_per_model, {self.num_gpus_per_model}"

    @property
    def samples_drafts(self) -> bool:
        """Return whether drafts are sampled for some workload of the torch engine: none is at temperature 0."""
        temperatures = [self.workloads[name].temperature for name in self.torch_workloads]
        return self.draft_sampling == "sampled" and any(temperatures)

    def is_decoded_one_by_one(self, name: str) -> bool:
        """Return whether the torch engine runs a workload prompt by prompt, both ways; otherwise it is measured in loads."""
        return self.mode == "both" and get_named(self.workloads, name, "benchmark.workloads").is_sequential

    @property
    def processes(self) -> int:
        """Number of copies of the target, each with a share of the prompts."""
        return self.num_gpus_total // self.num_gpus_per_model


class BenchmarkServer(Section):
    """The servers of an engine: started for each cell, or already running."""

    # {baseline: "http://127.0.0.1:30000", e009-t8_2_16: ...}: running servers; others are started
    base_urls: ConfigurationUrls = Field(default_factory=dict)
    model: Text | None = None  # the servers' name of the target; null: the path of its folder
    # name of the environment variable that holds the key, never the key itself
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    # [python3, -m, sglang.launch_server]; []: the engine in serving-env, otherwise on the PATH
    command: list[Text] = Field(default_factory=list)
    algorithm: Text = "EAGLE3"
    tp: Count = 1
    mem_fraction: Share = 0.8  # of the GPU's memory, for weights and KV cache
    max_total_tokens: Count | None = None  # tokens of the KV cache; null: as many as fit
    max_batch: Count | None = None  # most requests in a batch, and in CUDA graphs; null: the workload's concurrency
    torch_compile: bool = False
    # llama.cpp: GGUF type of target and draft, as q8_0 or q4_0; null: target.dtype
    quantised: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")] | None = None
    # more flags of the engine, as [--attention-backend, triton]; the baseline gets them too
    launch_args: list[str] = Field(default_factory=list)
    vision_patch: bool = True  # correct what SGLang 0.5.17 feeds the draft of a multimodal target: docs/serving.md
    start_timeout_s: Positive = 900


def count_fitting(mem_fraction: float) -> int:
    """Return how many servers of this share of a GPU's memory fit on it."""
    return max(1, int(1 / mem_fraction + 1e-9))


def _add_other_engines(servers: Any) -> Any:
    return {engine: {} for engine in SERVED} | servers if isinstance(servers, dict) else servers


class BenchmarkServed(Section):
    OLD_KEYS: ClassVar = {
        "engine": "engine: a run has several engines now; write engines: [sglang]",
        "server": "server: each engine has its own now; write its keys under servers: {sglang: ...}",
    }

    # of sglang, vllm, llama.cpp, each in its own environment (make serving-env); each measures all of these cells
    engines: Annotated[list[ServedEngine], Field(min_length=1), AfterValidator(_check_unique)]
    workloads: Names  # names of benchmark.workloads; []: no served cells
    checkpoints: Names
    trees: ShapeNames
    interleave: bool = False  # true: each repeat alternates with one on a second server without the draft
    # by engine, as {vllm: {tp: 2}}; its other keys, and other engines, as by default
    servers: Annotated[dict[ServedEngine, BenchmarkServer], BeforeValidator(_add_other_engines)] = Field(
        default_factory=dict
    )

    def get_server(self, engine: str) -> BenchmarkServer:
        return next(server for name, server in self.servers.items() if name == engine)

    def count_cells_at_once(self, engine: str) -> int:
        """Return how many cells have room for their servers on a GPU; 1 where a cache is as large as the memory found free."""
        server = self.get_server(engine)
        if server.max_total_tokens is None or server.base_urls:
            return 1
        return max(1, count_fitting(server.mem_fraction) // (1 + self.interleave))

    def list_conflicts(self) -> Iterator[str]:
        for engine, server in self.servers.items():
            if server.quantised and not SERVED[engine].loads_quantised:
                yield f"servers.{engine}.quantised is {server.quantised}, expected null: it loads no such file"
