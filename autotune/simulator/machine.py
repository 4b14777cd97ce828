"""The simulated machine: a virtual clock, cores, and the pipelines that share them.

Discrete events: a worker finishes a chunk of rows, a trainer finishes its own part of a
step. How long either takes is drawn when it begins, from what keeps the machine busy at
that moment: where more CPU (or GIL, or bandwidth) is asked for than there is, the parts
that need it are stretched until it is just used up.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from operator import mul
from typing import NamedTuple

from ...pipeline.knob import Knob
from ...pipeline.observation import (
    ConnectorObservation,
    Observation,
    SegmentObservation,
    TrainerObservation,
)
from .workload import Stage, Trainer, Workload

__all__ = ["Machine", "Simulated"]

LEASE_S = 0.03
"""Work in one chunk; longer than a live one, for fewer events."""
ROUNDS = 30
"""Of the iteration that finds how far parts are stretched."""
MOST_PREFETCH = 64

Parts = tuple[float, float, float, float]
"""Of a row's time: waiting, CPU without the GIL, CPU with it, the store."""


class Machine:
    """Owns the clock and the cores.

    Args:
        cores: that there are.
        seed: of all that is drawn.
    """

    def __init__(self, cores: float, seed: int = 0) -> None:
        self.cores = cores
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.pipelines: list[Simulated] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stretches: dict[object, list[float]] = {}

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen, so long from now."""
        due_s = self.now_s + delay_s
        heapq.heappush(self._events, (due_s, next(self._numbers), event))

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = end_s

    def use(self, cores: float) -> None:
        """Have so many cores from now on: a neighbour comes or goes, a quota is cut."""
        self.cores = cores

    def cpu_stretch(self) -> float:
        """How many times as long CPU work takes now."""
        return self._factors()[0]

    def _factors(self) -> list[float]:
        key = (self.cores, *(pipeline.load for pipeline in self.pipelines))
        found = self._stretches.get(key)
        if found is None:
            found = self._stretches[key] = self._stretch()
        return found

    def stretch(self, pipeline: Simulated, at: int) -> Parts:
        """How many times as long each part of a row's time takes in one stage."""
        found = self._factors()
        index = self.pipelines.index(pipeline)
        store = self._resource(index, at)
        return 1.0, found[0], max(found[0], found[1 + index]), found[store]

    def _resource(self, index: int, at: int) -> int:
        """Where a stage's store stands among the resources: CPU, GILs, stores."""
        before = sum(len(p.workload.stages) for p in self.pipelines[:index])
        return 1 + len(self.pipelines) + before + at

    def _stretch(self) -> list[float]:
        """Find the factors with which no resource gives more than it has."""
        uses = [
            (count, parts, 1 + index, self._resource(index, at))
            for index, pipeline in enumerate(self.pipelines)
            for at, (count, parts) in enumerate(pipeline.users())
        ]
        factors = [1.0] * (1 + max((store for *_, store in uses), default=0))
        capacity = [self.cores, *[1.0] * (len(factors) - 1)]
        for _ in range(ROUNDS):
            used = [0.0] * len(factors)
            for count, (wait, free, held, store_s), gil, store in uses:
                cpu, lock = factors[0], max(factors[0], factors[gil])
                whole = wait + free * cpu + held * lock + store_s * factors[store]
                if whole > 0:
                    used[0] += count * (free + held) / whole
                    used[gil] += count * held * factors[0] / whole
                    used[store] += count * store_s / whole
            factors = [
                max(1.0, factor * (amount / most) ** 0.7 if amount > 0 else 1.0)
                for factor, amount, most in zip(factors, used, capacity, strict=True)
            ]
        return factors


