"""The sections of prompts and answers: fix_data, sample_target, prepare_prompts."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag

from stages.params.engines import LaunchedEngine, ServerUrls
from stages.params.section import LIST_OR_NUMBER, Count, Name, NonNegative, Positive, Section, Seed, Share, Text

TABLES_FOLDER = Path("data/tables")  # schemas of structured answers
PROMPT_SETS_FOLDER = Path("data/prompt_sets")
FILE_PATTERN = re.compile(r"\.(jsonl?|ndjson|csv|tsv|tab|txt|parquet)(\.(gz|bz2|xz|zst))?$")
DATASET_ID_PATTERN = r"\w[\w.-]*(/\w[\w.-]*)?"  # the id of a dataset on the Hub
COLUMN_ROLES = ("prompt", "input", "answer", "messages", "system", "id", "images", "tools")  # of a map of columns
OWN_PROMPTS = {"eval", "random", "written"}  # names that prepare_prompts.sets must not use


def check_column_names(columns: dict[str, str]) -> dict[str, str]:
    """Return a column map. Raises ValueError unless it names messages or a prompt; an answer may be missing."""
    roles = set(columns)
    if unknown := sorted(roles - set(COLUMN_ROLES)):
        raise ValueError(f"has the key {unknown[0]}, expected some of {', '.join(COLUMN_ROLES)}; correct it")
    if not roles & {"prompt", "messages"}:
        raise ValueError(
            f"names columns for {', '.join(columns) or 'nothing'}, expected prompt (and answer) or messages"
        )
    if "messages" in roles and roles & {"prompt", "input"}:
        raise ValueError("names columns for messages and for prompt or input, expected one of the two; leave one out")
    return columns


def _name_files(columns: Any) -> Any:
    """Return column maps by the files that they are of: a single one is of all, `*`."""
    is_single = isinstance(columns, dict) and not any(isinstance(value, dict) for value in columns.values())
    return {"*": columns} if is_single else columns


ColumnNames = Annotated[dict[str, Text], AfterValidator(check_column_names)]
ColumnMaps = Annotated[dict[str, ColumnNames], BeforeValidator(_name_files)]


def check_table_path(path: str) -> str:
    """Return the path of a schema. Raises ValueError unless it is a YAML file in TABLES_FOLDER, which DVC tracks."""
    parts = Path(path).parts
    if parts[:2] != TABLES_FOLDER.parts or len(parts) < 3 or ".." in parts or not path.endswith((".yaml", ".yml")):
        raise ValueError(f"is {path}, expected a YAML file in {TABLES_FOLDER}/, or null for any table; put it there")
    return path


TableFilePath = Annotated[Text, AfterValidator(check_table_path)]


def _list_paths(given: Any) -> Any:
    """Return one path or several as a list of paths as messages name files."""
    paths = given if isinstance(given, list) else [given]
    return [PurePosixPath(path).as_posix() if isinstance(path, str) else path for path in paths]


def fits_file(name: str, source: str) -> bool:
    """Return whether `name` is the path of a file, of a folder that holds it, or a pattern of its path."""
    return source == name or source.startswith(f"{name}/") or fnmatchcase(source, name)


EvalFiles = Annotated[list[Text], Field(min_length=1), BeforeValidator(_list_paths)]


class FixData(Section):
    raw: Text  # a file or a folder of them: JSONL, JSON, CSV, Parquet, NAME.hub.yaml (docs/data.md)
    # auto detects each row's format by its keys; or sharegpt, ultrachat, messages, prompt_answer
    format: Literal["auto", "sharegpt", "ultrachat", "messages", "prompt_answer"] = "auto"
    # of CSV or other tables: {prompt: question, answer: reply}; null: by known names; or a map for each file of
    # `raw`, {a.csv: {prompt: question, answer: reply}, "more/*.csv": {...}} (docs/data.md)
    columns: ColumnMaps | None = None
    # toon or json: each answer must decode, if need be after repair; text: kept as it is
    answers: Literal["toon", "json", "text"] = "text"
    # a schema of toon or json answers: names, types, units (docs/data.md); null: any
    tables: TableFilePath | None = None
    # prose and code fences around a table: strip, or keep (if the target writes them too)
    surrounding_text: Literal["strip", "keep"] = "strip"
    min_chars: Count = 1  # shorter conversations are dropped
    max_chars: Count = 8000  # longer conversations are dropped
    # a larger share of dropped rows stops the run with the reasons; null: no limit
    max_dropped_share: Annotated[float, Field(ge=0, lt=1)] | None = 0.5
    # the eval split: a file in the folder `raw` (or `raw` itself), a folder in it, a pattern of such paths, or a list
    # of those; each file has its own tau. null: split by eval_share
    eval_file: EvalFiles | None = None
    # number of first rows of each such file that are the eval split, the others train; null: all
    eval_rows: Count | None = None
    # share of rows in the eval split, chosen by a hash of their content: new rows move no other
    eval_share: Share = 0.15
    # folders, beside the data's own, from which rows may name images by path
    image_folders: list[Text] = Field(default_factory=list)

    def list_conflicts(self) -> Iterator[str]:
        if self.min_chars > self.max_chars:
            yield f"min_chars {self.min_chars} is above max_chars {self.max_chars}; lower it"
        if self.columns is not None and self.format != "auto":
            yield f"format is {self.format}, expected auto while columns names the columns; set format: auto"
        if self.eval_rows is not None and self.eval_file is None:
            yield f"eval_rows is {self.eval_rows}, expected null while eval_file is null; set eval_file"

    def is_eval_source(self, source: str) -> bool:
        """Return whether a raw file, by its path as seen from `raw`, is one of eval_file."""
        return any(fits_file(name, source) for name in self.eval_file or [])

    def image_roots(self) -> list[Path]:
        """Return the folders, beside a file's own, that images may be read from: that of all data, and those named."""
        raw = Path(self.raw)
        return [raw if raw.is_dir() else raw.parent, *map(Path, self.image_folders)]

    def choose_columns(self, file: Path) -> dict[str, str] | None:
        """Return the column map of a raw file; None where it is read by known names."""
        names = self.find_column_names(file)
        return self.columns[names[0]] if self.columns and names else None

    def find_column_names(self, file: Path) -> list[str]:
        """Return the keys of `columns` that fit a raw file: its own path alone where that is one, else folders and patterns.

        Several of those are for checks.py to refuse: DVC sees no order of keys, so none may be the first.
        """
        path, raw, columns = file.absolute(), Path(self.raw).absolute(), self.columns or {}
        name = path.relative_to(raw).as_posix() if path != raw and path.is_relative_to(raw) else path.name
        return [name] if name in columns else sorted(key for key in columns if fits_file(key, name))


