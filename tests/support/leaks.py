"""What this process holds before and after a function, for every leak test.

Files, children and shared memory are read from Linux's /proc. On other systems these
parts stay empty, and only threads are compared.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.warm import warm_descriptor, warm_pid

__all__ = ["Footprint", "children", "leaks_since"]

POLL_S = 0.001
GRACE_S = 5.0
"""Seconds for things to end. Without a leak, nothing waits this long."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written
SEMAPHORES = "sem.mp-"
"""Multiprocessing's, for what is spawned; we make none. The tracker of the process that
did, maybe of another test, removes them some time after its end."""
DEVICE_FILES = "/dev/nvidia"
"""The CUDA driver opens these when it is first used and keeps them."""
DRIVER = DEVICE_FILES + "ctl"
"""Looked at first, as a list of all mappings is long to read, twice a test."""
PINNED = "/dev/(?:zero|nvidia)"
"""What pinned memory is mapped from."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Threads, children, files and shared memory of this process at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    """Process ids. A grandchild is seen through its parent, or is init's by now."""
    files: frozenset[tuple[int, str]]
    """Descriptor and target; a memfd's target is `/memfd:<name> (deleted)`."""
    segments: frozenset[str]
    """Names in /dev/shm, those of other processes included."""
    shared_kib: int
    """Resident shared memory, also of a memfd that is mapped but no longer open."""

    @classmethod
    def now(cls) -> Footprint:
        """Look. About 0.2 ms."""
        tracker = resource_tracker()
        return cls(
            threads=frozenset(filter(was_started_by_python, threading.enumerate())),
            children=frozenset(child_pids()) - {tracker.pid, warm_pid()},
            files=frozenset(
                f
                for f in open_files()
                if f[0] not in (tracker.descriptor, warm_descriptor())
            ),
            segments=frozenset(
                name
                for name in entries(SHARED_MEMORY)
                if not name.startswith(SEMAPHORES)
            ),
            shared_kib=shared_kib(),
        )

    def exceeds(self, before: Footprint) -> bool:
        """Whether anything is here that was not there `before`."""
        return bool(
            self.threads - before.threads
            or self.children - before.children
            or self.files - before.files
            or self.segments - before.segments
            or self.shared_kib > before.shared_kib
        )

    def wait_for(self, before: Footprint, timeout_s: float) -> None:
        """Wait until what came since `before` has ended, `timeout_s` at most."""
        deadline_s = time.monotonic() + timeout_s
        new = self.threads - before.threads
        # Not joined: one that another thread is just starting would refuse it.
        while new & set(threading.enumerate()) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        psutil.wait_procs(
            processes(self.children - before.children),
            timeout=max(0.0, deadline_s - time.monotonic()),
        )


def leaks_since(before: Footprint, grace_s: float = GRACE_S) -> list[str]:
    """One line for everything held now that was not held `before`, after a grace."""
    now = Footprint.now()
    if now.exceeds(before):
        gc.collect()
        now = Footprint.now()
    if now.exceeds(before):
        now.wait_for(before, grace_s)
        gc.collect()
        now = Footprint.now()
    return list(differences(before, now))


def differences(before: Footprint, now: Footprint) -> Iterator[str]:
    """What `now` has more, in words."""
    for thread in now.threads - before.threads:
        yield f"thread {thread.name!r} (daemon={thread.daemon})"
    for pid in now.children - before.children:
        yield f"child process {pid}: {command_line(pid)}"
    for descriptor, target in sorted(now.files - before.files):
        yield f"file descriptor {descriptor}: {target}"
    for name in sorted(now.segments - before.segments):
        segment = SHARED_MEMORY / name
        # Looked at last: torch's loaders elsewhere make files and unlink them at once.
        if not is_used_by_a_stranger(segment) and segment.exists():
            yield f"shared memory {segment}"
    if (grown_kib := now.shared_kib - before.shared_kib) > 0:
        yield f"{grown_kib} KiB more of shared memory mapped: {shared_mappings()}"


def was_started_by_python(thread: threading.Thread) -> bool:
    """False for what stands for a native thread (autograd's) that once ran Python."""
    return not thread.name.startswith("Dummy-")


def child_pids() -> Iterator[int]:
    """Return the ids of this process's children, including zombies."""
    for task in entries(Path("/proc/self/task")):
        yield from map(int, content(Path(f"/proc/self/task/{task}/children")).split())


def open_files() -> Iterator[tuple[int, str]]:
    """Open descriptors with their targets; the GPU driver's own left out."""
    for descriptor in entries(Path("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # the one that read the folder
        if not target.startswith(DEVICE_FILES):
            yield int(descriptor), target


def shared_kib() -> int:
    """Shared memory resident in this process, in KiB; the GPU driver's own left out."""
    match = re.search(r"RssShmem:\s+(\d+)", content(Path("/proc/self/status")))
    return int(match[1]) - pinned_kib() if match else 0


def pinned_kib() -> int:
    """Memory that torch has pinned, in KiB: its allocator keeps what is freed."""
    if not os.path.exists(DRIVER):
        return 0
    if DEVICE_FILES not in content(Path("/proc/self/maps")):
        return 0
    mapped = content(Path("/proc/self/smaps"))
    return sum(map(int, re.findall(PINNED + r"[^/]*?\nRss:\s+(\d+)", mapped)))


def shared_mappings() -> str:
    """Names of the shared memory mapped into this process."""
    names = re.findall(r"/(?:memfd:|dev/).*", content(Path("/proc/self/maps")))
    return ", ".join(sorted(set(names)))


def is_used_by_a_stranger(segment: Path) -> bool:
    """Whether a process that is not of this one's family makes it, or maps it."""
    family = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    strangers = set(psutil.pids()) - family
    made_by = re.match(r"torch_(\d+)_", segment.name)
    if made_by is not None and int(made_by[1]) in strangers:
        return True
    return any(str(segment) in content(Path(f"/proc/{pid}/maps")) for pid in strangers)


@dataclass(frozen=True, slots=True)
class Tracker:
    """Multiprocessing's resource tracker: one a process, made once, for good."""

    pid: int | None
    descriptor: int | None


def children(*, recursive: bool = False) -> list[psutil.Process]:
    """Return this process's children, except those that serve all tests."""
    serving = {resource_tracker().pid, warm_pid()}
    family = psutil.Process().children(recursive=recursive)
    return [child for child in family if child.pid not in serving]


def resource_tracker() -> Tracker:
    """The tracker of this process; Nones while it has none."""
    from multiprocessing import resource_tracker as module

    tracker = module._resource_tracker  # noqa: SLF001 - only it knows
    return Tracker(getattr(tracker, "_pid", None), getattr(tracker, "_fd", None))


def processes(pids: frozenset[int]) -> list[psutil.Process]:
    """Those that still exist."""
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def command_line(pid: int) -> str:
    """Return a process's command, or `gone` if it has just ended."""
    return content(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip() or "gone"


def entries(folder: Path) -> list[str]:
    """Names in `folder`; none where the system has no such folder."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def content(path: Path) -> str:
    """Text of a file of /proc; empty where it is gone or not for us to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
