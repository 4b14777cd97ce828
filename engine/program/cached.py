"""The stages up to a cache, as one operation: a cache is asked before anything runs.

Each sample is requested from the last stage. A function always requests its input from
the stage before it. A cache does so only if it does not hold the sample. A sample that
is found thus costs neither a read nor any function before the cache.
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
    """Whether a function before it uses the image size."""

    def size(self, context: Context) -> int | None:
        """Return the size that belongs to its keys."""
        return context.image_size if self.sized else None


Step = Read | Map | Stored


@dataclass(frozen=True, slots=True)
class Cached(Calling):
    """The steps to a sample: a read, functions and caches; the last is a cache."""

    stage: str
    steps: tuple[Step, ...]

    def begin(self, work: Work) -> Calls:
        """Request one sample after another."""
        indices = work.chunk.indices.tolist()
        make = partial(self._make, len(self.steps) - 1, context=work.chunk.context)
        return Calls(map(make, work.watched(indices)), len(indices), work)

    def leave(self) -> None:
        """Write records to disk that are still waiting for it."""
        for step in self.steps:
            if isinstance(step, Stored):
                step.cache.flush()

    def _make(self, at: int, index: int, context: Context) -> Any:
        """Return the sample as step `at` makes it."""
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
    """Like `Cached`, for steps whose functions are all coroutine functions."""

    async def _make(self, at: int, index: int, context: Context) -> Any:
        """Return the sample as step `at` makes it."""
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
    """The `ctx` of functions before a cache, whose results are served in later epochs.

    Values that change between epochs must not be read. The image size may: it is in the
    key.
    """

    image_size: int | None

    def __getattr__(self, name: str) -> Any:
        if name not in ("epoch", "step", "strength"):
            raise AttributeError(f"'Context' object has no attribute {name!r}")
        raise SpecError(
            f"a function before .cache() reads ctx.{name}, which changes between"
            " epochs; its results are computed only once, so move it after .cache()"
        )


def refused_none(stage: str, sample: Any) -> Any:
    """Return the sample, unless it is None.

    Raises:
        SampleError: it is None.
    """
    if sample is None:
        raise of_stage(SampleError(NO_SAMPLE.format(stage)), stage)
    return sample


def of_stage(error: BaseException, stage: str) -> BaseException:
    """Return the error, marked with the stage that raised it: see `Work.fail`."""
    set_on(error, "penstock_stage", stage)
    return error


def of_cache(error: BaseException, cache: Cache) -> None:
    """Mark the error as raised by a cache, unless an earlier one has."""
    if not hasattr(error, "penstock_stage"):
        of_stage(error, cache.opening.name)


def marked(stage: str, function: Callable[..., Any], *args: Any, **extras: Any) -> Any:
    """Call a function; mark its exception with the stage."""
    try:
        return function(*args, **extras)
    except BaseException as error:
        of_stage(error, stage)
        raise


async def awaited(
    stage: str, function: Callable[..., Any], *args: Any, **extras: Any
) -> Any:
    """Await a coroutine function; mark its exception with the stage."""
    try:
        return await function(*args, **extras)
    except BaseException as error:
        of_stage(error, stage)
        raise
