"""The tests' web server leaves no connection open."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from support.http_store import served


def test_connections_that_come_as_it_stops_are_closed() -> None:
    with ExitStack() as clients, served({}) as store:
        assert store._loop is not None  # noqa: SLF001
        # It stalls, and then finds the connections and its stop in one turn.
        store._loop.call_soon_threadsafe(time.sleep, 0.3)  # noqa: SLF001
        url = urlsplit(store.url)
        for _ in range(8):
            client = socket.create_connection((url.hostname, url.port))
            clients.enter_context(client)
