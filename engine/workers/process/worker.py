"""A worker process from within: an engine that makes the batches it is assigned.

    trainer  ─▶ Assignment | Share | None ─▶ receiver ─▶ AssignedPlan ─▶ Engine
    trainer  ◀─ Result ◀─ main thread ◀─ Engine.pop()

The engine has the segments that run here. One worker alone is the main thread, as in
torch's workers; several are threads. Results leave in the order of the assignments.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import torch

from ....errors import PenstockError, SampleError
from ...batch.buffer import BatchBuffer, FailedBatch, Finished
from ...batch.layout import Layout
from ...core.byte_budget import ByteBudget
from ...core.chunk import Chunk, Failure, InFlightBatch, Outcome
from ...engine import Engine
from ...observe.reading import TrainerMeter
from ...plan import AssignedPlan
from ...program.program import Program
from ...recipe import Recipe, SegmentRecipe
from ...witness.witness import Witness
from .assignment import Assignment, Result, Share
from .child import leave, write_crashes_to
from .handover import Packed, Packer, dumps, plain_dumps, travel
from .pipe import Pipe
from .shelf import Shelf
from .slabs import SlabPool
from .status_page import MAX_LANES, LaneStatus, StatusPage

KEEP = 40
"""Slabs that the trainer may hold, including those of batches it has not taken yet."""
LISTEN_S = 0.005
"""How often a worker that is the main thread looks whether it must end, at most."""
UNBOUNDED = 1 << 62
"""Bytes of the budget here: the trainer's bounds what is assigned."""


THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def use_one_thread() -> None:
    """Limit native libraries to one thread each: samples already run in parallel."""
    import threadpoolctl

    for name in THREAD_CAPS:  # for libraries that are loaded later
        os.environ[name] = "1"
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


class CollatingMeter(TrainerMeter):
    """Measures collating in the main thread, and posts it on the status page."""

    def __init__(self, plan: AssignedPlan, status: LaneStatus) -> None:
        super().__init__()
        self._plan, self._status = plan, status

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        """Measure the user's `collate_fn`: no single row is to blame for it."""
        self._status.begin(self._plan.oldest, 0)
        with super().collating():
            yield
        self._status.end()


