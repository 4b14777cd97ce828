"""A segment's body: which functions run on a chunk, one after the other.

A program holds no queue and no lock, so the same one runs in the trainer's thread, in
worker threads and in other processes. Each operation runs over all rows of the chunk
before the next does; a row whose function raised is set aside and the others go on.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, Protocol

from ...errors import SampleError, add_note
from ..batch.array_rows import ArrayRows
from ..batch.buffer import Buffers
from ..batch.layout import size_of, size_of_all
from ..core.chunk import Chunk, Failure, Outcome, Parts
from ..core.metrics import CpuClock
from .randomness import SampleRandom


class Sink(Protocol):
    """Takes the rows of a batch."""

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        """Put one sample into each of `rows`; return the bytes they take."""


class Watch(Protocol):
    """Is told of each sample as it is taken in hand."""

    def each(self, items: Iterable[Any], rows: Sequence[int]) -> Iterator[Any]:
        """Hand `items` through, noting the row each belongs to as it is taken."""


@dataclass(slots=True)
class Work:
    """The rows of a chunk on their way through a program."""

    chunk: Chunk
    random: SampleRandom
    samples: Sequence[Any]
    offsets: list[int] | None = None
    """Which rows of the chunk `samples` are for; None: all."""
    failures: list[Failure] | None = None
    dropped: int = 0
    ended: bool = False
    watch: Watch | None = None

    def watched(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return `items`, one a sample, watched as they are taken."""
        if self.watch is None:
            return items
        return self.watch.each(items, self.offsets or range(len(self.chunk)))

    def rows(self) -> Sequence[int]:
        """Return the row of the batch each sample belongs to."""
        first = self.chunk.first_row
        if self.offsets is None:
            return range(first, first + len(self.chunk))
        return [first + offset for offset in self.offsets]

    def keep(self, samples: Sequence[Any], kept: Iterable[bool]) -> None:
        """Go on with those of `samples` that are `kept`."""
        flags = list(kept)
        if all(flags):
            self.samples = samples
            return
        before: Sequence[int] = self.offsets or range(len(flags))
        self.offsets = [at for at, flag in zip(before, flags, strict=True) if flag]
        self.samples = [s for s, flag in zip(samples, flags, strict=True) if flag]

    def take(self, results: list[Any], failed: set[int]) -> None:
        """Go on with `results`, but for those that failed."""
        if failed:
            self.keep(results, (at not in failed for at in range(len(results))))
        else:
            self.samples = results

    def fail(
        self, at: int, error: BaseException, stage: str, *, cut_short: bool = False
    ) -> None:
        """Note that the sample `at` (counted within `samples`) raised."""
        offset = at if self.offsets is None else self.offsets[at]
        stage = getattr(error, "penstock_stage", stage)  # of several that are one
        index, row = int(self.chunk.indices[offset]), self.chunk.first_row + offset
        failure = Failure(error, stage, index, row, cut_short)
        self.failures = [*(self.failures or ()), failure]

    def fail_all(self, error: BaseException, stage: str) -> None:
        """Note that none of the rows could be begun."""
        self.samples, self.offsets = [], None
        for at in range(len(self.chunk)):
            self.fail(at, error, stage)
        self.offsets = []


class Operation(ABC):
    """One stage within a program."""

    __slots__ = ()
    stage: str
    """As the log and errors show it."""

    def enter(self, number: int) -> None:  # noqa: B027 few care
        """Be told that this is worker process `number`, before its first chunk."""

    @abstractmethod
    def run(self, work: Work) -> None:
        """Do it to all rows of `work`."""

    def leave(self) -> None:  # noqa: B027 few care
        """Be told that this worker process is about to end."""


def samples_of(many: Iterable[Any]) -> Sequence[Any]:
    """Return what was read at once as it is to go on: a list, or rows of arrays."""
    return many if isinstance(many, ArrayRows) else list(many)


FAILED = object()
"""Stands in for the sample of a row whose function raised, until it is set aside."""


def apply(work: Work, stage: str, calls: Iterable[Any], count: int) -> None:
    """Replace the samples by what `count` lazy calls give, setting failures aside.

    `list.extend` keeps what an iterator gave before it raised, and the iterator goes on
    behind the item that raised, so the loop over all rows runs in C while all goes
    well.
    """
    calls = iter(calls)
    results: list[Any] = []
    failed: set[int] = set()
    while len(results) < count:
        try:
            results.extend(calls)
        except BaseException as error:
            if len(results) >= count:  # Ctrl-C, after the last call was through
                raise
            failed.add(len(results))
            work.fail(len(results), error, stage)
            results.append(FAILED)
        else:
            if len(results) < count:  # extend took a StopIteration for the end
                failed.add(len(results))
                work.fail(len(results), SampleError(STOPPED.format(stage)), stage)
                results.append(FAILED)
    work.take(results, failed)


