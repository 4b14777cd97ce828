"""Tries each peer's settings, then measures the best of each in turn."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from subject import Ended, Subject
from versus import Result, show

from .data import Given
from .environments import PEERS, Unavailable, python_of

__all__ = ["FULL", "QUICK", "Bench", "Pace", "Row", "read_rows", "report"]

LIMIT_S = 120.0
"""Seconds for an answer, in addition to the seconds of loading."""
TAIL = 200
"""Characters kept of the output of a process that failed."""
OTHER = 1.0
"""Mean difference of photographs, of 255, above which the work is not the same."""
OURS = "penstock"


@dataclass(frozen=True)
class Pace:
    """How long each part takes, in seconds."""

    trial_s: float = 1.5
    """Measurement of each setting."""
    warm_s: float = 3.0
    """Time before the rounds."""
    tune_s: float = 12.0
    """The same for candidates that are tuned while they run."""
    settle_s: float = 0.5
    """Time before each window."""
    window_s: float = 2.0
    rounds: int = 5


FULL = Pace()
QUICK = Pace(trial_s=0.5, warm_s=1.0, tune_s=12.0, settle_s=0.2, window_s=0.7)


@dataclass
class Row:
    """The results of one candidate; rates are samples per second."""

    workload: str
    peer: str
    name: str
    setting: dict[str, Any] = field(default_factory=dict)
    tried: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    """Settings and their rates; 0 if one failed."""
    rates: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    memory_mb: float = 0.0
    """Most memory of its processes after a window, shared pages once (PSS)."""
    first_s: float = 0.0
    """Time to the first batch."""
    differs: tuple[float, float] | None = None
    """Mean and largest difference from the first row's batch; None: another shape."""
    decoder: float | None = None
    """Largest difference from Pillow's decoder, if the peer has one of its own."""
    error: str = ""
    """Why it was left out, or failed."""

    @property
    def same(self) -> bool:
        """Whether it does the same work as the first."""
        return self.differs is not None and self.differs[0] <= OTHER

    @property
    def note(self) -> str:
        """How its batches differ."""
        parts = []
        if self.differs is None:
            parts.append("other batches")
        elif any(self.differs):
            mean, most = self.differs
            other = "" if self.same else "OTHER WORK, "
            parts.append(
                f"{other}differs by {mean:.2g} in the mean, {most:.0f} at most"
            )
        if self.decoder is not None:
            parts.append(f"its decoder by {self.decoder:.0f} at most")
        return "; ".join(parts)

    @property
    def title(self) -> str:
        """Its name and setting, in one line."""
        words = [f"{key}={value}" for key, value in self.setting.items()]
        return f"{self.name} ({', '.join(words) or 'defaults'})"


