"""A server configuration under measurement: opened for its loads, and checked to be the one meant."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from stages.cells import cell
from stages.cells.cell import PLAIN, SPECULATIVE, Memory
from stages.draft import checkpoint
from stages.engines import gpu_memory, http_session, registry, server
from stages.engines.cell_engine import CellContext, LoadResult, QuestionTurn, ResultsByKind, Subject
from stages.engines.protocol import ServedDraft, ServerSetup, describe_draft, format_flags
from stages.engines.server import ServerGroup
from stages.measuring import load_checks, load_generator, measurement_lock
from stages.measuring.load_generator import Arrivals
from stages.measuring.server_setup import ServedWorkload
from stages.params import engines
from stages.params.tree_shape import Load, TreeShape
from stages.params.units import format_gib
from stages.runtime.free_port import find_free_port

LOGS_FOLDER = Path(".scratch/served")
LATER_WARMUP = 1  # prompts before a load whose batches the server has compiled kernels for
RELEASED_GIB, RELEASE_S = 1.0, 30.0  # use above that before the server that counts as released; how long to wait for it


@dataclass(eq=False)
class MeasuredServer(Subject):
    """A server configuration under one workload, and what was measured on it."""

    work: ServedWorkload
    name: str  # as benchmark_served.servers.*.base_urls names it
    draft: ServedDraft | None = None
    speculation_flags: list[str] = field(default_factory=list)
    results: ResultsByKind = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)  # reported by the server
    command: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    notice: str | None = None  # on how the server drafts, for the report
    url: str = ""  # of the server that answers now
    check: Callable[[], None] = lambda: None  # raises ValueError if that server has ended
    variables: dict[str, str] = field(default_factory=dict)  # of its environment
    # tokens that each cycle yields on average; None: what the target accepts is real
    simulated_length: float | None = None

    @property
    def context(self) -> CellContext:  # type: ignore[override]
        return self.work.context

    @property
    def kind(self) -> str:
        return SPECULATIVE if self.draft else PLAIN

    @property
    def simulates(self) -> bool:  # type: ignore[override]
        return self.simulated_length is not None

    @property
    def num_draft_tokens(self) -> int:
        """Return the tokens of the tree, 0 without a draft."""
        return self.draft.shape.num_draft_tokens if self.draft else 0

    @property
    def needs_vision_patch(self) -> bool:
        is_visual = self.context.manifest.modality == "image"
        return self.work.settings.vision_patch and is_visual and self.draft is not None

    @property
    def is_running(self) -> bool:
        """Return whether base_urls names the server: it is not started."""
        return self.name in self.work.settings.base_urls

    @property
    def samples_drafts(self) -> bool:
        """Return whether the server samples the workload's drafts; False without a draft, at temperature 0, and at top_k 1."""
        workload = self.context.workload
        if self.draft is None or not workload.temperature or workload.top_k == 1:
            return False
        flags = [*self.speculation_flags, *self.work.setup.more]
        return self.work.engine.samples_drafts(self.draft, flags, self.info.get("environment", {}))

    def measure_draft_gib(self) -> float | None:
        """Return the size of the draft's file: engines don't report the memory of a draft. None without one."""
        file = Path(self.draft.folder) / "model.safetensors" if self.draft else None
        return round(file.stat().st_size / 2**30, 3) if file and file.exists() else None

    def explain_unsupported(self) -> str | None:
        """Return why the engine can't run the configuration; None if it can."""
        engine, config = self.work.engine, self.work.draft_config
        reason = engine.explain_unsupported(self.draft.shape, config) if self.draft else None
        if self.draft and not reason and engine.find_change(config):
            reason = engine.explain_old_version(self.work.find_version(), config)
        if reason:
            return reason
        if self.work.image_processor and not engine.takes_images:
            return f"{engine.name} takes no pictures with token ids"
        return None

    def run_turn(self, turns: list[QuestionTurn], load: Load, repeat: int) -> dict[str, LoadResult]:
        """Send a turn of each question. Before the first turns come those of the warm-up.

        The whole warm-up, of as many prompts as the load at most, runs before the first load at each concurrency, since engines
        compile kernels by the size of a batch; one prompt of it before each later load.
        """
        workload, warmup = self.context.workload, list[QuestionTurn]()
        if turns[0].number == 0:
            is_warm = any(earlier.concurrency == load.concurrency for earlier in self.results.get(self.kind, {}))
            most = min(LATER_WARMUP, len(turns)) if is_warm else len(turns)
            warmup = self.context.list_first_turns(self.context.warmup_prompts.head(most))
        requests, uncounted = (
            [self.work.make_request(turn, load.max_new_tokens) for turn in each] for each in (turns, warmup)
        )
        load_name = f"{self.name}, {load}"
        with tqdm(total=len(requests), desc=load_name, unit="request", mininterval=2) as bar:
            sent = load_generator.run_load(
                url=self.url,
                model=self.work.served_model,
                requests=requests,
                arrivals=Arrivals(workload.requests_per_second, load.concurrency, workload.seed + repeat),
                request_timeout_s=workload.deadline_s,
                warmup=uncounted,
                section=self.work.section,
                key=self.work.api_key,
                engine=self.work.engine,
                num_steps=self.draft.shape.num_steps if self.draft else None,
                check=self.check,
                on_request_end=bar.update,
            )
            result = asyncio.run(sent)
        failed = [r for r in result.records if r.failure_reason]
        if len(failed) == len(result.records):
            raise ValueError(
                f"{load_name}: all {len(failed)} requests failed, the first: {failed[0].failure_reason}, "
                f"{failed[0].failure_message}"
            )
        load_checks.check_drafts_accepted(self.name, self.draft, result, self.info)
        return {self.kind: result}

    def list_warnings(self, load: Load, results: list[LoadResult]) -> list[str]:
        """Return the warnings of a load: too little warm-up, a KV cache that is too small, requests that failed."""
        found = load_checks.list_warnings(
            results,
            self.context.prompts["prompt_ids"].list.len().to_list(),
            load.concurrency,
            load.max_new_tokens + self.num_draft_tokens,
            self.memory.kv_tokens,
            self.context.workload.warmup,
        )
        return [*found, self.notice] if self.notice else found

    def list_figures(self, results: list[LoadResult]) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for result in results:
            figures |= result.engine_figures
        key = self.work.engine.accept_length
        told = [r.engine_meta.get(key) for result in results for r in result.records]
        if lengths := [float(length) for length in told if length is not None]:
            figures[f"{key}, mean over requests"] = fmean(lengths)
        return figures


