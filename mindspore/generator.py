"""Datasets of Python objects and arrays, and the arguments that all datasets have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from ..errors import check
from ..pipeline.sources.source import is_iterable
from .columns import Row, as_leaf, as_row
from .dataset import Dataset, Names, names_of
from .loops import Facts, Stream
from .samplers import sampler_of
from .settings import Schema, Shuffle, ignored, note

# Options of how a dataset runs, which are ignored.
HOW = ("cache", "python_multiprocessing", "max_rowsize")


class Reading(TypedDict, total=False):
    """What is read of a dataset, in which order. The last three are ignored."""

    num_samples: int | None
    num_parallel_workers: int | None
    shuffle: bool | Shuffle | None
    sampler: Any
    num_shards: int | None
    shard_id: int | None
    cache: Any
    python_multiprocessing: bool
    max_rowsize: Any


def made_of(
    source: Any,
    columns: Sequence[str],
    reading: Mapping[str, Any],
    *,
    first: Callable[[Any], Row] | None = None,
    classes: dict[str, Any] | None = None,
) -> Dataset:
    """Return a dataset of what is read by its index; it is shuffled unless that is off.

    Args:
        source: what is read.
        columns: names of the columns.
        reading: arguments of the dataset: those of `Reading`.
        first: makes rows of what is read; None: these are rows.
        classes: the label of each class.

    Raises:
        SpecError: there is another argument, or a sampler beside what it decides.
    """
    options = dict(reading)
    sampler, workers = (
        options.pop("sampler", None),
        options.pop("num_parallel_workers", None),
    )
    order = {
        name: options.pop(name, None)
        for name in ("num_samples", "num_shards", "shard_id")
    }
    shuffle = options.pop("shuffle", None)
    ignored("a dataset", options, *HOW)
    ordering = {**order, "shuffle": shuffle}
    check(
        sampler is None or all(value is None for value in ordering.values()),
        f"`sampler` decides the order alone, got {ordering!r}, too; leave these out",
    )
    chooses = sampler_of(sampler, shuffle=shuffle is not False, **order)
    return Dataset.sampled(
        chooses, source, columns, first=first, workers=workers, classes=classes
    )


class Arrays:
    """A map-style source of the user's, with samples as rows."""

    def __init__(self, source: Any, columns: Sequence[str]) -> None:
        self._source, self._columns = source, list(columns)
        self.name = type(source).__name__

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Row:
        return as_row(self._source[index], self._columns)


def GeneratorDataset(
    source: Any,
    column_names: Names = None,
    column_types: Any = None,
    schema: Schema | str | None = None,
    **reading: Unpack[Reading],
) -> Dataset:
    """Load from a Python object: map-style, iterable, or a generator function.

    Args:
        source: yields samples: tuples with one value per column, or single values.
        column_names: names of the columns.
        column_types: ignored, with a note: arrays keep their types.
        schema: names the columns, if `column_names` does not.
        **reading: as in `Reading`. A map-style source is shuffled unless that is off.

    Raises:
        SpecError: an option is unknown, or needs a source with an index.
    """
    if column_types is not None:
        note("column_types", "arrays keep their types; cast them in a map()")
    columns = names_of(column_names)
    if not columns and schema is not None:
        columns = list(
            (schema if isinstance(schema, Schema) else Schema(schema)).columns
        )
    if hasattr(source, "__getitem__") and not is_iterable(source):
        return made_of(Arrays(source, columns), columns, reading)
    check(
        callable(source) or is_iterable(source),
        f"`source` must yield samples, got {source!r}; give an object or a function",
    )
    options = dict[str, Any](reading)
    for name in ("sampler", "num_shards", "shard_id"):
        check(
            options.pop(name, None) is None,
            f"`{name}` needs a source with an index, which {source!r} is not; give it"
            " __getitem__ and __len__, or let it yield the rows of its shard only",
        )
    samples = options.pop("num_samples", None)
    ignored("GeneratorDataset", options, "shuffle", "num_parallel_workers", *HOW)
    check(
        samples is None or samples > 0,
        f"`num_samples` must be > 0, got {samples!r}; leave it out for all rows",
    )
    stream = Stream(lambda _: source() if callable(source) else source, columns)
    length = None if callable(source) else getattr(source, "__len__", None)
    size = length or (lambda: sum(1 for _ in stream))
    begin = stream.__penstock_epoch__
    dataset = Dataset.streamed(begin, columns, Facts(size=size))
    return dataset.take(samples or -1)


class Slices:
    """Rows of columns that are sequences."""

    name = "NumpySlices"

    def __init__(self, columns: Sequence[Any]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Row:
        return tuple(as_leaf(column[index]) for column in self._columns)


def NumpySlicesDataset(
    data: Any, column_names: Names = None, **reading: Unpack[Reading]
) -> Dataset:
    """Load the rows of arrays or lists.

    Args:
        data: an array or a list: one column; a tuple of them, or a dict: several.
        column_names: names of the columns (default: the keys, or column_0, ...).
        **reading: as in `Reading`.

    Raises:
        SpecError: there are more or fewer names than columns, or columns of different
            lengths.
    """
    named = isinstance(data, Mapping)
    columns = (
        list(data.values()) if named else [*data] if isinstance(data, tuple) else [data]
    )
    usual = list(data) if named else [f"column_{at}" for at in range(len(columns))]
    names = names_of(column_names) or usual
    check(
        len(names) == len(columns) and len(set(map(len, columns))) == 1,
        f"there are {len(names)} names and columns of {[*map(len, columns)]} rows; give"
        " one name for each, and as many rows of each",
    )
    return made_of(Slices(columns), names, reading)


def PaddedDataset(padded_samples: Sequence[Mapping[str, Any]]) -> Dataset:
    """Load rows that fill up another dataset; append them by `+`.

    Args:
        padded_samples: a dict of columns for each row.
    """
    columns = {
        name: [np.asarray(sample[name]) for sample in padded_samples]
        for name in padded_samples[0]
    }
    return NumpySlicesDataset(columns, shuffle=False)
