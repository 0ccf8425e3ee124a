"""Parser of one answer streamed as server-sent events: when tokens came, how many, and how the answer ended.

An engine's module reads its messages. Servers are asked to send the number of tokens so far with every chunk, since under
speculation a chunk holds several.
"""

from collections.abc import Callable
from typing import Any

import orjson

from stages.cells.request_record import RequestRecord
from stages.engines import http_session

ReadMessage = Callable[["AnswerStream", dict[str, Any], float], None]  # reads a message that came at a time
TOGETHER_S = 0.001  # llama.cpp writes each token of a cycle as a message of its own: those within it are one event


class AnswerStream:
    """Parser of the answer to one request, into its record. Call `feed` with each piece of data, then `end`."""

    def __init__(self, record: RequestRecord, read: ReadMessage) -> None:
        self.record, self._read_message = record, read
        self._rest, self._event_began = b"", 0.0

    def feed(self, data: bytes, now: float) -> None:
        """Parse what came. Raises ExchangeFailedError or RequestRefusedError if the stream holds an error."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._read_line(line, now)

    def end(self, now: float) -> None:
        """Raises ExchangeFailedError if the answer is incomplete."""
        self._read_line(self._rest, now)
        r = self.record
        if r.finish_reason is None:
            message = f"the stream ended without a finish_reason, after {r.output_tokens} tokens"
            raise http_session.ExchangeFailedError("cut", message)
        if r.finish_reason in ("abort", "error"):
            raise http_session.ExchangeFailedError("aborted", f"finish_reason {r.finish_reason!r}")
        if not r.events:
            raise http_session.ExchangeFailedError("empty", "an answer without a token")

    def _read_line(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):  # between messages, or a comment that keeps the connection alive
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            message = orjson.loads(data)
            if message.get("error"):
                self._raise_error(message["error"])
            self._read_message(self, message, now)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise http_session.ExchangeFailedError(
                "malformed", f"not a chunk of an answer ({error!r}): {data[:200]!r}"
            ) from None

    def _raise_error(self, error: Any) -> None:
        code = error.get("code") if isinstance(error, dict) else None
        if code in http_session.ROW_REFUSED_STATUSES:  # found after the stream had started
            raise http_session.RequestRefusedError(code, str(error.get("message")))
        raise http_session.ExchangeFailedError("error", str(error.get("message") if isinstance(error, dict) else error))

    def record_tokens(self, total: int, now: float) -> None:
        new_tokens = total - self.record.output_tokens
        if new_tokens < 0:
            raise ValueError(f"{total} tokens so far, after {self.record.output_tokens}")
        if not new_tokens:
            return
        events, self.record.output_tokens = self.record.events, total
        if events and now - self._event_began < TOGETHER_S:
            last_s, tokens = events[-1]
            events[-1] = (now if len(events) > 1 else last_s, tokens + new_tokens)
        else:
            self._event_began = now
            events.append((now, new_tokens))
