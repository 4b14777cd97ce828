"""Draws from the global generators are noticed, and undone to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

# This module tests the global generators.
# ruff: noqa: NPY002
from penstock.engine.core.in_flight import Chunk
from penstock.engine.plan import Context
from penstock.engine.program import randomness
from penstock.engine.program.operations import SeededRead, WorkerStart
from penstock.engine.program.program import Work
from penstock.engine.program.randomness import (
    SampleRandom,
    SeededCalls,
    Undrawn,
    positions,
)

DRAWS: dict[str, Callable[[], object]] = {
    "a float of random": random.random,
    "bits of random": lambda: random.getrandbits(1),
    "a shuffle": lambda: random.shuffle([1, 2, 3]),
    "a float of numpy": np.random.rand,
    "a normal of numpy": np.random.randn,  # every second one is to spare
    "three normals of numpy": lambda: np.random.randn(3),
    "a normal of random": lambda: random.gauss(0.0, 1.0),
    "a permutation of numpy": lambda: np.random.permutation(5),
    "a float of torch": lambda: torch.rand(()),
    "an int of torch": lambda: torch.randint(9, (1,)),
    "many of torch": lambda: torch.randn(1000),
    "a normal of torch": lambda: torch.randn(1),  # every second one is to spare
}


def next_ones() -> tuple[object, ...]:
    ours = random.gauss(0.0, 1.0), float(np.random.randn())
    return *ours, torch.randn(1).item(), torch.rand(3).tolist()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("draw", list(DRAWS))
def test_every_draw_moves_the_generators_place(draw: str) -> None:
    before = positions()
    assert positions() == before
    for _ in range(700):  # once around the words of a Mersenne Twister, and more
        DRAWS[draw]()
        now = positions()
        assert now != before
        before = now


def test_all_generators_are_read_in_place() -> None:
    names = ("_PYTHON", "_PYTHONS_WORDS", "_SPARE", "_TORCH")
    generators = [getattr(randomness, name) for name in names]
    # Where one has another layout, reading it is slower but as good.
    assert None not in (*generators, randomness._numpys())  # noqa: SLF001


def of_numpy(seed: int) -> np.random.RandomState:
    """Return numpy's generator as a seed sets it."""
    numpys = seed ^ randomness.NUMPYS
    return np.random.RandomState([numpys & 0xFFFFFFFF, numpys >> 32])


@given(st.integers(0, 2**64 - 1))
def test_no_two_libraries_draw_the_same(seed: int) -> None:
    """A crop by one and a flip by the other must have nothing to do with each other."""
    randomness.seed_global_generators(seed)
    pythons = {random.random() for _ in range(1000)}
    assert pythons.isdisjoint(np.random.rand(1000).tolist())
    assert pythons.isdisjoint(torch.rand(1000, dtype=torch.float64).tolist())


@given(st.integers(0, 2**64 - 1), st.sampled_from(sorted(DRAWS)))
def test_a_seed_sets_each_generator_as_its_own_seed_function_does(
    seed: int, drawn: str
) -> None:
    DRAWS[drawn]()
    randomness.seed_global_generators(seed)
    numpys = of_numpy(seed)
    torchs = torch.Generator().manual_seed(seed)
    assert random.getstate() == random.Random(seed).getstate()
    ours, theirs = (
        {**generator.get_state(legacy=False), "gauss": 0.0}
        for generator in (np.random.mtrand._rand, numpys)  # type: ignore[attr-defined]  # noqa: SLF001
    )
    assert repr(ours) == repr(theirs)
    assert np.random.permutation(700).tolist() == numpys.permutation(700).tolist()
    assert torch.equal(torch.default_generator.get_state(), torchs.get_state())


def test_numpy_may_use_another_bit_generator() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.MT19937(3))  # type: ignore[attr-defined]
    try:
        randomness.seed_global_generators(1 << 40)
        assert np.random.rand() == of_numpy(1 << 40).rand()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@given(
    st.lists(st.sampled_from(sorted(DRAWS)), max_size=5),
    st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=5),
)
def test_draws_are_undone(trainers: list[str], datas: list[str]) -> None:
    undrawn = Undrawn()
    for draw in trainers:
        DRAWS[draw]()
    undrawn.look()
    assert not undrawn.drawn
    expected = next_ones()
    assert undrawn.drawn
    undrawn.put_back()
    undrawn.look()
    for draw in datas:
        DRAWS[draw]()
    assert undrawn.drawn
    undrawn.put_back()
    assert next_ones() == expected


