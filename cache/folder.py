"""A folder that holds a cache: is it fit, how was it left, who writes, is there room?

Processes of one pid namespace at a time use a folder: LMDB identifies readers by their
pids, and two containers have the same ones. The second gives the folder up.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from shlex import quote

import psutil

from ..system.file_locks import lock_file, try_lock_file

LOGGER = logging.getLogger("penstock")
# Version of the stored format. Folders of other versions are refused and untouched.
VERSION = 1
# The folder created inside the one that the user names.
FOLDER = "penstock-cache"
STATE = "state.json"
MAX_STATE_BYTES = 4096
# File systems of a single machine ("": unknown). On any other, several machines may
# write, or locks may not hold: LMDB forbids it (lmdb.h, "Caveats").
LOCAL = frozenset(
    (
        *(
            "",
            "apfs",
            "hfs",
            "aufs",
            "bcachefs",
            "btrfs",
            "ecryptfs",
            "exfat",
            "ext2",
            "ext3",
        ),
        *("ext4", "f2fs", "fuse.fuse-overlayfs", "fuseblk", "hfsplus", "jfs", "msdos"),
        *("nilfs2", "ntfs", "ntfs3", "overlay", "ramfs", "reiserfs", "rootfs", "tmpfs"),
        *("ubifs", "udf", "ufs", "vfat", "xfs", "zfs"),
    )
)
BOOT = Path("/proc/sys/kernel/random/boot_id")
# Seconds to wait for another process that checks the database.
OPENING_PATIENCE_S = 600.0
# Errors from reading a file that somebody else wrote.
UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError),
    RecursionError,
)
# Work that takes longer is logged.
SLOW_S = 2.0
# Bytes of the disk left free: checkpoints and logs matter more than a cache.
SPARE = 1 << 26
PAGE = 4096
# Roughly the bytes of a page that a small record takes beyond its own length.
NODE = 40
# Bytes of records in a transaction. At this size a photo takes 70 us, at 16 MB or more
# 200 to 800.
TRANSACTION_BYTES = 1 << 20
# Locked bytes of a file lie beyond all its content.
FIRST_BYTE = 1 << 60
# A namespace that nobody has opened or written to for this long may be evicted. Before
# that, another job may be about to continue with it.
RESTING_S = 3600.0


class DistrustError(Exception):
    """A folder that must not be used; the text says why, and what helps."""


@dataclass(frozen=True, slots=True)
class FolderState:
    """The content of `state.json`.

    It is written under the lease, or by the only process that has the folder open.
    """

    clean: bool
    """Whether everything written has reached the disk."""
    boot: str = ""
    """Boot id of the machine when it was written."""
    version: int = 0
    """0: there is no readable state."""
    pids: int = 0
    """Pid namespace of the processes that have the folder open; 0: unknown."""
    whole: str = ""
    """Size and modification time of the database when last known to be intact."""

    @classmethod
    def read(cls, folder: Path) -> FolderState:
        """Return the state; an unreadable one has version 0."""
        try:
            state = json.loads((folder / STATE).read_bytes()[:MAX_STATE_BYTES])
            return cls(
                clean=state["clean"] is True,
                boot=str(state["boot"]),
                version=int(state["version"]),
                pids=int(state.get("pids", 0)),
                whole=str(state.get("whole", "")),
            )
        except UNREADABLE:
            return cls(clean=False)

    @classmethod
    def write(cls, folder: Path, *, clean: bool) -> None:
        """Write the state as of now, and sync it before anything else is written."""
        state = cls(
            clean=clean,
            boot=boot_id(),
            version=VERSION,
            pids=pid_namespace(),
            whole=stamp(folder) if clean else "",
        )
        if state == cls.read(folder):
            return
        new = folder / f"{STATE}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / STATE)


def folder_in(place: Path) -> Path:
    """Return the folder of the cache in the folder that the user names."""
    return place if place.name == FOLDER else place / FOLDER


def emptying(folder: Path) -> str:
    """Return the advice to empty a cache, by a command to paste."""
    return f"empty it with `penstock cache clear {quote(str(folder))}`"


def require(is_so: bool, text: str) -> None:  # noqa: FBT001 a condition, as in `assert`
    """Distrust a folder unless something is so.

    Raises:
        DistrustError: it is not so.
    """
    if not is_so:
        raise DistrustError(text)


def check_folder(folder: Path) -> None:
    """Check that only this user may write to a folder, on a disk of this machine.

    Raises:
        DistrustError: it is not on a local file system, is no folder but a link or a
            file, belongs to another user, may be written by others or not by this one,
            or holds a database of another program.
    """
    kind = kind_of_place(folder)
    require(
        kind in LOCAL,
        f"{folder} is on a file system that is not known to be local ({kind}),"
        " where locks and shared memory may not work; give a folder on a disk of"
        " this machine",
    )
    place = next(filter(os.path.lexists, (folder, *folder.parents)))
    require(
        place.is_dir(),
        f"{place} is not a folder, which a cache needs; give another path",
    )
    if place == folder:
        check_alone_ours(folder)


def check_alone_ours(folder: Path) -> None:
    """Check that a folder is this user's alone, and penstock's.

    Raises:
        DistrustError: see `check_folder`.
    """
    status = folder.lstat()
    require(
        stat.S_ISDIR(status.st_mode),
        f"{folder} is a link; give the folder that it points to",
    )
    require(
        status.st_uid == os.getuid(),
        f"{folder} belongs to user {status.st_uid}, but this process runs as user"
        f" {os.getuid()}; give a folder of your own",
    )
    require(
        not status.st_mode & 0o022,
        f"other users may write to {folder}; if all of it is yours, chmod 700 it",
    )
    require(
        os.access(folder, os.W_OK | os.X_OK),
        f"{folder} is not writable; chmod 700 it",
    )
    require(
        (folder / "users").exists() or not (folder / "data.mdb").exists(),
        f"{folder} holds a database that penstock did not write; give another folder",
    )


def check_ours(folder: Path) -> None:
    """Check that this version of penstock wrote the content of a folder.

    Raises:
        DistrustError: another version did, or another program.
    """
    version = FolderState.read(folder).version
    require(
        version > 0,
        f"{folder} holds no penstock cache, or its {STATE} is damaged; give another"
        f" folder, or {emptying(folder)}",
    )
    require(
        version == VERSION,
        f"{folder} was written by another version of penstock (its format is"
        f" {version}, this one reads {VERSION}); use that version, give another"
        f" folder, or {emptying(folder)}",
    )


def check_left(folder: Path) -> None:
    """Check that a folder that nobody has open was left intact.

    The pages of the database are read only if it has changed since it was last known to
    be intact: after a crash, or if something else wrote to the file.

    Raises:
        DistrustError: it was not intact, or another version wrote it.
    """
    state, data = FolderState.read(folder), folder / "data.mdb"
    if not data.exists():
        return
    check_ours(folder)
    survived = state.clean or state.boot == boot_id()
    require(survived, f"{folder} was not closed before a power cut")
    if state.whole == stamp(folder) or not data.stat().st_size:
        return
    with said_if_slow(f"checking the cache in {folder}, which a run did not close"):
        check_pages(data)


def check_pages(data: Path) -> None:
    """Check the pages of a database without LMDB, which trusts what it reads.

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


