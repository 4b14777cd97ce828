"""The template: a child from which worker processes are forked, whenever one is hired.

Forked from the trainer at `iter()`, it inherits the dataset and the functions as they
are: nothing is pickled, and memory is shared until written. It runs no threads, so
forking from it is safe at any time, while the trainer goes on with its own. Where the
trainer must not be forked, it is a fresh interpreter that gets them by cloudpickle
(fresh.py). It ends when the trainer closes the pipe or dies, and the workers with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Mapping
from functools import partial

import torch

from ..program import Program
from ..recipe import StartMethod
from .forking import fork
from .hands import Hands
from .mailbox import Mailbox
from .nursery import Post, fork_worker, run_child, serve_template
from .pipe import Pipe, kept, pipe

__all__ = ["Template"]

END_S = 1.0
"""How long the template may take to end when told to, before it is made to."""


class Template:
    """The trainer's end.

    Args:
        programs: by segment; worker processes run one of them.
        seed: of the samples' random streams.
        method: how it starts; None: by fork, unless CUDA is in use, which does not
            survive one.

    Raises:
        SpecError: something in the programs cannot travel to a fresh interpreter.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        seed: int,
        method: StartMethod | None = None,
    ) -> None:
        self._programs = programs
        self._seed = seed
        self._method = method or "fork"
        if method is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._method = "forkserver"
        self._lock = threading.Lock()
        """Guards `_pipe`, `_pid` and `generation`: several crews hire."""
        self.generation = 0
        """Workers of an earlier one know the dataset as it was."""
        self._pipe, self._pid = self._start()

    def hire(self, post: Post) -> tuple[Mailbox, Hands]:
        """Have a worker made for a post; return the pipe to it, and its page."""
        ours, theirs = Mailbox.pair()
        hands = Hands.make()
        message, descriptors = tuple(post), (theirs.fileno(), hands.descriptor)
        with self._lock:
            try:
                self._pipe.send(message, descriptors)
            except EOFError:  # killed: as good a one is had from the trainer as it is
                self._bury()
                self._pipe, self._pid = self._start()
                self._pipe.send(message, descriptors)
        theirs.close()
        return ours, hands

    def renew(self) -> None:
        """Start anew from the trainer as it is now; old workers are to be dismissed."""
        with self._lock:
            self.generation += 1  # first: workers that end now were dismissed
            self._pipe.close()  # it ends while the new one is made
            ending = self._pid
            self._pipe, self._pid = self._start()
            wait_for(ending)

    def close(self) -> None:
        """End it and all workers, and wait until they are gone."""
        with self._lock:
            self._bury()

    def _bury(self) -> None:
        self._pipe.close()
        wait_for(self._pid)

    def _start(self) -> tuple[Pipe, int]:
        if self._method != "fork":
            from .fresh import start_fresh  # and cloudpickle, with it

            return start_fresh(self._programs, self._seed, self._method)
        ours, theirs = pipe()
        with kept(theirs):
            pid = fork()
        if pid == 0:
            make = partial(fork_worker, self._programs, self._seed)
            run_child(partial(serve_template, theirs, make))
        theirs.close()
        return ours, pid

    def __repr__(self) -> str:
        return f"<Template pid {self._pid}, by {self._method}>"


def wait_for(pid: int) -> None:
    """Wait until a template whose pipe is closed is gone, and its workers with it."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        # None of it may be left where others wait for any child.
        if not ends_within(pid, END_S):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ends_within(pid: int, time_s: float) -> bool:
    """Wait until a child of this process has ended; tell whether it has, in time.

    Raises:
        ProcessLookupError: it has, and somebody else has waited for it.
    """
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(time_s * 1000))
    finally:
        os.close(descriptor)
