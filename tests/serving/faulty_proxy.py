"""Stands before a real server and breaks some of its answers: an error of its own, a reset in the middle, silence."""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable

from tests.serving.misbehaving_server import Fake


class Proxy(Fake):
    """Inside `with`, what `upstream` (host:port) answers, but for requests for which `fault` names what goes wrong."""

    def __init__(self, upstream: str, fault: Callable[[int], str | None]) -> None:
        super().__init__()
        self.upstream, self.fault = upstream.removeprefix("http://").split(":"), fault
        self.num_requests, self.faults = 0, Counter[str]()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = [x for x in head.decode().split("\r\n") if not x.lower().startswith("connection:")]
            length = next((int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            fault = None
            if "/v1/chat/completions" in lines[0]:
                fault, self.num_requests = self.fault(self.num_requests), self.num_requests + 1
                self.faults[fault or "none"] += 1
            if fault == "hang":
                await asyncio.sleep(60)
                return
            if fault == "500":
                writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                await writer.drain()
                return
            reply = await self._relay("\r\n".join([lines[0], "Connection: close", *lines[1:]]).encode() + body)
            writer.write(reply[: len(reply) - 20] if fault == "reset" else reply)
            await writer.drain()
            if fault == "reset":  # the client has most of it by now
                await asyncio.sleep(0.02)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _relay(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self.upstream)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()
