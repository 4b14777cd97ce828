"""The engine's pure core: where each row is, who may work on it, what is ready.

It has no lock, no clock and no thread. Each event comes with its time, and `wakes`
collects who must be woken, for the shell (connector.py) to act on. Segments are
numbered along the data, and batches in the order in which they leave: by step, if the
core makes all batches of a plan. Rows wait between segments as leases, ordered by
address (number, row), so work may finish in any order. Invariants:

- an opened row is in exactly one place: not yet handed out, in a lease that waits for
  one segment, in one that is out, or finished (placed, failed or dropped);
- a lease is settled once: settling it again, or settling one from before `restart`, has
  no effect;
- while it runs, the oldest unfinished batch may always be worked on, in every segment,
  whatever bounds and credits say, so progress is always possible (proof in `_limit` and
  `Reservations.open`).

There are three states. A cell names the state that follows:

    state      hands out work   delivers   pause     unpause   close
    RUNNING    yes              yes        PAUSED    -         CLOSED
    PAUSED     no               yes        -         RUNNING   CLOSED
    CLOSED     no               no         -         -         -

`until`, the first step that may not be opened yet, is not a state: it is where the plan
ends for now.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..observe.observation import ConnectorObservation
from ..plan import PlannedBatch, Planning
from .in_flight import InFlightBatch, Lease, Onward, Outcome, Reservations, Wait, runs

# The trainer's end, among the segment numbers in `wakes`.
FEED = -1
# Wakes everybody who waits at a segment.
ALL = 1 << 30
# Work in one lease: long next to its hand-over (some 20 us), short next to a batch.
LEASE_NS = 1_500_000
# Work in a lease handed to another process, which takes some 300 us of CPU in all.
FAR_LEASE_NS = 20_000_000
# Longest lease of rows that mostly wait: these pay for the hand-over only later.
PATIENCE_NS = 200_000_000
# Weight of the latest lease in the estimated cost of a row.
LEARNING = 0.3


class State(Enum):
    """What a core is doing; the table is in the module's docstring."""

    RUNNING = "running"
    PAUSED = "paused"
    CLOSED = "closed"


class Gauge:
    """How many rows wait in one connector, integrated over time."""

    __slots__ = ("_area", "_empty", "_full", "_last", "capacity", "level")

    def __init__(self, capacity: int, now_ns: int) -> None:
        self.capacity, self.level, self._last = capacity, 0, now_ns
        self._area = self._empty = self._full = 0

    def move(self, level: int, now_ns: int) -> None:
        """End the current interval, and continue at `level` rows."""
        elapsed = now_ns - self._last
        if self.level <= 0:
            self._empty += elapsed
        else:
            self._area += self.level * elapsed
            if self.level >= self.capacity:
                self._full += elapsed
        self._last, self.level = now_ns, level

    def read(
        self, now_ns: int, window_s: float, row_bytes: float = 0.0
    ) -> ConnectorObservation:
        """Return what was seen up to now, since the run began `window_s` ago."""
        self.move(self.level, now_ns)
        share = 1e-9 / window_s if window_s > 0 else 0.0  # of a nanosecond
        return ConnectorObservation(
            occupancy=self._area * share,
            capacity=self.capacity,
            empty=self._empty * share,
            full=self._full * share,
            row_bytes=row_bytes,
        )


