"""A web server on this machine that is slow to answer, as a store far away is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from aiohttp import web

__all__ = ["HttpStore", "served"]

ACCEPTED_S = 0.05
"""From a connection's first sign to its protocol, however busy the machine is."""
LOOKS = 500


async def settled() -> None:
    """Close every connection, late ones too, until none and no task is left but this.

    aiohttp forgets some that come while it shuts down; the loop knows them all.
    """
    transports = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]  # noqa: SLF001
    for _ in range(LOOKS):
        for transport in list(transports.values()):
            transport.abort()
        await asyncio.sleep(0.01)
        if len(asyncio.all_tasks()) == 1:
            return


class HttpStore:
    """Serves files from memory, and counts the requests in flight."""

    def __init__(self, files: Mapping[str, bytes], latency_s: float) -> None:
        self.files = files
        self.latency_s = latency_s
        self.url = ""
        self.inside = 0
        self.most = 0
        """The most requests that were in flight at once."""
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def answer(self, request: web.Request) -> web.Response:
        self.inside += 1
        self.most = max(self.most, self.inside)
        with suppress(TimeoutError):  # who is gone is not waited for when it stops
            await asyncio.wait_for(self._stop.wait(), self.latency_s)
        self.inside -= 1
        content = self.files.get(request.path.lstrip("/"))
        if content is None:
            return web.Response(status=404)
        return web.Response(body=content)

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
def served(files: Mapping[str, bytes], latency_s: float = 0.01) -> Iterator[HttpStore]:
    """Serve these files for the length of the block."""
    store = HttpStore(files, latency_s)
    ready = threading.Event()
    thread = threading.Thread(target=store.run, args=(ready,), name="http store")
    thread.start()
    try:
        assert ready.wait(timeout=60)
        yield store
    finally:
        store.stop()
        thread.join()