class Simulated:
    """One rank's pipeline and trainer on a machine: what a tuner calls a plant.

    Args:
        machine: it runs on.
        workload: what it does.
        workers: of each stage to begin with.
        prefetch: of each stage to begin with.
    """

    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        workers: Sequence[int],
        prefetch: Sequence[int],
    ) -> None:
        self.machine = machine
        self.workload = workload
        self._stages = [
            _Stage(at, stage, count, ahead)
            for at, (stage, count, ahead) in enumerate(
                zip(workload.stages, workers, prefetch, strict=True)
            )
        ]
        self._trainer = _Trainer()
        self._seen_s = self._counted_s = machine.now_s
        self._step = 0
        machine.pipelines.append(self)
        machine.at(0.0, self._look)

    # What the tuner sees (`tuner.Plant`)

    @property
    def steps(self) -> int:
        """Batches handed over since the start."""
        return self._step

    def observe(self) -> Observation:
        """Return the window since the last call."""
        self._count()
        now_s = self.machine.now_s
        window_s, self._seen_s = now_s - self._seen_s, now_s
        segments, feeding = [], None
        for stage in self._stages:
            seen = stage.read(window_s, self.workload.batch_rows, feeding)
            segments.append(seen)
            feeding = seen.output
        held = sum(s.level * s.what.row_bytes for s in self._stages)
        return Observation(
            time_s=now_s,
            window_s=window_s,
            epoch=0,
            step=self._step,
            trainer=self._trainer.read(self.workload.batch_rows),
            segments=tuple(segments),
            held_bytes=int(held),
            peak_bytes=int(held),
        )

    def knobs(self) -> tuple[Knob, ...]:
        """Return workers and prefetch of every stage."""
        return tuple(knob for stage in self._stages for knob in stage.knobs(self._look))

    # What the machine asks

    @property
    def load(self) -> tuple[int, ...]:
        """How many of whose workers are at work, and whether the trainer is."""
        busy = [stage.busy for stage in self._stages]
        return (id(self.workload), *busy, self._trainer.runs)

    def users(self) -> list[tuple[int, Parts]]:
        """Who uses resources now: how many, and the parts of their time."""
        found = [(stage.busy, stage.parts()) for stage in self._stages]
        trainer = self.workload.trainer
        held = trainer.gap_s * trainer.gil
        free = max(0.0, trainer.gap_s * trainer.cores - held)
        rest = max(0.0, trainer.gap_s - held - free)
        return [*found, (self._trainer.runs, (rest, free, held, 0.0))]

    def change(self, workload: Workload) -> None:
        """Do something else from now on, with as many stages as before."""
        self.workload = workload
        for stage, what in zip(self._stages, workload.stages, strict=True):
            stage.become(what)

    # Events

    def _look(self) -> None:
        """Let everybody begin who can."""
        self._count()
        self._serve_trainer()
        for at, stage in reversed(list(enumerate(self._stages))):
            source = self._stages[at - 1] if at else None
            while rows := stage.startable(source, self.workload.batch_rows):
                stage.begin(rows, source)
                done = self._draw(at, stage, rows)
                self.machine.at(done.run_s, partial(self._end, stage, done))

    def _draw(self, at: int, stage: _Stage, rows: int) -> _Done:
        """Draw what a chunk of so many rows will have taken."""
        dice, what = self.machine.random, stage.what
        stretch = self.machine.stretch(self, at)
        draws = range(rows if what.heavy_share else 0)
        heavy = sum(dice.random() < what.heavy_share for _ in draws)
        units = rows + heavy * (what.heavy_factor - 1.0)
        units *= max(0.2, dice.gauss(1.0, what.spread / rows**0.5))
        row_s = sum(map(mul, stage.parts(), stretch))
        return _Done(rows, units * row_s, units * what.cpu_s)

    def _end(self, stage: _Stage, done: _Done) -> None:
        self._count()
        stage.end(done)
        self._look()

    def _serve_trainer(self) -> None:
        last, rows = self._stages[-1], self.workload.batch_rows
        if self._trainer.runs or last.level < rows:
            return
        last.level -= rows
        self._step += 1
        self._trainer.begin(self.machine.now_s)
        what: Trainer = self.workload.trainer
        gap_s = what.gap_s * max(0.2, self.machine.random.gauss(1.0, what.spread))
        busy = min(1.0, what.cores + what.gil)
        slow = 1.0 + busy * (self.machine.cpu_stretch() - 1.0)
        self.machine.at(gap_s * slow, self._end_step)

    def _end_step(self) -> None:
        self._count()
        self._trainer.end(self.machine.now_s)
        self._look()

    def _count(self) -> None:
        """Add up the time since the last event."""
        passed_s = self.machine.now_s - self._counted_s
        self._counted_s = self.machine.now_s
        if passed_s > 0:
            for at, stage in enumerate(self._stages):
                stage.pass_time(
                    passed_s, self._stages[at - 1] if at else None, self.workload
                )


class _Done(NamedTuple):
    """What a chunk has taken."""

    rows: int
    run_s: float
    cpu_s: float


