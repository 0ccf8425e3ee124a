"""vLLM's counters of accepted drafts in /metrics, read around requests: for versions that don't report each request.

Counters are over all requests of a server. Between two requests sent one after the other they tell each request's figures, and
with its tokens how much was cut off; of requests at once they tell sums, in which cut and uncut ends look alike.
"""

import asyncio
from dataclasses import dataclass

from stages.serving import spec_counters
from stages.serving.http_session import ExchangeFailedError, HttpSession
from stages.serving.spec_counters import AcceptanceCounts, VllmCounters

READING_PAUSE_S = 0.2  # the counters follow the answers by a step
MAX_READINGS = 20


@dataclass
class CounterReader:
    """Reads the counters of one server."""

    http: HttpSession
    url: str

    async def read(self) -> VllmCounters | None:
        """Return the counters now; None if the server has none."""
        try:
            reply = await self.http.send(self.url, "GET", "/metrics")
        except ExchangeFailedError:
            return None
        return spec_counters.parse_vllm_counters(reply.body.decode()) if reply.status == 200 else None

    async def read_settled(self) -> VllmCounters | None:
        """Return the counters once they no longer change; None if the server has none."""
        found = None
        for _ in range(MAX_READINGS):
            previous, found = found, await self.read()
            if found == previous:
                break
            await asyncio.sleep(READING_PAUSE_S)
        return found

    async def count_request(
        self, before: VllmCounters, output_tokens: int
    ) -> tuple[VllmCounters | None, AcceptanceCounts]:
        """Return (the counters now, the counts of the only request since `before`).

        The first reading whose cycles make up the answer has them all: the last cycle is what makes them up.

        Raises:
            ValueError: if the counters don't add up to the answer.
        """
        after = await self.read()
        if after is None or not spec_counters.covers_answer(before, after, output_tokens):
            after = await self.read_settled()
        if after is None:
            raise ValueError("vLLM's /metrics could be read before the request and not after it")
        return after, spec_counters.count_vllm_request(before, after, output_tokens)
