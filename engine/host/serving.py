"""The child that hosts an engine, from within, and the messages in its two pipes.

    batches     (round, Cursor) | Taken ─▶    ◀─ (round, Batch | exception | End | log)
    questions   (number, question) ─▶         ◀─ (number, answer)

The main thread takes batches from the engine and hands them over while there is room.
A second thread answers questions, which must not wait for a batch without room; it
closes the engine when the trainer is gone. `round` counts the trainer's calls of
`begin`, and so tells messages sent before a call from those that answer it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from logging.handlers import QueueHandler
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, NamedTuple

from ...errors import SampleError
from ..core.byte_budget import ByteBudget
from ..feed import Delivery
from ..observe.knob import KnobName, Value
from ..observe.reading import Reading, TrainerMeter
from ..plan import Cursor
from ..program.seeding import mixed, seed_global_generators
from ..recipe import Recipe
from ..workers.process.child import leave
from ..workers.process.daemonic import daemonic
from ..workers.process.handover import Packed, Packer, Returned, travel
from ..workers.process.pipe import Pipe, shut_down
from ..workers.process.slabs import SlabPool
from ..workers.process.worker import use_one_thread
from .local import TrainerHost

AHEAD_BYTES = 8 << 20
MIN_AHEAD = 3
MAX_AHEAD = 16
"""Batches handed over that the trainer has not taken yet: as many as fit into
`AHEAD_BYTES`, within these bounds. The more arrive together, the less each costs the
trainer."""
CLOSE_S = 0.6
"""How long the user's functions may take to finish, in seconds."""
HOSTS = 0x686F7374
"""Separates the seeds of hosts from those of worker processes."""
KEEP = 40
"""Slabs that the trainer may hold, including those of batches it has not taken yet."""
UNFIT = (
    "a batch cannot be handed over to the trainer's process (%s: %s); use "
    'host="trainer", or let collate_fn return arrays, tensors, numbers, text or bytes'
)
POSITION = attrgetter(*(field.name for field in fields(Cursor)))


class Taken(NamedTuple):
    """The trainer has taken some more batches, so there is room for others."""

    round_: int
    batches: int
    returned: Returned


class Batch(NamedTuple):
    """One batch, with its arrays in slabs."""

    facts: tuple[Any, ...]
    """The fields of its plan: they unpickle ten times faster than a dataclass."""
    position: tuple[int, ...]
    """Where the next batch starts: the fields of a cursor."""
    packed: Packed
    reading: Reading | None


class End(NamedTuple):
    """The epoch has ended."""

    cursor: Cursor
    reading: Reading


class View(NamedTuple):
    """A knob, in a form that can be sent."""

    operator: str
    name: KnobName
    lower: int
    upper: int
    tunable: bool
    value: Value
    choices: tuple[str, ...]


Question = Callable[[TrainerHost], Any]
"""A picklable function; its result is the answer."""


def knobs_of(host: TrainerHost) -> tuple[View, ...]:
    """Answer which knobs there are, and their values."""
    look = attrgetter(*View._fields)
    return tuple(View(*look(knob)) for knob in host.knobs())


def set_knob(
    host: TrainerHost, operator: str, name: KnobName, value: Value | None
) -> Value | None:
    """Set a knob (None: only read it); answer its value, None if it is gone."""
    for knob in host.knobs():
        if (knob.operator, knob.name) == (operator, name):
            return knob.value if value is None else knob.set(value)
    return None


def serve(
    recipe: Recipe,
    byte_budget: ByteBudget,
    cursor: Cursor,
    questions: Pipe,
    batches: Pipe,
) -> None:
    """Host an engine, until the trainer closes the pipes or is gone."""
    use_one_thread()
    # With a copy of the trainer's generators, both would draw the same values.
    begun = recipe.seed, recipe.planned.shard.rank, cursor.step
    seed_global_generators(mixed((HOSTS, *begun)))
    log = take_over_log()
    slabs = SlabPool(KEEP)
    trainer = TrainerMeter()
    recipe = replace(recipe, buffers=replace(recipe.buffers.elsewhere, lend=slabs.lend))
    with daemonic():
        try:
            host = TrainerHost(recipe, byte_budget, cursor, trainer)
        except Exception as error:  # noqa: BLE001 the trainer raises it
            batches.send(travel(error))
            return
        # It keeps the memory of what the trainer holds until nobody fills any.
        pump = Pump(host, batches, slabs, trainer, log)
        answering = threading.Thread(target=answer, args=(host, questions, batches))
        answering.start()
        try:
            batches.send(host.read())
            pump.run()
        except EOFError:
            answering.join()  # it closes the engine
        except BaseException:  # noqa: BLE001 nobody above could report it in time
            traceback.print_exc()
            leave(1)


