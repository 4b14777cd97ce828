"""The template from within: it makes workers, waits for them, and says how they ended.

One thread, the main one, and one handler, that of SIGCHLD.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from ..program import Program
from .hands import Hands, post_status
from .pipe import Pipe, kept
from .work_pipe import WorkPipe
from .worker import Worker, leave, use_one_thread

__all__ = [
    "Post",
    "fork_worker",
    "run_child",
    "run_worker",
    "serve_template",
    "tell_failure",
]

FAILED = 1 << 8
"""As waitpid tells of a process that exits with status 1."""


class Post(NamedTuple):
    """What a worker is made for."""

    segment: int
    number: int
    """Its own among the workers of the segment, from 0, free when it is made."""


def run_child(body: Callable[[], None]) -> NoReturn:
    """Run a forked process; never returns into the code it was forked from."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what was inherited is not ours to collect or finalise
        body()
        status = 0
    except EOFError:
        status = 0
    except BaseException:  # noqa: BLE001 the last one who can tell
        traceback.print_exc()
    finally:
        leave(status)


Make = Callable[["Post", Pipe], int]
"""Makes a worker for a post, given its pipe, with its page; returns its pid."""


def serve_template(end: Pipe, make: Make) -> None:
    """In the template: make a worker for each that is hired, until the pipe ends."""
    use_one_thread()
    nursery = Nursery()
    signal.signal(signal.SIGCHLD, nursery.reap)
    try:
        while True:
            nursery.add(make, Post(*end.receive()), end)
    finally:
        nursery.end_all()


class Nursery:
    """The template's workers.

    It keeps a copy of each one's pipe until it has posted how that one ended: so the
    trainer sees the pipe's end of file after the worker's status, never before.
    """

    def __init__(self) -> None:
        self._children: dict[int, Pipe] = {}

    def add(self, make: Make, post: Post, end: Pipe) -> None:
        """Make a worker with the pipe and the page that have just come."""
        work = WorkPipe.adopt(end.descriptors.popleft())
        work.descriptors.append(end.descriptors.popleft())
        # Masked: one that dies at once must be known before its end is heard of.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            self._children[make(post, work)] = work
        except Exception:  # noqa: BLE001 whatever the user's modules raise
            tell_failure(work.descriptors[0])
            post_status(work.descriptors[0], FAILED)
            work.close()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def reap(self, *_: object) -> None:
        """Take note of the workers that have ended. The handler of SIGCHLD."""
        for pid in list(self._children):
            self._wait(pid, os.WNOHANG)

    def end_all(self) -> None:
        """The trainer is gone, or wants no more: nor do the workers."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._children):
            self._wait(pid, 0)

    def _wait(self, pid: int, options: int) -> None:
        with contextlib.suppress(ChildProcessError):  # in a worker just forked
            ended, status = os.waitpid(pid, options)
            if ended:
                work = self._children.pop(pid)
                post_status(work.descriptors[0], status)
                work.close()


def tell_failure(page: int) -> None:
    """Write the exception now handled where the trainer looks for a worker's words."""
    os.write(page, traceback.format_exc().encode())


def fork_worker(
    programs: Mapping[int, Program], seed: int, post: Post, work: Pipe
) -> int:
    """Fork a worker from this process; return its pid."""
    with kept(work):
        pid = os.fork()
    if pid == 0:
        run_child(lambda: run_worker(programs[post.segment], seed, post, work))
    return pid


def run_worker(program: Program, seed: int, post: Post, work: Pipe) -> None:
    """In a worker process: work until told to stop or the trainer is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # functions may run commands
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    program.enter(post.number)
    Worker(work, program, seed, Hands(work.descriptors.popleft())).run()
