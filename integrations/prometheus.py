"""Figures of the running pipelines, for Prometheus to scrape.

close = serve()   # http://127.0.0.1:9464/metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..pipeline.session import explanations

__all__ = ["serve"]

PORT = 9464
FIGURES = {
    "wait_share": "exposed wait as a share of the training step, 0 to 1",
    "rows_per_second": "samples delivered to the trainer per second",
    "headspace": "how many times faster training could be if loading were free",
}
KNOBS = {
    "num_parallel_workers": "workers of a stage",
    "prefetch_size": "batches that a stage may prefetch",
}


class Figures:
    """Collects the figures that `explain()` has for each running pipeline."""

    def collect(self) -> Iterator[Any]:
        """Yield a family of gauges for each figure and each knob."""
        from prometheus_client.core import GaugeMetricFamily

        by_name = explanations()
        for figure, about in FIGURES.items():
            family = GaugeMetricFamily(f"penstock_{figure}", about, labels=["pipeline"])
            for name, explanation in by_name.items():
                family.add_metric(
                    [name], getattr(explanation, figure.replace("per_second", "per_s"))
                )
            yield family
        for knob, about in KNOBS.items():
            family = GaugeMetricFamily(
                f"penstock_{knob}", about, labels=["pipeline", "stage"]
            )
            for name, explanation in by_name.items():
                for stage in explanation.stages:
                    family.add_metric([name, stage.name], getattr(stage, knob))
            yield family


def serve(port: int = PORT, address: str = "127.0.0.1") -> Callable[[], object]:
    """Serve the figures of this process, by default only to this machine.

    Args:
        port: port to listen on.
        address: address of the interface; "0.0.0.0" serves the whole network.

    Returns:
        A function that stops the server.

    Raises:
        OSError: the port is in use.
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
