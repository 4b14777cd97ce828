"""A worker from within: an engine that makes what it is assigned.

    trainer  ─▶ Assignment | Share ─▶ pipe ─▶ AssignedPlan ─▶ Engine
    trainer  ◀─ Result ◀─ pipe ◀─ main thread ◀─ Engine.pop()

`AssignedEngine` is the same in a worker process and in a Ray actor. It has the segments
that run there. Whoever is connected to the trainer hands assignments over, and sends
what is made: one small message a batch each. In a worker process that is `Worker`. One
worker alone is the main thread, as in torch's workers; several are threads. Results
leave in the order of the assignments.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, cycle, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch

from ...errors import PenstockError, SampleError
from ..batch.buffer import BatchBuffer, FailedBatch, Finished, on_heap
from ..batch.layout import Layout
from ..core.in_flight import ByteBudget, Chunk, Failure, InFlightBatch, Outcome
from ..engine import Engine
from ..plan import AssignedPlan, PlannedBatch
from ..program.program import Unread, Watch
from ..program.randomness import mixed, seed_global_generators
from ..recipe import Recipe, SegmentRecipe
from ..trainer_cost import TrainerMeter
from ..witness.witness import Witness
from ..workers import Kind, Watches, no_watch
from .child import MAX_LINES, STACK_SIGNAL, Pipe, StatusPage, leave
from .handover import dumps, loads, plain_dumps, travel
from .slabs import Returned, Sent, Shelf

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

# Bytes of the budget here: the trainer's bounds what is assigned.
UNBOUNDED = 1 << 62
# After how many seconds threads that only wait get the GIL from those that compute.
# With Python's 5 ms, 24 readers beside one that computes were a fifth slower.
SWITCH_S = 0.0005
# How long a worker may take to finish its rows; the trainer is less patient.
LAST_ROWS_S = 60.0
# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of the C library: blocks that it takes from the
# system singly, and free memory at the end of the heap that it returns. It begins with
# 128 kB, and adapts to these values itself, at most (mallopt(3)). Samples of 100 kB,
# made and freed thousands of times a second, spent nearly half of the time on page
# faults.
KEPT_BYTES = {-3: 32 << 20, -1: 64 << 20}


def find_libraries() -> ThreadpoolController:
    """Return the libraries here that have threads.

    Looking for them takes 20 ms. A process that forks others looks before it does.
    """
    import threadpoolctl  # noqa: F401 a module that counts

    return _find_libraries(len(sys.modules))


@lru_cache(maxsize=1)
def _find_libraries(_: int) -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def set_up_libraries() -> None:
    """Prepare native libraries for a worker, beside which others work.

    Each gets one thread. Memory that is freed is kept for the next samples.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # musl has none
        for option, nbytes in KEPT_BYTES.items():
            mallopt(option, nbytes)
    for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):  # if it is loaded later
        os.environ[f"{library}_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    find_libraries().limit(limits=1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


# Returns the seeds for one more worker, by its segment and its number there.
Seeds = Callable[[int, int], tuple[int, ...]]


def be_worker(segment: SegmentRecipe, seeds: tuple[int, ...], number: int) -> None:
    """Prepare this process for a worker of a segment.

    Its global generators get a seed of their own: with a copy of the trainer's state,
    all workers would draw the same values.

    Args:
        segment: the segment, as the trainer sees it.
        seeds: the seed of the samples' random streams, what distinguishes the run from
            others with the same seed, the segment, and the number of workers that had
            this worker's number before.
        number: its number among the workers of the segment.
    """
    # As torch counts.
    seed_global_generators((mixed(seeds) + number) & 0xFFFFFFFFFFFFFFFF)
    segment.program.enter(number)


class Assignment(NamedTuple):
    """Rows to be made, as sent to a child."""

    planned: PlannedBatch
    """The rows, without inputs. If they do not make the batch, their samples return."""
    seed: int
    """Seed of a collate_fn's draws, together with epoch and batch."""
    inputs: bytes | None = None
    """A sample for each row, pickled apart: unpickling runs user code."""


class Result(NamedTuple):
    """What became of an assignment."""

    number: int
    outcome: Outcome
    sent: Sent | Any = None
    """The batch, or the samples of the rows in `outcome.offsets`; as they are, before
    a worker process sends them, and from an actor."""
    whole: bool = False
    """Whether it is the batch. Then failures of its rows are those substituted."""
    short: str = ""
    """Why it does not lie in shared memory; empty if it does."""

    def as_rows(self, samples: dict[int, Any], first_row: int) -> Result:
        """Return the samples, by row of the batch, in place of the batch."""
        self.outcome.offsets = [row - first_row for row in samples]
        return self._replace(whole=False, sent=list(samples.values()))


class Share(NamedTuple):
    """How many of all workers of the segment are in this process."""

    workers: int
    of: int


class CollatingMeter(TrainerMeter):
    """Measures collating in the main thread, and posts it on the status page."""

    def __init__(self, plan: AssignedPlan, status: Watch | None) -> None:
        super().__init__()
        self._plan, self._status = plan, status
        self.collate_cpu_ns = 0

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        """Measure the user's `collate_fn`: no single row is to blame for it."""
        if self._status is not None:
            self._status.begin(self._plan.oldest, 0)
        begun_ns = time.thread_time_ns()
        with super().collating():
            yield
        self.collate_cpu_ns += time.thread_time_ns() - begun_ns
        if self._status is not None:
            self._status.end()


Packed = TypeVar("Packed")


class AssignedEngine:
    """An engine with a plan of assignments. `assign` and `stop` are for any thread.

    Args:
        recipe: what to make; its segments are those that run here.
        segment: the same as the trainer sees it.
        status: where the main thread posts that it collates; None: nowhere.
        watch: makes what observes the samples of a worker.
    """

    def __init__(
        self,
        recipe: Recipe,
        segment: SegmentRecipe,
        status: Watch | None = None,
        watch: Watches = no_watch,
    ) -> None:
        program, self._stages = segment.program, len(segment.stages)
        self._stage = program.operations[-1].stage
        self._plan = AssignedPlan()
        self._meter = CollatingMeter(self._plan, status)
        recipe = replace(recipe, plan=self._plan)
        self._engine = Engine(
            recipe, ByteBudget(UNBOUNDED), 0, trainer=self._meter, watch=watch
        )
        self._engine.engine_lock.core.extend(0)
        self._awaits = any(inner.executor == "async" for inner in recipe.segments)
        self._more = segment.more_within
        if any(self._more) and not self._awaits:
            sys.setswitchinterval(SWITCH_S)
        owners = chain.from_iterable(
            repeat(more, len(inner.program.stages))
            for inner, more in zip(recipe.segments, self._more, strict=True)
        )
        # Stages that do not take the time of its share of the workers.
        self._beside = {at for at, more in enumerate(owners) if more}
        self._share = Share(1, 1)
        self._watch = Witness(program.watched) if program.watched else None
        # Of what threads may not share; None once that is known.
        self._doubts = Witness(program.doubtful) if program.doubtful else None
        self._alone = self._doubts is not None
        self._costs = self._spent_now()

    def __enter__(self) -> Self:
        self._engine.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        until_s = time.monotonic() + LAST_ROWS_S
        self.stop()
        for segment in self._engine.segments:
            segment.close(until_s, [])

    @property
    def closed(self) -> bool:
        """Whether it was stopped."""
        return self._engine.engine_lock.closed

    @property
    def left(self) -> bool:
        """Whether there is something to make, or it was stopped."""
        return self._plan.oldest < self._plan.stop or self.closed

    @property
    def beside(self) -> bool:
        """Whether others than the main thread work."""
        shared = self._share.workers > 1 or any(self._more)
        return self._awaits or (shared and not self._alone)

    def assign(self, assignment: Assignment) -> None:
        """Plan to make these rows next."""
        batch, body = assignment.planned, assignment.inputs
        if body is not None:
            try:
                batch.inputs = loads(body)  # so no lock is held
            except Exception as error:  # noqa: BLE001 whatever unpickling user objects raises
                batch.inputs = [Unread(error)] * len(batch.rows)
        engine_lock = self._engine.engine_lock
        with engine_lock.lock:
            self._plan.add(batch, assignment.seed)
            engine_lock.core.extend(self._plan.stop)
            engine_lock.wake()

    def stop(self) -> None:
        """Let each worker end after the rows it works on."""
        engine_lock = self._engine.engine_lock
        with engine_lock.lock:
            engine_lock.core.close(engine_lock.clock())
            engine_lock.wake()
            engine_lock.wake_trainer()

    def share(self, share: Share) -> None:
        """Have this part of all workers; one alone is the main thread."""
        self._share = share
        if self._alone:
            return
        for segment, more in zip(self._engine.segments, self._more, strict=True):
            recipe, workers = segment.recipe, share.workers
            if more:
                workers = -(-recipe.num_parallel_workers * workers // share.of)
            kind: Kind = "inline" if workers == 1 else "thread"
            if recipe.executor == "async":
                kind = "async"
            elif recipe.in_order or recipe.iterable:
                continue
            segment.request(kind, workers)

    def make(self, pack: Callable[[Result, BatchBuffer], Packed]) -> Packed:
        """Make what was assigned first; return what became of it, packed.

        A batch that cannot be packed is left to the trainer: its samples are packed in
        its place, or the error that says why. Nothing here refers to it afterwards.

        Args:
            pack: returns a result as it is sent; raises what pickling it raises.

        Raises:
            PenstockError: it was stopped.
        """
        doubts = self._doubts
        with doubts or contextlib.nullcontext():
            in_flight, batch = self._engine.pop()
        with self._engine.engine_lock.lock:
            self._plan.forget()
        result = self._result(in_flight, batch)
        if self._watch is not None:
            result.outcome.changed = self._watch.look()
        if doubts is not None:
            self._alone, self._doubts = doubts.finding() is not None, None
            self.share(self._share)
        try:
            return pack(result, in_flight.buffer)
        except Exception as error:  # noqa: BLE001 whatever pickling user objects raises
            failure = self._unsendable(result, in_flight, error)
        samples = in_flight.buffer.kept
        if result.whole and len(samples) == result.outcome.done:
            rows = result.as_rows(samples, in_flight.first_row)
            with contextlib.suppress(Exception):
                return pack(rows, in_flight.buffer)
        return pack(failure, in_flight.buffer)

    def _unsendable(
        self, result: Result, in_flight: InFlightBatch, error: Exception
    ) -> Result:
        """Return the failure of all rows, as what was made cannot be pickled."""
        text = (
            f"a sample made by {self._stage} cannot be sent to the trainer's process "
            f"({type(error).__name__}: {error}); return arrays, tensors, numbers, text "
            'or bytes, or use executor="thread"'
        )
        chunk = in_flight.chunk(0, len(in_flight.rows))
        outcome = failed_outcome(chunk, self._stage, SampleError(text))
        outcome.run_ns = result.outcome.run_ns
        return Result(result.number, outcome)

    def _result(
        self, in_flight: InFlightBatch, batch: Finished | FailedBatch
    ) -> Result:
        rows, number = len(in_flight.rows), in_flight.number
        failures = [replace(f, error=travel(f.error)) for f in batch.failures]
        outcome = Outcome(
            rows, failures=failures, dropped=in_flight.dropped, ended=in_flight.ended
        )
        self._add_costs(outcome)
        if isinstance(batch, FailedBatch):
            outcome.failures = []
            outcome.made = FailedBatch(travel(batch.error), tuple(failures))
            return Result(number, outcome)
        result = Result(number, outcome, batch.data, whole=True)
        at = in_flight.first_row
        return result if in_flight.whole else result.as_rows(batch.data, at)

    def _add_costs(self, outcome: Outcome) -> None:
        """Note what was spent since the last time."""
        before, self._costs = self._costs, self._spent_now()
        parts = []
        for at, ((run, cpu, size), now) in enumerate(
            zip(before, self._costs, strict=True)
        ):
            run_ns, cpu_ns, nbytes = now[0] - run, now[1] - cpu, now[2] - size
            if at not in self._beside:
                outcome.run_ns += run_ns
            outcome.cpu_ns += cpu_ns
            parts.append((run_ns, cpu_ns, nbytes // max(outcome.done, 1)))
        outcome.parts = tuple(parts)

    def _spent_now(self) -> list[tuple[int, int, int]]:
        """Return the nanoseconds (wall, CPU) and bytes of each stage so far."""
        costs = [
            stage
            for segment in self._engine.segments
            for stage in segment.connector.parts.spent
        ]
        collate_ns = self._meter.collate_ns
        if collate_ns:
            run_ns, cpu_ns, nbytes = costs[-1]
            cpu_ns += self._meter.collate_cpu_ns
            costs[-1] = run_ns + collate_ns, cpu_ns, nbytes
        return costs[: self._stages]


def failed_outcome(chunk: Chunk, stage: str, error: Exception) -> Outcome:
    """Return the outcome of a chunk all of whose rows failed with this error."""
    failures = [
        Failure(error, stage, index, chunk.first_row + at)
        for at, index in enumerate(chunk.indices.tolist())
    ]
    return Outcome(len(chunk), failures=failures)


# In a worker process

# Slabs that the trainer may hold, including those of batches it has not taken yet.
KEEP = 40
# How often a worker that is the main thread looks whether it must end, at most.
LISTEN_S = 0.005


class Worker:
    """One worker process.

    The main thread reads the pipe while it is the only worker; once it waits for
    others, a thread of its own does. Only the main thread writes to it.

    Args:
        pipe: leads to the trainer.
        recipe: what to make; its segments are those that run here.
        segment: the same as the trainer sees it.
        status_page: where the samples being worked on are posted.
    """

    def __init__(
        self,
        pipe: Pipe,
        recipe: Recipe,
        segment: SegmentRecipe,
        status_page: StatusPage,
    ) -> None:
        self._pipe, self._status_page = pipe, status_page
        self._shelf = Shelf(KEEP)
        # Whether a batch is its rows, as their layout says.
        self._bare = not recipe.buffers.collate and not any(
            inner.per_batch for inner in recipe.segments
        )
        numbers = cycle(range(MAX_LINES))
        self._receiver: threading.Thread | None = None
        # Held while messages are received and heard, so that each is in its turn.
        self._taking = threading.Lock()
        self._listened_s = 0.0
        self._engine = AssignedEngine(
            replace(recipe, buffers=replace(recipe.buffers, lend=self._lend)),
            segment,
            status_page.line(next(numbers)),
            lambda: status_page.line(next(numbers), self._listen),
        )

    def run(self) -> None:
        """Work until the trainer closes the pipe, or is gone.

        Each worker finishes its current rows first: its function may hold a lock that
        it shares with other processes.
        """
        page = self._status_page.descriptor
        faulthandler.enable(page)  # its stacks go there on a crash, and on request
        faulthandler.register(STACK_SIGNAL, page)
        self._pipe.send(os.getpid())
        # The trainer may leave while this sends; what follows must be done even then.
        with contextlib.suppress(EOFError), self._engine:
            try:
                while True:
                    self._serve()
            except PenstockError:
                if not self._engine.closed:
                    raise

    def _serve(self) -> None:
        """Do what was assigned first. Keeps no reference between two assignments."""
        while self._receiver is None and not self._engine.left:
            with self._taking:
                self._hear_messages(self._pipe.receive_all)
        self._pipe.send_packed(*self._engine.make(self._packed))
        self._let_receive()

    # Whoever receives

    def _let_receive(self) -> None:
        """Let a thread receive from now on, if the main thread waits for workers."""
        if self._receiver is None and self._engine.beside:
            self._receiver = threading.Thread(
                target=self._receive, name="receiver", daemon=True
            )
            self._receiver.start()

    def _receive(self) -> None:
        """Take what the trainer sends, until the pipe ends."""
        try:
            while not self._engine.closed:
                with self._taking:
                    self._hear_messages(self._pipe.receive_all)
        except BaseException:  # noqa: BLE001 nobody above could report it
            traceback.print_exc()
            leave(1)

    def _listen(self) -> None:
        """Take now and then what has come, if nobody else does."""
        due = time.monotonic() - self._listened_s > LISTEN_S
        if due and self._receiver is None and self._taking.acquire(blocking=False):
            try:
                self._hear_messages(self._pipe.collect)
            finally:
                self._taking.release()

    def _hear_messages(
        self, receive: Callable[[], list[Share | tuple[Returned, bytes]]]
    ) -> None:
        """Take some messages, in order; stop the engine after the last one of all."""
        messages = []
        try:
            messages = receive()
        except EOFError:
            self._engine.stop()
        self._listened_s = time.monotonic()
        for message in messages:
            if isinstance(message, Share):
                self._engine.share(message)
                self._let_receive()
            else:
                returned_slabs, body = message
                self._shelf.take_back(returned_slabs)
                self._engine.assign(loads(body))

    # The main thread

    def _packed(
        self, result: Result, buffer: BatchBuffer
    ) -> tuple[bytes, tuple[int, ...]]:
        """Return a result as it is sent, and descriptors to send with it.

        Raises:
            Exception: whatever pickling what was made raises.
        """
        memory, short = buffer.memory, ""
        sealed = result.whole and self._bare and buffer.sealed
        sent_batch = self._shelf.send(memory) if sealed else None
        if sent_batch is not None:
            parcel, descriptors = sent_batch
            result.outcome.nbytes = parcel.nbytes
            return plain_dumps(result._replace(sent=parcel)), descriptors
        self._shelf.put_back(memory)
        if result.sent is None:  # it has failed
            return dumps(result), ()
        try:
            parcel, descriptors = self._shelf.pack(result.sent)
        except OSError as error:  # there is no shared memory left
            short, descriptors = str(error), ()
            parcel = Sent(dumps(result.sent))
        result.outcome.nbytes = parcel.nbytes
        return dumps(result._replace(sent=parcel, short=short)), descriptors

    def _lend(self, layout: Layout, rows: int) -> Any:
        """Lend shared memory for a batch that is sent as it is, if there is any."""
        if self._bare and layout.solid:
            with contextlib.suppress(OSError):
                return self._shelf.lend(layout, rows)
        return layout.open(rows, on_heap)


# Only private names know of processes that multiprocessing has not started.
# ruff: noqa: SLF001
process: Any = multiprocessing.process
util: Any = multiprocessing.util

# How long what the dataset has started may take to end, as with torch's workers. When a
# loop ends, the fork server is less patient.
EXIT_S = 5.0


@contextlib.contextmanager
def daemonic() -> Iterator[None]:
    """Make this process look like a worker of torch's to multiprocessing and atexit.

    We fork without multiprocessing, so it would take this process for the trainer. Then
    a dataset could start processes here that nobody ends, and a queue that the trainer
    has used would believe that its feeder thread runs here, too. What was started
    within ends with it.

    Such a child may have no children of its own: multiprocessing refuses to start any.
    The exit functions that it inherits are the trainer's to call.
    """
    atexit._clear()
    util._finalizer_registry.clear()
    trainer = process.current_process()
    process._current_process = multiprocessing.Process(daemon=True)
    process._children = set()
    process._parent_process = process._ParentProcess(
        trainer.name, os.getppid(), os.pidfd_open(os.getppid())
    )
    util._run_after_forkers()
    try:
        yield
    finally:
        limit = threading.Timer(EXIT_S, os._exit, (1,))
        limit.daemon = True
        limit.start()
        with contextlib.suppress(Exception):
            util._exit_function()
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # prints errors, and raises none
        limit.cancel()
