"""Processes find the arena that another of their user has open."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cache import memory as module
from penstock.cache.memory import Arena, join
from penstock.system.file_locks import locked_folder
from penstock.system.shared_memory import nameless, runtime_folder, titled
from support.forked import End, forked

pytestmark = pytest.mark.usefixtures("own_runtime_folder")

NAME = "test"
KEY = bytes(range(16))


def the_folder() -> Path:
    folder = runtime_folder()
    assert folder is not None
    return folder


@contextmanager
def joined() -> Iterator[Arena]:
    arena, _ = join(NAME, 4096, 0)
    yield arena
    arena.close()


def joins(end: End) -> None:
    arena, _ = join(NAME, 4096, 0)
    end.tell(bytes(arena.get(KEY) or b"nothing").decode())
    end.hear()


def test_a_second_process_finds_the_arena_of_the_first() -> None:
    with joined() as arena:
        arena.put(KEY, b"of the first")
        with forked(joins) as child:
            assert child.hear() == "of the first"


def test_an_arena_lives_on_after_its_first_process_has_left() -> None:
    arena, _ = join(NAME, 4096, 0)
    arena.put(KEY, b"of the first")
    with forked(joins) as child:
        assert child.hear() == "of the first"
        arena.close()
        with joined() as again:
            assert bytes(again.get(KEY) or b"") == b"of the first"


def test_nothing_is_left_after_the_last_process_has_left() -> None:
    with joined() as arena:
        arena.put(KEY, b"of one who is gone")
    with joined() as arena:
        assert arena.get(KEY) is None
    assert not [*the_folder().iterdir()]


def test_a_killed_holder_is_followed_by_a_new_arena() -> None:
    def work(end: End) -> None:
        arena, _ = join(NAME, 4096, 0)
        arena.put(KEY, b"of one who is gone")
        end.tell("put")
        end.hear()

    with forked(work) as child:
        assert child.hear() == "put"
        child.kill()
    with joined() as arena:
        assert arena.get(KEY) is None


def test_processes_with_another_name_or_runtime_folder_have_other_arenas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined() as arena:
        arena.put(KEY, b"of the first")
        other, _ = join("another", 4096, 0)
        assert other.get(KEY) is None
        other.close()
        (tmp_path / "runtime").mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
        with joined() as elsewhere:
            assert elsewhere.get(KEY) is None


@pytest.mark.parametrize("content", [b"", bytes(1 << 16)], ids=["empty", "zeros"])
def test_what_only_has_the_title_of_an_arena_is_not_used(content: bytes) -> None:
    title = f"penstock-cache-{the_folder().stat().st_ino}-{NAME}"
    impostor = os.memfd_create(title)
    os.write(impostor, content)
    with joined() as arena:
        arena.put(KEY, b"of an arena")
        assert os.pread(impostor, 1 << 17, 0) == content
        with joined() as again:
            assert bytes(again.get(KEY) or b"") == b"of an arena"
    os.close(impostor)


def test_memory_is_found_at_the_process_that_holds_it_until_it_is_closed() -> None:
    title = f"test-{os.urandom(8).hex()}"
    one, other = nameless(title), nameless("another")
    descriptor = next(titled(title, os.getpid()))
    assert os.path.samestat(os.fstat(descriptor), os.fstat(one))
    assert list(titled(title, os.getppid())) == []
    os.close(descriptor)
    os.dup2(other, one)
    assert list(titled(title)) == []
    os.close(one)
    os.close(other)


def test_a_folder_that_others_may_write_to_is_not_used() -> None:
    the_folder().chmod(0o777)
    assert runtime_folder() is None
    with joined():
        pass


def test_one_process_or_thread_at_a_time_looks_for_an_arena() -> None:
    inside: list[int] = []

    def come_and_go(number: int) -> None:
        for _ in range(60):
            with locked_folder(the_folder(), 60.0):
                inside.append(number)
                assert inside == [number]
                inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = the_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert runtime_folder() is None


@pytest.mark.parametrize("missing", ["missing", "a file"])
def test_where_the_runtime_folder_is_missing_processes_still_find_one_another(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / missing))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with joined() as arena:
        arena.put(KEY, b"of the first")
        with forked(joins) as child:
            assert child.hear() == "of the first"


def test_nobody_waits_for_a_lock_that_a_stopped_process_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stops(end: End) -> None:
        with locked_folder(the_folder(), 60.0):
            end.tell("looks")
            end.hear()

    monkeypatch.setattr(module, "LOOKING_PATIENCE_S", 0.05)
    with forked(stops) as child:
        assert child.hear() == "looks"
        child.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            join(NAME, 4096, 0)
