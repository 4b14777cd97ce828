"""What the user wrote: frozen stages, which hold no thread, file or lock.

A pipeline's description is a tuple of these. They compare, and print as the code that
makes them; `compile.py` turns them into something that can run. Each checks its own
arguments when it is made (`ordering.py` those of the order), so a mistake shows in the
line that holds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .. import config
from ..cache.codec import NAMES, Name
from ..engine.batch.device import DeviceStage
from ..engine.recipe import Executor
from ..errors import check
from ..system.printing import Bare, call, name_of

__all__ = [
    "BatchStage",
    "CacheStage",
    "Defaults",
    "FilterStage",
    "MapStage",
    "OnError",
    "RepeatStage",
    "SelectStage",
    "ShuffleStage",
    "SourceStage",
    "Stage",
    "TakeStage",
    "Workers",
    "check_kind",
    "check_staff",
    "executor_of",
    "is_async",
    "wanted_by",
]

# Who works on a stage: how many, of which kind, and how long a sample may take.

EXECUTORS: tuple[Executor, ...] = ("auto", "inline", "thread", "process", "async")
Workers = int | tuple[int, int] | None
"""Exactly n; between lo and hi, starting at lo; or as configured."""
STOPPABLE: tuple[Executor, ...] = ("auto", "process", "async")
"""Whose work can be broken off: of these `auto` then takes processes."""


def check_staff(workers: Workers, executor: Executor, timeout: float | None) -> None:
    """Check the settings that every stage with a function has."""
    check(
        executor in EXECUTORS,
        f"`executor` must be one of {', '.join(EXECUTORS)}, got {executor!r}",
    )
    if workers is not None:
        _check_workers(workers, executor)
    if timeout is not None:
        _check_timeout(timeout, executor)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is a coroutine function, a partial of one, or called as one."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 not whether, but which
    )


def wanted_by(function: Callable[..., Any]) -> frozenset[str]:
    """Return which of `rng` and `ctx` a function asks for, beyond its sample."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins without a signature ask for neither
        return frozenset()
    return frozenset(names[1:]) & {"rng", "ctx"}


def check_kind(function: Callable[..., Any], executor: Executor) -> None:
    """Check that this kind of workers can run this kind of function."""
    name = name_of(function)
    if is_async(function):
        check(
            executor in ("auto", "async"),
            f"{name} is a coroutine function (async def), which an event loop runs, "
            f"got executor={executor!r}; leave `executor` out",
        )
    else:
        check(
            executor != "async",
            f'executor="async" runs coroutine functions (async def), got {name}, which '
            'is a plain one; write it with async def, or use executor="thread"',
        )


def _check_workers(workers: int | tuple[int, int], executor: Executor) -> None:
    bounds = workers if isinstance(workers, tuple) else (workers, workers)
    check(
        len(bounds) == 2,
        f"`num_parallel_workers` must be n or (lo, hi), got {workers!r}",
    )
    for count in bounds:
        check(
            type(count) is int and count >= 1,
            f"`num_parallel_workers` must be >= 1, got {workers!r}; to work in the "
            'trainer\'s own thread use executor="inline"',
        )
    low, high = bounds
    check(
        low <= high,
        f"`num_parallel_workers=(lo, hi)` must have lo <= hi, got {workers!r}",
    )
    check(
        executor != "inline" or workers == 1,
        f'executor="inline" has one worker, the trainer itself, got '
        f'`num_parallel_workers={workers!r}`; leave it out, or use executor="thread"',
    )


def _check_timeout(timeout: float, executor: Executor) -> None:
    check(
        isinstance(timeout, (int, float))
        and not isinstance(timeout, bool)
        and timeout > 0,
        f"`timeout` is the seconds a sample may take, > 0, got {timeout!r}; leave it "
        "out for no limit",
    )
    check(
        executor in STOPPABLE,
        f"`timeout` needs workers that can be stopped, which {executor!r} ones cannot "
        'be; use executor="process", "async" or "auto"',
    )


# A cache as the user wrote it: `.cache(ram="2GB", disk="/nvme/cache")`.


def memory_of_this_machine() -> int:
    """Bytes."""
    import psutil  # a third of what importing all of penstock took

    return int(psutil.virtual_memory().total)


