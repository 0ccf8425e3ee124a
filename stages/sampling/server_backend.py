"""Sample from servers: those that are named, or those started here for the stage."""

import contextlib
import datetime
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tqdm import tqdm

from stages.engines import client, http_session, registry
from stages.engines.protocol import SamplingLaunch
from stages.params import engines
from stages.sampling import replicas
from stages.sampling.conversation_sampling import ConversationSampler, SamplingProgress, sample_splits
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import generation, manifest


def open_servers(
    context: SamplingContext, stack: contextlib.ExitStack, scratch_folder: Path
) -> Callable[[], client.ChatClient]:
    """Return a function that makes a client, which lives as long as one event loop; start servers if asked to."""
    s, t = context.p.sample_target.server, context.p.target
    limits = s.concurrency, s.timeout_s, s.attempts
    if s.launch is None:
        _warn_of_date(context)
        urls, secret = (
            engines.expand_urls(s.base_urls),
            http_session.read_api_key(s.api_key_env, client.PARAMS_SECTION),
        )
        return lambda: client.ChatClient(urls, s.model or t.model, *limits, secret)
    threads = t.num_threads if t.device == "cpu" else None
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
            threads=threads,
        )
    )
    launch_args = [*own_args, *s.launch_args]
    planned = replicas.plan_replicas(
        engine, folder, t.dtype, t.device, t.trust_remote_code, launch_args, s.start_timeout_s, logs, threads
    )
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
    rows = sum(split.selection.num_requests for split in splits)
    with tqdm(total=rows, desc="sample", unit="row", mininterval=2) as bar:
        bar.update(sum(split.shards.shard_length(n) for split in splits for n in split.shards.published))
        async with make_client() as http:
            progress = SamplingProgress(bar, http)
            samplers = [ConversationSampler(context, split, http, progress) for split in splits]
            try:
                await sample_splits(samplers, context.p.sample_target.server.concurrency)
            finally:
                context.retries.update(http.retries_by_reason)
