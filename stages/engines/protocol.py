"""The interface of engines that serve, and what passes between them and those who sample from them or measure them.

`ServingEngine` knows any server of OpenAI's API; an engine's own module defines what differs. The engines' flags and
answers are read from the sources of SGLang 0.5.17 to 0.5.23, vLLM 0.30 to 0.33 and llama.cpp 0c1e57098 and later.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stages.cells.cell import Memory
from stages.cells.request_record import AcceptanceCounts
from stages.engines.chat_answer import AnswerModel, ChatCompletion
from stages.engines.http_session import ExchangeFailedError, HttpSession
from stages.engines.sse import ReadMessage
from stages.params.benchmark_sections import count_fitting
from stages.params.engines import ENGINES, locate_program
from stages.params.families import DraftFamily, DraftKind, find_family
from stages.params.tree_shape import TreeShape
from stages.runtime.free_port import HOST

Body = dict[str, Any]
Info = Mapping[str, Any]  # what an engine reports, by its own names
VERSION_TIMEOUT_S = 120.0  # vLLM imports torch to say its version


@dataclass(frozen=True)
class ServedDraft:
    """A draft and its tree, as an engine's flags name them."""

    folder: str
    algorithm: str
    shape: TreeShape
    family: DraftFamily


def describe_draft(folder: str, config: dict[str, Any], shape: TreeShape, algorithm: str) -> ServedDraft:
    """Return the draft of a config.json in `folder`; `algorithm`, which benchmark_served.servers names, is of EAGLE-3 drafts."""
    family = find_family(config)
    return ServedDraft(folder, family.algorithm or algorithm, shape, family)


@dataclass(frozen=True)
class ServerSetup:
    """A server's configuration without the draft, shared by a cell and its baseline.

    The field names are keys of the cell's fingerprint on disk.
    """

    engine: str
    folder: str  # the target
    dtype: str
    device: str
    trust_remote_code: bool
    tp: int = 1
    mem_fraction: float = 0.8
    max_total_tokens: int | None = None
    max_batch: int | None = None
    context_length: int | None = None  # null: the target's own
    torch_compile: bool = False
    more: tuple[str, ...] = ()  # further flags
    quantised: str | None = None  # GGUF type of target and draft, for llama.cpp; None: `dtype`

    def count_fitting(self) -> int:
        """Return how many servers of `mem_fraction` fit on a GPU."""
        return count_fitting(self.mem_fraction)


@dataclass(frozen=True)
class SamplingLaunch:
    """The parameters of a server that is started for `sample_target`."""

    folder: Path  # of the target's weights
    link_target: Callable[[], Path]  # makes a folder of the target with its own end tokens and chat template
    template_file: Path | None  # None: the target's own chat template
    dtype: str
    device: str
    trust_remote_code: bool
    concurrency: int
    max_new_tokens: int
    threads: int | None


@dataclass(frozen=True)
class SamplingOptions:
    """The parameters of an answer of `sample_target` beyond the body of a chat completion."""

    prompt_ids: list[int]
    has_images: bool
    has_tools: bool
    temperature: float
    max_new_tokens: int
    eos_token_ids: list[int]
    pad_token: int


@dataclass(frozen=True)
class LoadRequest:
    """A request of a load to send."""

    id: str
    prompt: list[int]  # token ids
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    ignore_eos: bool  # generate max_tokens, past end tokens
    engine_fields: Body = field(default_factory=dict)  # of the body, known to this engine only: image_data

    @property
    def extensions(self) -> Body:
        """Return the fields that OpenAI's API does not have."""
        return {"ignore_eos": self.ignore_eos} | ({} if self.top_k is None else {"top_k": self.top_k})


class BuiltRequest(NamedTuple):
    """A request as an engine takes it."""

    path: str
    body: bytes
    read: ReadMessage  # of a message of the answer's stream
    headers: Mapping[str, str] = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Change:
    """A feature that an engine has from a version on."""

    first_version: str
    feature: str

    def is_in(self, version: str | None) -> bool:
        """Return whether this version of the engine has the feature; None is the newest version."""
        return version is None or parse_release(version) >= parse_release(self.first_version)


def parse_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (0, 5, 17) of 0.5.17.post1+cu130; () without any, which is older than all others."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


