"""The tuners of one host: how many share its cores, and which need them most.

While its trainer is in its loop, each tuner keeps one small file in a folder of this
user's own. The file holds its pid, the start of that process, the cores it may run
on, how many it keeps busy, and how long its trainer waits. A tuner that looks counts
the live ones and removes the files of dead ones. There is no lock and no server: files
are replaced as a whole, and unreadable ones are ignored until they are removed as old.

A core that all want is shared by weight. The more a rank's trainer waits, the more it
gets, since a step of all ranks takes as long as the slowest one's. What others leave
idle, anybody may use.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from ..system.resources import Budget, usable_cores

# A tuner that has not looked for this long is not training now.
SUSPENDED_S = 30.0
# How much more a trainer that only waits weighs than one that never does.
HELP = 3.0


@dataclass(frozen=True, slots=True)
class Peer:
    """One tuner, as described by its file."""

    pid: int
    process: int
    """Which process it is, as a hash: pids are reused."""
    cores: frozenset[int]
    wait_share: float
    load: float = 1.0
    """Share of these cores that it keeps busy; 1 until known."""

    @property
    def weight(self) -> float:
        """Weight of its claim to a core."""
        return 1.0 + HELP * self.wait_share

    @property
    def lives(self) -> bool:
        """Whether its process is still the one that wrote the file."""
        with contextlib.suppress(psutil.Error):
            return hash(psutil.Process(self.pid)) == self.process
        return False


class HostPeers:
    """This tuner among those of the host, as a `with`.

    Args:
        place: the folder.
        cores: cores it may run on; None means those of this process.
    """

    def __init__(self, place: Path, cores: frozenset[int] | None = None) -> None:
        # Its hash is of its pid and of when it began, counted from the start of the
        # system: a time of day would be another one once the clock is set.
        process = psutil.Process()
        self._me = Peer(process.pid, hash(process), cores or usable_cores(), 0.0)
        self._file = place / f"{process.pid}-{id(self)}.json"

    def __enter__(self) -> Self:
        self.stay()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def share(self, budget: Budget, wait_share: float, used_cores: float) -> Budget:
        """Publish this tuner's state; return its part of a budget.

        Args:
            budget: what all of them may use.
            wait_share: share of its step that the trainer waits, 0 to 1.
            used_cores: cores that loading keeps busy here.
        """
        self._me = replace(
            self._me, wait_share=wait_share, load=used_cores / budget.cpu_cores
        )
        self.stay()
        others = list(self._others())
        if not others:
            return budget
        parts = [self._part(core, others) for core in self._me.cores]
        cores = sum(parts) / len(parts) * budget.cpu_cores
        return replace(budget, cpu_cores=cores, whole_machine=False)

    def rest(self) -> None:
        """Note that the trainer left its loop: others may use all until it returns."""
        with contextlib.suppress(OSError):
            self._file.unlink()

    def _part(self, core: int, others: list[Peer]) -> float:
        """Return what others leave of a core; each has a claim by its weight."""
        here = [other for other in others if core in other.cores]
        whole = self._me.weight + sum(other.weight for other in here)
        return 1.0 - sum(min(other.load, other.weight / whole) for other in here)

    def _others(self) -> Iterator[Peer]:
        """Yield the live tuners that are not suspended; remove files of dead ones."""
        for path in {*self._file.parent.glob("[0-9]*-[0-9]*.*")} - {self._file}:
            peer = None
            with contextlib.suppress(OSError):  # it has just left
                fresh = time.time() - path.stat().st_mtime < SUSPENDED_S
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(path.read_text())
                    peer = Peer(**{**row, "cores": frozenset(row["cores"])})
                if not (fresh if peer is None else peer.lives):
                    path.unlink()
                elif peer is not None and fresh and path.suffix == ".json":
                    yield peer

    def stay(self) -> None:
        """Note that the trainer is in its loop, as at each look."""
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(asdict(self._me), default=sorted))
            partial.replace(self._file)
        except OSError:  # a full disk, or the folder is gone: nobody sees it
            self.rest()