class SamplingServer(Section):
    """The servers of sample_target. Settings of the connection are tracked by no stage."""

    # start and stop servers, one per GPU: transformers, sglang, vllm or llama.cpp; null: use those in base_urls
    launch: LaunchedEngine | None = None
    # more flags of those servers, as [--tp, "2"], which makes it one per two GPUs
    launch_args: list[str] = Field(default_factory=list)
    start_timeout_s: Positive = 900  # loading a large target takes minutes
    # ["http://gpu1:8000", "http://gpu2:6000-6007"]: several hosts, and eight ports of the second
    base_urls: ServerUrls = Field(default_factory=list)
    model: Text | None = None  # the name of the target at base_urls; null: target.model
    concurrency: Count = 64  # requests in flight, over all servers
    timeout_s: Positive = 600  # of one request, from sending to the last byte
    attempts: Count = 6  # of one request, with growing pauses; then the run stops, and received answers are kept
    # name of the environment variable that holds the key, never the key itself
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None

    def list_conflicts(self) -> Iterator[str]:
        if self.launch and self.base_urls:
            yield f"launch is {self.launch} and base_urls names {len(self.base_urls)} server(s), expected one of the two"

    @property
    def is_configured(self) -> bool:
        return bool(self.launch or self.base_urls)


class TemperatureShare(Section):
    """A part of a mixture of temperatures; its share of the rows is its weight over the sum of weights."""

    temperature: NonNegative
    weight: Positive


Temperature = Annotated[
    Annotated[NonNegative, Tag("a number")] | Annotated[list[TemperatureShare], Field(min_length=1), Tag("a list")],
    LIST_OR_NUMBER,
]


