"""The layout of a sample in a batch: learned from one sample, used to write all.

A layout is a tree of a sample's containers, with a *leaf* for each array or number. Row
by row it yields what `torch.utils.data.default_collate` yields for the whole batch at
once. Anything it does not support is left to default_collate itself (`learn` returns
None, or `write` raises `Misfit`), so bytes, types and errors are torch's. Only arrays
with negative strides, which torch refuses, make batches here. The size and the
description of any sample are here, too.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.in_flight import runs
from .array_rows import ArrayRows, TableRows

# Allocates memory for one leaf of a batch: `(rows, *shape), dtype`.
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(name): getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64"),
        *("int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
NUMBERS: dict[type, torch.dtype] = {
    int: torch.int64,
    float: torch.float64,
    bool: torch.bool,
}
# The kinds of numpy's types whose values are these numbers in Python.
PYTHONS = {int: "iu", float: "f", bool: "b"}


# Array classes that torch turns into tensors; subclasses may be anything.
ARRAYS = (np.ndarray, np.memmap)
# numpy scalars that torch collates: it refuses those of uint64.
SCALARS = frozenset(TORCH_DTYPES) - {np.dtype("uint64")}
# Up to this size, copying the bytes twice costs less than numpy's work per array.
JOINED_BYTES = 1 << 18


class Misfit(Exception):
    """A sample does not match the layout; default_collate must be used."""


# Each leaf of a batch in one block of memory starts on a cache line.
ALIGN = 64


class Layout(ABC):
    """One node of the tree. It is frozen, so it can be sent to other processes."""

    __slots__ = ()

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes that one sample takes in the batch."""

    @property
    def solid(self) -> bool:
        """Whether all of it is in memory from `allocate`, none in Python objects."""
        return True

    @abstractmethod
    def open(self, rows: int, allocate: Allocate) -> Any:
        """Return the batch's memory, empty, with the structure of the batch."""

    @abstractmethod
    def write(self, memory: Any, first: int, samples: Sequence[Any]) -> None:
        """Write samples to rows `first`, `first` + 1, ... of `memory`.

        Raises:
            Misfit: a sample does not match the layout.
        """

    def together(self, samples: Sequence[Any], allocate: Allocate) -> Any:
        """Return the batch of these samples, all there. Raises like `write`."""
        memory = self.open(len(samples), allocate)
        self.write(memory, 0, samples)
        return self.seal(memory)

    def read(self, memory: Any, row: int) -> Any:
        """Return the sample in `row` (a view)."""
        return memory[row]

    def seal(self, memory: Any) -> Any:
        """Return the batch, after all rows are written, as default_collate would."""
        return memory


def same(facts: list[Any], fact: Any) -> None:
    """Check that all `facts`, one per sample, equal `fact`.

    Counting in a list is the cheapest way in Python to check many samples.

    Raises:
        Misfit: one does not.
    """
    if facts.count(fact) != len(facts):
        raise Misfit