STOPPED = (
    "the function of {} raised StopIteration, which means the end of an iteration to "
    "Python; a stage's function must return a sample or raise another exception"
)


class Calls(NamedTuple):
    """The calls that an operation makes, not made yet."""

    each: Iterator[Any]
    """Makes one a step; goes on behind one that raised."""
    number: int
    results: Work
    """Whose samples the results are to be."""


class Calling(Operation):
    """An operation that calls a function once for every sample.

    Between its two halves the calls are made: one after the other, or, where the
    function is a coroutine function, awaited (awaiting.py).
    """

    __slots__ = ()

    @abstractmethod
    def begin(self, work: Work) -> Calls:
        """Prepare the calls."""

    def finish(self, work: Work, results: Work) -> None:
        """Judge the results, once all calls are made."""

    def run(self, work: Work) -> None:
        """Do it to all rows of `work`."""
        calls = self.begin(work)
        apply(calls.results, self.stage, calls.each, calls.number)
        self.finish(work, calls.results)


@dataclass(frozen=True, slots=True)
class Read(Calling):
    """Ask the dataset for the chunk's indices."""

    stage: str
    get: Callable[[int], Any]
    get_many: Callable[[list[int]], Sequence[Any]] | None = None
    """The dataset's `__getitems__`, where it has one."""

    def run(self, work: Work) -> None:
        if self.get_many is not None:
            indices = work.chunk.indices.tolist()
            try:
                samples = samples_of(self.get_many(indices))
            except Exception:  # noqa: BLE001 one by one, the guilty sample says so itself
                samples = []
            if len(samples) == len(indices):
                work.samples = samples
                return
        Calling.run(self, work)

    def begin(self, work: Work) -> Calls:
        """Ask for one sample after the other."""
        indices = work.chunk.indices.tolist()
        return Calls(map(self.get, work.watched(indices)), len(indices), work)


@dataclass(slots=True, eq=False)
class ReadOn(Operation):
    """Ask an iterable for its next samples; one worker, in order.

    The iterator is opened when the first row of an epoch is wanted and dropped at its
    end. One that raised is asked again, for the next row. A generator cannot go on
    then, nor can what reads from one: where nothing follows an error, that error is
    noted for the end, too, lest the rest of the epoch be missing without a word.
    """

    stage: str
    dataset: Iterable[Any]
    _epoch: int = -1
    _ended: bool = False
    _iterator: Iterator[Any] | None = None
    _skip: int = 0
    # What the iterator raised, if it has given nothing since.
    _error: BaseException | None = None

    def restart(self, skip: int = 0) -> None:
        """Begin again with the next row wanted, leaving out the first `skip` rows."""
        self._epoch, self._iterator, self._error, self._skip = -1, None, None, skip

    def run(self, work: Work) -> None:
        epoch, wanted = work.chunk.context.epoch, len(work.chunk)
        if epoch != self._epoch:
            self._epoch, self._ended = epoch, False
            self._iterator = self._error = None
        samples: list[Any] = []
        offsets: list[int] = []
        at = 0
        while at < wanted and not self._ended:
            error = self._read(samples, wanted - at)
            offsets += range(at, at + len(samples) - len(offsets))
            at = len(samples) + len(work.failures or ())
            if error is not None:
                work.fail(at, error, self.stage, cut_short=self._ended)
                at += 1
        work.ended = self._ended
        work.dropped += wanted - at
        work.samples, work.offsets = samples, offsets

    def _read(self, samples: list[Any], count: int) -> BaseException | None:
        """Add `count` samples, or fewer at the end; return the error of the next row.

        `list.extend` keeps what an iterator gave before it raised. The iterator is
        asked by `next` alone: the `iter` of some begins from the start.
        """
        before = len(samples)
        try:
            samples.extend(map(next, repeat(self._open(), count)))
        except BaseException as error:  # noqa: BLE001 it is the trainer's
            self._error = error
            return error
        if len(samples) > before:
            self._error = None
        self._ended = len(samples) < before + count
        if self._ended:
            self._iterator = None
        if self._error is not None:
            add_note(self._error, CUT_SHORT.format(self.stage))
        return self._error

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(())  # it ends here if it cannot be opened
            self._iterator = iter(self.dataset)
            left_out, self._skip = self._skip, 0
            for _ in range(left_out):
                with contextlib.suppress(Exception):  # it had a row like any other
                    next(self._iterator, None)
        return self._iterator


