"""The child that hosts an engine, as the trainer holds it: from its fork to its burial.

Two pipes lead to it. The trainer's thread takes batches from the one; questions go
through the other, from whatever thread, and wait for no batch. Both end with either
side.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ...system.forking import fork
from ..workers.process.deaths import cause_of, oom_kills
from ..workers.process.fork_server import ends_within, run_child
from ..workers.process.pipe import Pipe, kept, pipe
from .handover import Packed, Unpacker
from .messages import BatchesTaken, Question

__all__ = [
    "HostChild",
]

ANSWER_S = 0.3
"""How long a question may wait: the child's user code may hold the GIL for as long."""
END_S = 0.6
"""How long it may take to end once its pipes have, before it is made to."""
STUCK_S = 0.5
"""No thread holds a lock for longer than a question takes; one that does never ends."""


class HostChild:
    """One child; forked here.

    `_lock` guards the control pipe and `_number`; all else is the trainer's thread's.

    Args:
        serve: what it does, given its end of the control pipe, through which its end of
            the data pipe comes first. It ends with the pipes.
    """

    def __init__(self, serve: Callable[[Pipe], None]) -> None:
        self._kills = oom_kills()
        self._lock = threading.Lock()
        self._number = 0
        self._round = self._taken = 0
        """Batches taken that it has not been told of, and of which turn."""
        self._at_once = 1
        """Of how many it is told at once."""
        self._unpacker = Unpacker()
        self._status: int | None = None
        self._data, data = pipe()
        self._control, control = pipe()
        with kept(control):
            self.pid = fork()
        if self.pid == 0:
            run_child(partial(serve, control))
        control.close()
        with contextlib.suppress(EOFError):  # as `receive` will say
            self._control.send(None, (data.fileno(),))
        data.close()

    def send(self, message: object) -> None:
        """Tell it something; EOFError if it is gone."""
        if self._data.fileno() < 0:
            raise EOFError
        self._data.send(message)

    def receive(self) -> list[Any]:
        """Return all that it has said, something at least; EOFError if it is gone."""
        if self._data.fileno() < 0:
            raise EOFError
        messages = self._data.receive_all()
        self._at_once = (len(messages) + 1) // 2
        return messages

    def unpack(self, packed: Packed) -> Any:
        """Return a batch that has just been received."""
        return self._unpacker.unpack(packed, self._data.descriptors)

    def take(self, round_: int, left: int) -> None:
        """Tell it that a batch has been taken, and which arrays have died.

        To wake it takes longer than all else here: it is told twice for all that comes
        together, and always before none is `left`, or it would wait for ever.
        """
        if round_ != self._round:
            self._round, self._taken = round_, 0
        self._taken += 1
        if self._taken < self._at_once and left:
            return
        with contextlib.suppress(EOFError):  # what it has sent is good all the same
            self.send(BatchesTaken(round_, self._taken, self._unpacker.take_died()))
        self._taken = 0

    def ask(self, question: Question) -> Any:
        """Return its answer; None if it has none in time, or is gone."""
        with self._lock:
            try:
                return self._ask(question)
            except (EOFError, OSError):
                return None
            except BaseException:  # Ctrl-C: half an answer may have been read
                self._control.close()  # so it ends, and another takes its place
                raise

    def is_free(self) -> bool:
        """Whether no thread is stuck in a question; if so, it may be this one."""
        if not self._lock.acquire(timeout=STUCK_S):
            return False
        self._lock.release()
        return True

    def close(self) -> None:
        """End it, by force if need be, and wait until it is gone. Idempotent."""
        with self._lock:
            self._control.close()
        self._data.close()
        if self._status is not None:
            return
        # None of it may be left where others wait for any child.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if not ends_within(self.pid, END_S):
                os.kill(self.pid, signal.SIGKILL)
            _, self._status = os.waitpid(self.pid, 0)

    def cause(self) -> str:
        """Say how it ended."""
        return cause_of(self._status, self._kills, oom_kills())

    def _ask(self, question: Question) -> Any:
        control = self._control
        if control.fileno() < 0:
            return None
        self._number += 1
        control.send((self._number, question))
        poll = select.poll()
        poll.register(control, select.POLLIN)
        while poll.poll(ANSWER_S * 1000):
            for number, answer in control.receive_all():
                if number == self._number:  # else it is late: of one that was given up
                    return answer
        return None

    def __repr__(self) -> str:
        return f"<HostChild pid {self.pid}>"