class Worker:
    """One worker process.

    The receiver reads the pipe, the main thread writes to it. `_packing` guards the
    packer, which both use.

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
        program = segment.program
        self._pipe, self._program = pipe, program
        self._stages = len(segment.stages)
        self._status_page = status_page
        numbers = itertools.cycle(range(MAX_LANES))
        self._slabs = SlabPool(KEEP)
        self._packer, self._shelf = Packer(self._slabs), Shelf(KEEP)
        own = any(each.per_batch for each in recipe.segments) or recipe.buffers.collate
        self._bare = not own
        """Whether a batch is its rows, as their layout says."""
        self._packing = threading.Lock()
        self._plan = AssignedPlan()
        self._meter = CollatingMeter(self._plan, status_page.lane(next(numbers)))
        self._watch = Witness(program.watched) if program.watched else None
        self._share, self._alone = Share(1, 1), bool(program.doubtful)
        # Of what threads may not share; None once that is known.
        self._doubts = Witness(program.doubtful) if program.doubtful else None
        buffers = replace(recipe.buffers, lend=self._lend)
        self._engine = Engine(
            replace(recipe, plan=self._plan, buffers=buffers),
            ByteBudget(UNBOUNDED),
            0,
            trainer=self._meter,
            watch=lambda: status_page.lane(next(numbers), self._listen),
        )
        self._engine.engine_lock.extend(0)
        self._receiver: threading.Thread | None = None
        self._listened_s = 0.0
        self._spent = self._spent_now()

    def run(self) -> None:
        """Work until the trainer closes the pipe, or is gone.

        Each worker finishes its current rows first: its function may hold a lock that
        it shares with other processes.
        """
        write_crashes_to(self._status_page)
        self._pipe.send(os.getpid())
        self._engine.__enter__()
        if any(segment.executor == "async" for segment in self._engine.segments):
            self._let_receive()
        try:
            while True:
                self._serve()
        except PenstockError:
            if not self._engine.engine_lock.closed:
                raise
        for segment in self._engine.segments:
            segment.close(inf, [])
        self._program.leave()

    # Whoever receives

    def _let_receive(self) -> None:
        """Let a thread receive from now on: the main thread waits for workers."""
        if self._receiver is None:
            self._receiver = threading.Thread(
                target=self._receive, name="receiver", daemon=True
            )
            self._receiver.start()

    def _receive(self) -> None:
        """Take what the trainer sends, until the pipe ends."""
        try:
            while not self._engine.engine_lock.closed:
                self._take(self._pipe.receive_all)
        except BaseException:  # noqa: BLE001 nobody above could report it
            traceback.print_exc()
            leave(1)

    def _listen(self) -> None:
        """Take now and then what has come, if no thread does."""
        now_s = time.monotonic()
        if self._receiver is None and now_s - self._listened_s > LISTEN_S:
            self._listened_s = now_s
            self._take(self._pipe.collect)

    def _take(self, receive: Callable[[], list[Any]]) -> None:
        """Take some messages; stop the engine after the last one."""
        try:
            messages = receive()
        except EOFError:
            messages = [None]
        for message in messages:
            self._hear(message)

    def _hear(self, message: Assignment | Share | None) -> None:
        engine_lock = self._engine.engine_lock
        if message is None:
            with engine_lock.lock:
                engine_lock.close()
                engine_lock.wake_trainer()
            return
        if isinstance(message, Share):
            self._share = message
            if not self._alone:
                self._share_out()
            return
        if message.returned is not None:
            with self._packing:
                self._packer.take_back(message.returned)
            self._shelf.take_back(message.returned)
        planned = message.planned
        with engine_lock.lock:
            self._plan.add(planned, message.seed)
            engine_lock.extend(self._plan.stop)

    # The main thread

    def _serve(self) -> None:
        """Make one batch, or some rows of one. Keeps no reference between two."""
        plan = self._plan
        while self._receiver is None and plan.oldest == plan.stop:
            self._take(self._pipe.receive_all)
            self._listened_s = time.monotonic()
            if self._engine.engine_lock.closed:
                break
        with self._doubts or contextlib.nullcontext():
            in_flight, made = self._engine.pop()
        with self._engine.engine_lock.lock:
            self._plan.forget()
        outcome = self._outcome(in_flight, made)
        if self._watch is not None:
            outcome.changed = self._watch.look()
        self._reply(in_flight, made, outcome)
        if self._doubts is not None:
            self._alone, self._doubts = self._doubts.finding() is not None, None
            if not self._alone:
                self._share_out()

    def _share_out(self) -> None:
        """Give each segment its part of the workers; one alone is the main thread."""
        workers, of = self._share
        if workers > 1:
            self._let_receive()
        for segment in self._engine.segments:
            recipe = segment.recipe
            if recipe.executor == "async":
                permits = -(-recipe.num_parallel_workers * workers // of)
                segment.request("async", permits)
            elif not recipe.in_order:
                segment.request("inline" if workers == 1 else "thread", workers)

    def _outcome(
        self, in_flight: InFlightBatch, made: Finished | FailedBatch
    ) -> Outcome:
        """Return the outcome of an assignment, without what was made."""
        rows = len(in_flight.rows)
        outcome = Outcome(rows, dropped=in_flight.dropped, ended=in_flight.ended)
        outcome.failures = [
            replace(failure, error=travel(failure.error)) for failure in made.failures
        ]
        if isinstance(made, FailedBatch):
            failures, outcome.failures = tuple(outcome.failures), []
            outcome.made = FailedBatch(travel(made.error), failures)
        before, self._spent = self._spent, self._spent_now()
        parts = []
        for (run, cpu, size), now in zip(before, self._spent, strict=True):
            run_ns, cpu_ns, nbytes = now[0] - run, now[1] - cpu, now[2] - size
            outcome.run_ns += run_ns
            outcome.cpu_ns += cpu_ns
            parts.append((run_ns, cpu_ns, nbytes // max(rows, 1)))
        outcome.parts = tuple(parts)
        return outcome

    def _spent_now(self) -> list[tuple[int, int, int]]:
        """Return the nanoseconds (wall, CPU) and bytes of each stage so far."""
        spent = [
            stage
            for segment in self._engine.segments
            for stage in segment.connector.parts.spent
        ]
        collate_ns = self._meter.collate_ns
        if collate_ns:
            run_ns, cpu_ns, nbytes = spent[-1]
            spent[-1] = run_ns + collate_ns, cpu_ns + collate_ns, nbytes
        return spent[: self._stages]

    def _reply(
        self, in_flight: InFlightBatch, made: Finished | FailedBatch, outcome: Outcome
    ) -> None:
        """Send a result. A batch that cannot be pickled is left to the trainer."""
        buffer = in_flight.buffer
        assert isinstance(buffer, BatchBuffer)
        whole = isinstance(made, Finished) and in_flight.whole
        result = Result(in_flight.number, outcome, None, whole)
        if whole and self._bare and buffer.sealed and self._shelf.has(buffer.memory):
            laid, descriptors = self._shelf.send(buffer.memory)
            outcome.nbytes = laid.nbytes
            body = plain_dumps(result._replace(sent=laid))
            self._pipe.send_packed(body, descriptors)
            return
        self._shelf.put_back(buffer.memory)
        try:
            message = self._packed(in_flight, result, made)
        except Exception as error:  # noqa: BLE001 whatever pickling user objects raises
            message = self._instead(in_flight, buffer.kept, result, error)
        self._pipe.send_packed(*message)

    def _instead(
        self,
        in_flight: InFlightBatch,
        kept: dict[int, Any],
        result: Result,
        error: Exception,
    ) -> tuple[bytes, tuple[int, ...]]:
        """Return the samples of a batch that cannot be sent, or the error for that."""
        if in_flight.whole and kept:
            with contextlib.suppress(Exception):
                rows = result._replace(whole=False)
                return self._packed(in_flight, rows, Finished(kept))
        chunk = in_flight.chunk(0, len(in_flight.rows))
        failed = unsendable(self._program, chunk, result.outcome, error)
        return dumps(Result(result.number, failed)), ()

    def _packed(
        self, in_flight: InFlightBatch, result: Result, made: Finished | FailedBatch
    ) -> tuple[bytes, tuple[int, ...]]:
        """Return a result as it is sent, and descriptors to send with it."""
        if isinstance(made, FailedBatch):
            return dumps(result), ()
        data, outcome, short = made.data, result.outcome, ""
        if not result.whole:
            outcome.offsets = [row - in_flight.first_row for row in data]
            data = list(data.values())
        with self._packing:
            try:
                packed, descriptors = self._packer.pack(data)
            except OSError as error:  # there is no shared memory left
                short, descriptors = str(error), ()
                packed = Packed(dumps(data), (), (), ())
                self._packer.nbytes = 0
            outcome.nbytes = max(self._packer.nbytes, len(packed.body))
        return dumps(result._replace(sent=packed, short=short)), descriptors

    def _lend(self, layout: Layout, rows: int) -> Any:
        """Lend shared memory for a batch; if there is none, memory of this process."""
        with contextlib.suppress(OSError):
            if self._bare and layout.solid:
                return self._shelf.lend(layout, rows)
            return layout.open(rows, self._slabs.lend(layout, rows)[1])
        return layout.open(rows, self._engine.recipe.buffers.allocate)


def unsendable(
    program: Program, chunk: Chunk, outcome: Outcome, error: Exception
) -> Outcome:
    """Return the outcome of a chunk whose samples cannot be pickled."""
    stage = program.operations[-1].stage
    text = (
        f"a sample made by {stage} cannot be sent to the trainer's process "
        f"({type(error).__name__}: {error}); return arrays, tensors, numbers, text or "
        'bytes, or use executor="thread"'
    )
    failed = failed_outcome(chunk, stage, SampleError(text))
    failed.run_ns = outcome.run_ns
    return failed


def failed_outcome(chunk: Chunk, stage: str, error: Exception) -> Outcome:
    """Return the outcome of a chunk all of whose rows failed with this error."""
    failures = [
        Failure(error, stage, index, chunk.first_row + at)
        for at, index in enumerate(chunk.indices.tolist())
    ]
    return Outcome(len(chunk), failures=failures)
