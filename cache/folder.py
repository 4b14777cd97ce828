"""How a folder was left: one small file beside the database."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "SPARE",
    "VERSION",
    "DistrustError",
    "FolderState",
    "boot_id",
    "check_folder",
    "check_pages",
    "kind_of_place",
    "leased",
    "shortage",
    "spare_bytes",
]

VERSION = 1
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FolderState:
    """What `state.json` says. Written under the lease, or by who has it alone."""

    session: str
    """Of those who have the folder open: see `Disk.vouch`."""
    clean: bool
    """Whether all that was written is on the disk."""
    boot: str = ""
    """When this machine was started last, as it was then."""
    version: int = 0

    @classmethod
    def read(cls, folder: Path) -> FolderState:
        """Return it; what cannot be read is of no version."""
        try:
            state = json.loads((folder / "state.json").read_bytes()[:MAX_BYTES])
            session, boot = str(state["session"]), str(state["boot"])
            return cls(session, state["clean"] is True, boot, int(state["version"]))
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return cls("", clean=False)

    @classmethod
    def now(cls, session: str, *, clean: bool) -> FolderState:
        """Return what is to be said by this version, on this boot."""
        return cls(session, clean, boot_id(), VERSION)

    def write(self, folder: Path) -> None:
        """Put it in place of what there was, on the disk before anything else is."""
        if FolderState.read(folder) == self:
            return
        new = folder / "state.json.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / "state.json")

    @property
    def survived(self) -> bool:
        """Whether no power cut came between what was written and the disk."""
        return self.clean or self.boot == boot_id()


# Who may write to a database: one process of the host at a time.

PATIENCE_S = 30.0
PAUSE_S = 0.002
"""Between two looks at a lock: none of another process' can be waited for so long and
no longer."""


@contextmanager
def leased(folder: Path) -> Iterator[None]:
    """Be the one that writes; it ends with the process that has it, however that ends.

    Raises:
        TimeoutError: another has it, and was stopped in the middle.
    """
    lease = os.open(folder / "writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        wait_for(lease)
        yield
    finally:
        fcntl.flock(lease, fcntl.LOCK_UN)  # a child forked meanwhile has it open
        os.close(lease)


def wait_for(lease: int) -> None:
    """Lock it; not for ever."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                text = (
                    f"another process has been writing for {PATIENCE_S:g} s: stopped?"
                )
                raise TimeoutError(text) from None
        time.sleep(PAUSE_S)


# What is left free on a disk, whatever a cache may take of it.

SPARE = 1 << 26
"""Bytes: checkpoints and logs go to the same disk, and matter more."""


def spare_bytes(folder: Path) -> int:
    """Return the bytes of the disk that caches may take; negative: it is full."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize - SPARE


def shortage(folder: Path, nbytes: int) -> str:
    """Return what to tell where the disk has no such room; "": it has."""
    spare = spare_bytes(folder)
    if nbytes <= spare:
        return ""
    return (
        f"it stores no more, as the disk of {folder} has {spare + SPARE} bytes free and"
        f" {SPARE} are left so; free some, or give a folder on another disk"
    )


# Whether a folder may serve as a cache: whose it is, where, how it was left.

REMOTE = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre"),
        *("ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs", "vboxsf"),
        *("virtiofs", "wekafs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys"),
        *("fuse.juicefs", "fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs"),
        "fuse.sshfs",
    )
)
"""File systems that several machines may write to, or that know no reliable locks. LMDB
asks not to be used there (lmdb.h, "Caveats")."""
MOUNTS = Path("/proc/mounts")
ESCAPED = re.compile(r"\\([0-7]{3})")
"""A blank, tab, newline or backslash of a path in there (getmntent(3))."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


class DistrustError(Exception):
    """A folder that must not be used; the text says why, and what would help."""


def check_folder(folder: Path) -> None:
    """Make the folder, if there is none, and look whose it is.

    Raises:
        DistrustError: it is not this user's alone, or lies on a network file system.
        OSError: it cannot be made.
    """
    remote = kind_of_place(folder) if kind_of_place(folder) in REMOTE else None
    if remote is not None:
        raise DistrustError(
            f"{folder} is on a network file system ({remote}), where locks and shared"
            " memory do not hold; give a folder on a disk of this machine"
        )
    there = next(filter(os.path.lexists, (folder, *folder.parents)))
    if not there.is_dir():
        raise DistrustError(f"{there} is not a folder; remove it, or give another path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise DistrustError(f"{folder} is a link; give the folder that it leads to")
    if status.st_uid != os.getuid():
        raise DistrustError(
            f"{folder} belongs to user {status.st_uid}, not to this one"
            f" ({os.getuid()}); give a folder of your own"
        )
    if status.st_mode & 0o022:
        raise DistrustError(
            f"others may write to {folder}; chmod 700 it, if all in it is yours"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DistrustError(f"{folder} may not be written to; chmod 700 it")


def kind_of_place(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that `folder` is on, or is to be on."""
    path = os.path.realpath(folder)
    best, found = "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:  # not Linux
        return ""
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        place = ESCAPED.sub(lambda found: chr(int(found[1], 8)), place)
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, found = place, kind
    return found


def boot_id() -> str:
    """Return what differs each time this machine is started; "" where unknown."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def check_pages(data: Path) -> None:
    """Look through the pages of a database, without LMDB: it trusts what it finds.

    Raises:
        DistrustError: a page is damaged, or missing.
    """
    from lmdb.verify import VerifyError, verify

    try:
        problems = verify(str(data), subdir=False)  # type: ignore[no-untyped-call]
    except (VerifyError, OSError, ValueError, IndexError) as error:
        raise DistrustError(f"{data}: {error}") from error
    if problems:
        raise DistrustError(f"{data}: {problems[0]}")