def configure_server(work: ServedWorkload, checkpoint_name: str | None, tree: TreeShape | None) -> MeasuredServer:
    """Return the configuration with a checkpoint's draft and a tree, or without them."""
    if checkpoint_name is None or tree is None:
        return MeasuredServer(work, cell.name_configuration(None, None))
    folder = str((checkpoint.locate_checkpoint(checkpoint_name) / "draft").absolute())
    draft = describe_draft(folder, work.draft_config, tree, work.settings.algorithm)
    flags = work.engine.build_speculation_flags(draft, work.draft_config)
    return MeasuredServer(work, cell.name_configuration(checkpoint_name, tree.name), draft, flags)


# Opening


@contextlib.contextmanager
def open_servers(work: ServedWorkload, servers: list[MeasuredServer], owner: str) -> Iterator[None]:
    """Open servers: running ones, or started for the block, and take the turn to measure them.

    Servers start at once where none takes its cache from memory that another frees or fills meanwhile; else one after the other.
    The block has the turn to measure, which ends when the servers have ended: SGLang takes seven seconds, in which another
    stage's server would be measured slow. `owner` is the cell or the grid that they are measured for: another may have a
    server of the same configuration meanwhile.
    """
    gpus_before = gpu_memory.list_visible_gpus()
    groups = [servers] if work.can_start_together() else [[each] for each in servers]
    with contextlib.ExitStack() as turn, contextlib.ExitStack() as stack:
        for group in groups:
            _open_group(work, group, LOGS_FOLDER / f"{work.context.engine}-{owner}", stack)
        turn.enter_context(measurement_lock.measure_server())
        yield
    gpu_after = wait_for_release(gpus_before)
    for measured in servers:
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


