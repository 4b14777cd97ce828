"""Which sample is where in an epoch, what a batch of them is, and who gets which rows.

An order is a chain of steps, each traced in O(1): even a shuffled order is computed
when it is needed, and stored nowhere. A batch has a stamp, which says what it is before
any of it is loaded, and rows, which say what to load. Each data-parallel rank has its
shard of a global batch.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ...errors import SpecError, check, checked_seed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

LONGEST = 2**63 - 1
Numbers: TypeAlias = NDArray[np.int64]
Value = TypeVar("Value")


class Context(NamedTuple):
    """What a function that takes `ctx` receives; the same for a whole batch."""

    epoch: int
    step: int
    """Global: counted over all epochs."""
    image_size: int | None
    """Pixels per side; None if no schedule sets it."""
    strength: float | None = None
    """Strength of augmentation; None if no schedule sets it."""


class BatchPlan(NamedTuple):
    """One rank's view of one global batch."""

    epoch: int
    step: int
    """Global: counted over all epochs."""
    batch: int
    """Its number within its epoch."""
    start: int
    """Its first position within its epoch."""
    last: bool
    """Whether it is the last batch of its epoch."""
    n_global: int
    """Samples that count, over all ranks."""
    n_rows: int
    """Rows that this rank delivers, including padding."""
    n_local: int
    """Samples among them that count: the first `n_local` rows. May be 0."""
    loss_weight: float
    """Factor on this rank's mean loss that makes the mean over ranks exact.

    Data-parallel training averages gradients over `world` ranks as if each had the same
    number of samples. With w_r = n_local_r * world / n_global,
    (1 / world) * sum_r(w_r * mean_r) = sum_r(sum of losses of r) / n_global:
    the mean over the global batch. It is 1.0 if all ranks have equally many.
    """
    image_size: int | None
    """Pixels per side; None if no schedule sets it."""
    lr_mult: float
    """Factor on the learning rate."""
    momentum: float | None
    """None leaves the optimiser's own."""
    substituted: tuple[int, ...] = ()
    """Rows of this rank that hold another sample because their own failed."""
    strength: float | None = None
    """Strength of augmentation; None if no schedule sets it."""

    @property
    def padded(self) -> int:
        """Rows at the end that repeat others and do not count."""
        return self.n_rows - self.n_local

    @property
    def ctx(self) -> Context:
        """The value of `ctx` for functions that take it."""
        return Context(self.epoch, self.step, self.image_size, self.strength)


class Place(NamedTuple):
    """Where a batch starts: all that a schedule may depend on."""

    epoch: int
    position: int
    """Positions of the epoch before it."""
    step: int
    """Batches before it, over all epochs."""
    epoch_length: int
    """Positions in every epoch."""

    @property
    def samples(self) -> int:
        """Positions before it, over all epochs, including dropped tails."""
        return self.epoch * self.epoch_length + self.position


