"""Objects that threads must not share are found wherever a dataset keeps them."""

from __future__ import annotations

import csv
import io
import logging
import os
import socket
import sqlite3
import sys
import tarfile
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from penstock.engine.witness.hazards import (
    BOUND,
    UNSHARED,
    find_bound,
    find_unsafe,
    is_stateless,
)


class Rows(Dataset[Any]):
    """A dataset that keeps an object."""

    def __init__(self, reader: Any = None) -> None:
        self.reader = reader

    def __getitem__(self, index: int) -> Any:
        return index

    def __len__(self) -> int:
        return 9


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test opens."""
    with ExitStack() as stack:
        yield stack


Open = Callable[[Path, ExitStack], Any]


def archive(path: Path, stack: ExitStack) -> Any:
    return stack.enter_context(zipfile.ZipFile(path, "w"))


def tape(path: Path, stack: ExitStack) -> Any:
    return stack.enter_context(tarfile.open(path, "w"))


def data_base(path: Path, stack: ExitStack) -> Any:
    return stack.enter_context(closing(sqlite3.connect(path)))


def environment(path: Path, stack: ExitStack) -> Any:
    return stack.enter_context(lmdb.open(str(path.with_suffix(".lmdb"))))


def transaction(path: Path, stack: ExitStack) -> Any:
    return stack.enter_context(environment(path, stack).begin())


def file(mode: str, buffering: int = -1) -> Open:
    def opened(path: Path, stack: ExitStack) -> Any:
        path.touch()
        return stack.enter_context(path.open(mode, buffering))

    return opened


UNSAFE: dict[str, Open] = {
    "_io.BufferedReader": file("rb"),
    "_io.FileIO": file("rb", buffering=0),
    "_io.TextIOWrapper": file("r"),
    "_io.BufferedRandom": file("w+b"),
    "_io.BytesIO": lambda path, stack: io.BytesIO(b"bytes"),
    "zipfile.ZipFile": archive,
    "tarfile.TarFile": tape,
    "sqlite3.Connection": data_base,
    "sqlite3.Cursor": lambda *at: data_base(*at).cursor(),
    "lmdb.Environment": environment,
    "lmdb.Transaction": transaction,
    "lmdb.Cursor": lambda *at: transaction(*at).cursor(),
    "generator": lambda path, stack: (letter for letter in "abc"),
    "list_iterator": lambda path, stack: iter([1, 2]),
    "map": lambda path, stack: map(str, [1, 2]),
    "itertools.islice": lambda path, stack: islice([1, 2], 1),
    "_csv.reader": lambda path, stack: csv.reader(["a,b"]),
}


@pytest.mark.parametrize("kind", UNSAFE)
def test_an_object_with_a_position_or_a_handle_is_found(
    kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    finding = find_unsafe(Rows(UNSAFE[kind](tmp_path / "file", stack)), "dataset")
    assert finding is not None
    assert (finding.path, finding.type_name) == ("dataset.reader", kind)
    assert str(finding) == f"`dataset.reader` (a {kind}) {finding.why}"


class BareDescriptor(Rows):
    """Seeks and reads in a file that it knows by its descriptor alone."""

    def __getitem__(self, index: int) -> bytes:
        return self.at(index)

    def at(self, place: int) -> bytes:
        os.lseek(self.reader, place, os.SEEK_SET)
        return os.read(self.reader, 1)


class OpensItself(BareDescriptor):
    """Opens a file for each sample."""

    def at(self, place: int) -> bytes:
        descriptor = os.open(self.reader, os.O_RDONLY)
        try:
            os.lseek(descriptor, place, os.SEEK_SET)
            return os.read(descriptor, 1)
        finally:
            os.close(descriptor)


def test_a_dataset_that_seeks_in_a_bare_descriptor_is_found() -> None:
    finding = find_unsafe(BareDescriptor(7), "dataset")
    assert finding is not None
    assert finding.path == "dataset.at"
    assert find_unsafe(OpensItself("file"), "dataset") is None


def named(module: str, name: str) -> Any:
    """Return an object whose class has this name, from a library not installed here."""
    base = type(name, (), {"__module__": module})
    return type("Derived", (base,), {"__module__": "users_own"})()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("h5py._hl.base", "HLObject"),
        ("netCDF4._netCDF4", "Dataset"),
        ("cv2", "VideoCapture"),
        ("decord.video_reader", "VideoReader"),
        ("av.container.core", "Container"),
        ("torchcodec.decoders._video_decoder", "VideoDecoder"),
        ("torchvision.io.video_reader", "VideoReader"),
    ],
)
def test_a_librarys_class_is_recognised_even_below_a_users_subclass(
    module: str, name: str
) -> None:
    assert find_unsafe(Rows(named(module, name)), "dataset") is not None
    assert find_unsafe(Rows(named("another", name)), "dataset") is None


SAFE: dict[str, Open] = {
    "nothing": lambda path, stack: None,
    "a file to write to": file("wb"),
    "stderr": lambda path, stack: sys.__stderr__,
    "an array": lambda path, stack: np.zeros(3),
    "a mapped array": lambda path, stack: np.memmap(path, mode="w+", shape=3),
    "a tensor": lambda path, stack: torch.zeros(3),
    "a logger": lambda path, stack: logging.getLogger(),
    "a lock": lambda path, stack: threading.Lock(),
    "a counter": lambda path, stack: count(),
    "a pool": lambda path, stack: stack.enter_context(ThreadPoolExecutor(1)),
    "a network": lambda path, stack: torch.nn.Sequential(torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize("kind", SAFE)
def test_objects_that_threads_may_share_are_left_alone(
    kind: str, tmp_path: Path, stack: ExitStack
) -> None:
    assert find_unsafe(Rows(SAFE[kind](tmp_path / "file", stack)), "dataset") is None


def test_each_thread_may_have_a_file_of_its_own() -> None:
    own = threading.local()
    own.file = io.BytesIO(b"bytes")
    assert find_unsafe(Rows(own), "dataset") is None


def test_a_closed_file_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as text, io.BytesIO() as memory:
        pass
    assert find_unsafe(Rows((text, memory)), "dataset") is None


def test_an_unsafe_object_is_found_in_nested_datasets() -> None:
    dataset = Subset(ConcatDataset([Rows(), Rows({"part": [io.BytesIO()]})]), [0])
    finding = find_unsafe(dataset, "dataset")
    assert finding is not None
    assert finding.path == "dataset.dataset.datasets[1].reader['part'][0]"


SHARED = io.BytesIO(b"of the module")


class Wide(Rows):
    """Read from a global of its module."""

    def __getitem__(self, index: int) -> Any:
        return SHARED.read(index)


class Helped(Rows):
    """Has a method that reads from the global."""

    def __getitem__(self, index: int) -> Any:
        return self.read_shared(index)

    def read_shared(self, index: int) -> Any:
        return SHARED.read(index)


def test_an_unsafe_object_is_found_among_what_a_function_uses() -> None:
    stream = io.BytesIO()
    finding = find_unsafe(lambda sample: (sample, stream), "lambda")
    assert finding is not None
    assert finding.path == "lambda.<closure>.stream"
    finding = find_unsafe(Wide(), "dataset")
    assert finding is not None
    assert finding.path == "dataset.__getitem__.<globals>.SHARED"
    finding = find_unsafe(Helped(), "dataset")
    assert finding is not None
    assert finding.path == "dataset.read_shared.<globals>.SHARED"


class Odd(io.RawIOBase):
    """A stream of the user's own whose methods fail."""

    @property
    def closed(self) -> bool:
        raise AssertionError("the user's code was run")

    def close(self) -> None:
        """Do nothing, at the end."""