@dataclass(frozen=True, slots=True, repr=False)
class CacheStage:
    """Samples stored as the stage before it makes them."""

    ram: int = 0
    """Bytes of the tier in RAM; 0: there is none."""
    disk: Path | None = None
    disk_limit: int | None = None
    codec: Name = "auto"
    version: int | str | None = None

    def __post_init__(self) -> None:
        check(
            self.ram or self.disk is not None,
            'cache() needs a tier: cache(ram="2GB"), cache(disk="/nvme/cache"), or both'
            ", got neither",
        )
        total = memory_of_this_machine()
        check(
            self.ram <= total,
            f"`ram` must be at most the memory of this machine, {total} bytes, got"
            f" {self.ram}; what does not fit can go to cache(disk=...)",
        )
        check(
            self.disk_limit is None or self.disk is not None,
            f"`disk_limit` is of the folder `disk`, which is not given, got"
            f" {self.disk_limit!r}",
        )
        check(
            self.codec in NAMES,
            f"`codec` must be one of {', '.join(NAMES)}, got {self.codec!r}",
        )
        check(
            self.version is None or type(self.version) in (int, str),
            f"`version` must be an int or a str, got {self.version!r}",
        )

    @property
    def kind(self) -> str:
        """As the log names it."""
        return "Cache"

    def __repr__(self) -> str:
        return call(
            ".cache",
            ram=(self.ram, 0),
            disk=(None if self.disk is None else str(self.disk), None),
            disk_limit=(self.disk_limit, None),
            codec=(self.codec, "auto"),
            version=(self.version, None),
        )


