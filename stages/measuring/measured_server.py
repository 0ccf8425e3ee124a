"""A server configuration under measurement: opened for its loads, and checked to be the one meant."""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stages.engines import engine_flags, gpu_memory, http_session, server, versions
from stages.engines.engine_flags import ServedDraft
from stages.engines.server import ServerGroup
from stages.engines.server_startup.sglang_vision_patch import PREFIX, TARGETS, VERSION
from stages.measuring import measurement_lock, simulated_acceptance
from stages.measuring.load_generator import LoadResult
from stages.measuring.simulated_acceptance import SimulatedAcceptance
from stages.params import server_urls
from stages.params.engines import locate_program
from stages.params.tree_shape import Load
from stages.params.units import format_gib
from stages.runtime.free_port import find_free_port

DEFAULT_SLOTS = 4  # of llama.cpp, for loads without a limit; its own default
RELEASED_GIB, RELEASE_S = 1.0, 30.0  # use above that before the server that counts as released; how long to wait for it
CheckServer = Callable[[], None]  # raises ValueError if the server has ended


@dataclass
class UsedGpuMemory:
    """GiB used on the server's GPUs, None if unknown."""

    gpu_before: float | None = None
    gpu_serving: float | None = None
    gpu_after: float | None = None


@dataclass
class MeasuredServer:
    """A server configuration of the cell, and what was measured on it."""

    config_name: str  # as benchmark_served.server.base_urls names it
    checkpoint: str | None = None  # None: without a draft
    tree_name: str | None = None
    draft: ServedDraft | None = None
    speculation_flags: list[str] = field(default_factory=list)
    loads: dict[Load, list[list[LoadResult]]] = field(default_factory=dict)  # load -> repeat -> turn
    info: dict[str, Any] = field(default_factory=dict)  # reported by the server
    command: list[str] = field(default_factory=list)
    gpu_memory: UsedGpuMemory = field(default_factory=UsedGpuMemory)
    weight_files_gib: float | None = None  # of the target, where the engine's own figure may be too large
    notice: str | None = None  # on how the server drafts, for the report
    simulated: SimulatedAcceptance | None = None  # None: what the target accepts is real

    @property
    def num_draft_tokens(self) -> int:
        """Return the tokens of the tree, 0 without a draft."""
        return self.draft.num_draft_tokens if self.draft else 0

    def get_reported_memory(self) -> engine_flags.ReportedMemory:
        """Return what the engine reports; of the weights `weight_files_gib` at most."""
        found = engine_flags.read_server_memory(self.info)
        limits = [gib for gib in (found.weights, self.weight_files_gib) if gib is not None]
        return replace(found, weights=None if found.weights is None else min(limits))

    def measure_draft_gib(self) -> float | None:
        """Return the size of the draft's file: engines don't report the memory of a draft. None without one."""
        file = Path(self.draft.folder) / "model.safetensors" if self.draft else None
        return round(file.stat().st_size / 2**30, 3) if file and file.exists() else None


@dataclass(frozen=True)
class ServerPlan:
    """How the servers of a cell are reached or started, and what they must hold."""

    setup: engine_flags.ServerSetup
    program: list[str]  # the first words of the command line; empty: the engine's own
    base_urls: dict[str, str]  # of running servers, by configuration
    served_model: str
    api_key: str | None = field(repr=False)
    request_timeout_s: float
    start_timeout_s: float
    num_threads: int
    vision_patch: bool  # whether drafts of images need it, of SGLang 0.5.17
    section: str  # of params.yaml, for messages
    max_concurrency: int | None  # of the loads, at most the number of prompts
    request_tokens: int  # the longest prompt and its answer
    cache_tokens: int  # of the largest load
    token_bytes: int  # keys and values of one token

    def count_servers_at_once(self) -> int:
        """Return how many of these servers this machine holds at once; a running one (base_urls) takes nothing of it."""
        if self.setup.device == "cpu" or self.base_urls:
            return 2
        return self.setup.count_fitting()

    def measure_weight_files_gib(self) -> float:
        """Return the size of the target's files."""
        return sum(file.stat().st_size for file in Path(self.setup.folder).glob("*.safetensors")) / 2**30

    def limit_reported_weights(self) -> float | None:
        """Return the most GiB of weights that a server's report is right about; None without a limit.

        SGLang reports the memory that became less while it read its weights, and so what a server that started meanwhile, of
        this stage or of another, took. In float32 files of 16 bits take twice their size.
        """
        limited = self.can_start_together() and self.setup.device != "cpu" and self.setup.dtype != "float32"
        return round(self.measure_weight_files_gib(), 3) if limited else None

    def build_cpu_environment(self) -> dict[str, str]:
        """Return vLLM's variables of a CPU that the user does not set: by itself it takes half the memory for its cache."""
        if (self.setup.engine, self.setup.device) != ("vllm", "cpu"):
            return {}
        cores = sorted(os.sched_getaffinity(0))[: self.num_threads]
        own = {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(2 * self.cache_tokens * self.token_bytes / 2**30)),  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        return {name: value for name, value in own.items() if name not in os.environ}

    def build_slot_flags(self, num_draft_tokens: int) -> list[str]:
        """Return llama.cpp's flags of slots and cores. A slot stops drafting two tokens before its end."""
        if self.setup.engine != "llama.cpp":
            return []
        slots = self.setup.max_batch or self.max_concurrency or DEFAULT_SLOTS
        tokens = self.setup.max_total_tokens or slots * (self.request_tokens + num_draft_tokens + 2)
        threads = self.num_threads if self.setup.device == "cpu" else None
        flags = server.build_slot_flags(slots, tokens, threads)
        return server.format_flags({"--alias": self.served_model, **flags})

    def can_start_together(self) -> bool:
        """Return whether servers may start at once: an engine sizes a cache of no given size by the memory that it finds free."""
        return self.setup.device == "cpu" or self.setup.max_total_tokens is not None


