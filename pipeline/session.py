"""What both faces share: a name in the log, a run and its tuner, loops and reports.

    Face         the verbs that `Pipeline` and `DataLoader` share
    Epoch        one loop, from `iter()` to its end or to where the user leaves it
    Slot         the holder of at most one run, closed when the face is dropped; while
                 autotune is on, with the thread that tunes the run

pipeline/ and autotune/ meet here. So do loops and the end of a program that closed
nothing: then the interpreter calls the functions of `atexit`, while daemon threads
still go on. First, no thread may ask for another batch, so those that loop end. Then
the runs are closed, and only then what the runs use.
"""
# ruff: noqa: SLF001 a loop records on its face what it received

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import torch

from .. import config
from ..engine.plan import BatchPlan, Cursor
from ..errors import PenstockError, check, set_on, users_frames
from ..system.garbage import close_elsewhere, collected_later
from ..system.printing import Printed, found_name
from ..system.shared_memory import runtime_folder

if TYPE_CHECKING:
    from ..autotune.explain import Explanation
    from ..autotune.log import Saved
    from ..autotune.policies.policy import Values
    from ..autotune.tuner import Tuner
    from ..engine.feed import Delivery
    from ..engine.observe.observation import Observation
    from ..engine.recipe import Executor, Recipe, SegmentRecipe
    from ..engine.run import Run


T = TypeVar("T")

# How long a thread may go on with its batch. User code may be stuck.
LEAVE_S = 1.0


class LoopingThreads:
    """Knows the threads that loop beside the main one, to end them with the program.

    A thread that loops ends without a word. An interpreter that is being torn down
    would end it anyway, perhaps in the midst of native code, which aborts the process.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know no thread, as in a forked child: who held the lock is not there."""
        self._lock, self._over = threading.Lock(), False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def run(self, call: Callable[[], T]) -> T:
        """Return the call's result; end the thread if the program has ended.

        The main thread pays nothing: it is what ends.
        """
        if threading.get_ident() == threading.main_thread().ident:
            return call()
        with self._lock:  # so that `end` waits for each thread that it has not stopped
            self._end_if_over()
            self._threads.add(threading.current_thread())
        try:
            return call()
        finally:  # what the call raises now is the end's doing
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._over:
            raise SystemExit  # threads end by it without a traceback

    def end(self) -> None:
        """Let no thread in any more, and wait a little until those inside have ended.

        A thread that has dropped its loop takes a moment to end: what it held is freed.
        """
        with self._lock:
            self._over = True
            threads = list(self._threads)
        # Not under the lock: these threads need it no more, but new ones do, to end.
        until_s = time.monotonic() + LEAVE_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))


# The one of this process.
looping_threads = LoopingThreads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=looping_threads.forget)


