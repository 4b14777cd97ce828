"""Datasets with named columns, and MindSpore's verbs on them.

A dataset is a `Pipeline` of rows. Verbs that a pipeline has are its own. The others run
it, and change its rows in the trainer: a `Stream`, the source of another pipeline.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch.utils.data import ConcatDataset

from .. import config
from ..engine.plan import Shard
from ..errors import check
from ..pipeline.pipeline import Pipeline
from .batches import Batches, BatchInfo, ByLength, DealtBatches, Pads, Sized
from .columns import Columns, Kept, Picked, Row, as_samples, placed
from .loops import Facts, Known, Stream, mixed
from .samplers import chosen
from .settings import LOGGER, ignored, instead

Names = str | Sequence[str] | None
METHODS = {
    "add_sampler": "use_sampler()",
    "build_vocab": "a loop over the data that counts its words",
    "device_que": "penstock.Pipeline.to_device(device)",
    "flat_map": "an iterable source of your own",
    "save": "penstock.Pipeline.cache(disk=...)",
    "sync_wait": "penstock.Pipeline.on_batch(listener)",
    "to_device": "penstock.Pipeline.to_device(device)",
}


class Dataset(Known):
    """What the functions for datasets return. Verbs return new ones.

    Args:
        pipeline: a pipeline of rows.
        columns: names of the columns.
        facts: what else is known.
    """

    @classmethod
    def streamed(
        cls,
        begin: Callable[[int], Iterator[Row]],
        columns: Sequence[str],
        facts: Facts,
        checked: Sequence[str] | None = None,
    ) -> Self:
        """Return a dataset of rows that come in an order of their own.

        Args:
            begin: begins an epoch, given its number.
            columns: names of the columns.
            facts: what else is known.
            checked: names to check samples by that are not rows yet.
        """
        stream = Stream(begin, checked)
        pipeline = Pipeline.from_dataset(stream, shard=Shard.single())
        begin_epoch = stream.__penstock_epoch__
        stream_facts = replace(facts, closed=False, dealt=True, begin=begin_epoch)
        return cls(pipeline, columns, stream_facts)

    @classmethod
    def sampled(
        cls,
        sampler: Any,
        source: Any,
        columns: Sequence[str],
        *,
        first: Callable[[Any], Row] | None = None,
        workers: int | None = None,
        classes: dict[str, Any] | None = None,
    ) -> Self:
        """Return a dataset of what is read by its index.

        Args:
            sampler: chooses the indices.
            source: what is read.
            columns: names of the columns.
            first: makes rows of what is read; None: these are rows.
            workers: workers to start with.
            classes: the label of each class.
        """
        pipeline, size = chosen(sampler, source, workers)
        row_pipeline = pipeline if first is None else pipeline.map(first)
        facts = Facts(
            dealt=size is not None,
            shuffled=getattr(sampler, "shuffle", None) is True,
            size=size,
            source=source,
            first=first,
            classes=classes,
        )
        return cls(row_pipeline, columns, facts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(instead(name, METHODS))

    # Verbs that change rows

    def map(
        self,
        operations: Callable[..., Any] | Sequence[Callable[..., Any]],
        input_columns: Names = None,
        output_columns: Names = None,
        num_parallel_workers: int | None = None,
        **options: Any,
    ) -> Self:
        """Call functions, one after another, on the values of some columns.

        Args:
            operations: one or several; each takes the results of the one before.
            input_columns: columns that the first one takes (default: the first column).
            output_columns: names of the results (default: those of the input).
            num_parallel_workers: workers to start with.
            **options: `column_order`, names of columns to keep, in this order; and
                options of how it runs, which penstock decides itself.

        Raises:
            SpecError: there is no such column, or an option is unknown.
        """
        order = options.pop("column_order", None)
        ignored(
            "map", options, "python_multiprocessing", "max_rowsize", "cache", "offload"
        )
        calls = [operations] if callable(operations) else list(operations)
        inputs = names_of(input_columns) or self.columns[:1]
        outputs = names_of(output_columns) or inputs
        places = self.places(inputs)
        batched = self.facts.batched
        function = Columns.of(calls, places, len(outputs), batched=batched)
        apart = self.facts.closed and self.facts.dealt
        workers = None if apart else num_parallel_workers
        pipeline = self.pipeline.map(function, num_parallel_workers=workers)
        columns = placed(tuple(self.columns), places, tuple(outputs))
        dataset = self._changed(pipeline, columns)
        return dataset.project(order) if order else dataset

    def project(self, columns: Names) -> Self:
        """Keep these columns only, in this order."""
        names = names_of(columns)
        if names == self.columns:
            return self
        function = Picked(self.places(names))
        return self._changed(self.pipeline.map(function), names)

    def rename(self, input_columns: Names, output_columns: Names) -> Self:
        """Give columns other names."""
        places = self.places(names_of(input_columns))
        names = names_of(output_columns)
        check(
            len(places) == len(names),
            f"rename() got {len(places)} columns and {len(names)} names; give as many",
        )
        columns = placed(tuple(self.columns), places, tuple(names))
        facts = replace(self.facts, unbatched=None)  # those have the old names
        return type(self)(copy.copy(self.pipeline), columns, facts)

    def filter(
        self,
        predicate: Callable[..., Any],
        input_columns: Names = None,
        num_parallel_workers: int | None = None,
    ) -> Self:
        """Drop the rows for which `predicate` of columns (default: all) is false."""
        places = self.places(names_of(input_columns) or self.columns)
        test = Kept(predicate, places, batched=self.facts.batched)
        if self.facts.closed:
            return self._after(lambda rows: filter(test, rows))
        pipeline = self.pipeline.filter(test, num_parallel_workers=num_parallel_workers)
        return self._changed(pipeline, self.columns, dealt=True, size=None)

    def batch(
        self,
        batch_size: int | Callable[[BatchInfo], int],
        drop_remainder: bool = False,
        num_parallel_workers: int | None = None,
        **options: Any,
    ) -> Self:
        """Make batches.

        Args:
            batch_size: rows in a batch, or a function of a `BatchInfo` that decides it.
            drop_remainder: whether to leave out an epoch's short last batch.
            num_parallel_workers: ignored.
            **options: `per_batch_map`, a function that takes a list of arrays for each
                of `input_columns` (default: all) and a `BatchInfo`, and returns the
                columns `output_columns`; `column_order`; and `python_multiprocessing`
                and `max_rowsize`, which are ignored.

        Raises:
            SpecError: an option is unknown, or there is no such column.
        """
        option_names = (
            "per_batch_map",
            "input_columns",
            "output_columns",
            "column_order",
            "pad_info",
        )
        settings = {name: options.pop(name, None) for name in option_names}
        ignored("batch", options, "python_multiprocessing", "max_rowsize")
        if self.facts.batched:
            size = self.get_dataset_size
            whole = self._after(partial(map, as_samples), batched=False, size=size)
            return whole.batch(batch_size, drop_remainder, **settings)
        if callable(batch_size):
            make = Sized(batch_size, drop=drop_remainder)
            begin = lambda epoch: make(self.rows(epoch), epoch)  # noqa: E731
            return self._begun(begin, None, batched=True)
        function, order = settings["per_batch_map"], settings["column_order"]
        if function is not None or settings["pad_info"] is not None:
            inputs = names_of(settings["input_columns"]) or self.columns
            names = names_of(settings["output_columns"]) or inputs
            work = (function, inputs, names, settings["pad_info"])
            dataset = self._by_list(batch_size, drop_remainder, *work)
        else:
            pipeline = self.pipeline.batch(batch_size, drop_last=drop_remainder)
            dataset = self._batches(
                pipeline,
                batch_size,
                drop_remainder,
                unbatched=(self, batch_size, drop_remainder),
            )
        return dataset.project(order) if order else dataset

    def padded_batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_workers: int | None = None,
        pad_info: Pads | None = None,
    ) -> Self:
        """Make batches of arrays brought to one shape.

        Args:
            batch_size: rows in a batch.
            drop_remainder: whether to leave out an epoch's short last batch.
            num_parallel_workers: ignored.
            pad_info: shape and filling of columns by name. The shape may be None, or
                have None in it, for the largest of the batch; {}: all columns are
                filled with zeros.
        """
        return self.batch(batch_size, drop_remainder, pad_info=pad_info)

    def bucket_batch_by_length(
        self,
        column_names: Sequence[str],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        element_length_function: Callable[..., int] | None = None,
        pad_info: Pads | None = None,
        pad_to_bucket_boundary: bool = False,
        drop_remainder: bool = False,
    ) -> Self:
        """Make batches of rows that are about equally long.

        Args:
            column_names: columns that the length depends on.
            bucket_boundaries: the length from which on a row belongs to the next
                bucket, ascending.
            bucket_batch_sizes: rows in the batches of each bucket; one more than
                boundaries.
            element_length_function: returns the length (default: that of the column).
            pad_info: as for `padded_batch`.
            pad_to_bucket_boundary: whether sizes that `pad_info` leaves open become the
                boundary minus 1; the last bucket must then stay empty.
            drop_remainder: whether to leave out an epoch's short last batches.

        Raises:
            SpecError: there is not one size more than boundaries.
        """
        check(
            len(bucket_batch_sizes) == len(bucket_boundaries) + 1,
            f"{len(bucket_boundaries)} boundaries make {len(bucket_boundaries) + 1}"
            f" buckets, got {len(bucket_batch_sizes)} sizes; give one for each",
        )
        make = ByLength(
            self.columns,
            self.places(column_names),
            element_length_function or len,
            boundaries=bucket_boundaries,
            sizes=bucket_batch_sizes,
            pads=pad_info,
            to_boundary=pad_to_bucket_boundary,
            drop=drop_remainder,
        )
        return self._after(make, batched=True)

    # Verbs that choose and order rows

    def shuffle(self, buffer_size: int) -> Self:
        """Shuffle in each epoch: rows with an index as a whole, others in a buffer.

        Raises:
            SpecError: the buffer is smaller than 2.
        """
        check(
            isinstance(buffer_size, int) and buffer_size >= 2,
            f"shuffle() needs a buffer of at least 2 rows, got {buffer_size!r}; leave"
            " it out for data in order",
        )
        if self._indexed:
            return self._changed(self.pipeline.shuffle(), self.columns, shuffled=True)
        seed = config.get_seed()

        def shuffled(epoch: int) -> Iterator[Row]:
            rng = np.random.default_rng([seed, epoch])
            return mixed(self.rows(epoch), buffer_size, rng)

        return self._begun(shuffled, self.get_dataset_size, shuffled=True)

    def shuffled_by_file(self) -> Self:
        """Shuffle the files of records, and the rows of each."""
        return self._changed(
            self.pipeline.shuffle(window=1), self.columns, shuffled=True
        )

    def repeat(self, count: int | None = None) -> Self:
        """Make each epoch `count` passes over the data; None or -1: without end.

        Raises:
            SpecError: the count is 0, or less than -1.
        """
        times = -1 if count is None else count
        check(
            times == -1 or times > 0,
            f"repeat() needs a count > 0, or -1, got {count!r}; 1 is one pass",
        )
        repeats = {"repeats": times}
        if times > 0 and self._indexed:
            pipeline = self.pipeline.repeat(times)
            return self._changed(pipeline, self.columns, **repeats)
        if times > 0 and self.facts.unbatched and not self.facts.dealt:
            rows, size, drop = self.facts.unbatched
            whole = rows.get_dataset_size() // size * size
            if whole and (drop or whole == rows.get_dataset_size()):
                again: Self = rows.take(whole).repeat(times).batch(size, drop)
                return again

        def begin(epoch: int) -> Iterator[Row]:
            first = epoch * times
            passes = itertools.count() if times == -1 else range(first, first + times)
            return chain.from_iterable(map(self.rows, passes))

        return self._begun(
            begin, lambda: self.get_dataset_size() * max(times, 1), **repeats
        )

    def take(self, count: int = -1) -> Self:
        """Use only the first `count` rows; -1: all.

        Raises:
            SpecError: the count is 0, or less than -1.
        """
        if count == -1:
            return self
        check(count > 0, f"take() needs a count > 0, or -1 for all rows, got {count!r}")
        if self._indexed:
            return self._changed(self.pipeline.take(count), self.columns)
        size = lambda: min(count, self.get_dataset_size())  # noqa: E731
        return self._after(lambda rows: islice(rows, count), size=size)

    def skip(self, count: int) -> Self:
        """Leave out the first `count` rows."""
        check(count >= 0, f"skip() needs a count >= 0, got {count!r}")
        if self._indexed and count < self.get_dataset_size():
            rest = range(count, self.get_dataset_size())
            return self._changed(self.pipeline.select(rest), self.columns)
        size = lambda: max(0, self.get_dataset_size() - count)  # noqa: E731
        return self._after(lambda rows: islice(rows, count, None), size=size)

    def split(self, sizes: Sequence[float], randomize: bool = True) -> list[Self]:
        """Divide the rows among several datasets.

        Args:
            sizes: rows of each, or shares that add up to 1.
            randomize: whether to draw the rows, by the seed: the same in each epoch,
                unless the dataset is shuffled. Then a part has other rows in each
                epoch, as in MindSpore, and a warning says so.

        Raises:
            SpecError: the sizes do not add up, or rows to draw have no index.
        """
        if self.facts.shuffled:
            LOGGER.warning(
                "split() divides rows that are shuffled in each epoch, so the parts"
                " exchange rows between epochs; give the dataset shuffle=False, and"
                " shuffle the parts"
            )
        total = self.get_dataset_size()
        counts = _counts(sizes, total)
        ends = np.cumsum(counts)
        if not self._indexed:
            check(
                not randomize, "rows without an index cannot be drawn; randomize=False"
            )
            return [
                self.skip(int(end - size)).take(size)
                for end, size in zip(ends, counts, strict=True)
            ]
        rng = np.random.default_rng(config.get_seed())
        order = rng.permutation(total) if randomize else np.arange(total)
        return [
            self._changed(self.pipeline.select(part.tolist()), self.columns)
            for part in np.split(order, ends[:-1])
        ]

    def use_sampler(self, new_sampler: Any) -> None:
        """Let a sampler choose the rows, in place of the one before.

        Raises:
            SpecError: something other than an order was made of the rows already.
        """
        check(
            self.facts.source is not None,
            "use_sampler() goes on the dataset itself, before map() and batch()",
        )
        facts = self.facts
        data = self.sampled(
            new_sampler,
            facts.source,
            self.columns,
            first=facts.first,
            classes=facts.classes,
        )
        vars(self).clear()
        vars(self).update(vars(data))

    # Verbs on several datasets

    def zip(self, datasets: Dataset | Sequence[Dataset]) -> Dataset:
        """Put columns side by side, as far as the shortest dataset goes."""
        return zipped((self, *_several(datasets)))

    def concat(self, datasets: Dataset | Sequence[Dataset]) -> Self:
        """Append the rows of others.

        Raises:
            SpecError: they have other columns.
        """
        parts: list[Dataset] = [self, *_several(datasets)]
        for part in parts:
            check(
                part.columns == self.columns,
                f"concat() needs the same columns, got {', '.join(self.columns)}"
                f" and {', '.join(part.columns)}; rename() some",
            )
        sources = [part.source for part in parts]
        lacks_source = any(source is None for source in sources)
        facts = replace(
            self.facts,
            size=lambda: sum(part.get_dataset_size() for part in parts),
            source=None if lacks_source else ConcatDataset(sources),
            first=None,
            unbatched=None,
            parents=tuple(parts),
            shuffled=any(part.facts.shuffled for part in parts),
        )

        def begin(epoch: int) -> Iterator[Row]:
            return chain.from_iterable(part.rows(epoch) for part in parts)

        return self.streamed(begin, self.columns, facts)

    def __add__(self, other: Dataset) -> Self:
        return self.concat(other)

    def apply(self, apply_func: Callable[[Self], Any]) -> Any:
        """Return what a function makes of this dataset.

        Raises:
            TypeError: that is no dataset.
        """
        dataset = apply_func(self)
        if not isinstance(dataset, Dataset):
            text = f"apply() needs a function that returns a dataset, got {dataset!r}"
            raise TypeError(text)
        return dataset

    # Helpers

    @property
    def _indexed(self) -> bool:
        return not self.facts.closed and not self.facts.dealt

    @property
    def source(self) -> Any:
        """The rows by their index, if nothing but an order was made of them."""
        source, first = self.facts.source, self.facts.first
        return source if source is None or first is None else Made(source, first)

    def _changed(
        self, pipeline: Pipeline, columns: Sequence[str], **facts: Any
    ) -> Self:
        base = replace(self.facts, begin=None, source=None, unbatched=None)
        return type(self)(pipeline, columns, replace(base, **facts))

    def _begun(
        self,
        begin: Callable[[int], Iterator[Row]],
        size: Callable[[], int] | None,
        **facts: Any,
    ) -> Self:
        base = replace(self.facts, parents=(self,), source=None, unbatched=None)
        return self.streamed(begin, self.columns, replace(base, size=size, **facts))

    def _after(
        self, change: Callable[[Iterator[Row]], Iterator[Row]], **facts: Any
    ) -> Self:
        """Return a dataset of rows that the trainer changes as they come."""
        size = facts.pop("size", None)
        return self._begun(lambda epoch: change(self.rows(epoch)), size, **facts)

    def _batches(self, pipeline: Pipeline, size: int, drop: bool, **facts: Any) -> Self:
        count = self.facts.size
        if count is not None:
            facts["size"] = lambda: count() // size if drop else -(-count() // size)
        return self._changed(
            pipeline, self.columns, batched=True, closed=True, batch_size=size, **facts
        )

    def _by_list(
        self,
        size: int,
        drop: bool,
        function: Callable[..., Any] | None,
        inputs: Sequence[str],
        outputs: Sequence[str],
        pads: Pads | None,
    ) -> Self:
        """Return batches that a function makes of lists of rows."""
        places = self.places(inputs)
        columns = placed(tuple(self.columns), places, tuple(outputs))
        pipeline = self.pipeline.batch(size, drop_last=drop, collate_fn=list)
        work = (function, places, columns, pads)
        dealt = self.facts.dealt
        pipeline = pipeline.map(
            DealtBatches(*work) if dealt else Batches(*work, len(pipeline))
        )
        return type(self)(pipeline, columns, self._batches(pipeline, size, drop).facts)


class Made:
    """Rows made of what is read by its index."""

    def __init__(self, source: Any, first: Callable[[Any], Row]) -> None:
        self._source, self._make = source, first

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Row:
        return self._make(self._source[index])


def zipped(datasets: Sequence[Dataset]) -> Dataset:
    """Return datasets side by side, as far as the shortest one goes.

    Raises:
        SpecError: a column comes twice.
    """
    names = [name for dataset in datasets for name in dataset.get_col_names()]
    check(
        len(set(names)) == len(names),
        f"zip() needs different columns, got {', '.join(names)}; rename() some",
    )

    def begin(epoch: int) -> Iterator[Row]:
        for rows in zip(*(dataset.rows(epoch) for dataset in datasets), strict=False):
            yield tuple(chain.from_iterable(rows))

    first = datasets[0].facts
    facts = Facts(
        batched=first.batched,
        size=lambda: min(dataset.get_dataset_size() for dataset in datasets),
        parents=tuple(datasets),
        batch_size=first.batch_size,
        shuffled=any(dataset.facts.shuffled for dataset in datasets),
    )
    return Dataset.streamed(begin, names, facts)


def serialize(dataset: Dataset, json_filepath: str = "") -> dict[str, Any]:
    """Return the description of a dataset; write it to a file if one is named."""
    description = {
        "columns": dataset.get_col_names(),
        "pipeline": repr(dataset.pipeline),
    }
    if json_filepath:
        Path(json_filepath).write_text(json.dumps(description, indent=2))
    return description


def names_of(names: Names) -> list[str]:
    """Return names that may be given as one."""
    return [names] if isinstance(names, str) else list(names or ())


def _several(datasets: Dataset | Sequence[Dataset]) -> Sequence[Dataset]:
    return [datasets] if isinstance(datasets, Dataset) else datasets


def _counts(sizes: Sequence[float], total: int) -> list[int]:
    """Return the rows of each part."""
    counts = [int(size) for size in sizes]
    if any(isinstance(size, float) for size in sizes):
        counts = [round(share * total) for share in sizes]
        rest = total - sum(counts)
        at = next(at for at, count in enumerate(counts) if count + rest > 0)
        counts[at] += rest if abs(sum(sizes) - 1) < 1e-6 else 0
    check(
        sum(counts) == total and min(counts) > 0,
        f"split() needs sizes > 0 of {total} rows in all, got {sizes!r}; or shares",
    )
    return counts