def _open_group(work: ServedWorkload, group: list[MeasuredServer], logs: Path, stack: contextlib.ExitStack) -> None:
    """Start servers at once, but for running ones, which `stack` will end, and identify each."""
    gpus_before = gpu_memory.list_visible_gpus()
    running: dict[str, server.ServerProcess] = {}
    if started := [measured for measured in group if not measured.is_running]:
        setup = replace(work.setup, folder=work.engine.convert_folder(work.context.target_folder, work.setup))
        if setup.device != "cpu":
            gpu_memory.check_free_memory(gpus_before[: setup.tp], setup.mem_fraction)
        for measured in started:
            running[measured.name] = _prepare_process(measured, setup, logs / f"{measured.name}.log")
        with measurement_lock.start_server():
            stack.enter_context(ServerGroup([*running.values()]))
    for measured in group:
        process = running.get(measured.name)
        if process:
            measured.url, measured.check = process.base_url, process.check_alive
        else:
            measured.url = engines.strip_api_path(work.settings.base_urls[measured.name])
        asyncio.run(_identify_server(measured))
        if process is None:
            continue
        measured.info |= work.engine.read_log(process.log.read_text(errors="replace"))
        if variables := registry.list_variables(os.environ | process.environment):
            measured.info["environment"] = variables
        if measured.needs_vision_patch:
            measured.notice = work.engine.describe_patch(process.log, str(measured.info.get("version")))
        # The driver reports memory by GPU, so servers that started at once share one figure.
        serving = gpu_memory.sum_used_gib(gpu_memory.list_visible_gpus()) if len(running) == 1 else None
        used: dict[str, float | None] = {"gpu_before": gpu_memory.sum_used_gib(gpus_before), "gpu_serving": serving}
        if measured.memory.weights is not None and (limit := work.limit_reported_weights()) is not None:
            used["weights"] = min(measured.memory.weights, limit)
        measured.memory = measured.memory.model_copy(update=used)


def _prepare_process(measured: MeasuredServer, setup: ServerSetup, log: Path) -> server.ServerProcess:
    """Return the process of a server that is to be started.

    Raises ValueError if it would simulate acceptance unasked, its program is too old for the draft, or a file can't be made.
    """
    work, engine, port = measured.work, measured.work.engine, find_free_port()
    if work.settings.base_urls:
        print(f"note: {work.section}.base_urls has no {measured.name}; starting one", flush=True)
    flags = measured.speculation_flags
    if measured.draft:
        engine.check_program(work.program_path, flags)
    if measured.draft and measured.draft.family.segment:
        folder = measured.draft.folder
        loaded = engine.convert_folder(Path(folder), work.setup, work.context.target_folder)
        flags = measured.speculation_flags = [loaded if word == folder else word for word in flags]
    command = engine.build_setup_command(setup, port, work.settings.command, work.find_version())
    request_tokens, num_threads = work.request_tokens + measured.num_draft_tokens, work.params.target.num_threads
    slots = engine.list_slot_flags(setup, work.served_model, work.max_concurrency, request_tokens, num_threads)
    measured.command = [*command[:1], *format_flags(slots), *command[1:], *flags]
    if measured.draft:
        measured.command += engine.counting_flags
    print(f"starting {setup.engine} for {measured.name}; its log is {log}", flush=True)
    environment, is_on_cpu = dict(measured.variables), setup.device == "cpu"
    if is_on_cpu:
        environment |= engine.build_cpu_environment(num_threads, work.cache_bytes)
    if measured.needs_vision_patch:
        environment |= engine.build_patch_environment()
    if not measured.simulates and (found := registry.list_simulating(os.environ, measured.command)):
        raise ValueError(
            f"the server would simulate acceptance ({', '.join(found)}), expected a real one: its tau would be made up. "
            "Unset it; to measure what cycles cost, use time_cycles"
        )
    return server.ServerProcess(
        setup.engine,
        measured.command,
        port,
        log,
        work.settings.start_timeout_s,
        threads=num_threads if is_on_cpu else None,
        environment=environment,
        section=work.section,
    )


async def _identify_server(measured: MeasuredServer) -> None:
    """Read what the server reports of itself. Raises ValueError if it is not the one meant."""
    work, url, timeout_s = measured.work, measured.url, measured.context.workload.deadline_s
    async with http_session.HttpSession(work.served_model, timeout_s, work.section, work.api_key) as http:
        try:
            engine = await registry.identify_engine(http, url)
            measured.info = await engine.fetch_info(http, url)
        except http_session.ExchangeFailedError as error:
            measured.check()
            raise ValueError(
                f"{url} can't be asked: {error}; is it running? Correct {work.section}.base_urls"
            ) from None
    if engine is not work.engine:
        raise ValueError(
            f"{url} is served by {engine.name}, expected {work.engine.name}; correct {work.section}.base_urls"
        )
    engine.check_version(measured.info.get("version"))
    measured.memory = engine.read_memory(measured.info)
    needed_tokens = work.request_tokens + measured.num_draft_tokens
    engine.check_info(measured.info, measured.draft, work.max_concurrency, needed_tokens)
