"""Datasets: what a source is, and what is known of the user's own.

A source is a map-style dataset that penstock reads itself: it knows its length, and
returns sample i in any thread and process. It opens files in the process that reads
them, so only a description of it is sent to other processes. `docs/sources.md` shows
how to write one.

A user's dataset is map-style if it has `__len__` and `__getitem__`: a torch dataset, a
list, an array, an HF dataset. An iterable one is anything else with `__iter__`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from ...errors import check


class Source(ABC):
    """A dataset on a disk or in a store.

    It waits for its storage, so it is best read by workers of its own. It may also
    have:

    - `__getitems__(indices) -> list`: many samples at once, if that costs less;
    - `group_sizes`: samples of each shard or row group, in order, for
      `shuffle(window=...)`.
    """

    KIND: str
    """The name of the source in the log; `Pipeline.from_<kind>` makes the source."""
    MAPPED: ClassVar[bool] = False
    """Whether it reads a memory map: it only waits for pages that are not in memory. If
    nothing else is done to its samples, it starts in the trainer, as any dataset does,
    and gets workers where they pay."""
    PER_PROCESS: ClassVar[bool] = True
    """Whether all that changes in it is what each process opens or keeps for itself, so
    that no process makes other samples than another."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples there are."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """Return a sample."""

    @property
    @abstractmethod
    def shown(self) -> tuple[object, ...]:
        """The arguments of this source as code."""

    @abstractmethod
    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each sample, `uint64 [n, 2]`.

        A cache keeps the result for a sample as long as this is the same. So the
        fingerprint has to change with the bytes, as far as that shows without reading
        them: by path, size and time of change, or by URL and offset.
        """

    @abstractmethod
    def identity(self) -> str | None:
        """Return 32 hex digits that identify the dataset; None: only its length does.

        A state is checked against it, so a copy in another place has the same identity.
        """


def digest(names: Sequence[str]) -> str:
    """Return the hash of names, each ended by a zero byte: 32 hex digits."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in names:
        hasher.update(os.fsencode(name) + b"\0")
    return hasher.hexdigest()


def prints_of_rows(
    files: NDArray[np.uint64], sizes: NDArray[np.int64], salt: str
) -> NDArray[np.uint64]:
    """Return the fingerprints of the rows of some files, `uint64 [n, 2]`.

    Args:
        files: fingerprint of each file, `[f, 2]`.
        sizes: number of rows of each file, `[f]`; n in total.
        salt: 32 hex digits that identify what is read of all rows.
    """
    salts = np.frombuffer(bytes.fromhex(salt), np.uint64).reshape(1, 2)
    starts = np.cumsum(sizes) - sizes
    rows = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
    prints = np.repeat(files ^ salts, sizes, axis=0)
    # An odd factor maps each row to a different number; the sums in a file differ, too.
    prints[:, 0] += rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return prints


# What each process opens for itself.

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Makes values by key, each once per process, and keeps the last used ones.

    Any number of threads may ask at once; a thread waits for a value that another is
    making. A child process starts without values, and so does an unpickled copy.

    Args:
        make: returns the value of a key.
        count: number of values to keep.
        weigh: bytes of a value; None: they do not count.
        limit: returns the bytes that values may take together. The newest one is kept
            even if it takes more.
    """

    def __init__(
        self,
        make: Callable[[Any], T],
        count: int,
        weigh: Callable[[T], int] | None = None,
        limit: Callable[[], int] | None = None,
    ) -> None:
        self._make, self._count, self._weigh, self._limit = make, count, weigh, limit
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        # Each value with its bytes, once it is made.
        self._values = OrderedDict[Hashable, tuple[Future[T], int | None]]()
        self._process = os.getpid()  # last: a thread that sees it finds a free lock

    def __call__(self, key: Hashable) -> T:
        """Return the value of a key."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            mine = key not in self._values
            if mine:
                self._values[key] = Future(), None
                if len(self._values) > self._count:
                    self._values.popitem(last=False)
            value, _ = self._values[key]
            self._values.move_to_end(key)
        if mine:
            self._fill(key, value)
        return value.result()

    def all(self, keys: Sequence[Hashable]) -> list[T]:
        """Return the values of several keys, making first what nobody else makes."""
        values = {key: self(key) for key in keys if key not in self._values}
        return [values[key] if key in values else self(key) for key in keys]

    def _fill(self, key: Hashable, value: Future[T]) -> None:
        try:
            value.set_result(self._make(key))
        except BaseException as error:
            value.set_exception(error)
            with self._lock:  # the next to ask tries again
                self._values.pop(key, None)
            raise
        if self._weigh is not None and self._limit is not None:
            nbytes, limit = self._weigh(value.result()), self._limit()
            with self._lock:
                self._make_room(key, nbytes, limit)

    def _make_room(self, key: Hashable, nbytes: int, limit: int) -> None:
        """Drop the values used longest ago until there is room for one just made."""
        if key in self._values:
            self._values[key] = self._values[key][0], nbytes
        for old, (_, freed_bytes) in [*self._values.items()]:
            if sum(size or 0 for _, size in self._values.values()) <= limit:
                break
            if freed_bytes is not None and old != key:
                del self._values[old]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make, self._count, self._weigh, self._limit)


