"""Work goes on with shared memory from memfd, from files, or without any."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.engine.far import slabs
from penstock.system.shared_memory import SHARED_MEMORY, shared_file
from support.datasets import Numbers
from support.functions import augment, digest


def refused(*_: object, **__: object) -> int:
    raise OSError(errno.EPERM, "refused")


@pytest.fixture
def no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refused)


def pipe_of(executor: Any) -> ps.Pipeline:
    source = ps.Pipeline.from_dataset(Numbers(64), executor=executor)
    return source.shuffle(seed=4).map(augment, executor=executor).batch(8)


@pytest.fixture
def expected() -> str:
    with pipe_of("inline") as pipe:
        return digest(pipe)


def check(descriptor: int, nbytes: int) -> None:
    """Assert that it holds zeros, can be mapped and written, and is not inherited."""
    with mmap.mmap(descriptor, nbytes) as memory:
        assert memory[:] == bytes(nbytes)
        memory[-1] = 7
    assert os.pread(descriptor, 1, nbytes - 1) == b"\x07"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_shared_memory_is_usually_a_memfd() -> None:
    descriptor = shared_file("a name", 5000)
    assert "/memfd:a name" in os.readlink(f"/proc/self/fd/{descriptor}")
    check(descriptor, 5000)


@pytest.mark.usefixtures("no_memfd")
def test_a_file_that_nobody_else_can_open_takes_the_place_of_a_memfd() -> None:
    before = set(Path(SHARED_MEMORY).iterdir())
    descriptor = shared_file("a name", 5000)
    assert set(Path(SHARED_MEMORY).iterdir()) == before
    facts = os.fstat(descriptor)
    assert stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_blocks * 512 >= 5000  # reserved, so no write can fail later
    check(descriptor, 5000)


@pytest.mark.usefixtures("no_memfd")
def test_shared_memory_that_does_not_fit_is_refused_with_the_figures() -> None:
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"bytes needed, \d+ free") as caught:
        shared_file("too large", 1 << 50)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == SHARED_MEMORY
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


@pytest.mark.usefixtures("no_memfd")
def test_processes_write_into_such_files_as_well(expected: str) -> None:
    with pipe_of("process") as pipe:
        assert digest(pipe) == expected


def test_batches_come_through_pipes_where_there_is_no_shared_memory(
    expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs, "shared_file", refused)
    with pipe_of("process") as pipe:
        assert digest(pipe) == expected
    (message,) = (record.getMessage() for record in caplog.records)
    assert "no shared memory for a batch ([Errno 1] refused)" in message
    assert "free some memory" in message


def test_batches_come_through_pipes_where_files_run_short(
    expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs, "LEFT_TO_USER", 1 << 62)
    with pipe_of("process") as pipe:
        assert digest(pipe) == expected
    (message,) = (record.getMessage() for record in caplog.records)
    assert "descriptors are reserved" in message
    assert "raise the limit of open files with `ulimit -n`" in message
