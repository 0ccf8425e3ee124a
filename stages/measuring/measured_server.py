"""A server configuration under measurement: opened for its loads, and checked to be the one meant."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.cells.cell import Memory
from stages.engines import gpu_memory, http_session, registry, server
from stages.engines.protocol import ServedDraft, ServerSetup, ServingEngine, format_flags
from stages.engines.server import ServerGroup
from stages.measuring import load_checks, measurement_lock
from stages.measuring.load_generator import LoadResult
from stages.params import server_urls
from stages.params.engines import locate_program
from stages.params.tree_shape import Load
from stages.params.units import format_gib
from stages.runtime.free_port import find_free_port

RELEASED_GIB, RELEASE_S = 1.0, 30.0  # use above that before the server that counts as released; how long to wait for it
CheckServer = Callable[[], None]  # raises ValueError if the server has ended


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
    memory: Memory = field(default_factory=Memory)
    notice: str | None = None  # on how the server drafts, for the report
    url: str = ""  # of the server that answers now
    check: CheckServer = lambda: None  # of that server
    variables: dict[str, str] = field(default_factory=dict)  # of its environment
    # tokens that each cycle yields on average; None: what the target accepts is real
    simulated_length: float | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Return the tokens of the tree, 0 without a draft."""
        return self.draft.num_draft_tokens if self.draft else 0

    def measure_draft_gib(self) -> float | None:
        """Return the size of the draft's file: engines don't report the memory of a draft. None without one."""
        file = Path(self.draft.folder) / "model.safetensors" if self.draft else None
        return round(file.stat().st_size / 2**30, 3) if file and file.exists() else None


@dataclass(frozen=True)
class ServerPlan:
    """How the servers of a cell are reached or started, and what they must hold."""

    setup: ServerSetup
    program: list[str]  # the first words of the command line; empty: the engine's own
    base_urls: dict[str, str]  # of running servers, by configuration
    served_model: str
    api_key: str | None = field(repr=False)
    request_timeout_s: float
    start_timeout_s: float
    num_threads: int
    vision_patch: bool  # whether drafts may need it, of prompts with images
    section: str  # of params.yaml, for messages
    max_concurrency: int | None  # of the loads, at most the number of prompts
    request_tokens: int  # the longest prompt and its answer
    cache_tokens: int  # of the largest load
    token_bytes: int  # keys and values of one token

    @property
    def engine(self) -> ServingEngine:
        return registry.get(self.setup.engine)

    @property
    def program_path(self) -> str:
        """Return the program that starts a server."""
        return self.program[0] if self.program else locate_program(self.setup.engine)

    def find_version(self) -> str | None:
        """Return the version of the engine; None where it can't be told. Raises ValueError for one that is too old."""
        return self.engine.find_version(self.program_path)

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

    def can_start_together(self) -> bool:
        """Return whether servers may start at once: an engine sizes a cache of no given size by the memory that it finds free."""
        return self.setup.device == "cpu" or self.setup.max_total_tokens is not None


@contextlib.contextmanager
def open_servers(plan: ServerPlan, servers: dict[Path, MeasuredServer]) -> Iterator[None]:
    """Open servers of these configurations, by their logs: running ones, or started for the block.

    Servers start at once where none takes its cache from memory that another frees or fills meanwhile; else one after the other.
    The block has the turn to measure, which ends when the servers have ended: SGLang takes seven seconds, in which another
    stage's server would be measured slow.
    """
    gpus_before, items = gpu_memory.list_visible_gpus(), [*servers.items()]
    groups = [items] if plan.can_start_together() else [[item] for item in items]
    with contextlib.ExitStack() as turn, contextlib.ExitStack() as stack:
        for group in groups:
            _open_group(plan, group, stack)
        turn.enter_context(measurement_lock.measure_server())
        yield
    gpu_after = wait_for_release(gpus_before)
    for measured in servers.values():
        measured.memory = measured.memory.model_copy(update={"gpu_after": gpu_after})


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


