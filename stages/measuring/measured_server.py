"""A cell of a serving engine, and its servers: opened for their loads, and checked to be the ones meant.

A stage starts servers and stops them, or uses running ones (`base_urls`). A workload that is a sweep has a point for each answer
length and concurrency, all measured on one server.
"""

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
from stages.cells.cell import PLAIN, SKIPPED, SPECULATIVE, CellSetting, Memory, NotMeasuredError, ServerDescription
from stages.cells.points import MIN_JUDGED_CYCLES
from stages.cells.record import name_draft_sampling
from stages.draft import checkpoint
from stages.engines import gpu_memory, http_session, registry, server
from stages.engines.cell_engine import CellContext, CellEngine, LoadResult, QuestionTurn, ResultsByKind, Subject
from stages.engines.protocol import ServedDraft, ServerSetup, describe_draft, format_flags
from stages.engines.server import ServerGroup
from stages.measuring import load_generator, measurement_lock, server_setup
from stages.measuring.load_generator import Arrivals
from stages.measuring.repeats import sum_counts
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
                self.work.make_session(),
                self.url,
                self.work.engine,
                requests,
                Arrivals(workload.requests_per_second, load.concurrency, workload.seed + repeat),
                warmup=uncounted,
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
        if self.draft:
            self._check_accepted(self.draft, result)
        return {self.kind: result}

    def _check_accepted(self, draft: ServedDraft, load: LoadResult) -> None:
        """Raise NotMeasuredError for a draft of which no token is accepted, ValueError where the settings are why."""
        cycles, accepted = sum_counts([load])
        if cycles >= MIN_JUDGED_CYCLES and accepted == 0 and draft.family.segment:
            found = f"{self.name}: no draft was accepted in {cycles} cycles, so tau is 1.00"
            if draft.algorithm == "EAGLE":
                raise ValueError(
                    f"{found}: benchmark_served.servers.*.algorithm is EAGLE, which leaves out the fusion; set EAGLE3"
                )
            raise NotMeasuredError(
                SKIPPED,
                f"{found}; where results/replay has more, the draft is another target's, or the engine passes over its "
                "tensors or the target's head",
            )
        if (
            not cycles
            and not load.counting_errors
            and sum(r.output_tokens for r in load.records) > 2 * len(load.records)
        ):
            raise ValueError(
                f"{self.name}: the engine reports no accepted drafts (speculative_algorithm: "
                f"{self.info.get('speculative_algorithm', 'unknown')}); start it with this cell's flags, vLLM with "
                "--per-request-spec-decode-metrics summary"
            )

    def list_warnings(self, load: Load, results: list[LoadResult]) -> list[str]:
        """Return the warnings of a load: requests that failed, a KV cache that is too small, too little warm-up."""
        warnings, cache_tokens, warmup = [], self.memory.kv_tokens, self.context.workload.warmup
        if failed := [r for result in results for r in result.records if r.failure_reason]:
            warnings.append(
                f"{len(failed)} requests failed and are in no latency, the first: {failed[0].failure_reason}, "
                f"{failed[0].failure_message}"
            )
        if errors := [error for result in results for error in result.counting_errors]:
            warnings.append(
                f"{len(errors)} requests' accepted drafts can't be counted and are in no tau, the first: {errors[0]}"
            )
        lengths = sorted(self.context.prompts["prompt_ids"].list.len().to_list(), reverse=True)[: load.concurrency]
        required = sum(lengths) + len(lengths) * (load.max_new_tokens + self.num_draft_tokens)
        if cache_tokens is not None and required > cache_tokens:
            warnings.append(
                f"the KV cache holds {cache_tokens} tokens, {required} would be needed for {len(lengths)} of the longest at "
                "once: some may have waited in the engine, or been put back"
            )
        if load.concurrency is not None and warmup < len(lengths):
            warnings.append(
                f"{warmup} requests warmed the server up, fewer than the {len(lengths)} at once: engines compile kernels for "
                f"a batch of new size, so the first repeat may be slower; expected warmup: {len(lengths)} or more"
            )
        return [*warnings, self.notice] if self.notice else warnings

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


class ServedCell(CellEngine):
    """A cell of a serving engine: the server of a draft and a tree, or two, with the draft and without, in turns."""

    def __init__(self, context: CellContext) -> None:
        self.context, name = context, context.checkpoint
        config = server_setup.read_draft_config(context.params, name) if name else {}
        self.work = ServedWorkload(context, config)
        self.measured = configure_server(self.work, name, context.tree)
        self.servers = [self.measured]
        if name and context.params.benchmark_served.interleave:
            self.servers.insert(0, configure_server(self.work, None, None))
        self.gpus_before = gpu_memory.list_visible_gpus()
        self.fits_together = len(self.servers) <= self.work.count_servers_at_once()

    @property
    def subjects(self) -> list[Subject]:
        return [*self.servers]

    def list_gpus(self) -> list[int]:
        is_local = not self.measured.is_running and self.work.setup.device != "cpu"
        return list(range(self.work.settings.tp)) if is_local else []

    def explain_unsupported(self) -> str | None:
        if reason := self.measured.explain_unsupported():
            return reason
        self.work.check_positions(self.measured.num_draft_tokens)
        return None

    def open(self, subjects: list[Subject]) -> contextlib.AbstractContextManager[None]:
        opened, tree = [each for each in self.servers if each in subjects], self.context.tree
        name = cell.name_cell(self.context.workload_name, self.context.checkpoint, tree.name if tree else None)
        return open_servers(self.work, opened, name)

    def describe(self) -> CellSetting:
        hardware = self.work.describe_hardware(self.measured.name, self.gpus_before)
        version, memory = self.measured.info.get("version"), self.measured.memory
        gpu_total = round(sum(gpu.total for gpu in self.gpus_before), 2) if self.gpus_before else None
        return CellSetting(
            hardware=hardware,
            versions={self.context.engine: version} if version else {},
            fingerprint=self.work.build_fingerprint(version, hardware),
            draft_sampling=name_draft_sampling(self.measured.samples_drafts),
            server=ServerDescription(
                command=[_shorten_path(word) for word in self.measured.command],
                info={key: _shorten_path(value) for key, value in self.measured.info.items()},
            ),
            memory=memory.model_copy(update={"draft": self.measured.measure_draft_gib(), "gpu_total": gpu_total}),
        )


def _shorten_path(word: Any) -> Any:
    """Return the last two names of an absolute path, since a cell may be published; other values unchanged."""
    return "/".join(word.split("/")[-2:]) if isinstance(word, str) and word.startswith("/") else word


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
    work, url = measured.work, measured.url
    async with work.make_session() as http:
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