def take_over_log() -> SimpleQueue[logging.LogRecord]:
    """Queue log records for the trainer, whose settings decide what is shown."""
    log: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger = logging.getLogger("penstock")
    logger.handlers = [QueueHandler(log)]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    return log


def answer(host: TrainerHost, questions: Pipe, batches: Pipe) -> None:
    """Answer questions; close the engine, and soon end all, when no more can come."""
    try:
        with contextlib.suppress(EOFError):
            while True:
                number, question = questions.receive()
                questions.send((number, question(host)))
        end = threading.Timer(CLOSE_S, leave, (0,))
        end.daemon = True
        end.start()
        shut_down(batches)  # or the trainer would go on with a closed engine
        host.close()
    except BaseException:  # noqa: BLE001 nobody above could report it
        traceback.print_exc()
        leave(1)


class Pump:
    """Hands batches over, a few more than the trainer has taken."""

    def __init__(
        self,
        host: TrainerHost,
        pipe: Pipe,
        slabs: SlabPool,
        trainer: TrainerMeter,
        log: SimpleQueue[logging.LogRecord],
    ) -> None:
        self._host = host
        self._pipe = pipe
        self._packer = Packer(slabs)
        self._meter = trainer
        self._log = log
        self._round = self._ahead = 0
        self._limit = MIN_AHEAD
        self._over = False
        self._begin: Cursor | None = None

    def run(self) -> None:
        """Work until the pipe ends."""
        while True:
            if self._over or self._ahead >= self._limit:
                self._hear(self._pipe.receive())
            else:
                self._hand_over()

    def _hear(self, message: Taken | tuple[int, Cursor]) -> None:
        if isinstance(message, Taken):
            self._packer.take_back(message.returned)
            self._ahead -= message.batches if message.round_ == self._round else 0
            return
        self._round, self._begin = message
        self._ahead, self._over = 0, False

    def _hand_over(self) -> None:
        message: Batch | End | BaseException
        descriptors: tuple[int, ...] = ()
        try:
            delivery = self._next()
            if delivery is None:
                message = End(self._host.cursor, self._host.read())
            else:
                message, descriptors = self._pack(delivery)
        except BaseException as error:  # noqa: BLE001 the trainer raises it
            message = travel(error)
        while not self._log.empty():
            self._pipe.send((self._round, self._log.get()))
        self._pipe.send((self._round, message), descriptors)
        self._ahead += 1

    def _next(self) -> Delivery | None:
        host, meter = self._host, self._meter
        if self._begin is not None:
            cursor, self._begin = self._begin, None
            host.begin(cursor)
        meter.ask(time.perf_counter_ns())
        delivery = host.next()
        if delivery is None:
            meter.stop()
            self._over = True
        else:
            meter.get(time.perf_counter_ns(), delivery.plan)
        return delivery

    def _pack(self, delivery: Delivery) -> tuple[Batch, tuple[int, ...]]:
        """Return a batch as it is sent, with its descriptors."""
        try:
            packed, descriptors = self._packer.pack(delivery.data)
        except Exception as error:
            raise SampleError(UNFIT % (type(error).__name__, error)) from error
        fit = AHEAD_BYTES // max(self._packer.nbytes, 1)
        self._limit = min(max(fit, MIN_AHEAD), MAX_AHEAD)
        host = self._host
        facts, position = tuple(delivery.plan), POSITION(host.cursor)
        return Batch(facts, position, packed, host.glance()), descriptors
