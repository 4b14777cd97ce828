"""`host="process"`: the engine, with its threads, runs in one child of the trainer.

The trainer keeps its GIL to itself: `next()` reads one message and maps the memory it
names. The child is forked from the trainer, so it has the dataset and the functions as
they are. If it dies, another one continues with the batch that is due.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

from ...errors import SampleError, WorkerError
from ...system.interrupts import interrupts_deferred
from ..core.byte_budget import ByteBudget
from ..feed import Delivery
from ..observe.knob import Knob, Value
from ..observe.reading import Reading, TrainerMeter
from ..plan import BatchPlan, Cursor
from ..recipe import Recipe
from ..workers.process.child import Child
from ..workers.process.handover import Unpacker, recall
from ..workers.process.pipe import Pipe
from .serving import Batch, End, Question, Taken, View, knobs_of, serve, set_knob

LOGGER = logging.getLogger("penstock")

ANSWER_S = 0.3
"""How long to wait for an answer: the child's user code may hold the GIL that long."""
DEATHS = 5
"""How often a child may die in a row, with no batch in between."""
END_S = 1.0
"""How long a child may take to end after its pipes were closed, before it is killed."""
STUCK_S = 0.5
"""A thread that holds a lock for longer than a question takes is stuck."""
UNFIT = (
    "a batch cannot be received from the process that made it (%s: %s); use "
    'host="trainer", or let collate_fn return arrays, tensors, numbers, text or bytes'
)


class ReceivedBatch(NamedTuple):
    """A batch that was received, its arrays mapped."""

    delivery: Delivery
    cursor: Cursor
    """Where the next batch starts."""
    reading: Reading | None


class HostChild(Child):
    """The child that hosts the engine, seen from the trainer.

    Two pipes lead to it. Batches come through `pipe`, to the trainer's thread alone.
    Questions, from any thread, have their own pipe. So an answer does not wait behind a
    batch that fills the first pipe, and a Ctrl-C within an answer tears no batch.
    `_lock` guards the second pipe and `_number`.
    """

    def __init__(self, body: Callable[[Pipe, Pipe], None]) -> None:
        self._questions, theirs = Pipe.pair()
        self._lock = threading.Lock()
        self._number = 0
        # Batches taken that the child does not know of yet, and their round.
        self._round = self._taken = 0
        # The child is notified after this many.
        self._at_once = 1
        self._unpacker = Unpacker()
        super().__init__(*self.fork(partial(body, theirs), theirs))

    def receive(self) -> list[Any]:
        """Return everything it has sent, waiting for something.

        Raises:
            EOFError: it is gone.
        """
        messages = self.pipe.receive_all()
        self._at_once = (len(messages) + 1) // 2
        return messages

    def open(self, batch: Batch) -> ReceivedBatch | SampleError:
        """Return a batch that has just been received."""
        try:
            data = self._unpacker.unpack(batch.packed, self.pipe.descriptors)
        except Exception as error:  # noqa: BLE001 raised when its batch is due
            unfit = SampleError(UNFIT % (type(error).__name__, error))
            unfit.__cause__ = error
            return unfit
        delivery = Delivery(data, BatchPlan(*batch.facts))
        return ReceivedBatch(delivery, Cursor(*batch.position), batch.reading)

    def take(self, round_: int, left: int) -> None:
        """Report that a batch was taken, and which arrays have died.

        Waking the child takes longer than everything else here. So notify it only
        twice for all batches that came together, and always before none is `left`:
        otherwise it would wait without end.
        """
        if round_ != self._round:
            self._round, self._taken = round_, 0
        self._taken += 1
        if self._taken < self._at_once and left:
            return
        with contextlib.suppress(EOFError):  # what it has sent is still valid
            self.pipe.send(Taken(round_, self._taken, self._unpacker.returned()))
        self._taken = 0

    def ask(self, question: Question) -> Any:
        """Return its answer; None if it does not answer in time, or is gone."""
        with self._lock:
            self._number += 1
            try:
                self._questions.send((self._number, question))
                return self._answer(self._number)
            except (EOFError, OSError):
                return None
            except BaseException:  # Ctrl-C: half an answer may have been read
                self._questions.close()  # so the child ends, and is replaced
                raise

    def _answer(self, wanted: int) -> Any:
        """Wait for one answer; others are late, for questions given up before."""
        while messages := self._questions.receive_all(ANSWER_S):
            answers = dict(messages)
            if wanted in answers:
                return answers[wanted]
        return None

    def is_free(self) -> bool:
        """Whether no thread, this one included, is stuck in a question."""
        if not self._lock.acquire(timeout=STUCK_S):
            return False
        self._lock.release()
        return True

    def end(self) -> None:
        """End it, by force if needed, and wait until it is gone. Idempotent."""
        with self._lock:
            self._questions.close()
        self.reap(END_S)


