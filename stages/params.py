"""params.yaml, typed and strict: one section, one frozen class. No torch, no defaults.

    python -m stages.params        # check the whole file, as `make run` does before anything starts

Every stage reads its parameters through `load()`, which checks the *whole* file: DVC drops keys that are not
strings without a word, so a misspelt section would otherwise vanish from the graph (research/dvc_prefect.md, 1).
This file is in no stage's `deps`: DVC tracks the values, and the code below holds none.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

PARAMS = Path("params.yaml")
PROMPT_SETS = Path("data/prompt_sets")
DATASET = r"\w[\w.-]*(/\w[\w.-]*)?"  # the id of one on the Hub
ROOT_CHECKPOINT = "e000"  # what init_draft makes; every chain of segments starts here

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
Grid = Annotated[list[Count], Field(min_length=1)]
T = TypeVar("T")
# http://host:port, also http://host:6000-6007 for a server on each of those ports; no user:password@, which would be logged
ONE_URL = r"^https?://[^\s/@?#:]+(:\d{1,5})?(/v1)?/?$"
BASE_URL = r"^https?://[^\s/@?#:]+(:\d{1,5}(-\d{1,5})?)?(/v1)?/?$"
Dtype = Literal["float32", "bfloat16", "float16"]
TAGS = {  # of places in a form, which no user wrote
    "[key]", "a number", "a mixture", "a list", "a text", "a segment", "a segment of a layer", "a segment of heads",
    "a row", "a static row", "a row ahead",
}  # fmt: skip
RECIPES = Path("recipes")
OWN_PROMPTS = {"eval", "random"}  # the pipeline's own, beside prepare_prompts.sets
FEWEST_TIMED = 8  # trees of time_trees: a fit has up to six terms


def _each_once(names: list[str]) -> list[str]:
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"{', '.join(twice)} is listed twice; list each name once")
    return names


def _trees_can_be_built(names: list[str]) -> list[str]:
    for name in names:
        Tree.parse(name)
    return names


Names = Annotated[list[Name], AfterValidator(_each_once)]
SomeNames = Annotated[list[Name], Field(min_length=1), AfterValidator(_each_once)]
Trees = Annotated[list[str], AfterValidator(_trees_can_be_built), AfterValidator(_each_once)]


class Section(BaseModel):
    """A strict, frozen section: unknown keys are refused, an integer is not a string, nothing has a default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class Tree(BaseModel):
    """A draft tree by name: `t8_2_16` is num_steps 8, topk 2, num_draft_tokens 16 (the root counted, as in SGLang)."""

    model_config = ConfigDict(frozen=True)
    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def name(self) -> str:
        return f"t{self.num_steps}_{self.topk}_{self.num_draft_tokens}"

    @classmethod
    def parse(cls, name: str) -> "Tree":
        """Raises ValueError for a name that is no tree or a tree that cannot be built."""
        match = re.fullmatch(r"t?([0-9]+)_([0-9]+)_([0-9]+)", name)
        if not match:
            raise ValueError(f"{name!r} is not a tree; write t<num_steps>_<topk>_<num_draft_tokens>, as t8_2_16")
        steps, topk, tokens = map(int, match.groups())
        if steps < 1 or topk < 1 or tokens < 2:
            raise ValueError(
                f"{name}: num_steps and topk must be at least 1 and num_draft_tokens at least 2 (root counted)"
            )
        if topk == 1 and tokens != steps + 1:
            raise ValueError(
                f"{name}: at topk 1 a tree is a chain of num_steps drafts and the root, as SGLang forces; "
                f"write t{steps}_1_{steps + 1}"
            )
        if tokens - 1 > (most := candidates(steps, topk)):
            raise ValueError(
                f"{name}: num_draft_tokens - 1 = {tokens - 1} nodes, but topk + (num_steps - 1) * topk**2 = {most} candidates "
                f"are all that exist; use at most t{steps}_{topk}_{most + 1}"
            )
        tree = cls(num_steps=steps, topk=topk, num_draft_tokens=tokens)
        if tree.name != name:  # one tree, one name: the name is in every path
            raise ValueError(f"{name!r} is not the name of a tree; write {tree.name}")
        return tree


def candidates(steps: int, topk: int) -> int:
    """How many nodes an expansion records: k + (steps - 1) * k**2 (SGLang 0.5.17 to 0.5.23)."""
    return topk + (steps - 1) * topk * topk


class Target(Section):
    model: Annotated[str, Field(min_length=1)]
    revision: str | None
    trust_remote_code: bool
    dtype: Dtype
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
    num_threads: Count
    feature_layers: Annotated[list[Count], Field(min_length=3, max_length=3)] | None
    lm_head_key: Annotated[str, Field(min_length=1)] | None
    chat_template: Annotated[str, Field(pattern=r"^[^/]+$")] | None

    def gpus(self, processes: int = 1) -> list[int]:
        """Which of the visible GPUs a stage computes on: the one named, or of several processes each its own."""
        if self.device == "cpu":
            return []
        return [int(self.device.partition(":")[2] or 0)] if processes == 1 else list(range(processes))


class PrepareTarget(Section):
    seed: Seed
    steps: Count
    batch_tokens: Count
    learning_rate: Positive


