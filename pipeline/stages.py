"""The stages that the user wrote: frozen values without threads, files or locks.

A pipeline's description is a tuple of these. Stages compare by value and print as the
code that makes them; `compile/` turns them into a recipe that can run. Each stage
checks its own arguments when it is made, and its place when it is added, so an error
points to the line with the mistake.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Self,
    TypedDict,
    cast,
    get_args,
)

from ..cache.codec import NAMES, Name
from ..engine.batch.device import DeviceStage
from ..engine.plan import Lengths, Order, Shard, Tail, group_shuffle, shuffled_by_part
from ..engine.recipe import Executor, Options
from ..errors import SpecError, check
from ..system.printing import Bare, call, name_of
from ..system.resources import memory_limit_bytes
from .sources.frames import rows_of
from .sources.source import Source, is_iterable

if TYPE_CHECKING:
    from .schedule import Scheduled

# The workers of a stage: their number, their kind, and the time limit of a sample.

EXECUTORS: tuple[Executor, ...] = get_args(Executor)
# n: n at first; (lo, hi): between lo and hi, lo at first; None: as configured.
Workers = int | tuple[int, int] | None


class _Options(TypedDict, total=False):
    num_parallel_workers: Workers
    executor: Executor
    name: str | None
    timeout: float | None


class WorkOptions(_Options, total=False):
    """What `map` and `filter` may say of their workers: see `Pipeline.map`."""

    tune: bool


class ReadOptions(_Options, total=False):
    """What each source takes besides its data: see `Pipeline.from_dataset`."""

    thread_safe: bool | None
    shard: Shard | None
    schedule: Scheduled | None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, the one in a partial, or an object's call is a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 not whether, but which
    )


def wanted_by(function: Callable[..., Any]) -> frozenset[str]:
    """Return which of `rng` and `ctx` a function takes, besides its sample."""
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
        f"`num_parallel_workers` must be n or (lo, hi), got {workers!r}"
        "; 4 and (1, 8) are examples",
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
        f"`num_parallel_workers=(lo, hi)` must have lo <= hi, got {workers!r}"
        "; put the smaller number first",
    )
    check(
        executor != "inline" or workers == 1,
        f'executor="inline" has one worker, the trainer itself, got '
        f'`num_parallel_workers={workers!r}`; leave it out, or use executor="thread"',
    )


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PerSample(ABC):
    """A stage whose function workers call for each sample."""

    num_parallel_workers: Workers = None
    executor: Executor = "auto"
    name: str | None = None
    tune: bool = True
    timeout: float | None = None

    def __post_init__(self) -> None:
        check(
            self.executor in EXECUTORS,
            f"`executor` must be one of {', '.join(EXECUTORS)}, got {self.executor!r}"
            '; "auto" lets penstock choose',
        )
        if self.num_parallel_workers is not None:
            _check_workers(self.num_parallel_workers, self.executor)
        if self.timeout is not None:
            check(
                isinstance(self.timeout, (int, float))
                and not isinstance(self.timeout, bool)
                and self.timeout > 0,
                f"`timeout` is the seconds a sample may take, > 0, got"
                f" {self.timeout!r}; leave it out for no limit",
            )
            # With a timeout, `auto` chooses processes.
            check(
                self.executor in ("auto", "process", "async"),
                f"`timeout` needs workers that can be stopped, which"
                f" {self.executor!r} ones cannot be; use"
                ' executor="process", "async" or "auto"',
            )

    @property
    @abstractmethod
    def called(self) -> Callable[..., Any]:
        """The object that workers call for each sample."""

    @property
    def kind(self) -> str:
        """The name of this kind of stage in the log."""
        return type(self).__name__.removesuffix("Stage")

    @property
    def label(self) -> str:
        """The text after the ID in the log."""
        return self.name or name_of(self.called)


@dataclass(frozen=True, slots=True, repr=False)
class SourceStage(PerSample):
    """The source of all samples."""

    dataset: Any
    iterable: bool = False
    thread_safe: bool | None = None
    drawn: bool = False
    """Whether samplers choose what is read, even if that is nothing."""

    @classmethod
    def of(cls, data: Any, **options: Any) -> Self:
        """Return the stage of a user's dataset or table."""
        dataset = rows_of(data)
        return cls(dataset, iterable=is_iterable(dataset), **options)

    def __post_init__(self) -> None:
        PerSample.__post_init__(self)
        if not self.iterable:
            check_kind(self.called, self.executor)
            check(
                self.drawn or len(self.dataset) > 0,
                f"the dataset {type(self.dataset).__name__} is empty; it must hold at "
                "least one sample",
            )
            return
        check(
            self.num_parallel_workers in (None, 1),
            "an iterable dataset is read by one worker, in its order, got "
            f"`num_parallel_workers={self.num_parallel_workers!r}`; leave it out "
            "here and give it to the map() that does the work; or, if the dataset "
            "itself divides its samples among workers, read it with "
            "penstock.DataLoader(dataset, num_workers=n)",
        )
        check(
            self.executor not in ("process", "async", "ray"),
            "an iterable dataset is read in the trainer's process, by next(): "
            f'executor="{self.executor}" is for its map(), not for from_dataset()',
        )
        check(
            self.timeout is None,
            "a read from an iterable dataset cannot be interrupted, got "
            f"`timeout={self.timeout!r}`; leave it out here and give it to a map()",
        )

    @property
    def called(self) -> Callable[..., Any]:
        method = "__iter__" if self.iterable else "__getitem__"
        return cast("Callable[..., Any]", getattr(self.dataset, method))

    @property
    def kind(self) -> str:
        return self.dataset.KIND if isinstance(self.dataset, Source) else "Dataset"

    @property
    def label(self) -> str:
        return self.name or ("read" if self.waits else name_of(self.dataset))

    @property
    def waits(self) -> bool:
        """Whether the source is known to wait for storage and is best kept apart."""
        return isinstance(self.dataset, Source)

    @property
    def mapped(self) -> bool:
        """Whether the source reads from a memory map."""
        return isinstance(self.dataset, Source) and self.dataset.MAPPED

    def __repr__(self) -> str:
        shown: tuple[object, ...] = (Bare(f"<{type(self.dataset).__name__}>"),)
        if isinstance(self.dataset, Source):
            shown = self.dataset.shown
        return call(
            f"Pipeline.from_{self.kind.lower()}", self, *shown, hidden=("iterable",)
        )


