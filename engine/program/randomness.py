"""A separate generator for every (seed, round, index, stage).

Philox 4x64 is counter-based: block `c` of the stream with key `k` is a function of (k,
c) alone. A stream is chosen by writing the counter, without the cost of seeding, and
streams that differ in any word above the lowest never meet (Salmon, Moraes, Dror, Shaw:
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). Here:

    key          the user's seed
    counter      [0: left to the stream, 2**64 blocks] [1: stage] [2: index] [3: round]
"""

from __future__ import annotations

from numpy import random  # numpy loads it on first use, perhaps in a thread

from ...errors import checked_seed


class SampleRandom:
    """One numpy `Generator`, reset to a sample's own stream for every sample.

    One worker owns it; threads must not share it. A generator that it returned is valid
    until the next call of `at`.

    Raises:
        SpecError: the seed is not an int in [0, 2**64).
    """

    __slots__ = ("_counter", "_generator", "_philox", "_seed", "_state")

    def __init__(self, seed: int) -> None:
        self._seed = checked_seed(seed)
        self._philox = random.Philox(key=self._seed)
        self._generator = random.Generator(self._philox)
        # A fresh state has no leftover words: `buffer_pos` is at the buffer's end and
        # `has_uint32` is 0. Writing it back whole therefore also discards what the
        # previous sample left unread.
        self._state = self._philox.state
        self._counter = self._state["state"]["counter"]

    def at(self, round_: int, index: int, stage: int) -> random.Generator:
        """Return the generator at the start of one sample's stream in one stage.

        Args:
            round_: epoch * repeats + pass, >= 0.
            index: the sample's index in the dataset, >= 0.
            stage: the number of the stage in its pipeline, >= 0.
        """
        self._counter[:] = (0, stage, index, round_)
        self._philox.state = self._state
        return self._generator
