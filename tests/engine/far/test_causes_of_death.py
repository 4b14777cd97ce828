"""How a worker ended, in words."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.far.child import cause_of, is_stopped
from penstock.system.resources import oom_kills


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A child that waits to be killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("status", "kills", "told"),
    [
        (3 << 8, (0, 0), "exited with status 3"),
        (signal.SIGSEGV, (0, 0), "killed by signal 11 (SIGSEGV)"),
        (signal.SIGKILL, (4, 4), "SIGKILL); not by a memory limit"),
        (signal.SIGKILL, (4, 5), "by the system's out-of-memory killer"),
        (signal.SIGTERM, (4, 5), "killed by signal 15 (SIGTERM)"),
        (signal.SIGRTMIN + 1, (0, 0), "killed by signal 35"),
        (None, (0, 0), "unknown, because the fork server ended, too"),
    ],
)
def test_the_cause_of_death_says_all_that_is_known(
    status: int | None, kills: tuple[int, int], told: str
) -> None:
    assert told in cause_of(status, *kills)


@pytest.mark.parametrize(
    ("line", "path", "text"),
    [
        ("0::/job", "job/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("0::/", "memory.events", "oom 1\noom_kill 2\noom_group_kill 0\n"),
        ("5:memory:/a/b", "memory/a/b/memory.oom_control", "under_oom 0\noom_kill 2\n"),
    ],
)
def test_kills_for_memory_are_read_from_both_versions_of_cgroups(
    line: str, path: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"9:cpu:/x\n{line}\n")
    counts = tmp_path / "cgroup" / path
    counts.parent.mkdir(parents=True)
    counts.write_text(text)
    assert oom_kills(tmp_path, tmp_path / "cgroup") == 2


def test_no_kills_are_reported_where_none_are_counted(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path) == 0


def test_a_stopped_process_is_told_from_one_that_waits(sleeper: int) -> None:
    assert not is_stopped(sleeper)
    os.kill(sleeper, signal.SIGSTOP)
    os.waitpid(sleeper, os.WUNTRACED)
    assert is_stopped(sleeper)


def test_a_process_that_is_gone_is_not_stopped() -> None:
    assert not is_stopped(2**30)
