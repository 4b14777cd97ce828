"""A worker process from within: takes tasks from its pipe until that ends.

It has one lane or several: threads that take tasks from the same pipe in turn, each
with a task of its own. The first lane is the main thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..chunk import Chunk, Failure, Outcome
from ..errors import SampleError
from ..layout import Layout, Misfit, write_rows
from ..program import Program
from ..randomness import SampleRandom
from ..sample import size_of
from .hands import STACK_SIGNAL, Hand, Hands
from .pipe import Pipe
from .slabs import Block, allocate_on, map_shared
from .task import Placement, Task, travel

__all__ = ["Worker", "leave", "use_one_thread"]

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


def leave(status: int) -> NoReturn:
    """End this process at once, with nothing of what it inherited finalised."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or anything at all
            stream.flush()
    os._exit(status)


class Worker:
    """One worker process.

    `_receiving` guards the reading of the pipe and `_slabs`, `_sending` the writing.
    """

    def __init__(self, end: Pipe, program: Program, seed: int, hands: Hands) -> None:
        self._end = end
        self._program = program
        self._seed = seed
        self._hands = hands
        self._slabs: dict[int, Block] = {}
        self._lanes = 1
        self._receiving = threading.Lock()
        self._sending = threading.Lock()

    def run(self) -> None:
        """Work until the trainer closes the pipe, or is gone."""
        faulthandler.enable(self._hands.descriptor)
        faulthandler.register(STACK_SIGNAL, self._hands.descriptor)
        self._end.send(os.getpid())
        self._work(0)

    def _work(self, lane: int) -> None:
        random = SampleRandom(self._seed)
        hand = self._hands.hand(lane)
        while self._serve(random, hand):
            pass

    def _work_beside(self, lane: int) -> None:
        """Work as a further lane: what ends it ends the process."""
        status = 1
        try:
            self._work(lane)
            status = 0
        except EOFError:
            status = 0
        except BaseException:  # noqa: BLE001 the last one who can tell
            traceback.print_exc()
        finally:
            leave(status)

    def _serve(self, random: SampleRandom, hand: Hand) -> bool:
        """Do one task. Holds on to nothing between two of them."""
        with self._receiving:
            task = self._end.receive()
            if isinstance(task, Task):
                block = self._open(task)
        if task is None:
            return False
        if isinstance(task, int):
            self._widen(task)
            return True
        hand.begin(task.number)
        outcome = self._do(task, block, random, hand)
        self._reply(task, outcome)
        hand.end()
        return True

    def _widen(self, lanes: int) -> None:
        """Have so many lanes, or more."""
        while self._lanes < lanes:
            lane, self._lanes = self._lanes, self._lanes + 1
            threading.Thread(
                target=self._work_beside, args=(lane,), name=f"lane {lane}", daemon=True
            ).start()

    def _open(self, task: Task) -> Block | None:
        """Return the slab that a task writes to, mapped if it is new."""
        for key in task.forget:
            self._slabs.pop(key, None)
        placement = task.placement
        if placement is None:
            return None
        if placement.sent:
            descriptor = self._end.descriptors.popleft()
            try:
                self._slabs[placement.key] = map_shared(descriptor, placement.nbytes)
            finally:
                os.close(descriptor)
        return self._slabs[placement.key]

    def _do(
        self, task: Task, block: Block | None, random: SampleRandom, hand: Hand
    ) -> Outcome:
        program = self._program
        sink = SlabSink(task.placement, block) if program.places else None
        outcome = program.run(task.chunk, task.inputs, sink, random, hand)
        if sink is not None and sink.kept is not None:
            rows, outcome.outputs = sink.kept
            outcome.offsets = [row - task.chunk.first_row for row in rows]
        outcome.failures = [travel(failure) for failure in outcome.failures]
        return outcome

    def _reply(self, task: Task, outcome: Outcome) -> None:
        """Send an outcome; samples that cannot be pickled are failures of their row."""
        try:
            with self._sending:
                self._end.send((task.number, outcome))
        except EOFError:
            raise
        except Exception as error:  # noqa: BLE001 whatever pickling the user's raises
            failed = unsendable(self._program, task.chunk, outcome, error)
            with self._sending:
                self._end.send((task.number, failed))


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
    failures = [
        Failure(SampleError(text), stage, int(index), chunk.first_row + at)
        for at, index in enumerate(chunk.indices)
    ]
    return Outcome(outcome.done, failures=failures, run_ns=outcome.run_ns)


class SlabSink:
    """Writes rows into the batch's slab; keeps those that do not fit, to send."""

    def __init__(self, placement: Placement | None, block: Block | None) -> None:
        self.kept: tuple[Sequence[int], list[Any]] | None = None
        """Rows of the batch, and their samples."""
        self._placement = placement
        if placement is not None and block is not None:
            allocate, _ = allocate_on(block)
            self._memory = placement.layout.open(placement.rows, allocate)

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        """Put one sample into each of `rows`; return the bytes they take."""
        if self._placement is not None:
            layout: Layout = self._placement.layout
            try:
                write_rows(layout, self._memory, rows, samples)
            except Misfit:
                pass
            else:
                return layout.row_bytes * len(rows)
        self.kept = rows, list(samples)
        return sum(map(size_of, samples))
