"""Acceptance counts by the project's definitions, from what engines report (docs/metrics.md: cycle, accepted).

Engines count what a cycle accepted before they look for the end of the answer, so their figures include drafts beyond an end
token or the length limit; ours don't. SGLang reports each request, so the tokens beyond the end can be computed:

    output tokens = prefills + accepted + cycles - cut,   and of what was cut the last was the bonus

(SGLang 0.5.17, scheduler_components/batch_result_processor.py counts, schedule_batch.py: output_ids_through_stop cuts).
vLLM counts alike (0.33, v1/core/sched/scheduler.py:2350) and reports each request from 0.30 on. Older versions have counters over
all requests alone; a load of one request at a time reads them between requests, in others cut and uncut ends can't be told apart.
"""

import asyncio
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from stages.serving.http_session import ExchangeFailedError, HttpSession

COUNTER_PATTERN = re.compile(r"vllm:spec_decode_num_(\w+?)_total(?:\{(.*)\})?\s+([0-9.eE+]+)")


class AcceptanceCounts(NamedTuple):
    """Counts of a request, or of a load; tau is (accepted + cycles) / cycles."""

    cycles: int
    accepted: int  # drafts
    clipped: bool  # `accepted` leaves out drafts beyond the end
    histogram: list[int]  # the engine's: cycles that accepted i drafts, those beyond the end too


class VllmCounters(NamedTuple):
    """vLLM's counters, over all requests since it started."""

    drafts: int  # cycles that had drafts to verify
    accepted: int
    per_position: list[int]  # cycles that accepted at least i + 1


def count_request(engine_meta: dict[str, Any], output_tokens: int) -> AcceptanceCounts | None:
    """Return the counts of a request from the engine's figures; None without figures, as without speculation.

    Raises:
        ValueError: if the figures don't add up to the tokens of the answer.
    """
    if "num_spec_steps" in engine_meta:  # vLLM
        histogram = engine_meta["acceptance_histogram"]
        _check_sums("num_spec_steps", engine_meta["num_spec_steps"], sum(histogram))
        _check_sums("num_accepted_draft_tokens", engine_meta["num_accepted_draft_tokens"], _sum_accepted(histogram))
        return _leave_out_cut(_add_draftless_steps(histogram, output_tokens), 1, output_tokens)
    if "predicted_n" in engine_meta:  # llama.cpp
        return _count_llama_cpp(engine_meta, output_tokens)
    # The second is the older name.
    histogram = engine_meta.get("spec_correct_drafts_histogram") or engine_meta.get("spec_accept_histogram")
    prefills = 1 + engine_meta.get("num_retractions", 0)  # after a retraction another prefill yields a token again
    if not histogram:
        return AcceptanceCounts(0, 0, True, []) if output_tokens == prefills else None  # no cycle was needed
    _check_sums("spec_verify_ct", engine_meta.get("spec_verify_ct", sum(histogram)), sum(histogram))
    return _leave_out_cut(histogram, prefills, output_tokens)


def _count_llama_cpp(timings: dict[str, Any], output_tokens: int) -> AcceptanceCounts:
    """Return the counts of a request of llama.cpp, which has no histogram; its first token comes from the prefill.

    Its counts end with the answer: it drafts at most as many tokens as fit before the last (docs/serving.md).
    """
    accepted = timings.get("draft_n_accepted", 0)
    cycles = timings["predicted_n"] - 1 - accepted
    if timings["predicted_n"] != output_tokens or not 0 <= accepted <= timings.get("draft_n", 0) or cycles < 0:
        raise ValueError(
            f"the engine's figures don't add up: predicted_n {timings['predicted_n']} for {output_tokens} tokens, "
            f"draft_n_accepted {accepted} of draft_n {timings.get('draft_n', 0)}"
        )
    return AcceptanceCounts(cycles, accepted, True, [])


