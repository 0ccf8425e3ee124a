"""The loads of servers that simulate acceptance: answers of which lengths, so that cycles cost what they cost in a real load.

An engine that simulates acceptance writes tokens without meaning, which never end an answer, so a request says how many.

Prompts of other requests are read between cycles, and what that costs can be told from a cycle only if

- answers end at different times. Where real ones end by themselves, simulated ones have the lengths of the stored answers. Where
  all have one length, real ones are out of step because their drafts are accepted differently; SGLang accepts as many drafts
  for all requests of a batch, so their lengths are drawn instead, from half of the length to the whole.
- two lengths are measured: an answer a quarter as long has a quarter of the cycles, and is interrupted as often.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

from stages.measuring.server_setup import ServedWorkload
from stages.params.benchmark_sections import Workload
from stages.prompts import workload_prompts
from stages.prompts.workload_prompts import WorkloadPrompt

SHORT_SHARE, SHORTEST_TOKENS = 0.25, 4
SHORTEST_DRAWN_SHARE = 0.5


def simulate_answers(work: ServedWorkload) -> ServedWorkload:
    """Return the workload for servers that simulate acceptance: their loads, and the tokens of each answer."""
    workload, rows = work.context.workload, workload_prompts.list_rows(work.context.prompts)
    lengths = list(dict.fromkeys(length for length, _ in workload.list_loads()))
    tokens_by_length = {length: _choose_tokens(rows, length, workload.ignore_eos, workload.seed) for length in lengths}
    if short := _find_short_length(workload, lengths):
        tokens_by_length[short] = [
            max(1, round(num_tokens * short / lengths[0])) for num_tokens in tokens_by_length[lengths[0]]
        ]
    simulated = workload.model_copy(update={"max_new_tokens": list(tokens_by_length)})
    return replace(
        work,
        context=replace(work.context, workload=simulated),
        simulated_answers={
            (row.id, length): num_tokens
            for length, row_tokens in tokens_by_length.items()
            for row, num_tokens in zip(rows, row_tokens, strict=True)
        },
    )


def _find_short_length(workload: Workload, lengths: list[int]) -> int | None:
    """Return the length that is measured beside the workload's only one; None without need."""
    short = max(SHORTEST_TOKENS, round(SHORT_SHARE * lengths[0]))
    interrupted = any((cap or 1) > 1 for _, cap in workload.list_loads())
    return short if len(lengths) == 1 and interrupted and short < lengths[0] else None


def _choose_tokens(rows: Iterable[WorkloadPrompt], length: int, ignore_eos: bool, seed: int) -> list[int]:
    """Return the tokens of each answer under a limit of `length`."""
    answer_tokens = []
    for row in rows:
        limit = workload_prompts.compute_max_new_tokens(row.length_share, length)
        answer_tokens.append(limit if ignore_eos or row.answer_tokens is None else min(limit, row.answer_tokens))
    if len(set(answer_tokens)) > 1:
        return answer_tokens
    draw = random.Random(seed)
    return [max(1, round(tokens * draw.uniform(SHORTEST_DRAWN_SHARE, 1))) for tokens in answer_tokens]
