"""Processes find an arena by a list of its holders that needs no upkeep."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cache import arena_registry as module
from penstock.cache.arena_registry import join, leave, listed
from penstock.cache.memory import Arena
from penstock.system.runtime_folder import runtime_folder
from support.forked import End, forked

pytestmark = pytest.mark.usefixtures("own_runtime_folder")

NAME = "test"
KEY = bytes(range(16))


def the_list() -> Path:
    folder = runtime_folder()
    assert folder is not None
    return folder / NAME


@contextmanager
def joined() -> Iterator[Arena]:
    arena, holder = join(NAME, 4096, 0)
    yield arena
    leave(NAME, holder)
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
    arena, holder = join(NAME, 4096, 0)
    arena.put(KEY, b"of the first")
    with forked(joins) as child:
        assert child.hear() == "of the first"
        leave(NAME, holder)
        arena.close()
        with joined() as again:
            assert bytes(again.get(KEY) or b"") == b"of the first"


def test_nothing_is_left_after_the_last_process_has_left() -> None:
    arena, holder = join(NAME, 4096, 0)
    assert the_list().exists()
    leave(NAME, holder)
    leave(NAME, holder)
    arena.close()
    assert not the_list().exists()


def test_a_killed_holder_is_followed_by_a_new_arena() -> None:
    def work(end: End) -> None:
        arena, _ = join(NAME, 4096, 0)
        arena.put(KEY, b"of one who is gone")
        end.tell("put")
        end.hear()

    with forked(work) as child:
        assert child.hear() == "put"
    assert the_list().exists()
    with joined() as arena:
        assert arena.get(KEY) is None
        assert len(json.loads(the_list().read_text())) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\x00",
        b"{}",
        b"[1]",
        b'[{"pid": 1}]',
        b'[{"pid": 1e999, "descriptor": 0, "device": 0, "inode": 0}]',
        b'[{"pid": -1, "descriptor": 0, "device": 0, "inode": 0}]',
        b"[" * 100_000,
        b" " * (2 << 20),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_file_that_is_not_a_list_is_rewritten(text: bytes) -> None:
    the_list().write_bytes(text)
    with joined():
        assert len(json.loads(the_list().read_text())) == 1


def test_a_folder_that_others_may_write_to_is_not_used() -> None:
    the_list().parent.chmod(0o777)
    assert runtime_folder() is None
    with joined():
        pass


def test_a_list_that_others_remove_meanwhile_is_opened_all_the_same() -> None:
    def come_and_go(_: int) -> None:
        for _ in range(60):
            with listed(the_list()) as holders:
                assert holders == []

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert not the_list().exists()


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = the_list().parent
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


def test_nobody_waits_for_a_list_that_a_stopped_process_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stops(end: End) -> None:
        with listed(the_list()):
            end.tell("reads")
            end.hear()

    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with forked(stops) as child:
        assert child.hear() == "reads"
        child.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            join(NAME, 4096, 0)
