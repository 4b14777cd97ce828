"""Processes as workers: for functions that hold the GIL or that threads cannot share.

Each child (worker.py) returns what it made in shared memory that the trainer maps. The
engine lock wakes the selector thread when there may be work, the pipes when work is
done or a child is gone, and its own timer when samples have a time limit. A trainer
that takes a batch does what is due at that moment.

The workers of a segment are shared among its children: if it is thread-safe, a child
has several once there is one for each core. A child may be assigned more batches
while it makes one, so that it need not wait for the trainer's answer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import ClassVar

import numpy as np

from ...system.descriptors import descriptors_left, most_descriptors
from ...system.resources import oom_kills
from ...system.run_queue import threads_of
from ..core.connector import Connector, ReaderLost, WorkerMeter
from ..core.core import FAR_LEASE_NS
from ..program.operations import Cached
from ..recipe import ASSIGNED, Recipe
from ..workers import Holding, PoolStatistics
from .child import (
    ALL_ROWS,
    STACK_SIGNAL,
    Child,
    Pipe,
    StatusPage,
    cause_of,
    is_stopped,
)
from .far_pool import LOGGER, FarChild, FarPool
from .fork_server import FINISH_S, ForkServer
from .handover import dumps, plain_dumps
from .slabs import Unpacker
from .worker import Assignment, Result, Share

# Descriptors that a child takes: its pipe, its page, and the process itself.
CHILD_NEEDS = 3
# Descriptors that are left for other uses.
KEPT_FREE = 24
# Most workers in one child: a GIL takes 20 to 100 us to change hands, and every thread
# makes the wait for it that much longer.
MAX_TOGETHER = 16
# Rows that wait at a child for each of its workers, if these are several: as many as a
# lease of its engine has where most of a row is a wait. With fewer, workers ran out.
ROWS_EACH = 24

# How long children may take to end if they still write to a cache, in seconds.
STORE_S = 1.0
# Lines of a stack that are shown.
STACK_LINES = 40
# How long a stuck worker may take to write its stacks.
STACKS_NS = 300_000_000
# How late a look at the time limit is if this process was stopped.
LATE_NS = 1_000_000_000
# How long a killed worker may take to end before it no longer counts.
GONE_NS = 2_000_000_000


def children_for(workers: int, cores: int) -> int:
    """Return how many children carry so many workers, at least one for each core."""
    return min(workers, max(cores, -(-workers // MAX_TOGETHER)))


class WorkerChild(Child, FarChild):
    """A worker process."""

    # Up to which of the kills for memory in this control group an end was explained by
    # each: a later end is another's doing.
    explained_kills: ClassVar[int] = 0

    def __init__(
        self,
        pipe: Pipe,
        status_page: StatusPage,
        generation: int,
        number: int,
        meter: WorkerMeter,
    ) -> None:
        Child.__init__(self, pipe)
        FarChild.__init__(self, number, generation, meter)
        self.status_page = status_page
        # Its part of all workers, as sent to it.
        self.share = Share(0, 0)
        # Unpacks what it makes.
        self.unpacker = Unpacker()
        # Task and row that took too long.
        self.stuck: tuple[int, int] | None = None
        # When it was asked for its stacks, and when it was killed for being stuck; and
        # until when no sample takes too long.
        self.asked_ns = self.killed_ns = self._excused_ns = 0
        # How it was stuck, in words; empty if it was not.
        self._stuck_how = ""
        self._kills = oom_kills()

    def packed(self, assignment: Assignment) -> bytes:
        """Return an assignment as it is sent, with the slabs that were returned."""
        plain = assignment.planned.rows.indices.dtype == np.int64
        body = (plain_dumps if plain else dumps)(assignment)
        return plain_dumps((self.unpacker.returned(), body))

    def receive(self, result: Result) -> Result:
        """Return a result with what was made, as it is.

        Raises:
            Exception: whatever unpickling that raises.
        """
        if result.sent is None:
            return result
        return result._replace(
            sent=self.unpacker.receive(result.sent, self.pipe.descriptors)
        )

    def look(self, limit_ns: int, now_ns: int) -> int | None:
        """Enforce the time limit of samples: who exceeds it is asked for its stacks.

        It is killed after that. A stopped process does not write any.

        Args:
            limit_ns: the limit for a sample.
            now_ns: the present moment.

        Returns:
            When to look again; None if there is nothing to wait for.
        """
        if self.killed_ns:
            return self.killed_ns + GONE_NS
        if self.asked_ns:
            if now_ns < self.asked_ns + STACKS_NS:
                return self.asked_ns + STACKS_NS
            self.killed_ns = now_ns
            self.kill()
            return now_ns + GONE_NS
        first = self._first_due(limit_ns)
        if first is None:
            return None
        due_ns = max(first[0], self._excused_ns)
        # Nobody looked for long, as after Ctrl-Z, which stops the workers along with
        # this process: their samples get the whole time once more.
        if now_ns - due_ns > LATE_NS and due_ns != self._excused_ns:
            due_ns = self._excused_ns = now_ns + limit_ns
        if now_ns < due_ns:
            return due_ns
        self.stuck, self.asked_ns = first[1:], now_ns
        stop_note = ", stopped by a signal (SIGSTOP, or a debugger)"
        self._stuck_how = "replaced as it was stuck" + stop_note * is_stopped(self.pid)
        self.kill(STACK_SIGNAL)
        self.ready = False  # it is about to be killed
        return now_ns + STACKS_NS

    def _first_due(self, limit_ns: int) -> tuple[int, int, int] | None:
        """Return the earliest deadline: when, and of which task and row."""
        if not self.errands or not self.pid:  # it is starting
            return None
        deadlines = [
            (at.since_ns + limit_ns, at.task, at.row)
            for at in self.status_page.held()
            if at.task in self.errands
        ]
        if not deadlines:  # nobody works there, yet tasks are waiting
            moved_ns = self.status_page.moved_ns()
            deadlines = [
                (max(errand.sent_ns, moved_ns) + limit_ns, number, ALL_ROWS)
                for number, errand in self.errands.items()
            ]
        return min(deadlines)

    def suspects(self, number: int) -> Sequence[int]:
        """Return the rows of an errand that may have caused its end."""
        if not self.pid:  # it has not said yet that it is there, so it began none
            return ()
        rows = range(len(self.errands[number].chunk))
        if self.stuck is not None:
            task, row = self.stuck
            if task != number:
                return ()
            return rows if row == ALL_ROWS else (row,)
        held_rows = [at.row for at in self.status_page.held() if at.task == number]
        if not held_rows:  # it was packing the oldest, or coroutines work there
            return super().suspects(number)
        return tuple(held_rows) if all(row in rows for row in held_rows) else rows

    def how_it_ended(self) -> str:
        """Return why it ended, and what it wrote before that."""
        status = self.status_page.status
        before = max(self._kills, WorkerChild.explained_kills)
        for_memory = (
            status == signal.SIGKILL and not self._stuck_how and oom_kills() > before
        )
        WorkerChild.explained_kills = before + for_memory
        cause = self._stuck_how or cause_of(status, for_memory=for_memory)
        lines = self.status_page.text().strip().splitlines()[:STACK_LINES]
        return "\n".join([f"{cause}; it wrote:", *lines]) if lines else cause

    def close(self) -> None:
        """Close the pipe, which ends the child, and release its page. Idempotent."""
        super().close()
        self.status_page.close()


class ProcessPool(FarPool[WorkerChild]):
    """A number of workers in processes.

    Args:
        connector: where leases come from.
        recipe: the engine's recipe.
        fork_server: starts the processes.
        cores: children that a thread-safe segment starts before several workers share
            one.
    """

    executor = "process"
    ahead_ns = 10_000_000

    def __init__(
        self,
        connector: Connector,
        recipe: Recipe,
        fork_server: ForkServer,
        cores: int,
    ) -> None:
        super().__init__(connector, recipe, "worker processes")
        segment, self._fork_server = self._segment, fork_server
        # Children that it has before workers share one.
        self._cores = cores if segment.thread_safe else sys.maxsize
        self._most = 1 if segment.iterable else sys.maxsize
        # The request, children and generation for which nothing is left to adjust.
        self._staffed: tuple[int, int, int] | None = None
        # Whether the fork server had expired when children were last adjusted.
        self._expired = False
        # The request that was shared out last, and the last one for which all workers
        # have begun.
        self._request = self._begun_request = 0
        # Whether there was no shared memory for a batch; whether it serves no more;
        # whether the trainer, in its own thread, has made room for work.
        self._short = self._ended = self._due = False
        # Held while leases are handed out and results heard, by whichever thread.
        self._serving = threading.Lock()
        self._selector = DefaultSelector()
        self._selector.register(self._wakeup, EVENT_READ)
        self._start()

    def _hear_of_work(self) -> None:
        if self._engine_lock.trainer_pops and not self._engine_lock.closed:
            self._due = True
        else:
            super()._hear_of_work()

    def statistics(self) -> PoolStatistics:
        """Return the numbers of workers.

        Once all that were asked for have begun, those that replace them, as for each
        epoch, do not count as beginning: their start is part of what they cost.
        """
        # Any thread may call this.
        request, children = self._request, list(self._children)
        workers = sum(child.share.workers for child in children)
        beginning = 0
        if request != self._begun_request:
            begun_workers = sum(
                c.share.workers for c in children if c.pid and not c.meter.begins
            )
            beginning = max(0, min(request, workers or request) - begun_workers)
            self._begun_request = self._begun_request if beginning else request
        return PoolStatistics(workers, beginning, children=len(children))

    def leases(self, workers: int) -> Holding:
        children = children_for(workers, self._cores)
        per_child = -(-workers // children)
        waiting = self._waiting(workers, children) * children or -(-children // 2)
        return Holding(children + waiting, FAR_LEASE_NS * per_child, children)

    def _waiting(self, workers: int, children: int) -> int:
        """Return how many leases wait at a child whose workers share them, or 0.

        The last rows of one leave most of its workers idle. Those who wait for storage
        need more rows at hand than they work on.
        """
        wide = zip(self._segment.within_all, self._segment.more_within, strict=True)
        counts = [s.num_parallel_workers for s, more in wide if more]
        threads = max(-(-count // children) for count in (workers, *counts))
        rows = self._engine_lock.core.batch_rows
        return min(ASSIGNED - 1, -(-ROWS_EACH * threads // rows)) if threads > 1 else 0

    def rest(self, until_ns: int) -> None:
        """Let all children rest before their next sample; 0: no more."""
        for child in list(self._children):
            with contextlib.suppress(ValueError):  # its page was closed: it has ended
                child.status_page.rest(until_ns)

    def at_work(self) -> bool:
        """Whether a child is at a sample."""
        with contextlib.suppress(ValueError):
            return any(child.status_page.at_work for child in list(self._children))
        return True

    def threads(self) -> list[str]:
        """Return the /proc folders of the children's threads."""
        return [
            path for child in list(self._children) for path in threads_of(child.pid)
        ]

    # The selector thread

    def _serve(self) -> None:
        while not self._engine_lock.closed:
            with self._serving:
                self._adjust()
                if self._leaving and not self._children:
                    return
                self._hand_out()
                wait_s, lost_children = self._watch()
                for child in lost_children:
                    self._reap(child)
                # Asked once it listens: it may have missed the wake after a renewal.
                renewed = self._expired and not self._fork_server.expired
            self._selector.select(0 if lost_children or renewed else wait_s)
            with self._serving:
                if self._hear_all():
                    self._wakeup.clear()

    def _hear_all(self) -> bool:
        """Handle what the children have sent; return whether the thread was woken."""
        woken = False
        for key, events in self._selector.select(0):
            if key.data is None:
                woken = True
            else:
                self._hear(key.data, events)
        return woken

    def serve_now(self) -> None:
        """Hear and hand out what is due, as the trainer has the GIL anyway.

        The thread would have to take it from a trainer that computes. What it is woken
        for stays its own, as do samples with a time limit, which it watches, and
        children that come or go. After Ctrl-C in here the run is dropped, so nothing
        has to be whole.
        """
        due, self._due = self._due, False
        for_thread = self._segment.timeout_s is not None or self._staffed is None
        if self._serving.locked() or for_thread:
            if due:
                with self._engine_lock.lock:
                    self._wakeup.notify()
            return
        with self._serving:
            if self._ended:
                return
            try:
                if self._recipe.buffers.pin is None:  # which may take milliseconds
                    self._hear_all()
                self._hand_out()
            except Exception as error:  # noqa: BLE001 as in the thread
                self._engine_lock.fail(error)

    def _watch(self) -> tuple[float | None, list[WorkerChild]]:
        """Enforce the time limit of samples, if there is one.

        Returns:
            Seconds until the next call, None if there is nothing to wait for; and the
            children that were killed but have not ended in time.
        """
        if self._segment.timeout_s is None:
            return None, []
        limit_ns, now_ns = int(self._segment.timeout_s * 1e9), time.monotonic_ns()
        times = [
            at_ns
            for child in self._children
            if (at_ns := child.look(limit_ns, now_ns)) is not None
        ]
        wait_s = max(0.0, (min(times) - now_ns) / 1e9) if times else None
        return wait_s, [
            child
            for child in self._children
            if child.killed_ns and now_ns >= child.killed_ns + GONE_NS
        ]

    def _adjust(self) -> None:
        """Adjust the children, and what each has of the workers, to the request."""
        with self._engine_lock.lock:
            request = self._asked
        self._expired = self._fork_server.expired
        if self._expired:
            request = 0
        generation = self._fork_server.generation
        if (request, len(self._children), generation) == self._staffed:
            return
        self._staff(min(children_for(request, self._cores), self._most))
        if not self._children:
            self._fork_server.reap()
        self._share_out(request)
        self._request = request
        now = request, len(self._children), generation
        settled = len(self._children) == self._target and not any(
            map(self._outdated, self._children)
        )
        self._staffed = now if settled else None

    def _ahead(self) -> int:
        there = max(1, len(self._children))
        return self._waiting(self._request, there) or super()._ahead()

    def _share_out(self, request: int) -> None:
        """Tell each child how many of the workers it has."""
        children = len(self._children)
        workers = max(request, children) if self._segment.thread_safe else children
        per_child, more = divmod(workers, max(1, children))
        for at, child in enumerate(self._children):
            share = Share(per_child + (at < more), workers)
            if share != child.share:
                child.share = share
                self._connector.resize_meter(child.meter, share.workers)
                self._post(child, dumps(share))

    def _outdated(self, child: WorkerChild) -> bool:
        """Whether a child's generation has ended: it ends with its fork server."""
        return child.generation != self._fork_server.generation

    def _has_room(self) -> bool:
        """Whether there are descriptors for one more child; there must be one."""
        to_come = sum(child.pid == 0 for child in self._children)
        enough = descriptors_left() - to_come >= CHILD_NEEDS + KEPT_FREE
        if enough or not self._children:
            return True
        self._most = self._target = len(self._children)
        LOGGER.warning(
            "`ulimit -n` is %d, which leaves room for %d worker processes beside the"
            " other open files; training goes on with these. Raise it to get more",
            most_descriptors(),
            self._most,
        )
        return False

    def _start_child(self, number: int) -> None:
        start = self._fork_server.start_worker(self._connector.segment, number)
        child = WorkerChild(*start, number, self._connector.enter())
        self._children.append(child)
        self._selector.register(child.pipe, EVENT_READ, child)

    def _end(self, child: WorkerChild) -> None:
        self._selector.unregister(child.pipe)
        child.close()
        with self._engine_lock.lock:  # the thread must start another one
            self._wakeup.notify()

    def _post(
        self,
        child: WorkerChild,
        message: bytes,
        number: int = 0,  # noqa: ARG002 it counts, too
    ) -> None:
        with contextlib.suppress(EOFError):  # its end of file will arrive
            child.pipe.post(message)
        self._listen(child)

    def _listen(self, child: WorkerChild) -> None:
        """Watch a child's pipe for room for as long as something waits for it."""
        events = EVENT_READ | EVENT_WRITE if child.pipe.unsent else EVENT_READ
        self._selector.modify(child.pipe, events, child)

    def _hear(self, child: WorkerChild, events: int) -> None:
        try:
            if events & EVENT_WRITE:
                child.pipe.flush()
                self._listen(child)
            messages = child.pipe.collect() if events & EVENT_READ else []
        except EOFError:
            self._reap(child)
            return
        for message in messages:
            if isinstance(message, int):
                child.hello(message)
                continue
            if message.short and not self._short:
                self._short = True
                LOGGER.warning(
                    "no shared memory for a batch (%s): batches come from worker"
                    " processes through pipes, which takes longer; %s",
                    message.short,
                    "raise the limit of open files with `ulimit -n`"
                    if f"[Errno {errno.EMFILE}]" in message.short
                    else "free some memory, or raise the container's limit",
                )
            self._receive(child, message.number, partial(child.receive, message))

    def _reap(self, child: WorkerChild) -> None:
        """Handle the end of a child: its work returns to the front."""
        if not self._outdated(child):  # otherwise its fork server ended it
            death = f"worker process {child.pid or '(starting)'} {child.how_it_ended()}"
            status = child.status_page.status
            # It exited by itself before it was at work.
            failed = not child.pid and status is not None and os.WIFEXITED(status)
            self._note_death(child, death, at_work=not failed)
            if self._segment.iterable:
                self._engine_lock.fail(ReaderLost())
        self._forget(child)

    def _end_all(self) -> None:
        """Stop every child; the fork server waits until they are gone."""
        with self._serving:  # the trainer may be serving them at this moment
            self._ended = True
        stores = any(
            isinstance(operation, Cached) for operation in self._program.operations
        )
        end_s = time.monotonic() + (STORE_S if stores else FINISH_S)
        children, self._children = self._children, []
        self._selector.close()
        for child in children:  # all pipes first: so they end side by side
            self._connector.leave(child.meter)
            child.pipe.close()
        for child in children:
            if not child.ends_within(end_s - time.monotonic()):
                child.kill()
            child.close()
