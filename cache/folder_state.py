"""How a folder was left: one small file beside the database."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from .trust import boot_id

__all__ = ["VERSION", "FolderState"]

VERSION = 1
MOST_BYTES = 4096


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
            state = json.loads((folder / "state.json").read_bytes()[:MOST_BYTES])
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