def find_engine_version(plan: ServerPlan) -> str | None:
    """Return the version of the engine that the plan starts; None where it can't be told. Raises ValueError for an old vLLM."""
    program = plan.program[0] if plan.program else locate_program(plan.setup.engine)
    version = versions.find_version(plan.setup.engine, program)
    versions.check_vllm(plan.setup.engine, version)
    return version


@contextlib.contextmanager
def open_servers(plan: ServerPlan, servers: dict[Path, MeasuredServer]) -> Iterator[list[tuple[str, CheckServer]]]:
    """Yield (URL, check) of servers of these configurations, by their logs: running ones, or started for the block.

    Servers start at once where none takes its cache from memory that another frees or fills meanwhile; else one after the other.
    The block has the turn to measure, which ends when the servers have ended: SGLang takes seven seconds, in which another
    stage's server would be measured slow.
    """
    gpus_before, items = gpu_memory.list_visible_gpus(), [*servers.items()]
    groups = [items] if plan.can_start_together() else [[item] for item in items]
    with contextlib.ExitStack() as turn, contextlib.ExitStack() as stack:
        opened = [found for group in groups for found in _open_group(plan, group, stack)]
        turn.enter_context(measurement_lock.measure_server())
        yield opened
    gpu_after = wait_for_release(gpus_before)
    for measured in servers.values():
        measured.gpu_memory.gpu_after = gpu_after


def wait_for_release(gpus_before: list[gpu_memory.GpuMemory]) -> float | None:
    """Wait until the ended server has released its memory and return what is in use; print a warning if it does not.

    Servers of other stages hold memory too: beside them there is nothing to wait for.
    """
    until, used_before = time.monotonic() + RELEASE_S, gpu_memory.sum_used_gib(gpus_before) or 0
    while (used := gpu_memory.sum_used_gib(gpu_memory.list_visible_gpus())) and used > used_before + RELEASED_GIB:
        if measurement_lock.has_other_servers():
            break
        if time.monotonic() > until:
            print(
                f"warning: {format_gib(used)} are still in use {RELEASE_S:g} s after the server's end, "
                f"{format_gib(used_before)} were before"
            )
            break
        time.sleep(0.5)
    return used


def _open_group(
    plan: ServerPlan, group: list[tuple[Path, MeasuredServer]], stack: contextlib.ExitStack
) -> list[tuple[str, CheckServer]]:
    """Start servers at once, but for running ones, which `stack` will end; return (URL, check) of each, identified."""
    gpus_before = gpu_memory.list_visible_gpus()
    started = [(log, measured) for log, measured in group if measured.config_name not in plan.base_urls]
    if started and plan.setup.device != "cpu":
        _check_memory(plan, [measured for _, measured in started], gpus_before[: plan.setup.tp])
    running: dict[str, server.ServerProcess] = {}
    for log, measured in started:
        running[measured.config_name] = _prepare_process(plan, measured, log)
    if running:
        with measurement_lock.start_server():
            stack.enter_context(ServerGroup([*running.values()]))
    opened: list[tuple[str, CheckServer]] = []
    for log, measured in group:
        process = running.get(measured.config_name)
        if process:
            opened.append((process.base_url, process.check_alive))
        else:
            opened.append((server_urls.strip_api_path(plan.base_urls[measured.config_name]), lambda: None))
        asyncio.run(_identify_server(plan, measured, *opened[-1]))
        if process is None:
            continue
        measured.weight_files_gib = plan.limit_reported_weights()
        if plan.setup.engine == "vllm":
            measured.info |= engine_flags.read_vllm_log(log.read_text(errors="replace"))
        if variables := engine_flags.list_engine_variables(os.environ | process.environment):
            measured.info["environment"] = variables
        if _needs_vision_patch(plan, measured):
            measured.notice = describe_outcome(log, str(measured.info.get("version")))
        # The driver reports memory by GPU, so servers that started at once share one figure.
        serving = gpu_memory.sum_used_gib(gpu_memory.list_visible_gpus()) if len(running) == 1 else None
        measured.gpu_memory = UsedGpuMemory(gpu_memory.sum_used_gib(gpus_before), serving)
    return opened