class Span(NamedTuple):
    """The positions of one global batch."""

    place: Place
    stop: int
    """One past its last position; it has `stop - place.position` samples."""
    size: int
    """The global size that applies; an epoch's tail has fewer samples."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` data-parallel ranks.

    Raises:
        SpecError: `size` is below 1, or `rank` is not in [0, size).
    """

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""

    def __post_init__(self) -> None:
        check(
            self.size >= 1,
            f"`size` must be >= 1, got {self.size}; for one rank, pass Shard(0, 1)",
        )
        check(
            0 <= self.rank < self.size,
            f"`rank` must be >= 0 and < size={self.size}, got {self.rank}; "
            "pass the rank within the data-parallel group, not the global one",
        )

    @classmethod
    def single(cls) -> Shard:
        """Return the shard of a job with a single rank."""
        return cls(0, 1)

    @classmethod
    def found(cls) -> Shard:
        """Return the shard in the default process group, or Shard(0, 1) without one.

        If ranks of a group share data (tensor, context, pipeline parallelism), use
        `from_device_mesh` instead.
        """
        grouped = dist.is_available() and dist.is_initialized()
        return cls.from_process_group() if grouped else cls.single()

    @classmethod
    def from_process_group(cls, group: ProcessGroup | None = None) -> Shard:
        """Return the shard of this process in a group of data-parallel ranks only.

        Args:
            group: a group of `torch.distributed`; None means the default group.

        Raises:
            SpecError: this process is not in it, or there is none.
        """
        check(
            dist.is_available() and dist.is_initialized(),
            "there is no process group: call torch.distributed.init_process_group()"
            " first, or pass Shard(rank, size)",
        )
        rank = dist.get_rank(group)
        check(
            rank >= 0,
            "this process is not a member of the process group; pass a group that it"
            " belongs to, or Shard(rank, size)",
        )
        return cls(rank, dist.get_world_size(group))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, dims: str | Sequence[str]) -> Shard:
        """Return the shard of this process along a mesh's data-parallel dimensions.

        Ranks that differ only in other dimensions (tensor, context, pipeline) have the
        same shard, and so receive the same bytes.

        Args:
            mesh: the mesh of all ranks, with named dimensions.
            dims: names of the data-parallel dimensions, the outermost first.

        Raises:
            SpecError: the mesh has no such dimension.
        """
        dimensions = (dims,) if isinstance(dims, str) else tuple(dims)
        names = mesh.mesh_dim_names or ()
        check(
            dimensions and set(dimensions) <= set(names),
            f"`dims` must name dimensions of the mesh, {names}, got {dimensions}; name"
            " them by init_device_mesh(..., mesh_dim_names=...)",
        )
        rank, size = 0, 1
        for name in dimensions:
            length = mesh.size(names.index(name))
            rank, size = rank * length + mesh.get_local_rank(name), size * length
        return cls(rank, size)

    def share(self, n: int) -> tuple[int, int]:
        """Return (first, count) of this rank's part of `n` rows.

        Parts are contiguous, differ by at most one row, and make up n in rank order.
        """
        base, extra = divmod(n, self.size)
        return self.rank * base + min(self.rank, extra), base + (self.rank < extra)


@dataclass(slots=True, eq=False)
class Rows:
    """Samples to load, in order. Both arrays may be read-only views."""

    indices: NDArray[Any]
    """`[N]`: indices into the dataset, or whatever a sampler yielded in their place."""
    rounds: Numbers
    """`int64 [N]`: each one's pass over the data, epoch * repeats + pass."""

    def __len__(self) -> int:
        return self.indices.size

    def __reduce__(self) -> tuple[Any, ...]:
        plain = self.indices.dtype == np.int64
        indices = self.indices.tobytes() if plain else self.indices.tolist()
        return _rows, (indices, self.rounds.tobytes())

    def part(self, start: int, stop: int) -> Rows:
        """Return rows `start` to `stop` as views."""
        return Rows(self.indices[start:stop], self.rounds[start:stop])


def _rows(indices: bytes | list[Any], rounds: bytes) -> Rows:
    """Rebuild rows from the result of `Rows.__reduce__`."""
    seeds = np.frombuffer(rounds, np.int64)
    if isinstance(indices, bytes):
        return Rows(np.frombuffer(indices, np.int64), seeds)
    return Rows(objects(indices), seeds)


def objects(things: Sequence[Any]) -> NDArray[np.object_]:
    """Return an array of these objects, `[N]`, without looking into them."""
    array = np.empty(len(things), object)
    for at, thing in enumerate(things):
        array[at] = thing
    return array


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch for an engine to make, or some rows of one."""

    plan: BatchPlan
    rows: Rows
    first_row: int = 0
    """The row of the batch that the first of `rows` is."""
    whole: bool = True
    """Whether the rows are made into a batch; otherwise they stay samples."""
    inputs: Sequence[Any] | None = None
    """A sample for each row, if they were begun elsewhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedBatch, (
            self.plan,
            self.rows,
            self.first_row,
            self.whole,
            self.inputs,
        )