class FixData(Section):
    raw: Annotated[str, Field(min_length=1)]
    format: Literal["auto", "sharegpt", "ultrachat", "messages", "prompt_answer"]
    answers: Literal["toon", "text"]
    surrounding_text: Literal["strip", "keep"]
    min_chars: Count
    max_chars: Count
    max_dropped_share: Annotated[float, Field(ge=0, lt=1)] | None
    near_duplicate: Annotated[float, Field(ge=0.5, le=1)] | None
    eval_file: Annotated[str, Field(min_length=1)] | None
    eval_rows: Count | None
    eval_share: Share
    eval_overlap: Literal["remove", "keep"]

    @model_validator(mode="after")
    def keys_agree(self) -> "FixData":
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars {self.min_chars} is above max_chars {self.max_chars}; lower it")
        if self.eval_rows is not None and self.eval_file is None:
            raise ValueError(
                f"eval_rows is {self.eval_rows}, expected null where eval_file is null: the split is then by eval_share; "
                "name the file whose first rows are meant"
            )
        return self

    def eval_path(self) -> Path | None:
        """Where eval_file lies: in the folder `raw`, or `raw` itself; None where the split is by hash."""
        if self.eval_file is None:
            return None
        raw = Path(self.raw)
        return raw / self.eval_file if raw.is_dir() else raw.with_name(self.eval_file)


class Server(Section):
    """How sample_target reaches the servers that answer; what only concerns the way there is tracked by no stage."""

    launch: Literal["transformers", "sglang", "vllm"] | None
    launch_args: list[str]
    start_timeout_s: Positive
    base_urls: list[Annotated[str, Field(pattern=ONE_URL)]]
    model: Annotated[str, Field(min_length=1)] | None
    concurrency: Count
    timeout_s: Positive
    attempts: Count
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None

    @model_validator(mode="after")
    def one_way_there(self) -> "Server":
        if self.launch and self.base_urls:
            raise ValueError(
                f"launch is {self.launch} and base_urls names {len(self.base_urls)} server(s), expected one of the two: "
                "set launch to null to use yours, or base_urls to [] to have one started"
            )
        return self

    @property
    def known(self) -> bool:
        return bool(self.launch or self.base_urls)


class Portion(Section):
    """A part of a mixture: of the rows, as many as its weight is of all weights, are drawn at `temperature`."""

    temperature: NonNegative
    weight: Positive


CountOrGrid = Annotated[
    Annotated[Count, Tag("a number")] | Annotated[Grid, Tag("a list")],
    Discriminator(lambda value: "a list" if isinstance(value, list) else "a number"),
]
Rate = Annotated[
    Annotated[Positive, Tag("a number")] | Annotated[Literal["inf"], Tag("a text")],
    Discriminator(lambda value: "a text" if isinstance(value, str) else "a number"),
]
Temperature = Annotated[
    Annotated[NonNegative, Tag("a number")] | Annotated[list[Portion], Field(min_length=1), Tag("a mixture")],
    Discriminator(lambda value: "a mixture" if isinstance(value, list) else "a number"),
]


class SampleTarget(Section):
    backend: Literal["transformers", "server", "keep"]
    train_rows: Count | None
    eval_rows: Count | None
    temperature: Temperature
    top_p: Annotated[float, Field(gt=0, le=1)]
    thinking: bool | None
    history: Literal["data", "target"]
    seed: Seed
    batch_size: Count
    max_new_tokens: Count
    truncated: Literal["keep", "drop"]
    shard_size: Count
    server: Server

    @model_validator(mode="after")
    def backend_has_what_it_needs(self) -> "SampleTarget":
        if self.backend == "server" and not self.server.known:
            raise ValueError(
                "backend is server, but neither server.launch nor server.base_urls says which; name your servers in "
                "base_urls, or set launch to transformers, sglang or vllm"
            )
        if self.history == "target" and self.backend != "server":
            raise ValueError(
                f"history is target, expected data with backend {self.backend}: asking a later turn after the target's own "
                "earlier answers needs backend: server"
            )
        return self

    @property
    def mixture(self) -> list[tuple[float, float]]:
        """(temperature, weight) of the training rows; one of weight 1 where all have the same."""
        parts = self.temperature
        return [(p.temperature, p.weight) for p in parts] if isinstance(parts, list) else [(parts, 1.0)]

    @property
    def eval_temperature(self) -> float:
        """Of the second eval set, one number since results are compared at one: the mixture's heaviest above 0, the first
        of equals; 0 where all of it is greedy."""
        return max([part for part in self.mixture if part[0] > 0], key=lambda part: part[1], default=(0.0, 0.0))[0]


class ExtractHiddens(Section):
    dtype: Literal["float32", "bfloat16", "float16", "fp8"]
    max_length: Count
    batch_tokens: Count
    shard_mib: Count
    compile: bool
    processes: Count
    online: bool
    import_: Annotated[Annotated[str, Field(min_length=1)] | None, Field(alias="import")]

    @model_validator(mode="after")
    def one_source(self) -> "ExtractHiddens":
        if self.online and self.import_ is not None:
            raise ValueError(
                f"online is true and import is {self.import_}, expected one of the two: what is imported lies on a disk "
                "already; set online to false, or import to null"
            )
        return self


