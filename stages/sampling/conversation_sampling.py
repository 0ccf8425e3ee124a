"""Sample conversations from servers, turn by turn; answers are journalled, so that a killed run resumes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tqdm import tqdm

from stages.engines import client, http_session
from stages.engines.chat_answer import ChatAnswer
from stages.engines.protocol import SamplingOptions
from stages.runtime.journal import make_journal_key
from stages.sampling.requests import TargetRequest, UnusableRequestError
from stages.sampling.sampled_split import SampledSplit

SHARDS_AHEAD = 4  # open at once, beyond what the concurrency needs: one slow row must not fill the memory

T = TypeVar("T")
A = TypeVar("A")  # an answer as the handler reads it


class AnswerHandler(Protocol[A]):
    """The target's side of sampling: prompts and request bodies, token ids of answers, rows."""

    def encode_prompt(self, request: TargetRequest, history: list[dict[str, Any]]) -> list[int]:
        """Return the ids that the server should be prompted with. Raises UnusableRequestError."""

    def build_body(self, request: TargetRequest, history: list[dict[str, Any]]) -> dict[str, Any]: ...

    def build_options(self, request: TargetRequest, prompt_ids: list[int], temperature: float) -> SamplingOptions: ...

    def read_answer(
        self, request: TargetRequest, history: list[dict[str, Any]], prompt_ids: list[int], answer: ChatAnswer
    ) -> A:
        """Return the answer with its ids. Raises UnusableRequestError, or ValueError where the server had another prompt."""

    def settle_answer(self, request: TargetRequest, sampled: A) -> None:
        """Store the answer's row."""

    def can_be_quoted(self, sampled: A) -> bool:
        """Return whether later turns may quote the answer."""

    def read_log_tail(self) -> str:
        """Return the last lines of the log of a server started here, for a message; empty for other servers."""


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


async def sample_splits(samplers: "list[ConversationSampler[A]]", concurrency: int) -> None:
    """Sample splits in order with `concurrency` workers, each of which takes a group at a time.

    While the last answers of a split are awaited, workers go on with the next split: servers have `concurrency` requests until
    the last split ends.
    """
    queues = [(sampler, sampler.read_groups()) for sampler in samplers]

    async def work() -> None:
        for sampler, queue in queues:
            for group in queue:
                await sampler.sample_group(group, concurrency)

    with http_session.raise_first_error():
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, sum(sampler.split.selection.num_requests for sampler in samplers))):
                tasks.create_task(work())


@dataclass
class ConversationSampler(Generic[A]):
    """A split being sampled from servers."""

    split: SampledSplit
    handler: AnswerHandler[A]
    http: client.ChatClient
    progress: SamplingProgress
    history_from_target: bool  # later turns quote the target's own answers

    def read_groups(self) -> Iterator[list[TargetRequest]]:
        return self.split.read_unfinished_groups(by_conversation=self.history_from_target)

    async def sample_group(self, group: list[TargetRequest], concurrency: int) -> None:
        """Sample requests of a split in sequence, once its older shards are nearly done."""
        shards = self.split.shards
        while shards.shard_of(group[0].position) > shards.oldest + SHARDS_AHEAD + concurrency // shards.size:
            await asyncio.sleep(0.1)
        await self._settle_group(group)

    async def _settle_group(self, group: list[TargetRequest]) -> None:
        """Settle the requests of a group in order. Answers of shards that are already published come from journals."""
        answers: dict[int, dict[str, Any]] = {}  # turn -> the target's own message
        broken = False  # whether an earlier answer that this turn would quote is missing
        for index, request in enumerate(group):
            is_done = self.split.shards.is_published(request.position)
            history = [answers.get(k, message) for k, message in enumerate(request.messages[: request.answer_index])]
            try:
                prompt_ids = await _run(self.handler.encode_prompt, request, history)
                if broken:
                    raise UnusableRequestError("earlier_turn_incomplete")
                answer, sampled = await self._get_answer(
                    request, history, prompt_ids, self._find_journals(group[index:]), is_done
                )
            except UnusableRequestError as error:
                self._drop_request(request, error, is_done)
                broken = self.history_from_target
                continue
            if not is_done:
                self.handler.settle_answer(request, sampled)
                self.progress.count_row()
            broken = self.history_from_target and not self.handler.can_be_quoted(sampled)
            # A tool call stays the data's own, since its result follows.
            if self.history_from_target and not broken and "tool_calls" not in (request.answer or {}):
                answers[request.answer_index] = {"role": "assistant", "content": answer.text}
                if answer.reasoning:
                    answers[request.answer_index]["reasoning_content"] = answer.reasoning

    def _find_journals(self, requests: list[TargetRequest]) -> list[int]:
        """Return the shards whose journals keep an answer: its own, and those whose rows will quote it."""
        shards = dict.fromkeys(self.split.shards.shard_of(request.position) for request in requests)
        return [shard for shard in shards if shard not in self.split.shards.published]

    async def _get_answer(
        self,
        request: TargetRequest,
        history: list[dict[str, Any]],
        prompt_ids: list[int],
        journals: list[int],
        is_done: bool,
    ) -> tuple[ChatAnswer, A]:
        """Return the answer from a journal or a server. Raises UnusableRequestError where the servers refuse the request, or the
        answer's token ids are unknown.

        Journals keep usable answers alone: others may be the servers' fault, and the next run asks for them again.
        """
        shards = self.split.shards
        body = await _run(self.handler.build_body, request, history)
        key = make_journal_key(["server", request.id, body, prompt_ids])
        journaled = next((found for n in journals if (found := shards.journal(n).done.get(key))), None)
        if journaled is None and is_done:
            raise UnusableRequestError("refused")  # by the run that published its shard
        answer = ChatAnswer(**journaled) if journaled else await self._ask_server(request, prompt_ids, body)
        sampled = self.handler.read_answer(request, history, prompt_ids, answer)
        for shard in journals:
            shards.journal(shard).add(key, asdict(answer))
        return answer, sampled

    async def _ask_server(self, request: TargetRequest, prompt_ids: list[int], body: dict[str, Any]) -> ChatAnswer:
        options = self.handler.build_options(request, prompt_ids, body["temperature"])
        try:
            answer = await self.http.complete(body, options)
        except http_session.RequestRefusedError as error:
            raise UnusableRequestError("refused", str(error)) from None
        except ValueError as error:
            raise ValueError(f"sample_target: row {request.row}: {error}{self.handler.read_log_tail()}") from None
        self.progress.tokens += answer.completion_tokens or 0
        return answer

    def _drop_request(self, request: TargetRequest, error: UnusableRequestError, is_done: bool) -> None:
        if not is_done:
            self.progress.dropped += 1
            self.split.drop_request(request, error)
            self.progress.bar.update()


async def _run(
    function: Callable[[TargetRequest, list[dict[str, Any]]], T], request: TargetRequest, history: list[dict[str, Any]]
) -> T:
    """Call the function; with images outside the event loop, since decoding a large one takes as long as a hundred answers."""
    return await asyncio.to_thread(function, request, history) if request.images else function(request, history)
