"""The pipeline face: describe what to load, then loop over it.

pipe = (penstock.Pipeline.from_folder("photos/")
          .shuffle(seed=0).map(decode).batch(64))
for batch in pipe: ...        # one epoch
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

from .. import config
from ..engine.plan import BatchPlan, Cursor, Shard
from ..engine.recipe import AS_SHIPPED, Options
from ..errors import check
from .description import Description
from .naming import found_name
from .session import Epoch, Slot
from .stages import Defaults, Stage

if TYPE_CHECKING:
    from ..autotune.explain import Explanation
    from ..engine.feed import Delivery
    from ..engine.observe.observation import Observation
    from ..engine.recipe import Recipe
    from ..engine.run import Run
    from .schedule import Scheduled

DESCRIBED = frozenset(("_stages", "_shard", "_options", "_schedule", "_epoch", "_next"))
"""The attributes that a copy of a pipeline keeps."""


class Pipeline(Description):
    """Describe what to load, stage by stage; iterate to run one epoch of batches.

    Each method returns a new pipeline and leaves this one as it is; nothing runs until
    a loop begins. `torch.utils.data.default_collate` turns samples into a batch, unless
    `batch` is given a `collate_fn`.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        shard: Shard | None = None,
        options: Options = AS_SHIPPED,
        schedule: Scheduled | None = None,
    ) -> None:
        super().__init__(stages, shard, options, schedule)
        # The epoch that the next loop runs, unless `_next` says where to go on.
        self._epoch = 0
        self._next: Cursor | None = None
        self._set_up()

    def _set_up(self) -> None:
        """Set all attributes that belong to a run to their empty values."""
        self._recipe: Recipe | None = None
        # The run of the current loop, or of the last loop if the user left it early.
        self._run: Run | None = None
        self._plan: BatchPlan | None = None
        # Whether the ranks have confirmed that they load the same data.
        self._agreed = False
        self._listeners: list[Callable[[BatchPlan], object]] = []
        # Whether `options(cache="auto")` may still place a cache.
        self._may_cache = True
        self._slot = Slot(self._options.name or found_name())
        weakref.finalize(self, self._slot.finalise)

    def __getstate__(self) -> dict[str, Any]:
        """Return the description and the number of the next epoch, without any run."""
        return {name: v for name, v in vars(self).items() if name in DESCRIBED}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._set_up()

    def __iter__(self) -> Iterator[Any]:
        """Run the next epoch, or the rest of the epoch that a loaded state left off in.

        A pipeline runs one loop at a time: a new loop ends the previous one. If you
        leave a loop early, by `break` or an exception, its workers stop.
        """
        recipe = self._compiled()
        cursor = self._next or recipe.planned.start(self._epoch)
        self._next, self._epoch = None, cursor.epoch + 1
        plan = recipe.planned
        if not self._agreed and plan.shard.size > 1:
            from .agreement import agree, decoders

            agree(plan.shard, {**recipe.facts(), **decoders(self._stages)})
            self._agreed = True
        remark = ""
        if self._options.cache == "auto" and not cursor.batch:
            recipe, remark = self._cached(recipe)
        run = self._slot.start(recipe, cursor, plan.shard.rank)
        run.remark = remark
        self._run = run.run
        return Epoch(self._slot, run, partial(self._hand_over, self._slot.loops))

    def __len__(self) -> int:
        """Return the number of batches in the epoch.

        Raises:
            TypeError: the pipeline has a filter or reads an iterable, so the number is
                only known once the epoch has run.
        """
        recipe = self._compiled()
        if recipe.repack:
            text = "a pipeline with a filter, or over an iterable, has no length"
            raise TypeError(text)
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
        return self._slot.name

    @property
    def plan(self) -> BatchPlan | None:
        """The stamp of the last batch handed over; None before the first batch."""
        return self._plan

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

    def load_autotune(
        self, path: str | os.PathLike[str], name: str | None = None
    ) -> None:
        """Start the next loop with the settings that an earlier tuned run ended with.

        Settings that the run found for other regimes (batch and image sizes of a
        schedule) take effect when those regimes begin. Settings found with another
        number of usable cores are not used, and the log says so.

        Args:
            path: `<prefix>_<rank>.json`, as written with `set_enable_autotune(True,
                prefix)`. Stages that the file does not know keep their settings.
            name: the name of the pipeline in the file (default: the name of this
                pipeline, or else the only pipeline in the file that shares stages with
                it).

        Raises:
            SpecError: `path` is not such a file, or knows no stage of this pipeline.
        """
        self._slot.load(path, name, self._compiled())

    def explain(self) -> Explanation:
        """Explain what has slowed training lately; print it or read its fields."""
        from ..autotune.caching import cache_points

        recipe = self._compiled()
        seen, said = self._slot.seen(
            lambda: self._slot.begun(recipe, self._here(recipe))
        )
        if not (caches := recipe.caches):
            points = tuple(point.line for point in cache_points(seen))
            return replace(said, caching=points)
        found = (cache.statistics() for cache in caches)
        lines = tuple(each.line for each in found if each is not None)
        return replace(said, caching=lines)

    def stats(self) -> Observation | None:
        """Return all counters since the engine started.

        None before the first loop and after `close`.
        """
        return self._slot.stats()

    def close(self) -> None:
        """Stop all workers and free all memory. The pipeline may be iterated again.

        A cache keeps its samples on disk and drops those in RAM.
        """
        self._slot.close()
        if self._recipe is not None:
            for cache in self._recipe.caches:
                cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compiled(self) -> Recipe:
        if self._recipe is None:
            shard = self._shard or Shard.found()
            if config.get_enable_autotune():
                from ..autotune.log import show_by_default

                show_by_default(shard.rank)  # the checks below may warn
            self._recipe = self._recipe_of(self._stages)
        return self._recipe

    def _recipe_of(self, stages: Sequence[Stage]) -> Recipe:
        from .compile.recipes import compile_recipe

        shard = self._shard or Shard.found()
        defaults = Defaults.now(self.name)
        return compile_recipe(stages, defaults, shard, self._options, self._schedule)

    def _cached(self, recipe: Recipe) -> tuple[Recipe, str]:
        """Place a cache between two epochs if it pays off; remove it if it did not.

        The batches stay the same, because neither the plan nor any random draw depends
        on the cache.

        Returns:
            The recipe to run, and what the log says about it.
        """
        from .placing import IDLE, Placed, is_idle, place

        if self._slot.run is None or self._slot.busy or not self._may_cache:
            return recipe, ""
        found = None
        if not recipe.caches:
            seen, _ = self._slot.seen(lambda: recipe)
            found = place(self._stages, seen, config.budget(), self._recipe_of)
        elif is_idle(recipe.caches[0]):
            self._may_cache = False
            found = Placed(self._recipe_of(self._stages), IDLE)
        if found is None:
            return recipe, ""
        self.close()
        self._recipe = found.recipe
        return found.recipe, found.line

    def _here(self, recipe: Recipe) -> Cursor:
        """Return where the next batch starts, in the current loop or the next."""
        if self._run is not None:
            return self._run.cursor
        return self._next or recipe.planned.start(self._epoch)

    def _hand_over(self, loop: int, delivery: Delivery | None) -> None:
        """Record what a loop received; None means that the loop is over."""
        if delivery is None:
            if loop == self._slot.loops:
                self._run = None
        else:
            self._plan = delivery.plan
            for listener in self._listeners:
                listener(delivery.plan)


def _as_own(described: type) -> None:
    """Make errors about a method's arguments name the method as users know it."""
    for method in vars(described).values():
        function = getattr(method, "__func__", method)
        if isinstance(function, FunctionType):
            function.__qualname__ = f"{Pipeline.__name__}.{function.__name__}"


_as_own(Description)
