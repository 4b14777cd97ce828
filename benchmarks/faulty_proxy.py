"""A local proxy that makes a store slow and sometimes faulty, like a distant one."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

__all__ = ["FaultyProxy", "proxied"]


class FaultyProxy:
    """Forwards requests; answers some of them with an error, or late.

    Args:
        upstream: URL of the store.
        latency_s: seconds before each answer.
        every: of this many requests, one gets an error and another one stalls; 0: none.
        stall_s: seconds that a stalled answer takes.
    """

    def __init__(
        self, upstream: str, latency_s: float, every: int, stall_s: float
    ) -> None:
        self.upstream, self.latency_s = upstream, latency_s
        self.every, self.stall_s = every, stall_s
        self.seen: Counter[str] = Counter()
        """Requests, and of these, how many were answered by an error or stalled."""
        self.url = ""
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        self.seen["requests"] += 1
        place = self.seen["requests"] % self.every if self.every else 1
        await asyncio.sleep(self.latency_s)
        if self.every and place == 0:
            self.seen["errors"] += 1
            return web.Response(status=503)
        if self.every and place == self.every // 2:
            self.seen["stalls"] += 1
            await asyncio.sleep(self.stall_s)
        async with self._session.request(
            request.method,
            self.upstream + request.raw_path,
            headers=request.headers,
            data=await request.read(),
            skip_auto_headers=("Accept-Encoding",),
            auto_decompress=False,
        ) as response:
            body = await response.read()
            hops = HOPS - {"Content-Length"} if request.method == "HEAD" else HOPS
            headers = {k: v for k, v in response.headers.items() if k not in hops}
            return web.Response(status=response.status, body=body, headers=headers)

    async def serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            runner = web.ServerRunner(web.Server(self.answer), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            ready.set()
            await self._stop.wait()
            await runner.cleanup()

    def run(self, ready: threading.Event) -> None:
        asyncio.run(self.serve(ready))

    def stop(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)


HOPS = frozenset(
    ("Connection", "Content-Length", "Transfer-Encoding", "Date", "Server")
)
"""Headers that belong to one connection, or are set again for the answer."""


@contextmanager
def proxied(
    upstream: str, latency_s: float, *, every: int = 0, stall_s: float = 5.0
) -> Iterator[FaultyProxy]:
    """Run a proxy in front of a store until the `with` ends: see `FaultyProxy`."""
    proxy = FaultyProxy(upstream, latency_s, every, stall_s)
    ready = threading.Event()
    thread = threading.Thread(target=proxy.run, args=(ready,), name="faulty proxy")
    thread.start()
    try:
        assert ready.wait(timeout=60)
        yield proxy
    finally:
        proxy.stop()
        thread.join()
