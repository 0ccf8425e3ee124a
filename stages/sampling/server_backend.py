"""Sample from servers: those that are named, or those started here for the stage."""

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stages.engines import client, http_session, registry
from stages.engines.chat_answer import ChatAnswer
from stages.engines.protocol import SamplingLaunch, SamplingOptions
from stages.params import server_urls
from stages.sampling import conversation_sampling, replicas, requests, sampled_split
from stages.sampling.conversation_sampling import ConversationSampler, SamplingProgress
from stages.sampling.requests import TargetRequest, UnusableRequestError
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import answer_token_ids, chat_template, generation, manifest
from stages.target.answer_token_ids import SampledAnswer


def open_servers(
    context: SamplingContext, stack: contextlib.ExitStack, scratch_folder: Path
) -> Callable[[], client.ChatClient]:
    """Return a function that makes a client, which lives as long as one event loop; start servers if asked to."""
    s, t = context.p.sample_target.server, context.p.target
    limits = s.concurrency, s.timeout_s, s.attempts
    if s.launch is None:
        _warn_of_date(context)
        urls, secret = (
            server_urls.expand_urls(s.base_urls),
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
    s, from_target = context.p.sample_target, context.p.sample_target.history == "target"
    rows = sum(split.selection.num_requests for split in splits)
    with tqdm(total=rows, desc="sample", unit="row", mininterval=2) as bar:
        bar.update(sum(split.shards.shard_length(n) for split in splits for n in split.shards.published))
        async with make_client() as http:
            progress = SamplingProgress(bar, http)
            samplers = [
                ConversationSampler(split, ServedAnswerHandler(context, split), http, progress, from_target)
                for split in splits
            ]
            try:
                await conversation_sampling.sample_splits(samplers, s.server.concurrency)
            finally:
                context.retries.update(http.retries_by_reason)


@dataclass(frozen=True)
class ServedAnswerHandler:
    """The target's side of `ConversationSampler`."""

    context: SamplingContext
    split: SampledSplit

    def encode_prompt(self, request: TargetRequest, history: list[dict[str, Any]]) -> list[int]:
        return self.context.encode_prompt(request, history)

    def build_body(self, request: TargetRequest, history: list[dict[str, Any]]) -> dict[str, Any]:
        s = self.context.p.sample_target
        return requests.build_chat_body(
            request,
            history,
            self.context.encoder.build_image_url,
            chat_template.build_template_kwargs(self.context.encoder.tokenizer, s.thinking),
            temperature=self.split.draw_temperature(s.seed, request.id),
            top_p=s.top_p,
            max_tokens=s.max_new_tokens,
            seed=sampled_split.make_seed(s.seed, request.id),
        )

    def build_options(self, request: TargetRequest, prompt_ids: list[int], temperature: float) -> SamplingOptions:
        return SamplingOptions(
            prompt_ids=prompt_ids,
            has_images=bool(request.images),
            has_tools=bool(request.tools),
            temperature=temperature,
            max_new_tokens=self.context.p.sample_target.max_new_tokens,
            eos_token_ids=self.context.target.eos_token_ids,
            pad_token=self.context.encoder.pad_token,
        )

    def read_answer(
        self, request: TargetRequest, history: list[dict[str, Any]], prompt_ids: list[int], answer: ChatAnswer
    ) -> SampledAnswer:
        encoder, tools, most = self.context.encoder, request.tools, self.context.p.sample_target.max_new_tokens
        served_ids = answer_token_ids.check_served_prompt(
            encoder, request.row, prompt_ids, answer, history, tools, request.images
        )
        if problem := answer_token_ids.explain_wrong_ids(encoder, self.context.target.vocab_size, prompt_ids, answer):
            raise UnusableRequestError("token_ids_unknown", problem)
        try:
            sampled = answer_token_ids.recover_token_ids(encoder, history, tools, served_ids, answer)
        except ValueError as error:  # the text holds tokens of the chat template, or was ended by the server
            raise UnusableRequestError("token_ids_unknown", str(error)) from None
        if sampled is None:
            counted = (
                f"the server counted {answer.completion_tokens} tokens; its text, tokenised again, gives another number"
            )
            raise UnusableRequestError("token_ids_unknown", counted)
        if (count := len(sampled.answer_ids)) > most + 1:  # an end token may be ours
            if sampled.source == "text, unchecked":
                longer = f"the text, tokenised again, gives {count} tokens, of at most {most} that were asked for"
                raise UnusableRequestError("token_ids_unknown", longer)
            raise ValueError(
                f"sample_target: row {request.row}: the server answered with {count} tokens, expected at most "
                f"sample_target.max_new_tokens {most}; let it obey max_tokens, or raise max_new_tokens"
            )
        return sampled

    def settle_answer(self, request: TargetRequest, sampled: SampledAnswer) -> None:
        temperature = self.split.draw_temperature(self.context.p.sample_target.seed, request.id)
        self.context.settle_answer(self.split, request, temperature, sampled)

    def can_be_quoted(self, sampled: SampledAnswer) -> bool:
        if not sampled.answer_ids or sampled.finish_reason != "stop":
            return False
        return not self.context.encoder.has_image_token(sampled.answer_ids)

    def read_log_tail(self) -> str:
        return self.context.local_servers.read_log_tails() if self.context.local_servers else ""
