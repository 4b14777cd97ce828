"""Sample seeding: functions that draw from the global generators, made repeatable.

The generators of `random`, `numpy.random` and torch are set from a sample's own seed
before it is made, so its bytes do not depend on who makes it, or after what. That takes
some 20 us, so it is left out for data that draws nothing. Each lease is watched, which
takes 12 us, and one in which something is drawn is made once more. A dataset that reads
on, or counts, would give other samples then: if it is seen to, all its samples are
seeded. A worker process begins as torch's data sets and `worker_init_fn` expect to find
it: `WorkerStart`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torchs

from ..movable import changed, find_unsafe, snapshot
from .program import Calling, Calls, Read, Work

WORDS = 4 * 624 + 4
"""Bytes of `mt19937_state` (numpy/random/src/mt19937/mt19937.h)."""

Marks = tuple[Any, bytes, bytes]
States = tuple[Any, Any, torch.Tensor]


@dataclass(slots=True, eq=False)
class SeededRead(Calling):
    """Asks the dataset for the chunk's indices, each under its own seed.

    For one thread a process: the generators are the process's own.
    """

    stage: str
    get: Callable[[int], Any]
    get_many: Callable[[list[int]], Sequence[Any]] | None
    start: WorkerStart
    """What a worker process does first."""
    trainer: int = field(default_factory=os.getpid)
    """The process whose generators belong to somebody else."""
    seeds: bool | None = None
    """Whether each sample is seeded; None: the first lease, which is, will tell."""
    number: int | None = None
    """Of the worker process that has not begun."""

    def enter(self, number: int) -> None:
        """This is worker process `number` from here on."""
        self.number = number

    def run(self, work: Work) -> None:
        """Read; keep the trainer's generators as they are."""
        if self.number is not None:
            try:
                self.start(self.number)
            except Exception as error:  # noqa: BLE001 the trainer is to see it
                work.fail_all(error, self.stage)
                return
            self.number = None
        if self.seeds is None and self.get_many is None:
            data = self.start.dataset
            before = snapshot([data])
            self._read_seeded(work)
            held = find_unsafe(data, "dataset")
            self.seeds = held is not None or changed(before, [data]) is not None
        elif self.seeds or self._draws(work):
            self.seeds = True
            self._read_seeded(work)

    def _draws(self, work: Work) -> bool:
        """Read unless something is drawn, and if it is, undo the draws."""
        before = marks()
        first = Work(work.chunk, work.random, [], watch=work.watch)
        Read(self.stage, self.get, self.get_many).run(first)
        if marks() != before:
            put_back(before)
            return True
        work.samples, work.offsets = first.samples, first.offsets
        work.failures = first.failures
        return False

    def _read_seeded(self, work: Work) -> None:
        known = states() if os.getpid() == self.trainer else None
        try:
            Calling.run(self, work)
        finally:
            if known is not None:
                restore(known)

    def begin(self, work: Work) -> Calls:
        """Ask for one sample after the other, each under its seed."""
        pairs = zip(
            work.chunk.indices.tolist(), work.chunk.rounds.tolist(), strict=True
        )
        indices = work.watched(seeded(pairs))
        return Calls(map(self.get, indices), len(work.chunk), work)


def seeded(pairs: Iterator[tuple[int, int]]) -> Iterator[int]:
    """Yield each index with the global generators set to its seed."""
    for index, seed in pairs:
        seed_global_generators(seed)
        yield index


def seed_global_generators(seed: int) -> None:
    """Set the generators of `random`, numpy and torch (on the CPU) to 64 bits."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 the global one
    torch.default_generator.manual_seed(seed)


def mixed(numbers: Sequence[int]) -> int:
    """Return 64 bits that depend on all of these numbers, each of 0 or more."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@contextlib.contextmanager
def seeded_by(*numbers: int) -> Iterator[None]:
    """Seed the global generators by these numbers within; put them back after it."""
    known = states()
    try:
        seed_global_generators(mixed(numbers))
        yield
    finally:
        restore(known)


def marks() -> Marks:
    """Return what changes when anything is drawn; takes 12 us."""
    torchs = torch.default_generator.get_state().numpy().tobytes()
    words = _words()
    if words is None:
        numpys = repr(np.random.get_state(legacy=False)).encode()  # noqa: NPY002
    else:
        numpys = bytes(words)
    return random.getstate(), numpys, torchs


def put_back(before: Marks) -> None:
    """Set the generators to their marks. A normal number numpy had to spare is lost."""
    python, numpys, torchs = before
    random.setstate(python)
    words = _words()
    if words is not None:
        ctypes.memmove(words, numpys, WORDS)
    state = torch.frombuffer(bytearray(torchs), dtype=torch.uint8)
    torch.default_generator.set_state(state)


def states() -> States:
    """Return the whole states of the global generators."""
    numpys = np.random.get_state(legacy=False)  # noqa: NPY002 the global one
    return random.getstate(), numpys, torch.default_generator.get_state()


def restore(before: States) -> None:
    """Put the global generators back."""
    python, numpys, torchs = before
    random.setstate(python)
    np.random.set_state(numpys)  # noqa: NPY002 the global one
    torch.default_generator.set_state(torchs)


def _words() -> Any:
    """The state of numpy's global Mersenne Twister in place; None if it is another."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return None
    return (ctypes.c_char * WORDS).from_address(generator.ctypes.state_address)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What is done once in a worker process, before its first sample.

    A worker that replaces another has the number of that one; the most there were at
    once may grow while training runs, so `num_workers` is that when a worker began.
    """

    dataset: Any
    num_workers: int
    """As the user asked for; 0 leaves it to the tuner."""
    init: Callable[[int], Any] | None
    """`worker_init_fn`."""

    def __call__(self, number: int) -> None:
        """Make this process worker `number`: `get_worker_info()` answers from here on.

        The process began with global generators of its own, from which a
        `worker_init_fn` derives its seeds.

        Raises:
            Exception: whatever the user's `worker_init_fn` raises.
        """
        torchs._worker_info = torchs.WorkerInfo(  # noqa: SLF001 the one place that `get_worker_info` reads
            id=number,
            num_workers=max(self.num_workers, number + 1),
            seed=torch.initial_seed(),
            dataset=self.dataset,
        )
        if self.init is not None:
            self.init(number)
