"""How a worker ended, in words."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.far import processes
from penstock.engine.far.child import StatusPage, cause_of, is_stopped, post_status
from penstock.engine.far.processes import WorkerChild
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
    ("status", "told"),
    [
        (3 << 8, "exited with status 3"),
        (signal.SIGSEGV, "killed by signal 11 (SIGSEGV)"),
        (signal.SIGKILL, "SIGKILL); not by a memory limit"),
        (signal.SIGTERM, "killed by signal 15 (SIGTERM)"),
        (signal.SIGRTMIN + 1, "killed by signal 35"),
        (None, "unknown, because the fork server ended, too"),
    ],
)
def test_the_cause_of_death_says_all_that_is_known(
    status: int | None, told: str
) -> None:
    assert told in cause_of(status, for_memory=False)


def test_a_kill_for_memory_explains_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((4, 4, 4, 4, 6, 6, 6))
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(WorkerChild, "explained_kills", 3)
    nothing: Any = None
    pages = [StatusPage.make() for _ in range(4)]
    workers = [WorkerChild(nothing, page, 0, 0, nothing) for page in pages]
    causes = []
    for worker, status in zip(workers, (9, 11, 9, 9), strict=True):
        post_status(worker.status_page.descriptor, status)
        causes.append(worker.how_it_ended())
        worker.status_page.close()
    of_memory = ["this control group, or the machine, ran out" in c for c in causes]
    assert of_memory == [True, False, True, False]


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
