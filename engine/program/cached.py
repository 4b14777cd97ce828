"""The stages up to a cache, as one operation: asked for first, computed where missing.

For each sample the last stage is asked, which asks the one before it only if it must:
a function always, a cache where it does not hold the sample. So what is found costs
neither a read nor any function before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...cache.cache import Cache, RandomUpstreamError
from ...cache.structure import UnstorableError
from ...errors import SampleError, SpecError, set_on
from ..plan import Context
from .program import NO_SAMPLE, Calling, Calls, Map, Read, Work


@dataclass(frozen=True, slots=True)
class Stored:
    """A cache among the stages."""

    cache: Cache
    sized: bool
    """Whether a function before it asks for the image size."""

    def size(self, context: Context) -> int | None:
        """Return the size that belongs to its keys."""
        return context.image_size if self.sized else None


Step = Read | Map | Stored


@dataclass(frozen=True, slots=True)
class Cached(Calling):
    """The steps to a sample: a read, functions, caches; the last is a cache."""

    stage: str
    steps: tuple[Step, ...]

    def begin(self, work: Work) -> Calls:
        """Ask for one sample after the other."""
        indices = work.chunk.indices.tolist()
        make = partial(self._make, len(self.steps) - 1, context=work.chunk.context)
        return Calls(map(make, work.watched(indices)), len(indices), work)

    def leave(self) -> None:
        """Have on disk what is on its way there."""
        for step in self.steps:
            if isinstance(step, Stored):
                step.cache.flush()

    def _make(self, at: int, index: int, context: Context) -> Any:
        """Return the sample as step `at` gives it."""
        match self.steps[at]:
            case Read() as read:
                return marked(read.stage, read.get, index)
            case Map() as step:
                sample = self._make(at - 1, index, context)
                extras = {"ctx": OfCached(context.image_size)} if step.wants_ctx else {}
                made = marked(step.stage, step.function, sample, **extras)
                return refused_none(step.stage, made)
            case Stored() as stored:

                def compute(_number: int) -> Any:
                    return self._make(at - 1, index, context)

                try:
                    return stored.cache.sample(index, stored.size(context), compute)
                except (RandomUpstreamError, UnstorableError) as error:
                    of_cache(error, stored.cache)
                    raise


@dataclass(frozen=True, slots=True)
class AwaitedCached(Cached):
    """The same, where all functions are coroutine functions."""

    async def _make(self, at: int, index: int, context: Context) -> Any:
        """Return the sample as step `at` gives it."""
        match self.steps[at]:
            case Read() as read:
                return await awaited(read.stage, read.get, index)
            case Map() as step:
                sample = await self._make(at - 1, index, context)
                extras = {"ctx": OfCached(context.image_size)} if step.wants_ctx else {}
                made = await awaited(step.stage, step.function, sample, **extras)
                return refused_none(step.stage, made)
            case Stored() as stored:

                def compute(_number: int) -> Awaitable[Any]:
                    return self._make(at - 1, index, context)

                size = stored.size(context)
                try:
                    return await stored.cache.sample_in_loop(index, size, compute)
                except (RandomUpstreamError, UnstorableError) as error:
                    of_cache(error, stored.cache)
                    raise


@dataclass(frozen=True, slots=True)
class OfCached:
    """The `ctx` of functions before a cache: what they make is served in later epochs.

    So what is another there is not to be read; the image size is in the key.
    """

    image_size: int | None

    def __getattr__(self, name: str) -> Any:
        if name not in ("epoch", "step", "strength"):
            raise AttributeError(f"'Context' object has no attribute {name!r}")
        raise SpecError(
            f"a function before a cache reads ctx.{name}, which is another in a later"
            " epoch, while what stands before a cache is computed once; put that"
            " function behind .cache()"
        )


def refused_none(stage: str, sample: Any) -> Any:
    """Return the sample, unless it is None."""
    if sample is None:
        raise of_stage(SampleError(NO_SAMPLE.format(stage)), stage)
    return sample


def of_stage(error: BaseException, stage: str) -> BaseException:
    """Return the error, which says now in which stage it was raised: `Work.fail`."""
    set_on(error, "penstock_stage", stage)
    return error


def of_cache(error: BaseException, cache: Cache) -> None:
    """Let the error say that a cache raised it, unless another before it has."""
    if not hasattr(error, "penstock_stage"):
        of_stage(error, cache.opening.name)


def marked(stage: str, function: Callable[..., Any], *args: Any, **extras: Any) -> Any:
    """Call a function; what it raises says which stage that was."""
    try:
        return function(*args, **extras)
    except BaseException as error:
        of_stage(error, stage)
        raise


async def awaited(
    stage: str, function: Callable[..., Any], *args: Any, **extras: Any
) -> Any:
    """Await a coroutine function; what it raises says which stage that was."""
    try:
        return await function(*args, **extras)
    except BaseException as error:
        of_stage(error, stage)
        raise
