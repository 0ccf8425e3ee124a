"""Sample conversations from servers, turn by turn; each is kept as it comes, so that a killed run resumes."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm

from stages.engines import client, http_session
from stages.engines.chat_answer import ChatAnswer
from stages.engines.protocol import SamplingOptions
from stages.sampling import answer_token_ids, requests, sampled_split
from stages.sampling.answer_token_ids import SampledAnswer
from stages.sampling.requests import TargetRequest, UnusableRequestError
from stages.sampling.sampled_split import SampledSplit
from stages.sampling.sampling_context import SamplingContext
from stages.target import chat_template

SHARDS_AHEAD = 4  # open at once, beyond what the concurrency needs: one slow row must not fill the memory

T = TypeVar("T")
History = list[dict[str, Any]]  # messages before an answer, the target's own where later turns quote them


@dataclass
class SamplingProgress:
    """The progress bar of all splits."""

    bar: tqdm
    http: client.ChatClient
    tokens: int = 0
    dropped: int = 0
    _started: float = field(default_factory=time.perf_counter)

    def count_row(self) -> None:
        self.bar.update()
        rate, retries = self.tokens / (time.perf_counter() - self._started), sum(self.http.retries_by_reason.values())
        self.bar.set_postfix_str(f"{rate:.0f} tokens/s, {retries} retries, {self.dropped} dropped", refresh=False)


async def sample_splits(samplers: "list[ConversationSampler]", concurrency: int) -> None:
    """Sample splits in order with `concurrency` workers, each of which takes a group at a time.

    While the last answers of a split are awaited, workers go on with the next split: servers have `concurrency` requests until
    the last split ends.
    """
    queues = [(s, s.split.read_unfinished_groups(by_conversation=s.history_from_target)) for s in samplers]

    async def work() -> None:
        for sampler, queue in queues:
            for group in queue:
                await sampler.sample_group(group, concurrency)

    with http_session.raise_first_error():
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, sum(sampler.split.selection.num_requests for sampler in samplers))):
                tasks.create_task(work())


@dataclass
class ConversationSampler:
    """A split being sampled from servers."""

    context: SamplingContext
    split: SampledSplit
    http: client.ChatClient
    progress: SamplingProgress

    @property
    def history_from_target(self) -> bool:
        """Return whether later turns quote the target's own answers."""
        return self.context.p.sample_target.history == "target"

    async def sample_group(self, group: list[TargetRequest], concurrency: int) -> None:
        """Settle the requests of a group in order, once older shards are nearly done."""
        shards, size = self.split.shards, self.context.p.sample_target.shard_size
        while shards.shard_of(group[0].position) > shards.oldest + SHARDS_AHEAD + concurrency // size:
            await asyncio.sleep(0.1)
        quoted: dict[int, dict[str, Any]] = {}  # the target's own messages by their index
        is_broken = False  # whether an earlier answer that this turn would quote is missing
        for request in group:
            if not shards.is_set(request.position):
                history = [quoted.get(k, message) for k, message in enumerate(request.messages[: request.answer_index])]
                try:
                    await self._settle_request(request, history, is_broken)
                except UnusableRequestError as error:
                    self.progress.dropped += 1
                    self.split.drop_request(request, error)
                    self.progress.bar.update()
            message = shards.messages.get(request.position)
            is_broken = self.history_from_target and message is None
            if message is not None:
                quoted[request.answer_index] = message

    async def _settle_request(self, request: TargetRequest, history: History, is_broken: bool) -> None:
        """Ask a server and store its answer. Raises UnusableRequestError where the servers refuse the request, its answer's token
        ids are unknown, or its history `is_broken`.
        """
        prompt_ids = await _run(self.context.encode_prompt, request, history)
        if is_broken:
            raise UnusableRequestError("earlier_turn_incomplete")
        answer = await self._ask_server(request, prompt_ids, await _run(self._build_body, request, history))
        sampled = self._read_answer(request, history, prompt_ids, answer)
        temperature = self.split.draw_temperature(self.context.p.sample_target.seed, request.id)
        self.context.settle_answer(self.split, request, temperature, sampled, self._quote(request, answer, sampled))
        self.progress.count_row()

    def _quote(self, request: TargetRequest, answer: ChatAnswer, sampled: SampledAnswer) -> dict[str, Any] | None:
        """Return the answer as later turns quote it; None where they quote none, or this one is not complete."""
        is_whole = bool(sampled.answer_ids) and sampled.finish_reason == "stop"
        if not self.history_from_target or not is_whole or self.context.encoder.has_image_token(sampled.answer_ids):
            return None
        if "tool_calls" in (request.answer or {}):  # the data's own, since its result follows
            return request.answer
        thoughts = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        return {"role": "assistant", "content": answer.text, **thoughts}

    async def _ask_server(self, request: TargetRequest, prompt_ids: list[int], body: dict[str, Any]) -> ChatAnswer:
        options = SamplingOptions(
            prompt_ids=prompt_ids,
            has_images=bool(request.images),
            has_tools=bool(request.tools),
            temperature=body["temperature"],
            max_new_tokens=self.context.p.sample_target.max_new_tokens,
            eos_token_ids=self.context.target.eos_token_ids,
            pad_token=self.context.encoder.pad_token,
        )
        try:
            answer = await self.http.complete(body, options)
        except http_session.RequestRefusedError as error:
            raise UnusableRequestError("refused", str(error)) from None
        except ValueError as error:
            tail = self.context.local_servers.read_log_tails() if self.context.local_servers else ""
            raise ValueError(f"sample_target: row {request.row}: {error}{tail}") from None
        self.progress.tokens += answer.completion_tokens or 0
        return answer

    def _build_body(self, request: TargetRequest, history: History) -> dict[str, Any]:
        """Return the body of a chat completion for any server, without the model."""
        s, encoder = self.context.p.sample_target, self.context.encoder
        body: dict[str, Any] = {
            "messages": requests.convert_to_openai(history, encoder.build_image_url),
            "temperature": self.split.draw_temperature(s.seed, request.id),
            "top_p": s.top_p,
            "max_tokens": s.max_new_tokens,
            "seed": sampled_split.make_seed(s.seed, request.id),
        }
        if request.tools:
            body["tools"] = request.tools
        if template_kwargs := chat_template.build_template_kwargs(encoder.tokenizer, s.thinking):
            body["chat_template_kwargs"] = template_kwargs
        return body

    def _read_answer(
        self, request: TargetRequest, history: History, prompt_ids: list[int], answer: ChatAnswer
    ) -> SampledAnswer:
        """Return the answer with its ids. Raises UnusableRequestError, or ValueError where the server had another prompt."""
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
        if (count := len(sampled.answer_ids)) > most + 1:  # an end token may be ours
            if sampled.source == "text, unchecked":
                longer = f"the text, tokenised again, gives {count} tokens, of at most {most} that were asked for"
                raise UnusableRequestError("token_ids_unknown", longer)
            raise ValueError(
                f"sample_target: row {request.row}: the server answered with {count} tokens, expected at most "
                f"sample_target.max_new_tokens {most}; let it obey max_tokens, or raise max_new_tokens"
            )
        return sampled


async def _run(function: Callable[[TargetRequest, History], T], request: TargetRequest, history: History) -> T:
    """Call the function; with images outside the event loop, since decoding a large one takes as long as a hundred answers."""
    return await asyncio.to_thread(function, request, history) if request.images else function(request, history)