class _Trainer:
    """The trainer's two states, and its clock."""

    def __init__(self) -> None:
        self.runs = 0
        """1 in its own part of a step, 0 where it waits."""
        self._since_s = 0.0
        self._steps = 0
        self._wait_s = self._gap_s = 0.0
        self._waited_s = 0.0
        """Before the step under way."""

    def begin(self, now_s: float) -> None:
        """It is given a batch."""
        self._waited_s = now_s - self._since_s
        self._since_s, self.runs = now_s, 1

    def end(self, now_s: float) -> None:
        """It asks for the next."""
        self._wait_s += self._waited_s
        self._gap_s += now_s - self._since_s
        self._since_s, self.runs = now_s, 0
        self._steps += 1

    def read(self, batch_rows: int) -> TrainerObservation:
        """Return the steps that ended since the last reading."""
        seen = TrainerObservation(
            self._steps, self._steps * batch_rows, self._wait_s, self._gap_s
        )
        self._steps, self._wait_s, self._gap_s = 0, 0.0, 0.0
        return seen


class _Stage:
    """A stage at run time: its workers, and the rows that wait behind it."""

    def __init__(self, at: int, what: Stage, workers: int, prefetch: int) -> None:
        self.what = what
        self.name = f"Map(ID:{at}) {what.name}"
        self.workers = min(workers, what.most_workers)
        self.prefetch = prefetch
        self.busy = 0
        """Workers with a chunk in hand; those asked to go finish it."""
        self.level = 0
        """Rows that wait behind it."""
        self._in_hand = 0
        self._rows_beside: dict[int, tuple[Parts, int]] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows = 0
        self._worker_s = self._run_s = self._cpu_s = 0.0
        self._input_s = self._credit_s = 0.0
        self._area = self._empty_s = self._full_s = 0.0

    def become(self, what: Stage) -> None:
        """Do something else from now on."""
        self.what = what
        self._rows_beside.clear()

    def parts(self) -> Parts:
        """Return what a row's time consists of, undisturbed by other stages."""
        return self._row()[0]

    def _row(self) -> tuple[Parts, int]:
        """Return these parts beside workers of its own, and how many rows to lease."""
        what, busy = self.what, max(1, self.busy)
        found = self._rows_beside.get(busy)
        if found is None:
            computing = what.cpu_s * (1 - what.gil), what.cpu_s * what.gil
            waiting = what.wait_s + what.queueing_s(busy)
            parts = (waiting, *computing, what.transfer_s)
            found = parts, max(1, int(LEASE_S / max(sum(parts), 1e-9)))
            self._rows_beside[busy] = found
        return found

    def startable(self, source: _Stage | None, batch_rows: int) -> int:
        """How many rows a worker may begin with now; 0: none is free, or none may."""
        if self.busy >= self.workers:
            return 0
        rows = min(self._row()[1], batch_rows)
        ahead = self.level + self._in_hand - self.workers * rows
        if ahead >= self.prefetch * batch_rows:
            return 0
        return rows if source is None else min(rows, source.level)

    def begin(self, rows: int, source: _Stage | None) -> None:
        """Give a worker so many rows."""
        self.busy += 1
        self._in_hand += rows
        if source is not None:
            source.level -= rows

    def end(self, done: _Done) -> None:
        """Take a chunk back from its worker."""
        self.busy -= 1
        self._in_hand -= done.rows
        self.level += done.rows
        self._rows += done.rows
        self._run_s += done.run_s
        self._cpu_s += done.cpu_s

    def pass_time(
        self, passed_s: float, source: _Stage | None, workload: Workload
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
            level -= level % rows  # the trainer is shown whole batches
        self._area += level * passed_s
        self._empty_s += passed_s * (level == 0)
        self._full_s += passed_s * (level >= self.prefetch * rows)

    def read(
        self, window_s: float, batch_rows: int, feeding: ConnectorObservation | None
    ) -> SegmentObservation:
        """Return what was counted since the last reading."""
        length_s = window_s or 1.0
        occupancy = self._area / length_s
        output = ConnectorObservation(
            occupancy=occupancy,
            capacity=self.prefetch * batch_rows,
            empty=self._empty_s / length_s,
            full=self._full_s / length_s,
            nbytes=occupancy * self.what.row_bytes,
        )
        seen = SegmentObservation(
            name=self.name,
            queue_name=self.name,
            executor="thread",
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
        return seen

    def knobs(self, turned: Callable[[], None]) -> tuple[Knob, Knob]:
        """Return its two knobs; `turned` lets those begin who may now."""

        def hire(count: int) -> None:
            self.workers = count
            turned()

        def reach(batches: int) -> None:
            self.prefetch = batches
            turned()

        most = self.what.most_workers
        return (
            Knob(
                self.name,
                "num_parallel_workers",
                lower=1,
                upper=most,
                tunable=True,
                read=lambda: self.workers,
                write=hire,
            ),
            Knob(
                self.name,
                "prefetch_size",
                lower=1,
                upper=MOST_PREFETCH,
                tunable=True,
                read=lambda: self.prefetch,
                write=reach,
            ),
        )
