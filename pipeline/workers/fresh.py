"""Templates and workers in fresh interpreters, for a trainer that must not be forked.

    forkserver   the template is fresh; workers are forked from it
    spawn        the template is fresh and holds nothing; each worker is fresh, too

What they run comes to them by cloudpickle, in a memfd that is passed on.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing import util

from ..program import Program
from ..recipe import StartMethod
from .nursery import (
    Post,
    fork_worker,
    run_child,
    run_worker,
    serve_template,
    tell_failure,
)
from .parcel import pack, unpack
from .pipe import Pipe, pipe
from .shared_file import shared_file
from .work_pipe import WorkPipe
from .worker import use_one_thread

__all__ = ["main", "start_fresh"]

BOOT = "import sys; sys.path[:] = {path}; from {module} import main; main()"


def start_fresh(
    programs: Mapping[int, Program], seed: int, method: StartMethod
) -> tuple[Pipe, int]:
    """Start a template in a fresh interpreter; return the pipe to it, and its pid.

    Raises:
        SpecError: something in the programs cannot travel.
    """
    parcel = _descriptor_of(pack((programs, seed), "programs"))
    ours, theirs = pipe()
    try:
        pid = _launch(method, theirs.fileno(), parcel)
    finally:
        theirs.close()
        os.close(parcel)
    return ours, pid


def main() -> None:
    """Run what `sys.argv` says; never returns."""
    role, *numbers = sys.argv[1:]
    end, parcel, *rest = map(int, numbers)
    work = WorkPipe.adopt(end)
    if role == "forkserver":
        run_child(lambda: serve_template(work, partial(_fork_worker, parcel)))
    if role == "spawn":
        run_child(lambda: serve_template(work, partial(_spawn_worker, parcel)))
    page, *post = rest
    work.descriptors.append(page)
    run_child(lambda: _run(parcel, Post(*post), work))


def _run(parcel: int, post: Post, work: Pipe) -> None:
    use_one_thread()
    try:
        programs, seed = _open(parcel)
    except Exception:
        tell_failure(work.descriptors[0])
        raise
    run_worker(programs[post.segment], seed, post, work)


def _fork_worker(parcel: int, post: Post, work: Pipe) -> int:
    return fork_worker(*_open(parcel), post, work)


def _spawn_worker(parcel: int, post: Post, work: Pipe) -> int:
    page = work.descriptors[0]
    return _launch("worker", work.fileno(), parcel, page, then=post)


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
def _open(parcel: int) -> tuple[Mapping[int, Program], int]:
    """Read a parcel. Mapped: several processes do, and share its position."""
    with mmap.mmap(parcel, 0, access=mmap.ACCESS_READ) as data:
        programs, seed = unpack(data)
    return programs, seed
