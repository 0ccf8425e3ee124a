"""Replay of drafts without weights, whose guesses prompt and answers decide alone: no hidden states and no forward.

A guess is accepted while it is the answer's next token, so the cycles are those of the torch engine whose target answers so. As
there, the first token comes from prefill, a lookup reads each cycle's tokens before the next one, and those of the last never.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from stages.hidden_states.format import RowHeader
from stages.replay.replay import ContextCounts, WalkCounts, walk_cycles


@runtime_checkable
class Lookup(Protocol):
    """A draft without weights, as the torch engine has it: it guesses the tokens of one answer after the other."""

    context: list[int]  # prompt and answer so far

    def begin_answer(self, prompt: list[int]) -> None: ...

    def guess(self, new_tokens: list[int]) -> list[int]: ...


def replay_lookups(
    lookups: Iterable[Lookup], answers: Sequence[RowHeader], num_steps: int
) -> tuple[WalkCounts, ContextCounts]:
    """Count the cycles of each lookup, of at most `num_steps` guesses, on the answers in this order."""
    prompt_lengths = torch.tensor([row.prompt_length for row in answers])
    counts = (torch.tensor([len(row.ids) for row in answers]) - prompt_lengths - 1).clamp(min=0)
    offsets, tables = (counts.cumsum(0) - counts).tolist(), []
    for lookup in lookups:
        table = torch.zeros(2, int(counts.sum()) + 1, dtype=torch.int64)  # accepted and guessed drafts
        for row, offset in zip(answers, offsets, strict=True):
            ids, read, known = row.ids.tolist(), row.prompt_length, row.prompt_length + 1
            lookup.begin_answer(ids[:read])
            while known < len(ids):
                lookup.context += ids[read:known]
                guesses = lookup.guess(ids[read:known])
                matches = [guess == token for guess, token in zip(guesses, ids[known:], strict=False)]
                accepted = [*matches, False].index(False)
                table[:, offset + known - 1 - row.prompt_length] = torch.tensor([accepted, len(guesses)])
                read, known = known, known + accepted + 1
        tables.append(table)
    accepted, guessed = torch.stack(tables, 1)
    return walk_cycles(accepted, guessed, counts, num_steps, prompt_lengths)
