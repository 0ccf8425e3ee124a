"""An OpenAI-compatible server that can be told to misbehave. Raw asyncio, so that it can also cut, reset and hang."""

import asyncio
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Reply = Callable[[dict[str, Any], int], Any]  # (body, number of the request) -> see `_chat`


def completion(text: str, model: str = "tiny", **changes: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"model": model, "choices": [choice | changes.pop("choice", {})], **changes}


def echo(body: dict[str, Any], _number: int) -> dict[str, Any]:
    """Return an answer that depends on the whole request, and on nothing else."""
    data = json.dumps(body, sort_keys=True).encode()
    return completion(f"place: {hashlib.sha256(data).hexdigest()[:12]}", body["model"])


@dataclass
class Streamed:
    """An answer in chunks: when, in seconds since the request came, and how many tokens."""

    chunks: list[tuple[float, int]]
    finish: str = "length"
    meta: dict[str, Any] = field(default_factory=dict)  # SGLang's last words
    metrics: dict[str, Any] = field(default_factory=dict)  # vLLM's figures of the request, in OpenAI's dialect
    failure: str | None = None  # after the chunks, instead of an end: reset, hang, close, or the message of an error
    ready: Callable[[], bool] = lambda: (
        True
    )  # before each chunk: whether it may go, so a test sets an order, not a time


def spell_words(first: int, last: int) -> str:
    return "".join(f"w{i} " for i in range(first, last))


class Fake:
    """Serves in a thread, inside `with`. `reply` gives a completion, a Streamed, a status, or a word: what goes wrong."""

    def __init__(
        self, reply: Reply = echo, delay_s: Any = 0.0, port: int = 0, models: Any = None, host: str = "127.0.0.1"
    ) -> None:
        """`delay_s` in seconds, or what gives them for a body."""
        self.reply, self.port, self.models, self.host = reply, port, models, host
        self.pages: dict[str, Any] = {}  # path -> what a GET or POST of it gives: a value, bytes, or what makes one
        self.arrived: list[float] = []  # of each request for an answer, by the machine's clock
        self.streams: list[list[float]] = []  # when each chunk of each stream was sent
        self.given_up = 0  # streams whose client went away
        self.delay_of: Callable[[dict[str, Any]], float] = delay_s if callable(delay_s) else lambda _: delay_s
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.max_at_once = self._at_once = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                words = head.decode()
                length = next(
                    (int(v[1]) for x in words.split("\r\n") if (v := x.lower().split(":"))[0] == "content-length"), 0
                )
                body = await reader.readexactly(length)
                path = words.split(" ", 2)[1]
                self.paths.append(path)
                if path in ("/v1/chat/completions", "/v1/completions", "/generate", "/completion"):
                    self.arrived.append(time.perf_counter())
                    self.headers.append(words)
                    self._at_once += 1
                    self.max_at_once = max(self.max_at_once, self._at_once)
                    try:
                        if not await self._chat(path, json.loads(body), reader, writer):
                            return
                    finally:
                        self._at_once -= 1
                elif path == "/v1/models" and self.models is not None:
                    self._send(writer, 200, self.models)
                elif (page := path.partition("?")[0]) in self.pages:
                    found = self.pages[page]
                    self._send(writer, 200, found() if callable(found) else found)
                else:
                    self._send(writer, 200 if path == "/health" else 404, {})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _chat(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer a request; return whether the connection stays open."""
        self.bodies.append(body)
        reply = self.reply(body, len(self.bodies) - 1)
        if isinstance(reply, Streamed):
            try:
                return await self._stream(path, reply, reader, writer)
            except ConnectionError:
                self.given_up += 1
                raise
        await asyncio.sleep(self.delay_of(body))
        if reply == "hang":
            await asyncio.sleep(30)
            return False
        if reply == "drip":  # a byte now and then: no single read is ever late
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
            return False
        if reply == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        if reply == "cut":  # the promised length is longer than what comes
            data = json.dumps(completion("never whole")).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[: len(data) // 2])
            await writer.drain()
            return False
        if reply == "half":  # whole as HTTP, cut as JSON
            self._send(writer, 200, json.dumps(completion("half"))[:30].encode())
        elif isinstance(reply, int):
            self._send(writer, reply, {"error": {"message": f"status {reply}"}})
        else:
            self._send(writer, 200, reply)
        return True

    async def _stream(
        self, path: str, reply: Streamed, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        started, sent_times = time.perf_counter(), list[float]()
        self.streams.append(sent_times)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        build_event = self._native if path == "/generate" else self._openai
        num_sent, total = 0, sum(tokens for _, tokens in reply.chunks)
        for at_s, tokens in reply.chunks:
            if (wait_s := started + at_s - time.perf_counter()) > 0:
                await writer.drain()
                await asyncio.sleep(wait_s)
            while not (is_ready := reply.ready()) and not reader.at_eof():
                await asyncio.sleep(0.001)
            if not is_ready or reader.at_eof():  # a writer learns it only some writes later
                raise ConnectionResetError
            num_sent += tokens
            sent_times.append(time.perf_counter())
            is_last = num_sent == total and not reply.failure
            self._event(writer, build_event(reply, num_sent - tokens, num_sent, is_last))
        if reply.failure:
            return await self._break(reply.failure, writer)
        if path != "/generate":
            usage = {"prompt_tokens": 7, "completion_tokens": num_sent}
            details = {"metrics": {"speculative_decoding": reply.metrics}} if reply.metrics else {}
            self._event(writer, {"choices": [], "usage": usage, **details})
        self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")
        await writer.drain()
        return True

    def _native(self, reply: Streamed, _start: int, stop: int, is_last: bool) -> dict[str, Any]:
        meta = {"id": "x", "prompt_tokens": 7, "completion_tokens": stop, "finish_reason": None}
        if is_last:
            meta |= {"finish_reason": {"type": reply.finish, "message": "stopped by its operator"}, **reply.meta}
        return {"text": spell_words(0, stop), "output_ids": list(range(stop)), "meta_info": meta}

    def _openai(self, reply: Streamed, start: int, stop: int, is_last: bool) -> dict[str, Any]:
        choice = {"text": spell_words(start, stop), "finish_reason": reply.finish if is_last else None}
        return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": stop}}

    async def _break(self, failure: str, writer: asyncio.StreamWriter) -> bool:
        if failure == "hang":
            await asyncio.sleep(30)
        elif failure == "reset":
            await writer.drain()
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        elif failure != "close":
            self._event(writer, {"error": {"message": failure, "code": 400 if "too long" in failure else 500}})
        self._chunk(writer, b"")  # a whole body, by HTTP
        await writer.drain()
        return True

    def _event(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
            + data
        )

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> "Fake":
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._listen())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what is closed tells its protocol so
