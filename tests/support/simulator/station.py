"""A stage at run time: its workers, and the rows waiting in its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from penstock.engine.observe.observation import (
    ConnectorObservation,
    Knob,
    SegmentObservation,
)
from support.simulator.machine import Parts
from support.simulator.workload import SimulatedStage, Workload

LEASE_S = 0.03
"""Work in one chunk: more than in a real pipeline, to simulate fewer events."""
MAX_PREFETCH = 64


class Done(NamedTuple):
    """A finished chunk, and the time it took."""

    rows: int
    run_s: float
    cpu_s: float


class Station:
    """A stage at run time: its workers, and the rows waiting in its output."""

    def __init__(
        self, at: int, what: SimulatedStage, workers: int, prefetch: int
    ) -> None:
        self.what = what
        has_id = "(ID:" in what.name  # the name comes from a measured run
        self.name = what.name if has_id else f"Map(ID:{at}) {what.name}"
        self.workers = min(workers, what.most_workers)
        self.prefetch = prefetch
        self.executor = "thread"
        self._held_s = 0.0
        self.busy = 0
        """Workers that have a chunk. A retired worker finishes its chunk first."""
        self.level = 0
        """Rows waiting in its output."""
        self._in_hand = 0
        self._rows_beside: dict[int, tuple[Parts, int]] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows = 0
        self._worker_s = self._run_s = self._cpu_s = 0.0
        self._input_s = self._credit_s = 0.0
        self._area = self._empty_s = self._full_s = 0.0

    def become(self, what: SimulatedStage) -> None:
        """Switch to other work."""
        self.what = what
        self._rows_beside.clear()

    def parts(self) -> Parts:
        """Return the parts of a row's time, if other stages do not slow it down."""
        return self._row()[0]

    def _row(self) -> tuple[Parts, int]:
        """Return these parts with the present number of busy workers, and the lease."""
        what, busy = self.what, max(1, self.busy)
        row = self._rows_beside.get(busy)
        if row is None:
            computing = self._computing()
            wait_s = what.wait_s + what.queueing_s(busy)
            parts = (wait_s, *computing, what.transfer_s)
            row = parts, max(1, int(LEASE_S / max(sum(parts), 1e-9)))
            self._rows_beside[busy] = row
        return row

    def _computing(self) -> tuple[float, float]:
        """Return the CPU seconds of a row without the trainer's GIL, and with it."""
        what = self.what
        if self.executor == "process":
            return what.cpu_s + what.handover_s / 2, what.handover_s / 2
        return what.cpu_s * (1 - what.gil), what.cpu_s * what.gil

    def take_held_s(self) -> float:
        """Return the seconds that its threads held the GIL since the last call."""
        held_s, self._held_s = self._held_s, 0.0
        return held_s

    def startable(self, source: Station | None, batch_rows: int) -> int:
        """Return how many rows a worker may start on now; 0 if no worker can start."""
        if self.busy >= self.workers:
            return 0
        rows = min(self._row()[1], batch_rows)
        ahead = self.level + self._in_hand - self.workers * rows
        if ahead >= self.prefetch * batch_rows:
            return 0
        return rows if source is None else min(rows, source.level)

    def begin(self, rows: int, source: Station | None) -> None:
        """Give `rows` rows to a worker."""
        self.busy += 1
        self._in_hand += rows
        if source is not None:
            source.level -= rows

    def end(self, done: Done) -> None:
        """Take a chunk back from its worker."""
        self.busy -= 1
        self._in_hand -= done.rows
        self.level += done.rows
        self._rows += done.rows
        self._run_s += done.run_s
        self._cpu_s += done.cpu_s
        free_s, held_s = self._computing()
        self._held_s += done.cpu_s * held_s / ((free_s + held_s) or 1.0)

    def pass_time(
        self, passed_s: float, source: Station | None, workload: Workload
    ) -> None:
        """Count workers and rows over a time in which nothing changed."""
        alive = max(self.workers, self.busy)
        idle_s = (alive - self.busy) * passed_s
        self._worker_s += alive * passed_s
        if source is not None and source.level == 0:
            self._input_s += idle_s
        else:
            self._credit_s += idle_s
        rows, level = workload.batch_rows, self.level
        if self.what is workload.stages[-1]:
            level -= level % rows  # the trainer only gets complete batches
        self._area += level * passed_s
        self._empty_s += passed_s * (level == 0)
        self._full_s += passed_s * (level >= self.prefetch * rows)

    def read(
        self, window_s: float, batch_rows: int, feeding: ConnectorObservation | None
    ) -> SegmentObservation:
        """Return what happened since the last reading."""
        length_s = window_s or 1.0
        occupancy = self._area / length_s
        output = ConnectorObservation(
            occupancy=occupancy,
            capacity=self.prefetch * batch_rows,
            empty=self._empty_s / length_s,
            full=self._full_s / length_s,
            row_bytes=self.what.row_bytes,
        )
        segment = SegmentObservation(
            name=self.name,
            queue_name=self.name,
            executor=self.executor,
            num_parallel_workers=self.workers,
            prefetch_size=self.prefetch,
            rows=self._rows,
            worker_s=self._worker_s,
            run_s=self._run_s,
            cpu_s=self._cpu_s,
            wait_input_s=self._input_s,
            wait_credit_s=self._credit_s,
            input=feeding,
            output=output,
        )
        self._clear()
        return segment

    def knobs(self, changed: Callable[[], None]) -> Iterator[Knob]:
        """Yield its knobs; each calls `changed` when set, which starts allowed work."""

        def set_workers(count: int) -> None:
            self.workers = count
            changed()

        def reach(batches: int) -> None:
            self.prefetch = batches
            changed()

        def move(kind: str) -> None:
            self.executor = kind
            self._rows_beside.clear()
            changed()

        name, most = self.name, self.what.most_workers
        number = partial(Knob, name, tunable=True, lower=1)
        yield number(
            "num_parallel_workers",
            upper=most,
            read=lambda: self.workers,
            write=set_workers,
        )
        yield number(
            "prefetch_size", upper=MAX_PREFETCH, read=lambda: self.prefetch, write=reach
        )
        if self.what.movable:
            yield Knob(
                name,
                "executor",
                0,
                0,
                tunable=True,
                read=lambda: self.executor,
                write=move,
                choices=("thread", "process"),
            )
