"""The trace of a run, as Perfetto and the viewers of torch.profiler open it.

The format: Google, "Trace Event Format"; counters (`C`), instants (`i`), names (`M`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from .recording import Recorded, RecordedWindow
from .terminal import Report

Event = dict[str, Any]


def write_trace(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the trace, in microseconds since 1970, completely or not at all."""
    shown = os.fspath(path)
    events = [
        event
        for number, seen in enumerate(report.pipelines)
        for event in events_of(seen, number + 1)
    ]
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": 0}
    with open(f"{shown}.partial", "w", encoding="utf-8") as file:
        json.dump(whole, file)
    os.replace(f"{shown}.partial", shown)


def events_of(seen: Recorded, process: int) -> Iterator[Event]:
    """Yield what one pipeline did on one rank, as a separate process."""
    name = f"penstock: {seen.name}, rank {seen.rank}"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for window in seen.windows:
        at = {"ph": "C", "pid": process, "ts": _us(seen, window.time_s)}
        for counter, values in _counters(window):
            yield {**at, "name": counter, "args": values}
    for row in seen.changes:
        if row["event"] == "decision":
            yield {
                "ph": "i",
                "s": "p",
                "pid": process,
                "tid": 0,
                "ts": _us(seen, row["time_s"]),
                "name": f"{row['op']}: {row['knob']} {row['old']} -> {row['new']}",
                "args": {"reason": row["reason"]},
            }


def _counters(window: RecordedWindow) -> Iterator[tuple[str, dict[str, float]]]:
    yield "trainer waits (%)", {"wait": 100 * window.wait_share}
    yield "samples/s", {"rate": window.rows_per_s}
    yield "held (MiB)", {"held": window.held_bytes / (1 << 20)}
    for knob in ("num_parallel_workers", "prefetch_size"):
        values = {
            op: float(value)
            for (op, name), value in window.values.items()
            if name == knob and not isinstance(value, str)
        }
        if values:
            yield knob, values


def _us(seen: Recorded, time_s: float) -> float:
    return 1e6 * (seen.wall_s + time_s)