class InitDraft(Section):
    draft_vocab_size: Count | None
    intermediate_size: Count | None
    max_position_embeddings: Count | None
    draft_config_path: Annotated[str, Field(pattern=r"^draft_configs/[^/]+$")] | None
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    qk_norm: bool
    window: Count | None
    from_: Annotated[Annotated[str, Field(min_length=1)] | None, Field(alias="from")]
    revision: str | None
    seed: Seed

    @model_validator(mode="after")
    def options_go_together(self) -> "InitDraft":
        if self.revision is not None and self.from_ is None:
            raise ValueError(f"revision is {self.revision!r}, expected null where from is null; name the draft in from")
        if self.qk_norm and self.window is not None:
            raise ValueError(
                f"qk_norm is true and window {self.window}, expected one of the two: vLLM, which alone loads drafts with q/k "
                "norms, gives such a layer no window; set window to null, or qk_norm to false"
            )
        return self


class CheckOverfit(Section):
    steps: Count
    learning_rate: Positive
    min_tau: Annotated[float, Field(ge=1)]


class Segment(Section):
    """A saved checkpoint: `epochs` more epochs, starting from the checkpoint named `from`; EAGLE-3's, unless it says a method."""

    from_: Annotated[Name, Field(alias="from")]
    epochs: Count

    @property
    def rival(self) -> str | None:
        """The method, where it is another than EAGLE-3."""
        found = getattr(self, "method", "eagle3")
        return None if found == "eagle3" else found

    @property
    def width(self) -> int | None:
        """How many heads Medusa has; None for others."""
        return getattr(self, "heads", None)


class OfLayer(Segment):
    method: Literal["eagle3", "eagle", "medusa"]  # the last is OfHeads', and named here for whoever misspells one


class OfHeads(Segment):
    method: Literal["medusa"]
    heads: Count


def _kind_of_segment(value: Any) -> str:
    found = value.get("method", "none") if isinstance(value, dict) else getattr(value, "method", "none")
    return {"none": "a segment", "medusa": "a segment of heads"}.get(str(found), "a segment of a layer")


AnySegment = Annotated[
    Annotated[Segment, Tag("a segment")]
    | Annotated[OfLayer, Tag("a segment of a layer")]
    | Annotated[OfHeads, Tag("a segment of heads")],
    Discriminator(_kind_of_segment),
]


def _method(segment: Segment) -> str:
    return f"{segment.width} heads of medusa" if segment.width else segment.rival or "eagle3"


class TrainDraft(Section):
    checkpoints: dict[Name, AnySegment]  # none, where all drafts are imported
    ttt_steps: Count
    ttt_decay: Annotated[float, Field(gt=0, le=1)]
    mask: Literal["aligned", "eagle"]
    loss: Literal["ce", "lk_alpha", "lk_lambda"]
    dtype: Literal["float32", "bfloat16"]
    learning_rate: Positive
    warmup_steps: Annotated[int, Field(ge=0)]
    weight_decay: NonNegative
    grad_clip: Positive
    batch_tokens: Count
    packs_per_step: Count
    processes: Count
    parallel: Literal["ddp", "fsdp"]
    report_to: list[Literal["tensorboard", "wandb"]]
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None
    seed: Seed

    @model_validator(mode="after")
    def chains_reach_the_root(self) -> "TrainDraft":
        for name in self.checkpoints:
            seen = [name]
            while (parent := self.checkpoints[seen[-1]].from_) != ROOT_CHECKPOINT:
                if parent not in self.checkpoints:
                    known = ", ".join([ROOT_CHECKPOINT, *self.checkpoints])
                    raise ValueError(f"checkpoints.{seen[-1]}.from is {parent!r}, expected one of {known}")
                if parent in seen:
                    raise ValueError(f"checkpoints {' -> '.join([*seen, parent])} go in a circle; start one from e000")
                mine, theirs = self.checkpoints[seen[-1]], self.checkpoints[parent]
                if (mine.rival, mine.width) != (theirs.rival, theirs.width):
                    raise ValueError(
                        f"checkpoints.{seen[-1]} is of {_method(mine)} and starts from {parent}, which is of {_method(theirs)}; "
                        f"expected one method: start it from {ROOT_CHECKPOINT}, whose shapes every method begins with"
                    )
                seen.append(parent)
        if ROOT_CHECKPOINT in self.checkpoints:
            raise ValueError(f"checkpoints.{ROOT_CHECKPOINT} is made by init_draft; choose another name")
        return self


class Import(Section):
    """A published draft taken as a checkpoint; `rope_theta` overrides its config's."""

    model: Annotated[str, Field(min_length=1)]
    revision: str | None
    rope_theta: Positive | None


class ImportDraft(Section):
    checkpoints: dict[Name, Import]


class ReplayTrees(Section):
    checkpoints: SomeNames
    semantics: Literal["sglang", "eagle"]
    steps: Grid
    topk: Grid
    tokens: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    inside: Trees
    memory_gib: Positive

    @model_validator(mode="after")
    def some_tree_exists(self) -> "ReplayTrees":
        if not self.trees():
            raise ValueError(
                f"no tree of steps {self.steps}, topk {self.topk} and tokens {self.tokens} can be built: tokens - 1 is "
                "above topk + (steps - 1) * topk**2 in each; write smaller tokens"
            )
        return self

    def watched(self) -> list[Tree]:
        """The trees of `inside`; the grid needn't have them."""
        return [Tree.parse(name) for name in self.inside]

    def trees(self) -> list[Tree]:
        """Every tree of the grid that can be built, by topk, steps, tokens."""
        return _grid(self.steps, self.topk, self.tokens)