def enter(folder: Path, users: int, *, mends: bool) -> None:
    """Join the processes that have a folder open; the first checks it.

    Args:
        folder: see `check_folder`.
        users: descriptor of its file `users`, which stays locked while it is open.
        mends: whether to empty a folder that was not left intact.

    Raises:
        DistrustError: it was not left intact, another version wrote it, or processes of
            another pid namespace have it open.
        TimeoutError: another process has been checking it for too long.
    """
    for _ in range(3):
        if try_lock_file(users, fcntl.LOCK_EX):  # nobody else has it open
            begin_session(folder, mends=mends)
        with said_if_slow(f"waiting for another process to check {folder}"):
            lock_file(users, fcntl.LOCK_SH, OPENING_PATIENCE_S)  # others may check it
        state = FolderState.read(folder)
        if (state.version, state.boot) == (VERSION, boot_id()):
            require(
                state.pids in (0, pid_namespace()),
                f"another container uses the cache in {folder}, and its process ids"
                " mean something else here; give this container another folder",
            )
            return
        fcntl.flock(users, fcntl.LOCK_UN)  # nobody has finished checking it
    raise DistrustError(
        f"{folder} could not be opened: the processes that checked it ended before they"
        f" were done; start again, or {emptying(folder)}"
    )


def begin_session(folder: Path, *, mends: bool) -> None:
    """As the only user, check the folder; empty it if damaged, with a warning.

    Raises:
        DistrustError: another version wrote it; or it is damaged, and `mends` is False.
    """
    if FolderState.read(folder).version:
        check_ours(folder)
    try:
        check_left(folder)
    except DistrustError as error:
        if not mends:
            raise
        LOGGER.warning("%s; the cache there was emptied and is filled again", error)
        wipe(folder)
    # Writes that were not synced earlier on this boot still are not.
    FolderState.write(
        folder,
        clean=FolderState.read(folder).clean or not (folder / "data.mdb").exists(),
    )


