"""The pipeline face: describe what to load, then loop over it.

pipe = penstock.Pipeline.from_folder("photos/").shuffle(seed=0).map(decode).batch(64)
for batch in pipe: ...        # one epoch
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch

from .. import config
from ..cache.codec import Name as CodecName
from ..engine.batch.device import DeviceStage, Normalize
from ..engine.plan import BatchPlan, Cursor, Lengths, Shard, Tail
from ..engine.recipe import AS_SHIPPED, Executor, Host, Options, Recipe, StartMethod
from ..errors import check
from ..system.resources import parse_bytes
from .session import Epoch, Face
from .sources import find_folder, find_parquet
from .stages import (
    BatchStage,
    CacheStage,
    FilterStage,
    MapStage,
    OnError,
    ReadOptions,
    RepeatStage,
    SelectStage,
    ShuffleStage,
    SourceStage,
    Stage,
    TakeStage,
    Workers,
    WorkOptions,
    check_place,
    check_ray,
    check_sized,
    order_of,
)

if TYPE_CHECKING:
    from ..autotune.explain import Explanation
    from .schedule import Scheduled
    from .sources import Paths


class Pipeline(Face):
    """Describe what to load, stage by stage; iterate to run one epoch of batches.

    Each method returns a new pipeline and leaves this one as it is; nothing runs until
    a loop begins. `torch.utils.data.default_collate` turns samples into a batch, unless
    `batch` is given a `collate_fn`.
    """

    _RUNNING = frozenset(("_listeners", "_plan", "_recipe", "_run", "_slot"))

    def __init__(
        self,
        stages: tuple[Stage, ...],
        shard: Shard | None = None,
        options: Options = AS_SHIPPED,
        schedule: Scheduled | None = None,
    ) -> None:
        self._stages, self._shard = stages, shard
        self._options, self._schedule = options, schedule
        # The epoch that the next loop runs, unless `_next` says where to go on.
        self._epoch = 0
        self._next: Cursor | None = None
        self._set_up(options.name)

    # Where it begins: a source

    @classmethod
    def from_folder(
        cls,
        root: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[ReadOptions],
    ) -> Self:
        """Read images from class sub-folders: samples are `(bytes, label)`.

        Args:
            root: a folder with one sub-folder of images per class; labels number the
                sub-folders in sorted order. A URL, such as "s3://bucket/train", is
                listed now; its files are read as in `from_files`.
            storage_options: options of the URL's file system, named as in its fsspec
                package.
            **options: as for `from_dataset`.

        Raises:
            SpecError: the folder does not exist, or has no images in class folders.
        """
        folder = find_folder(root, storage_options, options.get("executor", "auto"))
        return cls.from_dataset(folder, **options)

    @classmethod
    def from_files(
        cls,
        urls: Paths,
        labels: Sequence[Any] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 4,
        backoff: float = 0.5,
        max_bytes: int | str = "1GiB",
        hedge: bool = True,
        **options: Unpack[ReadOptions],
    ) -> Self:
        """Read whole files through fsspec: samples are `bytes`, or `(bytes, label)`.

        An event loop reads from web servers and object stores, so that a waiting read
        costs no thread. Threads read from other file systems.

        Args:
            urls: paths or URLs of one file system, or one pattern that matches them:
                "photos/**/*.jpg", "s3://bucket/train/*.jpg".
            labels: one label per file, in the order of `urls` (for a pattern: sorted).
            storage_options: options of the file system, named as in its fsspec package.
            retries: how often a remote read is retried after an error that may pass: a
                lost connection, a stall of a minute, a short body, or a status of 5xx,
                408, 425 or 429.
            backoff: the longest wait before the first retry, in seconds; it doubles
                with each further retry.
            max_bytes: the largest size of a remote file; a body is not read beyond it.
            hedge: whether an event loop repeats a request that takes longer than nearly
                all others; it repeats at most one in twenty, besides the first ten, or
                one a second.
            **options: as for `from_dataset`; `num_parallel_workers` counts the reads in
                flight, and `timeout` includes all retries of a file.

        Raises:
            SpecError: there is no file, the files are on several file systems, or there
                is not one label per file.
        """
        from .sources.files import find_files

        files = find_files(
            urls,
            labels,
            storage_options,
            options.get("executor", "auto"),
            retries=retries,
            backoff=backoff,
            max_bytes=parse_bytes(max_bytes),
            hedge=hedge,
        )
        return cls.from_dataset(files, **options)

    @classmethod
    def from_lmdb(
        cls,
        path: str | os.PathLike[str],
        keys: Sequence[bytes] | None = None,
        **options: Unpack[ReadOptions],
    ) -> Self:
        """Read the values of an LMDB database: samples are `bytes`.

        Args:
            path: the database: a folder with `data.mdb`, or the file. Each process
                opens it once, for reading.
            keys: the keys of the samples, in order (default: all, in the database's
                order).
            **options: as for `from_dataset`.

        Raises:
            SpecError: there is no database, or it has no key.
        """
        from .sources.lmdb_records import Lmdb

        return cls.from_dataset(Lmdb.find(path, keys), **options)

    @classmethod
    def from_webdataset(
        cls,
        shards: Paths,
        fields: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[ReadOptions],
    ) -> Self:
        """Read WebDataset tar files by random access; they are indexed now.

        Args:
            shards: paths or URLs, each with braces if you like, or one pattern that
                matches them: "train-*.tar", "s3://bucket/train-{000..146}.tar". Headers
                of shards in a store are read now; a sample is a request then.
            fields: the fields of each sample, a tuple: `("jpg", "cls")`. None: samples
                are dicts of all fields and `__key__`. Fields that end in cls, index,
                txt, json or npy are decoded; all others are `bytes`. Nothing is
                unpickled.
            storage_options: options of the URLs' file system, as fsspec names them.
            **options: as for `from_dataset`.

        Raises:
            SpecError: a file is not a tar file or is compressed, a field comes twice in
                a sample or would have to be unpickled, or a server sends no parts.
        """
        from .sources.shards import find_shards

        executor = options.get("executor", "auto")
        samples = find_shards(shards, fields, storage_options, executor)
        return cls.from_dataset(samples, **options)

    @classmethod
    def from_parquet(
        cls,
        files: Paths,
        columns: Sequence[str] | None = None,
        *,
        groups_in_memory: int = 32,
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[ReadOptions],
    ) -> Self:
        """Read the rows of Parquet files: samples are dicts by column.

        Args:
            files: paths or URLs, or one pattern that matches them: "train-*.parquet",
                "s3://bucket/train-*.parquet". A row group of a file in a store is a
                request for its bytes.
            columns: the columns to read (default: all).
            groups_in_memory: the number of row groups that a process keeps, as far as
                they take an eighth of the memory budget. Use twice the window of
                `shuffle(window=...)`; with fewer, each sample reads a whole group.
            storage_options: options of the URLs' file system, named as in its fsspec
                package.
            **options: as for `from_dataset`.

        Raises:
            SpecError: pyarrow is not installed, or there is no row or no such column.
        """
        rows = find_parquet(files, columns, groups_in_memory, storage_options)
        return cls.from_dataset(rows, **options)

    @classmethod
    def from_arrow(
        cls,
        files: Paths,
        columns: Sequence[str] | None = None,
        **options: Unpack[ReadOptions],
    ) -> Self:
        """Read the rows of Arrow files: samples are dicts by column.

        Args:
            files: paths, or one pattern that matches them: "train-*.arrow".
            columns: the columns to read (default: all).
            **options: as for `from_dataset`.

        Raises:
            SpecError: pyarrow is not installed, or there is no row or no such column.
        """
        from .sources.columnar import GROUPS, Arrow

        return cls.from_dataset(Arrow.find(files, columns, GROUPS), **options)

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        thread_safe: bool | None = None,
        name: str | None = None,
        timeout: float | None = None,
        shard: Shard | None = None,
        schedule: Scheduled | None = None,
    ) -> Self:
        """Read from a torch dataset, a list, an array or a table.

        Args:
            dataset: an object with `__len__` and `__getitem__`, or with `__iter__`; a
                data frame of pandas or polars, a table of pyarrow's, or a dict of
                arrays by column: samples are dicts by column then.
            num_parallel_workers: the number of readers: n at first; or (lo, hi), bounds
                for the autotuner, lo at first; by default, as configured. Readers that
                wait for storage cost little, so many of them are fine.
            executor: "auto" (chosen by measurement), "inline", "thread", "process" or
                "ray"; or, for URLs, "async".
            thread_safe: whether `__getitem__` may run on several threads of a process
                at once. None: they may, unless penstock finds an open file, a database
                or the like a few levels down in it; then "auto" uses processes.
            name: the name of this stage in the log.
            timeout: seconds that a sample may take, as for `map`.
            shard: this rank's share of the global batches (default: see `Shard.found`).
            schedule: the values that change during training; `.batch()` then takes no
                size.

        Raises:
            SpecError: `dataset` is not a dataset, or is empty.
        """
        stage = SourceStage.of(
            dataset,
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            thread_safe=thread_safe,
            name=name,
            timeout=timeout,
        )
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
            timeout: seconds that a sample may take here, and in adjacent stages that
                have no other limit. penstock reports the stack of a process that takes
                longer and replaces it; it cancels a coroutine that waits longer.
        """
        return self._with(
            MapStage(
                function,
                num_parallel_workers=num_parallel_workers,
                executor=executor,
                name=name,
                tune=tune,
                timeout=timeout,
            )
        )

    def filter(
        self,
        predicate: Callable[[Any], Any],
        **options: Unpack[WorkOptions],
    ) -> Self:
        """Drop the samples for which `predicate(sample)` is false, at run time.

        Batches stay full, the length of the pipeline becomes unknown, and only one rank
        is supported. If you know beforehand which indices to keep, use `select`.

        Args:
            predicate: returns whether to keep a sample.
            **options: as for `map`.
        """
        return self._with(FilterStage(predicate, **options))

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
        return self._with(
            CacheStage(
                ram=parse_bytes(ram) if ram else 0,
                disk=None if disk is None else Path(disk),
                disk_limit=None if disk_limit is None else parse_bytes(disk_limit),
                codec=codec,
                version=version,
            )
        )

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
        check(
            not buffer,
            "Pipeline.shuffle() takes nothing but `seed=`, got"
            f" {next(iter(buffer), '')!r}: it needs no buffer, as it shuffles the whole"
            " dataset, differently each epoch; call shuffle(), or shuffle(seed=...) for"
            " an order that is the same in each run",
        )
        chosen_seed = config.get_seed() if seed is None else seed
        return self._with(ShuffleStage(chosen_seed, window, parts))

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
        tail: Tail = "pad_mask",
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
            tail: how several ranks fill a short last batch, if it is kept: "pad_mask"
                with rows that do not count, "pad_repeat" with rows that do.
            on_error: "raise" an exception of a stage's function when its batch is due,
                or "substitute" another sample of the batch, marked in `.plan`. With a
                filter or an iterable, "substitute" drops a failed sample and fills the
                batch with the samples that follow.
            error_budget: the largest share of an epoch's samples that may be
                substituted.
        """
        stage = BatchStage(
            size=size,
            global_size=global_size,
            drop_last=drop_last,
            collate_fn=collate_fn,
            tail=tail,
            on_error=on_error,
            error_budget=error_budget,
            microbatches=microbatches,
            max_tokens=max_tokens,
            global_max_tokens=global_max_tokens,
            lengths=None if lengths is None else Lengths.of(lengths),
            window=window,
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
        return self._with(
            DeviceStage.of(device, normalize, dtype, channels_last=channels_last)
        )

    def options(
        self,
        *,
        host: Host = "auto",
        persistent_workers: bool = True,
        multiprocessing_context: StartMethod | None = None,
        name: str = "",
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
            ray_options: what each actor of `executor="ray"` claims, and where it may
                be placed: Ray's `num_cpus` (default: 1), `num_gpus`, `memory`,
                `resources`, `accelerator_type`, `label_selector`,
                `scheduling_strategy` and `runtime_env`.
        """
        options = Options(
            host=host,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            name=name,
            ray_options=ray_options,
        )
        check_ray(self._stages, options)
        return type(self)(self._stages, self._shard, options, self._schedule)

    def __repr__(self) -> str:
        """Return the code that makes this description."""
        return "".join(map(repr, (*self._stages, self._options)))

    def _with(self, stage: Stage) -> Self:
        check_place(self._stages, stage)
        check_ray((stage,), self._options)
        stages = (*self._stages, stage)
        order_of(stages)  # raises errors here, in the user's line
        return type(self)(stages, self._shard, self._options, self._schedule)

    # Loops

    def __iter__(self) -> Iterator[Any]:
        """Run the next epoch, or the rest of the epoch that a loaded state left off in.

        A pipeline runs one loop at a time: a new loop ends the previous one. If you
        leave a loop early, by `break` or an exception, its workers stop.
        """
        with self._slot.loop_change(imports=True):
            recipe = self._compiled()
        cursor = self._next or recipe.planned.start(self._epoch)
        shard = recipe.planned.shard
        if self._slot.loops == 0 and shard.size > 1:
            from .agreement import agree

            agree(shard, recipe.facts(), cursor, self._stages)
        self._run = self._slot.start(recipe, cursor, shard.rank)
        self._next, self._epoch = None, cursor.epoch + 1  # not if that fails
        return Epoch(self, self._slot, self._run)

    def __len__(self) -> int:
        """Return the number of batches in the epoch.

        Raises:
            TypeError: the pipeline has a filter or reads an iterable, so the number is
                only known once the epoch has run.
        """
        recipe = self._compiled()
        if recipe.repack:
            raise TypeError(
                "a pipeline with a filter, or over an iterable, has no length"
            )
        return recipe.planned.steps_in(self._here(recipe).epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop start at the beginning of `epoch`."""
        check(
            type(epoch) is int and epoch >= 0,
            f"`epoch` must be an int >= 0, got {epoch!r}; the first epoch is 0",
        )
        self._epoch, self._next, self._run = epoch, None, None

    @property
    def name(self) -> str:
        """The name of this pipeline in the log: see `options`."""
        return self._name

    def on_batch(self, listener: Callable[[BatchPlan], object]) -> Callable[[], object]:
        """Call `listener(stamp)` before each batch; return what ends this."""
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def state_dict(self) -> dict[str, object]:
        """Return the position of the next batch: O(1), plain JSON, equal on all ranks.

        The position counts consumed batches; prefetched batches do not count.
        """
        recipe = self._compiled()
        return recipe.state(self._here(recipe))

    def load_state_dict(
        self, state: Mapping[str, object], *, override: bool = False
    ) -> None:
        """Make the next loop go on at the position where `state` was taken.

        Args:
            state: a result of `state_dict`, from any number of ranks and workers.
            override: also accept the state of a pipeline with another schedule or
                dataset. The loop then goes on at the batch that holds the next sample.

        Raises:
            StateError: the state is damaged, or belongs to another pipeline or version.
        """
        cursor = self._compiled().restore(state, override=override)
        self._slot.close()
        self._next, self._run = cursor, None

    def explain(self) -> Explanation:
        """Explain what has slowed training lately; print it or read its fields."""
        from ..autotune.explain import cache_advice

        recipe = self._compiled()
        window, explanation = self._slot.explain(
            lambda: self._slot.begun(recipe, self._here(recipe))
        )
        counts = filter(None, (cache.statistics() for cache in recipe.caches))
        lines = (it.line for it in counts) if recipe.caches else cache_advice(window)
        return replace(explanation, caching=tuple(lines))

    def _compiled(self) -> Recipe:
        if self._recipe is None:
            from .compile import compile_recipe

            shard = self._shard or Shard.found()
            self._slot.show_log(shard.rank)
            self._recipe = compile_recipe(
                self._stages,
                config.current,
                shard,
                options=self._options,
                scheduled=self._schedule,
                name=self._name,
            )
        return self._recipe

    def _here(self, recipe: Recipe) -> Cursor:
        """Return where the next batch starts, in the current loop or the next."""
        if self._run is not None:
            return self._run.cursor
        return self._next or recipe.planned.start(self._epoch)