class Epoch(Iterator[Any]):
    """Yields one epoch's batches. If it is dropped early, it lets go of the workers.

    Args:
        face: what is looped over. It lives as long as the loop.
        slot: the holder of the run; this epoch is the newest of its loops.
        run: the run to loop over.
        keeps: whether the workers outlive an epoch that is left early.
    """

    def __init__(
        self, face: Face, slot: Slot, run: Run, *, keeps: bool = False
    ) -> None:
        self._face, self._slot = face, slot
        self._leave = slot.release if keeps else slot.finalise
        # Whether the last batch is handed over, as another loop may use the run then;
        # and whether this loop has ended.
        self._delivered = self._over = False
        self._process = os.getpid()
        self._join(run)

    def _join(self, run: Run) -> None:
        """Loop over a run that the slot has just started."""
        self._abandon = weakref.finalize(self, self._leave, run)
        self._run, self._number = run, self._slot.loops

    def __next__(self) -> Any:
        try:
            return looping_threads.run(self._deliver)
        except StopIteration:
            raise
        except Exception as error:
            set_on(error, "__traceback__", users_frames(error))
            raise
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Stop the workers, unless the epoch is over.

        Without workers, the loop may go on, as in torch. After Ctrl-C, the error's
        traceback would keep this loop from being dropped.
        """
        goes_on = self._run.alone and not isinstance(error, KeyboardInterrupt)
        if not goes_on and self._abandon.detach():
            self._slot.finalise(self._run)

    def _deliver(self) -> Any:
        if self._over:
            raise StopIteration
        delivery = self._next()
        plan = None if delivery is None else delivery.plan
        self._record(plan)
        self._over = plan is None
        # Frameworks may stop at the last batch. The run may be another loop's after it.
        if (plan is None or plan.last) and not self._delivered:
            self._delivered = True
            self._slot.release(self._run)
            self._abandon.detach()
        if delivery is None:
            raise StopIteration
        return delivery.data

    def _record(self, plan: BatchPlan | None) -> None:
        """Record on the face what the loop received; None means that it is over."""
        face = self._face
        if plan is not None:
            face._plan = plan
            for listener in face._listeners:
                listener(plan)
        elif self._number == self._slot.loops:
            face._run = None

    def _next(self) -> Delivery | None:
        if os.getpid() != self._process:
            if (alone := self._run.alone) is None:
                raise PenstockError(FORKED)
            alone.undecided = False  # a forked child has none of the threads
            self._process = os.getpid()
        if not self._delivered:
            return self._slot.next(self._run)
        with self._slot.loop_change():
            ours = self._slot.loops == self._number
            return self._slot.next(self._run) if ours else None


FORKED = (
    "this loop was started in the parent process, before a fork, and its workers are"
    " not in this process; start another loop here"
)


# How long a finaliser waits: somewhat longer than a run may take to close.
CLOSE_S = 3.0


class Slot:
    """Holds the run of a face, separate from it, so that a finaliser can close it.

    A run is busy while an iterator is in the middle of it. Between epochs it is idle
    but alive, and loads the first batches of the next epoch. A tuner follows
    `set_enable_autotune`, even while the run goes on.

    `start` and `next` belong to the trainer's threads; `close` may be called from any.
    """

    def __init__(self, name: str) -> None:
        self._forget()
        # The name of the face in the log.
        self.name = name
        # Number of loops begun so far; the newest loop owns the run.
        self.loops = 0
        self._rank, self._last_line = 0, ""
        # The settings that the run's tuner follows; None before its first batch.
        self._settings: config.Settings | None = None
        # The last seconds of a run that is closed, or closing.
        self._last: Observation | None = None
        # Values from a file; runs start with them, tuned or not.
        self._loaded_values: Saved | None = None
        # Values that a run of this face began with, or was tuned to; runs start with
        # them while autotune is on.
        self._tuned_values: Saved | None = None
        slots.add(self)

    def _forget(self) -> None:
        """Have no run, as at first and in a forked child, where its threads are not."""
        self._owner = os.getpid()
        # New ones, as who held them is not in the child. The lock is held to close, and
        # the other one to begin or end a loop: a loop may close a run, never the
        # other way round.
        self._lock, self._loops_lock = threading.RLock(), threading.RLock()
        self.run: Run | None = None
        # Whether an iterator is in the middle of an epoch, and so of the run.
        self.busy = self._closing = False
        self._tuner: Tuner | None = None
        self._tuning: contextlib.ExitStack | None = None

    def load(
        self, path: str | os.PathLike[str], name: str | None, recipe: Recipe
    ) -> None:
        """Make the next run start with saved values.

        Values found on another machine are ignored, with a line in the log.

        Args:
            path: path of the file.
            name: name of the values in the file; None: the name of this face, or of a
                similar one.
            recipe: recipe of the next run.

        Raises:
            SpecError: `path` is not such a file, or knows no segment of this recipe.
        """
        from ..autotune.log import announce, load_saved

        names = [segment.name for segment in recipe.segments]
        saved_values = load_saved(path, name or self.name, operators=names)
        check(
            saved_values.operators & set(names),
            f"the autotune result belongs to another pipeline: it has values for"
            f" {sorted(saved_values.operators)}, and this one has {names}; load the"
            " file of a run of this pipeline",
        )
        cores = config.current.cpu_cores
        if saved_values.fits(cores):
            self.close()  # its tuner's values are older
            self._loaded_values, self._tuned_values = saved_values, None
            return
        announce(
            "the autotune result is not used: it was found with"
            f" {saved_values.cpu_cores:g} usable cores, and here there are {cores:g};"
            " tune on this machine once, and load that result",
            self.name,
            logging.WARNING,
        )

    def show_log(self, rank: int) -> None:
        """Show the autotune log, if autotune is on and the program shows none itself.

        Call it before a recipe is compiled, which may have something to say.
        """
        if config.get_enable_autotune():
            from ..autotune.log import show_by_default

            show_by_default(rank)

    def tell(self, line: str) -> None:
        """Write a line to the autotune log, if there is one, once in a row."""
        if line != self._last_line and config.get_enable_autotune():
            from ..autotune.log import announce

            self._last_line = line
            self.show_log(rank_of_process())
            announce(line, self.name)

    def begun(self, recipe: Recipe, cursor: Cursor) -> Recipe:
        """Return the recipe with the values known to be best for it at `cursor`."""
        saved_values = (
            config.get_enable_autotune() and self._tuned_values
        ) or self._loaded_values
        if saved_values is None:
            return recipe
        values = saved_values.values(recipe.plan.regime(cursor.step))
        segments = [
            _begun(segment, values, saved_values.executors)
            for segment in recipe.segments
        ]
        return replace(recipe, segments=tuple(segments))

    @contextlib.contextmanager
    def loop_change(self, *, imports: bool = False) -> Iterator[None]:
        """Begin a loop, or end one: several threads may loop over a face.

        Args:
            imports: whether it imports much if it is the first: garbage is collected
                after it then.
        """
        if os.getpid() != self._owner:
            self._forget()
        with (
            collected_later()
            if imports and not self.loops
            else contextlib.nullcontext(),
            self._loops_lock,
        ):
            yield

    def start(self, recipe: Recipe, cursor: Cursor, rank: int) -> Run:
        """Return a run that goes on at `cursor`; end the loop that is busy now."""
        with self.loop_change(imports=True):
            return looping_threads.run(lambda: self._start(recipe, cursor, rank))

    def _start(self, recipe: Recipe, cursor: Cursor, rank: int) -> Run:
        # Import the engine only when a pipeline runs.
        from ..engine.core.in_flight import process_byte_budget
        from ..engine.run import Run

        self.loops += 1
        if self.run is None or self.busy:
            self.close()
            best_recipe = self.begun(recipe, cursor)
            self._tuned_values = self._tuned_values or self._loaded_values
            self.run, self._rank = Run(best_recipe, process_byte_budget(), cursor), rank
            self._last = self._settings = None
            at_exit()
        else:
            self.busy = True  # if Ctrl-C comes now, the next loop needs another run
            self.run.begin(cursor)
        self.busy = True
        return self.run

    def next(self, run: Run) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end."""
        settings = config.current
        if settings is not self._settings and run is self.run:
            self._follow(run, settings)
        return run.next()

    def release(self, run: Run) -> None:
        """Mark the run of an iterator as idle, because its epoch is over."""
        if self.run is run:
            self.busy = False

    def close(self) -> None:
        """Stop and forget the run, if there is one; a forked child only forgets it."""
        if os.getpid() != self._owner:
            self._forget()
        with self._lock:  # a finaliser may be closing it: wait until it is closed
            self._closing = True
            try:
                if self.run is not None:
                    # The last seconds first: the tuner's thread writes them as it ends.
                    # And it has ended before the run closes whose knobs it sets.
                    self._last = self._observed(self.run)
                    self.stop_tuning()
                    self.run.close()
                self.run, self.busy = None, False
            finally:
                self._closing = False

    def finalise(self, run: Run | None = None) -> None:
        """Close from a finaliser, either the face's or that of an iterator of `run`."""
        is_other = run is not None and self.run is not run
        if self.run is None or is_other or self._closing:  # by this thread, perhaps
            return
        close_elsewhere(self.close, CLOSE_S if self.run.is_free() else 0.0)

    def explain(
        self, recipe: Callable[[], Recipe] | None = None
    ) -> tuple[Observation, Explanation]:
        """Return the last seconds of training, of this run or the previous one.

        Args:
            recipe: recipe of the next run, needed if there was no run; nothing is
                measured.

        Returns:
            The observation and its explanation.
        """
        from ..autotune.explain import explain
        from ..engine.monitor import unmeasured

        run = self.run  # another thread may close it
        window = self._last if run is None else self._observed(run)
        if window is None:
            assert recipe is not None
            window = unmeasured(recipe())
        tuned = config.get_enable_autotune() or bool(self._tuned_values or self._tuner)
        return window, explain(window, config.budget(), tuned=tuned)

    def _observed(self, run: Run) -> Observation:
        return run.recent() if self._last is None else self._last

    def _follow(self, run: Run, settings: config.Settings) -> None:
        """Start, restart or stop the tuner after a change of settings."""
        before, self._settings = self._settings, settings
        if before is not None and TUNING(before) == TUNING(settings):
            return
        self.stop_tuning()
        if settings.autotune:
            with collected_later():
                self._start_tuning(run, settings)

    def _start_tuning(self, run: Run, settings: config.Settings) -> None:
        # Import this when needed: it would take a fifth of the time to import penstock.
        from ..autotune.host_peers import HostPeers
        from ..autotune.log import AutotuneLog
        from ..autotune.policies.bottleneck_law import BottleneckLaw
        from ..autotune.tuner import Tuner, TunerThread

        self.show_log(self._rank)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(
                AutotuneLog(settings.filepath_prefix, self._rank, self.name)
            )
            # A pipeline with a fixed number of cores already has its share.
            place = runtime_folder() if settings.cpu_budget is None else None
            host_peers = stack.enter_context(HostPeers(place)) if place else None
            tuner = self._tuner = Tuner(
                run,
                BottleneckLaw(),
                config.budget(),
                log,
                interval_steps=settings.autotune_interval,
                host_peers=host_peers,
                found=None
                if self._tuned_values is None
                else self._tuned_values.regimes,
            )
            stack.enter_context(TunerThread(tuner, partial(self._observed, run)))
            self._tuning = stack.pop_all()

    def stop_tuning(self) -> None:
        """Save the values found, and stop tuning."""
        stack, self._tuning = self._tuning, None
        if stack is not None:
            stack.close()
        if self.run is not None:
            self.run.calm = True
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            self._tuned_values = tuner.found()