class Planning(Protocol):
    """What an engine needs of a plan."""

    def planned(self, number: int) -> PlannedBatch:
        """Return a batch, by its number among those of the engine."""

    def regime(self, step: int) -> str:  # noqa: ARG002 a plan of its own size has none
        """Return what loading the batch of a step is like; empty if unknown.

        So it is where a sampler decides the sizes, and where the trainer knows them.
        """
        return ""


class AssignedPlan(Planning):
    """Batches, or rows of some, numbered as they come. The engine's lock guards it."""

    def __init__(self) -> None:
        # Number of assignments received.
        self.stop = 0
        # Number of the oldest one that is not done.
        self.oldest = 0
        self._assignments: deque[tuple[PlannedBatch, int]] = deque()

    def add(self, planned: PlannedBatch, seed: int) -> None:
        """Plan to make these rows next; `seed` is of their collate_fn's draws."""
        self._assignments.append((planned, seed))
        self.stop += 1

    def planned(self, number: int) -> PlannedBatch:
        """Return an assignment that is not done."""
        return self._assignments[number - self.oldest][0]

    @property
    def seed(self) -> int:
        """Seed of the draws of the collate_fn for the oldest assignment."""
        return self._assignments[0][1]

    def forget(self) -> None:
        """Note that the oldest assignment is done."""
        self._assignments.popleft()
        self.oldest += 1


class Step(Protocol):
    """One link of an order: makes a sequence out of the previous one."""

    @property
    def length(self) -> int:
        """Positions in an epoch after this step."""

    def trace(self, rows: Rows) -> Rows:
        """Return the positions before this step of `rows`, positions after it."""


@dataclass(frozen=True, slots=True)
class Take:
    """The first `length` of the previous sequence."""

    length: int

    def trace(self, rows: Rows) -> Rows:
        """Return `rows` unchanged: the first ones stay where they were."""
        return rows

    def __str__(self) -> str:
        return f"take({self.length})"


@dataclass(frozen=True, slots=True)
class Repeat:
    """The previous sequence, `times` over; each pass is a round of its own."""

    once: int
    """Positions in one pass."""
    times: int
    """Passes in an epoch."""

    @property
    def length(self) -> int:
        return self.once * self.times

    def trace(self, rows: Rows) -> Rows:
        """Return the positions within their pass, and count the pass as a round."""
        passes = rows.indices // self.once
        return Rows(
            rows.indices - passes * self.once, rows.rounds * self.times + passes
        )

    def __str__(self) -> str:
        return f"repeat({self.times})"


