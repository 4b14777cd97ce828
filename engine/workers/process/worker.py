"""A worker process from within: takes tasks from its pipe until that ends.

It has one or more lanes: threads that take turns reading tasks from the same pipe, and
work on one task each. The first lane is the main thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ....errors import SampleError
from ...batch.layout import Layout, Misfit, size_of_all, write_rows
from ...core.chunk import Chunk, Failure, Outcome
from ...plan import BatchPlan
from ...program.program import Program
from ...program.randomness import SampleRandom
from ...witness.witness import Witness
from .child import leave, write_crashes_to
from .collator import Collator
from .handover import Returned, dumps, loads, travel
from .pipe import Pipe
from .slabs import Block, allocate_on, map_shared
from .status_page import LaneStatus, StatusPage

__all__ = [
    "SlabPlacement",
    "Task",
    "Worker",
    "failed_outcome",
    "use_one_thread",
]


class SlabPlacement(NamedTuple):
    """Where a worker may write its rows: a batch's slab, and the layout of its rows."""

    key: int
    nbytes: int
    sent: bool
    """Whether the slab's descriptor comes with this message."""
    layout: Layout | None
    """None: the same as for the previous task."""
    rows: int


class Task(NamedTuple):
    """A lease, or its first rows, as sent to a worker process."""

    number: int
    """Sent back with the outcome, because a worker may have several at a time."""
    chunk: Chunk
    inputs: bytes | None
    """Samples, pickled: unpickling runs user code, so no lock may be held."""
    placement: SlabPlacement | None
    forget: frozenset[int] = frozenset()
    """Keys of slabs that only the trainer uses from now on: unmap them."""
    batch: tuple[BatchPlan, int] | None = None
    """If the rows are a whole batch to be collated here: that batch, and the seed of
    its draws."""
    returned: Returned | None = None
    """Slabs of batches collated here that may be reused, or must not be."""


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


