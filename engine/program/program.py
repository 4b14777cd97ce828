"""A segment's body: the functions that run on a chunk, one after another.

A program has no queue and no lock, so the same one can run in the trainer's thread, in
worker threads and in other processes. Each operation runs over all rows of the chunk
before the next one does. A row whose function raised is set aside; the others go on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from ...errors import SampleError, add_note, set_on
from ..batch.array_rows import ArrayRows, TableRows
from ..batch.buffer import BatchBuffer
from ..batch.layout import size_of, size_of_all
from ..core.connector import SampledClock
from ..core.in_flight import Chunk, Failure, Outcome, Parts
from ..plan import as_yielded

if TYPE_CHECKING:  # the first engine loads it, in the trainer's thread
    from .randomness import SampleRandom

LOGGER = logging.getLogger("penstock")
WANTS_ROWS = (
    "%s gets rows of a table: to make a dict of %d columns takes %.1f us each time. The"
    " same function after batch() gets whole columns"
)
# Names of the stages of which this was said.
TOLD_OF_ROWS: set[str] = set()

# Observes which sample a worker is at: a `StatusLine` (far/child.py).
Watch = Any


@dataclass(slots=True)
class Work:
    """The rows of a chunk on their way through a program."""

    chunk: Chunk
    random: SampleRandom
    samples: Sequence[Any]
    offsets: list[int] | None = None
    """Rows of the chunk that `samples` belong to; None means all."""
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
    ended: bool = False
    watch: Watch | None = None

    def watched(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return `items`, one per sample, observed as they are taken."""
        if self.watch is not None:
            items = self.watch.each(items, self.offsets or range(len(self.chunk)))
        return items

    def make_rows(self, stage: str) -> None:
        """Make dicts of the rows of a table: the function of this stage wants them."""
        if not isinstance(self.samples, TableRows):
            return
        begun_ns = time.perf_counter_ns()
        columns, self.samples = len(self.samples.names), list(self.samples)
        if stage not in TOLD_OF_ROWS:
            TOLD_OF_ROWS.add(stage)
            us = (time.perf_counter_ns() - begun_ns) / 1000 / max(1, len(self.samples))
            LOGGER.info(WANTS_ROWS, stage, columns, us)

    def rows(self) -> Sequence[int]:
        """Return the row of the batch that each sample belongs to."""
        first = self.chunk.first_row
        if self.offsets is None:
            return range(first, first + len(self.chunk))
        return [first + offset for offset in self.offsets]

    def keep(self, samples: Sequence[Any], kept: Iterable[bool]) -> None:
        """Continue with those of `samples` that are `kept`."""
        flags = list(kept)
        if all(flags):
            self.samples = samples
            return
        before: Sequence[int] = self.offsets or range(len(flags))
        self.offsets = [at for at, flag in zip(before, flags, strict=True) if flag]
        self.samples = [s for s, flag in zip(samples, flags, strict=True) if flag]

    def continue_with(self, results: list[Any], failed: set[int]) -> None:
        """Continue with `results`, except those that failed."""
        if failed:
            self.keep(results, (at not in failed for at in range(len(results))))
        else:
            self.samples = results

    def fail(
        self, at: int, error: BaseException, stage: str, *, cut_short: bool = False
    ) -> None:
        """Record that the sample `at` (its position in `samples`) raised."""
        offset = at if self.offsets is None else self.offsets[at]
        stage = getattr(error, "penstock_stage", stage)  # of several in one
        index, row = self.chunk.index(offset), self.chunk.first_row + offset
        self.failures.append(Failure(error, stage, index, row, cut_short=cut_short))

    def fail_all(self, error: BaseException, stage: str) -> None:
        """Record that none of the rows could be started."""
        self.samples, self.offsets = [], None
        for at in range(len(self.chunk)):
            self.fail(at, error, stage)
        self.offsets = []


class Operation(ABC):
    """One stage within a program."""

    __slots__ = ()
    stage: str
    """Its name in the log and in errors."""

    def enter(self, number: int) -> None:  # noqa: B027 few need it
        """Note, before the first chunk, that this is worker process `number`."""

    @abstractmethod
    def run(self, work: Work) -> None:
        """Apply it to all rows of `work`."""

    def leave(self) -> None:  # noqa: B027 few need it
        """Note that this worker process is about to end."""

    def restart(self, skip: int = 0) -> None:  # noqa: B027 only iterables need it
        """Let go of a place in the data; start over, without the first `skip` rows."""


# Replaces the sample of a row whose function raised, until it is set aside.
FAILED = object()