def _open_group(plan: ServerPlan, group: list[tuple[Path, MeasuredServer]], stack: contextlib.ExitStack) -> None:
    """Start servers at once, but for running ones, which `stack` will end, and identify each."""
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
    for log, measured in group:
        process = running.get(measured.config_name)
        if process:
            measured.url, measured.check = process.base_url, process.check_alive
        else:
            measured.url = server_urls.strip_api_path(plan.base_urls[measured.config_name])
        asyncio.run(_identify_server(plan, measured))
        if process is None:
            continue
        measured.info |= plan.engine.read_log(log.read_text(errors="replace"))
        if variables := registry.list_variables(os.environ | process.environment):
            measured.info["environment"] = variables
        if _needs_vision_patch(plan, measured):
            measured.notice = plan.engine.describe_patch(log, str(measured.info.get("version")))
        # The driver reports memory by GPU, so servers that started at once share one figure.
        serving = gpu_memory.sum_used_gib(gpu_memory.list_visible_gpus()) if len(running) == 1 else None
        used: dict[str, float | None] = {"gpu_before": gpu_memory.sum_used_gib(gpus_before), "gpu_serving": serving}
        if measured.memory.weights is not None and (limit := plan.limit_reported_weights()) is not None:
            used["weights"] = min(measured.memory.weights, limit)
        measured.memory = measured.memory.model_copy(update=used)


def _needs_vision_patch(plan: ServerPlan, measured: MeasuredServer) -> bool:
    return plan.vision_patch and measured.draft is not None


def _prepare_process(plan: ServerPlan, measured: MeasuredServer, log: Path) -> server.ServerProcess:
    """Return the process of a server that is to be started. Raises ValueError if it would simulate acceptance unasked."""
    setup, name = plan.setup, measured.config_name
    if plan.base_urls:
        print(f"note: {plan.section}.base_urls has no {name}; starting one", flush=True)
    engine, port = plan.engine, find_free_port()
    command = engine.build_setup_command(setup, port, plan.program, plan.find_version())
    request_tokens = plan.request_tokens + measured.num_draft_tokens
    slots = engine.list_slot_flags(setup, plan.served_model, plan.max_concurrency, request_tokens, plan.num_threads)
    measured.command = [*command[:1], *format_flags(slots), *command[1:], *measured.speculation_flags]
    if measured.draft:
        measured.command += engine.counting_flags
    print(f"starting {setup.engine} for {name}; its log is {log}", flush=True)
    threads, environment = None, dict(measured.variables)
    if setup.device == "cpu":
        threads = plan.num_threads
        environment |= engine.build_cpu_environment(threads, plan.cache_tokens * plan.token_bytes)
    if _needs_vision_patch(plan, measured):
        environment |= engine.build_patch_environment()
    if measured.simulated_length is None:
        load_checks.check_real(os.environ, measured.command)
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


async def _identify_server(plan: ServerPlan, measured: MeasuredServer) -> None:
    """Read what the server reports of itself. Raises ValueError if it is not the one meant."""
    url = measured.url
    async with http_session.HttpSession(plan.served_model, plan.request_timeout_s, plan.section, plan.api_key) as http:
        try:
            engine = await registry.identify_engine(http, url)
            measured.info = await engine.fetch_info(http, url)
        except http_session.ExchangeFailedError as error:
            measured.check()
            raise ValueError(
                f"{url} can't be asked: {error}; is it running? Correct {plan.section}.base_urls"
            ) from None
    if engine is not plan.engine:
        raise ValueError(
            f"{url} is served by {engine.name}, expected {plan.setup.engine}; correct benchmark_served.engine"
        )
    engine.check_version(measured.info.get("version"))
    measured.memory = engine.read_memory(measured.info)
    needed_tokens = plan.request_tokens + measured.num_draft_tokens
    engine.check_info(measured.info, measured.draft, plan.max_concurrency, needed_tokens)
