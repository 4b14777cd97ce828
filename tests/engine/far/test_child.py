"""A child process of ours, from fork to end."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from functools import partial

import pytest

from penstock.engine.far import child
from penstock.engine.far.child import Child, Pipe, fork_child
from penstock.system.forking import fork

SCRIPT = """
import os, sys
from penstock.engine.far.child import fork_child

def says():
    print("said", end=" ")  # to a pipe, so it stays in the buffer

def closes():
    sys.stdout.close()

for body in (says, closes):
    _, status = os.waitpid(fork_child(body), 0)
    print(status, flush=True)
"""


def test_what_a_child_has_printed_is_not_lost_at_its_end() -> None:
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        env=buffered,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["said", "0", "0"], "")


def test_a_child_that_cannot_be_watched_is_ended(ends: tuple[Pipe, Pipe]) -> None:
    ours, theirs = ends
    pid = fork_child(theirs.receive_all, theirs)  # which waits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(ours.fileno())
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="open files"):
            Child(ours, pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_threads_may_fork_children_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def fork_beside_the_other() -> int:
        both.wait(30)
        return fork()

    monkeypatch.setattr(child, "fork", fork_beside_the_other)
    pairs, pids = [Pipe.pair() for _ in range(2)], list[int]()

    def fork_one(theirs: Pipe) -> None:
        pids.append(fork_child(partial(theirs.send, "here"), theirs))

    threads = [threading.Thread(target=fork_one, args=(end,)) for _, end in pairs]
    for thread in threads:
        thread.start()
    for thread, (ours, theirs) in zip(threads, pairs, strict=True):
        thread.join()
        theirs.close()
        assert ours.receive_all() == ["here"]
        ours.close()
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
