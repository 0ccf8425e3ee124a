"""Request records of a load that an engine in this process answers, in the form of a server's (latency.RequestRecord)."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from stages.serving.latency import RequestRecord
from stages.serving.spec_counters import AcceptanceCounts


class EngineStep(Protocol):
    """A step of an answer: prefill's token, then one verify cycle or plain step after another."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def num_accepted(self) -> int: ...


class TreeDepth(Protocol):
    """The shape of a draft tree (params/tree_shape.py), which the engine knows; here only its depth counts."""

    @property
    def num_steps(self) -> int: ...


class LoadEngine(Protocol):
    """An engine that decodes many requests at once (engine/decode.py)."""

    end_tokens: Any

    @property
    def uses_cuda_graphs(self) -> bool: ...

    def warm_up(self, requests: Any, slots: int, tree: Any, /) -> None: ...

    def decode_batch(self, requests: Any, slots: int, tree: Any, /) -> Iterator[Any]: ...


def decode_load(
    engine: LoadEngine,
    requests: Mapping[str, Any],
    slots: int,
    tree: TreeDepth | None,
    start_clock: Callable[[], float],
) -> list[RequestRecord]:
    """Decode all requests in so many slots and return their records, in order.

    Args:
        requests: by id, with `prompt` and `max_new_tokens` (engine/decode_state.py, DecodeRequest).
        tree: None decodes plainly.
        start_clock: called once the engine is ready; returns the time at which the load starts.
    """
    batch = list(requests.values())
    if batch:
        engine.warm_up(batch, slots, tree)
        if engine.uses_cuda_graphs:  # prefill all prompts once, uncounted, as timing.time_decode does
            list(engine.decode_batch([request._replace(max_new_tokens=1) for request in batch], slots, tree))
    started = start_clock()
    records = [RequestRecord(name, input_tokens=len(request.prompt)) for name, request in requests.items()]
    passes = engine.decode_batch(batch, slots, tree) if batch else ()
    accepted = _record_steps(records, passes, started)
    for record, counts in zip(records, accepted, strict=True):
        record.ended, record.output_tokens = record.events[-1][0], len(record.ids)
        record.finish_reason = "stop" if record.ids[-1] in engine.end_tokens else "length"
        if tree is not None:
            histogram = [counts[1:].count(length) for length in range(tree.num_steps + 1)]  # the first step is prefill
            record.counts = AcceptanceCounts(len(counts) - 1, sum(counts), True, histogram)
    return records


def _record_steps(
    records: list[RequestRecord], passes: Iterable[Iterable[tuple[int, EngineStep | None]]], started: float
) -> list[list[int]]:
    """Fill the records from the engine's passes; return the accepted draft tokens of each request's steps.

    A pass holds (request index, step); a step of None means that the request has taken a slot.
    """
    accepted: list[list[int]] = [[] for _ in records]
    for steps in passes:
        now = time.perf_counter() - started
        for index, step in steps:
            record = records[index]
            if step is None:
                record.sent = now
            else:
                record.events.append((now, len(step.tokens)))
                record.ids += step.tokens
                accepted[index].append(step.num_accepted)
    return accepted