@dataclass(frozen=True, slots=True)
class Leaf(Layout):
    """An array, a tensor or a number: a row of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def open(self, rows: int, allocate: Allocate) -> torch.Tensor:
        return allocate((rows, *self.shape), self.dtype)


class ArrayLeaf(Leaf):
    """A numpy array of at least one dimension: stacked, as `as_tensor` + `stack` do."""

    __slots__ = ()

    def write(self, memory: torch.Tensor, first: int, samples: Sequence[Any]) -> None:
        shape, rows = self.shape, memory.numpy()[first : first + len(samples)]
        if type(samples) is ArrayRows:
            gather(samples, memory, first, rows.dtype, shape)
            return
        try:
            same([sample.dtype for sample in samples], rows.dtype)
            if len(shape) > 1:
                same([sample.shape for sample in samples], shape)
            else:
                same([sample.ndim for sample in samples], 1)
                same(list(map(len, samples)), shape[0])
        except AttributeError as error:  # not arrays
            raise Misfit from error
        if rows.nbytes <= JOINED_BYTES:
            try:
                rows.reshape(-1)[:] = np.frombuffer(b"".join(samples), rows.dtype)
            except (BufferError, TypeError):  # one that is not contiguous
                pass
            else:
                return
        # Joined along their first axis, the samples are the block itself.
        np.concatenate(samples, out=rows.reshape((-1, *shape[1:])))

    def read(self, memory: torch.Tensor, row: int) -> Any:
        return memory.numpy()[row]


class TensorLeaf(Leaf):
    """A dense CPU tensor: stacked."""

    __slots__ = ()

    def write(self, memory: torch.Tensor, first: int, samples: Sequence[Any]) -> None:
        if type(samples) is ArrayRows:
            gather(samples, memory, first, self.dtype, self.shape)
            return
        same(list(map(type, samples)), torch.Tensor)
        same([sample.dtype for sample in samples], self.dtype)
        try:  # stack checks everything else, and refuses what differs from the first
            if samples[0].shape != self.shape:
                raise Misfit
            torch.stack(list(samples), out=memory[first : first + len(samples)])
        except RuntimeError as error:
            raise Misfit from error

    def together(self, samples: Sequence[Any], allocate: Allocate) -> Any:
        if type(samples) is ArrayRows:
            return Leaf.together(self, samples, allocate)
        same(list(map(type, samples)), torch.Tensor)
        try:
            return torch.stack(samples)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise Misfit from error


@dataclass(frozen=True, slots=True)
class NumberLeaf(Leaf):
    """A Python int, float or bool: becomes int64, float64 or bool, as in torch."""

    kind: type

    def write(self, memory: torch.Tensor, first: int, samples: Sequence[Any]) -> None:
        memory.numpy()[first : first + len(samples)] = self._array(samples)

    def together(self, samples: Sequence[Any], allocate: Allocate) -> Any:  # noqa: ARG002
        # Copied, because memory that numpy owns cannot be resized.
        array: NDArray[Any] = self._array(samples).astype(self.kind, copy=False)
        return torch.from_numpy(array).clone()

    def _array(self, samples: Sequence[Any]) -> NDArray[Any]:
        """Return an array of them; numpy takes half the time if it knows the dtype."""
        if isinstance(samples, np.ndarray):  # a column of a table
            same([samples.dtype.kind in PYTHONS[self.kind]], fact=True)
            return samples
        same(list(map(type, samples)), self.kind)
        try:
            return np.array(samples, self.kind)
        except OverflowError as error:
            raise Misfit from error

    def read(self, memory: torch.Tensor, row: int) -> Any:
        return memory[row].item()


@dataclass(frozen=True, slots=True)
class ScalarLeaf(ArrayLeaf):
    """A numpy scalar, as from indexing an array: keeps its dtype, as in torch."""

    kind: type[np.generic]

    def write(self, memory: torch.Tensor, first: int, samples: Sequence[Any]) -> None:
        rows = memory.numpy()[first : first + len(samples)]
        if type(samples) is ArrayRows:
            gather(samples, memory, first, rows.dtype, shape=())
            return
        same(list(map(type, samples)), self.kind)
        rows[:] = np.fromiter(samples, rows.dtype, len(samples))


@dataclass(frozen=True, slots=True)
class ObjectLeaf(Layout):
    """Text or bytes: a list, as default_collate leaves them."""

    kind: type

    @property
    def row_bytes(self) -> int:
        return 64

    @property
    def solid(self) -> bool:
        return False

    def open(self, rows: int, allocate: Allocate) -> list[Any]:  # noqa: ARG002
        return [None] * rows

    def write(self, memory: list[Any], first: int, samples: Sequence[Any]) -> None:
        same(list(map(type, samples)), self.kind)
        memory[first : first + len(samples)] = samples


@dataclass(frozen=True, slots=True)
class Node(Layout):
    """A container: collated member by member.

    Like default_collate, it goes by the first sample's type, and keys: of the others,
    it only needs the same members.
    """

    members: tuple[Layout, ...]

    @property
    def row_bytes(self) -> int:
        return sum(member.row_bytes for member in self.members)

    @property
    def solid(self) -> bool:
        return all(member.solid for member in self.members)

    def open(self, rows: int, allocate: Allocate) -> Any:
        return self._joined([member.open(rows, allocate) for member in self.members])

    def write(self, memory: Any, first: int, samples: Sequence[Any]) -> None:
        for (member, part), column in zip(
            self._parts(memory), self._columns(samples), strict=True
        ):
            member.write(part, first, column)

    def together(self, samples: Sequence[Any], allocate: Allocate) -> Any:
        columns = zip(self.members, self._columns(samples), strict=True)
        return self._sealed(
            [member.together(column, allocate) for member, column in columns]
        )

    def read(self, memory: Any, row: int) -> Any:
        return self._joined([member.read(p, row) for member, p in self._parts(memory)])

    def seal(self, memory: Any) -> Any:
        return self._sealed([member.seal(part) for member, part in self._parts(memory)])

    def _parts(self, memory: Any) -> Iterable[tuple[Layout, Any]]:
        """Return each member, with its part of the memory."""
        return zip(self.members, memory, strict=True)

    @abstractmethod
    def _columns(self, samples: Sequence[Any]) -> list[Any]:
        """Return the members of all samples, by member. Raises like `write`."""

    @abstractmethod
    def _joined(self, parts: list[Any]) -> Any:
        """Return these members as one container."""

    def _sealed(self, parts: list[Any]) -> Any:
        """Return a batch of these sealed parts."""
        return self._joined(parts)


@dataclass(frozen=True, slots=True)
class SequenceNode(Node):
    """A tuple, list or namedtuple.

    As in default_collate, a plain tuple becomes a list; a list and a namedtuple keep
    their type.
    """

    kind: type

    def _columns(self, samples: Sequence[Any]) -> list[Any]:
        if type(samples[0]) is not self.kind:
            raise Misfit
        try:
            columns: list[Any] = (
                samples.apart()
                if isinstance(samples, ArrayRows)
                else list(zip(*samples, strict=True))
            )
        except (TypeError, ValueError) as error:
            raise Misfit from error
        if len(columns) != len(self.members):
            raise Misfit
        return columns

    def read(self, memory: Any, row: int) -> Any:
        sample = Node.read(self, memory, row)
        return tuple(sample) if self.kind is tuple else sample

    def _sealed(self, parts: list[Any]) -> Any:
        # default_collate returns columns of text as zip makes them.
        return self._joined(
            [
                tuple(part) if isinstance(member, ObjectLeaf) else part
                for member, part in zip(self.members, parts, strict=True)
            ]
        )

    def _joined(self, parts: list[Any]) -> Any:
        return self.kind(*parts) if hasattr(self.kind, "_fields") else parts


@dataclass(frozen=True, slots=True)
class MappingNode(Node):
    """A dict."""

    keys: tuple[Any, ...]

    def _parts(self, memory: Any) -> Iterable[tuple[Layout, Any]]:
        return zip(self.members, memory.values(), strict=True)

    def _columns(self, samples: Sequence[Any]) -> list[Any]:
        if isinstance(samples, TableRows) and samples.names == self.keys:
            return samples.columns()
        if isinstance(samples, ArrayRows) and samples.keys == self.keys:
            return samples.apart()
        if type(samples[0]) is not dict or tuple(samples[0]) != self.keys:
            raise Misfit
        try:
            return [[sample[key] for sample in samples] for key in self.keys]
        except Exception as error:
            raise Misfit from error

    def together(self, samples: Sequence[Any], allocate: Allocate) -> Any:
        if not isinstance(samples, TableRows) or samples.names != self.keys:
            return Node.together(self, samples, allocate)
        leaves = dict(zip(self.keys, self.members, strict=True))
        batch = dict.fromkeys(self.keys)
        for names, values in samples.blocks:
            kind = values.dtype.kind
            # A column may have been text, lists or structs in the first file.
            fits = [
                kind in PYTHONS.get(getattr(leaves[name], "kind", object), "")
                for name in names
            ]
            same(fits, fact=True)
            # One call for all columns: each releases the GIL, and waits to get it back.
            whole = torch.from_numpy(values.astype(leaves[names[0]].kind))
            columns: Any = torch.unbind_copy(whole, 1)  # type: ignore[func-returns-value]
            batch |= zip(names, columns, strict=True)
        for name, column in samples.others.items():
            batch[name] = leaves[name].together(column, allocate)
        return batch

    def _joined(self, parts: list[Any]) -> Any:
        return dict(zip(self.keys, parts, strict=True))


def gather(
    samples: ArrayRows,
    memory: torch.Tensor,
    first: int,
    dtype: np.dtype[Any] | torch.dtype,
    shape: tuple[int, ...],
) -> None:
    """Write rows of an array in one call; raise `Misfit` if type or shape differ."""
    (column,) = samples.columns
    if column.dtype != dtype or column.shape[1:] != shape:
        raise Misfit
    if isinstance(column, torch.Tensor) and not _plain(column, column.dtype):
        raise Misfit
    samples.write(memory[first : first + len(samples)])


def write_rows(
    layout: Layout, memory: Any, rows: Sequence[int], samples: Sequence[Any]
) -> None:
    """Write one sample to each of `rows` (ascending) of a batch's memory."""
    if isinstance(rows, range):
        layout.write(memory, rows.start, samples)
        return
    for start, stop, first in runs(list(rows), len(rows)):
        layout.write(memory, first, samples[start:stop])


