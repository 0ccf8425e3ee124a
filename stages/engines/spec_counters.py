"""Acceptance counts by the project's definitions, from what engines report (docs/metrics.md: cycle, accepted).

Engines count what a cycle accepted before they look for the end of the answer, so their figures include drafts beyond an end
token or the length limit; ours don't. SGLang reports each request, so the tokens beyond the end can be computed:

    output tokens = prefills + accepted + cycles - cut,   and of what was cut the last was the bonus

(SGLang 0.5.17, scheduler_components/batch_result_processor.py counts, schedule_batch.py: output_ids_through_stop cuts).
vLLM counts alike (0.33, v1/core/sched/scheduler.py:2350).
"""

from stages.cells.request_record import AcceptanceCounts


def sum_accepted(histogram: list[int]) -> int:
    return sum(i * times for i, times in enumerate(histogram))


def check_sums(name: str, reported: int, expected: int) -> None:
    if reported != expected:
        raise ValueError(f"the engine's figures don't add up: {name} is {reported}, its histogram says {expected}")


def leave_out_cut(histogram: list[int], prefills: int, output_tokens: int) -> AcceptanceCounts:
    """Return the counts without what lies beyond the end of the answer.

    Raises:
        ValueError: if the histogram doesn't add up to the tokens of the answer.
    """
    cycles, accepted = sum(histogram), sum_accepted(histogram)
    cut = prefills + accepted + cycles - output_tokens
    longest = max((i for i, times in enumerate(histogram) if times), default=0)
    if not 0 <= cut <= longest:
        raise ValueError(
            f"the engine's figures don't add up: {prefills} prefills, {cycles} cycles and {accepted} accepted drafts are not "
            f"{output_tokens} tokens with 0 to {longest} cut off; expected prefills + accepted + cycles - cut"
        )
    return AcceptanceCounts(cycles, accepted - max(0, cut - 1), True, histogram)
