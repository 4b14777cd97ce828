"""Operations that few programs have: seeded reads, caches, fused maps, a `collate_fn`.

**Sample seeding.** Functions that draw from the global generators are made repeatable.
Before a sample is made, the generators of `random`, `numpy.random` and torch are set
from the sample's own seed. So its bytes depend neither on the worker that makes it nor
on the order. Setting them takes some 6 us, so it is skipped for data that draws
nothing: each lease is observed, which takes 2 us, and one that draws something is made
again. A dataset that keeps a place or a count would return other samples the second
time. While it is seen to change, all its samples are seeded: a cache changes until it
is full. A worker process starts in the state that torch's datasets and `worker_init_fn`
expect: see `WorkerStart`.

**Caches.** The stages up to a cache are one operation: a cache is asked before anything
runs. Each sample is requested from the last stage. A function always requests its input
from the stage before it. A cache does so only if it does not hold the sample. A sample
that is found thus costs neither a read nor any function before the cache.

**Fused maps.** Adjacent maps are one operation if their functions have a faster way
together. `decode`, for one, need not make the pixels that the operator after it leaves
out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from types import MethodType, NoneType
from typing import Any

import torch
from torch.utils.data._utils import worker as torchs

from ...cache.cache import Cache, Found, RandomUpstreamError, finished
from ...cache.record import UnstorableError
from ...errors import SampleError, SpecError
from ..batch.buffer import Collate as Collating
from ..batch.buffer import Finished
from ..plan import Context
from ..witness.witness import Witness
from .program import (
    NO_SAMPLE,
    STOPPED,
    Calling,
    Calls,
    Map,
    Operation,
    Read,
    Rows,
    Work,
    fetch,
    of_stage,
    offered,
)
from .randomness import (
    SeededCalls,
    Undrawn,
    positions,
    seed_global_generators,
    undisturbed,
)


@dataclass(slots=True, eq=False)
class SeededRead(Calling):
    """Reads the chunk's indices from the dataset, each under its own seed.

    For one thread per process: the generators belong to the process.
    """

    stage: str
    get: Callable[[int], Any]
    get_many: Callable[[list[Any]], Any] | None
    start: WorkerStart
    """What a worker process does first."""
    whole: bool = False
    """As for `Read`; a batch is then seeded as one."""
    trainer: int = field(default_factory=os.getpid)
    """The process whose generators belong to the user's program."""
    seeds: bool | None = None
    """Whether each sample is seeded; None: they are until looks show what is needed."""
    leases: int = 0
    """Leases that were seeded while that was unknown; every 1, 2, 4, 8, ... is looked
    at."""
    number: int | None = None
    """Number of the worker process, until it has started."""
    undrawn: Undrawn = field(default_factory=Undrawn)

    def enter(self, number: int) -> None:
        """Note that this is worker process `number` from now on."""
        self.number = number

    def run(self, work: Work) -> None:
        """Read, leaving the trainer's generators as they are."""
        if self.number is not None:
            try:
                self.start(self.number)
            except Exception as error:  # noqa: BLE001 the trainer raises it
                work.fail_all(error, self.stage)
                return
            self.number = None
        # A dataset's own code may keep a count or a place; a reader of ours does not.
        if self.seeds is None and (
            self.whole or type(self.get_many) in (NoneType, MethodType)
        ):
            self.leases += 1
            looks = not self.leases & (self.leases - 1)
            witness = Witness([self.start.dataset]) if looks else None
            self._read_seeded(work)
            if witness is not None and self.seeds is None and witness.repeats():
                self.seeds = False  # so the next samples may be made twice
            return
        if not self.seeds:  # look whether they draw; if so, undo that
            self.undrawn.look()
            Read(self.stage, self.get, self.get_many, self.whole).run(work)
            if not self.undrawn.drawn:
                return
            self.undrawn.put_back()
            work.samples, work.offsets, work.failures = [], None, []
        self.seeds = True
        self._read_seeded(work)

    def _read_seeded(self, work: Work) -> None:
        with undisturbed() if os.getpid() == self.trainer else contextlib.nullcontext():
            if self.get_many is not None and self.whole:
                for _ in self._seeded([(0, int(work.chunk.rounds[0]))]):
                    fetch(work, self.stage, self.get_many)
            else:
                Calling.run(self, work)

    def begin(self, work: Work) -> Calls:
        """Request one sample after another, each under its seed."""
        pairs = zip(
            work.chunk.indices.tolist(), work.chunk.rounds.tolist(), strict=True
        )
        return Calls(
            map(self.get, work.watched(self._seeded(pairs))), len(work.chunk), work
        )

    def _seeded(self, pairs: Iterable[tuple[int, int]]) -> Iterator[int]:
        """Yield each index with the global generators set to its seed."""
        for index, seed in pairs:
            seed_global_generators(seed)
            before = None if self.seeds else positions()
            yield index
            # A cache may keep what was drawn, and hide it from later looks.
            if before is not None and positions() != before:
                self.seeds = True


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What is done once in a worker process, before its first sample.

    A worker that replaces another gets its number. The largest number of workers may
    grow while training runs; `num_workers` is what it was when this worker started.
    """

    dataset: Any
    num_workers: int
    """As requested by the user; 0 leaves it to the tuner."""
    init: Callable[[int], Any] | None
    """`worker_init_fn`."""

    def __call__(self, number: int) -> None:
        """Make this process worker `number`, as `get_worker_info()` will report.

        The process started with its own global generators, from which a
        `worker_init_fn` derives its seeds.

        Raises:
            Exception: whatever the user's `worker_init_fn` raises.
        """
        torchs._worker_info = torchs.WorkerInfo(  # noqa: SLF001 the one place that `get_worker_info` reads
            id=number,
            num_workers=max(self.num_workers, number + 1),
            seed=torch.initial_seed(),
            dataset=self.dataset,
        )
        if self.init is not None:
            self.init(number)


@dataclass(frozen=True, slots=True)
class Stored:
    """A cache among the stages."""

    cache: Cache
    sized: bool
    """Whether a function before it uses the image size, which is in its keys then."""

    def size_of(self, context: Context) -> int | None:
        """Return the image size in the key of a sample."""
        return context.image_size if self.sized else None


@dataclass(frozen=True, slots=True)
class Cached(Calling):
    """The steps to a sample: a read, functions and caches; the last is a cache."""

    stage: str
    steps: tuple[Read | Map | Stored, ...]
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
        (*_, step) = self.steps
        assert isinstance(step, Stored)
        hit = step.cache.find(index, step.size_of(context))
        if hit is not None and not hit.doubted:
            return hit.sample
        return finished(self._stored(step, -1, index, context, hit=hit))

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
                output = await self._called(step.stage, step.function, sample, **extras)
                if output is None:
                    raise of_stage(
                        SampleError(NO_SAMPLE.format(step.stage)), step.stage
                    )
                return output
            case Stored() as step:
                hit = step.cache.find(index, step.size_of(context))
                if hit is not None and not hit.doubted:
                    return hit.sample
                return await self._stored(step, at, index, context, hit=hit)

    async def _stored(
        self,
        step: Stored,
        at: int,
        index: int,
        context: Context,
        *,
        hit: Found | None,
    ) -> Any:
        """Return the sample of the cache at step `at`, which found this."""
        compute = partial(self._make, at - 1, index, context)
        size, cache = step.size_of(context), step.cache
        try:
            return await cache.sample(index, size, hit, compute, in_loop=self.waits)
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


# The attribute of a function that may have a way together with those after it. Called
# with these, it returns how many it takes along and a function for several samples, or
# None. That one gets for each sample a function which returns the generator of the
# first, the second, ... of them, valid until it is called again.
FUSES = "__penstock_fused__"


@dataclass(frozen=True, slots=True)
class Fused(Map):
    """Adjacent maps that have a way together for several samples, with equal results.

    Samples that it leaves go through one after another.
    """

    rows: Rows = field(kw_only=True)
    maps: tuple[Map, ...] = field(kw_only=True)

    @classmethod
    def of(cls, maps: tuple[Map, ...], rows: Rows) -> Fused:
        """Return the operation of these maps, which have this way together."""
        first, *others = maps
        return cls(
            stage=" + ".join(
                (first.stage, *(other.stage.partition(" ")[2] for other in others))
            ),
            number=first.number,
            function=first.function,
            wants_rng=any(operation.wants_rng for operation in maps),
            wants_ctx=any(operation.wants_ctx for operation in maps),
            rows=rows,
            maps=maps,
        )

    def together(self) -> Rows | None:
        """Return what makes several samples at once."""
        return self.rows

    def _stream(self, work: Work, round_: int, index: int) -> Any:
        return lambda at: work.random.at(round_, index, self.maps[at].number)

    def call(self, sample: Any, work: Work, round_: int, index: int) -> Any:
        """Return what the maps make of one sample, one after another."""
        for operation in self.maps:
            try:
                sample = operation.call(sample, work, round_, index)
            except BaseException as error:
                of_stage(error, operation.stage)
                raise
        return sample


def with_fused_maps(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return these operations, with maps that have a way together made one."""
    new_operations: list[Operation] = []
    rest = list(operations)
    while rest:
        first, *rest = rest
        fuses = offered(first.function, FUSES) if isinstance(first, Map) else None
        followers = takewhile(lambda operation: isinstance(operation, Map), rest)
        maps = [
            operation for operation in (first, *followers) if isinstance(operation, Map)
        ]
        way = None
        if fuses is not None and not any(operation.one_by_one for operation in maps):
            way = fuses([operation.function for operation in maps[1:]])
        if way is not None:
            count, rows = way
            first, rest = Fused.of(tuple(maps[: count + 1]), rows), rest[count:]
        new_operations.append(first)
    return tuple(new_operations)


class Collate(Operation):
    """Calls the user's `collate_fn` on the rows of a batch; the batch seeds its draws.

    Args:
        stage: the stage that makes batches.
        collate: the user's function.
        seed: seed of the pipeline.
    """

    def __init__(self, stage: str, collate: Collating | None, seed: int) -> None:
        self.stage, self._seed = stage, seed
        # Know whether calls change the `collate_fn`.
        self.calls = SeededCalls(collate)
        # Whether this is a worker process, whose threads may draw meanwhile.
        self.apart = False

    def run(self, work: Work) -> None:
        (batch,) = work.samples
        seeds = self._seed, batch.plan.epoch, batch.plan.batch
        # Workers of other segments may draw at the same time.
        result = self.calls.call(
            batch.collate, batch.buffer.kept.values(), *seeds, apart=self.apart
        )
        work.samples = [result.data if isinstance(result, Finished) else result]
