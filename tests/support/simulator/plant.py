"""A simulated pipeline and its trainer, as a `Plant` of the tuner's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from typing import NamedTuple

from penstock.engine.observe.observation import Knob, Observation, TrainerObservation
from support.simulator.machine import Machine, Parts, Ranks
from support.simulator.station import Done, Station
from support.simulator.workload import SimulatedStage, Trainer, Workload

SLICE_S = 0.1
"""Time after which the load of the machine is looked up again, in seconds: a machine
that was crowded when a row began may not be crowded when it ends."""


class SimulatedChunk(NamedTuple):
    """The chunk that a worker is working on."""

    rows: int
    units: float
    """The work left in it, in ordinary rows."""
    cpu_s: float
    """CPU time of the whole chunk."""


class Simulated:
    """One rank's pipeline and trainer on a machine, as a `Plant` of the tuner's.

    Args:
        machine: the machine it runs on.
        workload: its stages and its trainer.
        workers: workers of each stage at the start.
        prefetch: batches that each stage may be ahead at the start.
        ranks: the ranks it belongs to; None: it trains alone.
    """

    def __init__(
        self,
        machine: Machine,
        workload: Workload,
        workers: Sequence[int],
        prefetch: Sequence[int],
        ranks: Ranks | None = None,
    ) -> None:
        self.machine = machine
        self._ranks = ranks or Ranks(1)
        self.workload = workload
        self._stages = [
            Station(at, stage, count, ahead)
            for at, (stage, count, ahead) in enumerate(
                zip(workload.stages, workers, prefetch, strict=True)
            )
        ]
        self._trainer = _Trainer()
        self._seen_s = self._counted_s = machine.now_s
        self._step = 0
        self.calm = False
        self.tried: Mapping[str, str] = {}
        machine.pipelines.append(self)
        machine.at(0.0, self._look)

    # For the tuner (`tuner.Plant`)

    @property
    def steps(self) -> int:
        """Batches handed over."""
        return self._step

    @property
    def trained(self) -> TrainerObservation:
        total = self._trainer.total(self.workload.batch_rows)
        return replace(total, steps=self._step)

    def observe(self) -> Observation:
        self._count()
        now_s = self.machine.now_s
        window_s, self._seen_s = now_s - self._seen_s, now_s
        segments, feeding = [], None
        for stage in self._stages:
            segment = stage.read(window_s, self.workload.batch_rows, feeding)
            segments.append(segment)
            feeding = segment.output
        held_bytes = sum(s.level * s.what.row_bytes for s in self._stages)
        return Observation(
            time_s=now_s,
            window_s=window_s,
            epoch=0,
            step=self._step,
            trainer=self._trainer.read(self.workload.batch_rows),
            segments=tuple(segments),
            held_bytes=int(held_bytes),
            peak_bytes=int(held_bytes),
            regime=self.workload.regime,
            gil_held=self._gil_held(window_s),
            process_cpu_s=sum(s.cpu_s for s in segments if s.executor != "process"),
        )

    def knobs(self) -> tuple[Knob, ...]:
        return tuple(knob for stage in self._stages for knob in stage.knobs(self._look))

    def _gil_held(self, window_s: float) -> float | None:
        """Return the share of the window with the GIL held, if a stage is movable."""
        if not any(stage.what.movable for stage in self._stages):
            return None
        held_s = sum(stage.take_held_s() for stage in self._stages)
        return min(1.0, held_s / (window_s or 1.0))

    # For the machine (`machine.Tenant`)

    @property
    def load(self) -> tuple[int, ...]:
        busy = [stage.busy for stage in self._stages]
        return (id(self.workload), *busy, self._trainer.runs)

    @property
    def depth(self) -> int:
        return len(self._stages)

    def users(self) -> list[tuple[int, Parts]]:
        users = [(stage.busy, stage.parts()) for stage in self._stages]
        trainer = self.workload.trainer
        gil_s = trainer.gap_s * trainer.gil
        free = max(0.0, trainer.gap_s * trainer.cores - gil_s)
        rest = max(0.0, trainer.gap_s - gil_s - free)
        return [*users, (self._trainer.runs, (rest, free, gil_s, 0.0))]

    def change(self, workload: Workload) -> None:
        """Switch to another workload with the same number of stages."""
        self.workload = workload
        for stage, what in zip(self._stages, workload.stages, strict=True):
            stage.become(what)

    # Events

    def _look(self) -> None:
        """Start all work that can start now."""
        self._count()
        self._serve_trainer()
        for at, stage in reversed(list(enumerate(self._stages))):
            source = self._stages[at - 1] if at else None
            while rows := stage.startable(source, self.workload.batch_rows):
                stage.begin(rows, source)
                self._go_on(at, self._draw(stage.what, rows), 0.0)

    def _draw(self, what: SimulatedStage, rows: int) -> SimulatedChunk:
        """Draw the work in a chunk of `rows` rows."""
        dice = self.machine.random
        draws = range(rows if what.heavy_share else 0)
        heavy = sum(dice.random() < what.heavy_share for _ in draws)
        units = rows + heavy * (what.heavy_factor - 1.0)
        units *= max(0.2, dice.gauss(1.0, what.spread / rows**0.5))
        return SimulatedChunk(rows, units, units * what.cpu_s)

    def _go_on(self, at: int, chunk: SimulatedChunk, run_s: float) -> None:
        """Work on a chunk for one slice of time at the machine's present load."""
        self._count()
        stage = self._stages[at]
        stretch = self.machine.stretch(self, at)
        unit_s = sum(map(mul, stage.parts(), stretch))
        left_s = chunk.units * unit_s
        if left_s <= SLICE_S:
            done = Done(chunk.rows, run_s + left_s, chunk.cpu_s)
            self.machine.at(left_s, partial(self._end, stage, done))
            return
        rest = chunk._replace(units=chunk.units - SLICE_S / unit_s)
        self.machine.at(SLICE_S, partial(self._go_on, at, rest, run_s + SLICE_S))

    def _end(self, stage: Station, done: Done) -> None:
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
        self._ranks.arrive(self._train)

    def _train(self) -> None:
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
        """Account for the time since the last event."""
        passed_s = self.machine.now_s - self._counted_s
        self._counted_s = self.machine.now_s
        if passed_s > 0:
            for at, stage in enumerate(self._stages):
                stage.pass_time(
                    passed_s, self._stages[at - 1] if at else None, self.workload
                )


class _Trainer:
    """The trainer's two states, and its clock."""

    def __init__(self) -> None:
        self.runs = 0
        """1 in its own part of a step, 0 while it waits."""
        self._since_s = 0.0
        self._steps = 0
        self._wait_s = self._gap_s = 0.0
        # The wait before the present step.
        self._waited_s = 0.0
        # All that was read.
        self._read = TrainerObservation()

    def begin(self, now_s: float) -> None:
        """It gets a batch."""
        self._waited_s = now_s - self._since_s
        self._since_s, self.runs = now_s, 1

    def end(self, now_s: float) -> None:
        """It asks for the next batch."""
        self._wait_s += self._waited_s
        self._gap_s += now_s - self._since_s
        self._since_s, self.runs = now_s, 0
        self._steps += 1

    def read(self, batch_rows: int) -> TrainerObservation:
        """Return the steps that ended since the last reading."""
        before, self._read = self._read, self.total(batch_rows)
        self._steps, self._wait_s, self._gap_s = 0, 0.0, 0.0
        return self._read - before

    def total(self, batch_rows: int) -> TrainerObservation:
        """Return all steps that ended."""
        return self._read + TrainerObservation(
            self._steps, self._steps * batch_rows, self._wait_s, self._gap_s
        )
