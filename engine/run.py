"""A run: what makes batches, from the first one to the close."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError, WorkerError
from .batch.device import DeviceStage, ToDevice, in_parts
from .core.in_flight import ByteBudget
from .feed import Delivery, EngineHost, Faults, Host, PlannedFeed, RepackFeed
from .in_children import (
    check_may_leave,
    crowded,
    has_cores_to_spare,
    in_children,
    is_of_worker,
    why_stays,
)
from .makers import DirectHost
from .observe.observation import Knob, Move, Observation, TrainerObservation
from .plan import BatchPlan, Cursor
from .recipe import Recipe, SegmentRecipe
from .segment import Segment, as_now
from .trainer_cost import WARM_STEPS, ContentionMeter, TrainerMeter
from .witness.witness import ChangeWatch, Witness
from .workers import Kind

if TYPE_CHECKING:
    from .to_device.lane import Lane

# CUDA modules are loaded only if there is such a device to copy to.


# The name of the engine as a whole in the log.
NAME = "Pipeline"
# Readings kept for `recent`.
HISTORY = 10
# Minimum time between two of them, in seconds: enough for the last ten seconds.
NOTE_S = 1.0
# A longer pause between two epochs, in seconds, means that the trainer did something
# else.
PAUSE_S = 1.0


class Run:
    """What iterating a pipeline starts, and keeps between epochs.

    `next` and `begin` belong to the trainer's thread, and `observe`, `knobs` and
    `trained` to the tuner's; any thread may call `close`.

    Args:
        recipe: what to run.
        byte_budget: the bytes it may hold, shared with other pipelines.
        cursor: where the first batch starts.

    Raises:
        Exception: the engine, or its workers, cannot be started.
    """

    # Counts the samples that fail, whichever host makes them.
    _faults: Faults | None = None

    def __init__(self, recipe: Recipe, byte_budget: ByteBudget, cursor: Cursor) -> None:
        self._lane, self._to_device = ways_to(recipe.device)
        self._parts = recipe.microbatches
        self._trainer, self._caches = TrainerMeter(), recipe.caches
        for cache in self._caches:
            cache.open()  # before any process forks, so that all find it
        self._home, self._byte_budget = recipe, byte_budget
        # Where all work is: in worker processes, or wherever each segment's is.
        self._kind = "process" if recipe.options.host == "process" else "trainer"
        # What runs now; `_home` is the same in the trainer's process.
        self._recipe = in_children(recipe, 1) if self._kind == "process" else recipe
        alone = recipe.direct and self._lane is None
        # The recipe from which either the trainer or workers make batches.
        is_auto = recipe.segments[0].executor == "auto"
        self._direct = recipe if alone and is_auto else None
        # The workers that the knob requests; None: no change.
        self._workers: Kind | None = None
        self.contention = ContentionMeter(
            one_by_one=self._lane is None and not recipe.repack
        )
        # Why the engine may not move to another process; empty if it may.
        self._stays = why_stays(recipe)
        # Whether threads have yet to load, which processes then replace.
        self._unspread = not self._stays and has_cores_to_spare(recipe)
        # What the tuner has found of more workers, by the name of their segment.
        self.tried: Mapping[str, str] = {}
        self._collate = Witness([recipe.buffers.collate])
        # The segments whose workers nobody asked for: if they load elsewhere, the
        # batches must still be those that the trainer would make.
        self._auto_segments = {
            segment.name: segment
            for segment in recipe.segments
            if segment.executor == "auto" and not recipe.iterable
        }
        # The watch over what those segments work with, once one has moved.
        self._watch: ChangeWatch | None = None
        self._moves: tuple[Move, ...] = ()
        self._closed = False
        self._history: deque[tuple[Host, Observation]] = deque(maxlen=HISTORY)
        self._begin(cursor, alone=alone)

    def _begin(self, cursor: Cursor, *, alone: bool) -> None:
        host: Host | None = None
        try:
            host = self._observed_host = self._new_host(cursor, alone=alone)
            self._settle_in(host)
            # The host that the knob requests; the trainer's thread moves the engine.
            self._wanted_kind, self._before = self._kind, self.read()
            # State at the first batch of a host, for which workers had to start.
            self._warm: tuple[Host | None, Observation] = None, self._before
            self._note(host.read())
        except BaseException:  # Ctrl-C, and nobody knows of this run yet
            if host is not None:
                host.close()
            raise

    def _new_host(self, cursor: Cursor, *, alone: bool) -> Host:
        kind = DirectHost if alone else EngineHost
        return kind(self._recipe, self._byte_budget, cursor, self._trainer)

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts."""
        return self.host.cursor if self._lane is None else self._lane.cursor(self.host)

    def begin(self, cursor: Cursor) -> None:
        """Continue at `cursor`; free if prefetching is already there."""
        begun_ns = time.perf_counter_ns()
        self.contention.reset()
        if self._lane is not None:
            self._lane.drop()
        if self._watch is not None and self._watch.changed() is not None:
            # Workers get the present data; those of one epoch are forked again anyway.
            if self._recipe.options.persistent_workers:
                self._recipe = replace(self._recipe, segments=self._segments_now())
                self._start_again(cursor)
            self._watch.renew()
        self.host.begin(cursor)
        reading, (_, last) = self.host.read(), self._history[-1]
        if reading.time_s - last.time_s > PAUSE_S:
            self._history.clear()
        self._note(reading)
        self._trainer.begin_ns = time.perf_counter_ns() - begun_ns

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch; None at its end. Measured.

        Raises:
            Exception: as `Host.next`, `ToDevice` and `in_parts`.
        """
        trainer = self._trainer
        trainer.ask(time.perf_counter_ns())
        alone = self.alone
        if alone is None or alone.undecided:
            self.contention.asked(trainer.gap_s)
        watch = self._watch
        delivery = self._taken() if watch is None else self._watched(watch)
        if delivery is None:
            self.contention.reset()
            trainer.stop()
            self._note(self.host.read())
            return None
        (data, plan), host_data, copy_ns = delivery, delivery.data, 0
        self._follow(data, plan)
        if self.alone is None:
            self._begin_watch()
        if self._to_device is not None:
            copy_ns = -time.perf_counter_ns()
            data = self._to_device(data)
            copy_ns += time.perf_counter_ns()
        elif self._lane is not None:
            copy_ns = self._lane.spent_ns
        if self._parts is not None:
            data = in_parts(data, self._parts)
        if data is not host_data:
            delivery = Delivery(data, plan)
        left_ns = time.perf_counter_ns()
        trainer.get(left_ns, plan, copy_ns)
        # Only now: a reading between a batch's wait and its count would tear the step.
        if self._warm[0] is not (host := self.host):
            # The next step begins here, before the counters are read.
            self._warm = host, host.read().since(left_ns / 1e9)
            self._note(self._warm[1])
        elif left_ns / 1e9 - self._history[-1][1].time_s >= NOTE_S:
            self._note(host.read())
        return delivery

    def _follow(self, data: Any, plan: BatchPlan) -> None:
        """Move the engine if a knob requests it; otherwise measure what it costs."""
        kind, alone = self._workers, self.alone
        if alone is not None:
            if alone.undecided:
                self.contention.given(None, plan)
                kind = kind or alone.chosen_kind()
            if kind is not None and self._direct is not None:
                self._hand_to(alone, self._direct, kind)
            return
        if self._unspread and self.host.engine is not None:
            self._spread(self.host.engine.segments, plan)
        if kind == "inline":
            self._take_back()
        elif self._wanted_kind == self._kind:
            engine = self.host.engine
            self.contention.given(None if engine is None else engine.rest, plan)
        else:
            self.contention.reset()
            try:
                host = self._moved_host(data)
            except Exception as error:  # noqa: BLE001 whatever the user's functions raise
                self._stays = str(error) or type(error).__name__
                self._wanted_kind = self._kind
                self._moves += (
                    Move(
                        NAME, "trainer", "process", "failed", self._stays, knob="host"
                    ),
                )
            else:
                self._settle_in(host)

    def _spread(self, segments: Sequence[Segment], plan: BatchPlan) -> None:
        """Have processes load from now on, if threads have just begun to."""
        if any(segment.undecided for segment in segments):
            return
        self._unspread = False
        ours = (s for s in segments if s.recipe.name in self._auto_segments)
        batch_s = plan.n_rows * sum(s.recipe.alone_s_per_row for s in segments)
        why = crowded(self._home, batch_s)
        if not why or all(s.executor != "thread" for s in ours):
            return
        self._wanted_kind = "process"
        self._moves += (
            Move(NAME, "trainer", "process", "moved", reason=why, knob="host"),
        )

    def _start_again(self, cursor: Cursor, *, alone: bool = False) -> Host:
        """Close the host, and start one that continues at `cursor`."""
        self.host.close()
        host = self._new_host(cursor, alone=alone)
        self._settle_in(host)
        return host

    def _settle_in(self, host: Host) -> None:
        """Let a host make the batches from now on."""
        host.kind = self._kind  # while the old one closes, readings are still its own
        self.host: Host = host
        if isinstance(host.feed, PlannedFeed | RepackFeed):
            self._faults = host.feed.faults = self._faults or host.feed.faults
        # The same host, if the trainer makes the batches by itself.
        self.alone = host if isinstance(host, DirectHost) else None
        self.contention.forget()
        if self._closed:  # by another thread, which may have closed the old one
            host.close()

    def _hand_to(self, host: DirectHost, direct: Recipe, kind: Kind) -> None:
        """Let workers make the batches from now on; stay if they cannot."""
        self._workers = None
        if kind == "inline":
            return
        if why := host.verdict(kind):
            host.stay(why)
            self._direct = None
            return
        segment = replace(
            direct.segments[0], executor=kind, alone_s_per_row=host.s_per_row
        )
        self._recipe = replace(direct, segments=(segment,))
        try:
            workers = EngineHost(
                self._recipe,
                self._byte_budget,
                host.cursor,
                self._trainer,
                feed=host.maker.feed,
            )
        except Exception as error:  # noqa: BLE001 whatever the user's functions raise
            host.stay(str(error) or type(error).__name__, kind, "failed")
            self._direct = None
            return
        workers.moves.extend(host.moves)
        if host.collate.repeats() and not direct.repack:
            workers.engine.segments[0].connector.keeps_nothing()
        if direct.iterable:
            self._direct = None  # its reader keeps its place, and cannot come back
        self._settle_in(workers)

    def _take_back(self) -> None:
        """Let the trainer make the batches again."""
        self._workers = None
        host, engine = self.host, self.host.engine
        if self._direct is None or engine is None:
            return
        self._kind = "trainer"
        (now,), (direct,) = as_now(engine.segments), self._direct.segments
        self._watch = None
        segment = replace(now, executor="inline", program=direct.program)
        self._direct = self._recipe = replace(self._direct, segments=(segment,))
        self._start_again(host.cursor, alone=True)
        self._wanted_kind = self._kind  # last: no later request may undo it

    def _begin_watch(self) -> None:
        """Watch what the loop does with the data, if a segment has moved by itself."""
        engine, autos = self.host.engine, self._auto_segments
        if self._watch or not autos or engine is None:
            return
        here = all(
            segment.executor == "inline" or segment.recipe.name not in autos
            for segment in engine.segments
        )
        if self._kind == "process" or not here:
            subjects = [subject for s in autos.values() for subject in s.subjects]
            collate = self._collate
            # One that keeps state runs in the trainer, and changes by itself.
            subjects += collate.subjects if collate.repeats() else ()
            self._watch = ChangeWatch(subjects)

    def _taken(self) -> Delivery | None:
        lane = self._lane
        return self.host.next() if lane is None else lane.next(self.host)

    def _watched(self, watch: ChangeWatch) -> Delivery | None:
        """Return the next batch, made of the data as the loop has left it."""
        cursor, why = self._next_cursor(), ""
        try:
            delivery = self._taken()
            if delivery is None:
                return None
        except (BudgetError, WorkerError):
            raise
        except Exception as error:
            if self._closed or not is_of_worker(error):
                raise
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            why = (
                f"workers could not make a batch ({text}); the trainer makes it, and"
                " all from here on, as without workers"
            )
        if (path := watch.changed()) is not None:
            why = (
                f"`{path}` has changed since workers load: batches made ahead are made"
                " again, and the trainer loads from here on, so that each change shows"
                " in the next batch"
            )
        if why:
            # Out of the handler: the trainer's own error has no other one before it.
            self._come_home(cursor, why)
            return self._taken()
        return delivery

    def _next_cursor(self) -> Cursor:
        """Return where the loop goes on.

        A state leads to a batch that has failed; the loop has its error, and goes on
        after it.
        """
        recipe, engine, cursor = self._recipe, self.host.engine, self.cursor
        own = recipe.repack or recipe.drawn or self._lane is not None
        if own or engine is None or cursor.step == engine.head:
            return cursor
        return recipe.planned.cursor_after(recipe.planned.batch(engine.head - 1))

    def _come_home(self, cursor: Cursor, why: str) -> None:
        """Have the trainer make all batches from here on."""
        autos = self._auto_segments
        self._watch, self._auto_segments, self._stays = None, {}, why
        if self._lane is not None:
            self._lane.drop()
        away = self._kind == "process"
        segments = self._home.segments if away else self._segments_now()
        of_ours = [s for s in segments if s.name in autos]
        segment = next((s for s in of_ours if s.executor != "inline"), of_ours[0])
        home = tuple(
            replace(autos[s.name], executor="inline") if s.name in autos else s
            for s in segments
        )
        direct, self._direct, self._workers = self._direct, None, None
        self._kind = "trainer"
        self._recipe = replace(direct or self._recipe, segments=home)
        host = self._start_again(cursor, alone=direct is not None)
        host.moves.append(
            Move(segment.name, segment.executor, "inline", "moved", reason=why)
        )
        if isinstance(host, DirectHost):
            host.stays = why
        self._wanted_kind = self._kind  # last: no later request may undo it

    def _segments_now(self) -> tuple[SegmentRecipe, ...]:
        """Return recipes that start as the segments are now."""
        engine = self.host.engine
        return self._recipe.segments if engine is None else as_now(engine.segments)

    def _moved_host(self, data: Any) -> Host:
        """Return a host of the other kind, with the previous one closed.

        Raises:
            SpecError: batches like `data` cannot be sent, or the work must not leave
                this process.
        """
        before, trainer, engine = self.host, self._trainer, self.host.engine
        assert engine is not None
        recipe = self._home
        quiet: AbstractContextManager[None] = nullcontext()
        leaves = self._kind == "trainer"
        if leaves:
            check_may_leave(data, engine.segments, self._collate)
            self._home = replace(self._recipe, segments=self._segments_now())
            recipe = in_children(self._home)
            quiet = engine.still()  # a fork copies the locks that threads hold
        with quiet:
            after = EngineHost(recipe, self._byte_budget, before.cursor, trainer)
        # Not what is wanted: that may have changed meanwhile.
        self._kind, self._recipe = "process" if leaves else "trainer", recipe
        with ExitStack() as undo:
            undo.callback(after.close)  # even if Ctrl-C interrupts
            before.close()
            undo.pop_all()
        return after

    # The tuner's side: the plant that it tunes

    @property
    def calm(self) -> bool:
        """Whether no trial is running, so that loading may rest for a moment."""
        return self.contention.armed

    @calm.setter
    def calm(self, calm: bool) -> None:
        """Allow looks, or not; what is beside the trainer after a trial is new."""
        if calm != self.contention.armed:
            self.contention.forget()
        self.contention.armed = calm

    @property
    def trained(self) -> TrainerObservation:
        return self._trainer.read()

    def observe(self) -> Observation | None:
        """Return the window since the last call; None if the trainer is elsewhere.

        None also if the host is a new one, whose counters start from zero.
        """
        host = self.host  # the trainer's thread may replace it at any time
        before, self._before = self._before, self._whole(host, host.read())
        last, self._observed_host = self._observed_host, host
        if before.regime != self._before.regime:
            self.contention.renew()
        if last is not host or not self._trainer.training:
            return None
        return self._before - before

    def knobs(self) -> tuple[Knob, ...]:
        knobs = self.host.knobs()
        if self._direct is not None:
            knobs = self._with_executor(self._direct, knobs)
        if self._stays or self.alone is not None:
            return knobs
        return *knobs, Knob(
            NAME,
            "host",
            lower=0,
            upper=0,
            tunable=all(segment.tunable for segment in self._recipe.segments),
            read=lambda: self._wanted_kind,
            write=partial(setattr, self, "_wanted_kind"),
            choices=("trainer", "process"),
        )

    def _with_executor(
        self, direct: Recipe, knobs: tuple[Knob, ...]
    ) -> tuple[Knob, ...]:
        """Return the knobs, with `inline` among the choices for the executor.

        There is no such knob while it is unknown what workers would make of the data.
        """
        engine, (recipe,) = self.host.engine, direct.segments
        if self.alone is not None and self.alone.undecided:
            return knobs
        movable = next((knob for knob in knobs if knob.name == "executor"), None)
        kinds = ["thread"] if recipe.thread_safe else ["process"]
        if movable is not None or (recipe.thread_safe and not recipe.stays):
            kinds = ["thread", "process"]

        def read() -> str:
            if self._workers is not None:
                return self._workers
            if engine is not None:
                (segment,) = engine.segments
                return str(movable.value if movable else segment.executor)
            return "inline"

        def write(kind: Any) -> None:
            if movable is not None and kind != "inline":
                movable.write(kind)
            else:
                self._workers = kind

        knob = Knob(
            recipe.name,
            "executor",
            lower=0,
            upper=0,
            tunable=recipe.tunable,
            read=read,
            write=write,
            choices=("inline", *kinds),
        )
        return (*(other for other in knobs if other.name != "executor"), knob)

    def recent(self) -> Observation:
        """Return the last ten seconds or so of training, however long ago they were.

        They begin where workers or prefetch queues were last resized, once some steps
        have been made since.
        """
        host, history = self.host, list(self._history)
        readings = [reading for at, reading in history if at is host]
        if self._trainer.training or not readings:
            readings.append(host.read())
        before = [at for at, _ in history if at is not host]
        if before and readings[0].trainer.steps == readings[-1].trainer.steps:
            host = before[-1]  # the engine has just moved: nothing is known there yet
            readings = [reading for at, reading in history if at is host]
        first, last = readings[0], readings[-1]
        start = next(
            reading for reading in readings if settings_of(reading) == settings_of(last)
        )
        if last.trainer.steps - start.trainer.steps >= WARM_STEPS:
            first = start  # observations with other workers no longer hold
        warm_host, warm = self._warm
        is_warm = last.trainer.steps - warm.trainer.steps >= WARM_STEPS
        if warm_host is host and is_warm and first.trainer.steps < warm.trainer.steps:
            first = warm
        return self._whole(host, last) - first

    def read(self) -> Observation:
        """Return the window since the run began."""
        return self._whole(host := self.host, host.read())

    def _whole(self, host: Host, reading: Observation) -> Observation:
        """Return a reading of the host, completed with what is known here."""
        recipe, caches = self._recipe, (cache.statistics() for cache in self._caches)
        knobs = (k for k in host.knobs() if k.name == "num_parallel_workers")
        reasons = {k.operator: k.held or self.tried.get(k.operator, "") for k in knobs}
        segments = reading.segments
        stays = self._stays if len(segments) > 1 else ""
        if any(s.stays == stays for s in segments):
            stays = ""  # what keeps one segment is no reason of the others
        if stays or any(reasons.values()):
            segments = tuple(
                replace(s, held=reasons.get(s.name) or s.held, stays=s.stays or stays)
                for s in segments
            )
        return replace(
            reading,
            caches=tuple(cache for cache in caches if cache is not None),
            segments=segments,
            host=host.kind,
            contention=self.contention.comparison,
            moves=self._moves,
            face="DataLoader" if recipe.drawn else "Pipeline",
        )

    def is_free(self) -> bool:
        """Whether no thread, this one included, is stuck holding a lock of ours."""
        engine = self.host.engine
        return engine is None or engine.is_free()

    def close(self) -> None:
        """Stop everything. Idempotent."""
        self._closed = True
        self.host.close()
        if self._lane is not None:
            self._lane.close()

    def _note(self, reading: Observation) -> None:
        host, history = self.host, self._history
        if len(history) > 1:
            (before, first), (after, last) = history[-2], history[-1]
            same = before is after is host and settings_of(first) == settings_of(last)
            if same and reading.time_s - first.time_s < NOTE_S:
                history.pop()  # the new one replaces it: an epoch may be this short
        history.append((host, reading))


def settings_of(reading: Observation) -> list[tuple[str, int, int]]:
    """Return each segment's executor, worker count and prefetch size."""
    return [
        (segment.executor, segment.num_parallel_workers, segment.prefetch_size)
        for segment in reading.segments
    ]


def ways_to(stage: DeviceStage | None) -> tuple[Lane | None, ToDevice | None]:
    """Return how batches get to a device: over a lane, directly, or not at all."""
    if stage is None:
        return None, None
    if stage.device.type != "cuda":
        return None, ToDevice(stage)
    from .to_device.lane import lane_to

    return lane_to(stage), None
