"""The processes of a Ray cluster whose files lie in one folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

__all__ = ["ACTOR", "of_ray", "title"]

ACTOR = "ray::Actor"
"""How the titles of our actors' processes start, whatever they are doing."""


def of_ray(folder: Path) -> list[psutil.Process]:
    """Processes that serve a cluster in this folder, its actors included."""
    return [
        process for process in psutil.process_iter() if serves(process, str(folder))
    ]


def serves(process: psutil.Process, folder: str) -> bool:
    """Whether a process is one of them. Workers show nothing but their title."""
    with contextlib.suppress(psutil.Error, FileNotFoundError):
        if title(process).startswith("ray::"):
            return any(file.path.startswith(folder) for file in process.open_files())
        started = f"{folder}/session_" in " ".join(process.cmdline())
        return started and process.status() != psutil.STATUS_ZOMBIE
    return False


def title(process: psutil.Process) -> str:
    """The first word of its command; empty once it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[:1])
    return ""