def settle_llama_cpp(
    counts: AcceptanceCounts | None, engine_meta: dict[str, Any], num_steps: int | None
) -> AcceptanceCounts | None:
    """Return a request's counts, those of llama.cpp by what its figures alone do not tell; others unchanged.

    Without a draft (`num_steps` None) they look like those of a request in which nothing was drafted. And where the end token is
    the last draft of a cycle, that is accepted and no bonus follows: a cycle more than the tokens tell. A cycle drafts at most
    `num_steps`, so the number of drafts tells it, but for answers that end within the last `num_steps` tokens before the limit.
    """
    if counts is None or "predicted_n" not in engine_meta:
        return counts
    if num_steps is None:
        return None
    return counts._replace(cycles=max(counts.cycles, -(-engine_meta.get("draft_n", 0) // num_steps)))


def _sum_accepted(histogram: list[int]) -> int:
    return sum(i * times for i, times in enumerate(histogram))


def _check_sums(name: str, reported: int, expected: int) -> None:
    if reported != expected:
        raise ValueError(f"the engine's figures don't add up: {name} is {reported}, its histogram says {expected}")


def _add_draftless_steps(histogram: list[int], output_tokens: int) -> list[int]:
    """Return the histogram with vLLM's steps that had no draft to verify, of one token each: it doesn't count them."""
    missing = output_tokens - (1 + _sum_accepted(histogram) + sum(histogram))
    if missing <= 0:
        return histogram
    first, *others = histogram or [0]
    return [first + missing, *others]


def _leave_out_cut(histogram: list[int], prefills: int, output_tokens: int) -> AcceptanceCounts:
    """Return the counts without what lies beyond the end of the answer.

    Raises:
        ValueError: if the histogram doesn't add up to the tokens of the answer.
    """
    cycles, accepted = sum(histogram), _sum_accepted(histogram)
    cut = prefills + accepted + cycles - output_tokens
    longest = max((i for i, times in enumerate(histogram) if times), default=0)
    if not 0 <= cut <= longest:
        raise ValueError(
            f"the engine's figures don't add up: {prefills} prefills, {cycles} cycles and {accepted} accepted drafts are not "
            f"{output_tokens} tokens with 0 to {longest} cut off; expected prefills + accepted + cycles - cut"
        )
    return AcceptanceCounts(cycles, accepted - max(0, cut - 1), True, histogram)


def parse_vllm_counters(text: str) -> VllmCounters | None:
    """Return the counters in vLLM's /metrics, summed over engines; None without speculation."""
    totals: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for match in filter(None, map(COUNTER_PATTERN.match, text.splitlines())):
        name, labels, value = match.groups()
        totals[name] += int(float(value))
        if name == "accepted_tokens_per_pos":
            positions[int(re.search(r'position="(\d+)"', labels or "")[1])] += int(float(value))  # type: ignore[index]
    if not totals:
        return None
    return VllmCounters(totals["drafts"], totals["accepted_tokens"], [positions[i] for i in sorted(positions)])


def subtract_counters(before: VllmCounters, after: VllmCounters) -> AcceptanceCounts:
    """Return the counts of the requests between two readings. Raises ValueError if the counters include other requests."""
    cycles, accepted = after.drafts - before.drafts, after.accepted - before.accepted
    earlier = before.per_position or [0] * len(after.per_position)
    reached = [cycles, *(a - b for a, b in zip(after.per_position, earlier, strict=True)), 0]
    histogram = [a - b for a, b in itertools.pairwise(reached)]
    if min(histogram) < 0 or sum(reached[1:]) != accepted:
        raise ValueError(
            f"vLLM's counters don't add up: {cycles} drafts, {accepted} accepted tokens, of which {reached[1:-1]} by "
            "position; expected falling positions that sum to them. Was the server restarted meanwhile?"
        )
    return AcceptanceCounts(cycles, accepted, False, histogram)


def covers_answer(before: VllmCounters, after: VllmCounters, output_tokens: int) -> bool:
    """Return whether the cycles between two readings make up an answer, so that its last cycle is among them."""
    return 1 + (after.accepted - before.accepted) + (after.drafts - before.drafts) >= output_tokens


def count_vllm_request(before: VllmCounters, after: VllmCounters, output_tokens: int) -> AcceptanceCounts:
    """Return the counts of the only request between two readings. Raises ValueError if they don't add up to its answer."""
    return _leave_out_cut(
        _add_draftless_steps(subtract_counters(before, after).histogram, output_tokens), 1, output_tokens
    )


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
        return parse_vllm_counters(reply.body.decode()) if reply.status == 200 else None

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
        if after is None or not covers_answer(before, after, output_tokens):
            after = await self.read_settled()
        if after is None:
            raise ValueError("vLLM's /metrics could be read before the request and not after it")
        return after, count_vllm_request(before, after, output_tokens)
