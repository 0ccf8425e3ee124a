"""A stream read whole, in pieces, and broken."""

import json
from typing import Any

import pytest

from stages.cells import request_record
from stages.cells.request_record import RequestRecord
from stages.engines import http_session, registry, vllm
from stages.engines import llama_cpp as llama_cpp_module
from stages.engines.sglang import read_generate
from stages.engines.sse import AnswerStream

LLAMA_CPP = registry.get("llama.cpp")
READERS = {
    "/generate": read_generate,
    "/completion": llama_cpp_module.read_completion,
    "/v1/completions": vllm.read_completion,
}
WHOLE = 10**9  # bytes of a read that has all of a stream


def sse(*messages: Any) -> bytes:
    return b"".join(
        b"data: " + (m if isinstance(m, bytes) else json.dumps(m, ensure_ascii=False).encode()) + b"\n\n"
        for m in messages
    )


def chunk(text: str, total: int, finish: str | None = None, **choice: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": total}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}], "usage": usage}


def native(text: str, ids: list[int], total: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    meta_info = {"prompt_tokens": 5, "completion_tokens": total, "finish_reason": finish, **meta}
    return {"text": text, "output_ids": ids, "meta_info": meta_info}


def read(data: bytes, path: str = "/v1/completions", size: int = WHOLE) -> RequestRecord:
    stream = AnswerStream(RequestRecord("a"), READERS[path])
    for index, start in enumerate(range(0, len(data), size)):
        stream.feed(data[start : start + size], float(index))
    stream.end(99.0)
    return stream.record


def llama_cpp(text: str, ids: list[int], total: int, **end: Any) -> dict[str, Any]:
    return {"content": text, "tokens": ids, "tokens_predicted": total, "tokens_evaluated": 3, "stop": bool(end), **end}


FIGURES = {"speculative_decoding": {"num_spec_steps": 2}}
COMPLETION = sse(chunk("", 0), chunk("né", 1, token_ids=[7]), chunk("two three", 3, token_ids=[8, 9]), chunk("", 4),
                 chunk("", 5, "stop", token_ids=[2]), {"choices": [], "usage": chunk("", 5)["usage"], "metrics": FIGURES},
                 b"[DONE]")  # fmt: skip
END = {"type": "stop", "matched": 2}
NATIVE = sse(
    native("né", [7], 1), native("né two", [7, 8, 9], 3), native("né two.", [7, 8, 9, 2], 4, END, spec_verify_ct=2)
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, WHOLE])
def test_chunks_of_tokens_are_counted_however_the_bytes_come(size: int) -> None:
    """Also what has no text: a token that is half a letter, or the end token."""
    stream = read(COMPLETION, size=size)
    assert [tokens for _, tokens in stream.events] == ([5] if size == WHOLE else [1, 2, 1, 1])
    assert (stream.text, stream.output_tokens, stream.input_tokens) == ("nétwo three", 5, 5)
    assert (stream.finish_reason, stream.ids, stream.engine_meta) == ("stop", [7, 8, 9, 2], {"num_spec_steps": 2})
    times = [when for when, _ in stream.events]
    assert times == sorted(times)
    stream = read(NATIVE, "/generate", size)
    assert [tokens for _, tokens in stream.events] == ([4] if size == WHOLE else [1, 2, 1])
    assert (stream.text, stream.ids, stream.finish_reason) == ("né two.", [7, 8, 9, 2], "stop")
    assert stream.engine_meta["spec_verify_ct"] == 2


def test_llama_cpps_answer_has_its_counts_and_no_ids_where_some_were_not_sent() -> None:
    """A token whose text ends within a character comes without an id; a request without a draft has no draft_n."""
    timings = {"predicted_n": 5, "draft_n": 4, "draft_n_accepted": 2}
    end = llama_cpp("", [], 5, stop_type="eos", timings=timings)
    whole = read(sse(*(llama_cpp("é", [7], n) for n in range(1, 6)), end), "/completion")
    assert (whole.text, whole.ids, whole.finish_reason, whole.input_tokens) == ("ééééé", [7] * 5, "stop", 3)
    cut = read(sse(llama_cpp("a", [7], 1), llama_cpp("é", [9], 5), end), "/completion")
    assert (cut.text, cut.ids, cut.output_tokens) == ("aé", [], 5)
    assert LLAMA_CPP.count_request(cut.engine_meta, 5, 2) == (2, 2, [])
    assert LLAMA_CPP.count_request({"predicted_n": 5}, 5, 3) == (4, 0, [])
    assert LLAMA_CPP.count_request({"predicted_n": 5}, 5, None) is None


def test_llama_cpps_last_cycle_is_counted_where_its_last_draft_is_the_end_token() -> None:
    """As SmolLM2's answer of 63 tokens, of at most 64, in 28 cycles of three drafts, the last cut to one: it says 27."""
    timings = {"predicted_n": 63, "draft_n": 82, "draft_n_accepted": 35}
    assert LLAMA_CPP.count_request(timings, 63, 3) == (28, 35, [])
    assert LLAMA_CPP.count_request({**timings, "draft_n": 81}, 63, 3) == (27, 35, [])


@pytest.mark.parametrize(
    ("data", "path", "reason"),
    [
        (sse(chunk("a", 1)), "/v1/completions", "cut"),
        (sse(native("a", [7], 1)), "/generate", "cut"),
        (b"", "/v1/completions", "cut"),
        (sse(chunk("a", 1), {"error": {"message": "out of memory", "code": 500}}), "/v1/completions", "error"),
        (sse({"error": "out of memory"}), "/v1/completions", "error"),
        (sse(native("a", [7], 1, {"type": "abort", "message": "by its operator"})), "/generate", "aborted"),
        (sse(chunk("a", 1, "abort")), "/v1/completions", "aborted"),
        (sse(chunk("", 0, "stop")), "/v1/completions", "empty"),
        (sse(b'{"choices": ['), "/v1/completions", "malformed"),
        (sse({"text": "a"}), "/generate", "malformed"),
        (sse([1]), "/v1/completions", "malformed"),
        (sse(chunk("a", 3), chunk("b", 2)), "/v1/completions", "malformed"),
        (sse(llama_cpp("a", [7], 1)), "/completion", "cut"),
    ],
)
def test_an_incomplete_answer_fails_with_a_reason(data: bytes, path: str, reason: str) -> None:
    with pytest.raises(http_session.ExchangeFailedError) as failed:
        read(data, path)
    assert failed.value.reason == reason


def test_a_refusal_inside_the_stream_is_raised_as_one() -> None:
    """SGLang looks at the request when the response has begun: 200, and then that it is too long."""
    with pytest.raises(http_session.RequestRefusedError, match="HTTP 400 too long"):
        read(sse({"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}), "/generate")


def feed(*messages: tuple[float, dict[str, Any]], path: str) -> RequestRecord:
    """Read messages as they come, each at its time."""
    stream = AnswerStream(RequestRecord("a"), READERS[path])
    for when, message in messages:
        stream.feed(sse(message), when)
    stream.record.ended = messages[-1][0]
    stream.end(stream.record.ended)
    return stream.record


@pytest.mark.parametrize("apart_s", [0.0, 0.0001])
def test_the_tokens_of_a_llama_cpp_cycle_are_one_event(apart_s: float) -> None:
    """Bug: llama-server writes each token of a cycle as a message, and each was an event: ITL had a p50 of 0.0 ms."""
    tokens = [(cycle * 0.06 + k * apart_s, 1 + 3 * (cycle - 1) + k + 1) for cycle in range(1, 21) for k in range(3)]
    end = llama_cpp("", [], 61, stop_type="limit", timings={"predicted_n": 61})
    messages = [(0.0, llama_cpp("x", [1], 1)), *((when, llama_cpp("x", [1], n)) for when, n in tokens), (1.3, end)]
    record = feed(*messages, path="/completion")
    assert [tokens for _, tokens in record.events] == [1, *[3] * 20]
    load = request_record.summarise_load([record])
    assert load.itl_s and load.itl_s.p50 == pytest.approx(0.02, rel=0.01) == load.itl_s.p90
    assert load.chunk_gap_s and load.chunk_gap_s.p50 == pytest.approx(0.06, rel=0.01)