# The settings that a tuner depends on.
TUNING = attrgetter("autotune", "filepath_prefix", "autotune_interval", "cpu_budget")


# Loops of torch's own workers that have yet to write their row of the log.
torchs_runs: weakref.WeakSet[Any] = weakref.WeakSet()
slots: weakref.WeakSet[Slot] = weakref.WeakSet()


def explanations() -> dict[str, Explanation]:
    """Return the explanation of each pipeline that runs in this process, by name.

    One that is tuned has its name in the log, where no other has the same.
    """
    return {
        (tuner.log if (tuner := slot._tuner) else slot).name: slot.explain()[1]
        for slot in list(slots)
        if slot.run is not None
    }


def end_tuning() -> None:
    """Turn autotune off, also for current runs, and save the values found."""
    for slot_or_run in [*slots, *torchs_runs]:
        slot_or_run.stop_tuning()
    config.set_enable_autotune(enable=False)


def close_all() -> None:
    """Close the runs of all faces of this process."""
    for slot in list(slots):
        try:
            slot.close()
        except KeyboardInterrupt:
            slot.close()  # nobody is left whom it could interrupt


@cache
def at_exit() -> None:
    """Have all runs closed at exit, before what they use.

    Call it when a face has a finaliser: `weakref` ends objects in the reverse order of
    their birth, so a cache that was opened for the first batch would be gone before
    the run that reads it. What is registered with `atexit` later is called earlier.
    """
    atexit.register(close_all)
    atexit.register(looping_threads.end)


