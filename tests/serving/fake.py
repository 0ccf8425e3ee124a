"""An OpenAI-compatible server that can be told to misbehave. Raw asyncio, so that it can also cut, reset and hang.

python -m tests.serving.fake PORT DELAY_S [spread]     # a null server: one answer, after a fixed delay, or one of its own
"""

import asyncio
import hashlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

Reply = Callable[[dict[str, Any], int], Any]  # (body, number of the request) -> see `_chat`


def completion(text: str, model: str = "tiny", **changes: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"model": model, "choices": [choice | changes.pop("choice", {})], **changes}


def echo(body: dict[str, Any], _number: int) -> dict[str, Any]:
    """An answer that depends on all that was asked, and on nothing else."""
    asked = json.dumps(body, sort_keys=True).encode()
    return completion(f"place: {hashlib.sha256(asked).hexdigest()[:12]}", body["model"])


def spread(delay_s: float, seed: int) -> float:
    """A delay of half to one and a half of `delay_s`, another for each seed: so no two answers come in one moment."""
    return delay_s * (0.5 + seed * 0.6180339887498949 % 1)


class Fake:
    """Serves in a thread, inside `with`. `reply` gives a completion, an int (a status), or a word: what goes wrong."""

    def __init__(
        self, reply: Reply = echo, delay_s: Any = 0.0, port: int = 0, models: Any = None, host: str = "127.0.0.1"
    ) -> None:
        """`delay_s` in seconds, or what gives them for a body."""
        self.reply, self.port, self.models, self.host = reply, port, models, host
        self.location = ""
        self.delay_of: Callable[[dict[str, Any]], float] = delay_s if callable(delay_s) else lambda _: delay_s
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.most_at_once = self._at_once = 0

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
                if path == "/v1/chat/completions":
                    self.headers.append(words)
                    self._at_once += 1
                    self.most_at_once = max(self.most_at_once, self._at_once)
                    try:
                        if not await self._chat(json.loads(body), writer):
                            return
                    finally:
                        self._at_once -= 1
                elif path == "/v1/models" and self.models is not None:
                    self._send(writer, 200, self.models)
                else:
                    self._send(writer, 200 if path == "/health" else 404, {})
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Whether the connection lives on."""
        self.bodies.append(body)
        said = self.reply(body, len(self.bodies) - 1)
        await asyncio.sleep(self.delay_of(body))
        if said == "hang":
            await asyncio.sleep(30)
            return False
        if said == "drip":  # a byte now and then: no single read is ever late
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
            return False
        if said == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        if said == "cut":  # the promised length is longer than what comes
            whole = json.dumps(completion("never whole")).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole[: len(whole) // 2])
            await writer.drain()
            return False
        if said == "half":  # whole as HTTP, cut as JSON
            self._send(writer, 200, json.dumps(completion("half"))[:30].encode())
        elif isinstance(said, int):
            self._send(writer, said, {"error": {"message": f"status {said}"}})
        else:
            self._send(writer, 200, said)
        return True

    def _send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
            % (status, f"Location: {self.location}\r\n".encode() if self.location else b"", len(data))
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


if __name__ == "__main__":
    seconds = float(sys.argv[2])
    delay = (lambda body: spread(seconds, body["seed"])) if sys.argv[3:] == ["spread"] else seconds
    fake = Fake(lambda body, number: completion("ok", body["model"]), delay, int(sys.argv[1]))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(fake._listen())
    loop.run_forever()
