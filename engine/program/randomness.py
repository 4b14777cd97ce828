"""Draws that can be repeated: by a sample's own generator, and by the global ones.

A function that takes `rng` gets a separate generator for every (seed, round, index,
stage). Philox 4x64 is counter-based: block `c` of the stream with key `k` is a function
of (k, c) alone. A stream is chosen by writing the counter, without the cost of seeding,
and streams that differ in any word above the lowest never meet (Salmon, Moraes, Dror,
Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Here:

    key          the user's seed
    counter      [0: left to the stream, 2**64 blocks] [1: stage] [2: index] [3: round]

Other functions draw from the generators of `random`, `numpy.random` and torch. These
can be seeded, observed in place, and put back.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import (  # numpy loads it on first use, perhaps in a thread
    Generator,
    Philox,
)

from ...errors import checked_seed
from ..witness.witness import Witness

T = TypeVar("T")
States = tuple[Any, Any, torch.Tensor]


# What makes numpy's seed another one: with the same, both would draw the same.
NUMPYS = 0x9E3779B97F4A7C15


def seed_global_generators(seed: int) -> None:
    """Set the generators of `random`, numpy and torch (on the CPU) from 64 bits.

    Python and numpy make the same words from the same two numbers (`init_by_array` of
    Matsumoto and Nishimura). So numpy's are made by Python, from another seed, and
    copied: that takes half of the time.
    """
    pythons_words, words, spare = _PYTHONS_WORDS, _numpys(), _SPARE
    numpys = seed ^ NUMPYS
    if pythons_words and words is not None and spare is not None and numpys >> 32:
        random.seed(numpys)
        memoryview(words).cast("B")[:-4] = pythons_words
        words[WORDS], spare[0] = WORDS, 0
    else:  # Python takes a single number if the upper half is 0
        np.random.seed([numpys & 0xFFFFFFFF, numpys >> 32])  # noqa: NPY002 the global one
    random.seed(seed)
    torch.default_generator.manual_seed(seed)


def mixed(numbers: Sequence[int]) -> int:
    """Return 64 bits that depend on all these numbers, each >= 0."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the global generators at the end of the `with`."""
    before = states()
    try:
        yield
    finally:
        restore(before)


@contextlib.contextmanager
def seeded_by(*numbers: int) -> Iterator[None]:
    """Seed the global generators with these numbers; restore them at the end."""
    with undisturbed():
        seed_global_generators(mixed(numbers))
        yield


@contextlib.contextmanager
def seeded_apart(*numbers: int) -> Iterator[None]:
    """Seed the global generators with these numbers; end with fresh states.

    For a worker process whose threads draw at the same time: after going back, they
    would draw the same once more.
    """
    fresh = random.getrandbits(64)
    seed_global_generators(mixed(numbers))
    try:
        yield
    finally:
        seed_global_generators(fresh)


def states() -> States:
    """Return the complete states of the global generators."""
    numpys = np.random.get_state(legacy=False)  # noqa: NPY002 the global one
    return random.getstate(), numpys, torch.default_generator.get_state()


def restore(before: States) -> None:
    """Restore the states of the global generators."""
    python, numpys, torchs = before
    random.setstate(python)
    np.random.set_state(numpys)  # noqa: NPY002 the global one
    torch.default_generator.set_state(torchs)


Positions = tuple[Any, Any, Any]


def positions() -> Positions:
    """Return values that change when anything is drawn; takes half a microsecond.

    A Mersenne Twister counts the used words of its state, and makes new words when they
    are all used. So the count and one word are enough. They are read in place: Python,
    numpy and torch would copy the whole state.
    """
    python, numpys, torchs = _PYTHON, _numpys(), _TORCH
    return (
        random.getstate()
        if python is None
        else (python[0], python[1], _GENERATOR.gauss_next),
        repr(np.random.get_state(legacy=False))  # noqa: NPY002 the global one
        if numpys is None or _SPARE is None
        else (numpys[WORDS], numpys[0], _SPARE[0]),
        torch.default_generator.get_state().numpy().tobytes()
        if torchs is None
        else (torchs[0], torchs[BEFORE], torchs[SPARE]),
    )


