"""Loads on a measured server: it is opened, and the repeats of every point of a workload run on it."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import polars as pl
from tqdm import tqdm

from stages.cells import points, request_record
from stages.measuring import load_checks, load_generator, measured_server, server_setup
from stages.measuring import requests as served_requests
from stages.measuring.load_generator import Arrivals, LoadResult
from stages.measuring.measured_server import MeasuredServer, ServerPlan
from stages.measuring.requests import SECTION, ServedCellContext
from stages.params.tree_shape import Load
from stages.prompts import workload_prompts

T = TypeVar("T")

LOGS_FOLDER = Path(".scratch/served")
LATER_WARMUP = 1  # prompts before a load whose batches the server has compiled kernels for


@contextlib.contextmanager
def open_servers(plan: ServerPlan, servers: list[MeasuredServer], owner: str) -> Iterator[None]:
    """Open servers, which start at once where they can, and take the turn to measure them.

    `owner` is the cell or the grid that they are measured for: another may have a server of the same configuration meanwhile.
    """
    plan = server_setup.convert_folders(plan, servers)
    with measured_server.open_servers(plan, {LOGS_FOLDER / owner / f"{s.config_name}.log": s for s in servers}):
        yield


def order_turns(servers: Sequence[T], repeat: int) -> Iterable[T]:
    """Return the servers as a repeat measures them: backwards in every second one, so that none is always the first."""
    return servers if repeat % 2 == 0 else reversed(servers)


def order_loads(
    servers: Sequence[tuple[ServedCellContext, MeasuredServer]], repeat: int
) -> Iterator[tuple[ServedCellContext, MeasuredServer, Load]]:
    """Yield what a repeat measures on servers that are up together: each load on all that have it, then the next load.

    So one load of all servers is measured within seconds, and a machine that is slower for a minute slows all of them alike.
    Every second load goes backwards.
    """
    loads = dict.fromkeys(load for work, _ in servers for load in work.workload.list_loads())
    for index, load in enumerate(loads):
        for work, server in order_turns(servers, repeat + index):
            if load in work.workload.list_loads():
                yield work, server, load


def run_repeats(work: ServedCellContext, server: MeasuredServer, repeats: list[int]) -> None:
    """Run these repeats of all points on a server."""
    for repeat in repeats:
        for load in work.workload.list_loads():
            run_load(work, server, load, repeat)


def run_load(work: ServedCellContext, server: MeasuredServer, load: Load, repeat: int) -> None:
    """Run one repeat of one point on a server, and add it to the server's `loads`.

    The whole warm-up, of as many prompts as the load at most, runs before the first load at each concurrency, since engines
    compile kernels by the size of a batch; one prompt of it before each later load.
    """
    started = time.perf_counter()
    is_warm = any(earlier.concurrency == load.concurrency for earlier in server.loads)
    warmup = work.warmup_prompts.head(LATER_WARMUP) if is_warm else work.warmup_prompts
    turns = asyncio.run(_run_turns(work, server, load, repeat, warmup))
    server.loads.setdefault(load, []).append(turns)
    took = turns, time.perf_counter() - started
    print(_describe_load(server, load, repeat, work.workload.most_repeats, *took), flush=True)


def _describe_load(
    server: MeasuredServer, load: Load, repeat: int, num_repeats: int, turns: list[LoadResult], seconds: float
) -> str:
    """Return a line for the log."""
    summary = request_record.summarise_load([r for found in turns for r in found.records])
    cycles, accepted = load_checks.sum_counts(turns)
    tau = f"tau {1 + accepted / cycles:.3f}, " if cycles else ""
    if server.simulated_length is not None:
        tau = "acceptance simulated, "
    repeat_label = f" ({repeat + 1} of {num_repeats})" if num_repeats > 1 else ""
    return (
        f"{server.config_name}, {load}{repeat_label}: {tau}{points.format_throughput(summary.output_throughput)}, "
        f"{summary.completed} of {summary.requests} answered, {seconds:.1f} s"
    )


def list_warnings(
    work: ServedCellContext, measured: MeasuredServer, load: Load, results: list[LoadResult]
) -> list[str]:
    """Return the warnings of a load as sentences: too little warm-up, a KV cache that is too small, requests that failed."""
    return load_checks.list_warnings(
        results,
        work.prompts["prompt_ids"].list.len().to_list(),
        load.concurrency,
        load.max_new_tokens + measured.num_draft_tokens,
        measured.memory.kv_tokens,
        work.workload.warmup,
    )


async def _run_turns(
    work: ServedCellContext, server: MeasuredServer, load: Load, repeat: int, warmup_prompts: pl.DataFrame
) -> list[LoadResult]:
    """Run one repeat of one point: a load for each turn; later turns follow the engine's own earlier answers."""
    length, cap = load
    prompts = work.prompts.head(work.workload.limit_prompts(cap) or len(work.prompts))
    workload, arrivals = work.workload, Arrivals(work.workload.requests_per_second, cap, work.workload.seed + repeat)
    load_name = f"{server.config_name}, {load}"
    requests, warmup = (
        [served_requests.make_request(work, row, 0, row.prompt_ids, length) for row in workload_prompts.list_rows(rows)]
        for rows in (prompts, warmup_prompts.head(len(prompts)))
    )
    results: list[LoadResult] = []
    while requests:
        with tqdm(total=len(requests), desc=load_name, unit="request", mininterval=2) as bar:
            result = await load_generator.run_load(
                url=server.url,
                model=work.served_model,
                requests=requests,
                arrivals=arrivals,
                request_timeout_s=workload.deadline_s,
                warmup=warmup,
                section=SECTION,
                key=work.api_key,
                engine=work.engine,
                num_steps=server.draft.num_steps if server.draft else None,
                check=server.check,
                on_request_end=bar.update,
            )
        load_checks.check_answered(load_name, result)
        results.append(result)
        requests, warmup = served_requests.make_next_requests(work, results, length), []
    load_checks.check_drafts_accepted(server.config_name, server.draft, results, server.info, len(prompts))
    return results
