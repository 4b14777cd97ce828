"""The template: a child forked at `iter()`, from which worker processes are forked.

It inherits the dataset and the functions as they are, nothing is pickled and memory is
shared until written; it runs no threads, so forking from it is safe at any time, while
the trainer goes on with its own. It ends when the trainer closes the pipe or dies, and
so do the workers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..chunk import Chunk, Failure, Outcome
from ..errors import SampleError
from ..layout import Layout, Misfit, write_rows
from ..program import Program
from ..randomness import SampleRandom
from ..sample import size_of
from .pipe import Pipe, kept, pipe
from .slabs import Block, allocate_on, map_shared
from .task import Placement, travel

__all__ = ["Template"]


class Template:
    """The trainer's end."""

    def __init__(self, programs: Sequence[Program], seed: int) -> None:
        """Fork it. Called before the engine starts any thread."""
        self._programs = programs
        self._seed = seed
        self._lock = threading.Lock()
        """Guards `_pipe` and `_pid`: several crews hire."""
        self._pipe, self._pid = self._fork()

    def hire(self, segment: int) -> Pipe:
        """Have a worker forked for a segment; return the pipe to it."""
        ours, theirs = pipe()
        with self._lock:
            try:
                self._pipe.send_descriptor(theirs.fileno(), segment)
            except EOFError:  # killed: as good a one is had from the trainer as it is
                self._bury()
                self._pipe, self._pid = self._fork()
                self._pipe.send_descriptor(theirs.fileno(), segment)
        theirs.close()
        return ours

    def close(self) -> None:
        """Let it end, and wait until it has."""
        with self._lock:
            self._bury()

    def _bury(self) -> None:
        self._pipe.close()
        with contextlib.suppress(ChildProcessError):  # others may wait for any child
            os.waitpid(self._pid, 0)

    def _fork(self) -> tuple[Pipe, int]:
        ours, theirs = pipe()
        with kept(theirs), warnings.catch_warnings():
            # Python 3.12 warns of forking beside threads. The child uses no lock that
            # one of the trainer's threads may hold: it reads its pipe, and forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            serve = partial(_serve_template, theirs, self._programs, self._seed)
            _run_child(serve)
        theirs.close()
        return ours, pid

    def __repr__(self) -> str:
        return f"<Template pid {self._pid}>"


def _run_child(body: Callable[[], None]) -> None:
    """Run a forked process; never returns into the code it was forked from."""
    status = 1
    try:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C is the trainer's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what was inherited is not ours to collect or finalise
        torch.set_num_threads(1)
        body()
        status = 0
    except EOFError:
        status = 0
    except BaseException:  # noqa: BLE001 the last one who can tell
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve_template(end: Pipe, programs: Sequence[Program], seed: int) -> None:
    """Fork a worker for every descriptor that comes, until the pipe is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers leave no zombies
    while True:
        descriptor, segment = end.receive_descriptor()
        work = Pipe(socket.socket(fileno=descriptor))
        with kept(work):
            forked = os.fork()
        if forked == 0:
            _run_worker(work, programs[segment], seed)
        work.close()


def _run_worker(end: Pipe, program: Program, seed: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # functions may run commands
    _run_child(lambda: _serve_worker(end, program, seed))


def _serve_worker(end: Pipe, program: Program, seed: int) -> None:
    """Do one task after another, until told to stop or the trainer is gone."""
    random = SampleRandom(seed)
    slabs: dict[int, Block] = {}
    end.send(os.getpid())
    while (task := end.receive()) is not None:
        for key in task.forget:
            slabs.pop(key, None)
        sink = SlabSink(end, task.placement, slabs)
        outcome = program.run(
            task.chunk, task.inputs, sink if program.places else None, random
        )
        if sink.kept is not None:
            rows, outcome.outputs = sink.kept
            outcome.offsets = [row - task.chunk.first_row for row in rows]
        outcome.failures = [travel(failure) for failure in outcome.failures]
        reply(end, program, task.chunk, outcome)
        del sink, outcome, task  # nothing of a batch is kept while waiting


def reply(end: Pipe, program: Program, chunk: Chunk, outcome: Outcome) -> None:
    """Send an outcome; samples that cannot be pickled are failures of their rows."""
    try:
        end.send(outcome)
    except EOFError:
        raise
    except Exception as error:  # noqa: BLE001 whatever pickling the user's raises
        text = (
            f"a sample made by {program.operations[-1].stage} cannot be sent to the "
            f"trainer's process ({type(error).__name__}: {error}); return arrays, "
            'tensors, numbers, text or bytes, or use executor="thread"'
        )
        failures = [
            Failure(
                SampleError(text),
                program.operations[-1].stage,
                int(chunk.indices[at]),
                chunk.first_row + at,
            )
            for at in range(len(chunk))
        ]
        end.send(Outcome(outcome.done, failures=failures, run_ns=outcome.run_ns))


class SlabSink:
    """Writes rows into the batch's slab; keeps those that do not fit, to send."""

    def __init__(
        self, end: Pipe, placement: Placement | None, slabs: dict[int, Block]
    ) -> None:
        self.kept: tuple[Sequence[int], list[Any]] | None = None
        """Rows of the batch, and their samples."""
        self._placement = placement
        if placement is None:
            return
        if placement.sent:
            descriptor, _ = end.receive_descriptor()
            try:
                slabs[placement.key] = map_shared(descriptor, placement.nbytes)
            finally:
                os.close(descriptor)
        allocate, _ = allocate_on(slabs[placement.key])
        self._memory = placement.layout.open(placement.rows, allocate)

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        """Put one sample into each of `rows`; return the bytes they take."""
        if self._placement is not None:
            layout: Layout = self._placement.layout
            try:
                write_rows(layout, self._memory, rows, samples)
            except Misfit:
                pass
            else:
                return layout.row_bytes * len(rows)
        self.kept = rows, list(samples)
        return sum(map(size_of, samples))