@dataclass(frozen=True, slots=True)
class Shuffle:
    """The previous sequence in a pseudo-random order, a different one each round.

    Any position takes O(1) time and memory. Up to 4096 values are sorted by random
    words. Above that, a generalised Feistel network over Z_a x Z_b with a * b >= length
    is applied repeatedly to the few values outside the range until they are inside
    (Black, Rogaway: "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5).
    The result is the same on every machine.
    """

    length: int
    """1 to 2**63 - 1."""
    seed: int

    def trace(self, rows: Rows) -> Rows:
        """Return the positions of each round's permutation at `rows`."""
        return Rows(by_key(rows.rounds, rows.indices, self.at), rows.rounds)

    def at(self, round_: int, positions: Numbers) -> Numbers:
        """Return the values at positions of a round, `int64 [N]`, in [0, length)."""
        # Words that are unrelated for any two (seed, round).
        text = f"penstock order, seed {self.seed}, round {round_}"
        digest = hashlib.blake2b(text.encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
        keys = np.frombuffer(digest, "<u8").astype(np.uint64)
        if self.length <= SORTED_LENGTH:
            philox = np.random.Philox(key=keys[:2])
            return np.argsort(philox.random_raw(self.length), kind="stable")[positions]
        lower = math.isqrt(self.length - 1) + 1
        upper = -(-self.length // lower)
        values = feistel(positions.astype(np.uint64), upper, lower, keys)
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:  # at most 1 value in 64
            next_values = feistel(values[outside], upper, lower, keys)
            values[outside] = next_values
            outside = outside[next_values >= np.uint64(self.length)]
        return values.view(np.int64)

    def __str__(self) -> str:
        return f"shuffle(seed={self.seed})"


@dataclass(frozen=True, slots=True)
class Select:
    """Chosen positions of the previous sequence, in the given order."""

    indices: Numbers = field(repr=False, compare=False)
    digest: str
    """Stands for the indices when orders are compared, printed or hashed."""

    @property
    def length(self) -> int:
        return self.indices.size

    def trace(self, rows: Rows) -> Rows:
        return Rows(self.indices[rows.indices], rows.rounds)

    def __str__(self) -> str:
        return f"select({self.length} indices, blake2b {self.digest})"


@dataclass(frozen=True, slots=True)
class Order:
    """The order of an epoch's samples; compared and printed as what it describes.

    Each method appends a step that applies to the sequence before it.
    `take(n).shuffle(seed)` shuffles the first n samples; `shuffle(seed).take(n)` keeps
    the first n of each epoch's own order. `shuffle(seed).repeat(2)` shuffles each pass
    by itself; `repeat(2).shuffle(seed)` mixes the two. A step that changes nothing is
    left out.
    """

    length: int
    """Samples of the dataset."""
    steps: tuple[Step, ...] = ()

    @classmethod
    def sequential(cls, length: int) -> Order:
        """Return the order 0, 1, 2 ... of a dataset of `length` samples.

        Raises:
            SpecError: `length` is not an int >= 1.
        """
        return cls(whole("length", length, LONGEST, "pass a dataset that has samples"))

    @property
    def epoch_length(self) -> int:
        """Positions in an epoch."""
        return self.steps[-1].length if self.steps else self.length

    def take(self, count: int) -> Order:
        """Keep the first `count`, or all if there are fewer.

        Raises:
            SpecError: `count` is not an int >= 1.
        """
        length = whole("count", count, LONGEST, "take() keeps at least one sample")
        return self if length >= self.epoch_length else self.then(Take(length))

    def repeat(self, count: int) -> Order:
        """Repeat the sequence `count` times an epoch.

        Raises:
            SpecError: `count` is not an int >= 1, or makes the epoch too long.
        """
        most = LONGEST // self.epoch_length
        times = whole("count", count, most, "repeat(1) leaves the sequence as it is")
        return self if times == 1 else self.then(Repeat(self.epoch_length, times))

    def shuffle(self, seed: int) -> Order:
        """Shuffle by `seed`, each epoch and pass differently.

        Raises:
            SpecError: `seed` is not an int in [0, 2**64).
        """
        return self.then(Shuffle(self.epoch_length, checked_seed(seed)))

    def select(self, indices: Sequence[int] | NDArray[np.integer]) -> Order:
        """Keep the positions `indices`, in that order; repeats are allowed.

        Raises:
            SpecError: there are none, they are not integers, or one is outside
                [0, epoch_length).
        """
        given, length = np.asarray(indices), self.epoch_length
        check(given.size, "`indices` must not be empty; select at least one sample")
        check(
            given.ndim == 1 and given.dtype.kind in "iu",
            f"`indices` must be integers [N], got {given.dtype} {list(given.shape)}; "
            "turn a mask into indices with numpy.flatnonzero(mask)",
        )
        outside = np.flatnonzero((given < 0) | (given >= length))
        if outside.size:
            place = int(outside[0])
            raise SpecError(
                f"`indices` must be >= 0 and < {length}, the number of samples, got "
                f"{given[place]} at place {place}; leave out indices without a sample"
            )
        positions = given.astype(np.int64)
        return self.then(Select(positions, sealed(positions)))

    def rows(self, epoch: int, start: int, stop: int) -> Rows:
        """Return the rows at positions `start` to `stop` of `epoch`."""
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: Numbers) -> Rows:
        """Return the rows at `positions`, `int64 [N]`, each in [0, epoch_length)."""
        rows = Rows(positions, np.full(positions.size, epoch, dtype=np.int64))
        for step in reversed(self.steps):
            rows = step.trace(rows)
        return rows

    def then(self, step: Step) -> Order:
        """Append a step."""
        return replace(self, steps=(*self.steps, step))

    def __str__(self) -> str:
        return ".".join((f"sequential({self.length})", *map(str, self.steps)))


def by_key(
    keys: Numbers, positions: Numbers, at: Callable[[int, Numbers], Numbers]
) -> Numbers:
    """Return what `at` makes of the positions of each key, in their places, `[N]`."""
    if not keys.size:
        return positions
    if (keys == keys[0]).all():  # nearly always: a round is as long as the data
        return at(int(keys[0]), positions)
    places = np.argsort(keys, kind="stable")
    values = np.empty_like(positions)
    for here in np.split(places, np.flatnonzero(np.diff(keys[places])) + 1):
        values[here] = at(int(keys[here[0]]), positions[here])
    return values


def drawn_order(text: str, count: int) -> Numbers:
    """Return the numbers below `count` in a pseudo-random order, keyed by `text`."""
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(count)
    return np.argsort(words, kind="stable")


def sealed(values: Numbers) -> str:
    """Make an array read-only; return the digest that stands for it."""
    values.flags.writeable = False
    return hashlib.blake2b(values.astype("<i8").tobytes(), digest_size=8).hexdigest()


class Recent(Generic[Value]):
    """Keeps the last few values that were made. Any thread may ask.

    The values are replaced as a whole, so at worst two threads make the same one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Any, Value] = {}

    def get(self, key: Any, make: Callable[[], Value]) -> Value:
        """Return the value of a key, made now unless it is kept."""
        value = self._values.get(key)
        if value is None:
            value = make()
            items = [*self._values.items()][1 - self._most :]
            self._values = {**dict(items), key: value}
        return value


def whole(name: str, value: int, most: int, cure: str) -> int:
    """Return `value` as an int from 1 to `most`.

    Raises:
        SpecError: it is not one.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        rule = ">= 1" if number < 1 else f"<= {most}"
        raise SpecError(f"`{name}` must be an int {rule}, got {value!r}; {cure}")
    return number


# Up to this length the permutation is made by sorting, which is exactly uniform. Over
# so few values, a network would show its structure (an even number of halves yields
# only even permutations).
SORTED_LENGTH = 4096
# blake2b yields at most 64 bytes: one 8-byte key for each of the network's rounds. With
# 4 rounds, values 64 places apart still correlate; from 6 rounds on, no test here can
# tell it from chance.
FEISTEL_ROUNDS = 6

HALF = np.uint64(32)
# Odd numbers without a pattern in their bits: 2**64 / golden ratio, and a multiplier of
# its kind (Steele, Vigna: "Computationally easy, spectrally good multipliers", 2021).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
SPREAD = np.uint64(0xD1342543DE82EF95)


def feistel(
    values: NDArray[np.uint64], upper: int, lower: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute [0, upper * lower): split into two digits, add a mix of one to the other.

    Args:
        values: `uint64 [N]`.
        upper: number of values of the upper digit, < 2**32.
        lower: number of values of the lower digit, < 2**32.
        keys: `uint64 [R]`, R even: one key per round.
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
        # mixed modulo near_size: it is below twice that, and if it is below once that,
        # the difference wraps around to a huge number.
        np.subtract(mixed, near_size, out=other)
        np.minimum(mixed, other, out=near)
        near, far = far, near
        near_size, far_size = far_size, near_size
    near *= far_size
    near += far
    return near
