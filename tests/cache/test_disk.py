"""Records on disk: whole namespaces come and go, and any process may be killed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle, pairwise
from pathlib import Path

import pytest

from penstock.cache import memory as admission
from penstock.cache.disk import Disk, DiskError, room_of
from penstock.cache.folder import leased
from penstock.cache.memory import Full
from penstock.cache.writer import let_go, shared_disk
from support.forked import End, forked


def key(number: int, namespace: int = 1) -> bytes:
    return namespace.to_bytes(8, "big") + number.to_bytes(8, "big")


def name(namespace: int) -> bytes:
    return key(0, namespace)[:8]


def records(numbers: range, namespace: int = 1, nbytes: int = 9) -> list[Record]:
    return [(key(each, namespace), bytes([each % 251]) * nbytes) for each in numbers]


Record = tuple[bytes, bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def disk(folder: Path) -> Iterator[Disk]:
    made = Disk(folder, 1 << 20)
    yield made
    made.close()


def test_records_survive_what_opens_and_closes(folder: Path) -> None:
    first = Disk(folder, 1 << 20)
    assert first.put(records(range(9)), "nine") == 9
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
    found = disk.namespaces()
    assert [(each.about, each.records) for each in found.values()] == [
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
    assert disk.clear() == 2
    assert disk.used == 0


def test_keys_come_in_order_however_many_there_are(disk: Disk) -> None:
    disk.put(records(range(2500)), "many")
    disk.put(records(range(3), namespace=2), "few")
    keys = list(disk.keys(name(1)))
    assert len(keys) == 2500
    assert all(one < other for one, other in pairwise(keys))
    assert len(list(disk.keys(name(2)))) == 3
    assert list(disk.keys(name(3))) == []
    assert disk.clear(name(1)) == 2500


def test_as_many_fit_as_the_limit_says_and_then_none(folder: Path) -> None:
    disk = Disk(folder, 3 * 4096)
    assert disk.put(records(range(5), nbytes=3000), "x") == 3
    with pytest.raises(Full):
        disk.put(records(range(5, 6), nbytes=3000), "x")
    assert (disk.namespaces()[name(1)].records, disk.used) == (3, 3 * 4096)
    disk.close()


def test_what_rests_makes_room_and_what_may_be_in_use_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(folder, 3 * 4096)
    for namespace in (1, 2, 3):
        disk.put(records(range(1), namespace, 3000), "x")
    with pytest.raises(Full):
        disk.put(records(range(1), 4, 3000), "x")
    monkeypatch.setattr(admission, "RESTING_S", -1.0)
    disk.put(records(range(1), 4, 3000), "x")
    held = set(disk.namespaces())
    assert name(1) not in held
    assert {name(3), name(4)} <= held
    assert disk.evicted == 4 - len(held)
    disk.close()


def state(folder: Path) -> dict[str, object]:
    text: dict[str, object] = json.loads((folder / "state.json").read_text())
    return text


def test_it_is_clean_once_synced_and_not_before(disk: Disk, folder: Path) -> None:
    assert state(folder)["clean"] is True
    disk.put(records(range(1)), "x")
    assert state(folder)["clean"] is False
    disk.sync()
    assert state(folder)["clean"] is True


def test_what_a_power_cut_may_have_torn_is_emptied(folder: Path) -> None:
    disk = Disk(folder, 1 << 20)
    disk.put(records(range(1)), "x")
    disk.close()
    changed = state(folder) | {"boot": "another"}
    (folder / "state.json").write_text(json.dumps(changed))
    again = Disk(folder, 1 << 20)
    assert "power cut" in (again.told or "")
    assert again.get(key(0)) is None
    again.close()


def test_vouching_holds_until_nobody_has_it_open(folder: Path) -> None:
    first = Disk(folder, 1 << 20)
    first.put(records(range(1)), "x")
    assert first.namespaces()[name(1)].session == first.session
    first.close()
    second = Disk(folder, 1 << 20)
    assert second.open_namespace(name(1), "x").session != second.session
    second.vouch(name(1))
    assert second.namespaces()[name(1)].session == second.session
    second.close()
    third = Disk(folder, 1 << 20)
    assert third.namespaces()[name(1)].session != third.session
    third.close()


def test_a_second_process_joins_the_session(folder: Path) -> None:
    def work(end: End) -> None:
        mine = shared_disk(folder, 1 << 20)
        end.tell(mine.session)

    disk = shared_disk(folder, 1 << 20)
    with forked(work) as child:
        assert child.hear() == disk.session
    let_go(disk)


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


def test_a_child_forked_while_one_writes_holds_up_neither(folder: Path) -> None:
    def work(end: End) -> None:
        mine = shared_disk(folder, 1 << 20)
        end.tell("opened")
        end.hear()
        let_go(mine)

    disk = shared_disk(folder, 1 << 20)
    with ExitStack() as stack:
        with leased(disk.folder):
            child = stack.enter_context(forked(work))
        assert child.hear() == "opened"
        disk.put(records(range(1)), "x")  # though the child has the lease's file open
    let_go(disk)


def test_who_forks_waits_for_calls_of_lmdb_in_flight(folder: Path) -> None:
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
        for _ in range(20):
            with forked(work) as child:
                assert child.hear() == "True"
    finally:
        over.set()
        writing.join()
    let_go(disk)


def test_what_is_closed_cannot_be_used(folder: Path) -> None:
    disk = Disk(folder, 1 << 20)
    disk.close()
    with pytest.raises(DiskError, match="cannot be read"):
        disk.get(key(0))


def test_the_limit_is_four_fifths_of_what_is_free(folder: Path) -> None:
    disk = Disk(folder)
    free = os.statvfs(folder)
    assert disk.limit == pytest.approx(free.f_bavail * free.f_frsize * 0.8, rel=0.05)
    disk.close()
