"""A worker in a Ray actor, from within: it has one lease at a time.

What it runs comes once, through the object store. It must be importable there: every
node of the cluster has the same packages, and the modules of the user's functions.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import SampleError
from ..batch.layout import size_of_all
from ..core.chunk import Chunk, Outcome
from ..program.program import Program
from ..program.randomness import SampleRandom
from ..program.seeding import mixed, seed_global_generators
from ..witness.witness import Witness
from .process.handover import Flat, flattened, restored, travel
from .process.parcel import unpack
from .process.worker import failed_outcome, unsendable, use_one_thread


class Kept:
    """Keeps the rows of a batch, to send them."""

    def __init__(self) -> None:
        self.rows: Sequence[int] = ()
        self.samples: list[Any] | None = None

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        """Keep one sample for each of `rows`; return the bytes they take."""
        self.rows, self.samples = rows, list(samples)
        return size_of_all(samples)


class Actor:
    """One worker.

    Args:
        parcel: the segment's program, packed; uint8 [bytes].
        seeds: the seed of the samples' random streams, what distinguishes the run from
            others with the same seed, the segment, and the number of workers that had
            this worker's number before.
        number: its number among the workers of the segment.
    """

    def __init__(
        self, parcel: NDArray[np.uint8], seeds: tuple[int, ...], number: int
    ) -> None:
        self._parcel = parcel
        self._seeds = seeds
        self._number = number
        self._random = SampleRandom(seeds[0])
        self._program: Any = None
        self._watch: Witness | None = None

    def begin(self) -> str:
        """Get ready to work; return which process this is, in words.

        Its global generators get a seed of their own, like a worker process's.

        Raises:
            Exception: whatever importing the user's modules raises.
        """
        use_one_thread()
        program: Program = unpack(self._parcel.data)
        seed = mixed(self._seeds) + self._number
        seed_global_generators(seed & 0xFFFFFFFFFFFFFFFF)
        program.enter(self._number)
        self._program = program
        self._watch = Witness(program.watched) if program.watched else None
        return f"{os.getpid()} on {socket.gethostname()}"

    def run(self, chunk: Chunk, packed: Flat | None) -> Flat:
        """Work on a chunk; return its outcome, packed."""
        program: Program = self._program
        outcome = self._outcome(program, chunk, packed)
        if self._watch is not None:
            outcome.changed = self._watch.look()
        try:
            return flattened(outcome)
        except Exception as error:  # noqa: BLE001 whatever pickling user objects raises
            return flattened(unsendable(program, chunk, outcome, error))

    def _outcome(self, program: Program, chunk: Chunk, packed: Flat | None) -> Outcome:
        try:
            inputs = None if packed is None else restored(packed)
        except Exception as error:  # noqa: BLE001 whatever unpickling user objects raises
            text = f"an actor cannot receive a sample ({type(error).__name__}: {error})"
            return failed_outcome(chunk, program.stages[0], SampleError(text))
        sink = Kept() if program.places else None
        outcome = program.run(chunk, inputs, sink, self._random)
        if sink is not None and sink.samples is not None:
            outcome.outputs = sink.samples
            outcome.offsets = [row - chunk.first_row for row in sink.rows]
        outcome.failures = [
            replace(failure, error=travel(failure.error))
            for failure in outcome.failures
        ]
        return outcome
