"""A tuned run: pipeline/ and autotune/ meet here, for both faces.

Slot         what a face holds: at most one run, closed when the face goes
TunedRun     a run and, while autotune is on, the thread that tunes it
begun_with   a recipe that begins where an earlier run ended
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from . import config
from .pipeline.errors import SpecError
from .pipeline.plan import Cursor

if TYPE_CHECKING:
    from .autotune.saved import Saved
    from .pipeline.compile import Recipe, SegmentRecipe
    from .pipeline.feed import Delivery
    from .pipeline.observation import Observation
    from .pipeline.staffing import Executor

__all__ = ["Slot", "TunedRun", "begun_with"]


class TunedRun:
    """A run whose tuner follows `set_enable_autotune`, also while it runs.

    `next` belongs to the trainer's thread; `close` may be called from any.
    """

    def __init__(self, recipe: Recipe, cursor: Cursor, rank: int) -> None:
        from .pipeline.run import Run  # loaded when a pipeline runs

        self._rank = rank
        self.run = Run(recipe, config.purse(), cursor)
        self._tuning: contextlib.ExitStack | None = None
        self._settings: config.Settings | None = None
        self.last: Observation | None = None
        """How it stood when it was closed."""

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end."""
        settings = config.settings()
        if settings is not self._settings:
            self._follow(settings)
        return self.run.next()

    def close(self) -> None:
        """Stop tuning, then the workers. Idempotent."""
        if self.last is None:
            self.last = self.run.recent()
        self._stop_tuning()
        self.run.close()

    def observation(self) -> Observation:
        """Return the last seconds of training."""
        return self.last if self.last is not None else self.run.recent()

    def _follow(self, settings: config.Settings) -> None:
        """Settings have changed: start, restart or stop the tuner as they say."""
        before, self._settings = self._settings, settings
        was_on = before is not None and before.autotune
        if was_on and settings.autotune and same_tuning(before, settings):
            return
        self._stop_tuning()
        if settings.autotune:
            self._start_tuning(settings)

    def _start_tuning(self, settings: config.Settings) -> None:
        # Loaded when wanted: a fifth of what importing penstock would take.
        from .autotune.log import AutotuneLog, show_by_default
        from .autotune.neighbours import Neighbours, meeting_place
        from .autotune.policies import BottleneckLaw
        from .autotune.tuner import Tuner, TunerThread

        show_by_default(self._rank)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(AutotuneLog(settings.filepath_prefix, self._rank))
            # Who is given a number of cores has been given his part already.
            place = meeting_place() if settings.cpu_budget is None else None
            others = stack.enter_context(Neighbours(place))
            tuner = Tuner(
                self.run,
                BottleneckLaw(),
                config.budget(),
                log,
                interval_steps=settings.autotune_interval,
                neighbours=others,
            )
            stack.enter_context(TunerThread(tuner, log))
            self._tuning = stack.pop_all()

    def _stop_tuning(self) -> None:
        stack, self._tuning = self._tuning, None
        if stack is not None:
            stack.close()

    def __repr__(self) -> str:
        return f"<TunedRun {'tuned' if self._tuning else 'as set'}: {self.run!r}>"


def begun_with(recipe: Recipe, saved: Saved) -> Recipe:
    """Return the recipe with the values of an earlier run, within the user's bounds.

    Raises:
        SpecError: no segment has a name that is known there.
    """
    names = [segment.name for segment in recipe.segments]
    known = sorted({operator for operator, _ in saved.knobs})
    if not set(names) & set(known):
        raise SpecError(
            f"{saved.path!r} is of another pipeline: it knows {known}, this one has"
            f" {names}; load the file of a run of this pipeline"
        )
    return replace(recipe, segments=tuple(_begun(s, saved) for s in recipe.segments))


def _begun(segment: SegmentRecipe, saved: Saved) -> SegmentRecipe:
    if not segment.tunable:
        return segment
    lower, upper = segment.bounds
    workers = saved.knobs.get(
        (segment.name, "num_parallel_workers"), segment.num_parallel_workers
    )
    kind = saved.executors.get(segment.name, "inline")
    decided = segment.movable and kind != "inline"  # what is inline is still to show it
    return replace(
        segment,
        num_parallel_workers=min(max(workers, lower), upper),
        prefetch_size=saved.knobs.get(
            (segment.queue_name, "prefetch_size"), segment.prefetch_size
        ),
        executor=cast("Executor", kind) if decided else segment.executor,
    )


def same_tuning(before: config.Settings | None, now: config.Settings) -> bool:
    """Whether a tuner made for the one may go on under the other."""
    return before is not None and (
        before.filepath_prefix,
        before.autotune_interval,
        before.cpu_budget,
    ) == (now.filepath_prefix, now.autotune_interval, now.cpu_budget)


class Slot:
    """Holds a face's run, apart from the face, so that a finaliser can close it.

    A run is busy while an iterator is in the middle of it. Between epochs it is idle,
    but alive: the first batches of the next epoch are loaded.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self.run: TunedRun | None = None
        self._busy = False
        self._last: Observation | None = None

    def start(self, recipe: Recipe, cursor: Cursor, rank: int) -> TunedRun:
        """Return a run that goes on at `cursor`; ends the loop that is busy now."""
        self._forget_inherited()
        run = self.run
        if run is None or self._busy:
            self.close()
            run = self.run = TunedRun(recipe, cursor, rank)
        else:
            run.run.begin(cursor)
        self._busy = True
        return run

    def release(self, run: TunedRun) -> None:
        """An iterator is through its epoch: its run is idle."""
        if self.run is run:
            self._busy = False

    def close(self) -> None:
        """Stop and forget the run, if there is one. Not for a forked child to do."""
        run = self.run
        if run is not None and os.getpid() == self._owner:
            run.close()
            self._last = run.last
        self.run, self._busy = None, False

    def finalise(self, run: TunedRun | None = None) -> None:
        """Close from a finaliser: the one of the face, or that of an iterator of `run`.

        These run wherever the last reference is dropped, and in the collector, which
        may have stopped this very thread within the engine's lock: then another closes
        it.
        """
        if self.run is None or (run is not None and self.run is not run):
            return
        if not self.run.run.is_free():
            threading.Thread(target=self.close, name="penstock closing").start()
            return
        try:
            self.close()
        except KeyboardInterrupt:  # would be lost here, with half of it done
            self.close()
            _thread.interrupt_main()

    def _forget_inherited(self) -> None:
        """In a forked child: the run is the parent's, its threads are not here."""
        if os.getpid() != self._owner:
            self._owner, self.run, self._busy = os.getpid(), None, False

    def observation(self) -> Observation | None:
        """Return the last seconds of training, of this run or the one before."""
        return self._last if self.run is None else self.run.observation()