def apply(work: Work, stage: str, calls: Iterable[Any], count: int) -> None:
    """Replace the samples by the results of `count` lazy calls, setting failures aside.

    `list.extend` keeps what an iterator yielded before it raised, and the iterator
    continues after the item that raised. So the loop over all rows runs in C while
    everything succeeds.
    """
    calls = iter(calls)
    results: list[Any] = []
    failed_positions: set[int] = set()
    while len(results) < count:
        try:
            results.extend(calls)
            if len(results) < count:  # extend took a StopIteration for the end
                raise SampleError(STOPPED.format(stage))  # noqa: TRY301 set aside below
        except BaseException as error:
            if len(results) >= count:  # a Ctrl-C after the last call had finished
                raise
            failed_positions.add(len(results))
            work.fail(len(results), error, stage)
            results.append(FAILED)
    work.continue_with(results, failed_positions)


STOPPED = (
    "the function of {} raised StopIteration, which Python takes for the end of an "
    "iteration; a stage's function must return a sample or raise another exception"
)


def of_stage(error: BaseException, stage: str) -> BaseException:
    """Return the error, marked with the stage that raised it: see `Work.fail`."""
    set_on(error, "penstock_stage", stage)
    return error


class Calls(NamedTuple):
    """The calls of an operation, before they are made."""

    each: Iterator[Any]
    """Makes one call per step; continues after one that raised."""
    number: int
    results: Work
    """The work that the results belong to."""


class Calling(Operation):
    """An operation that calls a function once for every sample.

    The calls are made between its two halves: one after another, or, for a coroutine
    function, awaited (`Coroutines` in workers.py).
    """

    __slots__ = ()

    @abstractmethod
    def begin(self, work: Work) -> Calls:
        """Prepare the calls."""

    def finish(self, work: Work, results: Work) -> None:
        """Check the results, once all calls are made."""

    def run(self, work: Work) -> None:
        calls = self.begin(work)
        apply(calls.results, self.stage, calls.each, calls.number)
        self.finish(work, calls.results)


def fetch(work: Work, stage: str, get_many: Callable[[Any], Any]) -> None:
    """Read a whole batch at once, as torch's fetcher does; it counts as row 0."""
    try:
        data = get_many(as_yielded(work.chunk.indices))
    except BaseException as error:  # noqa: BLE001 the trainer raises it
        work.fail_all(error, stage)
    else:
        work.samples, work.offsets = [data], [0]


@dataclass(frozen=True, slots=True)
class Read(Calling):
    """Reads the chunk's indices from the dataset."""

    stage: str
    get: Callable[[int], Any]
    get_many: Callable[[Any], Any] | None = None
    """The dataset's `__getitems__`, if it has one."""
    whole: bool = False
    """Whether `get_many` reads whole batches, for a `collate_fn` that gets the result
    as it is."""
    by_array: bool = False
    """Whether `get_many` takes an array of indices, `int64 [n]`, instead of a list."""

    def run(self, work: Work) -> None:
        if self.get_many is not None and self.whole:
            fetch(work, self.stage, self.get_many)
            return
        if self.get_many is not None:
            indices = (
                work.chunk.indices if self.by_array else work.chunk.indices.tolist()
            )
            try:
                samples = self.get_many(indices)
            except Exception:  # noqa: BLE001 one by one, the bad sample shows itself
                samples = ()
            listed = isinstance(samples, (list, tuple, ArrayRows, TableRows))
            if listed and len(samples) == len(indices):
                work.samples = samples
                return
        Calling.run(self, work)

    def begin(self, work: Work) -> Calls:
        """Request one sample after another."""
        indices = work.chunk.indices.tolist()
        return Calls(map(self.get, work.watched(indices)), len(indices), work)


