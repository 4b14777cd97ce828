"""A child process of ours, from fork to end."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from penstock.engine.far.child import Child, Pipe, fork_child

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
        os.waitpid(pid, 0)
