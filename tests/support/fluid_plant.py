"""A pipeline and a trainer as a fluid in steps of virtual time: a `Plant` for tests.

Rows flow. A segment with `n` workers that each need `service_s(n)` seconds per row
passes on at most `n / service_s(n)` rows per second. It passes on fewer if all segments
together need more cores than there are, or if the connector after it is full. The
trainer takes whole batches. Only `noise` makes it random, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.engine.observe.observation import (
    ConnectorObservation,
    Knob,
    Move,
    Observation,
    SegmentObservation,
    TrainerObservation,
)

TICK_S = 0.004
ROW_BYTES = 150_000


@dataclass(frozen=True, slots=True)
class Work:
    """A segment: its name, and seconds a row takes by its number of workers."""

    name: str
    service_s: Callable[[int], float]
    cpu_s: float = 0.0
    """CPU seconds of a row."""
    upper: int = 32
    tunable: bool = True


def steady(seconds: float) -> Callable[[int], float]:
    """A service time that does not depend on the number of workers."""
    return lambda workers: seconds


class Segment:
    """One segment and the connector behind it."""

    def __init__(self, work: Work, workers: int, prefetch: int) -> None:
        self.work = work
        self.workers = workers
        self.prefetch = prefetch
        self.executor = "thread"
        self.moves: tuple[Move, ...] = ()
        self.level = 0.0
        self.clear()

    def clear(self) -> None:
        self.rows = self.run_s = self.cpu_s = self.wait_input_s = 0.0
        self.wait_credit_s = self.area = self.empty_s = self.full_s = 0.0

    def watch(self, capacity: float, visible: float) -> None:
        self.area += visible * TICK_S
        self.empty_s += TICK_S * (visible < 0.5)
        self.full_s += TICK_S * (visible > capacity - 0.5)


class FluidPlant:
    """Segments in a row, then a trainer that needs `gap_s` for each batch."""

    def __init__(
        self,
        works: tuple[Work, ...],
        *,
        gap_s: float,
        workers: int = 1,
        prefetch: int = 2,
        batch: int = 64,
        cores: float = 64.0,
        noise: float = 0.0,
    ) -> None:
        self.now_s = 0.0
        self.steps = 0
        self.calm = False
        self.tried: Mapping[str, str] = {}
        self.gap_s = gap_s
        self.batch = batch
        self.cores = cores
        self.segments = [Segment(work, workers, prefetch) for work in works]
        self.changes: list[tuple[float, str, int]] = []
        """Each change of a knob: time, `operator.knob`, new value."""
        self.taken: list[float] = []
        """When each batch was handed over."""
        self._noise = noise
        self._random = random.Random(0)
        self._busy_s = gap_s
        self._waited_s = self._own_s = 0.0  # of the step that is not finished
        self._before_s = 0.0, 0.0  # wait and gap in all windows before
        self._wait_s = self._gap_s = 0.0
        self._clear()

    @property
    def trained(self) -> TrainerObservation:
        wait_s, gap_s = self._before_s
        return TrainerObservation(
            self.steps,
            self.steps * self.batch,
            wait_s + self._wait_s,
            gap_s + self._gap_s,
        )

    def advance(self, seconds: float) -> None:
        """Advance the virtual time."""
        for _ in range(round(seconds / TICK_S)):
            self._tick()

    def rows_per_s(self, since_s: float) -> float:
        """Return the samples delivered per second from `since_s` until now."""
        batches = sum(1 for when in self.taken if when > since_s)
        return batches * self.batch / (self.now_s - since_s)

    def workers(self) -> list[int]:
        return [segment.workers for segment in self.segments]

    def observe(self) -> Observation | None:
        window_s = self.now_s - self._since_s
        if window_s <= 0:
            return None
        outputs = [self._connector(at, window_s) for at in range(len(self.segments))]
        observation = Observation(
            time_s=self.now_s,
            window_s=window_s,
            epoch=0,
            step=self.steps,
            trainer=TrainerObservation(
                self.steps - self._first_step,
                (self.steps - self._first_step) * self.batch,
                self._wait_s,
                self._gap_s,
            ),
            segments=tuple(
                self._segment(segment, outputs[at - 1] if at else None, outputs[at])
                for at, segment in enumerate(self.segments)
            ),
            held_bytes=self.held_bytes(),
            peak_bytes=self.held_bytes(),
        )
        self._clear()
        return observation

    def knobs(self) -> tuple[Knob, ...]:
        return tuple(
            knob for at in range(len(self.segments)) for knob in self._knobs(at)
        )

    def held_bytes(self) -> int:
        return int(ROW_BYTES * sum(segment.level for segment in self.segments))

    def _tick(self) -> None:
        self.now_s += TICK_S
        cpu_s = self.cores * TICK_S
        for at in reversed(range(len(self.segments))):
            cpu_s -= self._core(at, cpu_s)
        self._train()
        for at, segment in enumerate(self.segments):
            segment.watch(segment.prefetch * self.batch, self._visible(at))

    def _capacity(self, segment: Segment) -> float:
        uneven = 1.0 + self._noise * self._random.uniform(-1.0, 1.0)
        return segment.workers / segment.work.service_s(segment.workers) * uneven

    def _core(self, at: int, cpu_s: float) -> float:
        """Move one segment's rows; return the CPU-seconds that took of `cpu_s`."""
        segment = self.segments[at]
        most = self._capacity(segment) * TICK_S
        if most * segment.work.cpu_s > cpu_s:
            most = cpu_s / segment.work.cpu_s
        feeding = self.segments[at - 1].level if at else float("inf")
        room = max(0.0, segment.prefetch * self.batch - segment.level)
        rows = min(most, feeding, room)
        if at:
            self.segments[at - 1].level -= rows
        segment.level += rows
        segment.rows += rows
        alive_s = segment.workers * TICK_S
        busy_s = alive_s * rows / most if most > 0 else 0.0
        segment.run_s += busy_s
        segment.cpu_s += rows * segment.work.cpu_s
        if room < min(most, feeding):
            segment.wait_credit_s += alive_s - busy_s
        else:
            segment.wait_input_s += alive_s - busy_s
        return rows * segment.work.cpu_s

    def _train(self) -> None:
        last = self.segments[-1]
        if self._busy_s > 0:
            self._busy_s -= TICK_S
            self._own_s += TICK_S
        elif last.level >= self.batch:
            last.level -= self.batch
            self.steps += 1
            self.taken.append(self.now_s)
            self._wait_s += self._waited_s
            self._gap_s += self._own_s
            self._waited_s = self._own_s = 0.0
            self._busy_s = self.gap_s
        else:
            self._waited_s += TICK_S

    def _visible(self, at: int) -> float:
        """Return the rows after a segment; before the trainer, whole batches only."""
        level = self.segments[at].level
        last = at == len(self.segments) - 1
        return level // self.batch * self.batch if last else level

    def _clear(self) -> None:
        self._since_s = self.now_s
        self._first_step = self.steps
        wait_s, gap_s = self._before_s
        self._before_s = wait_s + self._wait_s, gap_s + self._gap_s
        self._wait_s = self._gap_s = 0.0
        for segment in self.segments:
            segment.clear()

    def _connector(self, at: int, window_s: float) -> ConnectorObservation:
        segment = self.segments[at]
        return ConnectorObservation(
            occupancy=segment.area / window_s,
            capacity=segment.prefetch * self.batch,
            empty=min(1.0, segment.empty_s / window_s),
            full=min(1.0, segment.full_s / window_s),
            row_bytes=ROW_BYTES,
        )

    def _segment(
        self,
        segment: Segment,
        feeding: ConnectorObservation | None,
        output: ConnectorObservation,
    ) -> SegmentObservation:
        name = segment.work.name
        return SegmentObservation(
            name=name,
            queue_name=name,
            executor=segment.executor,
            num_parallel_workers=segment.workers,
            prefetch_size=segment.prefetch,
            rows=int(segment.rows),
            worker_s=segment.run_s + segment.wait_input_s + segment.wait_credit_s,
            run_s=segment.run_s,
            cpu_s=segment.cpu_s,
            wait_input_s=segment.wait_input_s,
            wait_credit_s=segment.wait_credit_s,
            input=feeding,
            output=output,
            moves=segment.moves,
        )

    def _knobs(self, at: int) -> tuple[Knob, Knob]:
        segment, work = self.segments[at], self.segments[at].work

        def set_workers(value: int) -> None:
            self.changes.append((self.now_s, f"{work.name}.workers", value))
            segment.workers = value

        def set_prefetch(value: int) -> None:
            self.changes.append((self.now_s, f"{work.name}.prefetch", value))
            segment.prefetch = value

        return (
            Knob(
                work.name,
                "num_parallel_workers",
                1,
                work.upper,
                work.tunable,
                lambda: segment.workers,
                set_workers,
            ),
            Knob(
                work.name,
                "prefetch_size",
                1,
                128,
                work.tunable,
                lambda: segment.prefetch,
                set_prefetch,
            ),
        )
