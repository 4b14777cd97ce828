"""The randomness of a sample is a function of (seed, round, index, stage) alone."""

import numpy as np
import pytest

from penstock.engine.program.randomness import SampleRandom
from penstock.errors import SpecError

GOLDEN = [
    0x39F974E0669097D8,
    0x45443F263E455FA0,
    0xCDE5616C9A90FB13,
    0xC571B0E820F51418,
    0x6A996257224BB8CB,
]


def drawn(random: SampleRandom, round_: int, index: int, stage: int) -> list[int]:
    generator = random.at(round_, index, stage)
    return list(map(int, generator.integers(0, 2**64, size=6, dtype=np.uint64)))


def test_the_streams_are_the_same_in_every_release_and_on_every_machine() -> None:
    raw = SampleRandom(7).at(3, 1000, 2).bit_generator.random_raw(5)
    assert raw.tolist() == GOLDEN


def test_a_stream_is_philox_with_seed_as_key_and_the_address_as_counter() -> None:
    philox = np.random.Philox(key=7, counter=[0, 2, 1000, 3])
    raw = SampleRandom(7).at(3, 1000, 2).bit_generator.random_raw(50)
    assert raw.tolist() == philox.random_raw(50).tolist()


def test_earlier_draws_do_not_matter() -> None:
    random = SampleRandom(0)
    expected = drawn(SampleRandom(0), 1, 2, 3)
    earlier = random.at(9, 9, 9)
    earlier.random(3)  # leaves words in Philox's buffer of four
    earlier.integers(0, 10, dtype=np.uint32)  # leaves half a word
    earlier.standard_normal(5)
    assert drawn(random, 1, 2, 3) == expected


def test_a_half_word_left_over_is_forgotten() -> None:
    random = SampleRandom(0)
    first = random.at(0, 0, 0).integers(0, 2**32, dtype=np.uint32)
    assert random.at(0, 0, 0).integers(0, 2**32, dtype=np.uint32) == first


def test_streams_differ_in_seed_round_index_and_stage() -> None:
    addresses = [(a, b, c) for a in range(6) for b in range(6) for c in range(6)]
    firsts = {
        tuple(drawn(random, *address))
        for random in (SampleRandom(0), SampleRandom(1), SampleRandom(2**63))
        for address in addresses
    }
    assert len(firsts) == 3 * len(addresses)


def test_streams_of_consecutive_samples_together_look_uniform() -> None:
    random = SampleRandom(5)
    values = np.array([random.at(0, index, 0).random() for index in range(20_000)])
    observed = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = ((observed - 200) ** 2 / 200).sum()
    assert chi_square < 99 + 5 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(values.size)


def test_addresses_may_be_as_large_as_any_dataset() -> None:
    random = SampleRandom(2**64 - 1)
    assert drawn(random, 2**40, 10**12, 7) != drawn(random, 2**40, 10**12 + 1, 7)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "0", None])
def test_a_seed_that_is_not_a_64_bit_int_is_refused_and_shown(seed: object) -> None:
    with pytest.raises(SpecError, match=r"`seed` must be an int.*got"):
        SampleRandom(seed)  # type: ignore[arg-type]