class Undrawn:
    """Notices draws from the trainer's global generators, and can undo them."""

    def __init__(self) -> None:
        self._positions: Positions | None = None
        self._states: States | None = None

    def look(self) -> None:
        """Note the generators' states; cheap if nobody has drawn since."""
        now = positions()
        if now != self._positions:
            self._positions, self._states = now, states()

    @property
    def drawn(self) -> bool:
        """Whether anything was drawn since."""
        return positions() != self._positions

    def put_back(self) -> None:
        """Restore the generators to the noted states."""
        assert self._states is not None
        restore(self._states)


# Up to which call those that are looked at show whether they change what they get: a
# look at all samples of a batch takes some milliseconds.
FIRST_CALLS = 8


class SeededCalls:
    """Calls something that may draw, without disturbing the trainer's own draws.

    Setting and restoring the generators takes 100 us, so calls that draw nothing are
    not seeded. The first call is seeded, and shows whether it draws. If a later one
    draws, it is made again under its seed. While calls change the subject, none may be
    made twice, so all of them are seeded: what the first call sets up changes it, too,
    so later calls are looked at again, ever more rarely. Once a call has changed what
    it got, none is made twice, either: it would get what the first one made of that.

    One thread at a time calls.

    Args:
        subject: what is called.
    """

    def __init__(self, subject: Any) -> None:
        self._subject, self._undrawn = [subject], Undrawn()
        # Whether a call drew, or changed what it got.
        self._once, self._calls = False, 0
        # Whether calls change the subject; None before the first.
        self.keeps: bool | None = None

    def call(
        self,
        make: Callable[[], T],
        inputs: Iterable[Any],
        *seed: int,
        apart: bool = False,
    ) -> T:
        """Return the result of `make`; its draws depend on `seed` alone.

        A draw of another thread looks like one of this call.

        Args:
            make: calls the subject.
            inputs: what the subject gets.
            seed: the numbers that seed this call.
            apart: whether this is a worker process, whose threads may draw meanwhile:
                each call is seeded, and nothing is undone.
        """
        undrawn = self._undrawn
        self._calls += 1
        looks = not self._calls & (self._calls - 1)
        if self.keeps is False and not (self._once or looks or apart):
            undrawn.look()
            result = make()
            if not undrawn.drawn:
                return result
            undrawn.put_back()
        witness = Witness(self._subject) if looks and self.keeps is not False else None
        is_new = looks and self._calls <= FIRST_CALLS and not self._once
        given = Witness([list(inputs)] if is_new else ())
        with (seeded_apart if apart else seeded_by)(*seed):
            undrawn.look()
            result = make()
            self._once = self._once or undrawn.drawn or given.changed() is not None
        if witness is not None:
            self.keeps = not witness.repeats()
        return result


# Words of a Mersenne Twister's state.
WORDS = 624
# Words in torch's state before those: the first counts how many of them are left.
BEFORE = 3
# Where torch notes a spare normal number; drawing that one moves nothing else.
SPARE = BEFORE + WORDS + 5
Words = ctypes.Array[ctypes.c_uint32]


_GENERATOR: Any = random._inst  # noqa: SLF001


def _pythons() -> Words | None:
    """Return the state of Python's generator in place: the count, then the words.

    None if its memory layout is not that of CPython (Modules/_randommodule.c).
    """
    generator, start = _GENERATOR, object.__basicsize__
    if type(generator) is not random.Random or (
        generator.__sizeof__() < start + 4 * (WORDS + 1)
    ):
        return None
    words = (ctypes.c_uint32 * (WORDS + 1)).from_address(id(generator) + start)
    return words if (*words[1:], words[0]) == generator.getstate()[1] else None


def _address(generator: Any) -> int:
    return int(generator._cdata)  # noqa: SLF001


