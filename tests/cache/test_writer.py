"""Records are written in batches or refused, and nobody waits for that."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cache import disk as module
from penstock.cache.disk import Disk, DiskError, Writer
from penstock.cache.folder import FolderState
from penstock.system.file_locks import locked_folder

LIMIT = 1 << 20


def key(number: int, namespace: int = 1) -> bytes:
    return namespace.to_bytes(8, "big") + number.to_bytes(8, "big")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    tier = Disk(tmp_path / "cache", LIMIT)
    yield tier
    tier.close()


@pytest.fixture
def reasons() -> list[str]:
    return []


def writes(disk: Disk, off: Callable[[str], object], limit: int = LIMIT) -> Writer:
    """Return what writes to a disk, until it turns out to be off."""
    return Writer(disk, about="numbers", limit=limit, off=off, tell=pytest.fail)


@pytest.fixture
def writer(disk: Disk, reasons: list[str]) -> Iterator[Writer]:
    instance = writes(disk, reasons.append)
    yield instance
    instance.close()


def test_all_that_is_taken_is_written_and_reported_once(
    disk: Disk, writer: Writer
) -> None:
    numbers: Counter[int] = Counter()
    for number in range(600):
        namespace = 1 + number // 250
        is_taken = writer.offer(
            key(number, namespace), b"x" * 9, lambda n=number: numbers.update([n])
        )
        assert is_taken
    writer.close()
    assert numbers == Counter(range(600))
    assert [entry.records for entry in disk.namespaces().values()] == [250, 250, 100]


def test_a_record_on_its_way_is_found_and_not_taken_twice(
    disk: Disk, writer: Writer
) -> None:
    with locked_folder(disk.folder, 30.0):  # so the record stays on its way
        assert writer.offer(key(1), b"one", lambda: None)
        assert not writer.offer(key(1), b"one", lambda: None)
        assert writer.get(key(1)) == b"one"
        assert disk.get(key(1)) is None
        assert writer.get(key(2)) is None
    writer.close()
    assert bytes(writer.get(key(1)) or b"") == b"one"
    writer.forget(key(1))
    assert writer.get(key(1)) is None


def test_a_record_is_not_taken_while_too_many_wait(
    disk: Disk, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with locked_folder(disk.folder, 30.0):  # the writer cannot finish meanwhile
        offers = ((key(number), bytes(40), lambda: None) for number in range(9))
        answers = [writer.offer(*offer) for offer in offers]
    writer.close()
    assert answers[:2] == [True, True]
    assert not all(answers)
    assert [entry.records for entry in disk.namespaces().values()] == [sum(answers)]


def test_no_record_is_taken_once_there_is_no_room(
    disk: Disk, reasons: list[str]
) -> None:
    writer = writes(disk, reasons.append, limit=100)
    event = threading.Event()
    assert writer.offer(key(1), bytes(200), event.set)
    event.wait()
    assert writer.full
    assert not writer.offer(key(2), b"small", lambda: None)
    writer.close()
    assert reasons == []


def test_no_record_is_taken_after_the_end(writer: Writer) -> None:
    writer.close()
    writer.close()
    assert not writer.offer(key(1), b"one", lambda: None)


def test_a_disk_that_fails_is_reported_and_all_records_are_settled(
    disk: Disk, writer: Writer, reasons: list[str]
) -> None:
    numbers: list[int] = []
    disk.close()
    for number in range(3):
        writer.offer(key(number), b"x", lambda n=number: numbers.append(n))
    writer.close()
    assert numbers == list(range(len(numbers)))
    assert numbers
    assert "cannot be written" in reasons[0]
    assert len(reasons) == 1
    with pytest.raises(DiskError):  # nothing is on its way
        writer.get(key(0))


def test_closing_writes_and_leaves_syncing_to_the_disk(
    disk: Disk, writer: Writer
) -> None:
    writer.offer(key(1), b"one", lambda: None)
    writer.close()
    assert disk.get(key(1)) == b"one"
    assert not FolderState.read(disk.folder).clean
    disk.sync()
    assert FolderState.read(disk.folder).clean


def test_records_that_come_soon_after_each_other_are_written_together(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHER_S", 60.0)  # until it is closed
    sizes: list[int] = []
    put = disk.put

    def counted(batch: Sequence[tuple[bytes, bytes]], *further: Any) -> None:
        sizes.append(len(batch))
        put(batch, *further)

    monkeypatch.setattr(disk, "put", counted)
    writer = writes(disk, print)
    assert writer.offer(key(1), b"one", lambda: None)
    time.sleep(0.2)  # in which it would be written, if nothing were gathered
    assert writer.offer(key(2), b"two", lambda: None)
    writer.close()
    assert sizes == [2]
