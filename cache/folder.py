"""A folder that holds a cache: whether it may be used, how it was left, who writes.

A folder is used by processes of one pid namespace at a time: LMDB tells readers apart
by their pids, and two containers have the same ones.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..system.file_locks import lock_file

LOGGER = logging.getLogger("penstock")
VERSION = 1
"""Of what is stored, and how. Folders of other versions are refused, and left alone."""
STATE = "state.json"
BESIDE = "beside-"
MAX_BESIDE = 8
"""Containers that use a cache at once, each with pids of its own."""
MAX_STATE_BYTES = 4096
LOCAL = frozenset(
    (
        *("", "apfs", "aufs", "bcachefs", "btrfs", "ecryptfs", "exfat", "ext2", "ext3"),
        *("ext4", "f2fs", "fuse.fuse-overlayfs", "fuseblk", "hfsplus", "jfs", "msdos"),
        *("nilfs2", "ntfs", "ntfs3", "overlay", "ramfs", "reiserfs", "rootfs", "tmpfs"),
        *("ubifs", "udf", "ufs", "vfat", "xfs", "zfs"),
    )
)
"""File systems of one machine ("": unknown, not Linux). On any other several machines
may write, or locks may not hold: LMDB asks not to be used there (lmdb.h, "Caveats")."""
MOUNTS = Path("/proc/mounts")
ESCAPED = re.compile(rb"\\([0-7]{3})")
"""A blank, tab, newline or backslash of a path in there (getmntent(3))."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
PIDS = Path("/proc/self/ns/pid")
PATIENCE_S = 30.0
"""For another process that writes; one that writes for longer was stopped."""
OPENING_PATIENCE_S = 600.0
"""For another process that looks through the database."""
UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError),
    RecursionError,
)
"""What comes of reading a file that somebody else wrote."""
SLOW_S = 2.0
"""What takes longer is said."""
SPARE = 1 << 26
"""Bytes of the disk that stay free: checkpoints and logs matter more than a cache."""


class DistrustError(Exception):
    """A folder that must not be used; the text says why, and what would help."""


class TakenError(Exception):
    """Processes of another pid namespace have the folder open."""


@dataclass(frozen=True, slots=True)
class FolderState:
    """What `state.json` says. Written under the lease, or by who has it alone."""

    clean: bool
    """Whether all that was written is on the disk."""
    boot: str = ""
    """When this machine was started last, as it was then."""
    version: int = 0
    """0: there is no state that can be read."""
    pids: int = 0
    """Pid namespace of those who have the folder open; 0: unknown."""
    whole: str = ""
    """Size and time of change of the database when it was last known to be whole."""

    @classmethod
    def read(cls, folder: Path) -> FolderState:
        """Return it; what cannot be read is of no version."""
        try:
            state = json.loads((folder / STATE).read_bytes()[:MAX_STATE_BYTES])
            return cls(
                state["clean"] is True,
                str(state["boot"]),
                int(state["version"]),
                int(state.get("pids", 0)),
                str(state.get("whole", "")),
            )
        except UNREADABLE:
            return cls(clean=False)

    @classmethod
    def now(cls, folder: Path, *, clean: bool) -> FolderState:
        """Return what this version says of a folder, on this boot."""
        whole = stamp(folder) if clean else ""
        return cls(clean, boot_id(), VERSION, pid_namespace(), whole)

    def write(self, folder: Path) -> None:
        """Put it in place of what there was, on the disk before anything else is."""
        if FolderState.read(folder) == self:
            return
        new = folder / f"{STATE}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / STATE)

    @property
    def survived(self) -> bool:
        """Whether no power cut came between what was written and the disk."""
        return self.clean or self.boot == boot_id()


def check_folder(folder: Path) -> None:
    """Look whether this user alone may write to a folder on a disk of this machine.

    Raises:
        DistrustError: it is another's, a link, or on a network file system.
    """
    kind = kind_of_place(folder)
    if kind not in LOCAL:
        raise DistrustError(
            f"{folder} is on a network file system, or one that is not known to be"
            f" local ({kind}), where locks and shared memory may not hold; give a"
            " folder on a disk of this machine"
        )
    there = next(filter(os.path.lexists, (folder, *folder.parents)))
    if not there.is_dir():
        raise DistrustError(f"{there} is not a folder; remove it, or give another path")
    if there != folder:
        return
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
    if (folder / "data.mdb").exists() and not (folder / "users").exists():
        raise DistrustError(
            f"{folder} holds a database that penstock did not write; give another"
            " folder"
        )


def check_ours(folder: Path) -> None:
    """Look whether this version of penstock wrote what is in a folder.

    Raises:
        DistrustError: another version did, or another program.
    """
    version = FolderState.read(folder).version
    if not version:
        raise DistrustError(
            f"{folder} holds no cache of penstock, or its {STATE} is damaged"
        )
    if version != VERSION:
        raise DistrustError(
            f"{folder} was written by another version of penstock (its format is"
            f" {version}, this one reads {VERSION}); use that version, give another"
            f" folder, or empty it by `penstock cache clear {folder}`"
        )


