"""The child that hosts an engine, from within.

main thread   takes batches from the engine, hands them over while there is room
`asked`       answers questions; ends the process when the trainer is gone
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from dataclasses import replace

from ...errors import SampleError
from ..core.byte_budget import ByteBudget
from ..core.chunk import Failure
from ..observe.reading import TrainerMeter
from ..plan import Cursor
from ..recipe import Recipe
from ..workers.process.pipe import Pipe
from ..workers.process.slabs import SlabPool
from ..workers.process.worker import leave, recall, travel, use_one_thread
from .handover import Packer
from .local import TrainerHost
from .messages import Batch, BatchesTaken, Begin, End, FailureMessage, Said

__all__ = [
    "recalled",
    "serve",
]

AHEAD_BYTES = 8 << 20
MIN_AHEAD = 3
MAX_AHEAD = 16
"""Batches handed over that the trainer has not taken yet: as many small ones as take so
many bytes, since what each costs the trainer is less the more come at once."""
CLOSE_S = 0.3
"""How long the user's functions may take to come to their end."""
ALL = 1 << 30


def serve(recipe: Recipe, limit_bytes: int, cursor: Cursor, control: Pipe) -> None:
    """Host an engine, until the trainer closes the pipes or is gone."""
    use_one_thread()
    control.receive()
    data = Pipe.adopt(control.descriptors.popleft())
    slabs = SlabPool(keep=ALL)  # the packer knows which ones the trainer keeps
    trainer, said = TrainerMeter(), Listener.take_over().said
    recipe = replace(recipe, buffers=replace(recipe.buffers, lend=slabs.lend))
    try:
        host = TrainerHost(recipe, ByteBudget(limit_bytes), cursor, trainer, slabs)
    except Exception as error:  # noqa: BLE001 the trainer is told
        data.send(travelling(error))
        return
    asked = threading.Thread(target=attend, args=(host, control), name="asked")
    asked.start()
    try:
        data.send(host.read())
        Pump(host, data, slabs, trainer, said).run()
    except EOFError:
        asked.join()  # it ends the process


def attend(host: TrainerHost, control: Pipe) -> None:
    """Answer questions; end the process when no more can come."""
    status = 1
    try:
        while True:
            number, question = control.receive()
            control.send((number, question.answer(host)))
    except EOFError:
        status = 0
        end = threading.Timer(CLOSE_S, leave, (status,))
        end.daemon = True
        end.start()
        host.close()
    except BaseException:  # noqa: BLE001 the last one who can tell
        traceback.print_exc()
    finally:
        leave(status)


class Pump:
    """StatusPage batches over, a few more than the trainer has taken."""

    def __init__(
        self,
        host: TrainerHost,
        data: Pipe,
        slabs: SlabPool,
        trainer: TrainerMeter,
        said: deque[Said],
    ) -> None:
        self._host = host
        self._data = data
        self._packer = Packer(slabs)
        self._meter = trainer
        self._round = self._ahead = 0
        self._limit = MIN_AHEAD
        self._over = False
        self._begin: Cursor | None = None
        self._said = said

    def run(self) -> None:
        """Work until the pipe ends."""
        while True:
            if self._over or self._ahead >= self._limit:
                self._hear(self._data.receive())
            else:
                self._hand_over()

    def _hear(self, message: Begin | BatchesTaken) -> None:
        if isinstance(message, BatchesTaken):
            self._packer.take_back(message.keys)
            self._ahead -= message.batches if message.round_ == self._round else 0
            return
        self._round, self._begin = message
        self._ahead, self._over = 0, False

    def _hand_over(self) -> None:
        try:
            message, descriptors = self._make()
        except BaseException as error:  # noqa: BLE001 it is the trainer's to see
            message, descriptors = FailureMessage(self._round, travelling(error)), ()
        while self._said:
            self._data.send(self._said.popleft())
        self._data.send(message, descriptors)
        self._ahead += 1

    def _make(self) -> tuple[Batch | End | FailureMessage, tuple[int, ...]]:
        """Return what to hand over next, with the descriptors that go with it."""
        host, meter = self._host, self._meter
        if self._begin is not None:
            cursor, self._begin = self._begin, None
            host.begin(cursor)
        meter.ask(time.perf_counter_ns())
        delivery = host.next()
        if delivery is None:
            meter.stop()
            self._over = True
            return End(self._round, host.cursor, host.read()), ()
        plan = delivery.plan
        meter.get(time.perf_counter_ns(), plan)
        try:
            packed, descriptors = self._packer.pack(delivery.data)
        except Exception as error:
            text = (
                "a batch cannot be handed over to the trainer's process "
                f'({type(error).__name__}: {error}); use host="trainer", or let '
                "collate_fn return arrays, tensors, numbers, text or bytes"
            )
            raise SampleError(text) from error
        fit = AHEAD_BYTES // max(self._packer.nbytes, 1)
        self._limit = min(max(fit, MIN_AHEAD), MAX_AHEAD)
        batch = Batch.of(self._round, plan, host.cursor, packed, host.glance())
        return batch, descriptors


class Listener(logging.Handler):
    """Keeps what is logged for the trainer, whose settings decide what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.said: deque[Said] = deque()

    @classmethod
    def take_over(cls) -> Listener:
        """Be the only one to hear what penstock says in this process."""
        listener = cls()
        for name in ("penstock", "penstock.autotune"):
            logger = logging.getLogger(name)
            logger.handlers = [listener]
            logger.propagate = False
            logger.setLevel(logging.INFO)
        return listener

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self.said.append(Said(record.name, record.levelno, record.getMessage()))


def travelling(error: BaseException) -> BaseException:
    """Make an exception fit to be sent, its traceback kept as text."""
    return travel(Failure(error, "", 0, 0)).error


def recalled(error: BaseException) -> BaseException:
    """In the trainer: hang the traceback on it that it had in the child."""
    return recall(Failure(error, "", 0, 0)).error