def _grid(steps: list[int], topks: list[int], tokens: list[int]) -> list[Tree]:
    return [
        Tree(num_steps=s, topk=k, num_draft_tokens=m)
        for k in sorted(set(topks))
        for s in sorted(set(steps))
        for m in ([s + 1] if k == 1 else sorted(set(tokens)))
        if m - 1 <= candidates(s, k)
    ]


class TimeTrees(Section):
    """The timing grid of the torch engine."""

    checkpoints: SomeNames
    steps: Grid
    topk: Grid
    tokens: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    context: Count
    warmup: Annotated[int, Field(ge=0)]
    cycles: Count
    repeats: Count

    @model_validator(mode="after")
    def enough_trees_to_judge_the_fit(self) -> "TimeTrees":
        if len(self.trees()) < FEWEST_TIMED:
            raise ValueError(
                f"steps {self.steps}, topk {self.topk} and tokens {self.tokens} make {len(self.trees())} trees, expected at "
                f"least {FEWEST_TIMED}: each is left out once, to see how well the others predict it; write longer lists"
            )
        return self

    def trees(self) -> list[Tree]:
        """Every tree of the grid that can be built, by topk, steps, tokens."""
        return _grid(self.steps, self.topk, self.tokens)


class PromptSet(Section):
    """Questions that others ask: a file in data/prompt_sets/, or a Hugging Face dataset's id."""

    from_: Annotated[Annotated[str, Field(min_length=1)], Field(alias="from")]
    name: Annotated[str, Field(min_length=1)] | None
    split: Annotated[str, Field(min_length=1)] | None
    revision: Annotated[str, Field(min_length=1)] | None
    format: Literal["mt_bench", "gsm8k", "humaneval", "alpaca", "math500"]

    @model_validator(mode="after")
    def a_file_or_an_id(self) -> "PromptSet":
        if self.is_file and (self.name or self.revision or self.split):
            raise ValueError(
                f"from is the file {self.from_}, expected name, split and revision to be null: they are of a dataset's id"
            )
        parts = Path(self.from_).parts
        tracked = parts[:2] == PROMPT_SETS.parts and ".." not in parts
        if not tracked and (self.is_file or not re.fullmatch(DATASET, self.from_)):
            raise ValueError(
                f"from is {self.from_}, expected a file or folder in {PROMPT_SETS}/, which DVC tracks, or a dataset's id "
                "(owner/name); put it there"
            )
        if not self.is_file and self.split is None:
            raise ValueError(f"from is the dataset {self.from_}, expected split to say which part of it (test, train)")
        return self

    @property
    def is_file(self) -> bool:
        return self.from_.endswith((".jsonl", ".json", ".parquet"))

    @property
    def can_be_graded(self) -> bool:
        """Whether its own rows say what is right."""
        return self.format in ("gsm8k", "humaneval", "math500")


class PreparePrompts(Section):
    sets: dict[Name, PromptSet]

    @model_validator(mode="after")
    def names_are_free(self) -> "PreparePrompts":
        if taken := sorted(OWN_PROMPTS & set(self.sets)):
            raise ValueError(f"sets.{taken[0]}: {' and '.join(sorted(OWN_PROMPTS))} are our own; choose another name")
        return self


class Workload(Section):
    """What is asked, and how requests arrive: docs/workloads.md."""

    prompts: Name
    num_prompts: Count | None
    begin: Annotated[int, Field(ge=0)]
    end: Count | None
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
    deadline_s: Positive
    grade: bool
    seed: Seed

    @model_validator(mode="after")
    def keys_agree(self) -> "Workload":
        drawn = self.prompts == "random"
        if drawn != (self.input_tokens is not None):
            raise ValueError(
                f"input_tokens is {self.input_tokens} with prompts: {self.prompts}, expected a number for random, else null: "
                "other prompts have their own lengths"
            )
        if drawn and self.num_prompts is None:
            raise ValueError("num_prompts is null with prompts: random, expected a number: there is no end to them")
        if not drawn and self.length_range != 1:
            raise ValueError(
                f"length_range is {self.length_range} with prompts: {self.prompts}, expected 1: only lengths of random "
                "prompts are drawn"
            )
        if self.end is not None and self.end <= self.begin:
            raise ValueError(f"end is {self.end}, expected more than begin, {self.begin}; no prompt lies between")
        return self

    @property
    def rate(self) -> float:
        """Requests a second."""
        return math.inf if self.request_rate == "inf" else self.request_rate

    @property
    def alone(self) -> bool:
        """Whether the torch engine answers it prompt by prompt; else it is measured in loads, as a server is."""
        one = self.concurrency == 1 and not isinstance(self.max_new_tokens, list)
        return one and self.prompts != "random" and not self.ignore_eos

    def points(self) -> list[tuple[int, int | None]]:
        """(max_new_tokens, concurrency) of each load: one, or a sweep."""
        lengths = self.max_new_tokens if isinstance(self.max_new_tokens, list) else [self.max_new_tokens]
        caps: list[int | None] = list(self.concurrency) if isinstance(self.concurrency, list) else [self.concurrency]
        return [(length, cap) for length in lengths for cap in caps]


