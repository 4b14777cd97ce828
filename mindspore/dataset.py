"""Datasets with named columns, and the functions that make them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch

from .. import config as _config
from ..engine.plan import Shard
from ..errors import check
from ..pipeline import image
from ..pipeline.pipeline import Pipeline

T = TypeVar("T")
Row = tuple[Any, ...]
"""One sample: a value for each column."""

INSTEAD = {
    "BatchDataset": "GeneratorDataset(...).batch(n)",
    "CSVDataset": "GeneratorDataset of rows read with csv or pandas",
    "Cifar10Dataset": "GeneratorDataset of torchvision.datasets.CIFAR10",
    "MindDataset": "GeneratorDataset of a class that reads your records",
    "MnistDataset": "GeneratorDataset of torchvision.datasets.MNIST",
    "NumpySlicesDataset": "GeneratorDataset of torch.utils.data.TensorDataset",
    "TFRecordDataset": "GeneratorDataset of a class that reads your records",
    "TextFileDataset": "GeneratorDataset of the lines of the file",
    "DatasetCache": "penstock.Pipeline.cache(ram=..., disk=...)",
}
METHODS = {
    "apply": "a function that you call on the dataset",
    "bucket_batch_by_length": "a batch sampler of your own, with penstock.DataLoader",
    "concat": "torch.utils.data.ConcatDataset, before GeneratorDataset",
    "device_que": "penstock.Pipeline.to_device(device)",
    "filter": "penstock.Pipeline.filter(predicate)",
    "flat_map": "an iterable dataset of your own",
    "padded_batch": "penstock.Pipeline.batch(collate_fn=...), which pads",
    "project": "map(), with output_columns",
    "rename": "map(), with output_columns",
    "save": "penstock.Pipeline.cache(disk=...)",
    "skip": "penstock.Pipeline.select(indices)",
    "split": "torch.utils.data.random_split, before GeneratorDataset",
    "sync_wait": "penstock.Pipeline.on_batch(listener)",
    "zip": "torch.utils.data.StackDataset, before GeneratorDataset",
}
CONFIG = {
    "load": "Pipeline.load_autotune(path)",
    "set_auto_num_workers": "set_enable_autotune(True)",
    "set_callback_timeout": "map(timeout=...)",
    "set_error_samples_mode": "batch(on_error='substitute')",
    "set_monitor_sampling_interval": "set_autotune_interval(steps)",
    "set_multiprocessing_timeout_interval": "map(timeout=...)",
}


def _instead(name: str, table: dict[str, str]) -> str:
    """Return the error that there is no such call, with the equivalent."""
    known = table.get(name)
    cure = f"use {known}" if known else "see penstock.Pipeline for what there is"
    return f"penstock.mindspore has no {name!r}; {cure}"


class _Config:
    """MindSpore's `config`: the settings that penstock has under the same name."""

    NAMES: ClassVar = {name for name in _config.__all__ if "budget" not in name}

    def __getattr__(self, name: str) -> Any:
        if name not in self.NAMES:
            raise AttributeError(_instead(name, CONFIG))
        return getattr(_config, name)


config = _Config()


def missing_dataset(name: str) -> str:
    """Return the error that MindSpore's dataset of this name is not here."""
    return _instead(name, INSTEAD)


class Columns:
    """Calls operations on some columns of a row. It can be sent to worker processes."""

    def __init__(
        self, operations: Sequence[Callable[..., Any]], taken: Sequence[int], inner: str
    ) -> None:
        self._operations = tuple(operations)
        self._taken = tuple(taken)
        self.__name__ = inner

    def __call__(self, row: Row) -> Row:
        values = tuple(row[at] for at in self._taken)
        for operation in self._operations:
            made = operation(*values)
            values = made if isinstance(made, tuple) else (made,)
        return _placed(row, self._taken, values)


def _placed(row: Row, taken: Sequence[int], values: Row) -> Row:
    """Return a row, or its names, with results in place of the columns they come from.

    If there are as many results as such columns, each takes the place of one. Otherwise
    the results come first, followed by the other columns.
    """
    if len(values) == len(taken):
        results = dict(zip(taken, values, strict=True))
        return tuple(results.get(at, value) for at, value in enumerate(row))
    return (*values, *(value for at, value in enumerate(row) if at not in taken))


class Arrays:
    """A map-style source, with samples as tuples of arrays."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Row:
        return _row(self._source[index])


class Streamed(torch.utils.data.IterableDataset[Row]):
    """An iterable source, or a function that returns one."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Row]:
        source = self._source
        return map(_row, source() if callable(source) else source)


