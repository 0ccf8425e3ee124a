"""Parser of one answer streamed as server-sent events: when tokens came, how many, and how the answer ended.

Two protocols: SGLang's own `/generate`, and OpenAI's `/v1/completions` and `/v1/chat/completions`. Servers are asked to send
the number of tokens so far with every chunk (`meta_info`, `continuous_usage_stats`), since under speculation a chunk holds
several. Without these counts each piece of text counts as one token.
"""

from typing import Any

import orjson

from stages.serving import http_session


class AnswerStream:
    """Call `feed` with each piece of data, then `end`."""

    def __init__(self, generate: bool) -> None:
        self.events: list[tuple[float, int]] = []
        self.has_token_counts = True
        self.text = ""
        self.ids: list[int] = []  # if the server sends them
        self.input_tokens = self.output_tokens = 0
        self.finish_reason: str | None = None
        self.engine_meta: dict[str, Any] = {}
        self._read_message = self._read_generate if generate else self._read_openai
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse what came. Raises ExchangeFailedError or RequestRefusedError if the stream holds an error."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            self._read_line(line, now)

    def end(self, now: float) -> None:
        """Raises ExchangeFailedError if the answer is incomplete."""
        self._read_line(self._rest, now)
        if self.finish_reason is None:
            raise http_session.ExchangeFailedError(
                "cut", f"the stream ended without a finish_reason, after {self.output_tokens} tokens"
            )
        if self.finish_reason in ("abort", "error"):
            raise http_session.ExchangeFailedError("aborted", f"finish_reason {self.finish_reason!r}")
        if not self.events:
            raise http_session.ExchangeFailedError("empty", "an answer without a token")
        self.has_token_counts = self.has_token_counts or len(self.events) == self.output_tokens

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
            self._read_message(message, now)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise http_session.ExchangeFailedError(
                "malformed", f"not a chunk of an answer ({error!r}): {data[:200]!r}"
            ) from None

    def _raise_error(self, error: Any) -> None:
        code = error.get("code") if isinstance(error, dict) else None
        if code in http_session.ROW_REFUSED_STATUSES:  # found after the stream had started
            raise http_session.RequestRefusedError(code, str(error.get("message")))
        raise http_session.ExchangeFailedError("error", str(error.get("message") if isinstance(error, dict) else error))

    def _read_generate(self, message: dict[str, Any], now: float) -> None:
        meta, ids = message["meta_info"], message.get("output_ids") or []
        total = meta["completion_tokens"]
        self._record_tokens(total, now)
        # All ids so far, or with --incremental-streaming-output the new ones.
        if len(ids) == total:
            self.text, self.ids = message.get("text") or "", ids
        else:
            self.text, self.ids = self.text + (message.get("text") or ""), self.ids + ids
        self.input_tokens = meta["prompt_tokens"]
        if reason := meta.get("finish_reason"):
            self.finish_reason, self.engine_meta = reason["type"], meta
            if self.finish_reason == "abort":
                raise http_session.ExchangeFailedError("aborted", str(reason.get("message")))

    def _read_openai(self, message: dict[str, Any], now: float) -> None:
        usage, piece = message.get("usage"), ""
        for choice in message.get("choices") or ():
            delta = choice.get("delta") or choice
            text = delta.get("content") or delta.get("text") or ""
            piece = text or delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.text += text
            self.ids += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if usage:
            self.input_tokens = usage["prompt_tokens"]
            if self.has_token_counts:
                self._record_tokens(usage["completion_tokens"], now)
            self.output_tokens = usage["completion_tokens"]
        elif piece:
            self.has_token_counts = False
            self.events.append((now, 1))
            self.output_tokens += 1
        self.engine_meta |= (message.get("sglext") or {}).get("spec_tokens_details") or {}

    def _record_tokens(self, total: int, now: float) -> None:
        if total < self.output_tokens:
            raise ValueError(f"{total} tokens so far, after {self.output_tokens}")
        if total > self.output_tokens:
            self.events.append((now, total - self.output_tokens))
            self.output_tokens = total