class Benchmark(Section):
    workloads: Annotated[dict[Name, Workload], Field(min_length=1)]
    torch: Names
    semantics: Literal["sglang", "eagle"]
    num_gpus_total: Count
    num_gpus_per_model: Count
    max_gpu_memory: Positive | None
    checkpoints: SomeNames
    trees: Annotated[Trees, Field(min_length=1)]

    @model_validator(mode="after")
    def the_torch_engine_can_do_it(self) -> "Benchmark":
        for name in self.torch:
            rate = named(self.workloads, name, "benchmark.workloads").request_rate
            if rate != "inf":
                raise ValueError(
                    f"torch: workload {name} has request_rate {rate} (expected inf): the torch engine waits for no arrivals; "
                    "take it out of benchmark.torch, or serve it (benchmark_served)"
                )
        if self.num_gpus_total % self.num_gpus_per_model:
            raise ValueError(
                f"num_gpus_total is {self.num_gpus_total}, expected a multiple of num_gpus_per_model, "
                f"{self.num_gpus_per_model}: so many GPUs hold one copy of the target; correct one of them"
            )
        return self

    @property
    def processes(self) -> int:
        """Copies of the target, each with a share of the prompts."""
        return self.num_gpus_total // self.num_gpus_per_model


class ServedBy(Section):
    """The engine's server: started for each cell, or one that runs."""

    base_urls: dict[
        Annotated[str, Field(pattern=r"^(baseline|[A-Za-z]\w*-t\d+_\d+_\d+)$")], Annotated[str, Field(pattern=ONE_URL)]
    ]
    model: Annotated[str, Field(min_length=1)] | None
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None
    command: list[Annotated[str, Field(min_length=1)]]
    algorithm: Annotated[str, Field(min_length=1)]
    tp: Count
    mem_fraction: Share
    max_total_tokens: Count | None
    max_batch: Count | None
    torch_compile: bool
    launch_args: list[str]
    start_timeout_s: Positive


class BenchmarkServed(Section):
    engine: Literal["sglang", "vllm"]
    workloads: Names
    checkpoints: Names
    trees: Trees
    interleave: bool
    server: ServedBy


class DynamicRow(Section):
    """A row of the table of methods: a tree grown by how likely its branches are."""

    method: Literal["eagle3", "eagle2", "eagle", "medusa"]  # the last two are StaticRow's: for whoever misspells one
    checkpoint: Name
    tree: Annotated[str, AfterValidator(lambda name: Tree.parse(name).name)]


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


def _kind_of_row(value: Any) -> str:
    """By its method; with an unknown one, or one that stands in the other list, what tells of all that may stand there."""
    found = value.get("method") if isinstance(value, dict) else getattr(value, "method", None)
    return {"eagle": "a static row", "medusa": "a static row", "lookahead": "a row ahead"}.get(str(found), "a row")


class BenchmarkMethods(Section):
    """Rows of the table of methods, by names of the user's own."""

    workload: Name
    drafted: dict[
        Name,
        Annotated[
            Annotated[DynamicRow, Tag("a row")] | Annotated[StaticRow, Tag("a static row")],
            Discriminator(_kind_of_row),
        ],
    ]
    draftless: dict[
        Name,
        Annotated[
            Annotated[NgramRow, Tag("a row")] | Annotated[LookaheadRow, Tag("a row ahead")],
            Discriminator(_kind_of_row),
        ],
    ]


class Report(Section):
    title: Annotated[str, Field(min_length=1)]


CountOrAll = Annotated[
    Annotated[int, Field(ge=0), Tag("a number")] | Annotated[Literal["all"], Tag("a text")],
    Discriminator(lambda value: "a text" if isinstance(value, str) else "a number"),
]


class Needs(Section):
    """What a stage takes of the machine while it runs."""

    gpus: CountOrAll
    exclusive: bool


class Schedule(Section):
    """What Prefect runs at once, and again: docs/scheduling.md. No stage reads it."""

    slots: Count
    attempts: Count
    retry_pause_s: NonNegative
    runner: Literal["local", "workers", "ray"]
    ray_address: Annotated[str, Field(min_length=1)] | None
    sent: list[Name]
    stages: dict[Name, Needs]

    @model_validator(mode="after")
    def sent_are_stages(self) -> "Schedule":
        for name in self.sent:
            named(self.stages, name, "schedule.stages")
        return self

    def needs(self, stage: str) -> Needs:
        """Of a stage of dvc.yaml, a cell too; a file that `dvc add` keeps takes a slot. Raises ValueError for others."""
        if stage.endswith(".dvc"):
            return Needs(gpus=0, exclusive=False)
        return named(self.stages, stage.partition("@")[0], "schedule.stages")


