"""A worker process from within: an engine that makes the batches it is assigned.

    trainer  ─▶ Assignment | Share ─▶ pipe ─▶ AssignedPlan ─▶ Engine
    trainer  ◀─ Result ◀─ pipe ◀─ main thread ◀─ Engine.pop()

The engine has the segments that run here. One worker alone is the main thread, as in
torch's workers; several are threads. Results leave in the order of the assignments.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import multiprocessing.process
import multiprocessing.util
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...errors import PenstockError
from ..batch.buffer import on_heap
from ..batch.layout import Layout
from ..core.in_flight import InFlightBatch
from ..recipe import Recipe, SegmentRecipe
from .assigned_engine import AssignedEngine, Result, Share
from .child import MAX_LANES, STACK_SIGNAL, StatusPage, leave
from .handover import dumps, loads, plain_dumps
from .pipe import Pipe
from .slabs import Returned, Sent, Shelf

KEEP = 40
"""Slabs that the trainer may hold, including those of batches it has not taken yet."""
LISTEN_S = 0.005
"""How often a worker that is the main thread looks whether it must end, at most."""


class Worker:
    """One worker process.

    The main thread reads the pipe if it is the only worker, otherwise a thread of its
    own does. Only the main thread writes to it.

    Args:
        pipe: leads to the trainer.
        recipe: what to make; its segments are those that run here.
        segment: the same as the trainer sees it.
        status_page: where the samples being worked on are posted.
    """

    def __init__(
        self,
        pipe: Pipe,
        recipe: Recipe,
        segment: SegmentRecipe,
        status_page: StatusPage,
    ) -> None:
        self._pipe, self._status_page = pipe, status_page
        self._program = segment.program
        self._shelf = Shelf(KEEP)
        own = any(each.per_batch for each in recipe.segments) or recipe.buffers.collate
        self._bare = not own
        """Whether a batch is its rows, as their layout says."""
        numbers = itertools.cycle(range(MAX_LANES))
        self._receiver: threading.Thread | None = None
        self._taking = threading.Lock()
        """Held while messages are received and heard, so that each is in its turn."""
        self._listened_s = 0.0
        self._engine = AssignedEngine(
            replace(recipe, buffers=replace(recipe.buffers, lend=self._lend)),
            segment,
            status_page.lane(next(numbers)),
            lambda: status_page.lane(next(numbers), self._listen),
        )

    def run(self) -> None:
        """Work until the trainer closes the pipe, or is gone.

        Each worker finishes its current rows first: its function may hold a lock that
        it shares with other processes.
        """
        page = self._status_page.descriptor
        faulthandler.enable(page)  # its stacks go there on a crash, and on request
        faulthandler.register(STACK_SIGNAL, page)
        self._pipe.send(os.getpid())
        try:
            with self._engine:
                while True:
                    self._serve()
        except PenstockError:
            if not self._engine.closed:
                raise
        self._program.leave()

    def _serve(self) -> None:
        """Do what was assigned first. Keeps no reference between two assignments."""
        while self._receiver is None and not self._engine.left:
            with self._taking:
                self._take(self._pipe.receive_all)
        self._reply(*self._engine.make())
        self._let_receive()

    # Whoever receives

    def _let_receive(self) -> None:
        """Let a thread receive from now on, if the main thread waits for workers."""
        if self._receiver is None and self._engine.beside:
            self._receiver = threading.Thread(
                target=self._receive, name="receiver", daemon=True
            )
            self._receiver.start()

    def _receive(self) -> None:
        """Take what the trainer sends, until the pipe ends."""
        try:
            while not self._engine.closed:
                with self._taking:
                    self._take(self._pipe.receive_all)
        except BaseException:  # noqa: BLE001 nobody above could report it
            traceback.print_exc()
            leave(1)

    def _listen(self) -> None:
        """Take now and then what has come, if nobody else does."""
        due = time.monotonic() - self._listened_s > LISTEN_S
        if due and self._receiver is None and self._taking.acquire(blocking=False):
            try:
                self._take(self._pipe.collect)
            finally:
                self._taking.release()

    def _take(self, receive: Callable[[], list[Any]]) -> None:
        """Take some messages, in order; stop the engine after the last one of all."""
        messages = []
        try:
            messages = receive()
        except EOFError:
            self._engine.stop()
        self._listened_s = time.monotonic()
        for message in messages:
            self._hear(message)

    def _hear(self, message: Share | tuple[Returned | None, bytes]) -> None:
        if isinstance(message, Share):
            self._engine.share(message)
            self._let_receive()
        else:
            returned, packed = message
            if returned is not None:
                self._shelf.take_back(returned)
            self._engine.assign(loads(packed))

    # The main thread

    def _reply(self, result: Result, in_flight: InFlightBatch) -> None:
        """Send a result. A batch that cannot be pickled is left to the trainer."""
        buffer = in_flight.buffer
        memory = buffer.memory
        sealed = result.whole and self._bare and buffer.sealed
        try:
            if sealed and self._shelf.has(memory):
                sent, descriptors = self._shelf.send(memory)
                result.outcome.nbytes = sent.nbytes
                message = plain_dumps(result._replace(sent=sent)), descriptors
            else:
                self._shelf.put_back(memory)
                message = self._packed(result)
        except Exception as error:  # noqa: BLE001 whatever pickling user objects raises
            self._shelf.put_back(memory)
            message = self._instead(result, in_flight, error)
        self._pipe.send_packed(*message)

    def _instead(
        self, result: Result, in_flight: InFlightBatch, error: Exception
    ) -> tuple[bytes, tuple[int, ...]]:
        """Return the samples of a batch that cannot be sent, or the error for that."""
        kept = in_flight.buffer.kept
        if result.whole and len(kept) == result.outcome.done:
            with contextlib.suppress(Exception):
                return self._packed(result.as_rows(kept, in_flight.first_row))
        return dumps(self._engine.unsendable(result, in_flight, error)), ()

    def _packed(self, result: Result) -> tuple[bytes, tuple[int, ...]]:
        """Return a result as it is sent, and descriptors to send with it."""
        if result.outcome.made is not None:  # the batch has failed
            return dumps(result), ()
        short = ""
        try:
            sent, descriptors = self._shelf.pack(result.sent)
        except OSError as error:  # there is no shared memory left
            short, descriptors = str(error), ()
            sent = Sent(dumps(result.sent))
        result.outcome.nbytes = sent.nbytes
        return dumps(result._replace(sent=sent, short=short)), descriptors

    def _lend(self, layout: Layout, rows: int) -> Any:
        """Lend shared memory for a batch that is sent as it is, if there is any."""
        if self._bare and layout.solid:
            with contextlib.suppress(OSError):
                return self._shelf.lend(layout, rows)
        return layout.open(rows, on_heap)


# Only private names know of processes that multiprocessing has not started.
# ruff: noqa: SLF001
process: Any = multiprocessing.process
util: Any = multiprocessing.util

LEAVE_S = 5.0
"""How long what the dataset has started may take to end, as with torch's workers. When
a loop ends, the fork server is less patient."""


@contextlib.contextmanager
def daemonic() -> Iterator[None]:
    """Make this process look like a worker of torch's to multiprocessing and atexit.

    We fork without multiprocessing, so it would take this process for the trainer. Then
    a dataset could start processes here that nobody ends, and a queue that the trainer
    has used would believe that its feeder thread runs here, too. What was started
    within ends with it.

    Such a child may have no children of its own: multiprocessing refuses to start any.
    The exit functions that it inherits are the trainer's to call.
    """
    atexit._clear()
    util._finalizer_registry.clear()
    trainer = process.current_process()
    process._current_process = multiprocessing.Process(daemon=True)
    process._children = set()
    sentinel = os.pidfd_open(os.getppid())
    process._parent_process = process._ParentProcess(
        trainer.name, os.getppid(), sentinel
    )
    util._run_after_forkers()
    try:
        yield
    finally:
        limit = threading.Timer(LEAVE_S, os._exit, (1,))
        limit.daemon = True
        limit.start()
        with contextlib.suppress(Exception):
            util._exit_function()
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # prints errors, and raises none
        limit.cancel()
