"""A worker process from within: takes tasks from its pipe until that ends.

It has one lane or several: threads that take tasks from the same pipe in turn, each
with a task of its own. The first lane is the main thread.
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
from ...movable import changed, snapshot
from ...plan import BatchPlan
from ...program.program import Program
from ...program.randomness import SampleRandom
from ..pool import FirstUse
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
    """Where a worker may write its rows: a batch's slab, and how rows lie in it."""

    key: int
    nbytes: int
    sent: bool
    """Whether the slab's descriptor comes with this message."""
    layout: Layout | None
    """None: that of the task before."""
    rows: int


class Task(NamedTuple):
    """A lease, or the first rows of one, as it is sent to a worker process."""

    number: int
    """Sent back with the outcome: a worker may have several at a time."""
    chunk: Chunk
    inputs: bytes | None
    """Samples, packed: unpacking them runs code of the user's, no place for a lock."""
    placement: SlabPlacement | None
    forget: frozenset[int] = frozenset()
    """Keys of slabs that are the trainer's alone now: to be unmapped."""
    batch: tuple[BatchPlan, int] | None = None
    """Which batch the rows are all of, and what keys its draws, if it is to be collated
    here."""
    returned: Returned | None = None
    """Slabs of batches collated here that may be written again, or must not."""


THREAD_CAPS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def use_one_thread() -> None:
    """Let native libraries use one thread each: parallelism is between samples."""
    import threadpoolctl

    for name in THREAD_CAPS:  # those that are loaded later
        os.environ[name] = "1"
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


class Worker:
    """One worker process.

    `_receiving` guards the reading of the pipe, `_slabs` and `_layout`; `_sending` the
    writing. Samples are packed and unpacked outside of both, as that runs the user's.
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
        """How the rows of the last task lie."""
        self._lanes = self._wanted = 1
        self._beside: list[threading.Thread] = []
        """The lanes but the first, which runs in the main thread."""
        self._sure = not program.doubtful
        self._use = None if self._sure else FirstUse(program, alone=True)
        self._watch = LoneWatch(program.watched) if program.watched else None
        batches = program.batches
        self._collator = None if batches is None else Collator(batches)
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self._leaving = threading.Lock()

    def run(self) -> None:
        """Work until the trainer closes the pipe, or is gone.

        A sample in hand is done first, in each lane: it may hold a lock that it shares
        with other processes.
        """
        write_crashes_to(self._status_page)
        self._end.send(os.getpid())
        self._work(0)
        while self._beside:
            self._beside.pop().join()
            self._leave()

    def _work(self, lane: int) -> None:
        random = SampleRandom(self._seed)
        hand = self._status_page.hand(lane)
        with contextlib.suppress(EOFError):
            while self._serve(random, hand):
                pass
        self._leave()

    def _work_beside(self, lane: int) -> None:
        """Work as a further lane: an error ends the process."""
        try:
            self._work(lane)
        except BaseException:  # noqa: BLE001 the last one who can tell
            traceback.print_exc()
            leave(1)

    def _leave(self) -> None:
        """Let what is on its way get there."""
        with self._leaving:
            self._program.leave()

    def _serve(self, random: SampleRandom, hand: LaneStatus) -> bool:
        """Do one task. Holds on to nothing between two of them."""
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
        hand.begin(task.number)
        outcome, descriptors = self._do(task, sink, random, hand)
        if self._watch is not None:
            outcome.changed = self._watch.look()
        self._reply(task, outcome, descriptors)
        hand.end()
        if self._use is not None:
            self._sure, self._use = self._use.finding() is None, None
            self._widen(self._wanted)
        return True

    def _widen(self, lanes: int) -> None:
        """Have so many lanes, or more; one while its file may be its own."""
        self._wanted = lanes
        while self._sure and self._lanes < lanes:
            lane, self._lanes = self._lanes, self._lanes + 1
            thread = threading.Thread(
                target=self._work_beside, args=(lane,), name=f"lane {lane}", daemon=True
            )
            thread.start()
            self._beside.append(thread)

    def _open(self, task: Task) -> SlabSink | None:
        """Return what a task writes to, if that is a slab, mapped if it is new."""
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
        self, task: Task, sink: SlabSink | None, random: SampleRandom, hand: LaneStatus
    ) -> tuple[Outcome, tuple[int, ...]]:
        """Return what came of a task, and descriptors to be sent with it."""
        descriptors: tuple[int, ...] = ()
        packed = task.inputs
        inputs = None if packed is None else loads(packed)
        outcome = self._program.run(task.chunk, inputs, sink, random, hand)
        if sink is not None and sink.kept is not None:
            rows, outcome.outputs = sink.kept
            outcome.offsets = [row - task.chunk.first_row for row in rows]
            if task.batch is not None and self._collator is not None:
                hand.begin(task.number)  # no row is to blame for what follows
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
        """Send an outcome; samples that cannot be pickled are failures of their row."""
        try:
            packed = dumps((task.number, outcome))
        except Exception as error:  # noqa: BLE001 whatever pickling the user's raises
            failed = unsendable(self._program, task.chunk, outcome, error)
            packed = dumps((task.number, failed))
        with self._sending:
            self._end.send_packed(packed, descriptors)


class LoneWatch:
    """Sees whether the only worker there is changes what its samples are made from.

    Another worker beside it would have a copy of its own: a count would not go on.
    """

    def __init__(self, things: Sequence[Any]) -> None:
        self._things = things
        self._before = snapshot(things)
        self._tasks = 0

    def look(self) -> str | None:
        """Return what has changed, after each power of two of tasks; else None."""
        self._tasks += 1
        if self._tasks & (self._tasks - 1):
            return None
        return changed(self._before, self._things) or ""


def unsendable(
    program: Program, chunk: Chunk, outcome: Outcome, error: Exception
) -> Outcome:
    """Return the outcome of a chunk whose samples pickle would not take."""
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
        Failure(error, stage, int(index), chunk.first_row + at)
        for at, index in enumerate(chunk.indices)
    ]
    return Outcome(len(chunk), failures=failures)


class Mapped:
    """A slab as this process has it.

    It stays open for the next batch it serves: torch lets go of the GIL while it makes
    tensors, which costs a lane more than all else about a row.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._opened: tuple[Layout, int] | None = None
        self._memory: Any = None

    def open(self, layout: Layout, rows: int) -> Any:
        """Return the memory of a batch of so many rows of this layout."""
        if self._opened != (layout, rows):
            allocate, _ = allocate_on(self._block)
            self._memory = layout.open(rows, allocate)
            self._opened = layout, rows
        return self._memory


class SlabSink:
    """Writes rows into the batch's slab; keeps those that do not fit, to send."""

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