class Params(Section):
    target: Target
    prepare_target: PrepareTarget
    fix_data: FixData
    sample_target: SampleTarget
    extract_hiddens: ExtractHiddens
    init_draft: InitDraft
    check_overfit: CheckOverfit
    train_draft: TrainDraft
    import_draft: ImportDraft
    replay_trees: ReplayTrees
    time_trees: TimeTrees
    prepare_prompts: PreparePrompts
    benchmark: Benchmark
    benchmark_served: BenchmarkServed
    benchmark_methods: BenchmarkMethods
    report: Report
    schedule: Schedule

    @model_validator(mode="after")
    def sections_agree(self) -> "Params":
        trained, imported = self.train_draft.checkpoints, self.import_draft.checkpoints
        if taken := [name for name in imported if name in trained or name == ROOT_CHECKPOINT]:
            raise ValueError(f"import_draft.checkpoints.{taken[0]} is made by another stage; choose another name")
        lists = {
            "replay_trees.checkpoints": self.replay_trees.checkpoints,
            "benchmark.checkpoints": self.benchmark.checkpoints,
            "benchmark_served.checkpoints": self.benchmark_served.checkpoints
            if self.benchmark_served.workloads
            else [],
        }
        for key, names in {**lists, "time_trees.checkpoints": self.time_trees.checkpoints}.items():
            for name in names:
                if name in trained and (rival := trained[name].rival):
                    raise ValueError(
                        f"{key}: {name!r} is of {rival}, expected checkpoints of EAGLE-3; name it in benchmark_methods.drafted"
                    )
        for key, names in lists.items():
            for name in names:
                if name not in trained and name not in imported:
                    known = ", ".join([*trained, *imported])
                    raise ValueError(
                        f"{key}: {name!r} is not trained, expected some of {known}; "
                        "correct it, or add it to train_draft.checkpoints or import_draft.checkpoints"
                    )
        for name in self.time_trees.checkpoints:
            if name not in (timeable := [ROOT_CHECKPOINT, *trained, *imported]):
                raise ValueError(
                    f"time_trees.checkpoints: {name!r} is none, expected some of {', '.join(timeable)}; correct it. "
                    f"{ROOT_CHECKPOINT} costs what every trained checkpoint does"
                )
        for name in self.benchmark_served.workloads:
            if name not in self.benchmark.workloads:
                raise ValueError(
                    f"benchmark_served.workloads: {name!r} is none, expected some of {', '.join(self.benchmark.workloads)}; "
                    "correct it, or add it to benchmark.workloads"
                )
        if self.benchmark.num_gpus_per_model > 1 and not self.target.device.startswith("cuda"):
            raise ValueError(
                f"benchmark.num_gpus_per_model is {self.benchmark.num_gpus_per_model} with target.device {self.target.device}, "
                "expected 1: only GPUs hold a part of a target each; set target.device to cuda"
            )
        if not self.benchmark.torch and not self.benchmark_served.workloads:
            raise ValueError(
                "benchmark.torch and benchmark_served.workloads are both [], expected a workload in one of them: there would "
                "be nothing to report"
            )
        for name, workload in self.benchmark.workloads.items():
            if workload.prompts not in OWN_PROMPTS | set(self.prepare_prompts.sets):
                known = ", ".join([*sorted(OWN_PROMPTS), *self.prepare_prompts.sets])
                raise ValueError(
                    f"benchmark.workloads.{name}.prompts is {workload.prompts!r}, expected one of {known}; correct it, or add "
                    "the set to prepare_prompts.sets"
                )
            asked = self.prepare_prompts.sets.get(workload.prompts)
            if workload.grade and not (asked and asked.can_be_graded):
                raise ValueError(
                    f"benchmark.workloads.{name}.grade is true with prompts: {workload.prompts}, expected a set of format gsm8k, "
                    "humaneval or math500: no other says what is right. Set grade to false"
                )
        self._rows_agree()
        if self.check_overfit.min_tau > self.train_draft.ttt_steps + 1:
            raise ValueError(
                f"check_overfit.min_tau {self.check_overfit.min_tau} can't be reached: a chain of train_draft.ttt_steps = "
                f"{self.train_draft.ttt_steps} drafts accepts at most {self.train_draft.ttt_steps + 1}; lower it"
            )
        deepest = max(
            self.train_draft.ttt_steps,
            *self.replay_trees.steps,
            *self.time_trees.steps,
            *(
                Tree.parse(tree).num_steps
                for tree in [*self.replay_trees.inside, *self.benchmark.trees, *self.benchmark_served.trees]
            ),
        )
        if self.init_draft.window is not None and self.init_draft.window < deepest:
            raise ValueError(
                f"init_draft.window is {self.init_draft.window}, expected at least the most steps asked for, {deepest}: a step "
                "would not see its own first; raise it (thousands are usual)"
            )
        return self

    def _rows_agree(self) -> None:
        """Of the table of methods: raises ValueError where a row names what isn't there, or another method's."""
        table, trained = self.benchmark_methods, self.train_draft.checkpoints
        rows = {**table.drafted, **table.draftless}
        if rows and table.workload not in self.benchmark.torch:
            raise ValueError(
                f"benchmark_methods.workload is {table.workload!r}, expected one of benchmark.torch, "
                f"{', '.join(self.benchmark.torch) or 'which is []'}; correct it, or add it there"
            )
        if twice := sorted(set(table.drafted) & set(table.draftless)):
            raise ValueError(f"benchmark_methods: {twice[0]} is in drafted and in draftless; rename one")
        for name, row in table.drafted.items():
            key = f"benchmark_methods.drafted.{name}"
            wanted = "eagle" if row.method == "eagle2" else row.method
            kinds = {c: segment.rival or "eagle3" for c, segment in trained.items()}
            kinds |= dict.fromkeys([ROOT_CHECKPOINT, *self.import_draft.checkpoints], "eagle3")
            if kinds.get(row.checkpoint) != wanted:
                known = ", ".join(c for c, kind in kinds.items() if kind == wanted) or "none yet"
                found = f"of {kinds[row.checkpoint]}" if row.checkpoint in kinds else "no checkpoint"
                more = "" if wanted == "eagle3" else f" {{from: {ROOT_CHECKPOINT}, epochs: 9, method: {wanted}, ...}}"
                raise ValueError(
                    f"{key}.checkpoint {row.checkpoint!r} is {found}, expected one of {wanted} ({known}); correct it, or add "
                    f"one to train_draft.checkpoints{more}"
                )
            if isinstance(row, StaticRow):
                deepest = (row.checkpoint in trained and trained[row.checkpoint].width) or self.train_draft.ttt_steps
                if row.depth > deepest:
                    what = f"the heads of {row.checkpoint}" if row.method == "medusa" else "train_draft.ttt_steps"
                    raise ValueError(
                        f"{key}.depth is {row.depth}, expected at most {deepest}, {what}: deeper guesses are not measured; "
                        "lower it"
                    )

    def method_row(self, name: str) -> MethodRow:
        """Of the table of methods. Raises ValueError naming those that there are."""
        table = self.benchmark_methods
        return named({**table.drafted, **table.draftless}, name, "benchmark_methods")

    def made_by(self, checkpoint: str) -> str:
        """The stage that makes a checkpoint's draft."""
        if checkpoint == ROOT_CHECKPOINT:
            return "init_draft"
        return f"{'import' if checkpoint in self.import_draft.checkpoints else 'train'}_draft@{checkpoint}"

    def alike(self, one: str, other: str) -> bool:
        """Whether two checkpoints' drafts have the same shapes: all that training makes of e000 have its own."""
        return one == other or not {one, other} & set(self.import_draft.checkpoints)