class Process:
    """A peer's process on one workload, as a `with`."""

    def __init__(self, peer: str, python: str, workload: str, folder: str) -> None:
        self._noise = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        above = str(Path(__file__).parents[1])
        paths = [above, *filter(None, [os.environ.get("PYTHONPATH")])]
        if peer != "penstock":
            paths = [above]
        self._subject = Subject(
            *("-P", "-m", "peers.serve", peer, workload, folder),
            python=python,
            limit_s=LIMIT_S,
            stderr=self._noise,
            environment=os.environ
            | PEERS[peer].variables
            | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def __enter__(self) -> Self:
        self._subject.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._subject.__exit__(*error)
        self._noise.close()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Return the answer.

        Raises:
            Ended: there is none, or it is an error.
        """
        try:
            answer: dict[str, Any] = self._subject.ask(json.dumps({"do": do, **more}))
        except Ended as error:
            self._noise.seek(0)
            raise Ended(f"{error}: {self._noise.read()[-TAIL:]}") from None
        if "error" in answer:
            raise Ended(answer["error"])
        return answer

    def rate(self, settle_s: float, seconds: float) -> tuple[float, float]:
        """Return the samples per second, and the cores kept busy."""
        reply = self.ask("window", settle_s=settle_s, seconds=seconds)
        return reply["samples"] / reply["seconds"], reply["cpu_s"] / reply["seconds"]

    def memory_mb(self) -> float:
        """Return the memory of its processes."""
        return self._subject.pss_mb()


class Bench:
    """Measures workloads.

    Args:
        given: the data that all peers load.
        envs: the folder of environments.
        peers: names of the peers.
        pace: how long each part takes.
    """

    def __init__(self, given: Given, envs: Path, peers: list[str], pace: Pace) -> None:
        self._given, self._envs, self._peers, self._pace = given, envs, peers, pace

    def measure(self, workload: str) -> list[Row]:
        """Return the rows of one workload."""
        rows = [row for peer in self._peers for row in self._chosen(peer, workload)]
        with contextlib.ExitStack() as stack:
            running = [
                (row, stack.enter_context(self._started(row.peer, workload)))
                for row in rows
                if not row.error
            ]
            for row, process in running:
                say(f"{workload}: {row.title} warms up")
                attempt(row, self._begin, process)
            for number in range(self._pace.rounds):
                say(f"{workload}: round {number + 1} of {self._pace.rounds}")
                for row, process in running:
                    attempt(row, self._window, process)
        self._compare(rows)
        return rows

    def _chosen(self, peer: str, workload: str) -> Iterator[Row]:
        """Yield each row of a peer, with its best setting."""
        with contextlib.ExitStack() as stack:
            try:
                process = stack.enter_context(self._started(peer, workload))
                answer = process.ask("settings")
            except (Unavailable, Ended) as error:
                answer = {"left_out": str(error)}
            if "left_out" in answer:
                yield Row(workload, peer, peer, error=answer["left_out"])
                return
            for name, settings in answer["rows"].items():
                row = Row(workload, peer, name, settings[0])
                if len(settings) > 1:
                    process = self._try(row, settings, process, stack)
                yield row

    def _try(
        self,
        row: Row,
        settings: list[dict[str, Any]],
        process: Process,
        stack: contextlib.ExitStack,
    ) -> Process:
        """Choose the best setting by measuring each briefly; return a running process.

        A process that failed may be unusable, so another one follows it.
        """
        pace = self._pace
        for setting in settings:
            tunes_s = pace.tune_s / 2 if setting.get("autotune") else 0.0
            try:
                process.ask("open", setting=setting)
                rate = process.rate(pace.settle_s + tunes_s, pace.trial_s)[0]
            except Ended as error:
                rate, row.error = 0.0, str(error)
                replacement = self._started(row.peer, row.workload)
                process = stack.enter_context(replacement)
            row.tried.append((setting, rate))
            say(f"{row.workload}: {row.name}, tried {setting}: {rate:,.0f}/s")
        row.setting, best = max(row.tried, key=lambda pair: pair[1])
        row.error = "" if best else row.error
        return process

    def _begin(self, row: Row, process: Process) -> None:
        tunes = row.setting.get("autotune")
        path = self._kept(row)
        answer = process.ask("open", setting=row.setting, keep=path)
        row.first_s = answer["first_s"]
        process.rate(self._pace.tune_s if tunes else self._pace.warm_s, 0.0)
        row.memory_mb = process.memory_mb()
        if row.workload == "photographs":
            row.decoder = process.ask("decoder")["differs"]

    def _window(self, row: Row, process: Process) -> None:
        rate, cores = process.rate(self._pace.settle_s, self._pace.window_s)
        row.rates.append(rate)
        row.cores.append(cores)
        row.memory_mb = max(row.memory_mb, process.memory_mb())

    def _compare(self, rows: list[Row]) -> None:
        """Compare first batches with those of the first row."""
        valid_rows = [row for row in rows if not row.error]
        if not valid_rows:
            return
        first = np.load(self._kept(valid_rows[0])).astype(np.float64)
        for row in valid_rows:
            row.differs = difference(np.load(self._kept(row)), first)

    def _kept(self, row: Row) -> str:
        name = "".join(filter(str.isalnum, row.name))
        return str(Path(self._given.folder) / f"{row.workload}-{name}.npy")

    def _started(self, peer: str, workload: str) -> Process:
        python = python_of(peer, self._envs)
        return Process(peer, python, workload, self._given.folder)


def difference(batch: np.ndarray, first: np.ndarray) -> tuple[float, float] | None:
    """Return mean and largest difference of two arrays; None: of unlike shapes."""
    if batch.shape != first.shape:
        return None
    apart = np.abs(batch.astype(np.float64) - first)
    return float(apart.mean()), float(apart.max())


def attempt(row: Row, measure: Callable[[Row, Process], None], by: Process) -> None:
    """Do what is left to do for a row that has not failed, and note if it does."""
    if row.error:
        return
    try:
        measure(row, by)
    except Ended as error:
        row.error = str(error)


def say(text: str) -> None:
    """Print the progress."""
    print(text, file=sys.stderr, flush=True)


# The file, and the tables of it


def read_rows(path: Path) -> dict[str, list[Row]]:
    """Return the rows of each workload in a file; the last measured count."""
    rows: dict[str, list[Row]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            workload_rows = [Row(**fields) for fields in json.loads(line)]
            rows[workload_rows[0].workload] = workload_rows
    return rows


def add_rows(path: Path, rows: list[Row]) -> None:
    """Keep a workload's rows as one line."""
    with path.open("a") as file:
        file.write(json.dumps([asdict(row) for row in rows]) + "\n")


def report(rows: list[Row], title: str) -> None:
    """Print the table of one workload."""
    measured_rows = [row for row in rows if row.rates and not row.error]
    results = [
        Result(
            row.title,
            tuple(row.rates),
            statistics.median(row.cores),
            memory_mb=row.memory_mb,
            note=row.note,
        )
        for row in measured_rows
    ]
    peers = [row.title for row in measured_rows if row.same and row.peer != OURS]
    if measured_rows:
        by_rate = sorted(results, key=lambda result: -result.rate)
        show(title, by_rate, peers or [row.title for row in measured_rows])
    for row in rows:
        if row.error:
            print(f"  {row.name}: not measured: {' '.join(row.error.split())}")
