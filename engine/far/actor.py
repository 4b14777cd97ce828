"""A worker in a Ray actor, from within: an engine that makes what it is assigned.

What it runs comes once, through the object store. It must be importable there: every
node of the cluster has the same packages, and the modules of the user's functions.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..program.seeding import mixed, seed_global_generators
from ..recipe import Recipe, SegmentRecipe
from .assigned_engine import AssignedEngine, Made, set_up_libraries
from .assignment import Assignment
from .handover import Flat, flattened
from .parcel import unpack


class Actor:
    """One worker.

    Args:
        parcel: what it works by, and the segment in the trainer, packed; uint8 [bytes].
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
        self._program: Any = None
        self._engine: Any = None

    def begin(self) -> str:
        """Get ready to work; return which process this is, in words.

        Its global generators get a seed of their own, like a worker process's.

        Raises:
            Exception: whatever importing the user's modules raises.
        """
        set_up_libraries()
        recipe: Recipe
        segment: SegmentRecipe
        recipe, segment = unpack(self._parcel.data)
        seed = mixed(self._seeds) + self._number
        seed_global_generators(seed & 0xFFFFFFFFFFFFFFFF)
        segment.program.enter(self._number)
        self._program = segment.program
        self._engine = AssignedEngine(recipe, segment).__enter__()
        return f"{os.getpid()} on {socket.gethostname()}"

    def run(self, assignment: Assignment) -> Flat:
        """Make what is assigned; return the result, packed, with all data in it."""
        self._engine.assign(assignment)
        made: Made = self._engine.make()
        try:
            return flattened(made.result)
        except Exception as error:  # noqa: BLE001 whatever pickling user objects raises
            return flattened(made.unsendable(self._program, error))
