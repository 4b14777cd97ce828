"""The trace of a run, as Perfetto and the viewers of torch.profiler open it.

The format: Google, "Trace Event Format"; counters (`C`), instants (`i`), names (`M`).
Times count from where torch.profiler's do, so the events of both can be shown together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from ..saved import NAMES, write_whole
from .recording import Recorded, RecordedWindow, Recording

Event = dict[str, Any]

BASE_S = 7_889_238
"""Three months. torch.profiler's traces count from the last multiple of it since 1970
(kineto, `output_json.cpp`), which they name `baseTimeNanoseconds`."""


def write_trace(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write the trace, in microseconds since its base, completely or not at all."""
    first_s = min((seen.wall_s for seen in recording.pipelines), default=0.0)
    base_s = int(first_s) // BASE_S * BASE_S
    events = [
        event
        for number, seen in enumerate(recording.pipelines)
        for event in events_of(seen, number + 1, base_s)
    ]
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_s * 1_000_000_000,
    }
    write_whole(path, json.dumps(whole))


def events_of(seen: Recorded, process: int, base_s: int) -> Iterator[Event]:
    """Yield what one pipeline did on one rank, as a separate process.

    Args:
        seen: the pipeline.
        process: number of the process.
        base_s: seconds since 1970 at time 0.
    """
    zero_s = seen.wall_s - base_s
    name = f"penstock: {seen.name}, rank {seen.rank}"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for window in seen.windows:
        at = {"ph": "C", "pid": process, "ts": 1e6 * (zero_s + window.time_s)}
        for counter, values in _counters(window):
            yield {**at, "name": counter, "args": values}
    for row in seen.changes:
        if row["event"] == "decision":
            yield {
                "ph": "i",
                "s": "p",
                "pid": process,
                "tid": 0,
                "ts": 1e6 * (zero_s + row["time_s"]),
                "name": f"{row['op']}: {row['knob']} {row['old']} -> {row['new']}",
                "args": {"reason": row["reason"]},
            }


def _counters(window: RecordedWindow) -> Iterator[tuple[str, dict[str, float]]]:
    yield "trainer waits (%)", {"wait": 100 * window.wait_share}
    yield "samples/s", {"rate": window.rows_per_s}
    yield "held (MiB)", {"held": window.held_bytes / (1 << 20)}
    for knob in NAMES:
        values = {
            op: float(value)
            for (op, name), value in window.values.items()
            if name == knob and not isinstance(value, str)
        }
        if values:
            yield knob, values