class Worker:
    """One worker process.

    `_receiving` guards reading the pipe, `_slabs` and `_layout`; `_sending` guards
    writing. Samples are pickled and unpickled outside both, as that runs user code.
    `_leaving` lets one lane at a time end its part of the program.
    """

    def __init__(
        self, end: Pipe, program: Program, seed: int, status_page: StatusPage
    ) -> None:
        self._end = end
        self._program = program
        self._seed = seed
        self._status_page = status_page
        self._slabs: dict[int, Mapped] = {}
        self._layout: Layout | None = None
        """Layout of the rows of the last task."""
        self._lanes = self._wanted = 1
        self._beside: list[threading.Thread] = []
        """All lanes but the first, which runs in the main thread."""
        self._sure = not program.doubtful
        # Of what threads may not share; None once that is known.
        self._doubts = None if self._sure else Witness(program.doubtful)
        self._watch = Witness(program.watched) if program.watched else None
        batches = program.batches
        self._collator = None if batches is None else Collator(batches)
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self._leaving = threading.Lock()

    def run(self) -> None:
        """Work until the trainer closes the pipe, or is gone.

        Each lane finishes its current task first: its function may hold a lock that it
        shares with other processes.
        """
        write_crashes_to(self._status_page)
        self._end.send(os.getpid())
        self._work(0)
        while self._beside:
            self._beside.pop().join()
            self._leave()

    def _work(self, lane: int) -> None:
        random = SampleRandom(self._seed)
        status = self._status_page.lane(lane)
        with contextlib.suppress(EOFError):
            while self._serve(random, status):
                pass
        self._leave()

    def _work_beside(self, lane: int) -> None:
        """Work as a further lane, where an error ends the process."""
        try:
            self._work(lane)
        except BaseException:  # noqa: BLE001 nobody above could report it
            traceback.print_exc()
            leave(1)

    def _leave(self) -> None:
        """Write what the program still holds, such as records for a cache."""
        with self._leaving:
            self._program.leave()

    def _serve(self, random: SampleRandom, status: LaneStatus) -> bool:
        """Do one task. Keeps no reference between two tasks."""
        with self._receiving:
            task = self._end.receive()
            sink = self._open(task) if isinstance(task, Task) else None
            if isinstance(task, Task) and task.returned and self._collator:
                self._collator.take_back(task.returned)
        if task is None:
            return False
        if isinstance(task, int):
            self._widen(task)
            return True
        status.begin(task.number)
        doubts = self._doubts
        with doubts or contextlib.nullcontext():
            outcome, descriptors = self._do(task, sink, random, status)
        if self._watch is not None:
            outcome.changed = self._watch.look()
        self._reply(task, outcome, descriptors)
        status.end()
        if doubts is not None:
            self._sure, self._doubts = doubts.finding() is None, None
            self._widen(self._wanted)
        return True

    def _widen(self, lanes: int) -> None:
        """Start lanes up to this number; stay at one while it may own its file."""
        self._wanted = lanes
        while self._sure and self._lanes < lanes:
            lane, self._lanes = self._lanes, self._lanes + 1
            thread = threading.Thread(
                target=self._work_beside, args=(lane,), name=f"lane {lane}", daemon=True
            )
            thread.start()
            self._beside.append(thread)

    def _open(self, task: Task) -> SlabSink | None:
        """Return the slab that a task writes to, mapping it if it is new."""
        for key in task.forget:
            self._slabs.pop(key, None)
        placement = task.placement
        if placement is None:
            return SlabSink(None, None) if self._program.places else None
        if placement.sent:
            descriptor = self._end.descriptors.popleft()
            try:
                block = map_shared(descriptor, placement.nbytes)
                self._slabs[placement.key] = Mapped(block)
            finally:
                os.close(descriptor)
        self._layout = placement.layout or self._layout
        layout, mapped = self._layout, self._slabs[placement.key]
        return SlabSink(layout, layout and mapped.open(layout, placement.rows))

    def _do(
        self,
        task: Task,
        sink: SlabSink | None,
        random: SampleRandom,
        status: LaneStatus,
    ) -> tuple[Outcome, tuple[int, ...]]:
        """Return the outcome of a task, and descriptors to send with it."""
        descriptors: tuple[int, ...] = ()
        packed = task.inputs
        inputs = None if packed is None else loads(packed)
        outcome = self._program.run(task.chunk, inputs, sink, random, status)
        if sink is not None and sink.kept is not None:
            rows, outcome.outputs = sink.kept
            outcome.offsets = [row - task.chunk.first_row for row in rows]
            if task.batch is not None and self._collator is not None:
                status.begin(task.number)  # no single row is to blame for what follows
                descriptors = self._collator.collate(
                    *task.batch, task.chunk, outcome, alone=self._lanes == 1
                )
        outcome.failures = [
            replace(failure, error=travel(failure.error))
            for failure in outcome.failures
        ]
        return outcome, descriptors

    def _reply(
        self, task: Task, outcome: Outcome, descriptors: tuple[int, ...]
    ) -> None:
        """Send an outcome; a sample that cannot be pickled is a failure of its row."""
        try:
            packed = dumps((task.number, outcome))
        except Exception as error:  # noqa: BLE001 whatever pickling user objects raises
            failed = unsendable(self._program, task.chunk, outcome, error)
            packed = dumps((task.number, failed))
        with self._sending:
            self._end.send_packed(packed, descriptors)


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
    failed = failed_outcome(chunk.part(0, outcome.done), stage, SampleError(text))
    failed.run_ns = outcome.run_ns
    return failed


def failed_outcome(chunk: Chunk, stage: str, error: Exception) -> Outcome:
    """Return the outcome of a chunk all of whose rows failed with this error."""
    failures = [
        Failure(error, stage, index, chunk.first_row + at)
        for at, index in enumerate(chunk.indices.tolist())
    ]
    return Outcome(len(chunk), failures=failures)


class Mapped:
    """A slab as mapped by this process.

    Its tensors are kept for the next batch: torch releases the GIL while it makes
    tensors, which costs a lane more than anything else about a row.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._opened: tuple[Layout, int] | None = None
        self._memory: Any = None

    def open(self, layout: Layout, rows: int) -> Any:
        """Return the memory of a batch of `rows` rows of this layout."""
        if self._opened != (layout, rows):
            allocate, _ = allocate_on(self._block)
            self._memory = layout.open(rows, allocate)
            self._opened = layout, rows
        return self._memory


class SlabSink:
    """Writes rows into the batch's slab, and keeps those that do not fit, to send."""

    def __init__(self, layout: Layout | None, memory: Any) -> None:
        self.kept: tuple[Sequence[int], list[Any]] | None = None
        """Rows of the batch, and their samples."""
        self._layout = layout
        self._memory = memory

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        """Put one sample into each of `rows`; return the bytes they take."""
        layout = self._layout
        if layout is not None:
            try:
                write_rows(layout, self._memory, rows, samples)
            except Misfit:
                pass
            else:
                return layout.row_bytes * len(rows)
        self.kept = rows, list(samples)
        return size_of_all(samples)
