"""The fork server: a child from which worker processes are forked on demand.

It is forked from the trainer at `iter()`, and inherits the dataset and the functions as
they are. Nothing is pickled, and memory is shared until written. It runs no threads, so
forking from it is safe at any time, while the trainer's threads run on. It ends when
the trainer closes the pipe or dies, and its workers with it.

If the trainer must not be forked, it is a fresh interpreter instead, which receives
what to run by cloudpickle, in a memfd that is passed on:

    forkserver   it is loaded once, and workers are forked from that
    spawn        workers are forked from what is still fresh, and each loads it itself
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from multiprocessing import util

from ...system.forking import interrupts_deferred
from ...system.shared_memory import shared_file
from ..recipe import Recipe, SegmentRecipe, StartMethod
from .child import (
    Child,
    Pipe,
    StatusPage,
    fork_child,
    post_status,
    run_child,
    shut_down,
)
from .handover import loads, pack
from .worker import Seeds, Worker, be_worker, daemonic, find_libraries, set_up_libraries

# How long workers may take to finish their current tasks, in seconds. A worker that is
# killed amid a sample keeps the locks that it shares with other processes.
FINISH_S = 0.5
# How long the fork server may take to end by itself, in seconds.
END_S = 1.0
# What a worker is started for: a segment, its number among the worker processes there,
# from 0 and free when it starts, and seeds as for `be_worker`.
Post = tuple[int, int, tuple[int, ...]]
# By segment: what a worker process works by, and the segment in the trainer.
Works = Mapping[int, tuple[Recipe, SegmentRecipe]]
# Returns what workers do; loads it when it is called for the first time.
Load = Callable[[], Works]


class ForkServer:
    """The trainer's end of the fork server.

    Args:
        works: what worker processes do, by segment.
        seeds: seeds the global generators of each worker.
        method: how to start it.

    Raises:
        SpecError: something in the recipe cannot be sent to a fresh interpreter.
    """

    def __init__(self, works: Works, seeds: Seeds, method: StartMethod) -> None:
        self._works, self._seeds, self._method = works, seeds, method
        # Guards the following, and sending: several worker pools start workers, and a
        # pipe has one sender at a time.
        self._lock = threading.Lock()
        # Workers of an earlier generation have an outdated copy of the dataset.
        self.generation = 0
        # Whether it has ended, and waits to be renewed.
        self.expired = False
        self._server = self._start()

    def start_worker(self, segment: int, number: int) -> tuple[Pipe, StatusPage, int]:
        """Start a worker; return the pipe to it, its page and its generation.

        If fork servers are killed faster than they can be replaced, the pipe reads as
        closed, like that of a worker that died while it started. So does that of a
        worker that an expired server was to start.
        """
        ours, theirs = Pipe.pair()
        status_page = StatusPage.make()
        with self._lock:
            generation = self.generation - self.expired
            if not self.expired:
                self._send(
                    (segment, number, self._seeds(segment, number)),
                    theirs.fileno(),
                    status_page.descriptor,
                )
        theirs.close()
        return ours, status_page, generation

    def _send(self, post: Post, *descriptors: int) -> None:
        try:
            self._server.pipe.send(post, descriptors)
        except EOFError:  # killed: fork an equivalent one from the trainer
            self._server.end(END_S)
            self._server = self._start()
            with contextlib.suppress(EOFError):  # killed, too
                self._server.pipe.send(post, descriptors)

    def expire(self) -> None:
        """Let the server and its workers end; none start until `renew`."""
        with interrupts_deferred(), self._lock:
            if not self.expired:
                self.generation += 1  # first: workers that end from now on were stopped
                self.expired = True
                self._server.pipe.close()

    def reap(self) -> None:
        """Wait until the server and its workers are gone, if it has expired."""
        with self._lock:
            if self.expired:
                self._server.end(END_S)

    def renew(self) -> None:
        """Fork a new server from the trainer's present state; old workers end."""
        self.expire()
        with interrupts_deferred(), self._lock:
            old_server = self._server  # it ends while the new one starts
            self._server = self._start()
            self.expired = False
            old_server.end(END_S)

    def _start(self) -> Child:
        if self._method == "fork":
            find_libraries()
            works = self._works
            return Child.fork(partial(run_fork_server, lambda: works))
        boot = (
            f"import sys; sys.path[:] = {sys.path}; from {__name__} import main; main()"
        )
        body = pack(self._works, "work")
        parcel = shared_file("penstock parcel", len(body))
        ours, theirs = Pipe.pair()
        # Masked until it ignores Ctrl-C, which is the trainer's to handle.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with open(parcel, "wb", closefd=False) as file:
                file.write(body)
            descriptors = theirs.fileno(), parcel
            pid = util.spawnv_passfds(
                os.fsencode(sys.executable),
                [sys.executable, "-c", boot, self._method, *map(str, descriptors)],
                descriptors,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(parcel)
        return Child(ours, pid)


# From here on, everything runs in the fork server or in workers. The fork server has
# one thread, the main one, and one signal handler, for SIGCHLD.


def main() -> None:
    """Be a fork server that is not forked from the trainer; never return."""
    method, end, parcel = sys.argv[1], *map(int, sys.argv[2:])

    @cache
    def load() -> Works:
        # Mapped, as several processes share its file position.
        with mmap.mmap(parcel, 0, access=mmap.ACCESS_READ) as data:
            works: Works = loads(data)
        return works

    pipe = Pipe(socket.socket(fileno=end))
    run_child(partial(run_fork_server, load, pipe, early=method == "forkserver"))


def run_fork_server(load: Load, end: Pipe, *, early: bool = True) -> None:
    """Start the workers that the trainer requests, until the pipe ends.

    Args:
        load: returns what they do.
        end: leads to the trainer.
        early: whether to load that here, once, and not in each of them.
    """
    set_up_libraries()
    workers = ForkedWorkers()
    signal.signal(signal.SIGCHLD, workers.reap)
    try:
        while True:
            for post in end.receive_all():
                workers.add(load, post, end, early=early)
    finally:
        workers.end_all()


class ForkedWorkers:
    """The fork server's workers.

    It keeps a copy of each worker's pipe until it has posted how that worker ended. So
    the trainer sees the end of file after the worker's status, never before.
    """

    def __init__(self) -> None:
        self._children: dict[int, Pipe] = {}

    def add(self, load: Load, post: Post, end: Pipe, *, early: bool) -> None:
        """Start a worker with the pipe and the page that were just received."""
        work = Pipe(socket.socket(fileno=end.descriptors.popleft()))
        work.descriptors.append(end.descriptors.popleft())
        # Masked, so that a worker is registered before its end can be noticed.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            if early:
                load()
            pid = fork_child(partial(run_worker, load, post, work), work)
            self._children[pid] = work
        except Exception:  # noqa: BLE001 whatever the user's modules raise
            # On its page, where the trainer looks for it.
            os.write(work.descriptors[0], traceback.format_exc().encode())
            post_status(work.descriptors[0], 1 << 8)  # as if it had exited with 1
            work.close()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def reap(self, *_: object) -> None:
        """Record the workers that have ended. The handler of SIGCHLD."""
        for pid in list(self._children):
            self._wait(pid, os.WNOHANG)

    def end_all(self) -> None:
        """End all workers: the trainer is gone, or has closed the fork server."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        for work in self._children.values():
            shut_down(work)
        until_s = time.monotonic() + FINISH_S
        while self._children and (left_s := until_s - time.monotonic()) > 0:
            self.reap()
            if self._children:
                signal.sigtimedwait({signal.SIGCHLD}, left_s)
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._children):
            self._wait(pid, 0)

    def _wait(self, pid: int, options: int) -> None:
        with contextlib.suppress(ChildProcessError):  # in a worker just forked
            ended_pid, status = os.waitpid(pid, options)
            if ended_pid:
                work = self._children.pop(pid)
                post_status(work.descriptors[0], status)
                work.close()


def run_worker(load: Load, post: Post, pipe: Pipe) -> None:
    """Run a worker process: work until told to stop, or until the trainer is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # functions may run commands
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    page, (at, number, seeds) = StatusPage(pipe.descriptors.popleft()), post
    try:
        recipe, segment = load()[at]
    except Exception:
        os.write(page.descriptor, traceback.format_exc().encode())
        raise
    be_worker(segment, seeds, number)
    with daemonic():
        Worker(pipe, recipe, segment, page).run()
        segment.program.leave()
