"""One split of answers being sampled: its requests, its shards, and the temperature and seed of each request.

Temperatures and seeds follow from `sample_target.seed` and the request's id alone, so they depend neither on order nor on
concurrency, shards or servers.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from stages.sampling import requests
from stages.sampling.parquet_shards import ParquetShardWriter
from stages.sampling.requests import TargetRequest, UnusableRequestError

NO_TOKEN_IDS = (
    "the token ids of none of the first {count} answers are known. Let the servers serve this target with its own tokenizer, "
    "by an engine that returns token ids (vLLM, or SGLang from 0.5.17 on), or set sample_target.backend: transformers"
)
STOPPING_REASONS = {  # of the first rows, where all are dropped for it: of how many at least, and what is told of {count}
    "refused": (8, "the servers refused the first {count} rows; correct what they say"),
    "token_ids_unknown": (32, NO_TOKEN_IDS),
}
ADVICE_WITHOUT_ROWS = {  # by the reason of most rows
    "truncated": "raise sample_target.max_new_tokens, or the server's own limit if that is lower",
    "empty": "the target ends its answers at once; see its prompts by `python -m stages.sample_target --preview 3`",
    "token_ids_unknown": "let an engine answer that returns token ids (docs/sampling.md, Token ids)",
}


@dataclass
class SampledSplit:
    """Requests of one kind, and the shards that take their answers."""

    name: str
    source: Path
    max_requests: int | None  # as asked for; None: all
    selection: requests.RequestSelection
    mixture: list[tuple[float, float]]  # (temperature, weight)
    shards: ParquetShardWriter
    concurrency: int  # requests at once
    # By reason: the position of the first row that this run dropped, and the words on it.
    first_dropped: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        """Return by how many the data has fewer requests than were asked for."""
        return max(0, (self.max_requests or 0) - self.selection.num_requests)

    def describe(self, origin: str) -> str:
        """Return the line on a split that is done."""
        counted, selection = self.shards.counts, self.selection
        description = f"{self.name}: {counted['rows']} answers {origin}, {counted['tokens']} tokens, "
        description += f"{counted['truncated']} cut by length"
        if selection.num_unrequested:
            return f"{description}, {selection.num_unrequested} questions not asked"
        exhausted = f", to all {selection.num_requests} questions of the data, {self.max_requests} were wanted"
        return description + (exhausted if self.num_missing else "")

    def read_unfinished_groups(self, by_conversation: bool) -> Iterator[list[TargetRequest]]:
        """Yield requests to be sampled in sequence: whole conversations, where later turns quote earlier answers.

        Some of a group may be set; of its shard, which holds its conversation, something is missing.
        """
        for conversation in requests.read_requests(self.source, self.selection):
            if self.shards.shard_of(conversation[0].position) not in self.shards.published:
                yield from [conversation] if by_conversation else ([request] for request in conversation)

    def drop_request(self, request: TargetRequest, error: UnusableRequestError) -> None:
        """Set a request that gives no row. Raises ValueError where all rows so far were dropped for one of STOPPING_REASONS."""
        # Servers' answers come in any order: the first is that of the data.
        first = (request.position, f"row {request.row}{f': {error.details}' if error.details else ''}")
        first = self.first_dropped[error.reason] = min(self.first_dropped.get(error.reason, first), first)
        least, problem = STOPPING_REASONS.get(error.reason, (math.inf, ""))
        dropped = select_counts(self.shards.counts, "dropped")
        # Refusals come at once, answers later: so many may be refused before the first is there.
        count = dropped.pop(error.reason, 0) + 1
        if count >= max(least, self.concurrency) and not dropped and not self.shards.counts["rows"]:
            raise ValueError(f"sample_target: {problem.format(count=count)}. The first: {first[1]}")
        self.shards.set_row(request.position, None, {f"dropped/{error.reason}": 1}, is_final=False)

    def describe_dropped(self) -> list[str]:
        """Return a line for each reason: how many rows were dropped for it, and the first of this run."""
        return [
            f"{self.name}: {self.shards.counts[f'dropped/{reason}']} rows dropped as {reason}, the first: {first}"
            for reason, (_, first) in self.first_dropped.items()
        ]

    def check_rows(self) -> None:
        """Raise ValueError where no row is left."""
        if self.shards.counts["rows"]:
            return
        dropped = Counter(select_counts(self.shards.counts, "dropped")).most_common()
        hints: list[str | None] = [f"raise sample_target.{self.name}_rows"]
        if dropped:
            most = dropped[0][0]
            hints = [ADVICE_WITHOUT_ROWS.get(most), self.first_dropped.get(most, (0, None))[1]]
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped) or "none"
        counted = f"({self.selection.num_requests} sampled, dropped: {reasons})"
        found = f"no row is left in the {self.name} split, expected at least one {counted}"
        raise ValueError("; ".join(["sample_target: " + found, *filter(None, hints)]))

    def draw_temperature(self, seed: int, request_id: str) -> float:
        """Return the temperature of one request, drawn from the mixture."""
        cumulative = list(itertools.accumulate(weight for _, weight in self.mixture))
        threshold = _hash_to_number(f"{seed}:temperature:{request_id}") / 2**32 * cumulative[-1]
        stops = zip(self.mixture, cumulative, strict=True)
        return next(temperature for (temperature, _), stop in stops if threshold < stop)


def show_progress(splits: list[SampledSplit]) -> tqdm:
    """Return a bar of the rows of all splits, those of earlier runs done."""
    done = sum(split.shards.num_set for split in splits)
    rows = sum(split.selection.num_requests for split in splits)
    return tqdm(total=rows, initial=done, desc="sample", unit="row", mininterval=2)


def select_counts(counts: Counter[str], kind: str) -> dict[str, int]:
    """Return the counts `KIND/NAME` by name."""
    return {key.split("/")[1]: n for key, n in sorted(counts.items()) if key.startswith(f"{kind}/")}


def make_seed(seed: int, request_id: str) -> int:
    return _hash_to_number(f"{seed}:{request_id}") >> 1


def _hash_to_number(text: str) -> int:
    """Return one of 2**32 numbers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
