"""Acceptance counts by the project's definitions, from what engines report (docs/metrics.md: cycle, accepted).

Engines count what a cycle accepted before they look for the end of the answer, so their figures include drafts beyond an end
token or the length limit; ours don't. SGLang reports each request, so the tokens beyond the end can be computed:

    output tokens = prefills + accepted + cycles - cut,   and of what was cut the last was the bonus

(SGLang 0.5.17, scheduler_components/batch_result_processor.py counts, schedule_batch.py: output_ids_through_stop cuts).
vLLM counts alike (0.33, v1/core/sched/scheduler.py:2350).
"""

from typing import Any

from stages.cells.request_record import AcceptanceCounts


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
