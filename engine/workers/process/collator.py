"""The user's `collate_fn` in a worker process, and the batches it returns.

A worker that has made all rows of a batch collates them, as torch's workers do. The
arrays of the batch travel in slabs of this process's own: see handover.py.
"""

from __future__ import annotations

import threading
import time
from operator import attrgetter

from ...batch.buffer import Buffers, FailedBatch, Gathered
from ...core.chunk import Chunk, Outcome
from ...plan import BatchPlan
from ...program.seeding import SeededCalls
from .handover import Packer, Returned, travel
from .slabs import SlabPool

KEEP = 40
"""Slabs that the trainer may hold, including those of batches it has not taken yet."""


class Collator:
    """Collates one batch at a time, whichever lane has made its rows.

    Args:
        buffers: turn rows into batches.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._packer = Packer(SlabPool(KEEP))
        self._calls = SeededCalls(buffers.collate)
        # Held while user code runs and until its batch is packed: the next call of a
        # collate_fn may overwrite the memory of the previous batch.
        self._collating = threading.Lock()

    def take_back(self, returned: Returned) -> None:
        """Reuse the slabs that the trainer has released."""
        self._packer.take_back(returned)

    def collate(
        self,
        plan: BatchPlan,
        seed: int,
        chunk: Chunk,
        outcome: Outcome,
        *,
        alone: bool,
    ) -> tuple[int, ...]:
        """Make a batch of the outputs; return descriptors to send with it.

        If the batch cannot be sent, the outputs stay as they are, and the trainer
        collates them.

        Args:
            plan: the plan of the batch.
            seed: seeds its draws, together with its epoch and number.
            chunk: all its rows.
            outcome: the outcome of those rows; the batch replaces them in it.
            alone: whether no other lane may draw at the same time.
        """
        failures = tuple(sorted(outcome.failures, key=attrgetter("row")))
        if self._buffers.failed(failures, plan) is not None:
            outcome.outputs = outcome.offsets = None  # the batch fails as a whole
            return ()
        start_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        samples, offsets = outcome.outputs or [], outcome.offsets or []
        buffer = self._buffers.of(plan)
        buffer.place(offsets, samples)
        gathered = Gathered(buffer, plan, chunk.indices, failures)
        descriptors: tuple[int, ...] = ()
        with self._collating:
            made = self._calls.call(
                gathered.collate, seed, plan.epoch, plan.batch, alone=alone
            )
            if isinstance(made, FailedBatch):
                outcome.made = FailedBatch(travel(made.error))
            else:
                try:
                    outcome.made, descriptors = self._packer.pack(made.data)
                except Exception:  # noqa: BLE001 whatever pickling user objects raises
                    return ()
                outcome.nbytes = max(self._packer.nbytes, len(outcome.made.body))
        outcome.outputs = outcome.offsets = None
        run_ns = time.perf_counter_ns() - start_ns
        outcome.run_ns += run_ns
        cpu_ns = time.thread_time_ns() - cpu_ns
        outcome.cpu_ns += cpu_ns
        outcome.parts = (*outcome.parts[:-1], (run_ns, cpu_ns, 0))
        return descriptors