class Cells(Section):
    """A cell of ours, but for its tree, which is the published row's; without a checkpoint the engine's plain decoding."""

    engine: Literal["torch", "sglang", "vllm"]
    workload: Name
    checkpoint: Name | None


class Beside(Section):
    """Published numbers, by their settings, and the cells of ours that are laid beside them."""

    publication: Annotated[str, Field(min_length=1)]  # a file in published/
    rows: Annotated[dict[str, str | float | None], Field(min_length=1)]  # settings that its rows have
    cells: Cells
    assumed: dict[str, str | float]  # settings that nobody stated, and what they are taken for
    measures: dict[str, str]  # a published metric -> the measure of ours that is defined as it is (formats/verdicts.py)


class Recipe(Section):
    """What a recipe says of itself, in its block `recipe`; the rest of it are keys of params.yaml."""

    status: Annotated[str, Field(pattern=r"^(validated only|ran on \d{4}-\d\d-\d\d, \S.*)$")]
    pins: dict[str, Annotated[str, Field(min_length=1)]]  # an engine or a package -> its version
    substitutes: dict[Literal["target", "draft", "data"], str]  # what stands in for what isn't to be had
    notes: list[str]
    train_rows: Count | None  # for the estimate, where sample_target.train_rows is null; null: nothing is trained
    row_tokens: Count  # and how long a row is on average, prompt and answer
    tolerance: dict[str, Annotated[float, Field(ge=0, lt=1)]]  # of a metric, as a share; others have none
    beside: list[Beside]

    @model_validator(mode="after")
    def a_target_is_named(self) -> "Recipe":
        for n, match in enumerate(self.beside):
            if "target" not in match.rows:
                raise ValueError(f"beside.{n}.rows has no target, expected it as {match.publication} calls it; name it")
        return self


def read_recipe(path: Path) -> tuple[Recipe | None, dict[str, dict[str, Any]]]:
    """A recipe's block about itself, where it has one, and its sections of params.yaml.

    Raises:
        ValueError: naming the file, what was expected and what to do.
    """
    try:
        found = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(keys, dict) for keys in found.values()):
        raise ValueError(f"{path}: expected sections with keys, as params.yaml has them; found {found!r:.60}")
    about = found.pop("recipe", None)
    try:
        return None if about is None else Recipe.model_validate(about), found
    except ValidationError as error:
        problems = "\n".join(f"  recipe.{_explain(e, Recipe)}" for e in error.errors(include_url=False))
        raise ValueError(f"{path} has {error.error_count()} problem(s) to correct:\n{problems}") from None


def load(path: Path = PARAMS) -> Params:
    """The whole of params.yaml, checked.

    Raises:
        ValueError: naming the file, every wrong key, what was expected and what to do.
    """
    if not path.is_file():
        raise ValueError(f"{path} not found; run from the project's root, where dvc.yaml lies")
    try:
        # The parser DVC uses, so that we see what DVC sees; it also refuses a key given twice.
        raw = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError) as error:  # ValueError: bytes that are no UTF-8, dates that don't exist
        raise ValueError(f"{path} is not valid YAML: {_explain_yaml(error)}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected the sections {', '.join(Params.model_fields)}; found {raw!r:.60}")
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  {_explain(e)}" for e in error.errors(include_url=False))
        raise ValueError(f"{path} has {error.error_count()} problem(s) to correct:\n{problems}") from None