def test_a_users_own_stream_is_found_without_calling_it() -> None:
    finding = find_unsafe(Rows(Odd()), "dataset")
    assert finding is not None
    assert finding.type_name.endswith("Odd")


def test_what_belongs_to_its_process_or_to_one_asker_is_found(
    stack: ExitStack,
) -> None:
    pool = stack.enter_context(ThreadPoolExecutor(1))
    ours, theirs = map(stack.enter_context, socket.socketpair())
    client = Rows()
    client.pid = os.getpid()  # type: ignore[attr-defined]
    resources = {
        "thread": threading.Thread(),
        "pool": pool,
        "socket": [theirs, ours],
        "client": client,
    }
    for name, resource in resources.items():
        reason = find_bound(Rows(resource), "data", BOUND)
        assert reason is not None
        assert reason.startswith("`data.reader"), name
        alone = find_bound(Rows(resource), "data", UNSHARED) is not None
        assert alone == (name == "socket")
    harmless = threading.Lock(), threading.local(), os.getpid(), {"number": os.getpid()}
    assert find_bound(Rows(harmless), "data", BOUND) is None


class Stats:
    """Counts for the whole program."""

    seen = 0


calls = 0
around = types.ModuleType("around")


def counts_on_a_class(rows: Any) -> Any:
    Stats.seen += 1
    return rows


def counts_on_a_module(rows: Any) -> Any:
    around.seen = 1  # type: ignore[attr-defined]
    return rows


def counts_within(rows: Any) -> Any:
    def count_one() -> None:
        global calls  # noqa: PLW0603 what this is about
        calls += 1

    count_one()
    return rows


def counter() -> Any:
    count = 0

    def count_around(rows: Any) -> Any:
        def count_one() -> None:
            nonlocal count
            count += 1

        count_one()
        return rows

    return count_around


def counts_for_itself(rows: Any) -> Any:
    total = 0

    def add(number: int) -> None:
        nonlocal total
        total += number

    for row in rows:
        add(row)
    return np.asarray(total, dtype=float), torch.zeros(1)


def test_a_function_that_keeps_a_state_is_told_from_others() -> None:
    keeping = counts_on_a_class, counts_on_a_module, counts_within, counter()
    assert [is_stateless(function) for function in keeping] == [False] * 4
    assert is_stateless(counts_for_itself)
