"""Sample seeding: functions that draw from the global generators, made repeatable.

The generators of `random`, `numpy.random` and torch are set from a sample's own seed
before it is made, so its bytes do not depend on who makes it, or after what. That takes
some 20 us, so it is left out for data that draws nothing: whether it does is looked at
in the first leases of a worker, which are made once more where it does, and in one of
many later on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .program import Calling, Calls, Read, Work

__all__ = ["SeededRead"]

LOOKS = 64
"""Leases of a worker that are all looked at."""
LATER = 16
"""Of the leases after these, one in so many is."""

States = tuple[Any, Any, bytes]


@dataclass(slots=True, eq=False)
class SeededRead(Calling):
    """Asks the dataset for the chunk's indices, each under its own seed.

    For one thread a process: the generators are the process's own.
    """

    stage: str
    get: Callable[[int], Any]
    get_many: Callable[[list[int]], Sequence[Any]] | None = None
    trainer: int = field(default_factory=os.getpid)
    """The process whose generators belong to somebody else."""
    draws: bool = False
    """Whether a sample was seen to draw from a global generator."""
    leases: int = 0

    def run(self, work: Work) -> None:
        """Read; keep the trainer's generators as they are."""
        self.leases += 1
        looks = self.draws or self.leases <= LOOKS or self.leases % LATER == 0
        if not looks:
            Read(self.stage, self.get, self.get_many).run(work)
            return
        before = states()
        try:
            self._read(work, before)
        finally:
            if os.getpid() == self.trainer and states() != before:
                restore(before)

    def begin(self, work: Work) -> Calls:
        """Ask for one sample after the other, each under its seed."""
        pairs = zip(
            work.chunk.indices.tolist(), work.chunk.rounds.tolist(), strict=True
        )
        indices = work.watched(seeded(pairs))
        return Calls(map(self.get, indices), len(work.chunk), work)

    def _read(self, work: Work, before: States) -> None:
        if not self.draws:
            first = Work(work.chunk, work.random, [], watch=work.watch)
            Read(self.stage, self.get, self.get_many).run(first)
            self.draws = states() != before
            if not self.draws:
                work.samples, work.offsets = first.samples, first.offsets
                work.failures = first.failures
                return
        Calling.run(self, work)


def seeded(pairs: Iterator[tuple[int, int]]) -> Iterator[int]:
    """Yield each index with the global generators set to its seed."""
    for index, seed in pairs:
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 the global one
        torch.default_generator.manual_seed(seed)
        yield index


def states() -> States:
    """Return the states of the global generators: to compare, or to restore."""
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002 the global one
    assert isinstance(legacy, dict)
    inner = legacy["state"]
    known = (inner["key"].tobytes(), inner["pos"], legacy["has_gauss"], legacy["gauss"])
    return (
        random.getstate(),
        known,
        torch.default_generator.get_state().numpy().tobytes(),
    )


def restore(before: States) -> None:
    """Put the global generators back."""
    python, (key, position, has_gauss, gauss), torchs = before
    random.setstate(python)
    words = np.frombuffer(key, np.uint32)
    np.random.set_state(("MT19937", words, position, has_gauss, gauss))  # noqa: NPY002
    state = torch.frombuffer(bytearray(torchs), dtype=torch.uint8)
    torch.default_generator.set_state(state)