@dataclass(frozen=True, slots=True, repr=False)
class FunctionStage(PerSample):
    """A user's function that runs on each sample."""

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        check(
            callable(self.function),
            f"Pipeline.{self.kind.lower()}() needs a function of one sample, got"
            f" {self.function!r}"
            "; pass the function itself, not its result",
        )
        PerSample.__post_init__(self)
        check_kind(self.function, self.executor)

    @property
    def called(self) -> Callable[..., Any]:
        return self.function

    def __repr__(self) -> str:
        return call(f".{self.kind.lower()}", self, Bare(name_of(self.function)))


class MapStage(FunctionStage):
    """Makes a sample of each sample."""

    __slots__ = ()


class FilterStage(FunctionStage):
    """Drops samples at run time."""

    __slots__ = ()


def executor_of(stage: PerSample) -> Executor:
    """Return the kind of workers of a stage; a coroutine function implies its own."""
    return "async" if is_async(stage.called) else stage.executor


# Stages that choose and order samples, a cache, and batches.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SelectStage:
    """Only these indices of the previous stage, in this order."""

    indices: Sequence[int]

    def __repr__(self) -> str:
        indices = ", ".join(str(int(index)) for index in self.indices[:3])
        return f".select([{indices}{', ...' if len(self.indices) > 3 else ''}])"


@dataclass(frozen=True, slots=True, repr=False)
class ShuffleStage:
    """A different order in each epoch."""

    seed: int
    window: int | None = None
    parts: int | None = None

    def __post_init__(self) -> None:
        check(
            isinstance(self.seed, int) and 0 <= self.seed < 1 << 64,
            f"`seed` must be an int from 0 to 2**64 - 1, got {self.seed!r}"
            "; leave it out to use the seed of set_seed",
        )

    def __repr__(self) -> str:
        return call(".shuffle", self, Bare(f"seed={self.seed}"), hidden=("seed",))


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
class CacheStage:
    """Stores the samples that the previous stage makes."""

    kind: ClassVar[str] = "Cache"
    """The name of this kind of stage in the log."""
    ram: int = 0
    """Bytes of the tier in RAM; 0: no such tier."""
    disk: Path | None = None
    disk_limit: int | None = None
    codec: Name = "auto"
    version: int | str | None = None

    def __post_init__(self) -> None:
        check(
            self.ram or self.disk is not None,
            'Pipeline.cache() needs a tier: cache(ram="2GB"),'
            ' cache(disk="/nvme/cache"), or both, got neither',
        )
        total = memory_limit_bytes()
        check(
            self.ram <= total,
            f"`ram` must be at most the memory that this process may have, {total}"
            f" bytes by this machine and its control groups, got {self.ram}; what does"
            " not fit can go to cache(disk=...)",
        )
        check(
            self.disk_limit is None or self.disk is not None,
            f"`disk_limit` limits the folder `disk`, which is not given, got"
            f" {self.disk_limit!r}; pass disk= as well",
        )
        check(
            self.codec in NAMES,
            f"`codec` must be one of {', '.join(NAMES)}, got {self.codec!r}"
            '; "auto" lets penstock choose',
        )
        check(
            self.version is None or type(self.version) in (int, str),
            f"`version` must be an int or a str, got {self.version!r}"
            "; raise a number whenever the samples change",
        )

    def __repr__(self) -> str:
        return call(".cache", self)


