"""The fork server: a child from which worker processes are forked, whenever one starts.

Forked from the trainer at `iter()`, it inherits the dataset and the functions as they
are: nothing is pickled, and memory is shared until written. It runs no threads, so
forking from it is safe at any time, while the trainer goes on with its own. It ends
when the trainer closes the pipe or dies, and the workers with it.

A trainer that must not be forked starts fresh interpreters:

    forkserver   the fork server is fresh; workers are forked from it
    spawn        the fork server is fresh and holds nothing; each worker is fresh, too

What they run comes to them by cloudpickle, in a memfd that is passed on.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import util
from typing import NamedTuple

from ....system.shared_memory import shared_file
from ...program.program import Program
from ...program.seeding import mixed, seed_global_generators
from ...recipe import StartMethod
from .child import Child, fork_child, run_child
from .parcel import pack, unpack
from .pipe import Pipe, shut_down
from .status_page import StatusPage, post_status
from .worker import Worker, use_one_thread

__all__ = [
    "LEAVE_S",
    "ForkServer",
    "Post",
    "main",
]

LEAVE_S = 0.5
"""How long workers may take to finish the samples in hand. One that is killed amid a
sample keeps the locks that it shares with other processes."""
END_S = 1.0
"""How long the fork server may take to end when told to, before it is made to."""
FAILED = 1 << 8
"""As waitpid tells of a process that exits with status 1."""
BOOT = "import sys; sys.path[:] = {path}; from {module} import main; main()"


class Post(NamedTuple):
    """What a worker is made for."""

    segment: int
    number: int
    """Its own among the workers of the segment, from 0, free when it is made."""
    before: int
    """How many workers of the segment had the number before it."""


class ForkServer:
    """The trainer's end.

    Args:
        programs: by segment; worker processes run one of them.
        seed: of the samples' random streams.
        begun: what tells this run from others of the seed: workers of another draw
            from other global generators.
        method: how it starts.

    Raises:
        SpecError: something in the programs cannot travel to a fresh interpreter.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        seed: int,
        begun: tuple[int, ...] = (),
        method: StartMethod = "fork",
    ) -> None:
        self._programs = programs
        self._seeds = seed, *begun
        self._method = method
        self._lock = threading.Lock()
        """Guards what follows: several worker pools start workers."""
        self._made: Counter[tuple[int, int]] = Counter()
        """Workers made so far, by segment and number."""
        self.generation = 0
        """Workers of an earlier one know the dataset as it was."""
        self._server = self._start()

    def start_worker(self, segment: int, number: int) -> tuple[Pipe, StatusPage, int]:
        """Have a worker made; return the pipe to it, its page and its generation.

        Where fork servers are killed faster than they can be asked, the pipe is at its
        end at once, as that of a worker that died while it started.
        """
        ours, theirs = Pipe.pair()
        status_page = StatusPage.make()
        descriptors = theirs.fileno(), status_page.descriptor
        with self._lock:
            message = segment, number, self._made[segment, number]
            self._made[segment, number] += 1
            try:
                self._server.pipe.send(message, descriptors)
            except EOFError:  # killed: as good a one is had from the trainer as it is
                end(self._server)
                self._server = self._start()
                with contextlib.suppress(EOFError):  # killed, too
                    self._server.pipe.send(message, descriptors)
            generation = self.generation
        theirs.close()
        return ours, status_page, generation

    def renew(self) -> None:
        """Start another from the trainer as it is now; old workers are to stop."""
        with self._lock:
            self.generation += 1  # first: workers that end now were stopped
            ending = self._server
            ending.pipe.close()  # it ends while the new one is made
            self._server = self._start()
            end(ending)

    def close(self) -> None:
        """End it and all workers, and wait until they are gone."""
        with self._lock:
            end(self._server)

    def _start(self) -> Child:
        if self._method != "fork":
            return start_fresh(self._programs, self._seeds, self._method)
        make = partial(fork_worker, self._programs, self._seeds)
        return Child(*Child.fork(partial(run_fork_server, make)))

    def __repr__(self) -> str:
        return f"<ForkServer pid {self._server.pid}, by {self._method}>"


def end(server: Child) -> None:
    """End a fork server, and its workers with it."""
    server.reap(END_S)
    server.close()


# From here on, all but `start_fresh` runs in the fork server and in workers. The fork
# server has one thread, the main one, and one handler, that of SIGCHLD.

Seeds = tuple[int, ...]
"""The seed of the samples' random streams, and what else tells this run from others."""
Make = Callable[[Post, Pipe], int]
"""Makes a worker for a post, given its pipe, with its page; returns its pid."""


