"""A local web server whose bandwidth all readers share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

from aiohttp import web

__all__ = ["served"]


class LimitedStore:
    """Sends whole files one after another, each in the time that its bytes take.

    Args:
        files: contents of the files: `/k` is file `k` modulo their number.
        bytes_per_s: bandwidth of all answers together.
    """

    def __init__(self, files: Sequence[bytes], bytes_per_s: float) -> None:
        self._files = files
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Wait until the bandwidth has been free for as long as the file takes."""
        content = self._files[int(request.path.lstrip("/")) % len(self._files)]
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now_s) + len(content) / self._bytes_per_s
        await asyncio.sleep(self._free_s - now_s)
        return web.Response(body=content)


def serve(files: Sequence[bytes], bytes_per_s: float, port: Connection) -> None:
    """Send the port, and serve until this process ends."""
    asyncio.run(_serve(LimitedStore(files, bytes_per_s), port))


async def _serve(store: LimitedStore, port: Connection) -> None:
    runner = web.ServerRunner(web.Server(store.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    port.send(runner.addresses[0][1])
    await asyncio.Event().wait()


@contextmanager
def served(files: Sequence[bytes], bytes_per_s: float) -> Iterator[str]:
    """Serve files from a process of its own; yield the URL to put before a number.

    Args:
        files: their contents.
        bytes_per_s: bandwidth for all readers together.
    """
    ours, theirs = get_context("fork").Pipe()
    arguments = (files, bytes_per_s, theirs)
    server = get_context("fork").Process(target=serve, args=arguments, daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        server.kill()
        server.join()
