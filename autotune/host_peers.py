"""The tuners of one host: how many share its cores, and who needs them most.

While its trainer is in its loop, each tuner keeps one small file in a folder of this
user's own. It tells its pid, when that process began, the cores it may run on, how many
it keeps busy and how long its trainer waits. Whoever looks counts those that live and
removes the files of those that do not. There is no lock and no server: a file is
replaced whole, and one that cannot be read is nobody's.

A core that all want is shared by weight: the more a rank's trainer waits, the more it
gets, since a step of all ranks takes as long as that of the slowest. What others leave
idle of theirs, anybody may have.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from ..system.resources import Budget

# Tells the tuners of one process apart.
_numbers = itertools.count()

SUSPENDED_S = 30.0
"""Who has not looked for so long does not train now: validation between two epochs."""
HELP = 3.0
"""So much more weighs a trainer that only waits than one that never does."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One tuner, as its file tells."""

    pid: int
    began_s: float
    """When its process did: pids are used again."""
    cores: frozenset[int]
    wait_share: float
    load: float = 1.0
    """Share of these cores that it keeps busy; all of them until that is known."""

    @property
    def weight(self) -> float:
        """Of its claim to a core."""
        return 1.0 + HELP * min(1.0, max(0.0, self.wait_share))

    @property
    def lives(self) -> bool:
        """Whether its process is still the one that wrote it."""
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).create_time() == self.began_s)
        return False


class HostPeers:
    """This tuner among those of the host, as a `with`.

    Args:
        place: the folder; None: it is alone.
        cores: it may run on; None: those of this process.
    """

    def __init__(self, place: Path | None, cores: frozenset[int] | None = None) -> None:
        began_s = psutil.Process().create_time()
        if cores is None:
            there = hasattr(os, "sched_getaffinity")
            cores = frozenset(
                os.sched_getaffinity(0) if there else range(os.cpu_count() or 1)
            )
        self._me = Peer(os.getpid(), began_s, cores, 0.0)
        self._file = place and place / f"{os.getpid()}-{next(_numbers)}.json"
        self._there = False

    def __enter__(self) -> Self:
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(self, budget: Budget, wait_share: float, used_cores: float) -> Budget:
        """Tell how things stand here; return this tuner's part of a budget.

        Args:
            budget: what all of them may use.
            wait_share: how long the trainer waits of its step, 0 to 1.
            used_cores: that loading keeps busy here.
        """
        load = used_cores / budget.cpu_cores
        self._me = replace(self._me, wait_share=wait_share, load=load)
        self._write()
        others = list(self._others())
        if not others:
            return budget
        parts = [self._part(core, others) for core in self._me.cores]
        share = sum(parts) / len(parts)
        return replace(budget, cpu_cores=share * budget.cpu_cores, whole_machine=False)

    def rest(self) -> None:
        """The trainer is out of its loop: until it is back, others may have all."""
        if self._file is not None and self._there:
            self._there = False
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave. Idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
            self._file = None

    def _part(self, core: int, others: list[Peer]) -> float:
        """What is left of a core by others, each of whom has a claim by its weight."""
        here = [other for other in others if core in other.cores]
        whole = self._me.weight + sum(other.weight for other in here)
        return 1.0 - sum(min(other.load, other.weight / whole) for other in here)

    def _others(self) -> Iterator[Peer]:
        """Those that live and are not suspended; the files of the dead are removed."""
        if self._file is None:
            return
        for path in self._file.parent.glob("*.json"):
            entry = None if path == self._file else _read(path)
            if entry is None:
                continue
            if not entry.lives:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            elif _age_s(path) < SUSPENDED_S:
                yield entry

    def _write(self) -> None:
        if self._file is None:
            return
        me = self._me
        row = {
            "pid": me.pid,
            "began_s": me.began_s,
            "cores": sorted(me.cores),
            "wait_share": me.wait_share,
            "load": me.load,
        }
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(row))
            partial.replace(self._file)
            self._there = True
        except OSError:  # a full disk, or the folder is gone: it is alone from here
            self.close()

    def __repr__(self) -> str:
        return f"<HostPeers {self._file or 'alone'}>"


def _age_s(path: Path) -> float:
    """Seconds since a file was written."""
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return float("inf")


def _read(path: Path) -> Peer | None:
    """Return what a file tells; None where it tells nothing that can be understood."""
    try:
        row = json.loads(path.read_text())
        cores = frozenset(map(int, row["cores"]))
        pid, began_s = int(row["pid"]), float(row["began_s"])
        wait_share, load = float(row["wait_share"]), float(row["load"])
        return Peer(pid, began_s, cores, wait_share, load)
    except (OSError, ValueError, KeyError, TypeError):
        return None