CUT_SHORT = (
    "penstock: {} gave nothing more after this error, so the rest of its epoch would be"
    " missing; let its iterator go on after an error (a generator cannot)"
)


NO_SAMPLE = (
    "{} returned None, which is no sample; a map function returns the new sample (is a"
    " `return` missing?). To leave samples out use filter() or select()."
)
NO_BATCH = (
    "{} returned None, which is no batch; a map function behind batch() returns the new"
    " batch, also where it changes the one it is given (is a `return` missing?)"
)


@dataclass(frozen=True, slots=True)
class Map(Calling):
    """Call a function on each sample."""

    stage: str
    number: int
    """Which stage of the pipeline this is, caches not counted: keys its draws."""
    function: Callable[..., Any]
    wants_rng: bool = False
    wants_ctx: bool = False
    none: ClassVar[str] = NO_SAMPLE

    def begin(self, work: Work) -> Calls:
        """Hand each sample to the function, with what else it wants."""
        samples = work.watched(work.samples)
        if self.wants_rng or self.wants_ctx:
            calls = map(self._call, samples, *self._extras(work))
        else:
            calls = map(self.function, samples)
        return Calls(calls, len(work.samples), work)

    def finish(self, work: Work, results: Work) -> None:
        """Refuse None."""
        if any(sample is None for sample in results.samples):
            self._blame_none(work)

    def _extras(self, work: Work) -> tuple[Iterable[Any], ...]:
        chunk = work.chunk
        at = work.offsets if work.offsets is not None else slice(None)
        return (
            repeat(work),
            chunk.rounds[at].tolist(),
            chunk.indices[at].tolist(),
        )

    def _call(self, sample: Any, work: Work, round_: int, index: int) -> Any:
        extras: dict[str, Any] = {}
        if self.wants_rng:
            extras["rng"] = work.random.at(round_, index, self.number)
        if self.wants_ctx:
            extras["ctx"] = work.chunk.context
        return self.function(sample, **extras)

    def _blame_none(self, work: Work) -> None:
        error = self.none.format(self.stage)
        for at, sample in enumerate(work.samples):
            if sample is None:
                work.fail(at, SampleError(error), self.stage)
        work.keep(work.samples, [sample is not None for sample in work.samples])


class BatchMap(Map):
    """Call a function on a whole batch; its draws depend on the batch alone."""

    __slots__ = ()
    none: ClassVar[str] = NO_BATCH

    @classmethod
    def of(cls, each: Map, rank: int) -> BatchMap:
        """Return what does to batches what `each` would do to samples.

        Args:
            each: of the pipeline.
            rank: whose batches these are: each rank's draws are its own.
        """
        number = each.number + (rank << RANK_BITS)
        return cls(each.stage, number, each.function, each.wants_rng, each.wants_ctx)

    def _extras(self, work: Work) -> tuple[Iterable[Any], ...]:
        context = work.chunk.context
        return repeat(work), (context.epoch,), (context.step,)


RANK_BITS = 32
"""Numbers of stages are smaller than 2 to the power of this."""


@dataclass(frozen=True, slots=True)
class Filter(Calling):
    """Leave out the samples a function says no to."""

    stage: str
    predicate: Callable[[Any], Any]

    def begin(self, work: Work) -> Calls:
        """Ask about each sample; the answers do not take their place."""
        flags = Work(work.chunk, work.random, work.samples, work.offsets)
        calls = map(self.predicate, work.watched(work.samples))
        return Calls(calls, len(work.samples), flags)

    def finish(self, work: Work, results: Work) -> None:
        """Keep the samples whose answer is yes."""
        answers = results.samples
        apply(results, self.stage, map(bool, answers), len(answers))
        failed = {failure.row for failure in results.failures or ()}
        work.failures = [*(work.failures or ()), *(results.failures or ())]
        results.failures = None
        if failed:
            work.keep(work.samples, [row not in failed for row in work.rows()])
        work.dropped += results.samples.count(False)
        work.keep(work.samples, results.samples)