OnError = Literal["raise", "substitute"]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What is taken where the user says nothing."""

    num_parallel_workers: int
    prefetch_size: int
    seed: int
    cpu_cores: float = 1.0
    """Cores that all workers may keep busy together: as many children as that share
    the leases of a thread-safe segment."""

    @classmethod
    def now(cls) -> Defaults:
        """Return what is set now."""
        return cls(
            config.get_num_parallel_workers(),
            config.get_prefetch_size(),
            config.get_seed(),
            config.budget().cpu_cores,
        )


@dataclass(frozen=True, slots=True, repr=False)
class SourceStage:
    """Where samples come from."""

    dataset: Any
    iterable: bool = False
    folder: bool = False
    files: bool = False
    num_parallel_workers: Workers = None
    executor: Executor = "auto"
    thread_safe: bool | None = None
    name: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_staff(self.num_parallel_workers, self.executor, self.timeout)
        if self.iterable:
            check(
                self.num_parallel_workers in (None, 1),
                "an iterable dataset is read by one worker, in its order, got "
                f"`num_parallel_workers={self.num_parallel_workers!r}`; leave it out "
                "here and give it to the map() that does the work",
            )
            check(
                self.executor not in ("process", "async"),
                "an iterable dataset is read in the trainer's process, by next(): "
                f'executor="{self.executor}" is for its map(), not for from_dataset()',
            )
            check(
                self.timeout is None,
                "the reading of an iterable dataset cannot be broken off, got "
                f"`timeout={self.timeout!r}`; leave it out here and give it to a map()",
            )
            return
        check_kind(self.dataset.__getitem__, self.executor)
        check(
            len(self.dataset) > 0,
            f"the dataset {type(self.dataset).__name__} is empty; it must hold at "
            "least one sample",
        )

    @property
    def kind(self) -> str:
        """As the log names it."""
        if self.files:
            return "Files"
        return "Folder" if self.folder else "Dataset"

    @property
    def label(self) -> str:
        """What stands behind the ID in the log."""
        if self.name:
            return self.name
        return "read" if self.waits else name_of(self.dataset)

    @property
    def waits(self) -> bool:
        """Whether it is known to wait for a storage, and so is best kept apart."""
        return self.folder or self.files

    def __repr__(self) -> str:
        shared: dict[str, tuple[object, object]] = {
            "num_parallel_workers": (self.num_parallel_workers, None),
            "executor": (self.executor, "auto"),
            "name": (self.name, None),
        }
        if self.folder:
            return call("Pipeline.from_folder", self.dataset.root, **shared)
        shared["timeout"] = (self.timeout, None)
        if self.files:
            return call("Pipeline.from_files", *self.dataset.shown, **shared)
        shared["thread_safe"] = (self.thread_safe, None)
        dataset = Bare(f"<{type(self.dataset).__name__}>")
        return call("Pipeline.from_dataset", dataset, **shared)


@dataclass(frozen=True, slots=True, repr=False)
class MapStage:
    """A function on each sample."""

    function: Callable[..., Any]
    num_parallel_workers: Workers = None
    executor: Executor = "auto"
    name: str | None = None
    tune: bool = True
    timeout: float | None = None

    def __post_init__(self) -> None:
        check(
            callable(self.function),
            f"map() needs a function of one sample, got {self.function!r}",
        )
        check_staff(self.num_parallel_workers, self.executor, self.timeout)
        check_kind(self.function, self.executor)

    @property
    def kind(self) -> str:
        """As the log names it."""
        return "Map"

    @property
    def label(self) -> str:
        """What stands behind the ID in the log."""
        return self.name or name_of(self.function)

    def __repr__(self) -> str:
        return call(
            ".map",
            Bare(name_of(self.function)),
            num_parallel_workers=(self.num_parallel_workers, None),
            executor=(self.executor, "auto"),
            name=(self.name, None),
            tune=(self.tune, True),
            timeout=(self.timeout, None),
        )


@dataclass(frozen=True, slots=True, repr=False)
class FilterStage:
    """Leaves out samples, at run time."""

    predicate: Callable[[Any], Any]
    num_parallel_workers: Workers = None
    executor: Executor = "auto"
    name: str | None = None
    tune: bool = True
    timeout: float | None = None

    def __post_init__(self) -> None:
        check(
            callable(self.predicate),
            f"filter() needs a function of one sample, got {self.predicate!r}",
        )
        check_staff(self.num_parallel_workers, self.executor, self.timeout)
        check_kind(self.predicate, self.executor)

    @property
    def kind(self) -> str:
        """As the log names it."""
        return "Filter"

    @property
    def label(self) -> str:
        """What stands behind the ID in the log."""
        return self.name or name_of(self.predicate)

    def __repr__(self) -> str:
        return call(
            ".filter",
            Bare(name_of(self.predicate)),
            num_parallel_workers=(self.num_parallel_workers, None),
            executor=(self.executor, "auto"),
            name=(self.name, None),
            tune=(self.tune, True),
            timeout=(self.timeout, None),
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SelectStage:
    """Only these indices of what comes before, in this order."""

    indices: Sequence[int]

    def __repr__(self) -> str:
        shown = ", ".join(str(int(index)) for index in self.indices[:3])
        more = ", ..." if len(self.indices) > 3 else ""
        return f".select([{shown}{more}])"


@dataclass(frozen=True, slots=True, repr=False)
class ShuffleStage:
    """Another order each epoch."""

    seed: int

    def __post_init__(self) -> None:
        check(
            isinstance(self.seed, int) and 0 <= self.seed < 1 << 64,
            f"`seed` must be an int from 0 to 2**64 - 1, got {self.seed!r}",
        )

    def __repr__(self) -> str:
        return f".shuffle(seed={self.seed})"


@dataclass(frozen=True, slots=True, repr=False)
class TakeStage:
    """The first `count` samples only."""

    count: int

    def __repr__(self) -> str:
        return f".take({self.count})"


@dataclass(frozen=True, slots=True, repr=False)
class RepeatStage:
    """An epoch of `count` passes."""

    count: int

    def __repr__(self) -> str:
        return f".repeat({self.count})"


@dataclass(frozen=True, slots=True, repr=False)
class BatchStage:
    """Samples into batches."""

    size: int | None = None
    global_size: int | None = None
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    tail: Literal["pad_mask", "pad_repeat"] = "pad_mask"
    on_error: OnError = "raise"
    error_budget: float = 0.01
    microbatches: int | None = None

    def __post_init__(self) -> None:
        for size in (self.size, self.global_size):
            check(
                size is None or (type(size) is int and size >= 1),
                f"the batch size must be an int >= 1, got {size!r}",
            )
        check(
            self.microbatches is None
            or (type(self.microbatches) is int and self.microbatches >= 1),
            f"`microbatches` must be an int >= 1 or None, got {self.microbatches!r}",
        )
        check(
            self.tail in ("pad_mask", "pad_repeat"),
            f"`tail` must be 'pad_mask' or 'pad_repeat', got {self.tail!r}",
        )
        check(
            self.on_error in ("raise", "substitute"),
            f"`on_error` must be 'raise' or 'substitute', got {self.on_error!r}",
        )
        check(
            0 <= self.error_budget <= 1,
            "`error_budget` is the share of an epoch's samples that may fail, from 0 "
            f"to 1, got {self.error_budget!r}",
        )

    def __repr__(self) -> str:
        size = () if self.size is None else (self.size,)
        return call(
            ".batch",
            *size,
            global_size=(self.global_size, None),
            drop_last=(self.drop_last, False),
            microbatches=(self.microbatches, None),
            tail=(self.tail, "pad_mask"),
            on_error=(self.on_error, "raise"),
            error_budget=(self.error_budget, 0.01),
        )


Stage = (
    SourceStage
    | MapStage
    | FilterStage
    | SelectStage
    | ShuffleStage
    | TakeStage
    | RepeatStage
    | CacheStage
    | BatchStage
    | DeviceStage
)


def executor_of(stage: SourceStage | MapStage | FilterStage) -> Executor:
    """Return the kind of workers it asks for; a coroutine function asks for its own."""
    match stage:
        case SourceStage(iterable=True):
            return stage.executor
        case SourceStage():
            function = stage.dataset.__getitem__
        case MapStage():
            function = stage.function
        case FilterStage():
            function = stage.predicate
    return "async" if is_async(function) else stage.executor
