"""A folder in which the processes of one user on a host find each other."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def runtime_folder() -> Path | None:
    """Return a folder that belongs to this user, creating it if needed.

    The folder is owned by this very user, is not a link, and nobody else may look into
    it. If `XDG_RUNTIME_DIR` names a folder that is missing or not usable (SLURM, su and
    `docker -e` pass it on), the folder for temporary files is used instead. Processes
    with the same environment therefore find the same folder.

    Returns:
        None if no such folder can be used.
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
