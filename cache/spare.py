"""What is left free on a disk, whatever a cache may take of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["SPARE", "shortage", "spare_bytes"]

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