def wipe(folder: Path) -> None:
    """Delete everything stored. Nobody else may have it open."""
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)
    FolderState.write(folder, clean=True)


@contextmanager
def said_if_slow(what: str) -> Iterator[None]:
    """Log a warning that this is still going on, if it takes `SLOW_S` or longer."""
    timer = threading.Timer(SLOW_S, LOGGER.warning, [f"still {what}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def spare_bytes(folder: Path) -> int:
    """Return the bytes of the disk that caches may still take; negative if full."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize - SPARE


def shortage(folder: Path, nbytes: int) -> str:
    """Return a warning if the disk has no room for `nbytes`, or an empty string."""
    spare = spare_bytes(folder)
    if nbytes <= spare:
        return ""
    return (
        f"it stores no more samples: the disk of {folder} has {spare + SPARE} bytes"
        f" free, of which {SPARE} must stay free; free some, or give a folder on"
        " another disk"
    )


def byte_of(name: bytes) -> int:
    """Return the byte of a file that is locked for a name of 8 bytes."""
    return FIRST_BYTE | int.from_bytes(name, "little") >> 4


def room_of(record: bytes | bytearray | memoryview) -> int:
    """Return how many bytes of the database a record takes, roughly."""
    nbytes = len(record) + NODE
    return nbytes if nbytes < PAGE // 2 else -(-nbytes // PAGE) * PAGE


def within(
    batch: Sequence[tuple[bytes, bytes]], room: int
) -> Sequence[tuple[bytes, bytes]]:
    """Return the leading records that fit into `room` bytes.

    Keys come in no order, so pages are split, and small records fill only half of them.
    """
    sizes = (room_of(record) for _, record in batch)
    sums = accumulate(max(nbytes, min(2 * nbytes, PAGE)) for nbytes in sizes)
    return batch[: sum(nbytes <= room for nbytes in sums)]


def stretches(
    records: Sequence[tuple[bytes, bytes]],
) -> Iterator[Sequence[tuple[bytes, bytes]]]:
    """Yield the records in parts, one for each transaction."""
    begin = nbytes = 0
    for end, (_, record) in enumerate(records, 1):
        nbytes += len(record)
        if nbytes >= TRANSACTION_BYTES or end == len(records):
            yield records[begin:end]
            begin, nbytes = end, 0


def victims(
    held: Mapping[bytes, tuple[float, int]], now_s: float, wanted: int
) -> list[bytes]:
    """Return the namespaces to evict, longest unused first.

    Args:
        held: when each unused namespace was last used, and its bytes.
        now_s: the time on the same clock.
        wanted: bytes to free; no more are evicted than that takes.
    """
    namespaces = []
    for name in sorted(held, key=lambda name: held[name][0]):
        used_s, nbytes = held[name]
        if wanted <= 0 or now_s - used_s <= RESTING_S:
            break
        namespaces.append(name)
        wanted -= nbytes
    return namespaces


def kind_of_place(folder: Path) -> str:
    """Return the type of the file system that `folder` is on, or would be on."""
    path = Path(os.path.realpath(folder))
    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:  # there is no /proc
        return ""
    around = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    around.sort(key=lambda mount: len(mount.mountpoint))  # the last of equal ones shows
    return around[-1].fstype if around else ""


def boot_id() -> str:
    """Return an id that changes each time this machine boots; "" if unknown."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Return the number of this process's pid namespace; 0 if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def stamp(folder: Path) -> str:
    """Return size and modification time of the database; "" if there is none."""
    try:
        status = (folder / "data.mdb").stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"
