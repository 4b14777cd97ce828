"""Figures of the pipelines that run, for Prometheus to scrape.

close = serve()   # http://127.0.0.1:9464/metrics

`grafana.json` beside this file is a dashboard of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..pipeline.session import explanations

__all__ = ["serve"]

PORT = 9464
FIGURES = {
    "wait_share": "exposed wait as a share of the training step, 0 to 1",
    "rows_per_second": "samples handed over a second",
    "headspace": "training would be at most so many times faster if loading were free",
}
KNOBS = {
    "num_parallel_workers": "workers of a stage",
    "prefetch_size": "batches that a stage may be ahead",
}


class Figures:
    """Asks each pipeline that runs what it would say of itself."""

    def collect(self) -> Iterator[Any]:
        """Yield a family of gauges for each figure."""
        from prometheus_client.core import GaugeMetricFamily

        said = explanations()
        for figure, about in FIGURES.items():
            family = GaugeMetricFamily(f"penstock_{figure}", about, labels=["pipeline"])
            for name, each in said.items():
                field = figure.replace("per_second", "per_s")
                family.add_metric([name], getattr(each, field))
            yield family
        for knob, about in KNOBS.items():
            labels = ["pipeline", "stage"]
            family = GaugeMetricFamily(f"penstock_{knob}", about, labels=labels)
            for name, each in said.items():
                for stage in each.stages:
                    family.add_metric([name, stage.name], getattr(stage, knob))
            yield family


def serve(port: int = PORT, address: str = "127.0.0.1") -> Callable[[], object]:
    """Serve the figures of this process, on this machine alone unless told otherwise.

    Args:
        port: where.
        address: of the interface; "0.0.0.0" shows the figures to the network.

    Returns:
        A function that ends it.

    Raises:
        OSError: the port is taken.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(Figures())
    server, thread = start_http_server(port, address, registry)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