@dataclass(slots=True, eq=False)
class SegmentState:
    """One segment's part of the core: the rows that wait for it, and its bounds."""

    head: int
    """Oldest batch it has not finished."""
    prefetch: int
    """Batches it may work ahead of its consumer."""
    workers: int
    """Leases that its workers hold at once."""
    gauge: Gauge
    """Rows waiting after it: for the next segment, or finished for the trainer."""
    ready: list[tuple[int, int, Lease]] = field(default_factory=list)
    """A heap of leases that may be handed out, by number of the batch and first row."""
    waiting: int = 0
    """Rows in `ready`."""
    lease_ns: int = LEASE_NS
    per_batch: bool = False
    """Whether it works on whole batches, after the segment that places their rows. Its
    leases then cover all rows of a batch, and their input is that batch."""
    in_order: bool = False
    """Whether it must work on one batch after another."""
    unsplit: bool = False
    """Whether each lease must cover a whole batch."""
    least: int = 1
    """Rows of a lease at least, if each worker finds one: a function takes several."""
    ahead: bool = True
    """Whether, inline, it may start a batch before the trainer asks for it. Not if it
    may overwrite the memory of the previous batch."""
    makers: int = 1
    """Workers elsewhere that each make a whole batch."""
    collates: bool = False
    """Whether workers elsewhere may make whole batches of their rows."""
    divides: bool = True
    """Whether several of them may share a batch that the trainer waits for."""
    inline: bool = False
    """Whether the trainer works on it, so nobody does while the trainer computes."""
    ns_per_row: float | None = None
    cpu_ns_per_row: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether a lease covers a whole batch, if none of its rows is handed out."""
        return self.collates and self.lease_ns >= FAR_LEASE_NS

    def lease_rows(self, rows: int) -> int:
        """Return the rows of a lease; one, until the first shows what a row costs.

        CPU time must pay for the hand-over, so rows that mostly wait may make a longer
        lease, as long as every worker still finds one within the prefetch bound. A lone
        worker shares a batch with nobody, so its leases are long.
        """
        if self.per_batch or self.unsplit or self.whole:
            return rows
        if self.ns_per_row is None:
            return 1
        per_row, lease_ns = max(self.ns_per_row, 1.0), self.lease_ns
        if self.workers == 1 and not self.inline:
            lease_ns = FAR_LEASE_NS
        paying_rows = lease_ns / max(self.cpu_ns_per_row, 1.0)
        share = self.prefetch * rows // self.workers
        longer = max(
            min(paying_rows, PATIENCE_NS / per_row, share), min(self.least, share)
        )
        return max(1, min(rows, int(max(lease_ns / per_row, longer))))

    def window(self, rows: int) -> int:
        """Batches it may be ahead: its prefetch size, plus what its workers hold."""
        return self.prefetch + self.span(rows) - 1

    def span(self, rows: int) -> int:
        """Batches of `rows` rows that its workers hold at once."""
        return -(-self.workers * self.lease_rows(rows) // rows)

    def learn(self, run_ns: int, cpu_ns: int, rows: int) -> None:
        """Adapt the size of the next leases to what some rows cost."""
        latest, latest_cpu, before = run_ns / rows, cpu_ns / rows, self.ns_per_row
        if before is None:
            before, self.cpu_ns_per_row = latest, latest_cpu
        self.ns_per_row = before + LEARNING * (latest - before)
        self.cpu_ns_per_row += LEARNING * (latest_cpu - self.cpu_ns_per_row)

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a row that waits here; 0 if none does."""
        waiting = sum(lease.input_bytes for _, _, lease in self.ready)
        return waiting / self.waiting if self.waiting else 0.0

    def push(self, lease: Lease) -> None:
        """Add rows that wait here."""
        number, first_row = lease.in_flight.number, lease.chunk.first_row
        heapq.heappush(self.ready, (number, first_row, lease))
        self.waiting += len(lease.chunk)

    def pop(self) -> Lease:
        """Take the earliest rows, enough for a worker, all of one batch."""
        _, _, lease = heapq.heappop(self.ready)
        rows, size = len(lease.chunk), self.lease_rows(len(lease.in_flight.rows))
        self.waiting -= rows
        if rows > size:
            self.push(lease.part(size, rows))
            return lease.part(0, size)
        # Leases that follow without a gap are added, while they fit.
        in_flight, first = lease.in_flight, lease.chunk.first_row
        ready, stop = self.ready, first + rows
        while (
            ready
            and ready[0][:2] == (in_flight.number, stop)
            and stop - first + len(ready[0][2].chunk) <= size
        ):
            _, _, more = heapq.heappop(ready)
            stop += len(more.chunk)
            self.waiting -= len(more.chunk)
            lease.input_bytes += more.input_bytes
            if lease.inputs is not None and more.inputs is not None:
                lease.inputs = [*lease.inputs, *more.inputs]
        if stop - first > rows:
            base = in_flight.first_row
            lease.chunk = in_flight.chunk(first - base, stop - base)
        return lease


