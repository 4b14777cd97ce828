"""Whether a folder may serve as a cache: whose it is, where, how it was left."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

__all__ = ["DistrustError", "boot_id", "check_folder", "check_pages", "kind_of_place"]

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
