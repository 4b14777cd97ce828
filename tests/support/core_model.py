"""A core beside a trivial model of it: a dictionary of the place of each row.

A `Course` is one pipeline's real `Core`, the workers and the trainer around it, and the
model. Workers and trainer behave as they do in threads: one that finds nothing to do
sleeps, and moves again only when the core wakes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import count

from penstock.engine.core.core import FEED, Core, Gauge, SegmentState
from penstock.engine.core.in_flight import (
    ByteBudget,
    InFlightBatch,
    Lease,
    Onward,
    Outcome,
    Reservations,
    Wait,
)
from support.core_script import DONE, SOURCE, Batch, Place, Script, Settling, Tray
from support.core_sight import Address, rows_of, sight_of

__all__ = ["Course"]

ALL = Settling()


class Course:
    """One pipeline: the core, its workers and trainer, and the model's rows."""

    def __init__(
        self,
        script: Script,
        row_bytes: tuple[int, ...],
        byte_budget: ByteBudget,
        step: int = 0,
        per_batch: int = 0,
    ) -> None:
        """Make one segment for each of `row_bytes`: what a row holds behind it.

        The last `per_batch` work on whole batches, the first of these in order.
        """
        self.script = script
        self.row_bytes = row_bytes
        self.depth = len(row_bytes)
        self.placing = self.depth - per_batch - 1
        self.reservations = Reservations(byte_budget, self._notify)
        segments = [
            SegmentState(
                step,
                1,
                1,
                Gauge(1, 0),
                per_batch=at > self.placing,
                in_order=at == self.placing + 1,
            )
            for at in range(self.depth)
        ]
        self.core = Core(script, lambda plan: Tray(), segments, self.reservations, step)
        self.batches: dict[int, Batch] = {}
        self.head = step
        self.ready_rows = 0
        """Rows the trainer may take, as the gauge counts them: by sizes of batches."""
        self.in_hand: list[Lease] = []
        """Leases that workers hold, also from before a restart."""
        self.settled: list[tuple[Lease, Outcome]] = []
        self.complete: list[InFlightBatch] = []
        """All rows done, not yet delivered."""
        self.pool = [1] * len(row_bytes)
        self.inline = [False] * len(row_bytes)
        self.asleep = [0] * len(row_bytes)
        self.trainer_waits = False
        self.paused = False
        self.clock = count(1)

    # What happens

    def take(self, at: int) -> None:
        """A free worker of segment `at` asks for work, and gets the right rows."""
        step, byte_budget = self.core.next_step, self.reservations.byte_budget
        estimate = self.reservations.expected(self.script.batch(step).image_size)
        expected = self.grantable(at)
        held_bytes = byte_budget.held_bytes
        answer = self.core.take(at, next(self.clock))
        if self.core.next_step > step:
            self._note_opened(step, estimate or 0)
        else:
            assert byte_budget.held_bytes == held_bytes
        if isinstance(answer, Wait):
            assert expected is None, f"{expected} was not given out: {answer}"
            self.asleep[at] += 1
        else:
            self._note_lease(answer, at, expected)
        self.wake()

    def settle(self, number: int, how: Settling) -> None:
        """A worker settles its lease: the `number`th of those that are out."""
        lease = self.in_hand.pop(number)
        last, row_bytes = lease.segment == self.placing, self.row_bytes[lease.segment]
        if lease.segment > self.placing:
            outcome = how.outcome_of_batch(lease, row_bytes * len(lease.chunk))
        else:
            outcome = how.outcome(lease, row_bytes, last=last)
        self.settled.append((lease, outcome))
        if lease in self.core.leases:
            if last:
                self._tray(lease.chunk.step).placed += how.kept(lease)
            self._settle(lease, outcome)
        else:
            self.settle_late(len(self.settled) - 1)
        self.wake()

    def settle_late(self, number: int) -> None:
        """A lease that is settled, or from before a restart, is settled again."""
        before = sight_of(self.core)
        assert self.core.settle(*self.settled[number], next(self.clock)) is None
        self._check_who_paused_is_woken()
        assert sight_of(self.core) == before

    def deliver(self, number: int) -> None:
        """The worker that completed a batch puts it in the outbox, or passes it on."""
        in_flight = self.complete.pop(number)
        step = in_flight.plan.step
        current = self.core.batches_in_flight.get(step) is in_flight
        before = sight_of(self.core)
        batch, payload = self.batches.get(step), ("batch", step)
        to = batch.next if current and batch and not batch.failed else self.depth
        # Every other batch was collated by the worker that made its rows.
        to += to == self.placing + 1 and to + 1 < self.depth and step % 2
        onward = to < self.depth
        self.core.deliver(
            in_flight, Onward(to, payload) if onward else payload, next(self.clock)
        )
        if current and batch is not None:
            batch.next, batch.delivered = to, not onward
            if onward:
                batch.places = [("ready", to)] * len(batch.places)
            else:
                self._count_outbox()
        else:
            self._check_who_paused_is_woken()
            assert sight_of(self.core) == before
        self.wake()

    def pop(self) -> bool:
        """The trainer asks for its next batch."""
        batch = self.batches.get(self.head)
        entry = self.core.pop(next(self.clock))
        if batch is None or not batch.delivered:
            assert entry is None
            self.trainer_waits = True
            return False
        assert entry is not None
        in_flight, payload = entry
        assert payload == ("batch", self.head)
        self._check_whole(in_flight)
        del self.batches[self.head]
        self.head += 1
        self._count_outbox()
        self.wake()
        return True

    def set_prefetch(self, at: int, batches: int) -> None:
        """The tuner changes a prefetch size."""
        self.core.set_prefetch(at, batches)
        self.wake()

    def set_workers(self, at: int, workers: int, *, inline: bool = False) -> None:
        """The tuner adds or retires workers; those with a lease go later."""
        self.core.set_workers(at, workers, inline=inline)
        self.inline[at] = inline
        self.pool[at] = workers
        self.asleep[at] = 0  # all are woken, to see whether they are to go
        self.wake()

    def restart(self, step: int) -> None:
        """The trainer continues at another step. Workers keep their leases."""
        self.core.restart(step, next(self.clock))
        self.batches.clear()
        self.head, self.ready_rows = step, 0
        self.trainer_waits = False
        self.wake()

    def pause(self) -> None:
        """The engine pauses all work."""
        self.core.pause()
        self.paused = True
        self.wake()

    def unpause(self) -> None:
        """The engine lets all work again, if it had paused them."""
        self.core.unpause()
        self.paused = False
        self.wake()

    def close(self) -> None:
        """The engine is closed: nobody waits for work to come back."""
        self.core.close(next(self.clock))
        self.paused = False
        self.batches.clear()
        self.wake()

    def move(
        self, how: Settling = ALL, idle: frozenset[int] = frozenset(), slow: int = 0
    ) -> bool:
        """Let all that are awake do what they can; return False if all sleep.

        Workers of the segments in `idle` ask for nothing, nor does the trainer if FEED
        is in it. The `slow` oldest leases, and finished batches, are not settled.
        """
        active = False
        while len(self.in_hand) > slow:
            self.settle(slow, how)
            active = True
        while len(self.complete) > slow:
            self.deliver(slow)
            active = True
        for at in range(self.depth):
            while at not in idle and self.awake(at):
                self.take(at)
                active = True
        if FEED not in idle and not self.trainer_waits:
            self.pop()
            active = True
        return active

    # What holds

    def awake(self, at: int) -> int:
        """Workers of a segment that are free and not asleep."""
        busy = sum(lease.segment == at for lease in self.in_hand)
        return max(0, self.pool[at] - busy - self.asleep[at])

    def grantable(self, at: int) -> Address | None:
        """Return the first row that segment `at` must get now, by the model."""
        ready = self._at(("ready", at))
        if self.paused:
            return None
        if ready:
            due = at != self.placing + 1 or ready[0][0] == self._reached(at)
            return ready[0] if due and ready[0][0] <= self.limit(at) else None
        if at > 0:
            return None
        if addresses := self._at((SOURCE, 0)):
            return addresses[0]
        step = self.head + len(self.batches)
        if step > self.limit(0):
            return None
        return (step, 0) if step == self.head or self._affordable(step) else None

    def limit(self, at: int) -> int:
        """The last step that segment `at` may work on."""
        rows = self.core.batch_rows
        window = self.core.segments[at].window(rows)
        if at + 1 == self.depth:
            return self.head + window - 1
        furthest = self.limit(at + 1) + 1
        reader = min(self._reached(at + 1), furthest)
        limit = reader + self.core.segments[at + 1].span(rows) - 1 + window
        return max(limit, furthest) if self.inline[at] else limit

    def charge(self, step: int) -> int:
        """Bytes a batch is charged: what it holds if complete, else the most."""
        batch = self.batches[step]
        if batch.delivered:
            return self.held(step)
        return max(batch.estimate, batch.peak)

    def held(self, step: int) -> int:
        """Bytes the rows of a batch hold where they are now."""
        if (nbytes := self.batches[step].nbytes) is not None:
            return nbytes
        last = self.row_bytes[self.placing]
        placed_rows = len(self._tray(step).placed)
        between = sum(
            self.row_bytes[at - 1]
            for kind, at in self.batches[step].places
            if kind in ("ready", "lent") and 0 < at <= self.placing
        )
        return last * placed_rows + between

    def overdraft(self) -> int:
        """Bytes that may be charged beyond the limit: the oldest, and bad estimates."""
        return sum(
            self.charge(step)
            if batch.oldest
            else max(0, self.charge(step) - batch.estimate)
            for step, batch in self.batches.items()
        )

    def check(self) -> None:
        """Compare the core with the model."""
        core = self.core
        unfinished_rows = [row for row in self._everything() if row[1][0] != DONE]
        assert sorted(rows_of(self.core)) == sorted(unfinished_rows)
        assert core.head == self.head
        assert sorted(core.batches_in_flight) == sorted(self.batches)
        assert set(core.outbox) == {s for s, b in self.batches.items() if b.delivered}
        for at in range(1, self.depth):
            waiting = len(self._at(("ready", at)))
            assert core.segments[at].waiting == waiting
            assert core.segments[at - 1].gauge.level == waiting
        assert core.segments[-1].gauge.level == self.ready_rows
        charged_bytes = sum(map(self.charge, self.batches))
        assert self.reservations.held_bytes == charged_bytes

    def check_alive(self) -> None:
        """Check that something can move: a worker at work or awake, or the trainer."""
        assert (
            self.paused
            or self.in_hand
            or self.complete
            or not self.trainer_waits
            or any(map(self.awake, range(self.depth)))
        ), f"all sleep: {self.core}"

    def check_awake(self) -> None:
        """Check that there is no work for which everybody sleeps."""
        for at in range(self.depth):
            slept_over = self.asleep[at] and self.grantable(at) is not None
            assert not slept_over or self.awake(at), f"{at} sleeps: {self.core}"

    def check_head(self) -> None:
        """Check that the oldest batch is granted wherever it has ready rows."""
        if self.paused:
            return
        for at in range(self.depth):
            ready = [row for step, row in self._at(("ready", at)) if step == self.head]
            if ready:
                assert self.grantable(at) == (self.head, ready[0])
        if not self.batches and not self._at(("ready", 0)):
            assert self.grantable(0) == (self.head, 0)

    def wake(self) -> None:
        """Wake those that the core names, as the engine lock does."""
        for at, number in self.core.wakes.items():
            if at == FEED:
                self.trainer_waits = False
            else:
                self.asleep[at] -= min(number, self.asleep[at])
        self.core.wakes.clear()
        notifications = self.reservations.notifications
        while notifications:
            notifications.popleft()()

    # The parts of these

    def _check_who_paused_is_woken(self) -> None:
        """A caller that paused checks again after each settled piece of work."""
        if self.paused:
            assert self.core.wakes.pop(FEED)

    def _notify(self) -> None:
        self.core.wakes[0] = 1 << 30
        self.wake()

    def _note_opened(self, step: int, estimate: int) -> None:
        assert step == self.head + len(self.batches)
        rows = self.script.batch(step).n_rows
        oldest = step == self.head
        self.batches[step] = Batch(
            [(SOURCE, 0)] * rows, estimate, oldest, self.placing + 1
        )

    def _note_lease(self, lease: Lease, at: int, expected: Address | None) -> None:
        chunk = lease.chunk
        step, first = chunk.step, chunk.first_row
        assert (step, first) == expected
        assert lease.in_flight is self.core.batches_in_flight[step]
        assert lease.segment == at
        assert 1 <= len(chunk) <= self.script.batch(step).n_rows - first
        rows = self.script.rows(lease.in_flight.plan)
        stop = first + len(chunk)
        assert chunk.indices.tolist() == rows.indices[first:stop].tolist()
        assert chunk.rounds.tolist() == rows.rounds[first:stop].tolist()
        if at > self.placing:
            assert (first, stop) == (0, self.script.batch(step).n_rows)
            assert lease.inputs == [("batch", step)]
            assert lease.input_bytes == self.held(step)
        elif at > 0:
            assert lease.inputs == [(step, row, at) for row in range(first, stop)]
            assert lease.input_bytes == self.row_bytes[at - 1] * len(chunk)
        places = self.batches[step].places
        for row in range(first, stop):
            assert places[row] in (("ready", at), (SOURCE, at))
            places[row] = ("lent", at)
        self.in_hand.append(lease)

    def _settle(self, lease: Lease, outcome: Outcome) -> None:
        chunk, at = lease.chunk, lease.segment
        step, first = chunk.step, chunk.first_row
        batch = self.batches[step]
        rows = range(first, first + len(chunk))
        new_places = dict.fromkeys(rows, ("ready", at))
        new_places |= dict.fromkeys(rows[: outcome.done], (DONE, 0))
        if at <= self.placing:
            for _, row, to in outcome.outputs or ():
                new_places[row] = ("ready", to)
        elif outcome.done:
            batch.next, batch.nbytes = at + 1, outcome.nbytes
            batch.failed = bool(outcome.failures)
        for row, place in new_places.items():
            batch.places[row] = place
        in_flight = self.core.settle(lease, outcome, next(self.clock))
        if at > self.placing and in_flight is not None:
            assert in_flight.made == outcome.outputs
            del in_flight.failures[len(in_flight.failures) - len(outcome.failures) :]
        batch.peak = max(batch.peak, self.held(step))
        is_finished = all(kind == DONE for kind, _ in batch.places)
        assert (in_flight is not None) == is_finished
        if in_flight is not None:
            self.complete.append(in_flight)

    def _check_whole(self, in_flight: InFlightBatch) -> None:
        """Each row of the batch is in it once, or failed, or was dropped."""
        tray = in_flight.buffer
        assert isinstance(tray, Tray)
        rows = [*tray.placed, *(failure.row for failure in in_flight.failures)]
        assert len(set(rows)) == len(rows)
        assert len(rows) + in_flight.dropped == in_flight.plan.n_rows
        assert in_flight.remaining == [0] * self.depth

    def _count_outbox(self) -> None:
        deliveries = (batch.delivered for _, batch in sorted(self.batches.items()))
        ready = sum(1 for _ in itertools.takewhile(bool, deliveries))
        self.ready_rows = ready * self.core.batch_rows

    def _affordable(self, step: int) -> bool:
        byte_budget = self.reservations.byte_budget
        estimate = self.reservations.expected(self.script.batch(step).image_size)
        return (
            estimate is not None
            and byte_budget.held_bytes + estimate <= byte_budget.limit_bytes
        )

    def _reached(self, at: int) -> int:
        """The first step that segment `at` has not finished."""
        step = self.head
        while step in self.batches and self._past(step, at):
            step += 1
        return step

    def _past(self, step: int, at: int) -> bool:
        """Whether segment `at` has finished a batch."""
        batch = self.batches[step]
        if at > self.placing:
            return batch.delivered or batch.next > at
        return all(
            kind == DONE or (kind != SOURCE and where > at)
            for kind, where in self.batches[step].places
        )

    def _at(self, place: Place) -> list[Address]:
        return [where for where, here in self._everything() if here == place]

    def _everything(self) -> Iterator[tuple[Address, Place]]:
        for step in sorted(self.batches):
            for row, place in enumerate(self.batches[step].places):
                yield (step, row), place

    def _tray(self, step: int) -> Tray:
        tray = self.core.batches_in_flight[step].buffer
        assert isinstance(tray, Tray)
        return tray
