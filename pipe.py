"""The pipeline face: describe what to load, then loop over it.

pipe = (penstock.Pipeline.from_folder("photos/")
          .shuffle(seed=0).map(decode).batch(64))
for batch in pipe: ...        # one epoch
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from . import config
from .pipeline.errors import SpecError
from .pipeline.ordering import order_of
from .pipeline.plan import BatchPlan, Cursor, Shard
from .pipeline.sources import Folder, is_iterable
from .pipeline.spec import (
    BatchStage,
    DeviceStage,
    Executor,
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
    check_place,
)
from .tuned import Slot, TunedRun

# What runs a pipeline is loaded when one runs: it takes as long as all the rest.
if TYPE_CHECKING:
    from .autotune.explain import Explanation
    from .pipeline.compile import Recipe
    from .pipeline.feed import Delivery, Feed
    from .pipeline.monitor import Reading

__all__ = ["Pipeline"]


class Pipeline:
    """What to load, stage by stage. Iterating it runs one epoch and yields batches.

    Each method returns a new pipeline and leaves this one as it is; nothing runs until
    a loop begins. A batch is what `torch.utils.data.default_collate` makes of its
    samples.
    """

    def __init__(self, stages: tuple[Stage, ...], shard: Shard) -> None:
        self._stages = stages
        self._shard = shard
        self._recipe: Recipe | None = None
        self._epoch = 0
        """Which epoch the next loop runs, unless `_next` says where to go on."""
        self._next: Cursor | None = None
        self._feed: Feed | None = None
        """The feed of the loop now running, or of the last one if that was left
        early."""
        self._plan: BatchPlan | None = None
        self._slot = Slot()
        weakref.finalize(self, self._slot.finalise)

    # Sources

    @classmethod
    def from_folder(
        cls,
        root: str | os.PathLike[str],
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        shard: Shard | None = None,
    ) -> Self:
        """Read images from class sub-folders: samples are `(bytes, label)`.

        Args:
            root: a folder with one sub-folder of images per class; labels number these
                in sorted order.
            num_parallel_workers: readers: n, or (lo, hi), or as configured. They wait
                for the storage, so many are cheap.
            executor: "auto", "inline", "thread" or "process".
            name: what the log calls this stage.
            shard: this rank's share of the global batches (default: all).

        Raises:
            SpecError: no such folder, or no images in class folders in it.
        """
        stage = SourceStage(
            Folder.scan(root),
            folder=True,
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            name=name,
        )
        return cls((stage,), shard or Shard.single())

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        thread_safe: bool | None = None,
        name: str | None = None,
        shard: Shard | None = None,
    ) -> Self:
        """Read from a torch dataset, a list, an array: map-style or iterable.

        Args:
            dataset: has `__len__` and `__getitem__`, or `__iter__`.
            num_parallel_workers: n, or (lo, hi), or as configured.
            executor: "auto", "inline", "thread" or "process".
            thread_safe: False: its `__getitem__` must not run on several threads at
                once, so "auto" uses processes.
            name: what the log calls this stage.
            shard: this rank's share of the global batches (default: all).

        Raises:
            SpecError: not a dataset, or an empty one.
        """
        stage = SourceStage(
            dataset,
            iterable=is_iterable(dataset),
            num_parallel_workers=num_parallel_workers,
            executor=executor,
            thread_safe=thread_safe,
            name=name,
        )
        return cls((stage,), shard or Shard.single())

    # Stages of samples

    def map(
        self,
        function: Callable[..., Any],
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        tune: bool = True,
    ) -> Self:
        """Call `function(sample)` on each sample.

        A function that takes `rng` is given the sample's own numpy Generator, the same
        for a given seed, epoch and index whatever the workers; one that takes `ctx` is
        given `ctx.epoch`, `ctx.step`, `ctx.image_size`.

        Args:
            function: returns the new sample; must not return None.
            num_parallel_workers: n; (lo, hi) bounds the autotuner; or as configured.
            executor: "auto" (inline while it costs next to nothing, else threads),
                "inline", "thread" or "process".
            name: what the log calls this stage.
            tune: False leaves its settings to you.
        """
        return self._with(
            MapStage(function, num_parallel_workers, executor, name, tune)
        )

    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        num_parallel_workers: Workers = None,
        executor: Executor = "auto",
        name: str | None = None,
        tune: bool = True,
    ) -> Self:
        """Leave out samples that `predicate(sample)` says no to, while running.

        Batches stay full, the length becomes unknown, and it works on one rank; where
        the indices to keep are known beforehand, `select` is better.
        """
        return self._with(
            FilterStage(predicate, num_parallel_workers, executor, name, tune)
        )

    def select(self, indices: Sequence[int]) -> Self:
        """Use only these samples, in this order."""
        return self._with(SelectStage(indices))

    def shuffle(self, seed: int | None = None) -> Self:
        """Use another order every epoch, a function of the seed and the epoch alone.

        Args:
            seed: default: `set_seed`'s.
        """
        chosen = config.get_seed() if seed is None else seed
        return self._with(ShuffleStage(chosen))

    def take(self, count: int) -> Self:
        """Use only the first `count` samples: of each epoch's order, if shuffled."""
        return self._with(TakeStage(count))

    def repeat(self, count: int) -> Self:
        """Make an epoch of `count` passes, each with its own order and random draws."""
        return self._with(RepeatStage(count))

    # Stages of batches

    def batch(
        self,
        size: int | None = None,
        *,
        global_size: int | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tail: Literal["pad_mask", "pad_repeat"] = "pad_mask",
        on_error: OnError = "raise",
        error_budget: float = 0.01,
    ) -> Self:
        """Make batches.

        Args:
            size: samples a rank.
            global_size: samples over all ranks, instead of `size`.
            drop_last: leave out an epoch's last batch if it is short.
            collate_fn: makes a batch of a list of samples (default: torch's).
            tail: what several ranks do with a short last batch, if it is kept.
            on_error: "raise" an exception of a stage's function when its batch is due,
                or "substitute" another sample of the batch, marked in `.plan`. Where
                batches are made while running (filter, iterables), a failed sample is
                left out and the batch filled with those that follow.
            error_budget: share of an epoch's samples that may be substituted.
        """
        stage = BatchStage(
            size, global_size, drop_last, collate_fn, tail, on_error, error_budget
        )
        return self._with(stage)

    def to_device(self, device: str | torch.device) -> Self:
        """Copy batches to a device."""
        return self._with(DeviceStage.of(device))

    # Running

    def __iter__(self) -> Iterator[Any]:
        """Run one epoch: the next one, or what a loaded state left of its own.

        A pipeline runs one loop at a time: a new one ends the one before. Leaving a
        loop early, by `break` or an exception, stops its workers.
        """
        recipe = self._compiled()
        cursor = self._next or recipe.plan.start(self._epoch)
        self._next, self._epoch = None, cursor.epoch + 1
        run = self._slot.start(recipe, cursor, self._shard.rank)
        self._feed = run.run.feed
        return Epoch(self, run)

    def __len__(self) -> int:
        """Return the batches in the epoch.

        Raises:
            TypeError: a filter or an iterable decides that while running.
        """
        recipe = self._compiled()
        if recipe.repack:
            text = "a pipeline with a filter, or over an iterable, has no length"
            raise TypeError(text)
        return recipe.plan.steps_in(self._here(recipe).epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at the start of this epoch."""
        if type(epoch) is not int or epoch < 0:
            raise SpecError(f"`epoch` must be an int >= 0, got {epoch!r}")
        self._epoch, self._next, self._feed = epoch, None, None

    @property
    def plan(self) -> BatchPlan | None:
        """The stamp of the batch last handed over; None before the first."""
        return self._plan

    def state_dict(self) -> dict[str, object]:
        """Return where the next batch starts: O(1), plain JSON, the same on all ranks.

        Taken at consumption: batches only prefetched are not counted.
        """
        recipe = self._compiled()
        return recipe.state(self._here(recipe))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next loop go on where `state` was taken.

        Raises:
            StateError: it is of another pipeline, version, or damaged.
        """
        cursor = self._compiled().restore(state)
        self._slot.close()
        self._next, self._feed = cursor, None

    def explain(self) -> Explanation:
        """Say what held training up lately: print it, or read its fields."""
        from .autotune.explain import explain
        from .pipeline.monitor import unmeasured

        observation = self._slot.observation()
        if observation is None:
            observation = unmeasured(self._compiled())
        tuned = config.get_enable_autotune()
        return explain(observation, config.budget(), tuned=tuned)

    def stats(self) -> Reading | None:
        """Return all counters since the engine began; None before the first loop."""
        run = self._slot.run
        return None if run is None else run.run.read()

    def close(self) -> None:
        """Stop all workers. The pipeline may be iterated again."""
        self._slot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the code that makes it."""
        return "".join(map(repr, self._stages))

    def _with(self, stage: Stage) -> Self:
        check_place(self._stages, stage)
        stages = (*self._stages, stage)
        order_of(stages)  # refuses what it cannot do, here in the line that says it
        return type(self)(stages, self._shard)

    def _compiled(self) -> Recipe:
        from .pipeline.compile import compile_recipe

        if self._recipe is None:
            self._recipe = compile_recipe(self._stages, config.defaults(), self._shard)
        return self._recipe

    def _here(self, recipe: Recipe) -> Cursor:
        """Where the next batch starts: of the loop now running, or of the next one."""
        if self._feed is not None:
            return self._feed.cursor
        return self._next or recipe.plan.start(self._epoch)

    def _hand_over(self, delivery: Delivery | None) -> None:
        """Take note of what the loop was given; None: it is over."""
        if delivery is None:
            self._feed = None
        else:
            self._plan = delivery.plan


class Epoch(Iterator[Any]):
    """One loop over a pipeline. Dropped early, it stops the workers."""

    def __init__(self, pipe: Pipeline, run: TunedRun) -> None:
        self._pipe = pipe
        self._run = run
        self._over = False
        self._abandon = weakref.finalize(self, pipe._slot.finalise, run)  # noqa: SLF001

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            delivery = self._run.next()
        except Exception:
            raise
        except BaseException:  # Ctrl-C, anywhere in the engine: it cannot go on
            self._abandon()
            raise
        self._pipe._hand_over(delivery)  # noqa: SLF001 its other half
        if delivery is None:
            self._over = True
            self._abandon.detach()
            self._pipe._slot.release(self._run)  # noqa: SLF001
            raise StopIteration
        return delivery.data
