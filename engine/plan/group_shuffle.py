"""A shuffle that reads shards one after another: groups first, then samples of a few.

Reading a row of a compressed file means reading everything compressed with it. An order
that mixes the whole dataset thus reads a whole block for each sample. This one
shuffles the groups (shards, row groups), and mixes the samples of `window` of them at a
time. Each group is needed once an epoch, for as long as its window lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...errors import check, checked_seed
from .order import (
    Numbers,
    Order,
    Recent,
    Rows,
    Shuffle,
    by_key,
    drawn_order,
    sealed,
)

KEPT_ROUNDS = 2
"""Rounds whose shuffled groups are kept."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The samples of each group of a dataset, in order; compared by the digest."""

    sizes: Numbers = field(repr=False, compare=False)
    """`int64 [G]`, each >= 1, read-only."""
    starts: Numbers = field(repr=False, compare=False)
    """Where each group begins in the dataset, `int64 [G]`."""
    digest: str

    @classmethod
    def of(cls, sizes: Any, length: int) -> Groups:
        """Copy `sizes`, `int [G]`, leaving out groups without samples.

        Raises:
            SpecError: they do not add up to `length` samples.
        """
        given = np.asarray(sizes, dtype=np.int64)
        given = given[given != 0]
        check(
            given.ndim == 1 and (given > 0).all() and int(given.sum()) == length,
            f"`group_sizes` must list the number of samples in each group and add up"
            f" to {length}, got {given.size} groups that add up to {int(given.sum())};"
            " return the size of each shard, in order",
        )
        return cls(given, np.cumsum(given) - given, sealed(given))


class ShuffledGroups(NamedTuple):
    """The groups of a round in their order, `[G]`."""

    order: Numbers
    ends: Numbers
    """Where each group ends, in positions of the round."""


@dataclass(frozen=True, slots=True)
class GroupShuffle:
    """The groups in a pseudo-random order, with the samples of a few mixed at a time.

    Args:
        groups: the groups of the dataset, in its own order.
        seed: each round has another order.
        window: groups that are mixed, >= 1.
    """

    groups: Groups
    seed: int
    window: int
    _kept: Recent[ShuffledGroups] = field(
        default_factory=lambda: Recent(KEPT_ROUNDS),
        init=False,
        repr=False,
        compare=False,
    )

    @property
    def length(self) -> int:
        return int(self.groups.sizes.sum())

    def trace(self, rows: Rows) -> Rows:
        """Return the positions of each round at `rows`; O(G) once for a round."""
        return Rows(by_key(rows.rounds, rows.indices, self.at), rows.rounds)

    def at(self, round_: int, positions: Numbers) -> Numbers:
        """Return the samples at positions of a round, `[N]`."""
        shuffled = self.shuffled(round_)
        ends = shuffled.ends

        def mixed(number: int, positions: Numbers) -> Numbers:
            first = number * self.window
            start = int(ends[first - 1]) if first else 0
            length = int(ends[min(first + self.window, ends.size) - 1]) - start
            key = round_ * ends.size + number
            inside = Shuffle(length, self.seed).at(key, positions - start)
            return self.samples(shuffled, start + inside)

        numbers = np.searchsorted(ends, positions, side="right") // self.window
        return by_key(numbers, positions, mixed)

    def samples(self, shuffled: ShuffledGroups, positions: Numbers) -> Numbers:
        """Return the samples at positions of the ordered groups, unmixed."""
        places = np.searchsorted(shuffled.ends, positions, side="right")
        group = shuffled.order[places]
        inside = positions - (shuffled.ends[places] - self.groups.sizes[group])
        found: Numbers = self.groups.starts[group] + inside
        return found

    def shuffled(self, round_: int) -> ShuffledGroups:
        """Return the groups in the order of a round."""

        def shuffle() -> ShuffledGroups:
            text = f"penstock groups, seed {self.seed}, round {round_}"
            order = drawn_order(text, self.groups.sizes.size)
            return ShuffledGroups(order, np.cumsum(self.groups.sizes[order]))

        return self._kept.get(round_, shuffle)

    def __str__(self) -> str:
        return (
            f"shuffle(seed={self.seed}, window={self.window} of"
            f" {self.groups.sizes.size} groups, blake2b {self.groups.digest})"
        )


def group_shuffle(order: Order, sizes: Any, seed: int, window: int) -> GroupShuffle:
    """Return a shuffle of a dataset by groups of these sizes.

    Raises:
        SpecError: the order was changed before; `window` is below 1; `sizes` do not add
            up to the dataset.
    """
    check(
        not order.steps,
        f"shuffle(window=...) mixes the shards of the dataset as it is, got {order};"
        " put it directly after the source",
    )
    check(
        type(window) is int and window >= 1,
        f"`window` must be an int >= 1, the shards mixed at once, got {window!r}",
    )
    return GroupShuffle(Groups.of(sizes, order.length), checked_seed(seed), window)
