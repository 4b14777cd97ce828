"""What to load, stage by stage: the part of a face that only describes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
    PerSample,
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
    """A source, stages and options. Each method returns a new description."""

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
        """Call `function(sample)` on each sample; after `batch`, call it on each batch.

        A function with a parameter `rng` gets the sample's own numpy Generator, which
        depends on seed, epoch and index alone, not on the workers. A function with a
        parameter `ctx` gets `ctx.epoch`, `ctx.step` and `ctx.image_size`.

        After `batch`, the function gets a batch: a tensor with one row per sample, a
        dict of such tensors, or what `collate_fn` returned. It may return any number of
        rows. Its `rng` depends on seed, epoch, step and rank. An exception in it is
        raised when the batch is due, whatever `batch(on_error=...)` says, because no
        substitute for a whole batch exists. After a filter or an iterable it runs in
        the trainer.

        Args:
            function: returns the new sample; must not return None. Coroutine functions
                (`async def`) run in an event loop, where hundreds of calls wait at once
                in one thread.
            num_parallel_workers: n at first, or (lo, hi): bounds for the autotuner, lo
                at first; by default, as configured.
            executor: "auto" (chosen by measurement), "inline", "thread", "process",
                "async", or "ray": actors of a Ray cluster, perhaps on other machines.
            name: the name of this stage in the log.
            tune: False keeps the autotuner from changing this stage's settings.
            timeout: seconds that a sample may take. penstock reports the stack of a
                process that takes longer and replaces it; it cancels a coroutine that
                waits longer.
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
        """Drop the samples for which `predicate(sample)` is false, at run time.

        Batches stay full, the length of the pipeline becomes unknown, and only one rank
        is supported. If you know beforehand which indices to keep, use `select`.
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
        """Store samples as they are at this stage; later epochs start from these.

        All processes and ranks of a host share the stored samples and make each sample
        only once among them. The cache does not use pickle: samples are bytes, arrays,
        tensors, text, numbers, None, and tuples, lists and dicts of these. Stored
        samples stay valid as long as the data and the functions before this stage stay
        the same. A dataset may identify itself by `__penstock_fingerprint__`.

        Args:
            ram: bytes of the tier in RAM: 2 << 30, "2GB"; 0 for none. They come on top
                of the memory budget, which covers batches in flight.
            disk: folder on a disk of this machine. Later runs use the samples there,
                too.
            disk_limit: bytes on disk (default: four fifths of the free space).
            codec: "raw", "lz4", "zstd", "filter" (zstd of the part of each pixel that
                adjacent ones do not predict, for `uint8` images), or "auto": the codec
                expected to take the least time, as measured on the first samples.
            version: change it when the samples have changed in a way that code and data
                do not show.

        Raises:
            SpecError: no tier is given; or an earlier stage is random, a filter or an
                iterable, so that the cache has no key for a sample.
        """
        check(
            isinstance(disk, (str, os.PathLike, type(None))),
            f'`disk` must be the path of a folder, got {disk!r}, such as "/nvme/cache"',
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
        """Shuffle every epoch, in an order that depends only on the seed and the epoch.

        Args:
            buffer: not supported, because the whole dataset is shuffled.
            seed: the seed of the order (default: the seed of `set_seed`).
            window: for sources with shards or row groups: shuffle these, then shuffle
                the samples of this many of them at a time, so that each is read once an
                epoch. None: mix all samples.
            parts: divide the data into this many equal parts, the same in each epoch,
                and take each global batch from all of them, so that a rank reads only
                its own parts. `parts` must be a multiple of the number of ranks, and
                each global batch a multiple of `parts`. With a `window`, each part has
                its own window. None: any rank reads any sample.

        Raises:
            SpecError: an argument is given without its name, or the source has no
                shards.
        """
        check(not buffer, NO_BUFFER.format(next(iter(buffer), "")))
        chosen = config.get_seed() if seed is None else seed
        return self._with(ShuffleStage(chosen, window, parts))

    def take(self, count: int) -> Self:
        """Use the first `count` samples; after a shuffle, those of each order."""
        return self._with(TakeStage(count))

    def repeat(self, count: int) -> Self:
        """Make one epoch of `count` passes; each has its own order and draws."""
        return self._with(RepeatStage(count))

    # Stages of batches

    def batch(  # noqa: PLR0913 all are keyword arguments
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
        """Group samples into batches.

        With `lengths`, a batch holds samples of similar length, so it needs little
        padding. penstock sorts each window of the epoch's order by length and cuts it
        into batches; if the pipeline is shuffled, it shuffles these. The batches depend
        on the order and the lengths alone, not on the number of workers. With
        `global_size` or `global_max_tokens` they do not depend on the number of ranks
        either.

        Args:
            size: samples per rank; leave it out if the pipeline has a schedule.
            global_size: samples over all ranks; use it instead of `size`.
            max_tokens: tokens of a rank's batch, padded to its longest sample; use it
                instead of a size. All ranks get the same number of samples and steps.
            global_max_tokens: tokens over all ranks; use it instead of `max_tokens`.
            lengths: `int [N]`, tokens, or any other cost, of each sample of the
                dataset (of all samples, also before a select()).
            window: the approximate number of batches that are sorted together.
            drop_last: drop the last batch of an epoch if it is short.
            microbatches: hand over each batch as a list of this many parts of equal
                size, the form that `torch.distributed.pipelining` takes.
            collate_fn: turns a list of samples into a batch (default: torch's).
            tail: how several ranks handle a short last batch, if it is kept.
            on_error: "raise" an exception of a stage's function when its batch is due,
                or "substitute" another sample of the batch, marked in `.plan`. With a
                filter or an iterable, "substitute" drops a failed sample and fills the
                batch with the samples that follow.
            error_budget: the largest share of an epoch's samples that may be
                substituted.
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
        """Copy batches to a device, and optionally turn images into floats there.

        While you capture a CUDA graph, workers may allocate pinned memory, as with
        torch's `pin_memory=True`: pass `capture_error_mode="thread_local"`.

        Args:
            device: "cpu", "cuda:0", ...
            normalize: (means, deviations) of the channels, for values from 0 to 1.
                Images `uint8 [N, H, W, C]` are copied as bytes and become `dtype [N, C,
                H, W]`, (x / 255 - mean) / deviation.
            dtype: of the normalised images.
            channels_last: keep the memory format of the images, for models in that
                format.
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
        ray_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Set how the whole pipeline runs. No option changes a byte of any batch.

        Args:
            host: where the engine and its threads run: "trainer", beside the trainer;
                "process", in a child process, so that the trainer has its GIL to
                itself; or "auto".
            persistent_workers: False ends all workers after each epoch, so that the
                next epoch's worker processes see changes made to the dataset in
                between.
            multiprocessing_context: how worker processes start: "fork", "forkserver" or
                "spawn" (default: fork; forkserver if the dataset or functions hold
                tensors on a CUDA device).
            name: the name of this pipeline in the log and its files (default: the
                variable that it is stored in, without `_loader` or `_pipe`; or file and
                line).
            cache: "auto" lets penstock place a cache in RAM between two epochs, where
                it saves the most work. It only stores samples that, as far as the code
                shows, are the same each time, takes at most half of the memory budget,
                and logs its place.
            ray_options: what each actor of `executor="ray"` claims, and where it may
                be placed: Ray's `num_cpus` (default: 1), `num_gpus`, `memory`,
                `resources`, `accelerator_type`, `label_selector`,
                `scheduling_strategy` and `runtime_env`.
        """
        chosen = Options(
            host,
            persistent_workers,
            multiprocessing_context,
            name,
            cache,
            ray_options,
        )
        check_ray(self._stages, chosen)
        return type(self)(self._stages, self._shard, chosen, self._schedule)

    def __repr__(self) -> str:
        """Return the code that makes this description."""
        return "".join(map(repr, (*self._stages, self._options)))

    def _with(self, stage: Stage) -> Self:
        check_place(self._stages, stage)
        check_ray((stage,), self._options)
        stages = (*self._stages, stage)
        order_of(stages)  # raises errors here, in the user's line
        return type(self)(stages, self._shard, self._options, self._schedule)


# The places in a pipeline where a stage may stand.


def check_place(stages: Sequence[Stage], stage: Stage) -> None:
    """Raise `SpecError` if `stage` cannot come after `stages`."""
    batched = any(isinstance(before, BatchStage) for before in stages)
    shown = f"Pipeline{stage!r}"
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
        check_local(stages, shown)
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
    """Raise `SpecError` unless `stages` always make the same sample of an index."""
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


def check_local(stages: Sequence[Stage], shown: str) -> None:
    """Raise `SpecError` if an actor would have to write to a cache."""
    for stage in stages:
        check(
            not (isinstance(stage, PerSample) and stage.executor == "ray"),
            f'{shown} cannot come after executor="ray": its workers may be on other'
            " machines, and a cache belongs to one; put the cache before that stage, or"
            ' give the stages before it executor="process"',
        )


def check_ray(stages: Sequence[Stage], options: Options) -> None:
    """Raise `SpecError` if these stages run in actors and the engine in a child."""
    far = [s for s in stages if isinstance(s, PerSample) and s.executor == "ray"]
    check(
        not far or options.host != "process",
        'executor="ray" needs the engine in the trainer\'s process, because only that'
        ' process is connected to Ray, got options(host="process"); leave `host` out',
    )


def check_sized(batch: BatchStage, *, scheduled: bool) -> None:
    """Raise `SpecError` unless the batch size is given exactly once."""
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
        "Pipeline.batch() needs one size: batch(n), samples a rank;"
        " batch(global_size=n), over all ranks;"
        " batch(max_tokens=n, lengths=...), tokens a rank; or"
        f" batch(global_max_tokens=n, lengths=...), over all ranks; got {said}",
    )


# The order of samples that the stages define, wherever in the pipeline they stand.

ENDLESS = 1 << 62
"""The length that a plan assumes for an iterable, which itself decides when it ends."""


def order_of(stages: Sequence[Stage]) -> Order:
    """Return the order of the samples.

    Raises:
        SpecError: a count is below 1, there are no indices, or an index is not in the
            dataset.
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
    """Return the number of samples in each shard of a source."""
    sizes: Sequence[int] | None = getattr(source.dataset, "group_sizes", None)
    if sizes is None:
        raise SpecError(
            f"Pipeline.shuffle(window=...) mixes a few shards at a time, and"
            f" {type(source.dataset).__name__} has no `group_sizes`, the samples of"
            " each of its shards; leave `window` out to mix all samples"
        )
    return sizes


NO_BUFFER = (
    "Pipeline.shuffle() takes nothing but `seed=`, got {!r}: it needs no buffer, as it"
    " shuffles the whole dataset, differently each epoch;"
    " call shuffle(), or shuffle(seed=...)"
    " for an order that is the same in each run"
)