def run_fork_server(make: Make, end: Pipe) -> None:
    """Make a worker for each that is asked for, until the pipe ends."""
    use_one_thread()
    forked = ForkedWorkers()
    signal.signal(signal.SIGCHLD, forked.reap)
    try:
        while True:
            forked.add(make, Post(*end.receive()), end)
    finally:
        forked.end_all()


class ForkedWorkers:
    """The fork server's workers.

    It keeps a copy of each one's pipe until it has posted how that one ended: so the
    trainer sees the pipe's end of file after the worker's status, never before.
    """

    def __init__(self) -> None:
        self._children: dict[int, Pipe] = {}

    def add(self, make: Make, post: Post, end: Pipe) -> None:
        """Make a worker with the pipe and the page that have just come."""
        work = Pipe.adopt(end.descriptors.popleft())
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
        """End all workers: the trainer is gone, or wants no more."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        for work in self._children.values():
            shut_down(work)
        until_s = time.monotonic() + LEAVE_S
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
            ended, status = os.waitpid(pid, options)
            if ended:
                work = self._children.pop(pid)
                post_status(work.descriptors[0], status)
                work.close()


def tell_failure(page: int) -> None:
    """Write the exception being handled to the page, where the trainer looks for it."""
    os.write(page, traceback.format_exc().encode())


def fork_worker(
    programs: Mapping[int, Program], seeds: Seeds, post: Post, work: Pipe
) -> int:
    """Fork a worker from this process; return its pid."""
    program = programs[post.segment]
    return fork_child(partial(run_worker, program, seeds, post, work), work)


def run_worker(program: Program, seeds: Seeds, post: Post, work: Pipe) -> None:
    """In a worker process: work until told to stop or the trainer is gone.

    Its global generators begin where those of no other worker do: a copy of the
    trainer's would give the same draws to all.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # functions may run commands
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    seed = mixed((*seeds, post.segment, post.before)) + post.number  # as torch's count
    seed_global_generators(seed & 0xFFFFFFFFFFFFFFFF)
    program.enter(post.number)
    Worker(work, program, seeds[0], StatusPage(work.descriptors.popleft())).run()


def start_fresh(
    programs: Mapping[int, Program], seeds: Seeds, method: StartMethod
) -> Child:
    """Start a fork server in a fresh interpreter.

    Raises:
        SpecError: something in the programs cannot travel.
    """
    parcel = _descriptor_of(pack((programs, seeds), "programs"))
    ours, theirs = Pipe.pair()
    try:
        pid = _launch(method, theirs.fileno(), parcel)
    finally:
        theirs.close()
        os.close(parcel)
    return Child(ours, StatusPage.make(), pid)


def main() -> None:
    """Run what `sys.argv` says; never returns."""
    role, *numbers = sys.argv[1:]
    end, parcel, *rest = map(int, numbers)
    work = Pipe.adopt(end)
    if role in MAKERS:
        run_child(partial(run_fork_server, partial(MAKERS[role], parcel), work))
    page, *post = rest
    work.descriptors.append(page)
    run_child(partial(_run, parcel, Post(*post), work))


def _run(parcel: int, post: Post, work: Pipe) -> None:
    use_one_thread()
    try:
        programs, seeds = _open(parcel)
    except Exception:
        tell_failure(work.descriptors[0])
        raise
    run_worker(programs[post.segment], seeds, post, work)


def _fork_worker(parcel: int, post: Post, work: Pipe) -> int:
    return fork_worker(*_open(parcel), post, work)


def _spawn_worker(parcel: int, post: Post, work: Pipe) -> int:
    page = work.descriptors[0]
    return _launch("worker", work.fileno(), parcel, page, then=post)


MAKERS: dict[str, Callable[[int, Post, Pipe], int]] = {
    "forkserver": _fork_worker,
    "spawn": _spawn_worker,
}


def _launch(role: str, *descriptors: int, then: tuple[int, ...] = ()) -> int:
    """Start a fresh interpreter in a role, with these descriptors; return its pid."""
    boot = BOOT.format(path=sys.path, module=__name__)
    numbers = map(str, (*descriptors, *then))
    # Masked until it has said what it wants of it: Ctrl-C is the trainer's to handle.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return util.spawnv_passfds(
            os.fsencode(sys.executable),
            [sys.executable, "-c", boot, role, *numbers],
            descriptors,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _descriptor_of(parcel: bytes) -> int:
    descriptor = shared_file("penstock parcel", len(parcel))
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(parcel)
    return descriptor


@functools.cache
def _open(parcel: int) -> tuple[Mapping[int, Program], Seeds]:
    """Read a parcel. Mapped: several processes do, and share its position."""
    with mmap.mmap(parcel, 0, access=mmap.ACCESS_READ) as data:
        programs, seeds = unpack(data)
    return programs, seeds
