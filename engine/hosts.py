"""Where a run's batches are made: by an engine with its feed, or by the trainer alone.

A trainer that is its own only worker does what torch's loader does with
`num_workers=0`, at the same cost: no queue, no lock, no thread, and nothing made ahead.
A pipeline of one segment starts so if nobody asked for workers, and may return to it if
workers turn out to be slower.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import asdict

from ..errors import CLOSED, PenstockError
from .auto_executor import SOON_NS, WORTH_START_NS, ResolvedExecutor, resolve
from .core.in_flight import ByteBudget
from .core.metrics import ConnectorObservation
from .engine import Engine
from .far.pools import FarPools
from .feed import Delivery, DrawnFeed, Feed, PlannedFeed, RepackFeed
from .makers import BatchMeter, DrawnMaker, PlanMaker, maker_of
from .observe.knob import Knob, Restriction
from .observe.observation import (
    Move,
    MoveOutcome,
    Observation,
    SegmentObservation,
    parts_of,
    ratio,
)
from .observe.trainer_meter import TrainerMeter
from .plan import Cursor
from .recipe import Recipe
from .witness.witness import Witness
from .workers import Kind

NOTE_NS = 1_000_000_000
"""A reading a second is enough for figures over the last ten seconds."""


LOOKS = 8
"""For one in this many batches, estimate what a reader beside the trainer saves."""
MIN_GAIN = 0.1
"""Share of a step that reading beside the trainer must save: there is no way back."""
GIL_COST = 0.3
"""A thread that shares the GIL with the trainer needs this share more CPU time."""


class Host(ABC):
    """What makes the batches, with its feed.

    `next`, `begin`, `glance` and `cursor` belong to the trainer's thread. Any thread
    may call `read` and `knobs`, at the same time.
    """

    engine: Engine | None = None
    """The engine; None if the trainer makes the batches by itself."""

    _feed: Feed | DrawnMaker | PlanMaker
    moves: deque[Move]
    """The latest moves of its work between kinds of workers, and their reasons."""
    kind = "trainer"  # or "process", if all of its work is in worker processes

    def __init__(self) -> None:
        self._noted_ns = time.perf_counter_ns()

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        return self._feed.cursor

    @abstractmethod
    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, not yet stamped; None at its end.

        Raises:
            Exception: as `PlannedFeed.next`, or what a sampler raised.
            WorkerError: a process that was needed died repeatedly.
        """

    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`, dropping everything in flight for other positions."""
        self._feed.begin(cursor)

    @abstractmethod
    def read(self) -> Observation:
        """Return the window since the run began."""

    def glance(self, now_ns: int) -> Observation | None:
        """Return totals about once a second, if they cost the trainer nothing."""
        if now_ns - self._noted_ns < NOTE_NS:
            return None
        self._noted_ns = now_ns
        return self.read()

    def knobs(self) -> tuple[Knob, ...]:
        """Return everything that may be set."""
        return ()

    def is_free(self) -> bool:
        """Whether no thread, this one included, is stuck holding a lock of ours."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Stop everything. Idempotent in each of its steps."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.cursor}>"


class TrainerHost(Host):
    """One engine with its feed.

    Args:
        recipe: what to run.
        byte_budget: the bytes it may hold.
        cursor: where the first batch starts.
        trainer: the meter of whoever calls `next`.
        feed: a feed that has begun, and continues with this engine; None makes one.
    """

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        cursor: Cursor,
        trainer: TrainerMeter,
        feed: PlannedFeed | RepackFeed | None = None,
    ) -> None:
        super().__init__()
        step = cursor.step if feed is None else feed.engine.head
        engine: Engine | None = None
        try:
            engine = Engine(recipe, byte_budget, step, trainer=trainer, pools=FarPools)
            self.engine: Engine = engine
            planned = RepackFeed if recipe.repack else PlannedFeed
            make_feed = DrawnFeed if recipe.drawn else planned
            self._feed: Feed = feed or make_feed(engine, cursor)
            if feed is None:
                self._feed.begin(cursor)
            else:
                engine.begin_epoch(feed.cursor.epoch)
            engine.__enter__()
            self.moves = engine.segments[0].moves
            if feed is not None:  # only now: had it failed, the maker would go on
                feed.engine = engine
        except BaseException:  # Ctrl-C, and nobody knows of this engine yet
            if engine is not None:
                engine.close()
            raise

    def next(self) -> Delivery | None:
        delivery = self._feed.next()
        if delivery is None:
            self.engine.end_epoch()
        return delivery

    def read(self) -> Observation:
        return self.engine.monitor.read()

    def knobs(self) -> tuple[Knob, ...]:
        return tuple(k for segment in self.engine.segments for k in segment.knobs())

    def is_free(self) -> bool:
        return self.engine.is_free()

    def close(self) -> None:
        self.engine.close()


class DirectHost(Host):
    """A host without an engine: the trainer makes its batches.

    Args:
        recipe: a recipe of one segment.
        cursor: where the first batch starts.
        byte_budget: must hold one batch, although a finished batch is the trainer's.
        trainer: the meter of whoever calls `next`.

    Raises:
        BudgetError: from `next`, if the budget cannot hold one batch.
        PenstockError: from `next`, once it is closed.
    """

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        cursor: Cursor,
        trainer: TrainerMeter,
    ) -> None:
        super().__init__()
        self._byte_budget = byte_budget
        self._closed = False
        (self.segment,) = recipe.segments
        self._plan, self._drawn, self._trainer = recipe.plan, recipe.drawn, trainer
        self._meter = BatchMeter(len(self.segment.program.operations))
        self._feed = self.maker = maker_of(recipe, cursor, self._meter)
        self._batch_rows = 0
        self._kept = recipe.options.persistent_workers
        # What earlier epochs took.
        self._before_ns = 0
        self._saved_s = 0.0
        """Seconds that reading beside the trainer would have saved so far."""
        self.undecided = self.segment.executor == "auto" or bool(self.segment.fixed)
        """Whether nobody knows yet if workers would pay."""
        self.stays = self.segment.stays
        """Why the trainer goes on making the batches; empty if it need not."""
        self._witness = Witness(self.segment.subjects)
        self._collate = Witness([recipe.buffers.collate])
        self.moves = deque()

    @property
    def s_per_row(self) -> float:
        """Seconds that a sample takes the trainer; 0 if unknown."""
        rows, run_ns = self._meter.tally
        return run_ns / 1e9 / rows if rows else 0.0

    def begin(self, cursor: Cursor) -> None:
        if self.undecided and not (self.stays or self.segment.iterable):
            suited = self._suited(WORTH_START_NS)
            if suited is not None and suited.executor != "inline":
                self.stays = Restriction.SHORT.format(suited.reason)
        self._before_ns = self._meter.run_ns
        super().begin(cursor)

    def next(self) -> Delivery | None:
        if self._closed:
            raise PenstockError(CLOSED)
        if self._meter.batches:
            delivery = self._feed.next()
        else:
            with self._witness:
                delivery = self._feed.next()
            if delivery is not None:
                self._witness.note_made(delivery.data, ())
        if self.undecided and self.segment.iterable:
            self._saved_s += min(self._trainer.gap_s, self._meter.last_ns / 1e9)
        if delivery is not None and delivery.plan.n_rows > self._batch_rows:
            rows = self._batch_rows = delivery.plan.n_rows
            self._byte_budget.check_fits(rows * self._meter.sample_bytes, rows)
        return delivery

    def found(self) -> Kind | None:
        """Return the kind of workers that `auto` resolves to, or None for now.

        It resolves once, by the first batches and by what was observed of them.
        """
        if not self.undecided or (self.segment.iterable and not self._overlaps()):
            return None
        spent_ns = self._meter.run_ns - self._before_ns
        found = self._suited(WORTH_START_NS if self._kept else spent_ns)
        if found is None:
            return None
        self.undecided, self.stays = False, self.segment.stays
        if found.executor == "inline":
            self._note("inline", "stays", found.reason)
            return None
        if self.segment.fixed:
            zero = Restriction.ZERO.format(found.reason, self.segment.fixed)
            self.stays = self.verdict(found.executor) or zero
            self._note("inline", "stays", self.stays)
            return None
        if not self.verdict(found.executor):
            self._note(found.executor, "moved", found.reason)
        return found.executor

    def _suited(self, epoch_ns: int) -> ResolvedExecutor | None:
        """Return what suits the work, if loading an epoch takes so long."""
        meter, rows, threads = self._meter, self._batch_rows, self.segment.thread_safe
        # With threads, the trainer still runs the `collate_fn`.
        collates = threads or not self.collate_moves
        tally = meter.samples_tally if collates else meter.tally
        if meter.batches == 1 and meter.usual_ns * rows > SOON_NS:
            tally = rows, meter.usual_ns * rows
        return resolve(*tally, 0, rows, thread_safe=threads, epoch_ns=epoch_ns)

    def _overlaps(self) -> bool:
        """Whether one reader beside the trainer would save it time.

        An iterable can have only one. It reads while the trainer computes, so it saves
        at most the trainer's own part of a step, and at most the time of a batch, even
        if the trainer was away for long.
        """
        if self._meter.batches % LOOKS:
            return False
        saved_s, wait_s = self._saved_s, self._trainer.read().wait_s
        cost_s = GIL_COST * self._meter.read()[0].cpu_s
        return saved_s - cost_s >= MIN_GAIN * (saved_s + wait_s)

    @property
    def collate_moves(self) -> bool:
        """Whether worker processes may call the `collate_fn`: it keeps no state."""
        return self._collate.repeats()

    def verdict(self, kind: Kind) -> str:
        """Return why such workers would make other samples; empty if unknown."""
        drawn, witness = self._drawn, self._witness
        witness.drew = self.maker.drew and drawn is None
        if self.segment.iterable and not witness.drew:
            return ""  # a thread continues with the existing iterator
        watches = drawn is not None and not drawn.most
        return witness.verdict(kind) or (Restriction.SAMPLER if watches else "")

    def _note(self, new: str, outcome: MoveOutcome, reason: str) -> None:
        """Record where the work goes, or why it stays."""
        name = self.segment.name
        self.moves.append(Move(name, "inline", new, outcome, reason))

    def read(self) -> Observation:
        trainer, segment = self._trainer, self.segment
        work, costs = self._meter.read()
        seen, now_ns = trainer.read(), time.perf_counter_ns()
        window_s = trainer.window_s(now_ns, seen)
        empty = ratio(work.worker_s, window_s)
        told = SegmentObservation(
            name=segment.name,
            queue_name=segment.queue_name,
            executor="inline",
            num_parallel_workers=1,
            prefetch_size=1,
            **asdict(work),
            output=ConnectorObservation(0.0, self._batch_rows, empty),
            moves=tuple(self.moves),
            run_queue_s=self._meter.queued_s,
            parts=parts_of(segment.program.stages, costs, (*segment.storable, None)),
            max_workers=segment.bounds[1],
            iterable=segment.iterable,
            alive=1,
            fixed=segment.fixed,
            stays=self.stays,
            held="" if segment.tunable else Restriction.PINNED,
        )
        return Observation(
            time_s=now_ns / 1e9,
            window_s=window_s,
            epoch=trainer.epoch,
            step=trainer.step,
            trainer=seen,
            segments=(told,),
            regime=self._plan.regime(self.cursor.step),
            process_cpu_s=trainer.process_cpu_s,
        )

    def close(self) -> None:
        """Make no more batches, and release an iterator that was begun."""
        self._closed = True
        self.segment.program.restart()
