"""A local web server that answers slowly and may fail, like a distant store.

See `Fault` for its failures.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Literal

from aiohttp import web

__all__ = ["Fault", "HttpStore", "served"]

Fault = int | Literal["reset", "short", "stall"]
"""A status, without a body; or a connection that ends before anything is sent, or after
half of it; or one that sends half, and then nothing."""

ACCEPTED_S = 0.05
"""Seconds from accepting a connection to its protocol, even on a busy machine."""
LOOKS = 500


async def accept_no_more(site: web.TCPSite) -> None:
    """Accept no further connection, and let those that were accepted begin.

    One that begins after the server has stopped fails in Python 3.11, without a word:
    the loop does not know its transport, and leaves it open.
    """
    server = site._server  # noqa: SLF001
    assert isinstance(server, asyncio.Server)
    for listener in server.sockets:
        asyncio.get_running_loop().remove_reader(listener.fileno())
    await asyncio.sleep(0)


async def settled() -> None:
    """Close all connections, until none is open and this is the only task.

    aiohttp forgets connections that it accepts while it shuts down, but the loop knows
    them. A task that accepts one may end, and leave it open, during any sleep.
    """
    transports = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]  # noqa: SLF001
    for _ in range(LOOKS):
        for transport in list(transports.values()):
            transport.abort()
        await asyncio.sleep(0.01)  # clients notice, too
        still_open = any(value._sock is not None for value in list(transports.values()))  # noqa: SLF001
        if not still_open and len(asyncio.all_tasks()) == 1:
            return


class HttpStore:
    """Serves files from memory, and counts the requests in flight."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        latency_s: float,
        faults: Mapping[str, Iterable[Fault]],
        *,
        packed: bool,
        parts: bool,
    ) -> None:
        self.files = files
        self.latency_s = latency_s
        self.faults = {name: iter(file_faults) for name, file_faults in faults.items()}
        self.packed = packed
        self.parts = parts
        self.asked: Counter[str] = Counter()
        """Requests for each file."""
        self.sent: Counter[str] = Counter()
        """Bytes of each file that were sent in parts."""
        self.url = ""
        self.inside = 0
        self.most = 0
        """The most requests that were in flight at once."""
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.inside += 1
        self.most = max(self.most, self.inside)
        with suppress(TimeoutError):  # a stopping server does not delay
            await asyncio.wait_for(self._stop.wait(), self.latency_s)
        self.inside -= 1
        name = request.path.lstrip("/")
        self.asked[name] += 1
        content = self.files.get(name)
        if content is None:
            return web.Response(status=404)
        whole = not self.parts or "Range" not in request.headers
        if not whole:
            content = content[request.http_range]
        fault = next(self.faults.get(name, iter(())), None)
        if fault is None:
            self.sent[name] += 0 if whole else len(content)
            response = web.Response(status=200 if whole else 206, body=content)
            if self.packed:
                response.enable_compression()
            return response
        return await self.fail(request, content, fault)

    async def fail(
        self, request: web.Request, content: bytes, fault: Fault
    ) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        half = content[: len(content) // 2]
        if isinstance(fault, int):
            return web.Response(status=fault, body=half if fault == 206 else None)
        if fault == "reset":
            transport.abort()
            return web.Response()
        status = 206 if self.parts and "Range" in request.headers else 200
        headers = {"Content-Length": str(len(content))}
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        await response.write(half)
        if fault == "stall":
            await self._stop.wait()
        transport.close()
        return response

    async def serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        server = web.Server(self.answer)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        ready.set()
        await self._stop.wait()
        await accept_no_more(site)
        await site.stop()
        await asyncio.sleep(ACCEPTED_S)  # those being accepted are there now
        await runner.cleanup()
        await settled()

    def run(self, ready: threading.Event) -> None:
        asyncio.run(self.serve(ready))

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)


@contextmanager
def served(
    files: Mapping[str, bytes],
    latency_s: float = 0.01,
    faults: Mapping[str, Iterable[Fault]] | None = None,
    *,
    packed: bool = False,
    parts: bool = True,
) -> Iterator[HttpStore]:
    """Serve these files until the `with` ends.

    Args:
        files: what they hold.
        latency_s: before each answer.
        faults: of the answers to come, by file.
        packed: whether bodies are compressed on their way.
        parts: whether byte ranges are served.
    """
    store = HttpStore(files, latency_s, faults or {}, packed=packed, parts=parts)
    ready = threading.Event()
    thread = threading.Thread(target=store.run, args=(ready,), name="http store")
    thread.start()
    try:
        assert ready.wait(timeout=60)
        yield store
    finally:
        store.stop()
        thread.join()
