"""The arena gives back what was put or nothing, and makes room for what is in use."""

# ruff: noqa: SLF001 what cannot be brought about from outside is done inside

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from penstock.cache import memory as module
from penstock.cache.memory import (
    _LOOKUPS,
    MAX_PROBES,
    MIN_SLOTS,
    PAGE,
    Arena,
    Full,
)
from penstock.system import file_locks
from penstock.system.shared_memory import nameless
from support.forked import End, forked


def key(number: int, namespace: int = 1) -> bytes:
    return namespace.to_bytes(8, "big") + number.to_bytes(8, "little")


def look(arena: Arena, namespace: int, times: int = 1) -> None:
    """Ask for a record of a namespace."""
    for _ in range(times):
        arena.get(key(0, namespace))


@contextmanager
def an_arena(capacity: int = 4096, samples: int = 0) -> Iterator[Arena]:
    arena = Arena(nameless("test"), capacity, samples)
    yield arena
    arena.close()


def test_an_arena_grows_only_while_memory_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [0]
    arenas: list[Arena] = []
    monkeypatch.setattr(
        module,
        "effective_memory_bytes",
        lambda: (800 << 20) - others[0] - sum(arena.used for arena in arenas),
    )
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with an_arena(600 << 20) as arena:
        arenas.append(arena)
        others[0] = 660 << 20  # 100 MiB of the 800 are always left to others
        for number in range(1, 60):
            with suppress(Full):
                arena.put(key(number), bytes(1 << 20))
        assert 30 << 20 < arena.used <= 40 << 20
        others[0] = 0
        with pytest.raises(Full):  # the arena does not look again at once
            arena.put(key(60), bytes(1 << 20))
        clock[0] += 2 * module.SHORT_S
        arena.put(key(60), bytes(1 << 20))


def test_an_arena_short_of_memory_says_so_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "effective_memory_bytes", lambda: 0)
    with an_arena() as arena:
        with pytest.raises(Full, match="takes no more for now"):
            arena.put(key(1), b"one")
        with pytest.raises(Full, match="^$"):
            arena.put(key(1), b"one")