def _begun(
    segment: SegmentRecipe, values: Values, executors: Mapping[str, str]
) -> SegmentRecipe:
    """Return a segment with an earlier run's values, within the user's bounds."""
    if not segment.tunable:
        return segment
    lower, upper = segment.bounds
    workers = values.get(
        (segment.name, "num_parallel_workers"), segment.num_parallel_workers
    )
    kind = executors.get(segment.name, "inline")
    # The cost of inline work is not measured yet; coroutines are not penstock's choice.
    decided = not segment.stays and kind in ("thread", "process")
    return replace(
        segment,
        num_parallel_workers=min(max(workers, lower), upper),
        prefetch_size=values.get(
            (segment.queue_name, "prefetch_size"), segment.prefetch_size
        ),
        executor=cast("Executor", kind) if decided else segment.executor,
    )


def rank_of_process() -> int:
    """Return the rank in the process group or from torchrun; 0 for a lone process."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


class Face(Printed):
    """The verbs of every face: each has at most one run, in a slot."""

    _RUNNING: ClassVar[frozenset[str]]
    """The attributes that a copy does not get."""
    _slot: Slot
    _plan: BatchPlan | None
    _recipe: Recipe | None
    """The recipe of the next run; None if it has to be compiled again."""

    _run: Run | None
    """The run of the current loop, or of the last loop if the user left it early."""
    _listeners: list[Callable[[BatchPlan], object]]
    _name: str

    def _set_up(self, name: str) -> None:
        """Begin without a run; a later one is closed when the face is dropped."""
        self._name = name or found_name()
        self._slot = Slot(self._name)
        self._plan = self._recipe = self._run = None
        self._listeners = []
        weakref.finalize(self, self._slot.finalise)

    def _compiled(self) -> Recipe:
        """Return the recipe of the next run.

        Raises:
            SpecError: torch's own workers load.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy, without any run."""
        return {name: v for name, v in vars(self).items() if name not in self._RUNNING}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._set_up(state.get("name", self._name))  # a loader may have been renamed

    @property
    def plan(self) -> BatchPlan | None:
        """The stamp of the last batch handed over.

        None before the first batch, and where torch's own workers load.
        """
        return self._plan

    def load_autotune(
        self, path: str | os.PathLike[str], name: str | None = None
    ) -> None:
        """Start the next loop with the settings that an earlier tuned run ended with.

        Autotune may be on or off. Settings that the run found for other regimes (batch
        and image sizes of a schedule) take effect when those regimes begin. Settings
        found with another number of usable cores are not used, and the log says so.

        Args:
            path: `<prefix>_<rank>.json`, as written with `set_enable_autotune(True,
                prefix)`. Stages that the file does not know keep their settings.
            name: the name of the pipeline or loader in the file (default: the name of
                this one, or else the only one in the file that shares stages, or the
                kind of dataset, with it).

        Raises:
            SpecError: `path` is not such a file, or knows no stage of this pipeline; or
                torch's own workers load.
        """
        self._slot.load(path, name, self._compiled())

    def stats(self) -> Observation | None:
        """Return all counters since the engine started.

        None before the first loop and after `close`, and where torch's own workers
        load.
        """
        run = self._slot.run
        return None if run is None else run.read().bounded

    def close(self) -> None:
        """Stop penstock's workers and free their memory. It may be iterated again.

        A cache keeps its samples on disk and drops those in RAM.
        """
        self._slot.close()
        if self._recipe is not None:
            for cache in self._recipe.caches:
                cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