@dataclass(slots=True, eq=False)
class ReadOn(Operation):
    """Reads the next samples of an iterable; one worker, in order.

    The iterator is opened for the first row of an epoch and dropped at the epoch's end.
    After an error it is asked for the next row. A generator cannot continue then, nor
    can anything that reads from one. If nothing follows an error, the error stands for
    the rest of the epoch, which would otherwise be missing without a word.
    """

    stage: str
    dataset: Iterable[Any]
    _epoch: int = -1
    _ended: bool = False
    _iterator: Iterator[Any] | None = None
    _skip: int = 0
    # The error that the iterator raised, if it has yielded nothing since.
    _error: BaseException | None = None

    def restart(self, skip: int = 0) -> None:
        """Restart with the next row requested, skipping the first `skip` rows."""
        self._epoch, self._iterator, self._error, self._skip = -1, None, None, skip

    def run(self, work: Work) -> None:
        epoch, count = work.chunk.context.epoch, len(work.chunk)
        if epoch != self._epoch:
            self._epoch, self._ended = epoch, False
            self._iterator = self._error = None
        samples: list[Any] = []
        offsets: list[int] = []
        at = 0
        while at < count and not self._ended:
            error = self._read(samples, count - at)
            offsets += range(at, at + len(samples) - len(offsets))
            at = len(samples) + len(work.failures)
            if error is not None:
                work.fail(at, error, self.stage, cut_short=self._ended)
                at += 1
        work.ended = self._ended
        work.dropped += count - at
        work.samples, work.offsets = samples, offsets

    def _read(self, samples: list[Any], count: int) -> BaseException | None:
        """Add `count` samples, or fewer at the end; return the error of the next row.

        `list.extend` keeps what an iterator yielded before it raised. Only `next` is
        called on the iterator: the `iter` of some starts over.
        """
        before = len(samples)
        try:
            samples.extend(map(next, repeat(self._open(), count)))
        except BaseException as error:  # noqa: BLE001 the trainer raises it
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
            self._iterator = iter(())  # stays empty if it cannot be opened
            begin = getattr(self.dataset, NUMBERED, None)
            self._iterator = iter(self.dataset) if begin is None else begin(self._epoch)
            left_out, self._skip = self._skip, 0
            for _ in range(left_out):
                with contextlib.suppress(Exception):  # it counted as a row, too
                    next(self._iterator, None)
        return self._iterator


CUT_SHORT = (
    "penstock: {} yielded nothing more after this error, so the rest of its epoch would"
    " be missing; let its iterator continue after an error (a generator cannot)"
)


NO_SAMPLE = (
    "{} returned None, which is not a sample; a map function must return the new sample"
    " (is a `return` missing?). To leave samples out, use filter() or select()."
)
NO_BATCH = (
    "{} returned None, which is not a batch; a map function after batch() must return"
    " the new batch, even if it changes its argument (is a `return` missing?)"
)


# The method of an iterable that begins an epoch, given its number.
NUMBERED = "__penstock_epoch__"
# The method of a function that takes several samples at once.
TOGETHER = "__penstock_rows__"
# Most samples that it takes.
AT_ONCE = 16
# Samples that a lease should have for it. With one photograph in each, two threads lost
# a tenth of their time between the calls.
WORTH_A_CALL = 8


# Takes several samples, what each draws with, and the context.
Rows: TypeAlias = Callable[..., Sequence[Any]]


def offered(function: Any, name: str) -> Callable[..., Any] | None:
    """Return what a function offers under this name, or None.

    A class that changes `__call__` alone does other things than the method that it
    inherits.
    """
    if isinstance(function, FunctionType):
        return vars(function).get(name)
    for kind in type(function).__mro__:
        if vars(kind).get(name) is not None:
            method: Callable[..., Any] = getattr(function, name)
            return method
        if name in vars(kind) or "__call__" in vars(kind):
            break
    return None


