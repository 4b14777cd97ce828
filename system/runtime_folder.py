"""A folder in which this user's processes on a host find one another."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def runtime_folder() -> Path | None:
    """Return a folder of this user's own, made if need be; None: there is none.

    It belongs to this very user, is no link, and nobody else may look into it. Where
    `XDG_RUNTIME_DIR` names a folder that is missing or may not be used (SLURM, su and
    `docker -e` pass it on), the folder for temporary files takes its place: every
    process with the same environment finds the same one.
    """
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.access(root, os.W_OK | os.X_OK):
        root = tempfile.gettempdir()
    place = Path(root, f"penstock-{os.getuid()}")
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return place if ours and not status.st_mode & 0o077 else None