OnError = Literal["raise", "substitute"]


@dataclass(frozen=True, slots=True, repr=False)
class BatchStage:
    """Groups samples into batches."""

    size: int | None = None
    global_size: int | None = None
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    tail: Tail = "pad_mask"
    on_error: OnError = "raise"
    error_budget: float = 0.01
    microbatches: int | None = None
    max_tokens: int | None = None
    global_max_tokens: int | None = None
    lengths: Lengths | None = None
    window: int = 100

    def __post_init__(self) -> None:
        for size in (self.size, self.global_size):
            cure = (
                "32 is usual"
                if isinstance(size, (int, float, str))
                else "a schedule is given where the pipeline begins: from_dataset(data,"
                " schedule=...)"
            )
            check(
                size is None or (type(size) is int and size >= 1),
                f"the batch size must be an int >= 1, got {size!r}; {cure}",
            )
        self._check_tokens()
        check(
            self.microbatches is None
            or (type(self.microbatches) is int and self.microbatches >= 1),
            f"`microbatches` must be an int >= 1 or None, got {self.microbatches!r}"
            "; give the number of equal parts, or leave it out",
        )
        check(
            self.tail in get_args(Tail),
            f"`tail` must be 'pad_mask' or 'pad_repeat', got {self.tail!r}"
            "; 'pad_mask' is the default",
        )
        check(
            self.on_error in ("raise", "substitute"),
            f"`on_error` must be 'raise' or 'substitute', got {self.on_error!r}"
            "; 'raise' is the default",
        )
        check(
            0 <= self.error_budget <= 1,
            "`error_budget` is the share of an epoch's samples that may fail, from 0 "
            f"to 1, got {self.error_budget!r}"
            "; 0.01 allows one sample in a hundred",
        )

    @property
    def has_budget(self) -> bool:
        """Whether tokens, not samples, limit the size of a batch."""
        return self.max_tokens is not None or self.global_max_tokens is not None

    def _check_tokens(self) -> None:
        for name in ("max_tokens", "global_max_tokens", "window"):
            number = getattr(self, name)
            check(
                number is None or (type(number) is int and number >= 1),
                f"`{name}` must be an int >= 1, got {number!r}; leave it out for the"
                " default",
            )
        if not self.has_budget:
            return
        check(
            self.lengths is not None,
            "a budget of tokens needs `lengths`, the tokens of each sample: batches are"
            " planned before a sample is read; count them once and keep the array",
        )
        check(
            not self.drop_last and self.microbatches is None,
            "batches limited by tokens have no fixed number of samples, so none is"
            " short, and none has equal parts; leave out `drop_last` and"
            " `microbatches`",
        )

    def __repr__(self) -> str:
        size = () if self.size is None else (self.size,)
        return call(".batch", self, *size, hidden=("size", "collate_fn"))


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


def named(number: int, stage: PerSample | CacheStage) -> str:
    """Return what the log calls a stage: `Map(ID:2) decode`, `Cache(ID:1)`."""
    label = "" if isinstance(stage, CacheStage) else f" {stage.label}"
    return f"{stage.kind}(ID:{number}){label}"


# The places in a pipeline where a stage may stand.


def check_place(stages: Sequence[Stage], stage: Stage) -> None:
    """Raise `SpecError` if `stage` cannot come after `stages`."""
    batched = any(isinstance(before, BatchStage) for before in stages)
    code = f"Pipeline{stage!r}"
    if isinstance(stage, DeviceStage):
        check(batched, f"{code} copies batches: put it after .batch(n)")
        return
    if batched and isinstance(stage, MapStage):
        check_batch_map(stages, stage, code)
        return
    check(
        not batched,
        f"{code} cannot come after .batch(), where only map() and to_device() may;"
        " put stages that change or store samples before it",
    )
    if isinstance(stage, CacheStage):
        check_cacheable(stages, code)
    source = stages[0]
    check(
        not (
            isinstance(source, SourceStage)
            and source.iterable
            and isinstance(stage, (SelectStage, ShuffleStage, RepeatStage))
        ),
        f"{code} needs samples with an index, which an iterable dataset does not "
        "have; let the dataset do it, or use a map-style one",
    )