def _row(sample: Any) -> Row:
    """Return a sample as in MindSpore: one array per column."""
    values = sample if isinstance(sample, tuple) else (sample,)
    return tuple(np.asarray(value) for value in values)


class Epochs(Iterator[T]):
    """Starts an epoch each time it is looped over, like MindSpore's iterators."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin
        self._rows: Iterator[T] | None = None

    def __iter__(self) -> Self:
        self._rows = self._begin()
        return self

    def __next__(self) -> T:
        if self._rows is None:
            self._rows = self._begin()
        return next(self._rows)


class Dataset:
    """The result of `GeneratorDataset` and `ImageFolderDataset`. Verbs return new ones.

    Args:
        pipeline: a pipeline whose samples are tuples, with one value per column.
        columns: names of the columns.
    """

    def __init__(self, pipeline: Pipeline, columns: Sequence[str]) -> None:
        self.pipeline = pipeline
        """The `Pipeline` inside, for everything else that penstock can do."""
        self._columns = list(columns)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(_instead(name, METHODS))

    def map(
        self,
        operations: Callable[..., Any] | Sequence[Callable[..., Any]],
        input_columns: str | Sequence[str] | None = None,
        output_columns: str | Sequence[str] | None = None,
        num_parallel_workers: int | None = None,
        **options: Any,
    ) -> Self:
        """Call functions, one after another, on the values of some columns.

        Args:
            operations: one or several; each takes the results of the one before.
            input_columns: columns that the first one takes (default: the first column).
            output_columns: names of the results (default: those of the input).
            num_parallel_workers: workers to start with.
            **options: MindSpore's options of how it runs; penstock decides that itself.

        Raises:
            SpecError: there is no such column, or an option is unknown.
        """
        _known(options, "python_multiprocessing", "max_rowsize", "offload")
        calls = [operations] if callable(operations) else list(operations)
        taken = _names(input_columns) or self._columns[:1]
        given = _names(output_columns) or taken
        places = [self._place(name) for name in taken]
        inner = getattr(calls[0], "__name__", type(calls[0]).__name__)
        function = Columns(calls, places, inner)
        made = self.pipeline.map(function, num_parallel_workers=num_parallel_workers)
        columns = _placed(tuple(self._columns), places, tuple(given))
        return type(self)(made, columns)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        **options: Any,
    ) -> Self:
        """Make batches.

        Args:
            batch_size: samples in a batch.
            drop_remainder: whether to leave out an epoch's short last batch.
            **options: `num_parallel_workers` and `python_multiprocessing`, which are
                ignored.

        Raises:
            SpecError: an option is unknown.
        """
        _known(options, "num_parallel_workers", "python_multiprocessing", "max_rowsize")
        made = self.pipeline.batch(batch_size, drop_last=drop_remainder)
        return type(self)(made, self._columns)

    def shuffle(self, buffer_size: int) -> Self:
        """Shuffle the whole dataset again in each epoch, whatever the buffer size."""
        return type(self)(self.pipeline.shuffle(), self._columns)

    def repeat(self, count: int | None = None) -> Self:
        """Make each epoch `count` passes over the data."""
        check(
            count is not None and count > 0,
            f"repeat() needs a count > 0, got {count!r}; loop over the data instead",
        )
        return type(self)(self.pipeline.repeat(count or 1), self._columns)

    def take(self, count: int = -1) -> Self:
        """Use only the first `count` samples; -1: all."""
        if count == -1:
            return self
        return type(self)(self.pipeline.take(count), self._columns)

    def create_dict_iterator(
        self,
        num_epochs: int = -1,
        output_numpy: bool = False,
        do_copy: bool = False,
    ) -> Epochs[dict[str, Any]]:
        """Return an iterable of dicts, one for each batch; each loop is an epoch.

        Args:
            num_epochs: ignored, as each loop is one epoch.
            output_numpy: whether columns are arrays; otherwise they are torch tensors.
            do_copy: ignored, as batches belong to you.

        Raises:
            SpecError: when looped over: the dataset has no batches.
        """
        names = self._columns
        return Epochs(
            lambda: (
                dict(zip(names, values, strict=True))
                for values in self._values(names, as_arrays=output_numpy)
            )
        )

    def create_tuple_iterator(
        self,
        columns: Sequence[str] | None = None,
        num_epochs: int = -1,
        output_numpy: bool = False,
        do_copy: bool = False,
    ) -> Epochs[list[Any]]:
        """Return an iterable of lists, one for each batch; each loop is an epoch.

        Args:
            columns: names of the columns, in this order (default: all).
            num_epochs: ignored, as each loop is one epoch.
            output_numpy: whether columns are arrays; otherwise they are torch tensors.
            do_copy: ignored, as batches belong to you.

        Raises:
            SpecError: when looped over: there is no such column, or the dataset has no
                batches.
        """
        names = list(columns or self._columns)
        return Epochs(lambda: self._values(names, as_arrays=output_numpy))

    def _values(self, names: Sequence[str], *, as_arrays: bool) -> Iterator[list[Any]]:
        places = [self._place(name) for name in names]
        for batch in self.pipeline:
            values = [batch[at] for at in places]
            yield [np.asarray(value) for value in values] if as_arrays else values

    def _place(self, name: str) -> int:
        check(
            name in self._columns,
            f"there is no column {name!r}; there are {', '.join(self._columns)}",
        )
        return self._columns.index(name)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.create_tuple_iterator())

    def get_dataset_size(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.pipeline)

    def __len__(self) -> int:
        return self.get_dataset_size()

    def get_col_names(self) -> list[str]:
        """Return the names of the columns."""
        return list(self._columns)

    def close(self) -> None:
        """Stop all workers."""
        self.pipeline.close()


def GeneratorDataset(
    source: Any,
    column_names: str | Sequence[str],
    column_types: None = None,
    schema: None = None,
    num_samples: int | None = None,
    num_parallel_workers: int | None = None,
    shuffle: bool | None = None,
    sampler: None = None,
    num_shards: int | None = None,
    shard_id: int | None = None,
    **options: Any,
) -> Dataset:
    """Load from a Python object: map-style, iterable, or a generator function.

    Args:
        source: yields samples: tuples with one value per column, or single values.
        column_names: names of the columns.
        column_types: not supported: arrays keep their types.
        schema: not supported.
        num_samples: samples in an epoch; None: all.
        num_parallel_workers: workers to start with.
        shuffle: None: shuffle a map-style source, as in MindSpore.
        sampler: not supported.
        num_shards: number of ranks.
        shard_id: number of this rank.
        **options: MindSpore's options of how it runs; penstock decides that itself.

    Raises:
        SpecError: an option is unknown, or not supported.
    """
    _known(options, "python_multiprocessing", "max_rowsize", "batch_sampler")
    given = {"column_types": column_types, "schema": schema, "sampler": sampler}
    for name, value in given.items():
        check(value is None, f"`{name}` is not supported, got {value!r}; leave it out")
    indexed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    data = Arrays(source) if indexed else Streamed(source)
    pipeline = Pipeline.from_dataset(
        data,
        num_parallel_workers=num_parallel_workers,
        name=type(source).__name__,
        shard=_shard(num_shards, shard_id),
    )
    if indexed and shuffle is not False:
        pipeline = pipeline.shuffle()
    found = Dataset(pipeline, _names(column_names))
    return found if num_samples is None else found.take(num_samples)


def ImageFolderDataset(
    dataset_dir: str | os.PathLike[str],
    num_samples: int | None = None,
    num_parallel_workers: int | None = None,
    shuffle: bool | None = None,
    decode: bool = False,
    num_shards: int | None = None,
    shard_id: int | None = None,
) -> Dataset:
    """Load images from class sub-folders: columns `image` and `label`.

    Args:
        dataset_dir: the folder.
        num_samples: samples in an epoch; None: all.
        num_parallel_workers: workers to start with.
        shuffle: None: shuffle, as in MindSpore.
        decode: whether `image` is `uint8 [height, width, 3]`; otherwise it is the bytes
            of the file.
        num_shards: number of ranks.
        shard_id: number of this rank.

    Raises:
        SpecError: the folder has no such images, or only one of `num_shards` and
            `shard_id` is given.
    """
    pipeline = Pipeline.from_folder(
        dataset_dir,
        num_parallel_workers=num_parallel_workers,
        shard=_shard(num_shards, shard_id),
    )
    if shuffle is not False:
        pipeline = pipeline.shuffle()
    if decode:
        pipeline = pipeline.map(image.decode)
    found = Dataset(pipeline, ["image", "label"])
    return found if num_samples is None else found.take(num_samples)


def _shard(num_shards: int | None, shard_id: int | None) -> Shard | None:
    if num_shards is None and shard_id is None:
        return None
    check(
        num_shards is not None and shard_id is not None,
        "`num_shards` and `shard_id` go together, got"
        f" {num_shards!r} and {shard_id!r}; pass both, or neither",
    )
    return Shard(shard_id or 0, num_shards or 1)


def _names(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _known(options: dict[str, Any], *names: str) -> None:
    """Refuse options that would change what is loaded."""
    for name, value in options.items():
        check(
            name in names,
            f"`{name}` is not supported, got {value!r}; leave it out, or use"
            " the penstock.Pipeline inside (`.pipeline`)",
        )
