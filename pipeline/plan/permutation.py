"""A shuffled order that is computed where it is looked at, and stored nowhere."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Permutation"]

# Up to this length the permutation is made by sorting, which is exactly uniform; a
# network over so few values would show (an even number of halves yields even
# permutations only).
SORTED_LENGTH = 4096
# blake2b yields at most 64 bytes: one 8-byte key for each of the network's rounds. At 4
# rounds neighbours 64 apart still correlate, from 6 on no test here tells it from
# chance.
FEISTEL_ROUNDS = 6

HALF = np.uint64(32)
# Odd and without pattern in their bits: 2**64 / golden ratio, and a multiplier of the
# same kind (Steele, Vigna: "Computationally easy, spectrally good multipliers", 2021).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SPREAD = np.uint64(0xD1342543DE82EF95)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudo-random permutation of [0, length), keyed by (seed, round).

    Any position is found in O(1) time and memory: up to 4096 values are sorted by
    random words; above, a generalised Feistel network over Z_a x Z_b with a * b >=
    length walks the few values that fall outside until they are inside (Black, Rogaway:
    "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5). The same on every
    machine.
    """

    length: int
    """1 to 2**63 - 1."""
    seed: int
    round_: int
    """The pass over the data: each has a permutation of its own."""

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what stands at `positions`, `int64 [N]`, each in [0, length)."""
        keys = self._keys()
        if self.length <= SORTED_LENGTH:
            philox = np.random.Philox(key=keys[:2])
            return np.argsort(philox.random_raw(self.length), kind="stable")[positions]
        lower = math.isqrt(self.length - 1) + 1
        upper = -(-self.length // lower)
        return self._walk(positions.astype(np.uint64), upper, lower, keys)

    def _keys(self) -> NDArray[np.uint64]:
        """Return 8 words that share nothing between any two (seed, round)."""
        text = f"penstock order, seed {self.seed}, round {self.round_}"
        digest = hashlib.blake2b(text.encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64)

    def _walk(
        self,
        values: NDArray[np.uint64],
        upper: int,
        lower: int,
        keys: NDArray[np.uint64],
    ) -> NDArray[np.int64]:
        """Apply the network until all are inside: at most 1 value in 64 walks on."""
        values = feistel(values, upper, lower, keys)
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:
            walked = feistel(values[outside], upper, lower, keys)
            values[outside] = walked
            outside = outside[walked >= np.uint64(self.length)]
        return values.view(np.int64)


def feistel(
    values: NDArray[np.uint64], upper: int, lower: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute [0, upper * lower): split in two digits, add a mix of one to the other.

    Args:
        values: `uint64 [N]`.
        upper: the number of values of the upper digit, < 2**32.
        lower: of the lower digit, < 2**32.
        keys: `uint64 [R]`, R even: one key a round.
    """
    near_size, far_size = np.uint64(upper), np.uint64(lower)
    near = values // far_size
    mixed = near * far_size
    far = values - mixed
    other = np.empty_like(near)
    for key in keys:
        np.add(far, key, out=mixed)
        mixed *= GOLDEN
        np.right_shift(mixed, HALF, out=other)
        mixed ^= other
        mixed *= SPREAD
        mixed >>= HALF
        # 32 random bits scaled to [0, near_size) by a multiplication, not a division
        # (Lemire: "Fast random integer generation in an interval", 2019).
        mixed *= near_size
        mixed >>= HALF
        mixed += near
        # mixed modulo near_size: it is below twice that, and where it is smaller the
        # difference wraps around to a huge number.
        np.subtract(mixed, near_size, out=other)
        np.minimum(mixed, other, out=near)
        near, far = far, near
        near_size, far_size = far_size, near_size
    near *= far_size
    near += far
    return near