def check_batch_map(stages: Sequence[Stage], stage: MapStage, code: str) -> None:
    """Raise `SpecError` unless `stage` may work on the batches of `stages`."""
    check(
        not any(isinstance(before, DeviceStage) for before in stages),
        f"{code} cannot come after .to_device(), as workers do not run on the device;"
        " put it between .batch() and .to_device()",
    )
    plain = stage.num_parallel_workers is None and stage.timeout is None
    check(
        not repacks(stages) or (plain and executor_of(stage) in ("auto", "inline")),
        f"{code} cannot have workers of its own after .batch(): after a filter() or an"
        " iterable dataset, the trainer makes the batches; leave out"
        " num_parallel_workers, executor and timeout, or do its work in a map() before"
        " .batch()",
    )


def repacks(stages: Sequence[Stage]) -> bool:
    """Whether batches can only be formed at run time, from the remaining samples."""
    return any(
        isinstance(stage, FilterStage)
        or (isinstance(stage, SourceStage) and stage.iterable)
        for stage in stages
    )


def check_cacheable(stages: Sequence[Stage], code: str) -> None:
    """Raise `SpecError` unless `stages` always make the same sample of an index, here.

    An actor on another machine cannot write to a cache.
    """
    for stage in stages:
        check(
            not (isinstance(stage, SourceStage) and stage.iterable),
            f"{code} needs samples with an index to be found by, which an iterable"
            " dataset does not have; use a map-style one",
        )
        check(
            not isinstance(stage, FilterStage),
            f"{code} cannot come after filter(); put it before that, or use select()"
            " with the indices to keep",
        )
        check(
            not (isinstance(stage, MapStage) and "rng" in wanted_by(stage.function)),
            f"{code} would store one draw of a random function forever: a map()"
            " before it takes `rng`; put the cache before that",
        )
        check(
            not (isinstance(stage, PerSample) and stage.executor == "ray"),
            f'{code} cannot come after executor="ray": its workers may be on other'
            " machines, and a cache belongs to one; put the cache before that stage, or"
            ' give the stages before it executor="process"',
        )


def check_ray(stages: Sequence[Stage], options: Options) -> None:
    """Raise `SpecError` if these stages run in actors and the engine in a child."""
    check(
        options.host != "process"
        or not any(isinstance(s, PerSample) and s.executor == "ray" for s in stages),
        'executor="ray" needs the engine in the trainer\'s process, because only that'
        ' process is connected to Ray, got options(host="process"); leave `host` out',
    )


def check_sized(batch: BatchStage, *, scheduled: bool) -> None:
    """Raise `SpecError` unless the batch size is given exactly once."""
    sizes = batch.size, batch.global_size, batch.max_tokens, batch.global_max_tokens
    given_sizes = [size for size in sizes if size is not None]
    if scheduled:
        check(
            not given_sizes and batch.lengths is None,
            f"this pipeline has a schedule, which sets the batch size; call .batch()"
            f" without a size and without lengths, got {given_sizes}",
        )
        return
    check(
        len(given_sizes) == 1,
        "Pipeline.batch() needs one size: batch(n), samples a rank;"
        " batch(global_size=n), over all ranks;"
        " batch(max_tokens=n, lengths=...), tokens a rank; or"
        f" batch(global_max_tokens=n, lengths=...), over all ranks; got {given_sizes}",
    )


# The order of samples that the stages define, wherever in the pipeline they stand.

# The length that a plan assumes for an iterable, which itself decides when it ends.
ENDLESS = 1 << 62


def order_of(stages: Sequence[Stage]) -> Order:
    """Return the order of the samples.

    Raises:
        SpecError: a count is below 1, there are no indices, or an index is not in the
            dataset.
    """
    source = stages[0]
    assert isinstance(source, SourceStage)
    order = Order.sequential(
        ENDLESS if source.iterable or source.drawn else len(source.dataset)
    )
    for stage in stages[1:]:
        match stage:
            case SelectStage():
                order = order.select(stage.indices)
            case TakeStage():
                order = order.take(stage.count)
            case RepeatStage():
                order = order.repeat(stage.count)
            case ShuffleStage():
                order = _shuffled(order, stage, source)
    return order


def _shuffled(order: Order, stage: ShuffleStage, source: SourceStage) -> Order:
    within = None
    if stage.window is not None:
        sizes = getattr(source.dataset, "group_sizes", None)
        if sizes is None:
            raise SpecError(
                f"Pipeline.shuffle(window=...) mixes a few shards at a time, and"
                f" {type(source.dataset).__name__} has no `group_sizes`, the samples of"
                " each of its shards; leave `window` out to mix all samples"
            )
        within = group_shuffle(order, sizes, stage.seed, stage.window)
    if stage.parts is not None:
        return shuffled_by_part(order, stage.seed, stage.parts, within)
    return order.then(within) if within else order.shuffle(stage.seed)