@dataclass(frozen=True, slots=True)
class Map(Calling):
    """Calls a function on each sample."""

    stage: str
    number: int
    """The stage's number in the pipeline, caches not counted: seeds its draws."""
    function: Callable[..., Any]
    wants_rng: bool = False
    wants_ctx: bool = False
    one_by_one: bool = False
    """Whether each sample has a time limit, and is therefore passed alone."""
    none: ClassVar[str] = NO_SAMPLE

    def begin(self, work: Work) -> Calls:
        """Pass each sample to the function, with the other arguments it takes."""
        work.make_rows(self.stage)
        samples = work.watched(work.samples)
        together = self.together()
        if together is not None:
            outputs = self._made_together(together, work)
            calls = map(self._rest, outputs, samples, *self._extras(work))
        elif self.wants_rng or self.wants_ctx:
            calls = map(self.call, samples, *self._extras(work))
        else:
            calls = map(self.function, samples)
        return Calls(calls, len(work.samples), work)

    def together(self) -> Rows | None:
        """Return what makes several samples at once, if there is such a function."""
        return None if self.one_by_one else offered(self.function, TOGETHER)

    def _made_together(self, together: Rows, work: Work) -> list[Any]:
        """Pass samples to the function, several at a time; None for those it leaves.

        If it raises, they are passed one by one, and the bad one shows itself.
        """
        outputs: list[Any] = []
        _, rounds, indices = self._extras(work)
        for start in range(0, len(work.samples), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            samples = work.samples[part]
            if work.watch is not None:
                work.watch.all()
            try:
                rngs = map(self._stream, repeat(work), rounds[part], indices[part])
                several = together(samples, rngs, work.chunk.context)
            except Exception:  # noqa: BLE001 it is raised again, for the bad sample
                several = ()
            outputs += (
                several if len(several) == len(samples) else [None] * len(samples)
            )
        return outputs

    def _stream(self, work: Work, round_: int, index: int) -> Any:
        """Return what the function for several samples draws one of them with."""
        return work.random.at(round_, index, self.number)

    def _rest(
        self, output: Any, sample: Any, work: Work, round_: int, index: int
    ) -> Any:
        """Return what was made of a sample together with others, or make it now."""
        return self.call(sample, work, round_, index) if output is None else output

    def finish(self, work: Work, results: Work) -> None:
        """Refuse None."""
        if all(sample is not None for sample in results.samples):
            return
        for at, sample in enumerate(work.samples):
            if sample is None:
                work.fail(at, SampleError(self.none.format(self.stage)), self.stage)
        work.keep(work.samples, [sample is not None for sample in work.samples])

    def _extras(self, work: Work) -> tuple[Any, ...]:
        chunk, at = work.chunk, slice(None) if work.offsets is None else work.offsets
        return (
            repeat(work),
            chunk.rounds[at].tolist(),
            chunk.indices[at].tolist(),
        )

    def call(self, sample: Any, work: Work, round_: int, index: int) -> Any:
        """Return what the function makes of one sample."""
        extras: dict[str, Any] = {}
        if self.wants_rng:
            extras["rng"] = work.random.at(round_, index, self.number)
        if self.wants_ctx:
            extras["ctx"] = work.chunk.context
        return self.function(sample, **extras)


class BatchMap(Map):
    """Calls a function on a whole batch; its draws depend only on the batch."""

    __slots__ = ()
    none: ClassVar[str] = NO_BATCH

    @classmethod
    def of(cls, each: Map, rank: int) -> BatchMap:
        """Return an operation that does to batches what `each` does to samples.

        Args:
            each: an operation of the pipeline.
            rank: the rank whose batches these are: each rank has its own draws.
        """
        return cls(
            stage=each.stage,
            number=each.number + (rank << RANK_BITS),
            function=each.function,
            wants_rng=each.wants_rng,
            wants_ctx=each.wants_ctx,
            one_by_one=True,
        )

    def _extras(self, work: Work) -> tuple[Any, ...]:
        context = work.chunk.context
        return repeat(work), (context.epoch,), (context.step,)


# Numbers of stages are below 2 to the power of this.
RANK_BITS = 32


@dataclass(frozen=True, slots=True)
class Filter(Calling):
    """Leaves out the samples for which a function returns false."""

    stage: str
    predicate: Callable[[Any], Any]

    def begin(self, work: Work) -> Calls:
        """Ask about each sample, keeping the samples apart from the answers."""
        work.make_rows(self.stage)  # what is asked about is what is kept
        flags = Work(work.chunk, work.random, work.samples, work.offsets)
        return Calls(
            map(self.predicate, work.watched(work.samples)), len(work.samples), flags
        )

    def finish(self, work: Work, results: Work) -> None:
        """Keep the samples whose answer is true."""
        answers = results.samples
        apply(results, self.stage, map(bool, answers), len(answers))
        failed_rows = {failure.row for failure in results.failures}
        work.failures += results.failures
        results.failures.clear()  # breaks a cycle: the tracebacks' frames hold it
        if failed_rows:
            work.keep(work.samples, [row not in failed_rows for row in work.rows()])
        work.dropped += results.samples.count(False)
        work.keep(work.samples, results.samples)


def timed(
    operation: Operation, work: Work, share: float | None
) -> tuple[int, int, int]:
    """Run an operation.

    Args:
        operation: what to run.
        work: the rows.
        share: assumed share of its time on a CPU; None means to measure it.

    Returns:
        Its wall time (ns), its CPU time (ns), and the bytes of a sample it made.
    """
    start_ns = time.perf_counter_ns()
    begun_ns = time.thread_time_ns() if share is None else 0
    operation.run(work)
    cpu_ns = time.thread_time_ns() - begun_ns if share is None else 0
    run_ns = time.perf_counter_ns() - start_ns
    nbytes = size_of(work.samples[0]) if work.samples else 0
    return run_ns, cpu_ns if share is None else int(share * run_ns), nbytes


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a sample that could not be read in this process."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of one segment, in order.

    Args:
        operations: at least one; the first of the pipeline's first segment reads.
        places: the stage whose batches the results go into; empty if they go to another
            segment.
        doubtful: user objects that nobody declared safe to share between threads. One
            thread of a process uses them first, and then they are examined.
        watched: user objects in which a worker may keep a count or a cache, because the
            user asked for one worker: it reports changes.
    """

    operations: tuple[Operation, ...]
    places: str = ""
    doubtful: tuple[Any, ...] = ()
    watched: tuple[Any, ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        """The names, as in the log, of what is done to samples and batches."""
        stages = tuple(operation.stage for operation in self.operations)
        return (*stages, self.places) if self.places else stages

    @property
    def least(self) -> int:
        """Rows of a chunk from which it does not lose time."""
        maps = (
            operation for operation in self.operations if isinstance(operation, Map)
        )
        return WORTH_A_CALL if any(operation.together() for operation in maps) else 1

    def enter(self, number: int) -> None:
        """Note that it runs in worker process `number` from now on."""
        for operation in self.operations:
            operation.enter(number)

    def leave(self) -> None:
        """Note that this worker process is about to end."""
        for operation in self.operations:
            operation.leave()

    def restart(self, skip: int = 0) -> None:
        """Let go of a place in the data, as `Operation.restart` does."""
        self.operations[0].restart(skip)

    def run(
        self,
        chunk: Chunk,
        inputs: Sequence[Any] | None,
        sink: BatchBuffer | None,
        random: SampleRandom,
        watch: Watch | None = None,
        clock: SampledClock | None = None,
    ) -> Outcome:
        """Work on a chunk; place the results in `sink`, or return them without one.

        Args:
            chunk: the rows.
            inputs: their samples, from the segment before.
            sink: takes the results; None returns them.
            random: generator of the worker.
            watch: observes the samples.
            clock: CPU clock of the worker; None: its CPU time is read every time.
        """
        clock, start_ns = clock or SampledClock(), time.perf_counter_ns()
        work, parts = self.work(chunk, inputs, random, clock.begin(), watch)
        made_ns = time.perf_counter_ns() - start_ns
        outcome = self.finish(work, sink)
        outcome.run_ns = time.perf_counter_ns() - start_ns
        outcome.cpu_ns = clock.end(outcome.run_ns)
        outcome.parts = self.parted(parts, outcome, made_ns)
        return outcome

    def work(
        self,
        chunk: Chunk,
        inputs: Sequence[Any] | None,
        random: SampleRandom,
        share: float | None = None,
        watch: Watch | None = None,
    ) -> tuple[Work, Parts]:
        """Run all operations on a chunk; return the work, and its parts for `Outcome`.

        Args:
            chunk: the rows.
            inputs: their samples, from the segment before.
            random: generator of the worker.
            share: assumed share of each part's time on a CPU; None measures it.
            watch: observes the samples.
        """
        work = Work(chunk, random, inputs or [], watch=watch)
        if inputs and type(inputs[0]) is Unread:
            work.fail_all(inputs[0].error, self.operations[0].stage)
            return work, ((0, 0, 0),) * len(self.operations)
        if len(self.operations) == 1:
            self.operations[0].run(work)  # its cost is the whole cost
            return work, ()
        return work, tuple(
            timed(operation, work, share) for operation in self.operations
        )

    def parted(self, parts: Parts, outcome: Outcome, made_ns: int) -> Parts:
        """Return the cost of each stage, including placing.

        Args:
            parts: the costs of the operations; empty if there is only one.
            outcome: the outcome of the whole chunk.
            made_ns: the time after which the samples were made, in nanoseconds.
        """
        placing_ns = outcome.run_ns - made_ns if self.places else 0
        computing_ns = min(placing_ns, outcome.cpu_ns)  # copies do not wait
        if not parts:
            nbytes = outcome.nbytes // max(outcome.done, 1)
            run_ns = outcome.run_ns - placing_ns
            parts = ((run_ns, outcome.cpu_ns - computing_ns, nbytes),)
        return (*parts, (placing_ns, computing_ns, 0)) if self.places else parts

    def finish(self, work: Work, sink: BatchBuffer | None) -> Outcome:
        """Place or return the remaining rows; their times are unknown."""
        outcome = Outcome(
            done=len(work.chunk),
            failures=work.failures,
            dropped=work.dropped,
            ended=work.ended,
        )
        if sink is None:
            whole = isinstance(work.samples, TableRows)  # rows, if the next wants some
            outcome.outputs = work.samples if whole else list(work.samples)
            outcome.offsets = work.offsets
            outcome.nbytes = size_of_all(work.samples)
        elif work.samples:
            outcome.nbytes = sink.place(work.rows(), work.samples)
        return outcome
