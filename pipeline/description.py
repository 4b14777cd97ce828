"""What to load, stage by stage: the half of a face that describes and never runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from .. import config
from ..cache.codec import Name as CodecName
from ..engine.batch.device import DeviceStage, Normalize
from ..engine.plan import Lengths, Order, Shard, group_shuffle, shuffled_by_part
from ..engine.recipe import AS_SHIPPED, Executor, Host, Options, StartMethod
from ..errors import SpecError, check
from ..system.printing import Printed
from ..system.resources import parse_bytes
from .constructors import Constructors
from .stages import (
    BatchStage,
    CacheStage,
    FilterStage,
    MapStage,
    OnError,
    RepeatStage,
    SelectStage,
    ShuffleStage,
    SourceStage,
    Stage,
    TakeStage,
    Workers,
    executor_of,
    wanted_by,
)

if TYPE_CHECKING:
    from .schedule import Scheduled


class Description(Constructors, Printed):
    """A source, stages and options. Each method returns a new one; none changes it."""

    def __init__(
        self,
        stages: tuple[Stage, ...],
        shard: Shard | None = None,
        options: Options = AS_SHIPPED,
        schedule: Scheduled | None = None,
    ) -> None:
        self._stages = stages
        self._shard = shard
        self._options = options
        self._schedule = schedule

    @classmethod
    def _of(
        cls, stage: SourceStage, shard: Shard | None, schedule: Scheduled | None
    ) -> Self:
        return cls((stage,), shard, schedule=schedule)

    # Stages of samples

    def map(
        self,
        function: Callable[..., Any],
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        tune: bool = True,
        timeout: float | None = None,
    ) -> Self:
        """Call `function(sample)` on each sample, or behind `batch`, on each batch.

        A function that takes `rng` is given the sample's own numpy Generator, the same
        for a given seed, epoch and index whatever the workers; one that takes `ctx` is
        given `ctx.epoch`, `ctx.step`, `ctx.image_size`.

        Behind `batch` it is given what that made: a tensor with a row a sample, a dict
        of these, or what `collate_fn` returned. It may return any number of rows. Its
        `rng` depends on seed, epoch, step and rank. What it raises is raised when the
        batch is due, whatever `batch(on_error=...)` says: nothing can stand in for it.
        Behind a filter or an iterable it runs in the trainer.

        Args:
            function: returns the new sample; must not return None. A coroutine
                function (`async def`) runs in an event loop: hundreds wait at once in
                one thread.
            num_parallel_workers: n; (lo, hi) bounds the autotuner; or as configured.
            executor: "auto" (as measured), "inline", "thread", "process" or "async".
            name: what the log calls this stage.
            tune: False leaves its settings to you.
            timeout: seconds a sample may take. A process that takes longer is replaced,
                its stack is told; what waits in a coroutine is cancelled.
        """
        stage = MapStage(
            function,
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
            tune=tune,
            timeout=timeout,
        )
        return self._with(stage)

    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        tune: bool = True,
        timeout: float | None = None,
    ) -> Self:
        """Leave out samples that `predicate(sample)` says no to, while running.

        Batches stay full, the length becomes unknown, and it works on one rank; where
        the indices to keep are known beforehand, `select` is better.
        """
        stage = FilterStage(
            predicate,
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
            tune=tune,
            timeout=timeout,
        )
        return self._with(stage)

    def cache(
        self,
        *,
        ram: int | str = 0,
        disk: str | os.PathLike[str] | None = None,
        disk_limit: int | str | None = None,
        codec: CodecName = "auto",
        version: int | str | None = None,
    ) -> Self:
        """Store samples as they are here; epochs to come begin with what is stored.

        All processes and ranks of a host share what is stored, and each sample is made
        once among them. Nothing is stored by pickle: samples are bytes, arrays,
        tensors, text, numbers, None, and tuples, lists and dicts of these. What is kept
        is found again as long as the data and the functions before this are the same:
        a data set may say so by `__penstock_fingerprint__`.

        Args:
            ram: bytes of the tier in RAM: 2 << 30, "2GB"; 0 for none. It comes on top
                of the memory budget, which is for batches in flight.
            disk: folder on a disk of this machine; what is stored there serves later
                runs, too.
            disk_limit: bytes there (default: four fifths of what is free).
            codec: "raw", "lz4", "zstd", "filter" (zstd of what a pixel's neighbours do
                not tell, for `uint8` images), or "auto": what is expected to take least
                time, as measured on the first samples.
            version: change it when samples have changed in a way that cannot be seen
                from code and data.

        Raises:
            SpecError: no tier is given; or what comes before is random, filtered or
                iterable, so that there is nothing to find a sample by.
        """
        check(
            isinstance(disk, (str, os.PathLike, type(None))),
            f"`disk` must be the path of a folder, got {disk!r}",
        )
        stage = CacheStage(
            parse_bytes(ram) if ram else 0,
            None if disk is None else Path(disk),
            None if disk_limit is None else parse_bytes(disk_limit),
            codec,
            version,
        )
        return self._with(stage)

    def select(self, indices: Sequence[int]) -> Self:
        """Use only these samples, in this order."""
        return self._with(SelectStage(indices))

    def shuffle(
        self,
        *buffer: object,
        seed: int | None = None,
        window: int | None = None,
        parts: int | None = None,
    ) -> Self:
        """Use another order every epoch, a function of the seed and the epoch alone.

        Args:
            buffer: there is none: the whole data set is shuffled.
            seed: default: `set_seed`'s.
            window: where the source has shards or row groups: shuffle these, then the
                samples of so many of them at a time, so each is read once an epoch.
                None: mix all samples.
            parts: deal the data into so many equal parts, the same ones in each epoch,
                and make each global batch of all of them, so that a rank reads its own
                parts alone. A multiple of the number of ranks, of which each global
                batch is a multiple. With a `window`, each part has one of its own.
                None: any rank reads any sample.

        Raises:
            SpecError: something is given without its name; the source has no shards.
        """
        check(not buffer, NO_BUFFER.format(next(iter(buffer), "")))
        chosen = config.get_seed() if seed is None else seed
        return self._with(ShuffleStage(chosen, window, parts))

    def take(self, count: int) -> Self:
        """Use only the first `count` samples: of each epoch's order, if shuffled."""
        return self._with(TakeStage(count))

    def repeat(self, count: int) -> Self:
        """Make an epoch of `count` passes, each with its own order and random draws."""
        return self._with(RepeatStage(count))

    # Stages of batches

    def batch(  # noqa: PLR0913 all are said by name
        self,
        size: int | None = None,
        *,
        global_size: int | None = None,
        drop_last: bool = False,
        max_tokens: int | None = None,
        global_max_tokens: int | None = None,
        lengths: Any = None,
        window: int = 100,
        microbatches: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tail: Literal["pad_mask", "pad_repeat"] = "pad_mask",
        on_error: OnError = "raise",
        error_budget: float = 0.01,
    ) -> Self:
        """Make batches.

        With `lengths` samples of about the same length come together, so little is
        padded: each window of the epoch's order is sorted by length, cut into batches,
        and these are shuffled where the pipeline is. The batches follow from the order
        and the lengths alone, on any number of workers. With `global_size` or
        `global_max_tokens` they are the same for any number of ranks, too.

        Args:
            size: samples a rank; none where the pipeline has a schedule.
            global_size: samples over all ranks, instead of `size`.
            max_tokens: instead of a size: tokens of a rank's batch, padded to its
                longest sample. All ranks have equally many samples, and equally many
                steps.
            global_max_tokens: the same over all ranks.
            lengths: `int [N]`, tokens of each sample of the data set (not of what a
                select() leaves), or any other cost.
            window: how many batches are sorted together, about.
            drop_last: leave out an epoch's last batch if it is short.
            microbatches: hand over a list of so many parts of a batch, of equal sizes,
                as `torch.distributed.pipelining` takes them.
            collate_fn: makes a batch of a list of samples (default: torch's).
            tail: what several ranks do with a short last batch, if it is kept.
            on_error: "raise" an exception of a stage's function when its batch is due,
                or "substitute" another sample of the batch, marked in `.plan`. Where
                batches are made while running (filter, iterables), a failed sample is
                left out and the batch filled with those that follow.
            error_budget: share of an epoch's samples that may be substituted.
        """
        stage = BatchStage(
            size,
            global_size,
            drop_last,
            collate_fn,
            tail,
            on_error,
            error_budget,
            microbatches,
            max_tokens,
            global_max_tokens,
            None if lengths is None else Lengths.of(lengths),
            window,
        )
        check_sized(stage, scheduled=self._schedule is not None)
        return self._with(stage)

    def to_device(
        self,
        device: str | torch.device,
        *,
        normalize: Normalize | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> Self:
        """Copy batches to a device; images may be made floats there.

        Args:
            device: "cpu", "cuda:0", ...
            normalize: (means, deviations) of the channels, of values from 0 to 1:
                images, `uint8 [N, H, W, C]`, cross as bytes and become
                `dtype [N, C, H, W]`, (x / 255 - mean) / deviation.
            dtype: of the normalised images.
            channels_last: leave their memory as it is, for models in that format.
        """
        stage = DeviceStage.of(device, normalize, dtype, channels_last=channels_last)
        return self._with(stage)

    def options(
        self,
        *,
        host: Host = "auto",
        persistent_workers: bool = True,
        multiprocessing_context: StartMethod | None = None,
        name: str = "",
        cache: Literal["auto"] | None = None,
    ) -> Self:
        """Say how the whole pipeline runs. It changes no byte of any batch.

        Args:
            host: where the engine and its threads run: "trainer", beside the trainer;
                "process", in a child, so that the trainer's GIL is its own; "auto".
            persistent_workers: False: nothing outlives an epoch, and the next one's
                worker processes see what was changed in the dataset in between.
            multiprocessing_context: how worker processes start: "fork", "forkserver"
                or "spawn" (default: fork; forkserver where the dataset or functions
                hold tensors on a CUDA device).
            name: what the log and its files call this pipeline (default: the variable
                that it is stored in, without `_loader` or `_pipe`; or file and line).
            cache: "auto": between two epochs a cache in RAM may be placed where it
                spares most work, of what is the same each time as far as the code
                tells; it takes half of the memory budget at most. The log says where.
        """
        chosen = Options(host, persistent_workers, multiprocessing_context, name, cache)
        return type(self)(self._stages, self._shard, chosen, self._schedule)

    def __repr__(self) -> str:
        """Return the code that makes it."""
        return "".join(map(repr, (*self._stages, self._options)))

    def _with(self, stage: Stage) -> Self:
        check_place(self._stages, stage)
        stages = (*self._stages, stage)
        order_of(stages)  # refuses what it cannot do, here in the line that says it
        return type(self)(stages, self._shard, self._options, self._schedule)


# Where in a pipeline a stage may stand.


def check_place(stages: Sequence[Stage], stage: Stage) -> None:
    """Raise `SpecError` if `stage` cannot come after `stages`."""
    batched = any(isinstance(before, BatchStage) for before in stages)
    shown = repr(stage).lstrip(".")
    if isinstance(stage, DeviceStage):
        check(batched, f"{shown} copies batches: put it after .batch(n)")
        return
    if batched and isinstance(stage, MapStage):
        check_batch_map(stages, stage, shown)
        return
    check(
        not batched,
        f"{shown} cannot come after .batch(), where only map() and to_device() may;"
        " put stages that change or store samples before it",
    )
    if isinstance(stage, CacheStage):
        check_cacheable(stages, shown)
    source = stages[0]
    check(
        not (
            isinstance(source, SourceStage)
            and source.iterable
            and isinstance(stage, (SelectStage, ShuffleStage, RepeatStage))
        ),
        f"{shown} needs samples with an index, which an iterable dataset does not "
        "have; let the dataset do it, or use a map-style one",
    )


def check_batch_map(stages: Sequence[Stage], stage: MapStage, shown: str) -> None:
    """Raise `SpecError` unless `stage` may work on the batches of `stages`."""
    check(
        not any(isinstance(before, DeviceStage) for before in stages),
        f"{shown} cannot come after .to_device(), as workers do not run on the device;"
        " put it between .batch() and .to_device()",
    )
    source = stages[0]
    dealt = isinstance(source, SourceStage) and source.iterable
    dealt = dealt or any(isinstance(before, FilterStage) for before in stages)
    plain = stage.num_parallel_workers is None and stage.timeout is None
    check(
        not dealt or (plain and executor_of(stage) in ("auto", "inline")),
        f"{shown} cannot have workers of its own after .batch(): after a filter() or an"
        " iterable dataset, the trainer makes the batches; leave out"
        " num_parallel_workers, executor and timeout, or do its work in a map() before"
        " .batch()",
    )


def check_cacheable(stages: Sequence[Stage], shown: str) -> None:
    """Raise `SpecError` unless all `stages` make of an index is always the same."""
    for stage in stages:
        check(
            not (isinstance(stage, SourceStage) and stage.iterable),
            f"{shown} needs samples with an index to be found by, which an iterable"
            " dataset does not have; use a map-style one",
        )
        check(
            not isinstance(stage, FilterStage),
            f"{shown} cannot come after filter(); put it before that, or use select()"
            " with the indices to keep",
        )
        check(
            not (isinstance(stage, MapStage) and "rng" in wanted_by(stage.function)),
            f"{shown} would store one draw of a random function forever: a map()"
            " before it takes `rng`; put the cache before that",
        )


def check_sized(batch: BatchStage, *, scheduled: bool) -> None:
    """Raise `SpecError` unless the batch size is said once."""
    sizes = batch.size, batch.global_size, batch.max_tokens, batch.global_max_tokens
    said = [size for size in sizes if size is not None]
    if scheduled:
        check(
            not said and batch.lengths is None,
            f"this pipeline has a schedule, which sets the batch size; call .batch()"
            f" without a size and without lengths, got {said}",
        )
        return
    check(
        len(said) == 1,
        "batch() needs one size: batch(n), samples a rank; batch(global_size=n), over"
        " all ranks; batch(max_tokens=n, lengths=...), tokens a rank; or"
        f" batch(global_max_tokens=n, lengths=...), over all ranks; got {said}",
    )


# The order that a pipeline's stages make, wherever among them they stand.

ENDLESS = 1 << 62
"""Length an iterable is planned with; it says itself when it ends."""


def order_of(stages: Sequence[Stage]) -> Order:
    """Return which sample stands where.

    Raises:
        SpecError: a count below 1, no indices, or one that the dataset does not have.
    """
    source = stages[0]
    assert isinstance(source, SourceStage)
    endless = source.iterable or source.drawn
    order = Order.sequential(ENDLESS if endless else len(source.dataset))
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
        sizes = _group_sizes(source)
        within = group_shuffle(order, sizes, stage.seed, stage.window)
    if stage.parts is not None:
        return shuffled_by_part(order, stage.seed, stage.parts, within)
    return order.then(within) if within else order.shuffle(stage.seed)


def _group_sizes(source: SourceStage) -> Sequence[int]:
    """Return how many samples each shard of a source has."""
    sizes: Sequence[int] | None = getattr(source.dataset, "group_sizes", None)
    if sizes is None:
        raise SpecError(
            f"shuffle(window=...) mixes a few shards at a time, and"
            f" {type(source.dataset).__name__} has no `group_sizes`, the samples of"
            " each of its shards; leave `window` out to mix all samples"
        )
    return sizes


NO_BUFFER = (
    "`shuffle` takes nothing but `seed=`, got {!r}: it needs no buffer, as it shuffles"
    " the whole dataset, differently each epoch; call shuffle(), or shuffle(seed=...)"
    " for an order that is the same in each run"
)