@dataclass(slots=True, eq=False, repr=False)
class Core:
    """The state machine over all segments, the outbox and the reservations."""

    plan: Planning
    buffer_of: Callable[[PlannedBatch], Any]
    segments: list[SegmentState]
    reservations: Reservations
    head: int
    """The step that the trainer takes next."""
    state: State = State.RUNNING
    until: int | None = None
    """The first step that may not be opened yet; None means no limit."""
    unplanned: Exception | None = None
    """What a function of the schedule raised for `next_step`; due after the others."""
    outbox: dict[int, tuple[InFlightBatch, Any]] = field(default_factory=dict)
    """Finished batches by step, popped in order: the only reordering there is."""
    batches_in_flight: dict[int, InFlightBatch] = field(default_factory=dict)
    leases: set[Lease] = field(default_factory=set)
    next_step: int = field(init=False)
    """The step that the source opens next."""
    wakes: dict[int, int] = field(default_factory=dict)
    """How many waiters of each segment (or FEED) may find something to do."""
    batch_rows: int = 1
    placing: int = field(init=False)
    """The segment that puts rows into batches; later ones work on whole batches."""

    def __post_init__(self) -> None:
        self.next_step = self.head
        self.placing = sum(not state.per_batch for state in self.segments) - 1

    # What a worker does

    def take(self, at: int, now_ns: int) -> Lease | Wait:
        """Hand out the earliest rows for segment `at`, or say what to wait for."""
        state, running = self.segments[at], self.state is State.RUNNING
        lease: Lease | Wait = Wait.CREDIT
        if state.ready:
            number = state.ready[0][0]
            due = (number == state.head or not state.in_order) and (
                number == self.head or state.ahead or not state.inline
            )
            if running and due and number <= self._limit(at):
                lease = state.pop()
                self._show_waiting(at, now_ns)
                if state.ready:
                    self._wake(at, 1)  # one was woken, perhaps for several leases
                all_rows = len(lease.chunk) == len(lease.in_flight.rows)
                lease.whole = at == 0 and state.whole and all_rows
        elif at > 0 and running:
            return Wait.INPUT
        elif running:
            batch = self._frontier()
            lease = batch if isinstance(batch, Wait) else self._lease_rows(batch, state)
        if isinstance(lease, Lease):
            self.leases.add(lease)
        return lease

    def settle(
        self, lease: Lease, outcome: Outcome, now_ns: int
    ) -> InFlightBatch | None:
        """Take back a lease; return its batch if all its rows are finished."""
        if self.state is State.PAUSED:  # whoever paused waits for the last of the work
            self._wake(FEED)
        if lease not in self.leases:
            return None
        self.leases.discard(lease)
        in_flight, at = lease.in_flight, lease.segment
        used_bytes = self._put_back(lease, outcome, now_ns)
        if not outcome.done:
            return None
        state = self.segments[at]
        before = state.span(self.batch_rows)
        state.learn(outcome.run_ns, outcome.cpu_ns, outcome.done)
        if state.span(self.batch_rows) > before:
            self._widened(at)
        self.reservations.use(in_flight.number, outcome.nbytes - used_bytes)
        in_flight.failures += outcome.failures
        in_flight.dropped += outcome.dropped
        in_flight.ended = in_flight.ended or outcome.ended
        if at > self.placing:
            in_flight.made = outcome.outputs
        elif outcome.outputs is not None:
            self._pass_on(lease, outcome, now_ns)
        self._count(in_flight, at, outcome)
        done = at > self.placing or in_flight.remaining[self.placing] == 0
        return in_flight if done else None

    def deliver(self, in_flight: InFlightBatch, batch: Any, now_ns: int) -> None:
        """Put a finished batch into the outbox, or before its next segment."""
        number = in_flight.number
        if self.state is State.PAUSED:  # as in `settle`
            self._wake(FEED)
        if self.batches_in_flight.get(number) is not in_flight:
            return  # it was dropped meanwhile
        if isinstance(batch, Onward):  # it waits for its segment
            at, chunk = batch.segment, in_flight.chunk(0, len(in_flight.rows))
            self._skip(in_flight, at)
            nbytes = self.reservations.held(number)
            self.segments[at].push(Lease(at, chunk, [batch.data], in_flight, nbytes))
            self._show_waiting(at, now_ns)
            self._wake(at, 1)
            return
        self._skip(in_flight, len(self.segments))
        whole = len(in_flight.rows.indices) >= self.batch_rows
        self.reservations.complete(number, in_flight.plan.image_size, whole=whole)
        self.outbox[number] = (in_flight, batch)
        self._show_outbox(now_ns)
        self._wake(FEED)
        self._wake(0, 1)

    # What the trainer's end does

    def pop(self, now_ns: int) -> tuple[InFlightBatch, Any] | None:
        """Take the next batch in order, or None if it is not ready."""
        step, ready = self.head, self.outbox.pop(self.head, None)
        if ready is None:
            return None
        del self.batches_in_flight[step]
        self.reservations.close(step)
        self.head = step + 1
        self._show_outbox(now_ns)
        self._wake_before(len(self.segments))
        return ready

    def pause(self) -> None:
        """Hand out no more work. Batches that are ready may still be popped."""
        if self.state is State.RUNNING:
            self.state = State.PAUSED

    def unpause(self) -> None:
        """End `pause`, and let everybody look again."""
        if self.state is State.PAUSED:
            self.state = State.RUNNING
        for at in range(len(self.segments)):
            self._wake(at)

    def extend(self, until: int | None) -> None:
        """Allow opening batches before the step `until`."""
        self.until = until
        self._wake(0)

    def restart(self, step: int, now_ns: int) -> None:
        """Drop everything in flight, and continue at `step`."""
        self.leases.clear()
        self.batches_in_flight.clear()
        self.outbox.clear()
        self.reservations.close_all()
        self.head, self.next_step, self.unplanned = step, step, None
        for at, state in enumerate(self.segments):
            state.head = step
            state.ready.clear()
            state.waiting = 0
            state.gauge.move(0, now_ns)
            self._wake(at)

    def close(self, now_ns: int) -> None:
        """Drop everything, permanently."""
        self.state = State.CLOSED
        self.restart(self.head, now_ns)
        self._wake(FEED)

    # What the tuner does

    def set_prefetch(self, at: int, batches: int) -> None:
        """Let segment `at` work this many batches ahead; its leases may grow."""
        state = self.segments[at]
        state.prefetch, state.gauge.capacity = batches, batches * self.batch_rows
        self._widened(at, ALL)

    def set_workers(
        self,
        at: int,
        workers: int,
        lease_ns: int = LEASE_NS,
        makers: int = 1,
        *,
        inline: bool = False,
    ) -> None:
        """Set the number of workers of segment `at`, and the time of a lease.

        Both widen its window if needed.

        Args:
            at: the segment.
            workers: leases that they hold at once.
            lease_ns: work in one of these.
            makers: how many make whole batches elsewhere.
            inline: whether its only worker is the trainer.
        """
        state = self.segments[at]
        state.workers, state.lease_ns, state.inline = workers, lease_ns, inline
        state.makers = makers
        self._widened(at, ALL)

    # Their parts

    def _limit(self, at: int) -> int:
        """Return the last step that segment `at` may work on.

        The consumer after it is at step `head`, and its workers span some more steps.
        So the step at `head` is always within the limit: no bound ever holds back the
        oldest unfinished batch.

        If all rows of a batch were dropped, its consumer has nothing to do, and its
        `head` advances unprompted. So `head` counts only as far as the consumer may
        work itself. Work that yields nothing, as after the end of an iterable, then
        gets no further ahead of the trainer than work that yields everything.

        An inline segment hands its consumer everything that the consumer may work on
        until the trainer returns, because nobody would bring more as its `head`
        advances meanwhile. That is one batch more than it may work on now, as the
        trainer takes one.
        """
        rows, limit = self.batch_rows, self.head - 1
        reader: SegmentState | None = None
        for state in reversed(self.segments[at:]):
            theirs = limit
            if reader is not None:
                limit = min(reader.head, limit + 1) + reader.span(rows) - 1
            limit += state.window(rows)
            if reader is not None and state.inline:
                limit = max(limit, theirs + 1)
            reader = state
        return limit

    def _frontier(self) -> InFlightBatch | Wait:
        """Return the batch whose rows the source hands out next; open it if allowed."""
        in_flight = self.batches_in_flight.get(self.next_step - 1)
        if in_flight is not None and in_flight.next_row < len(in_flight.rows.indices):
            return in_flight
        if self.next_step > self._limit(0) or self.next_step == self.until:
            return Wait.CREDIT
        return self._open(self.next_step) if self.unplanned is None else Wait.CREDIT

    def _open(self, step: int) -> InFlightBatch | Wait:
        try:
            batch = self.plan.planned(step)
        except Exception as error:  # noqa: BLE001 the trainer raises it
            self.unplanned = error
            self._wake(FEED)
            return Wait.CREDIT
        plan, oldest = batch.plan, step == self.head
        if not self.reservations.open(step, plan.image_size, oldest=oldest):
            is_known = self.reservations.expected(plan.image_size) is not None
            return Wait.MEMORY if is_known else Wait.CREDIT
        in_flight = self.batches_in_flight[step] = begun(self, step, batch)
        self.next_step = step + 1
        count = len(in_flight.rows.indices)
        if count == self.batch_rows or (plan.last and count < self.batch_rows):
            return in_flight  # an epoch's short last batch is no new batch size
        self.batch_rows = count
        for at, state in enumerate(self.segments):
            state.gauge.capacity = state.prefetch * count
            if len(self.batches_in_flight) > 1:  # the limit may have grown
                self._wake(at, 1)
        return in_flight

    def _widened(self, at: int, count: int = 1) -> None:
        """A segment's workers may span more: let it and its producers look again."""
        self._wake(at, count)
        self._wake_before(at)

    def _wake_before(self, at: int) -> None:
        """Wake those whose limits depend on where segment `at` (or the trainer) is."""
        for number, state in enumerate(self.segments[:at]):
            if number in (0, at - 1) or state.ready:
                self._wake(number, 1)

    def _lease_rows(self, in_flight: InFlightBatch, state: SegmentState) -> Lease:
        """Hand out planned rows, and wake workers for the rest of them or the next.

        The worker that opens a batch wakes as many as the batch needs, and the last one
        wakes one to open the next. So no more are woken than there is work for.
        """
        start, rows = in_flight.next_row, len(in_flight.rows.indices)
        size = state.lease_rows(rows)
        if state.whole and state.divides and not (state.unsplit or self.outbox):
            size = self._shared(in_flight, state, rows - start)
        in_flight.next_row = min(rows, start + size)
        in_flight.called -= 1
        left = rows - in_flight.next_row
        if left == 0:
            self._wake(0, 1)
        elif in_flight.called <= 0:
            in_flight.called = -(-left // size)
            self._wake(0, in_flight.called)
        chunk = in_flight.chunk(start, in_flight.next_row)
        whole = state.whole and len(chunk) == rows
        inputs = in_flight.inputs and in_flight.inputs[start : in_flight.next_row]
        return Lease(0, chunk, inputs, in_flight, whole=whole)

    def _shared(self, in_flight: InFlightBatch, state: SegmentState, rows: int) -> int:
        """Return how many of the rows that are left make a lease if nothing is ready.

        One worker makes a whole batch, unless there are fewer batches than workers, and
        one takes long. The batch that the trainer waits for is shared by all that are
        free.
        """
        if state.ns_per_row is not None and rows * state.ns_per_row < state.lease_ns:
            return rows
        idle = state.makers - sum(lease.segment == 0 for lease in self.leases)
        batches, number = 1, in_flight.number
        is_known = self.reservations.expected(in_flight.plan.image_size) is not None
        if is_known and number > self.head:
            last = self._limit(0)
            if self.until is not None:
                last = min(last, self.until - 1)
            batches += last - number
        return rows if batches >= idle else max(1, -(-rows * batches // idle))

    def _put_back(self, lease: Lease, outcome: Outcome, now_ns: int) -> int:
        """Put unfinished rows back in front; return the bytes of input consumed."""
        done, rows = outcome.done, len(lease.chunk)
        if done == rows:
            return lease.input_bytes
        at, rest = lease.segment, lease.part(done, rows)
        self.segments[at].push(rest)
        self._show_waiting(at, now_ns)
        self._wake(at, 1)
        return lease.input_bytes - rest.input_bytes

    def _pass_on(self, lease: Lease, outcome: Outcome, now_ns: int) -> None:
        """Pass the outputs to the next segment, in runs of consecutive rows."""
        outputs, offsets = outcome.outputs or [], outcome.offsets
        if not outputs:
            return
        at, row_bytes = lease.segment + 1, max(0, outcome.nbytes) // len(outputs)
        state = self.segments[at]
        for start, stop, first in runs(offsets, len(outputs)):
            chunk = lease.chunk.part(first, first + stop - start)
            rows = stop - start
            samples = outputs if rows == len(outputs) else outputs[start:stop]
            state.push(Lease(at, chunk, samples, lease.in_flight, row_bytes * rows))
            self._wake(at, 1)
        self._show_waiting(at, now_ns)

    def _skip(self, in_flight: InFlightBatch, stop: int) -> None:
        """Mark a batch as done for the segments on whole batches up to `stop`.

        It has failed, or the worker that made its rows has collated it.
        """
        for at in range(self.placing + 1, stop):
            state = self.segments[at]
            in_flight.remaining[at] = 0
            if state.head == in_flight.number:
                self._advance(at, state)
                self._wake(at, 1)  # if it works in order, its next may be due

    def _count(self, in_flight: InFlightBatch, at: int, outcome: Outcome) -> None:
        """Subtract finished rows; failed or dropped ones are finished everywhere."""
        gone, remaining = len(outcome.failures) + outcome.dropped, in_flight.remaining
        remaining[at] -= outcome.done
        for later in range(at + 1, self.placing + 1):
            remaining[later] -= gone
        for segment, state in enumerate(self.segments[at:], at):
            if state.head == in_flight.number and remaining[segment] == 0:
                self._advance(segment, state)

    def _advance(self, at: int, state: SegmentState) -> None:
        batch_at = self.batches_in_flight.get
        while (in_flight := batch_at(state.head)) and not in_flight.remaining[at]:
            state.head += 1
        self._wake_before(at)

    def _show_waiting(self, at: int, now_ns: int) -> None:
        if at > 0:
            self.segments[at - 1].gauge.move(self.segments[at].waiting, now_ns)

    def _show_outbox(self, now_ns: int) -> None:
        """Show the batches that the trainer may take, up to the first unfinished."""
        ready = self.head
        while ready in self.outbox:
            ready += 1
        self.segments[-1].gauge.move((ready - self.head) * self.batch_rows, now_ns)

    def _wake(self, at: int, count: int = ALL) -> None:
        self.wakes[at] = self.wakes.get(at, 0) + count


def begun(core: Core, step: int, planned: PlannedBatch) -> InFlightBatch:
    """Return a planned batch with memory for it."""
    return InFlightBatch(
        plan=planned.plan,
        rows=planned.rows,
        first_row=planned.first_row,
        whole=planned.whole,
        inputs=planned.inputs,
        buffer=core.buffer_of(planned),
        remaining=[len(planned.rows)] * len(core.segments),
        number=step,
    )


def pop_unmade(core: Core) -> InFlightBatch | None:
    """Take the next batch before it is made, if one lease would cover it.

    A worker that is alone needs no lease then. None if anything is in flight.
    """
    step = core.head
    if step < core.next_step or step == core.until:
        return None
    batch = core.plan.planned(step)
    rows = len(batch.rows)
    if core.segments[0].lease_rows(rows) < rows:
        return None
    in_flight = begun(core, step, batch)
    core.head = core.next_step = step + 1
    for state in core.segments:
        state.head = core.head
    return in_flight
