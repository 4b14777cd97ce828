"""Data that works in one process, or for one thread at a time, stays where it works.

Whoever says nothing about workers gets what torch loads without any. A pool of threads,
an event loop or a connection is lost or shared in a forked copy, so that loading would
hang, fail, or return the answers to others' questions.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data as torchs

import penstock as ps
from support import warm
from support.moves import workers_pay

LENGTH, SIZE = 48, 4


class Data(torchs.Dataset[Any]):
    """Gets its samples by a function, which works in one process."""

    def __init__(self, get: Callable[[int], Any], held: Any) -> None:
        self.get, self.held = get, held

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


@contextmanager
def pooled() -> Iterator[Data]:
    """Reads by a pool of threads."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(abs, range(4)))  # a pool that has begun looks for no more threads
        yield Data(lambda index: pool.submit(abs, index).result(), pool)


@contextmanager
def looped() -> Iterator[Data]:
    """Reads by coroutines, in a loop that a thread runs."""

    async def get(index: int) -> int:
        return index

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield Data(
            lambda index: asyncio.run_coroutine_threadsafe(get(index), loop).result(),
            loop,
        )
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def connected() -> Iterator[Data]:
    """Asks a server, by one connection."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        while request := theirs.recv(1):
            theirs.sendall(request)

    def get(index: int) -> int:
        ours.sendall(bytes([index]))
        return ours.recv(1)[0]

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Data(get, ours)
    finally:
        ours.close()
        thread.join()
        theirs.close()


class Client:
    """Refuses to work in another process, as fsspec's file systems do."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def get(self, index: int) -> int:
        if os.getpid() != self._pid:
            raise RuntimeError("not fork-safe")
        return index


@contextmanager
def refusing() -> Iterator[Data]:
    """Has a client that refuses to work elsewhere."""
    client = Client()
    yield Data(client.get, client)


@contextmanager
def hiding() -> Iterator[Data]:
    """Refuses elsewhere, too, but nothing shows it."""
    pid = str(os.getpid())

    def get(index: int) -> int:
        if str(os.getpid()) != pid:
            raise RuntimeError("not fork-safe")
        return index

    yield Data(get, None)


class Sample:
    """Cannot be sent from another process."""

    def __init__(self, number: int) -> None:
        self.number, self.lock = number, threading.Lock()

    def __int__(self) -> int:
        return self.number


@contextmanager
def locked() -> Iterator[Data]:
    """Makes samples that cannot be sent."""
    yield Data(Sample, None)


def unchanged(rows: list[Any]) -> list[Any]:
    return rows


KINDS = [pooled, looped, connected, refusing, hiding, locked]
FACES: dict[str, Callable[[Data], Any]] = {
    "loader": lambda data: ps.DataLoader(data, SIZE, collate_fn=unchanged),
    "pipeline": lambda data: ps.Pipeline.from_dataset(data).batch(
        SIZE, collate_fn=unchanged
    ),
    "map": lambda data: (
        ps.Pipeline.from_dataset(range(LENGTH))
        .map(data.__getitem__)
        .batch(SIZE, collate_fn=unchanged)
    ),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_works_in_one_process_is_loaded_there(
    kind: Callable[[], Any], face: str
) -> None:
    ps.set_enable_autotune(True)
    ps.set_cpu_budget(16)  # so that the tuner would have processes load
    with kind() as data, workers_pay(), closing(FACES[face](data)) as loader:
        two_epochs = [[int(row) for row in batch] for _ in range(2) for batch in loader]
    batches = [list(range(at, at + SIZE)) for at in range(0, LENGTH, SIZE)]
    assert two_epochs == 2 * batches


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (connected, "`Data.held` (a socket.socket)"),
        (refusing, "which notes its process)"),
        (hiding, "workers could not make a batch (RuntimeError: not fork-safe)"),
    ],
)
def test_the_reason_names_what_must_stay(kind: Callable[[], Any], part: str) -> None:
    ps.set_enable_autotune(True)
    with kind() as data, workers_pay(), closing(FACES["loader"](data)) as loader:
        list(loader)
        reading = loader.stats()
    assert reading is not None
    [segment] = reading.segments
    assert segment.executor == "inline"
    assert part in segment.moves[-1].reason


def test_the_error_of_a_sample_is_raised_as_without_workers() -> None:
    def get(index: int) -> int:
        if index == LENGTH // 2:
            raise LookupError(index)
        return index

    ps.set_enable_autotune(True)
    outcomes: list[Any] = []
    data = Data(get, None)
    with workers_pay(), closing(FACES["pipeline"](data)) as loader:
        loop = iter(loader)
        while len(outcomes) < LENGTH // SIZE:
            try:
                outcomes.append(next(loop)[0])
            except LookupError as error:
                outcomes.append(error.args)
    assert outcomes == [
        (at,) if at == LENGTH // 2 else at for at in range(0, LENGTH, SIZE)
    ]


SHOWN = """
import penstock as ps
class Numbers:
    def __init__(self): self.file = open(__file__)
    def __len__(self): return 8
    def __getitem__(self, index): return index
ps.set_enable_autotune(True)
with ps.DataLoader(Numbers(), 4) as loader: list(loader)
"""


def test_a_program_that_configures_no_log_is_told_why_its_data_stays(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHOWN)
    process = warm.run([sys.executable, "-P", str(script)], timeout=60)
    assert "executor auto -> inline: `dataset.file`" in process.stderr