@given(draws=st.lists(st.booleans(), min_size=1, max_size=6))
def test_calls_are_repeatable_and_leave_the_trainers_draws_alone(
    draws: list[bool],
) -> None:
    def run(*, seeded: bool) -> tuple[list[float], tuple[object, ...]]:
        random.seed(5)
        calls = SeededCalls(None)
        results = []
        for number, drawing in enumerate(draws):
            if not seeded:
                random.random()  # the trainer's draws change nothing
            make = random.random if drawing else lambda: 0.0
            results.append(calls.call(make, (), 7, number))
        return results, next_ones()[:1]

    results, after = run(seeded=True)
    assert run(seeded=False)[0] == results
    random.seed(5)
    assert after == next_ones()[:1]
    values = [one for one, drawing in zip(results, draws, strict=True) if drawing]
    assert len(set(values)) == len(values)


def test_where_threads_draw_meanwhile_nothing_is_drawn_again() -> None:
    """What another thread draws before a call must not come again after it."""

    def run(*, draws: bool) -> list[float]:
        random.seed(5)
        calls, values = SeededCalls(None), []
        for number in range(3):
            make = random.random if draws else lambda: 0.0
            value = calls.call(make, (), 7, number, apart=True)
            assert value == calls.call(make, (), 7, number, apart=True)
            values += [value] if draws else []
            values.append(random.random())
        return values

    random.seed(5)
    first = random.random()
    for draws in (True, False):
        values = run(draws=draws)
        assert len({first, *values}) == 1 + len(values)
        assert run(draws=draws) == values


def test_a_function_is_seeded_from_its_first_draw_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeded = []

    def note(seed: int) -> None:
        seeded.append(seed)

    monkeypatch.setattr(randomness, "seed_global_generators", note)
    calls = SeededCalls(None)
    for number in range(4):
        assert calls.call(int, (), 7, number) == 0
    assert len(seeded) == 3  # calls 1, 2 and 4 are looked at
    assert 0 <= calls.call(random.random, (), 7, 4) < 1
    for number in range(2):
        calls.call(int, (), 7, number)
    assert len(seeded) == 6


def test_a_call_that_changes_what_it_gets_is_made_once() -> None:
    calls = SeededCalls(None)
    for number in range(8):
        row = np.full(1, number)

        def double() -> float:
            row[:] *= 2  # noqa: B023 called at once
            return random.random() if row[0] > 8 else 0.0  # noqa: B023

        calls.call(double, [row], 7, number)
        assert row.tolist() == [2 * number]


def test_what_a_first_call_sets_up_is_no_state() -> None:
    """A tokenizer is made on first use, and says so in the environment."""
    cache: dict[str, int] = {}

    def set_up() -> int:
        return cache.setdefault("made", 1)

    def count() -> int:
        cache["calls"] = cache.get("calls", 0) + 1
        return cache["calls"]

    for function, keeps in ((set_up, False), (count, True)):
        calls = SeededCalls(function)
        for number in range(5):
            calls.call(function, (), 7, number)
            assert calls.keeps is (keeps or number == 0)


class Keeping:
    """Keeps what it has made, and may draw for it."""

    def __init__(self, drawing: int) -> None:
        self.drawing = drawing
        """Indices from this on draw."""
        self.kept: dict[int, float] = {}

    def __getitem__(self, index: int) -> float:
        if index not in self.kept:
            self.kept[index] = random.random() if index >= self.drawing else 0.0
        return self.kept[index]


def leases(data: Keeping, chunks: list[list[int]]) -> tuple[SeededRead, list[float]]:
    """Read chunks of indices, one lease each; each index is seeded with itself."""
    operation = SeededRead("read", data.__getitem__, None, WorkerStart(data, 1, None))
    samples: list[float] = []
    for step, numbers in enumerate(chunks):
        indices = np.array(numbers, np.int64)
        chunk = Chunk(step, 0, indices, indices, Context(0, step, len(indices)))
        work = Work(chunk, SampleRandom(0), [])
        operation.run(work)
        samples += work.samples
    return operation, samples


@given(st.integers(0, 8), st.lists(st.lists(st.integers(0, 7), min_size=1)))
def test_what_a_cache_keeps_was_drawn_under_its_samples_seed(
    drawing: int, chunks: list[list[int]]
) -> None:
    chunks = [[7], *chunks]  # it draws in its first lease, or never
    _, samples = leases(Keeping(drawing), chunks)
    indices = [index for chunk in chunks for index in chunk]
    assert samples == [
        random.Random(index).random() if index >= drawing else 0.0 for index in indices
    ]


def test_a_full_cache_is_no_longer_seeded() -> None:
    operation, _ = leases(Keeping(8), 20 * [list(range(8))])
    assert operation.seeds is False
    filling, _ = leases(Keeping(99), [[index] for index in range(64)])
    assert filling.seeds is None
    drawing, _ = leases(Keeping(0), 20 * [list(range(8))])
    assert drawing.seeds is True