def _needs_vision_patch(plan: ServerPlan, measured: MeasuredServer) -> bool:
    return plan.vision_patch and measured.draft is not None


def _prepare_process(plan: ServerPlan, measured: MeasuredServer, log: Path) -> server.ServerProcess:
    """Return the process of a server that is to be started. Raises ValueError if it would simulate acceptance unasked."""
    setup, name = plan.setup, measured.config_name
    if plan.base_urls:
        print(f"note: {plan.section}.base_urls has no {name}; starting one", flush=True)
    port = find_free_port()
    version = find_engine_version(plan)
    command = engine_flags.build_setup_command(setup, port, plan.program, version)
    slots = plan.build_slot_flags(measured.num_draft_tokens)
    measured.command = [*command[:1], *slots, *command[1:], *measured.speculation_flags]
    if measured.draft and setup.engine == "vllm":  # a server without a draft refuses it
        measured.command += ["--per-request-spec-decode-metrics", "summary"]
    print(f"starting {setup.engine} for {name}; its log is {log}", flush=True)
    threads = plan.num_threads if setup.device == "cpu" else None
    environment = build_environment() if _needs_vision_patch(plan, measured) else plan.build_cpu_environment()
    if measured.simulated:
        environment |= measured.simulated.build_environment(setup.engine)
    else:
        simulated_acceptance.check_real(os.environ, measured.command)
    return server.ServerProcess(
        setup.engine, measured.command, port, log, plan.start_timeout_s, threads=threads, environment=environment,
        section=plan.section,
    )  # fmt: skip


def _check_memory(plan: ServerPlan, servers: list[MeasuredServer], gpus: list[gpu_memory.GpuMemory]) -> None:
    """Check that no other process holds memory that a server will take, and that each has room for its weights.

    Servers that start at once have caches of a given size, so `mem_fraction` is not what each of them takes.
    """
    setup = plan.setup
    gpu_memory.check_free_memory(gpus, setup.mem_fraction)
    weights = plan.measure_weight_files_gib()
    tokens = min(plan.cache_tokens, setup.max_total_tokens or plan.cache_tokens)
    capacity = sum(gpu.total for gpu in gpus) * setup.mem_fraction
    for measured in servers:
        draft = measured.measure_draft_gib() or 0.0
        gpu_memory.check_weights_fit(weights, draft, tokens, plan.token_bytes, capacity)


async def _identify_server(plan: ServerPlan, measured: MeasuredServer, url: str, check: CheckServer) -> None:
    """Read what the server reports of itself. Raises ValueError if it is not the one meant."""
    async with http_session.HttpSession(plan.served_model, plan.request_timeout_s, plan.section, plan.api_key) as http:
        try:
            engine = await http.identify_engine(url)
            measured.info = await engine_flags.fetch_server_info(http, url, engine)
        except http_session.ExchangeFailedError as error:
            check()
            raise ValueError(
                f"{url} can't be asked: {error}; is it running? Correct {plan.section}.base_urls"
            ) from None
    if engine != plan.setup.engine:
        raise ValueError(f"{url} is served by {engine}, expected {plan.setup.engine}; correct benchmark_served.engine")
    versions.check_vllm(engine, measured.info.get("version"))
    needed_tokens = plan.request_tokens + measured.num_draft_tokens
    engine_flags.check_server_info(measured.info, measured.draft, plan.max_concurrency, needed_tokens)


STARTUP_FOLDER = Path(__file__).parents[1] / "engines/server_startup"
CORRECTED_VERSION = (0, 5, 23)  # read from its source: it needs no patch
SWITCH = "benchmark_served.server.vision_patch"  # of params.yaml, for messages


def build_environment() -> dict[str, str]:
    """Return the variables that load the patch into every Python process of a server."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([str(STARTUP_FOLDER), *inherited]), "AERIE_SGLANG_PATCH": "vision"}


def describe_outcome(log: Path, version: str) -> str | None:
    """Return a sentence for the report on how a server of this version drafts images; None where it needs no patch.

    Raises:
        ValueError: SGLang 0.5.17 runs without the patch.
    """
    if version != VERSION:
        if versions.parse_release(version) >= CORRECTED_VERSION:
            return None
        return (
            f"SGLang {version} was not patched, and may give the draft of a multimodal target wrong embeddings and positions, as "
            f"{VERSION} does: compare tau with the replayed one (docs/serving.md)"
        )
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    applied = {line.rpartition(" ")[2] for line in lines if line.startswith(f"{PREFIX} applied to ")}
    if missing := sorted(TARGETS.keys() - applied):
        raise ValueError(
            f"SGLang {version} was to run with the vision patch, found no line of {log} for {', '.join(missing)}; its Python "
            f"must read PYTHONPATH (no -I or -E in benchmark_served.server.command), or set {SWITCH}: false"
        )
    return f"drafted with the vision patch of SGLang {VERSION} ({SWITCH}; docs/serving.md)"