def test_a_process_stopped_while_it_stores_blocks_nobody(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(end: End) -> None:
        mine = Arena(arena.reopened())
        with mine._writer:
            end.tell("writes")
            end.hear()

    monkeypatch.setattr(file_locks, "PATIENCE_S", 0.05)
    arena._writer = file_locks.ByteLock(arena._descriptor, module.WRITING)
    with forked(work) as child:
        assert child.hear() == "writes"
        child.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            arena.put(key(1), b"one")
        monkeypatch.setattr(file_locks.time, "sleep", lambda _: pytest.fail("waits"))
        with pytest.raises(TimeoutError):  # at once
            arena.put(key(1), b"one")
        monkeypatch.undo()
    arena.put(key(1), b"one")
    assert bytes(arena.get(key(1)) or b"") == b"one"


@pytest.fixture
def arena() -> Iterator[Arena]:
    with an_arena() as arena:
        yield arena


def test_only_records_that_were_put_are_found(arena: Arena) -> None:
    arena.put(key(1), b"one")
    assert bytes(arena.get(key(1)) or b"") == b"one"
    assert arena.get(key(2)) is None
    assert arena.get(key(1, namespace=2)) is None
    assert (arena.records, arena.used) == (1, 3)


def test_the_first_record_of_a_key_stays(arena: Arena) -> None:
    arena.put(key(1), b"one")
    arena.put(key(1), b"other")
    assert bytes(arena.get(key(1)) or b"") == b"one"
    assert (arena.records, arena.used) == (1, 3)


def test_a_full_arena_keeps_what_it_has(arena: Arena) -> None:
    arena.put(key(1), bytes(4000))
    assert not arena.admits(key(2), 97)
    with pytest.raises(Full):
        arena.put(key(2), bytes(97))
    arena.put(key(2), bytes(96))
    arena.put(key(1), bytes(97))  # is there already, so it needs no room
    assert (arena.records, arena.used, arena.evicted) == (2, 4096, 0)


def test_a_full_table_refuses_records(arena: Arena) -> None:
    for number in range(MAX_PROBES):
        arena.put(key(number * MIN_SLOTS), b"x")
    with pytest.raises(Full):
        arena.put(key(MAX_PROBES * MIN_SLOTS), b"x")
    assert arena.get(key(MAX_PROBES * MIN_SLOTS)) is None
    arena.put(key(MAX_PROBES), b"x")
    assert arena.records == MAX_PROBES + 1


def test_an_arena_is_emptied_for_others_only_when_nobody_uses_it_any_more(
    arena: Arena,
) -> None:
    for number in range(4):
        arena.put(key(number), bytes(1024))
    look(arena, 1)
    look(arena, 2, times=4)  # those of one epoch
    with pytest.raises(Full):
        arena.put(key(0, 2), bytes(1024))
    look(arena, 2)
    assert arena.admits(key(0, 2), 1024)
    arena.put(key(0, 2), bytes(1024))
    assert (arena.records, arena.evicted) == (1, 4)
    assert arena.get(key(0)) is None


def test_a_full_table_is_emptied_like_a_full_arena(arena: Arena) -> None:
    for number in range(MAX_PROBES):
        arena.put(key(number * MIN_SLOTS), b"x")
    look(arena, 2, times=MAX_PROBES + 1)
    arena.put(key(0, 2), b"y")
    assert (arena.records, arena.evicted) == (1, MAX_PROBES)


def test_a_record_larger_than_the_arena_empties_nothing(arena: Arena) -> None:
    arena.put(key(1), b"one")
    look(arena, 2, times=9)
    with pytest.raises(Full):
        arena.put(key(1, 2), bytes(4097))
    assert arena.records == 1


def test_a_damaged_record_is_dropped_and_stored_again(arena: Arena) -> None:
    arena.put(key(1), b"one")
    arena.forget(key(1))
    arena.forget(key(2))
    assert arena.get(key(1)) is None
    arena.put(key(1), b"two")
    assert bytes(arena.get(key(1)) or b"") == b"two"


@pytest.mark.parametrize(
    "place", [(1 << 63, 3), (0, 3), (PAGE, 0), (PAGE + 32 * MIN_SLOTS, 4097)]
)
def test_a_torn_slot_counts_as_empty_and_is_stored_again(
    arena: Arena, place: tuple[int, int]
) -> None:
    arena.put(key(1), b"one")
    arena._set_slot(PAGE + 32, key(1), *place)
    assert arena.get(key(1)) is None
    arena.put(key(1), b"two")
    assert bytes(arena.get(key(1)) or b"") == b"two"


def test_the_namespace_that_came_first_stays_as_long_as_it_is_asked_for(
    arena: Arena,
) -> None:
    others = range(2, 40)
    for number in range(4):
        arena.put(key(number), bytes(1000))
    for other in others:
        look(arena, 1)
        look(arena, other, times=4)
        with pytest.raises(Full):
            arena.put(key(0, other), bytes(1000))
    look(arena, 2)
    arena.put(key(0, 2), bytes(1000))  # which comes first from now on
    look(arena, 1)
    for number in range(3):
        arena.put(key(number), bytes(1000))
    with pytest.raises(Full):
        arena.put(key(3), bytes(1000))
    assert (arena.records, arena.evicted) == (4, 4)


def test_two_processes_see_one_arena(arena: Arena) -> None:
    def work(end: End) -> None:
        with_own_locks = Arena(arena.reopened())
        end.tell(bytes(with_own_locks.get(key(1)) or b"").decode())
        with_own_locks.put(key(2), b"from the child")
        end.tell("put")

    arena.put(key(1), b"from the parent")
    with forked(work) as child:
        assert child.hear() == "from the parent"
        assert child.hear() == "put"
        assert bytes(arena.get(key(2)) or b"") == b"from the child"


def test_readers_without_a_lock_never_see_a_half_written_record(arena: Arena) -> None:
    def work(end: End) -> None:
        mine = Arena(arena.reopened())
        end.tell("begun")
        while True:
            look(mine, 1)

    before = 0
    with forked(work) as child:
        assert child.hear() == "begun"
        for _ in range(100_000):
            now = arena._words[_LOOKUPS]
            assert now >= before
            before = now


def test_a_writer_that_is_killed_locks_nobody_out(arena: Arena) -> None:
    def work(end: End) -> None:
        mine = Arena(arena.reopened())
        with mine._writer:
            end.tell("locked")
            end.hear()

    with forked(work) as child:
        assert child.hear() == "locked"
    arena.put(key(1), b"one")
    assert arena.records == 1


def test_memory_that_is_no_arena_is_refused() -> None:
    short, other = nameless("short"), nameless("other")
    os.ftruncate(other, 1 << 16)
    with pytest.raises(ValueError, match="too short"):
        Arena(short)
    with pytest.raises(ValueError, match="no arena of version"):
        Arena(other)
    os.close(short)
    os.close(other)