# The user's datasets.

# Modules whose iterators cannot restart: generators, `zip`, open files.
ONCE = frozenset(("builtins", "itertools", "_csv", "_io"))


def is_iterable(dataset: Any) -> bool:
    """Tell an iterable dataset from a map-style one.

    Raises:
        SpecError: it is neither.
    """
    if isinstance(dataset, IterableDataset):
        return True
    cure = cure_of(dataset)
    check(
        not cure,
        f"`from_dataset` cannot take {type(dataset).__name__} objects: {cure}",
    )
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    check(
        is_map or hasattr(dataset, "__iter__"),
        f"`from_dataset` needs a dataset with __len__ and __getitem__, or one with "
        f"__iter__, got {type(dataset).__name__}; give an object of a torch Dataset, a "
        "list or an array",
    )
    return not is_map


def cure_of(data: Any) -> str:
    """Say why an object only looks like a dataset; empty if it may be one."""
    kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
    match data:
        case str() | bytes() | os.PathLike():
            return (
                "a path is not a dataset of the files there; use from_folder(path) or"
                " from_files(pattern)"
            )
        case _ if kind == "pandas.DataFrame":
            return (
                'an index picks a column of it; give its rows, df.to_dict("records"),'
                " or use Pipeline.from_dataset(df)"
            )
        case _ if kind in ("pyarrow.Table", "pyarrow.RecordBatch"):
            return (
                "an index picks a column of it; give its rows, table.to_pylist(), or"
                " datasets.Dataset(table), which reads them on demand"
            )
        case Mapping() if len(data) and 0 not in data:
            return (
                "samples are read by index, and its keys are not 0, 1, 2, ...; for a"
                " dict of columns give torch.utils.data.StackDataset(**columns)"
            )
        case Iterator() if type(data).__module__ in ONCE:
            return (
                "it can only be read once, but each epoch starts at the beginning; give"
                " an object whose __iter__ starts again, such as a torch"
                " IterableDataset"
            )
    return ""


def length_of(sized: Any) -> int | None:
    """Return how long a dataset or a loader says it is; None: it does not say."""
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 whatever the user's dataset or sampler raises
        return None


def warn_of(data: Any) -> None:
    """Warn if an object looks like a dataset to torch but is not one.

    Torch would take the letters of a path for samples. A mapping gets no warning,
    because a sampler may draw its keys.
    """
    if not isinstance(data, Mapping) and (cure := cure_of(data)):
        text = f"this {type(data).__name__} is not a dataset: {cure}"
        warnings.warn(text, UserWarning, stacklevel=3)


# The identity of a dataset, as far as it gives one; a state is checked against it.


def identity_of(dataset: Any) -> str | None:
    """Return 32 hex digits; None if only the length is known.

    penstock's own sources identify themselves; others do so by
    `__penstock_fingerprint__`, or by the `_fingerprint` of Hugging Face's datasets.
    Nothing else about an object is sure to be the same in the next run, and a run that
    cannot be resumed is worse than one that can.
    """
    if isinstance(dataset, Source):
        return dataset.identity()
    from ...cache.fingerprint import said_fingerprint

    fingerprint = said_fingerprint(dataset)
    return (
        None
        if fingerprint is None
        else hashlib.blake2b(fingerprint, digest_size=16).hexdigest()
    )
