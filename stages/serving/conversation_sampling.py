"""Sample conversations from servers, turn by turn; answers are journalled, so that a killed run resumes."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tqdm import tqdm

from stages.data.requests import TargetRequest
from stages.data.sampled_split import SampledSplit
from stages.runtime.journal import make_journal_key
from stages.serving import client, http_session

MAX_LEADING_REFUSALS = 8  # refused rows, before any answer, that stop a run
SHARDS_AHEAD = 4  # open at once, beyond what the concurrency needs: one slow row must not fill the memory


class AnswerHandler(Protocol):
    """The target's side of sampling: request bodies, token ids of answers, rows."""

    def explain_unusable(self, request: TargetRequest) -> str | None:
        """Return why a request cannot be sampled, as one word for the report, or None."""

    def build_body(self, request: TargetRequest, history: list[dict[str, Any]]) -> dict[str, Any]: ...

    def build_engine_options(self, request: TargetRequest, temperature: float) -> dict[str, dict[str, Any]]: ...

    def settle_answer(
        self, request: TargetRequest, history: list[dict[str, Any]], answer: client.ChatAnswer, write: bool
    ) -> bool:
        """Store the answer's row if `write`; return whether later turns may quote the answer."""

    def read_log_tail(self) -> str:
        """Return the last lines of the log of a server started here, for a message; empty for other servers."""


@dataclass
class SamplingProgress:
    """The progress bar of all splits."""

    bar: tqdm
    http: client.ChatClient
    tokens: int = 0
    refused: int = 0
    _started: float = field(default_factory=time.perf_counter)

    def count_row(self) -> None:
        self.bar.update()
        rate, retries = self.tokens / (time.perf_counter() - self._started), sum(self.http.retries_by_reason.values())
        self.bar.set_postfix_str(f"{rate:.0f} tokens/s, {retries} retries, {self.refused} refused", refresh=False)


async def sample_splits(samplers: "list[ConversationSampler]", concurrency: int) -> None:
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
class ConversationSampler:
    """A split being sampled from servers."""

    split: SampledSplit
    handler: AnswerHandler
    http: client.ChatClient
    progress: SamplingProgress
    history_from_target: bool  # later turns quote the target's own answers
    refused: list[str] = field(default_factory=list)

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
        broken = False
        for number, request in enumerate(group):
            is_done = self.split.shards.is_published(request.position)
            # Decoding a large image takes as long as a hundred answers, so it leaves the event loop.
            explain = self.handler.explain_unusable
            reason = await asyncio.to_thread(explain, request) if request.images else explain(request)
            if broken or reason:
                if not is_done:
                    self.split.drop_request(request, reason or "earlier_turn_incomplete")
                    self.progress.bar.update()
                continue
            history = [answers.get(k, message) for k, message in enumerate(request.messages[: request.answer_index])]
            answer = await self._get_answer(request, history, self._find_journals(group[number:]), is_done)
            if answer is None:
                broken = self.history_from_target
                continue
            can_be_quoted = self.handler.settle_answer(request, history, answer, not is_done)
            if not is_done:
                self.progress.count_row()
            broken = self.history_from_target and not can_be_quoted
            # A tool call stays the data's own, since its result follows.
            if self.history_from_target and "tool_calls" not in request.messages[request.answer_index]:
                answers[request.answer_index] = {"role": "assistant", "content": answer.text}
                if answer.reasoning:
                    answers[request.answer_index]["reasoning_content"] = answer.reasoning

    def _find_journals(self, rest: list[TargetRequest]) -> list[int]:
        """Return the shards whose journals keep an answer: its own, and those whose rows will quote it."""
        numbers = dict.fromkeys(self.split.shards.shard_of(request.position) for request in rest)
        return [number for number in numbers if number not in self.split.shards.published]

    async def _get_answer(
        self, request: TargetRequest, history: list[dict[str, Any]], journals: list[int], is_done: bool
    ) -> client.ChatAnswer | None:
        """Return the answer from a journal or a server; None where the servers refuse the row, or refused it before."""
        build, shards = self.handler.build_body, self.split.shards
        body = await asyncio.to_thread(build, request, history) if request.images else build(request, history)
        key = make_journal_key(["server", request.id, body])
        known = next((found for n in journals if (found := shards.journal(n).done.get(key))), None)
        if known is None and is_done:
            return None
        if known is None:
            options = self.handler.build_engine_options(request, body["temperature"])
            try:
                known = asdict(await self.http.complete(body, options))
            except http_session.RequestRefusedError as error:
                self._count_refusal(request, error)
                return None
            except ValueError as error:
                raise ValueError(f"sample_target: row {request.id}: {error}{self.handler.read_log_tail()}") from None
            self.progress.tokens += known["completion_tokens"] or 0
        for number in journals:
            shards.journal(number).add(key, known)
        return client.ChatAnswer(**known)

    def _count_refusal(self, request: TargetRequest, error: http_session.RequestRefusedError) -> None:
        self.refused.append(f"row {request.id}: {error}")
        self.progress.refused += 1
        if len(self.refused) >= MAX_LEADING_REFUSALS and not self.split.shards.counts["rows"]:
            raise ValueError(
                f"the servers refused the first {len(self.refused)} rows; correct what they say: {self.refused[0]}"
            ) from None
        self.split.drop_request(request, "refused")
        self.progress.bar.update()
