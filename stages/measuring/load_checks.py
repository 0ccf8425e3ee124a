"""Checks of measured loads: errors for loads that measured something else than was asked, warnings for the rest."""

from typing import Any

from stages.cells.cell import SKIPPED, NotMeasuredError
from stages.cells.points import MIN_JUDGED_CYCLES
from stages.engines.cell_engine import LoadResult
from stages.engines.protocol import ServedDraft
from stages.measuring.repeats import sum_counts


def check_drafts_accepted(
    server_name: str, draft: ServedDraft | None, load: LoadResult, server_info: dict[str, Any]
) -> None:
    """Raise NotMeasuredError for a draft of which no token is accepted, ValueError where the settings are why."""
    if draft is None:
        return
    cycles, accepted = sum_counts([load])
    if cycles >= MIN_JUDGED_CYCLES and accepted == 0 and draft.family.segment:
        found = f"{server_name}: no draft was accepted in {cycles} cycles, so tau is 1.00"
        if draft.algorithm == "EAGLE":
            raise ValueError(
                f"{found}: benchmark_served.servers.*.algorithm is EAGLE, which leaves out the fusion; set EAGLE3"
            )
        raise NotMeasuredError(
            SKIPPED,
            f"{found}; where results/replay has more, the draft is another target's, or the engine passes over its "
            "tensors or the target's head",
        )
    if not cycles and not load.counting_errors and sum(r.output_tokens for r in load.records) > 2 * len(load.records):
        raise ValueError(
            f"{server_name}: the engine reports no accepted drafts (speculative_algorithm: "
            f"{server_info.get('speculative_algorithm', 'unknown')}); start it with this cell's flags, vLLM with "
            "--per-request-spec-decode-metrics summary"
        )


def list_warnings(
    loads: list[LoadResult],
    prompt_lengths: list[int],
    concurrency: int | None,
    tokens_beyond_prompt: int,
    cache_tokens: int | None,
    warmup: int,
) -> list[str]:
    """Return the warnings of a point as sentences.

    Args:
        prompt_lengths: tokens of every prompt.
        tokens_beyond_prompt: tokens that a request may take in the KV cache beside its prompt: its answer, and a tree.
        cache_tokens: how many the KV cache holds; None if unknown.
        warmup: unmeasured requests before the first load of each concurrency.
    """
    warnings = []
    failed = [r for load in loads for r in load.records if r.failure_reason]
    if failed:
        warnings.append(
            f"{len(failed)} requests failed and are in no latency, the first: {failed[0].failure_reason}, "
            f"{failed[0].failure_message}"
        )
    if errors := [error for load in loads for error in load.counting_errors]:
        warnings.append(
            f"{len(errors)} requests' accepted drafts can't be counted and are in no tau, the first: {errors[0]}"
        )
    if uncounted := sum(not r.failure_reason and not r.is_counted for load in loads for r in load.records):
        warnings.append(
            f"{uncounted} answers came with neither usage nor token ids: their tokens are not counted, so there is no ITL, TPOT, "
            "throughput or speedup; ask a server that sends usage in its stream"
        )
    longest = sorted(prompt_lengths, reverse=True)[: concurrency or len(prompt_lengths)]
    required = sum(longest) + len(longest) * tokens_beyond_prompt
    if cache_tokens is not None and required > cache_tokens:
        warnings.append(
            f"the KV cache holds {cache_tokens} tokens, {required} would be needed for {len(longest)} of the longest at once: "
            "some may have waited in the engine, or been put back"
        )
    if concurrency is not None and warmup < len(longest):
        warnings.append(
            f"{warmup} requests warmed the server up, fewer than the {len(longest)} at once: engines compile kernels for a "
            f"batch of new size, so the first repeat may be slower; expected warmup: {len(longest)} or more"
        )
    return warnings