def timed(
    operation: Operation, work: Work, share: float | None
) -> tuple[int, int, int]:
    """Run an operation.

    Args:
        operation: what to run.
        work: the rows.
        share: of its time that it is taken to be on a CPU; None: that is measured.

    Returns:
        Its nanoseconds, those on a CPU, and the bytes of a sample that it made.
    """
    start_ns = time.perf_counter_ns()
    begun_ns = time.thread_time_ns() if share is None else 0
    operation.run(work)
    cpu_ns = time.thread_time_ns() - begun_ns if share is None else 0
    run_ns = time.perf_counter_ns() - start_ns
    if share is not None:
        cpu_ns = int(share * run_ns)
    return run_ns, cpu_ns, size_of(work.samples[0]) if work.samples else 0


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of one segment, in order.

    Args:
        operations: at least one; the first of the pipeline's first segment reads.
        places: the stage whose batches the results go into; empty: they go on to a next
            segment.
        doubtful: objects of the user's which nobody said that threads may share. One
            thread of a process uses them first; then they are looked at.
        batches: collates the rows of a batch in the worker process that has made all
            of them; None: they are collated in the trainer, if there is a collate_fn.
        watched: objects of the user's in which a worker may keep a count, or a cache,
            as one worker was asked for: it tells if it does.
    """

    operations: tuple[Operation, ...]
    places: str = ""
    doubtful: tuple[Any, ...] = ()
    batches: Buffers | None = None
    watched: tuple[Any, ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        """What is done to samples, and to batches, as the log names it."""
        stages = tuple(operation.stage for operation in self.operations)
        return (*stages, self.places) if self.places else stages

    def enter(self, number: int) -> None:
        """Run in worker process `number` from here on."""
        for operation in self.operations:
            operation.enter(number)

    def leave(self) -> None:
        """End this worker process' part."""
        for operation in self.operations:
            operation.leave()

    def run(
        self,
        chunk: Chunk,
        inputs: list[Any] | None,
        sink: Sink | None,
        random: SampleRandom,
        watch: Watch | None = None,
        clock: CpuClock | None = None,
    ) -> Outcome:
        """Work on a chunk; place the results in `sink`, or return them without one.

        Args:
            chunk: the rows.
            inputs: their samples, as the segment before left them.
            sink: takes the results; None: they are returned.
            random: of the worker.
            watch: of the samples.
            clock: of the worker; None: its CPU time is read.
        """
        clock, start_ns = clock or CpuClock(), time.perf_counter_ns()
        share = clock.begin()
        work, parts = self.work(chunk, inputs, random, share, watch)
        made_ns = time.perf_counter_ns() - start_ns
        outcome = self.finish(work, sink)
        outcome.run_ns = time.perf_counter_ns() - start_ns
        outcome.cpu_ns = clock.end(outcome.run_ns)
        outcome.parts = self.parted(parts, outcome, made_ns)
        return outcome

    def work(
        self,
        chunk: Chunk,
        inputs: list[Any] | None,
        random: SampleRandom,
        share: float | None = None,
        watch: Watch | None = None,
    ) -> tuple[Work, Parts]:
        """Do it to a chunk; return what became of it, and its parts as an `Outcome`.

        Args:
            chunk: the rows.
            inputs: their samples, as the segment before left them.
            random: of the worker.
            share: of each part's time that is taken to be on a CPU; None: measured.
            watch: of the samples.
        """
        work = Work(chunk, random, inputs or [], watch=watch)
        if len(self.operations) == 1:
            self.operations[0].run(work)  # what it takes is what all of it takes
            return work, ()
        return work, tuple(timed(each, work, share) for each in self.operations)

    def parted(self, parts: Parts, outcome: Outcome, made_ns: int) -> Parts:
        """Return what each stage took, that of placing included; empty: there is one.

        Args:
            parts: of the operations; empty: there is one.
            outcome: of all of it.
            made_ns: after so many nanoseconds the samples were made.
        """
        if not self.places:
            return parts
        placing_ns = outcome.run_ns - made_ns
        computing_ns = min(placing_ns, outcome.cpu_ns)  # copies wait for nothing
        if not parts:
            nbytes = outcome.nbytes // max(outcome.done, 1)
            parts = ((made_ns, outcome.cpu_ns - computing_ns, nbytes),)
        return *parts, (placing_ns, computing_ns, 0)

    def finish(self, work: Work, sink: Sink | None) -> Outcome:
        """Place what is left of the rows, or return it; their times are not known."""
        outcome = Outcome(
            done=len(work.chunk),
            failures=work.failures or [],
            dropped=work.dropped,
            ended=work.ended,
        )
        if sink is None:
            outcome.outputs, outcome.offsets = list(work.samples), work.offsets
            outcome.nbytes = size_of_all(work.samples)
        elif work.samples:
            outcome.nbytes = sink.place(work.rows(), work.samples)
        return outcome
