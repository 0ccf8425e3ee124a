"""One split of answers being sampled: its requests, its shards, and the temperature and seed of each request.

Temperatures and seeds follow from `sample_target.seed` and the request's id alone, so they depend neither on order nor on
concurrency, shards or servers.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stages.data import requests
from stages.data.parquet_shards import ParquetShardWriter
from stages.data.requests import SourceRequests, TargetRequest


@dataclass
class SampledSplit:
    """Requests of one kind, and the shards that take their answers."""

    name: str
    source: Path
    max_requests: int | None  # as asked for; None: all
    selection: requests.RequestSelection
    mixture: list[tuple[float, float]]  # (temperature, weight)
    shards: ParquetShardWriter
    refusals: list[str] = field(
        default_factory=list
    )  # of rows that the chat template does not render, found by this run

    @property
    def num_missing(self) -> int:
        """Return by how many the data has fewer requests than were asked for."""
        return max(0, (self.max_requests or 0) - self.selection.num_requests)

    def describe(self, origin: str, max_new_tokens: int) -> str:
        """Return the line on a split that is done."""
        counted, selection = self.shards.counts, self.selection
        told = f"{self.name}: {counted['rows']} answers {origin}, {counted['tokens']} tokens, "
        told += f"{counted['truncated']} cut at {max_new_tokens} tokens"
        if selection.num_unrequested:
            return f"{told}, {selection.num_unrequested} questions not asked"
        asked = f", to all {selection.num_requests} questions of the data, {self.max_requests} were wanted"
        return told + (asked if self.num_missing else "")

    def read_conversations(self) -> Iterator[list[TargetRequest]]:
        return requests.read_requests(self.source, self.selection)

    def read_unfinished_groups(self, by_conversation: bool) -> Iterator[list[TargetRequest]]:
        """Yield requests to be sampled in sequence: whole conversations, where later turns quote earlier answers."""
        for conversation in self.read_conversations():
            groups = [conversation] if by_conversation else [[request] for request in conversation]
            yield from (group for group in groups if not all(self.shards.is_published(q.position) for q in group))

    def drop_request(self, request: TargetRequest, reason: str) -> None:
        self.shards.set_row(request.position, None, {f"dropped/{reason}": 1})

    def refuse_request(self, request: TargetRequest, why: str) -> None:
        """Drop a request whose messages the chat template does not render."""
        self.refusals.append(f"row {request.id} (line {request.source_row} of the raw data): {why}")
        self.drop_request(request, "refused_by_template")

    def describe_refusals(self) -> str:
        """Return how many rows this run found that the chat template refuses, and why it refuses the first; empty without any."""
        if not self.refusals:
            return ""
        return f"{self.name}: {len(self.refusals)} rows dropped as refused_by_template, the first: {self.refusals[0]}"

    def draw_temperature(self, seed: int, request_id: str) -> float:
        """Return the temperature of one request, drawn from the mixture."""
        cumulative = list(itertools.accumulate(weight for _, weight in self.mixture))
        at = _hash_to_number(f"{seed}:temperature:{request_id}") / 2**32 * cumulative[-1]
        return next(temperature for (temperature, _), stop in zip(self.mixture, cumulative, strict=True) if at < stop)


@dataclass(frozen=True)
class SampleCounts:
    """The counts of results/sample_report.json. By split are those of each; the others are of all splits together."""

    rows_in: int
    rows_out: int
    dropped: dict[str, int]  # by reason
    not_asked: dict[str, int]  # by split
    missing: dict[str, int]  # by split: how many fewer requests the data has than were asked for
    sources: dict[str, dict[str, SourceRequests]]  # by split and file
    truncated: dict[str, int]  # by split
    tokens: dict[str, int]  # by split
    shards: dict[str, int]  # by split
    token_ids: dict[str, int]  # by origin
    temperatures: dict[str, int]  # by temperature


def describe_truncation(splits: list[SampledSplit]) -> str | None:
    """Return a warning, one for all splits, where most answers of one are cut at the limit; else None."""
    counts = {split.name: (split.shards.counts["truncated"], split.selection.num_requests) for split in splits}
    if not any(2 * cut > total for cut, total in counts.values()):
        return None
    shown = ", ".join(f"{name} {cut} of {total}" for name, (cut, total) in counts.items() if total)
    cut, total = map(sum, zip(*counts.values(), strict=True))
    return (
        f"{cut} of {total} answers are cut ({shown}), and drafts and tau know nothing of how answers go on; raise "
        "sample_target.max_new_tokens, or see whether the target ends its answers"
    )


def count_rows(splits: list[SampledSplit]) -> SampleCounts:
    """Count all rows, those of shards that earlier, killed runs published too."""
    total: Counter[str] = sum((split.shards.counts for split in splits), Counter())

    def select(kind: str) -> dict[str, int]:
        return {key.split("/")[1]: n for key, n in sorted(total.items()) if key.startswith(f"{kind}/")}

    return SampleCounts(
        rows_in=sum(split.selection.num_requests for split in splits),
        rows_out=total["rows"],
        dropped=select("dropped"),
        not_asked={split.name: split.selection.num_unrequested for split in splits},
        missing={split.name: split.num_missing for split in splits},
        sources={split.name: dict(split.selection.sources) for split in splits},
        truncated={split.name: split.shards.counts["truncated"] for split in splits},
        tokens={split.name: split.shards.counts["tokens"] for split in splits},
        shards={split.name: split.shards.num_shards for split in splits},
        token_ids=select("token_ids"),
        temperatures=select("temperature"),
    )


def make_seed(seed: int, request_id: str) -> int:
    return _hash_to_number(f"{seed}:{request_id}") >> 1


def _hash_to_number(text: str) -> int:
    """Return one of 2**32 numbers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