class ProcessHost:
    """The trainer's end of an engine in a child.

    Args:
        recipe: what to run.
        byte_budget: its present limit is what the child's batches in flight may hold.
            They are not charged here, and a later change does not reach the child.
        cursor: where the first batch starts.
        trainer: the meter of the trainer's thread, whose totals readings include.

    Raises:
        WorkerError: the child died several times while it started.
        Exception: whatever building the engine raises in the child.
    """

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        cursor: Cursor,
        trainer: TrainerMeter,
    ) -> None:
        self._owner = os.getpid()
        self._recipe = replace(recipe, device=None)  # the trainer copies batches there
        self._childs_budget = byte_budget.copied()
        self._trainer = trainer
        self.cursor = cursor
        self._round = 0
        self._over = False
        # What was received in this round, in order.
        self._due: deque[ReceivedBatch | BaseException | End] = deque()
        # Errors raised since `cursor`; how many of them repeat; deaths in a row.
        self._raised = self._mute = self._deaths = 0
        self._last: Reading
        self._fresh: Reading | None = None
        self._knobs: tuple[View, ...] = ()
        self.era = 0
        self._start()

    def next(self) -> Delivery | None:
        while not self._over:
            due = self._next_due()
            if isinstance(due, End):
                self.cursor, self._fresh = due.cursor, self._note(due.reading)
                self._raised, self._over = 0, True
                break
            self._child.take(self._round, len(self._due))
            if isinstance(due, ReceivedBatch):
                return self._take(due)
            if self._mute:  # it was raised already, before the child was replaced
                self._mute -= 1
                continue
            self._raised += 1
            try:
                raise due
            finally:  # the exception holds this frame, so this must not hold it
                del due
        return None

    def begin(self, cursor: Cursor) -> None:
        self.cursor, self._over = cursor, False
        self._raised = self._mute = self._deaths = 0
        if not self._recipe.options.persistent_workers:
            self._child.end()  # the next one gets the dataset as it is now
        self._due.clear()
        self._round += 1
        try:
            self._child.pipe.send((self._round, cursor))
        except EOFError:
            self._replace()

    def read(self) -> Reading:
        reading = self._child.ask(methodcaller("read"))
        if reading is not None:
            self._last = reading
        return self._whole(self._last)

    def glance(self) -> Reading | None:
        reading, self._fresh = self._fresh, None
        return reading

    def knobs(self) -> tuple[Knob, ...]:
        views = self._child.ask(knobs_of)
        if views is not None:
            self._knobs = views
        return tuple(map(self._knob, self._knobs))

    def is_free(self) -> bool:
        return self._child.is_free()

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._child.end()
            self._child.close()

    # The child and its successors

    def _start(self) -> None:
        """Fork a child that continues at `cursor`; wait until it is ready, or fails."""
        body = partial(serve, self._recipe, self._childs_budget, self.cursor)
        child: HostChild | None = None
        try:
            with interrupts_deferred():  # until it is known whose child it is
                child = self._child = HostChild(body)
            self._greet(child)
        except BaseException:  # nobody else could end what has begun
            if child is not None:
                self.close()
            raise

    def _greet(self, child: HostChild) -> None:
        try:
            greeting, *messages = child.receive()
        except EOFError:
            self._reap()
            return
        if isinstance(greeting, BaseException):
            raise recall(greeting)
        self._last = greeting
        self._hear(messages)

    def _replace(self) -> None:
        """Start another child that continues at `cursor`."""
        self.close()
        self._round, self._mute = 0, self._raised
        self.era += 1
        self._start()

    def _reap(self) -> None:
        """Handle the child's death: start another, unless that keeps failing."""
        self._child.end()
        how = self._child.how_it_ended()
        self._deaths += 1
        who = f"the process that hosts the engine (pid {self._child.pid})"
        if self._deaths > DEATHS:
            self._deaths = 0
            text = (
                f"{who} died {DEATHS + 1} times with no batch in between; the last: "
                f"{how}\nlook for a crash in native code, or for the system's "
                "out-of-memory killer"
            )
            raise WorkerError(text)
        text = "%s died (%s); another one continues with the batch that is due"
        LOGGER.warning(text, who, how)
        self._replace()

    # What it sends

    def _next_due(self) -> ReceivedBatch | BaseException | End:
        """Return what is due.

        Everything that has arrived is opened at once: after a training step the caches
        are cold, and after the first batch the others cost hardly anything.
        """
        while not self._due:
            try:
                self._hear(self._child.receive())
            except EOFError:
                self._reap()
        return self._due.popleft()

    def _hear(self, messages: list[tuple[int, Any]]) -> None:
        """Sort messages for `next`."""
        for round_, message in messages:
            if isinstance(message, logging.LogRecord):
                logger = logging.getLogger(message.name)
                if logger.isEnabledFor(message.levelno):
                    logger.handle(message)
                continue
            due = self._open(message)
            if round_ == self._round:
                self._due.append(due)

    def _open(
        self, message: Batch | BaseException | End
    ) -> ReceivedBatch | BaseException | End:
        """Open a message of any round, because descriptors came with it."""
        if isinstance(message, Batch):
            return self._child.open(message)
        return message if isinstance(message, End) else recall(message)

    def _take(self, batch: ReceivedBatch) -> Delivery:
        self.cursor = batch.cursor
        self._raised = self._mute = self._deaths = 0
        if batch.reading is not None:
            self._fresh = self._note(batch.reading)
        return batch.delivery

    def _note(self, reading: Reading) -> Reading:
        self._last = reading
        return self._whole(reading)

    def _whole(self, reading: Reading) -> Reading:
        """Return a reading of the child, completed with the trainer's part."""
        meter = self._trainer
        return replace(
            reading, epoch=meter.epoch, step=meter.step, trainer=meter.read()
        )

    def _knob(self, view: View) -> Knob:
        ask = partial(self._set_or_read, view)
        return Knob(*view[:5], partial(ask, None), ask, view.choices)

    def _set_or_read(self, view: View, value: Value | None) -> Value:
        """Set a knob (None: only read it); return its value, as far as it is known."""
        known = view.value if value is None else value
        question = partial(
            set_knob, operator=view.operator, name=view.name, value=value
        )
        answer: Value | None = self._child.ask(question)
        return known if answer is None else answer

    def __repr__(self) -> str:
        return f"<ProcessHost at {self.cursor}: {self._child!r}>"
