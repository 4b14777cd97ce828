"""The metrics that Prometheus scrapes, over HTTP on loopback."""

from __future__ import annotations

import re
import socket
import time
from urllib.request import urlopen

import pytest

import penstock as ps

pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.slow


def test_running_pipelines_are_scraped_by_name() -> None:
    from penstock.integrations.prometheus import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    end = serve(port)
    try:
        train = ps.Pipeline.from_dataset(list(range(4000))).batch(4)
        with train:
            loop = iter(train)
            for _ in range(300):
                next(loop)
                time.sleep(0.001)
            with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                metrics = answer.read().decode()
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            closed = answer.read().decode()
    finally:
        end()
    match = re.search(r'penstock_wait_share{pipeline="train"} ([\d.e-]+)', metrics)
    assert match is not None, metrics
    assert 0 <= float(match[1]) <= 1
    workers = (
        'penstock_num_parallel_workers{pipeline="train",stage="Dataset(ID:0) list"}'
    )
    assert f"{workers} 1.0" in metrics
    assert 'pipeline="train"' not in closed