def block_bytes(layout: Layout, rows: int) -> int:
    """Return the bytes of one block of memory for a batch, its leaves aligned."""
    leaves: list[int] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        leaves.append(-(-dtype.itemsize * math.prod(shape) // ALIGN) * ALIGN)
        return torch.empty(0, dtype=dtype, device="cpu")

    layout.open(rows, allocate)
    return sum(leaves)


def learn(sample: Any) -> Layout | None:
    """Return the layout of `sample` in a batch; None: default_collate must be used."""
    try:
        return _learn(sample)
    except Misfit:
        return None


def _learn(sample: Any) -> Layout:
    kind = type(sample)
    if kind in ARRAYS and sample.ndim and sample.dtype in TORCH_DTYPES:
        return ArrayLeaf(TORCH_DTYPES[sample.dtype], sample.shape)
    if kind is torch.Tensor and _plain(sample, sample.dtype):
        return TensorLeaf(sample.dtype, tuple(sample.shape))
    if kind in NUMBERS or kind in (str, bytes):
        return (
            NumberLeaf(NUMBERS[kind], (), kind) if kind in NUMBERS else ObjectLeaf(kind)
        )
    if issubclass(kind, np.generic) and np.dtype(kind) in SCALARS:
        return ScalarLeaf(TORCH_DTYPES[np.dtype(kind)], (), kind)
    if kind is dict:
        return MappingNode(tuple(map(_learn, sample.values())), tuple(sample))
    if kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return SequenceNode(tuple(map(_learn, sample)), kind)
    raise Misfit


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.dtype == dtype
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_nested
    )


# Bytes assumed for an object that does not show its size.
SMALL = 64
# Samples, or members of a list, that are examined, evenly spread, to estimate the bytes
# of all.
MANY = 16
# Levels that are examined: an object may contain itself.
DEEP = 16
# Characters that describe a sample at most.
LONG = 400


def size_of_all(samples: Sequence[Any], depth: int = DEEP) -> int:
    """Return the bytes of these samples, estimated from some of them if many."""
    whole = len(samples)
    some = samples[:: -(-whole // MANY)] if whole > MANY else samples
    if set(map(type, some)) <= NUMBERS.keys():
        return SMALL * whole
    return sum([size_of(sample, depth) for sample in some]) * whole // max(len(some), 1)


def size_of(sample: Any, depth: int = DEEP) -> int:
    """Return the bytes of a sample: arrays, tensors, images, text, and containers.

    An estimate that takes a few microseconds, and never raises.
    """
    kind = type(sample)
    if kind is np.ndarray:
        return int(sample.nbytes)
    if kind in NUMBERS:
        return SMALL
    try:
        return _size_of(sample, depth)
    except Exception:  # noqa: BLE001 the user object's code may raise anything
        return SMALL


def _size_of(sample: Any, depth: int) -> int:
    if isinstance(sample, (str, bytes, bytearray)):
        return len(sample)
    if isinstance(sample, (tuple, list)):
        members: Sequence[Any] = sample
    elif (nbytes := _own_bytes(sample)) is not None:
        return nbytes
    elif isinstance(sample, Mapping):
        members = list(sample.values())
    elif is_dataclass(sample):
        members = [getattr(sample, field.name) for field in fields(sample)]
    else:
        return SMALL
    return size_of_all(members, depth - 1) if depth else 0


def _own_bytes(sample: Any) -> int | None:
    """Return the size that an object itself declares; None if it does not."""
    if isinstance(sample, torch.Tensor) and sample.layout is not torch.strided:
        # The values, plus an index for each in every dimension: never too little.
        values = sample._nnz()  # noqa: SLF001 there is no public name
        return values * (sample.element_size() + 8 * sample.ndim)
    nbytes = getattr(sample, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(sample, image.Image):
        # libImaging/Storage.c: one byte a pixel with one band of 8 bits, else four.
        return int(math.prod(sample.size)) * (
            1 if sample.mode in ("1", "L", "P") else 4
        )
    return None


def describe(sample: Any) -> str:
    """Describe a sample in a few words: `uint8 [3, 4]`, `(float32 [2], int)`.

    Of many members, the first ones. The user object's code may raise anything.
    """
    if isinstance(sample, torch.Tensor) and sample.is_nested:
        return "a nested tensor"  # most have no shape
    shape = getattr(sample, "shape", None)
    dtype = getattr(sample, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    if not isinstance(sample, (tuple, list, dict)):
        return type(sample).__name__
    more = [f"... {len(sample)} in all"] if len(sample) > MANY else []
    if isinstance(sample, dict):
        inner = (
            f"{key}: {describe(value)}" for key, value in islice(sample.items(), MANY)
        )
        return f"{{{', '.join([*inner, *more])}}}"
    return f"({', '.join([*map(describe, sample[:MANY]), *more])})"


# Indices into the dataset, by row of a batch.
Indices = Sequence[Any] | NDArray[Any]


def spread(samples: Mapping[int, Any], indices: Indices | None) -> str:
    """Describe most samples of a batch, and name some that are different.

    Args:
        samples: the samples, by row of the batch.
        indices: into the dataset, by row; None if unknown.
    """
    looks = {row: f"{describe(sample):.{LONG}}" for row, sample in samples.items()}
    usual = Counter(looks.values()).most_common(1)[0][0]
    odd = [
        f"sample index {indices[row]!s:.60}: {look}" if indices is not None else look
        for row, look in looks.items()
        if look != usual
    ][:5]
    return f"most are {usual}, but {'; '.join(odd)}" if odd else f"all are {usual}"