class ServingEngine:
    """An engine that serves; itself one that has no module."""

    name: str = "openai"
    owned_by: str | None = None  # of the models that it lists
    own_paths: frozenset[str] = frozenset()  # by which it is known, where it lists other models than it serves
    variables: str | None = None  # how the names of environment variables begin that steer it
    program_words: int = 2  # of its command line, which benchmark_served.servers.*.command replaces
    install_hint: str = ""  # where packages to serve are missing
    known_ends: Sequence[tuple[str, str]] = ()  # a line of the log that it ends with, and what it then can't run
    takes_images: bool = False  # with prompts as token ids
    most_at_once: int | None = None  # requests that are sent to a server at a time
    counting_flags: Sequence[str] = ()  # of a server with a draft, which make it report accepted drafts
    accept_length: str = ""  # its own figure of a request
    drafts: Mapping[str, Change] = {}  # by architecture of config.json, those that not all versions load
    answer_type: type[AnswerModel] = ChatCompletion  # of a response to a request of `sample_target`
    serve_words: Sequence[str] = ("serve",)  # of the command line, between the program and the target's folder

    # Starting a server

    def list_start_flags(self, device: str) -> dict[str, Any]:
        """Return the flags that every server has beside those of `build_command`."""
        return {}

    def build_command(self, folder: str, port: int, dtype: str, device: str, trust_remote_code: bool) -> list[str]:
        """Return the command line, from the engine's own environment if that exists or else the PATH, for the target in `folder`.

        Flags keep engines from taking top_k, top_p and penalties from the model's generation_config.json, which would change the
        distribution of the answers.
        """
        shared = {"--host": HOST, "--port": port, "--dtype": dtype}
        trust = {"--trust-remote-code": trust_remote_code}
        flags = format_flags(shared | self.list_start_flags(device) | trust)
        return [locate_program(self.name), *self.serve_words, folder, *flags]

    def list_setup_flags(self, setup: ServerSetup, version: str | None) -> dict[str, Any]:
        """Return the flags of a measured server, for a version of the engine; None: the newest."""
        return {}

    def build_setup_command(
        self, setup: ServerSetup, port: int, program: list[str], version: str | None = None
    ) -> list[str]:
        """Return the command line of a measured server without a draft; `program`, if not empty, replaces the engine's own."""
        command = self.build_command(setup.folder, port, setup.dtype, setup.device, setup.trust_remote_code)
        first = program or command[: self.program_words]
        flags = format_flags(self.list_setup_flags(setup, version))
        return [*first, *command[self.program_words :], *flags, *setup.more]

    def list_slot_flags(
        self, setup: ServerSetup, model: str, concurrency: int | None, request_tokens: int, num_threads: int
    ) -> dict[str, Any]:
        """Return the flags of what requests share: slots, a cache of `request_tokens` for each, CPU threads."""
        return {}

    def build_cpu_environment(self, num_threads: int, cache_bytes: int) -> dict[str, str]:
        """Return the variables of a server on a CPU."""
        return {}

    def build_patch_environment(self) -> dict[str, str]:
        """Return the variables that correct how a server drafts for prompts with images."""
        return {}

    def describe_patch(self, log: Path, version: str) -> str | None:
        """Return a sentence on how a server drafts for images. Raises ValueError if it was to be corrected, and is not."""
        return None

    def convert_folder(self, folder: Path, setup: ServerSetup, target: Path | None = None) -> str:
        """Return what the engine loads of a target's folder, or of a draft's whose target is in folder `target`.

        Raises ValueError if it can't be made.
        """
        return str(folder)

    def prepare_sampling(self, launch: SamplingLaunch) -> tuple[str, list[str]]:
        """Return what a server that answers `sample_target` loads, and its further flags."""
        return str(launch.folder), format_flags({"--chat-template": launch.template_file})

    # Drafts

    def explain_unsupported(self, shape: TreeShape, config: Info) -> str | None:
        """Return why the engine can't run a tree with a draft of that config.json; None if it can."""
        family = find_family(config)
        return DraftKind(family, family.find_depth(config)).explain_unserved(self.name, shape) or self.explain_draft(
            config
        )

    def explain_draft(self, config: Info) -> str | None:
        """Return why the engine runs no draft of that config.json, whatever the tree."""
        return None

    def find_change(self, config: Info) -> Change | None:
        """Return what the engine needs of its version for a draft of that config.json; None where all that aerie starts do."""
        return next((self.drafts[name] for name in config.get("architectures") or () if name in self.drafts), None)

    def explain_old_version(self, version: str | None, config: Info) -> str | None:
        """Return why this version does not know a draft of that config.json; None if it does, or is not known."""
        change = self.find_change(config)
        if change is None or change.is_in(version):
            return None
        return f"{self.name} {version} does not know {change.feature}, expected {change.first_version} or later"

    def check_version(self, version: str | None) -> None:
        """Raise ValueError for a version that can't be measured."""
        return

    def find_version(self, program: str) -> str | None:
        """Return the version that a program starts; None where it can't be told. Raises ValueError for one that is too old."""
        version = find_version(self.name, program)
        self.check_version(version)
        return version

    def check_program(self, program: str, flags: Sequence[str]) -> None:
        """Raise ValueError where a program is too old for the flags of speculation; one that can't be asked is not judged."""
        return

    def build_speculation_flags(self, draft: ServedDraft, config: Info) -> list[str]:
        """Return the flags of speculative decoding; `config` is the draft's config.json."""
        raise ValueError(f"aerie knows no flags of speculation of {self.name}")

    def name_draft_file(self, checkpoint: str, outtype: str) -> str:
        """Return what a user gives the engine as the draft of a checkpoint."""
        return f"drafts/{checkpoint}/draft"

    def samples_drafts(self, draft: ServedDraft, flags: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether drafts are sampled above temperature 0 and verified by the ratio of both probabilities.

        `flags` are those of the server, `environment` its variables. None is for requests of top_k 1.
        """
        return False

    def simulate_acceptance(self, length: float, flags: list[str]) -> tuple[list[str], dict[str, str]]:
        """Return a server's flags of speculation and its variables, by which each cycle yields `length` tokens on average."""
        raise ValueError(f"{self.name} can't simulate acceptance")

    def list_simulating(self, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
        """Return what of a server's environment and command would make it simulate acceptance."""
        return []

    # What a server reports of itself

    async def fetch_info(self, http: HttpSession, url: str) -> dict[str, Any]:
        """Return what the server reports, by its own names. Raises ExchangeFailedError if it can't be asked."""
        return {}

    def read_log(self, log: str) -> dict[str, str]:
        """Return what the engine tells in its log only."""
        return {}

    def read_memory(self, info: Info) -> Memory:
        """Return the memory that a server reports."""
        return Memory()

    def list_reported_settings(self, draft: ServedDraft | None) -> dict[str, Any]:
        """Return what the server should report of speculation."""
        return {}

    def read_max_graph_batch(self, info: Info) -> int | None:
        """Return the largest batch with CUDA graphs; None if it uses none, or doesn't report it."""
        return None

    def check_info(self, info: Info, draft: ServedDraft | None, concurrency: int | None, needed_tokens: int) -> None:
        """Check by its report that a server is the one meant; what it doesn't report is not checked.

        Raises:
            ValueError: if it runs another tree or another algorithm, or can't hold the requests: in a measurement each would
                look like a slow draft.
        """
        for key, value in self.list_reported_settings(draft).items():
            if key in info and info[key] != value:
                raise ValueError(
                    f"the server reports {key} {info[key]}, expected {value}; start it with this cell's flags, or correct "
                    "benchmark_served.servers.*.base_urls"
                )
        context = info.get("context_length")
        if isinstance(context, int) and context < needed_tokens:
            raise ValueError(
                f"the server's context length is {context} tokens, expected at least {needed_tokens} (the longest prompt, its "
                "answer and a tree); raise --context-length, or max_position_embeddings of target or draft, or ask for less"
            )
        max_batch = info.get("effective_max_running_requests_per_dp", info.get("max_running_requests"))
        for limit, resource, key in (
            (max_batch, "one batch", "--max-running-requests"),
            (self.read_max_graph_batch(info), "its CUDA graphs", "--cuda-graph-max-bs-decode"),
        ):
            if concurrency is not None and isinstance(limit, int) and limit < concurrency:
                raise ValueError(
                    f"the server takes at most {limit} requests in {resource}, expected {concurrency}, the workload's "
                    "concurrency: beyond it they wait or run many times slower; raise benchmark_served.servers.*.max_batch (or "
                    f"{key})"
                )

    # Requests of a load

    def build_request(self, request: LoadRequest, model: str) -> BuiltRequest:
        """Return the request for the engine, in whose answer each chunk tells the number of tokens so far."""
        raise ValueError(f"aerie measures no loads of {self.name}")

    async def begin_load(self, http: HttpSession, url: str) -> None:
        """Make a server that has warmed up ready for a load."""
        return

    async def fetch_figures(self, http: HttpSession, url: str) -> dict[str, Any]:
        """Return the engine's own figures of the load that has ended, by its names."""
        return {}

    def count_request(self, figures: Info, output_tokens: int, num_steps: int | None) -> AcceptanceCounts | None:
        """Return the counts of a request, by docs/metrics.md, from the engine's figures; None without, as without speculation.

        `num_steps` is None without a draft. Raises ValueError if the figures don't add up to the tokens of the answer.
        """
        return AcceptanceCounts(0, 0, []) if output_tokens == 1 else None  # no cycle was needed

    # Answers of sample_target

    def build_sampling_request(self, body: Body, options: SamplingOptions | None) -> tuple[str, Body]:
        """Return the path and the body of a request. Raises ValueError for one that the engine can't answer.

        Only temperature and top_p shape the distribution: the model's generation defaults are overridden, as in
        `target.generation`.
        """
        return "/v1/chat/completions", body | (self.list_sampling_fields(options) if options else {})

    def list_sampling_fields(self, options: SamplingOptions) -> Body:
        """Return the fields of a request's body that only this engine understands."""
        return {}


PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def format_flags(flags: Mapping[str, Any]) -> list[str]:
    """Return a command line's flags: one whose value is True has none, one of None or False is left out."""
    used = {flag: value for flag, value in flags.items() if value is not None and value is not False}
    return [word for flag, value in used.items() for word in ([flag] if value is True else [flag, str(value)])]


def sum_accepted(histogram: list[int]) -> int:
    return sum(i * times for i, times in enumerate(histogram))


def check_sums(name: str, reported: int, expected: int) -> None:
    if reported != expected:
        raise ValueError(f"the engine's figures don't add up: {name} is {reported}, its histogram says {expected}")


def leave_out_cut(histogram: list[int], prefills: int, output_tokens: int) -> AcceptanceCounts:
    """Return the counts of a request, by docs/metrics.md, without what lies beyond the end of its answer.

    Engines count what a cycle accepted before they look for the end of the answer (SGLang 0.5.17, schedule_batch.py:
    output_ids_through_stop; vLLM 0.33, v1/core/sched/scheduler.py:2350), so

        output tokens = prefills + accepted + cycles - cut,   and of what was cut the last was the bonus

    Raises:
        ValueError: if the histogram doesn't add up to the tokens of the answer.
    """
    cycles, accepted = sum(histogram), sum_accepted(histogram)
    cut = prefills + accepted + cycles - output_tokens
    longest = max((i for i, times in enumerate(histogram) if times), default=0)
    if not 0 <= cut <= longest:
        raise ValueError(
            f"the engine's figures don't add up: {prefills} prefills, {cycles} cycles and {accepted} accepted drafts are not "
            f"{output_tokens} tokens with 0 to {longest} cut off; expected prefills + accepted + cycles - cut"
        )
    return AcceptanceCounts(cycles, accepted - max(0, cut - 1), histogram)


async def fetch_json(http: HttpSession, url: str, path: str) -> dict[str, Any]:
    """Return the object that a server answers at a path; {} without one. Raises ExchangeFailedError if it can't be asked."""
    reply = await http.send(url, "GET", path)
    try:
        found = json.loads(reply.body) if reply.status == 200 else {}
    except ValueError as error:
        raise ExchangeFailedError("malformed", f"no JSON of what it is ({error})") from None
    return found if isinstance(found, dict) else {}


def find_version(engine: str, program: str) -> str | None:
    """Return the version of the engine that a program starts; None where it can't be told.

    An environment says it in its package's folder, which takes no start of the engine; some programs elsewhere are asked. A
    version that can't be told (an engine on the PATH, in a container) counts as the newest.
    """
    path = shutil.which(program)
    if path is None:
        return None
    folders = Path(path).absolute().parent.parent.glob(f"lib/python3*/site-packages/{engine}-*.dist-info")
    if found := next(folders, None):
        return found.name.removesuffix(".dist-info").partition("-")[2]
    if not ENGINES[engine].tells_version or Path(path).name != ENGINES[engine].program:
        return None
    try:
        completed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found_versions = re.findall(r"^v?(\d+\.\d[\w.+]*)$", completed.stdout, re.MULTILINE)
    return found_versions[-1] if found_versions and completed.returncode == 0 else None
