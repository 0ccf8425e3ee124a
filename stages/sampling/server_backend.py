"""Sample from servers: those that are named, or those started here, as many as the visible GPUs hold, for the stage."""

import argparse
import contextlib
import datetime
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from stages.engines import client, http_session, registry
from stages.engines.gpu_memory import list_visible_gpus
from stages.engines.protocol import SamplingLaunch, ServingEngine
from stages.engines.server import ServerGroup, ServerProcess
from stages.params import engines
from stages.params.target_sections import Target
from stages.runtime.free_port import find_free_port
from stages.runtime.machine import list_named_gpus
from stages.sampling import sampled_split
from stages.sampling.conversation_sampling import ConversationSampler, SamplingProgress, sample_splits
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import generation, manifest

MAX_RESTARTS = 3  # of each server, in one run
SECTION = "sample_target.server.launch_args"  # of params.yaml, for messages
# Flags of SGLang and vLLM that multiply the GPUs of one server.
PARALLEL_FLAGS = {
    "tp": ("--tp", "-tp", "--tp-size", "--tensor-parallel-size"),
    "pp": ("--pp", "-pp", "--pp-size", "--pipeline-parallel-size"),
    "dp": ("--dp", "-dp", "--dp-size", "--data-parallel-size"),
}


def open_servers(
    context: SamplingContext, stack: contextlib.ExitStack, scratch_folder: Path
) -> Callable[[], client.ChatClient]:
    """Return a function that makes a client, which lives as long as one event loop; start servers if asked to."""
    s, t = context.p.sample_target.server, context.p.target
    limits = s.concurrency, s.timeout_s, s.attempts
    if s.launch is None:
        _warn_of_date(context)
        urls = engines.expand_urls(s.base_urls)
        secret = http_session.read_api_key(s.api_key_env, client.PARAMS_SECTION)
        return lambda: client.ChatClient(urls, s.model or t.model, *limits, secret)
    logs = scratch_folder.parent  # they outlive the run, to explain a failure
    engine, target = registry.get(s.launch), context.target
    template = None if target.chat_template is None else manifest.TARGET_FOLDER.resolve() / "chat_template.jinja"
    linked = context.folder, logs / "served_target", target.eos_token_ids, target.chat_template
    folder, own_args = engine.prepare_sampling(
        SamplingLaunch(
            folder=context.folder,
            link_target=partial(generation.link_target, *linked),
            template_file=template,
            dtype=t.dtype,
            device=t.device,
            trust_remote_code=t.trust_remote_code,
            concurrency=s.concurrency,
            max_new_tokens=context.p.sample_target.max_new_tokens,
            threads=t.num_threads if t.device == "cpu" else None,
        )
    )
    planned = plan_replicas(engine, folder, t, [*own_args, *s.launch_args], s.start_timeout_s, logs)
    own = context.local_servers = stack.enter_context(planned)
    return lambda: client.ChatClient(own.base_urls, folder, *limits, None, engine, own.check_alive)


def _warn_of_date(context: SamplingContext) -> None:
    """Print a warning where servers of others show another date in their prompts than the target's."""
    fixed, today = context.target.date, datetime.date.today().isoformat()
    if fixed not in (None, today):
        print(
            f"warning: the target's chat template shows a date, {fixed} for this target, and servers that render prompts show "
            f"their own, {today}: start them with --chat-template {manifest.TARGET_FOLDER}/chat_template.jinja. Of servers that "
            "return prompts each row keeps its own; of others the date is not known"
        )


async def ask_servers(
    context: SamplingContext, make_client: Callable[[], client.ChatClient], splits: list[SampledSplit]
) -> None:
    """Sample whole splits."""
    with sampled_split.show_progress(splits) as bar:
        async with make_client() as http:
            progress = SamplingProgress(bar, http)
            samplers = [ConversationSampler(context, split, http, progress) for split in splits]
            try:
                await sample_splits(samplers, context.p.sample_target.server.concurrency)
            finally:
                context.retries.update(http.retries_by_reason)


def plan_replicas(
    engine: ServingEngine, folder: str, target: Target, launch_args: Sequence[str], timeout_s: float, logs: Path
) -> ServerGroup:
    """Return servers that are not started yet: one on a CPU, else one for each group of GPUs that `launch_args` ask for.

    The target's `device` may name one GPU, such as cuda:1, which then has the only server.
    """
    kind, _, gpu_index = target.device.partition(":")
    threads = target.num_threads if kind == "cpu" else None
    groups = [None] if kind == "cpu" else _group_gpus(_list_gpus(gpu_index), _count_gpus_per_server(launch_args))
    servers = []
    for index, gpus in enumerate(groups):
        port = find_free_port()
        # The only GPU that it sees is its first.
        line = engine.build_command(folder, port, target.dtype, kind, target.trust_remote_code) + list(launch_args)
        log = logs / (f"{engine.name}_server.log" if len(groups) == 1 else f"{engine.name}_server_{index}.log")
        print(f"starting {engine.name} on port {port}{f' on GPU {gpus}' if gpus else ''}; its log is {log}", flush=True)
        servers.append(
            ServerProcess(engine.name, line, port, log, timeout_s, restarts=MAX_RESTARTS, threads=threads, gpus=gpus)
        )
    return ServerGroup(servers)


def _list_gpus(gpu_index: str) -> list[str]:
    """Return the visible GPUs, or the one of this index, as CUDA_VISIBLE_DEVICES names them."""
    count, named = len(list_visible_gpus()), list_named_gpus()
    names = [str(n) for n in range(count)] if named is None else named[:count]
    return names[int(gpu_index) : int(gpu_index) + 1] if gpu_index else names


def _count_gpus_per_server(launch_args: Sequence[str]) -> int:
    """Return tensor x pipeline x data parallel size of these flags. Raises ValueError for one that is no positive number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for key, flags in PARALLEL_FLAGS.items():
        parser.add_argument(*flags, dest=key, type=int, default=1)
    # SGLang: its dp then divides tp and takes no GPUs of its own
    parser.add_argument("--enable-dp-attention", action="store_true")
    try:
        found = vars(parser.parse_known_args(list(launch_args))[0])
    except argparse.ArgumentError as error:
        raise ValueError(f"{SECTION}: {error}") from None
    if found.pop("enable_dp_attention"):
        del found["dp"]
    if invalid := {key: size for key, size in found.items() if size < 1}:
        raise ValueError(f"{SECTION}: expected sizes of at least 1, found {invalid}")
    return math.prod(found.values())


def _group_gpus(names: list[str], size: int) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES of each server of `size` GPUs. Raises ValueError if there are not enough for one."""
    if len(names) < size:
        raise ValueError(
            f"{SECTION} asks for {size} GPUs for a server, found {len(names)} visible; lower its --tp (tensor parallel size), "
            "or make more visible (CUDA_VISIBLE_DEVICES, schedule.stages.sample_target.gpus)"
        )
    groups = [",".join(names[start : start + size]) for start in range(0, len(names) - size + 1, size)]
    if unused := len(names) % size:
        print(f"{unused} of {len(names)} GPUs are not used: a server takes {size}")
    return groups
