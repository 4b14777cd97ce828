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
    from ..engine.observe.reading import Reading
    from ..engine.recipe import Recipe
    from ..engine.run import Run
    from .schedule import Scheduled

DESCRIBED = frozenset(("_stages", "_shard", "_options", "_schedule", "_epoch", "_next"))
"""What a copy of a pipeline has."""


class Pipeline(Description):
    """What to load, stage by stage. Iterating it runs one epoch and yields batches.

    Each method returns a new pipeline and leaves this one as it is; nothing runs until
    a loop begins. A batch is what `torch.utils.data.default_collate` makes of its
    samples.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        shard: Shard | None = None,
        options: Options = AS_SHIPPED,
        schedule: Scheduled | None = None,
    ) -> None:
        super().__init__(stages, shard, options, schedule)
        # Which epoch the next loop runs, unless `_next` says where to go on.
        self._epoch = 0
        self._next: Cursor | None = None
        self._set_up()

    def _set_up(self) -> None:
        """Hold nothing that runs."""
        self._recipe: Recipe | None = None
        # That of the loop now running, or of the last one if that was left early.
        self._run: Run | None = None
        self._plan: BatchPlan | None = None
        # Whether the ranks were found to load the same.
        self._agreed = False
        self._listeners: list[Callable[[BatchPlan], object]] = []
        # Whether one may still be placed by `options(cache="auto")`.
        self._may_cache = True
        self._slot = Slot(self._options.name or found_name())
        weakref.finalize(self, self._slot.finalise)

    def __getstate__(self) -> dict[str, Any]:
        """Return what was described, and which epoch is next: nothing that runs."""
        return {name: v for name, v in vars(self).items() if name in DESCRIBED}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._set_up()

    def __iter__(self) -> Iterator[Any]:
        """Run one epoch: the next one, or what a loaded state left of its own.

        A pipeline runs one loop at a time: a new one ends the one before. Leaving a
        loop early, by `break` or an exception, stops its workers.
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
        """Return the batches in the epoch.

        Raises:
            TypeError: a filter or an iterable decides that while running.
        """
        recipe = self._compiled()
        if recipe.repack:
            text = "a pipeline with a filter, or over an iterable, has no length"
            raise TypeError(text)
        return recipe.planned.steps_in(self._here(recipe).epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at the start of this epoch."""
        check(
            type(epoch) is int and epoch >= 0,
            f"`epoch` must be an int >= 0, got {epoch!r}",
        )
        self._epoch, self._next, self._run = epoch, None, None

    @property
    def name(self) -> str:
        """What the log calls it: see `options`."""
        return self._slot.name

    @property
    def plan(self) -> BatchPlan | None:
        """The stamp of the batch last handed over; None before the first."""
        return self._plan

    def on_batch(self, listener: Callable[[BatchPlan], object]) -> Callable[[], object]:
        """Have `listener(stamp)` called before each batch; return what ends that."""
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def state_dict(self) -> dict[str, object]:
        """Return where the next batch starts: O(1), plain JSON, the same on all ranks.

        Taken at consumption: batches only prefetched are not counted.
        """
        recipe = self._compiled()
        return recipe.state(self._here(recipe))

    def load_state_dict(
        self, state: Mapping[str, object], *, override: bool = False
    ) -> None:
        """Let the next loop go on where `state` was taken.

        Args:
            state: of `state_dict`, taken on any number of ranks and workers.
            override: take that of a pipeline with another schedule or data set, too:
                the loop goes on at the batch that holds the next sample.

        Raises:
            StateError: it is of another pipeline, version, or damaged.
        """
        cursor = self._compiled().restore(state, override=override)
        self._slot.close()
        self._next, self._run = cursor, None

    def load_autotune(
        self, path: str | os.PathLike[str], name: str | None = None
    ) -> None:
        """Let the next loop begin with what a tuned run ended with.

        Values that it found for other regimes (batch and image sizes of a schedule) are
        in force when these come. What was found with another number of usable cores is
        not used, and the log says so.

        Args:
            path: `<prefix>_<rank>.json`, as written with `set_enable_autotune(True,
                prefix)`. Stages that it does not know keep what they are set to.
            name: of the pipeline in it that is meant (default: the one of this name, or
                the only one with stages of this one).

        Raises:
            SpecError: it is no such file, or knows no stage of this pipeline.
        """
        self._slot.load(path, name, self._compiled())

    def explain(self) -> Explanation:
        """Say what held training up lately: print it, or read its fields."""
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

    def stats(self) -> Reading | None:
        """Return all counters since the engine began; None before the first loop."""
        return self._slot.stats()

    def close(self) -> None:
        """Stop all workers, let go of all memory. It may be iterated again.

        What a cache holds on disk stays, what it holds in RAM does not.
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

                show_by_default(shard.rank)  # what is found now is told
            self._recipe = self._recipe_of(self._stages)
        return self._recipe

    def _recipe_of(self, stages: Sequence[Stage]) -> Recipe:
        from .compile.recipes import compile_recipe

        shard = self._shard or Shard.found()
        defaults = Defaults.now(self.name)
        return compile_recipe(stages, defaults, shard, self._options, self._schedule)

    def _cached(self, recipe: Recipe) -> tuple[Recipe, str]:
        """Place a cache between two epochs where it pays; take it away if it did not.

        The batches are the same: neither the plan nor a draw knows of it.

        Returns:
            what to run, and what is to be told of it.
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
        """Where the next batch starts: of the loop now running, or of the next one."""
        if self._run is not None:
            return self._run.cursor
        return self._next or recipe.planned.start(self._epoch)

    def _hand_over(self, loop: int, delivery: Delivery | None) -> None:
        """Take note of what a loop was given; None: it is over."""
        if delivery is None:
            if loop == self._slot.loops:
                self._run = None
        else:
            self._plan = delivery.plan
            for listener in self._listeners:
                listener(delivery.plan)


def _as_own(described: type) -> None:
    """Have errors about the arguments of a method name it as users know it."""
    for method in vars(described).values():
        function = getattr(method, "__func__", method)
        if isinstance(function, FunctionType):
            function.__qualname__ = f"{Pipeline.__name__}.{function.__name__}"


_as_own(Description)