def check_left(folder: Path) -> None:
    """Look whether a folder that nobody has open was left whole.

    The pages of the database are read only if it has changed since they were last known
    to be whole: after a crash, or when something else wrote to the file.

    Raises:
        DistrustError: it was not, or another version wrote it.
    """
    left, data = FolderState.read(folder), folder / "data.mdb"
    if not data.exists():
        return
    check_ours(folder)
    if not left.survived:
        raise DistrustError(f"{folder} was not closed before a power cut")
    if left.whole == stamp(folder) or not data.stat().st_size:
        return
    with said_if_slow(f"checking the cache in {folder}, which was not closed"):
        check_pages(data)


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


def enter(folder: Path, users: int, *, mends: bool) -> str | None:
    """Join those who have a folder open; the first looks whether it is whole.

    Args:
        folder: see `check_folder`.
        users: descriptor of its file `users`, which is locked while it is open.
        mends: whether to empty a folder that was not left whole.

    Returns:
        what was found amiss, and mended.

    Raises:
        DistrustError: it was not left whole, or another version wrote it.
        TakenError: processes of another pid namespace have it open.
        TimeoutError: another process has been looking through it for too long.
    """
    told = None
    for _ in range(3):
        if alone(users):
            told = begin_session(folder, mends=mends)
        with said_if_slow(f"waiting for another process to check {folder}"):
            lock_file(users, fcntl.LOCK_SH, OPENING_PATIENCE_S)  # may be behind others
        state = FolderState.read(folder)
        if (state.version, state.boot) == (VERSION, boot_id()):
            if state.pids not in (0, pid_namespace()):
                raise TakenError(str(folder))
            return told
        fcntl.flock(users, fcntl.LOCK_UN)  # nobody has looked through it to the end
    raise DistrustError(f"{folder} was left by the process that looked through it")


def alone(users: int) -> bool:
    """Lock a folder, and return whether nobody else has it open."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def begin_session(folder: Path, *, mends: bool) -> str | None:
    """Alone, look whether the folder was left whole; else empty it, and return why."""
    told = None
    if FolderState.read(folder).version:
        check_ours(folder)
    try:
        check_left(folder)
    except DistrustError as error:
        if not mends:
            raise
        told = f"{error}; it is emptied and filled again"
        wipe(folder)
    # What was not synced on this boot still is not.
    clean = FolderState.read(folder).clean or not (folder / "data.mdb").exists()
    FolderState.now(folder, clean=clean).write(folder)
    return told


def wipe(folder: Path) -> None:
    """Delete what is stored; nobody else has it open."""
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)
    FolderState.now(folder, clean=True).write(folder)


@contextmanager
def leased(folder: Path) -> Iterator[None]:
    """Be the one that writes, until this ends or the process does.

    Raises:
        TimeoutError: another has it, and was stopped in the middle.
    """
    lease = os.open(folder / "writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock_file(lease, fcntl.LOCK_EX, PATIENCE_S)
        yield
    finally:
        fcntl.flock(lease, fcntl.LOCK_UN)  # a child forked meanwhile has it open
        os.close(lease)


@contextmanager
def said_if_slow(what: str) -> Iterator[None]:
    """Tell what takes so long, once it does."""
    timer = threading.Timer(SLOW_S, LOGGER.warning, [f"still {what}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def places(folder: Path) -> Iterator[Path]:
    """Yield where a cache in a folder may be: there, and beside it."""
    yield folder
    yield from (folder / f"{BESIDE}{number}" for number in range(1, MAX_BESIDE))


def beside_bytes(folder: Path) -> int:
    """Return the bytes of the other databases of a cache."""
    first = folder.parent if folder.name.startswith(BESIDE) else folder
    others = [place / "data.mdb" for place in places(first) if place != folder]
    return sum(path.stat().st_size for path in others if path.exists())


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


def kind_of_place(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that `folder` is on, or is to be on."""
    path = os.fsencode(os.path.realpath(folder))
    best, found = b"", b""
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:  # not Linux
        return ""
    for line in lines:
        _, place, kind, *_ = line.split(b" ")
        place = ESCAPED.sub(lambda octal: bytes([int(octal[1], 8) & 255]), place)
        inside = path == place or path.startswith(place.rstrip(b"/") + b"/")
        if inside and len(place) >= len(best):
            best, found = place, kind
    return os.fsdecode(found)


def boot_id() -> str:
    """Return what differs each time this machine is started; "" where unknown."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Return the number of the namespace of this process' pid; 0 where unknown."""
    try:
        return PIDS.stat().st_ino
    except OSError:
        return 0


def stamp(folder: Path) -> str:
    """Return size and time of change of the database; "" where there is none."""
    try:
        status = (folder / "data.mdb").stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"