def _torchs() -> Words | None:
    """Return the state of torch's generator in place, from the count on.

    (ATen/core/MT19937RNGEngine.h, ATen/CPUGeneratorImpl.h.) None if a generator created
    for this test shows another memory layout.
    """
    other = torch.Generator().manual_seed(1)
    torch.randn(1, generator=other)
    first = other.get_state().numpy().view(np.uint64)[BEFORE]
    words = (ctypes.c_uint32 * WORDS).from_address(_address(other))
    at = next((at for at in range(BEFORE, 64) if words[at] == first), None)
    if at is None:
        return None
    offset, kind = 4 * (at - BEFORE), ctypes.c_uint32 * (SPARE + 1)
    state = kind.from_address(_address(other) + offset)
    spare = []
    for _ in range(3):
        spare.append(state[SPARE] & 0xFF)
        torch.randn(1, generator=other)
    words_left = int(other.get_state().numpy().view(np.int32)[2])
    if (*spare, state[0]) != (1, 0, 1, words_left):
        return None
    return kind.from_address(_address(torch.default_generator) + offset)


def _spare() -> Words | None:
    """Return the word in which numpy notes whether it has a spare normal number.

    (`aug_bitgen_t` in numpy/random/src/legacy/legacy-distributions.h.) It is found in a
    generator created for this test, as the one word that shows it over four draws. None
    if no word does, or several do.
    """
    other, ours = np.random.RandomState(0), np.random.mtrand._rand  # noqa: SLF001
    size = type(other).__basicsize__ // 4
    words = (ctypes.c_uint32 * size).from_address(id(other))
    states, spares = [], []
    for _ in range(4):
        spares.append(other.get_state(legacy=False)["has_gauss"])
        states.append(tuple(words))
        other.randn()
    places = [at for at in range(size) if [state[at] for state in states] == spares]
    if spares != [0, 1, 0, 1] or len(places) != 1 or type(ours) is not type(other):
        return None
    return (ctypes.c_uint32 * 1).from_address(id(ours) + 4 * places[0])


def _made_words() -> memoryview | None:
    """Return the words that Python makes from a seed, in place.

    None if numpy makes other words from the same seed.
    """
    seed = 0x0123456789ABCDEF
    numpys = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])
    state = numpys.get_state(legacy=False)["state"]
    words = (*state["key"].tolist(), state["pos"])
    if _PYTHON is None or random.Random(seed).getstate()[1] != words:
        return None
    return memoryview(_PYTHON).cast("B")[4:]


_PYTHON = _pythons()
_PYTHONS_WORDS = _made_words()
_SPARE = _spare()
_TORCH = _torchs()
_numpys_words: tuple[Any, Words | None] = (None, None)


def _numpys() -> Words | None:
    """Return the state of numpy's global generator in place: the words, then the count.

    (numpy/random/src/mt19937/mt19937.h.) None if it is not a Mersenne Twister.
    """
    global _numpys_words  # noqa: PLW0603 nearly always the same generator
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if generator is not _numpys_words[0]:
        words = None
        if isinstance(generator, np.random.MT19937):
            address = generator.ctypes.state_address
            words = (ctypes.c_uint32 * (WORDS + 1)).from_address(address)
        _numpys_words = generator, words
    return _numpys_words[1]


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
        self._philox = Philox(key=self._seed)
        self._generator = Generator(self._philox)
        # A fresh state has no leftover words: `buffer_pos` is at the buffer's end and
        # `has_uint32` is 0. Writing it back whole therefore also discards what the
        # previous sample left unread.
        self._state = self._philox.state
        self._counter = self._state["state"]["counter"]

    def at(self, round_: int, index: int, stage: int) -> Generator:
        """Return the generator at the start of one sample's stream in one stage.

        Args:
            round_: epoch * repeats + pass, >= 0.
            index: the sample's index in the dataset, >= 0.
            stage: the number of the stage in its pipeline, >= 0.
        """
        self._counter[:] = (0, stage, index, round_)
        self._philox.state = self._state
        return self._generator
