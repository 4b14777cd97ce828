"""The stages up to a cache, as one operation: a cache is asked before anything runs.

Each sample is requested from the last stage. A function always requests its input from
the stage before it. A cache does so only if it does not hold the sample. A sample that
is found thus costs neither a read nor any function before the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...cache.cache import Cache, Found, RandomUpstreamError, finished
from ...cache.record import UnstorableError
from ...errors import SampleError, SpecError
from ..plan import Context
from .program import (
    NO_SAMPLE,
    STOPPED,
    Calling,
    Calls,
    Map,
    Read,
    Work,
    of_stage,
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A cache among the stages."""

    cache: Cache
    sized: bool
    """Whether a function before it uses the image size, which is in its keys then."""

    def size_of(self, context: Context) -> int | None:
        """Return the image size in the key of a sample."""
        return context.image_size if self.sized else None


Step = Read | Map | Stored


@dataclass(frozen=True, slots=True)
class Cached(Calling):
    """The steps to a sample: a read, functions and caches; the last is a cache."""

    stage: str
    steps: tuple[Step, ...]
    waits: bool = False
    """Whether its functions are coroutine functions, which an event loop awaits."""

    def begin(self, work: Work) -> Calls:
        """Request one sample after another."""
        indices = work.chunk.indices.tolist()
        request = partial(self._make, -1) if self.waits else self._now
        call = partial(request, context=work.chunk.context)
        return Calls(map(call, work.watched(indices)), len(indices), work)

    def _now(self, index: int, context: Context) -> Any:
        """Return a sample without an event loop."""
        (*_, stored) = self.steps
        assert isinstance(stored, Stored)
        found = stored.cache.find(index, stored.size_of(context))
        if found is not None and not found.doubted:
            return found.sample
        return finished(self._stored(stored, -1, index, context, found=found))

    def leave(self) -> None:
        """Write records to disk that are still waiting for it."""
        for step in self.steps:
            if isinstance(step, Stored):
                step.cache.flush()

    async def _make(self, at: int, index: int, context: Context) -> Any:
        """Return the sample as step `at`, counted from behind, makes it."""
        match self.steps[at]:
            case Read() as step:
                return await self._called(step.stage, step.get, index)
            case Map() as step:
                sample = await self._make(at - 1, index, context)
                extras = {"ctx": OfCached(context.image_size)} if step.wants_ctx else {}
                made = await self._called(step.stage, step.function, sample, **extras)
                if made is None:
                    raise of_stage(
                        SampleError(NO_SAMPLE.format(step.stage)), step.stage
                    )
                return made
            case Stored() as step:
                found = step.cache.find(index, step.size_of(context))
                if found is not None and not found.doubted:
                    return found.sample
                return await self._stored(step, at, index, context, found=found)

    async def _stored(
        self,
        stored: Stored,
        at: int,
        index: int,
        context: Context,
        *,
        found: Found | None,
    ) -> Any:
        """Return the sample of the cache at step `at`, which found this."""
        compute = partial(self._make, at - 1, index, context)
        size, cache = stored.size_of(context), stored.cache
        try:
            return await cache.sample(index, size, found, compute, in_loop=self.waits)
        except (RandomUpstreamError, UnstorableError) as error:
            if not hasattr(error, "penstock_stage"):  # of an earlier cache
                of_stage(error, cache.opening.name)
            raise

    async def _called(
        self, stage: str, function: Callable[..., Any], *args: Any, **extras: Any
    ) -> Any:
        """Call a function; mark its exception with the stage."""
        try:
            result = function(*args, **extras)
            return await result if self.waits else result
        except StopIteration as error:  # which a coroutine must not raise
            raise of_stage(SampleError(STOPPED.format(stage)), stage) from error
        except BaseException as error:
            of_stage(error, stage)
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