def _explain(error: Any, whole: type[Section] = Params) -> str:
    """One pydantic error of `whole` as: key: what was expected, what was found, what to do."""
    place = [str(part) for part in error["loc"] if part not in TAGS]
    key, kind, found = ".".join(place), error["type"], f"found {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":  # our own: says all three, and where no section is at fault, the key too
        return f"{key}: {message}" if key else message
    if kind == "extra_forbidden":
        known = ", ".join(_known_keys(place[:-1], whole))
        return f"{key}: unknown key; known keys are {known}. Correct the spelling or delete it"
    if kind == "missing":
        return f"{key}: missing; the code holds no defaults, so write it (git show HEAD:params.yaml has one)"
    if kind in ("model_type", "dict_type"):
        return f"{key}: expected a section with {', '.join(_known_keys(place, whole))}, {found}"
    if not isinstance(error["input"], str):
        found += "; YAML reads 8_2_16 as the number 8216, so begin a name with a letter (t8_2_16) or put text in quotes"
    if kind == "invalid_key" or "[key]" in error["loc"] or place[-1] == "from":
        return f"{key}: expected a name (a letter, then letters, digits and _), {found}"
    if kind == "string_type":
        return f"{key}: expected text, {found}"
    if kind == "string_pattern_mismatch":
        return f"{key}: expected text matching {error['ctx']['pattern']}, {found}"
    # Pydantic's own words: "Input should be greater than 0", "List should have at least 1 item after validation, not 0".
    expected = re.sub(r"^\w+ should (be|have) ", "expected ", message)
    return f"{key}: {re.sub(' after validation.*', '', expected)}, found {error['input']!r}"


def _explain_yaml(error: Exception) -> str:
    """The parser's words in one line: the line and what is wrong there, without the address of its manual."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}; correct it" if mark and problem else f"{error}; correct it"


def _known_keys(place: list[str], whole: type[Section]) -> list[str]:
    """The keys of the section at `place` of `whole`, as written in the file."""
    model: Any = whole
    for part in place:
        field = model.model_fields.get(part)
        annotation = field.annotation if field else model
        inner = _sections_in(annotation)
        model = inner[0] if inner else annotation if isinstance(annotation, type) else model
    return [field.alias or name for name, field in model.model_fields.items()]


def _sections_in(annotation: Any) -> list[type[Section]]:
    """The sections an annotation holds, through dict[...], list[...], | and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _sections_in(inner)]


def check_raw_exists(params: Params) -> None:
    """Raises ValueError where the raw conversations are not there, before any stage spends a minute."""
    fix = params.fix_data
    raw, evaluation = Path(fix.raw), fix.eval_path()
    if not raw.exists():
        raise ValueError(
            f"{PARAMS}: fix_data.raw is {raw}, which does not exist; give a file or a folder (docs/data.md)"
        )
    if evaluation is not None and (not evaluation.is_file() or (raw.is_file() and evaluation != raw)):
        raise ValueError(
            f"{PARAMS}: fix_data.eval_file is {fix.eval_file}, expected a file in the folder fix_data.raw, or "
            f"the name of that file itself, found neither under {raw}; DVC tracks fix_data.raw, so put it there"
        )


def check_draft_vocab(params: Params, vocab_size: int) -> None:
    """Raises ValueError where the draft's vocabulary would be larger than the target's."""
    wanted = params.init_draft.draft_vocab_size
    if wanted is not None and wanted > vocab_size:
        raise ValueError(
            f"{PARAMS}: init_draft.draft_vocab_size is {wanted}, but {params.target.model} has {vocab_size} tokens; "
            f"use at most {vocab_size}, or null for all"
        )


def named(items: Mapping[str, T], name: str, key: str) -> T:
    """items[name]; raises ValueError naming what `key` of params.yaml does have."""
    if name not in items:
        raise ValueError(f"{PARAMS}: {key} has no {name!r}; it has {', '.join(items)}")
    return items[name]


def run_stage(main: Callable[..., None]) -> None:
    """Run a stage's `main` with the command line's words; what the user can mend prints as one message and exits with 1."""
    words, takes = sys.argv[1:], inspect.signature(main)
    try:
        try:
            takes.bind(*words)
        except TypeError:
            wanted = " ".join(name.upper() for name in takes.parameters) or "no arguments"
            raise ValueError(f"expected {wanted}, found {' '.join(words) or 'none'}") from None
        main(*words)
    except ValueError as error:
        sys.exit(f"aerie: {error}")


def main() -> None:
    params = load()
    check_raw_exists(params)
    b, served = params.benchmark, params.benchmark_served
    cells = len(b.torch) * len(b.checkpoints) * len(b.trees)
    cells += len(served.workloads) * (1 + len(served.checkpoints) * len(served.trees))
    cells += len(params.benchmark_methods.drafted) + len(params.benchmark_methods.draftless)
    print(
        f"{PARAMS} is valid: target {params.target.model}, {len(params.train_draft.checkpoints)} checkpoints, {cells} cells"
    )


if __name__ == "__main__":
    run_stage(main)
