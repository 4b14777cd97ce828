"""`host="process"`: the engine, its threads included, runs in one child of the trainer.

The trainer's GIL is its own: `next()` reads one message and maps what it names. The
child is forked from the trainer, so the dataset and the functions are there as they
are. Should it die, another one goes on at the batch that is due.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ...errors import SampleError, SpecError, WorkerError
from ..core.byte_budget import ByteBudget
from ..feed import Delivery
from ..observe.knob import Knob, KnobName, Value
from ..observe.reading import Reading, TrainerMeter
from ..plan import Cursor
from ..recipe import Recipe
from .child import HostChild
from .messages import (
    Batch,
    Begin,
    End,
    FailureMessage,
    Knobs,
    ReadCounters,
    Said,
    SetKnob,
    View,
)
from .serving import recalled, serve

__all__ = [
    "ProcessHost",
]

LOGGER = logging.getLogger("penstock")

DEATHS = 5
"""How often a child may die in a row, with no batch in between."""


class ReceivedBatch(NamedTuple):
    """A batch received, its arrays mapped."""

    round_: int
    delivery: Delivery
    cursor: Cursor
    """Where the next batch starts."""
    reading: Reading | None


class ProcessHost:
    """The trainer's end of an engine in a child.

    Args:
        recipe: what to run.
        purse: its limit, as it is now, is what the child's batches in flight may hold;
            they are not charged here, and a later change does not reach the child.
        cursor: where the first batch starts.
        trainer: the instrument of the trainer's thread, whose totals readings carry.

    Raises:
        SpecError: this system has no fork or no memfd; or as building the engine does.
    """

    def __init__(
        self,
        recipe: Recipe,
        byte_budget: ByteBudget,
        cursor: Cursor,
        trainer: TrainerMeter,
    ) -> None:
        if not (hasattr(os, "fork") and hasattr(os, "memfd_create")):
            text = 'host="process" needs fork and memfd, as Linux has them; got '
            raise SpecError(f'{text}{os.name}: use host="trainer"')
        self._owner = os.getpid()
        self._recipe = replace(recipe, device=None)  # the trainer's to copy to
        self._limit_bytes = byte_budget.limit_bytes
        self._trainer = trainer
        self._cursor = cursor
        self._round = 0
        self._over = False
        self._due: deque[ReceivedBatch | FailureMessage | End] = deque()
        """What has been received: the next first."""
        self._told = self._mute = self._deaths = 0
        """Errors told since `_cursor`; of these, still to come anew; deaths in a row"""
        self._last: Reading
        self._fresh: Reading | None = None
        self._knobs: tuple[View, ...] = ()
        self._child = self._fork()
        self.era = 0
        self._greet()

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    def next(self) -> Delivery | None:
        """Return the next batch of the epoch, or None at its end.

        Raises:
            Exception: whatever a stage's function raised for a sample of this batch. A
                further call goes on with the batch after it.
            WorkerError: the child died again and again.
        """
        while not self._over:
            due = self._next_due()
            if due.round_ != self._round:
                continue
            if isinstance(due, ReceivedBatch):
                return self._take(due)
            if isinstance(due, End):
                self._cursor, self._fresh = due.cursor, self._note(due.reading)
                self._told, self._over = 0, True
            elif self._is_new():
                try:
                    raise due.error
                finally:  # the exception keeps this frame: it must not keep it in turn
                    del due
        return None

    def begin(self, cursor: Cursor) -> None:
        self._cursor, self._over, self._told = cursor, False, 0
        self._mute = self._deaths = 0
        if not self._recipe.options.persistent_workers:
            self._child.close()  # the next one knows the dataset as it is now
        self._due.clear()
        self._round += 1
        try:
            self._child.send(Begin(self._round, cursor))
        except EOFError:
            self._start()

    def read(self) -> Reading:
        reading = self._child.ask(ReadCounters())
        if reading is not None:
            self._last = reading
        return self._whole(self._last)

    def glance(self) -> Reading | None:
        reading, self._fresh = self._fresh, None
        return reading

    def knobs(self) -> tuple[Knob, ...]:
        views = self._child.ask(Knobs())
        if views is not None:
            self._knobs = views
        return tuple(map(self._knob, self._knobs))

    def is_free(self) -> bool:
        return self._child.is_free()

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._child.close()

    # The child, and its successors

    def _fork(self) -> HostChild:
        return HostChild(partial(serve, self._recipe, self._limit_bytes, self._cursor))

    def _start(self) -> None:
        """Have another child go on at `_cursor`."""
        self._child.close()
        self._round, self._mute = 0, self._told
        self.era += 1
        self._child = self._fork()
        self._greet()

    def _greet(self) -> None:
        """Hear what a new child has to say: that it is ready, or why it is not."""
        try:
            greeting, *messages = self._child.receive()
        except EOFError:
            self._reap()
            return
        if isinstance(greeting, BaseException):
            self.close()
            raise recalled(greeting)
        self._last = greeting
        self._hear(messages)

    def _reap(self) -> None:
        """The child died: start another, unless that has been of no use."""
        self._child.close()
        self._deaths += 1
        who = f"the process that hosts the engine (pid {self._child.pid})"
        if self._deaths > DEATHS:
            self._deaths = 0
            text = (
                f"{who} died {DEATHS + 1} times with no batch in between (last: "
                f"{self._child.cause()}); look for a crash in native code, or for the "
                "system's out-of-memory killer"
            )
            raise WorkerError(text)
        text = "%s died (%s); another one goes on with the batch that is due"
        LOGGER.warning(text, who, self._child.cause())
        self._start()

    # What it says

    def _next_due(self) -> ReceivedBatch | FailureMessage | End:
        """Return what is due.

        All that has come is opened at once: after a training step the caches are cold,
        and what one batch costs then, the others with it hardly add to.
        """
        while not self._due:
            try:
                self._hear(self._child.receive())
            except EOFError:
                self._reap()
        return self._due.popleft()

    def _hear(self, messages: list[Batch | FailureMessage | End | Said]) -> None:
        """Make of messages what `next` needs."""
        for message in messages:
            if isinstance(message, Said):
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            elif isinstance(message, Batch):
                self._due.append(self._open(message))
            elif isinstance(message, FailureMessage):
                self._due.append(message._replace(error=recalled(message.error)))
            else:
                self._due.append(message)

    def _open(self, batch: Batch) -> ReceivedBatch | FailureMessage:
        round_ = batch.round_
        try:
            data = self._child.unpack(batch.packed)
        except Exception as error:  # noqa: BLE001 its own batch is due later
            text = (
                f"a batch cannot be taken over from the process that made it "
                f'({type(error).__name__}: {error}); use host="trainer", or let '
                "collate_fn return arrays, tensors, numbers, text or bytes"
            )
            failure = SampleError(text)
            failure.__cause__ = error
            return FailureMessage(round_, failure)
        return ReceivedBatch(
            round_, Delivery(data, batch.plan), batch.cursor, batch.reading
        )

    def _take(self, batch: ReceivedBatch) -> Delivery:
        self._child.take(batch.round_, len(self._due))
        self._cursor = batch.cursor
        self._told = self._mute = self._deaths = 0
        if batch.reading is not None:
            self._fresh = self._note(batch.reading)
        return batch.delivery

    def _is_new(self) -> bool:
        """Whether an error has not been told yet, by a child that has died since."""
        self._child.take(self._round, len(self._due))
        if self._mute:
            self._mute -= 1
            return False
        self._told += 1
        return True

    def _note(self, reading: Reading) -> Reading:
        self._last = reading
        return self._whole(reading)

    def _whole(self, reading: Reading) -> Reading:
        """Return a reading of the child's with the trainer's part filled in."""
        meter = self._trainer
        return replace(
            reading, epoch=meter.epoch, step=meter.step, trainer=meter.read()
        )

    def _knob(self, view: View) -> Knob:
        operator, name = view.operator, view.name

        def read() -> Value:
            return self._set_or_read(operator, name, None, view.value)

        def write(value: Value) -> None:
            self._set_or_read(operator, name, value, value)

        return Knob(
            operator,
            name,
            view.lower,
            view.upper,
            view.tunable,
            read,
            write,
            view.choices,
        )

    def _set_or_read(
        self, operator: str, name: KnobName, value: Value | None, otherwise: Value
    ) -> Value:
        """Set a knob, or look at it; return where it stands."""
        answer: Value | None = self._child.ask(SetKnob(operator, name, value))
        return otherwise if answer is None else answer

    def __repr__(self) -> str:
        return f"<ProcessHost at {self._cursor}: {self._child!r}>"
