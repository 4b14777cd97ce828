"""Records on disk: whole namespaces come and go, and any process may be killed."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import cycle, pairwise
from pathlib import Path

import pytest

from penstock.cache import disk as disk_module
from penstock.cache import folder as folder_module
from penstock.cache.disk import SPARE, Disk, DiskError, let_go, room_of, shared_disk
from penstock.cache.memory import Full
from penstock.system.file_locks import locked_folder
from support.forked import End, forked


def key(number: int, namespace: int = 1) -> bytes:
    return namespace.to_bytes(8, "big") + number.to_bytes(8, "big")


def name(namespace: int) -> bytes:
    return key(0, namespace)[:8]


def records(numbers: range, namespace: int = 1, nbytes: int = 9) -> list[Record]:
    return [
        (key(number, namespace), bytes([number % 251]) * nbytes) for number in numbers
    ]


Record = tuple[bytes, bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def disk(folder: Path) -> Iterator[Disk]:
    tier = Disk(folder, 1 << 20)
    yield tier
    tier.close()


def test_records_survive_closing_and_opening(folder: Path) -> None:
    first = Disk(folder, 1 << 20)
    first.put(records(range(9)), "nine")
    assert first.namespaces()[name(1)].records == 9
    first.close()
    first.close()
    again = Disk(folder, 1 << 20)
    assert bytes(again.get(key(3)) or b"") == b"\3" * 9
    assert again.get(key(9)) is None
    again.close()


def test_namespaces_say_what_they_hold(disk: Disk) -> None:
    disk.put(records(range(5)), "five")
    disk.put(records(range(3, 7), nbytes=5000), "seven")
    disk.put(records(range(2), namespace=2), "two")
    namespaces = disk.namespaces()
    assert [(entry.about, entry.records) for entry in namespaces.values()] == [
        ("seven", 7),
        ("two", 2),
    ]
    assert disk.namespaces()[name(1)].nbytes == 5 * room_of(bytes(9)) + 2 * 8192
    disk.forget(key(5))
    disk.forget(key(5))
    assert disk.namespaces()[name(1)].records == 6
    assert disk.get(key(5)) is None
    assert disk.clear(name(1)) == 6
    assert list(disk.namespaces()) == [name(2)]
    assert disk.clear(name(2)) == 2
    assert disk.used <= 4096


def test_keys_come_in_order_however_many_there_are(disk: Disk) -> None:
    disk.put(records(range(2500)), "many")
    disk.put(records(range(3), namespace=2), "few")
    keys = list(disk.keys(name(1)))
    assert len(keys) == 2500
    assert all(one < other for one, other in pairwise(keys))
    assert len(list(disk.keys(name(2)))) == 3
    assert list(disk.keys(name(3))) == []
    assert disk.clear(name(1)) == 2500


def fill(disk: Disk, nbytes: int, namespace: int = 1) -> int:
    """Store records until there is no room; return how many."""
    dice = random.Random(nbytes)
    for count in range(0, 1 << 20, 256):
        keys = (name(namespace) + dice.randbytes(8) for _ in range(256))
        try:
            disk.put([(record_key, bytes(nbytes)) for record_key in keys], "x")
        except Full:
            return count
    raise AssertionError("the disk takes whatever comes")


@pytest.mark.parametrize("nbytes", [100, 1000, 1390, 2010, 3000, 50_000])
def test_the_file_stays_below_the_limit_whatever_the_size_of_records(
    folder: Path, nbytes: int
) -> None:
    limit = 6 << 20
    disk = Disk(folder, limit)
    assert fill(disk, nbytes)
    assert limit * 0.6 < (folder / "data.mdb").stat().st_size <= limit
    assert disk.used <= limit
    disk.close()


def test_small_records_that_fill_half_a_page_stay_below_the_limit(folder: Path) -> None:
    limit = 100_000
    dice = random.Random(3)
    disk = Disk(folder, limit)
    with suppress(Full):
        while True:
            sizes = [dice.randint(100, 2000) for _ in range(80)]
            batch = [(name(1) + dice.randbytes(8), bytes(size)) for size in sizes]
            disk.put(batch, "small")
    assert limit * 0.3 < disk.used <= limit
    disk.close()


def test_each_of_two_caches_keeps_to_its_own_limit(folder: Path) -> None:
    disk = Disk(folder, 8 << 20)
    strict = 1 << 20
    disk.put(records(range(100), nbytes=50_000), "x", strict)
    count = disk.namespaces()[name(1)].records
    assert 0 < count < 100
    with pytest.raises(Full):
        disk.put(records(range(100, 200), nbytes=50_000), "x", strict)
    assert disk.used <= strict
    disk.put(records(range(200, 300), nbytes=50_000), "x")
    assert disk.namespaces()[name(1)].records == count + 100
    disk.close()


def test_a_database_that_fills_its_map_takes_no_more_and_is_still_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_bytes = SPARE + (6 << 20)
    monkeypatch.setattr(disk_module, "MAP_BYTES", map_bytes)
    for run in range(2):
        disk = Disk(folder, 1 << 40)
        assert bool(fill(disk, 3000)) == (run == 0)
        assert disk.open_namespace(name(1), "x").records > 1000
        assert disk.used <= 6 << 20
        disk.sync()
        disk.close()
    again = Disk(folder)
    assert again.limit <= 6 << 20
    assert again.clear(name(1)) > 1000
    again.close()


def test_namespaces_at_rest_make_room_and_those_in_use_do_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(folder, 2 << 20)
    fill(disk, 3000)
    with pytest.raises(Full):
        disk.put(records(range(1), 4, 3000), "x")
    monkeypatch.setattr(folder_module, "RESTING_S", -1.0)
    disk.put(records(range(1), 4, 3000), "x")
    assert [*disk.namespaces()] == [name(4)]
    assert disk.get(key(0, 4)) is not None
    assert disk.evicted > 0
    disk.close()


def test_a_namespace_that_a_process_has_open_is_not_evicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(end: End) -> None:
        mine = shared_disk(folder, 2 << 20)
        mine.open_namespace(name(1), "x")
        end.tell("open")
        end.hear()
        let_go(mine)

    monkeypatch.setattr(folder_module, "RESTING_S", -1.0)
    disk = Disk(folder, 2 << 20)
    fill(disk, 3000)
    count = disk.namespaces()[name(1)].records
    disk.close()
    with forked(reads) as child:
        assert child.hear() == "open"
        other = shared_disk(folder, 2 << 20)
        with pytest.raises(Full):
            other.put(records(range(1), 2, 3000), "y")
        assert other.namespaces()[name(1)].records == count
    other.put(records(range(1), 2, 3000), "y")  # the reader has ended
    assert other.get(key(0, 2)) is not None
    let_go(other)


def state(folder: Path) -> dict[str, object]:
    text: dict[str, object] = json.loads((folder / "state.json").read_text())
    return text


def test_the_disk_is_clean_once_it_is_synced_and_not_before(
    disk: Disk, folder: Path
) -> None:
    assert state(folder)["clean"] is True
    disk.put(records(range(1)), "x")
    assert state(folder)["clean"] is False
    disk.sync()
    assert state(folder)["clean"] is True


def test_a_database_that_a_power_cut_may_have_torn_is_emptied(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(folder, 1 << 20)
    disk.put(records(range(1)), "x")
    disk.close()
    changed = state(folder) | {"boot": "another"}
    (folder / "state.json").write_text(json.dumps(changed))
    again = Disk(folder, 1 << 20)
    (message,) = caplog.messages
    assert "power cut" in message
    assert again.get(key(0)) is None
    again.close()


def test_parent_and_forked_child_both_use_it(folder: Path) -> None:
    def work(end: End) -> None:
        mine = shared_disk(folder, 1 << 20)
        end.tell(str(bytes(mine.get(key(0)) or b"")))
        mine.put(records(range(1, 2)), "x")
        end.tell("put")
        let_go(mine)

    disk = shared_disk(folder, 1 << 20)
    disk.put(records(range(1)), "x")
    with forked(work) as child:
        assert child.hear() == str(bytes(9))
        assert child.hear() == "put"
        assert child.ended() == 0
    assert bytes(disk.get(key(1)) or b"") == b"\1" * 9
    disk.put(records(range(2, 3)), "x")
    assert disk.namespaces()[name(1)].records == 3
    let_go(disk)


def test_a_child_forked_during_a_write_blocks_nobody(folder: Path) -> None:
    def work(end: End) -> None:
        mine = shared_disk(folder, 1 << 20)
        end.tell("opened")
        end.hear()
        let_go(mine)

    disk = shared_disk(folder, 1 << 20)
    with ExitStack() as stack:
        with locked_folder(disk.folder, 30.0):
            child = stack.enter_context(forked(work))
        assert child.hear() == "opened"
        disk.put(
            records(range(1)), "x"
        )  # although the child has the file of the lease open
    let_go(disk)


def test_a_fork_waits_for_calls_to_lmdb_that_are_under_way(folder: Path) -> None:
    def work(end: End) -> None:
        mine = shared_disk(folder, 1 << 20)
        end.tell(str(mine.namespaces()[name(1)].records > 0))

    disk = shared_disk(folder, 1 << 20)
    disk.put(records(range(1)), "x")
    over = threading.Event()

    def write() -> None:
        for number in cycle(range(100)):
            disk.put(records(range(number, number + 1)), "x")
            if over.is_set():
                return

    writing = threading.Thread(target=write)
    writing.start()
    try:
        for _ in range(5):
            with forked(work) as child:
                assert child.hear() == "True"
    finally:
        over.set()
        writing.join()
    let_go(disk)


def test_a_closed_disk_cannot_be_used(folder: Path) -> None:
    disk = Disk(folder, 1 << 20)
    disk.close()
    with pytest.raises(DiskError, match="cannot be read"):
        disk.get(key(0))


def test_the_default_limit_is_four_fifths_of_the_free_space(folder: Path) -> None:
    disk = Disk(folder)
    free = os.statvfs(folder)
    assert disk.limit == pytest.approx(free.f_bavail * free.f_frsize * 0.8, rel=0.05)
    disk.close()


def test_pages_are_checked_only_if_the_file_has_changed_since_it_was_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(folder_module, "check_pages", looked.append)
    data = folder / "data.mdb"

    def reopened(*, sync: bool) -> int:
        disk = Disk(folder, 1 << 20)
        disk.put([(os.urandom(16), b"x")], "x")
        if sync:
            disk.sync()
        disk.close()
        return len(looked)

    assert reopened(sync=True) == 0
    assert reopened(sync=False) == 0  # left as a killed process leaves it
    assert reopened(sync=True) == 1
    os.utime(data)  # somebody wrote to it
    assert reopened(sync=True) == 2


def test_a_database_that_takes_long_to_open_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = threading.Event()

    def warning(text: str) -> None:
        assert str(folder) in text
        event.set()

    Disk(folder, 1 << 20).close()
    os.utime(folder / "data.mdb")
    monkeypatch.setattr(folder_module, "SLOW_S", 0.0)
    monkeypatch.setattr(folder_module.LOGGER, "warning", warning)
    monkeypatch.setattr(folder_module, "check_pages", lambda _: event.wait())
    Disk(folder, 1 << 20).close()
    assert event.is_set()