class SampleTarget(Section):
    # transformers: in this process; server: over HTTP, see `server`; keep: the answers of the data
    backend: Literal["transformers", "server", "keep"] = "transformers"
    # number of training prompts that the target answers, chosen by a hash of their content; null: all. Where the data
    # has fewer, all of them are asked, and the stage's line says so
    train_rows: Annotated[int, Field(ge=0)] | None = None
    eval_rows: Count | None = 200  # they decide how wide the intervals of tau are
    # of training answers; or a mixture, [{temperature: 0.7, weight: 3}, ...], drawn per row; eval answers are at 0,
    # and a second set at this temperature (of a mixture the heaviest above 0)
    temperature: Temperature = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    thinking: bool | None = None  # passed to the chat template as enable_thinking; null: the template's default
    # data: later turns follow the data's earlier answers; target: the target's own
    history: Literal["data", "target"] = "data"
    seed: Seed = 11
    # answers at once in this process, fewer where memory runs out; null: 512 on a GPU, else 64
    batch_size: Count | None = None
    max_new_tokens: Count = 1024
    truncated: Literal["keep", "drop"] = "keep"  # answers cut at max_new_tokens: keep or drop
    shard_size: Count = 4096  # rows of a file of data/sampled, in whole conversations
    server: SamplingServer = Field(default_factory=lambda: SamplingServer())

    def list_conflicts(self) -> Iterator[str]:
        if self.backend == "server" and not self.server.is_configured:
            yield "backend is server, expected server.launch or server.base_urls, found neither; set one of them"
        if self.history == "target" and self.backend != "server":
            yield f"history is target, expected data with backend {self.backend}; set data, or backend: server"

    @property
    def is_in_process(self) -> bool:
        """Return whether the target answers in the stage's own process."""
        return self.backend not in ("server", "keep")

    @property
    def temperature_weights(self) -> list[tuple[float, float]]:
        """(temperature, weight) pairs of the training rows; one pair of weight 1 if all have the same temperature."""
        parts = self.temperature
        return [(p.temperature, p.weight) for p in parts] if isinstance(parts, list) else [(parts, 1.0)]

    @property
    def eval_temperature(self) -> float:
        """The temperature of the second eval set: the first of those above 0 with the largest weight; 0 if there is none."""
        return max(
            [part for part in self.temperature_weights if part[0] > 0], key=lambda part: part[1], default=(0.0, 0.0)
        )[0]


class PromptSet(Section):
    """Prompts of a workload: what fix_data.raw may be, or the id of a Hugging Face dataset, which has a split."""

    from_: Annotated[Text, Field(alias="from")]
    name: Text | None = None  # of the dataset's configuration; null: it has only one
    split: Text | None = None
    revision: Text | None = None  # a commit
    # of a published set, with its instruction and its references; null: questions, turns or conversations
    format: Literal["mt_bench", "gsm8k", "humaneval", "alpaca", "math500"] | None = None
    columns: ColumnNames | None = None  # as fix_data.columns, {prompt: Frage}; null: by known names

    def list_conflicts(self) -> Iterator[str]:
        is_id = re.fullmatch(DATASET_ID_PATTERN, self.from_) and not FILE_PATTERN.search(self.from_)
        if self.is_local and (self.name or self.revision):
            yield f"from is the path {self.from_}, expected name and revision to be null: a dataset's id has them"
        if self.is_local and is_id and not Path(self.from_).exists():
            yield f"from is {self.from_}, which is no path here; expected split to say which part of the dataset"
        if not self.is_local and not is_id:
            yield f"from is {self.from_}, expected split to be null: only the id of a dataset (owner/name) has one"
        if self.columns and self.format:
            yield f"format is {self.format}, expected null while columns names the columns"

    @property
    def is_local(self) -> bool:
        """Return whether it is a file or folder: a dataset's id comes with a split."""
        return self.split is None

    @property
    def can_be_graded(self) -> bool:
        """Return whether its rows hold references to grade answers by."""
        return self.format in ("gsm8k", "humaneval", "math500")


SHIPPED_SETS = ("mt_bench", "gsm8k", "humaneval", "alpaca", "math500")  # samples of a few prompts


class PreparePrompts(Section):
    # from: a path, as fix_data.raw (data/prompt_sets/ has samples), or a Hugging Face dataset's id: docs/workloads.md
    sets: dict[Name, PromptSet] = Field(
        default_factory=lambda: {
            name: PromptSet.model_validate({"from": str(PROMPT_SETS_FOLDER / f"{name}.jsonl"), "format": name})
            for name in SHIPPED_SETS
        }
    )

    def list_conflicts(self) -> Iterator[str]:
        for name in sorted(OWN_PROMPTS & set(self.sets)):
            yield f"sets.{name}: {', '.join(sorted(OWN_PROMPTS))} are reserved; choose another name"
