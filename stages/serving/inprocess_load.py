"""Request records of a load that an engine in this process answers, in the form of a server's (latency.RequestRecord)."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    accepted: list[list[int]] = [[] for _ in records]
    # A pass holds (request index, step); a step of None means that the request has taken a slot.
    for steps in engine.decode_batch(batch, slots, tree) if batch else ():
        now = time.perf_counter() - started
        for index, step in steps:
            if step is None:
                records[index].sent = now
            else:
                add_step(records[index], step, now)
                accepted[index].append(step.num_accepted)
    for record, counts in zip(records, accepted, strict=True):
        record.ended = record.events[-1][0]
        finish(record, engine, counts, tree)
    return records


def add_step(record: RequestRecord, step: EngineStep, end_s: float) -> None:
    record.events.append((end_s, len(step.tokens)))
    record.ids += step.tokens


def finish(record: RequestRecord, engine: LoadEngine, accepted: Sequence[int], tree: TreeDepth | None) -> None:
    """Fill in what follows from the steps of an answer. `accepted`: draft tokens of each, of which the first is prefill."""
    record.output_tokens = len(record.ids)
    record.finish_reason = "stop" if record.ids[-1] in engine.end_tokens else "length"
    if tree is not None:
        histogram = [list(accepted[1:]).count(length) for length in range(tree.num_steps + 1)]
        record.counts = AcceptanceCounts(len(accepted) - 1, sum(accepted), True, histogram)
