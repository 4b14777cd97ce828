"""Is one changed import ever slower than torch, on data as people have it?

    python benchmarks/ordinary.py --quick                     # half an hour
    python benchmarks/ordinary.py [--only NAME,...] [--workers 0,2] [--resume FILE]

There are thirty workloads (ordinary_workloads.py), each with 0, 1, 2 and 4 workers.
torch's DataLoader, penstock's with autotune on, and `Pipeline.from_dataset` run in
separate processes, which are new for every row. Penstock's train for 10 s first
(--quick: 4 s), and report what holds training up. Then windows of all of them take
turns, while the others are stopped. To the tuner, such a stop looks like a trainer that
is away, as during an evaluation; --freeze turns the tuner off after the first seconds,
to show what that costs.

A row has medians, the ratio to torch with the same number of workers and its 95 %
interval (bootstrap of windows that ran side by side), the same ratio per busy core, the
ratio to torch's best over all measured numbers of workers, and whether the verdict is
right. It fails if the whole interval is below 0.95.

Each row is appended to a file as soon as it is measured. `--resume FILE` skips the rows
that are in it; `--again failing` repeats those that failed. If a row was measured
twice, the newer one counts. `--check` compares the first batches with torch's, and
measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from ordinary_workloads import WORKLOADS, Workload
from subject import Ended, Subject
from torch.utils.data import IterableDataset
from versus import cpu_s

FACES = ("loader", "pipeline")
WORKERS = (0, 1, 2, 4)
FAILS = 0.95
DRAWS = 2000
"""Draws of the bootstrap."""
CHECKED = 24
"""Batches."""
LOST = {"not input-bound": (-0.05, 0.06), "balanced": (0.02, 0.15)}
"""Share of a slow trainer's time that loading takes, for each verdict that is right. A
sleep takes up to 1 % longer than asked for."""
LIMIT_S = 90.0
"""Seconds for one answer of a process."""
TAIL = 400
"""Characters kept of the output of a process that failed."""

Key = tuple[str, int, str]
"""Workload, workers, face."""


@dataclass(frozen=True)
class Pace:
    """How long each part takes, in seconds."""

    warm_s: float = 10.0
    torch_warm_s: float = 3.0
    window_s: float = 1.0
    settle_s: float = 0.5
    """Time before each window."""
    windows: int = 7


QUICK = Pace(warm_s=4.0, torch_warm_s=1.0, window_s=0.25, settle_s=0.05, windows=5)


@dataclass(frozen=True)
class Row:
    """One face on one workload, compared with torch with as many workers."""

    workload: str
    workers: int
    face: str
    torch: list[float] = field(default_factory=list)
    """Samples per second, by window."""
    ours: list[float] = field(default_factory=list)
    cores: tuple[float, float] = (0.0, 0.0)
    """Cores kept busy by torch and by us: medians."""
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    verdict: str = ""
    bottleneck: str | None = None
    cause: str = ""
    right: bool = False
    stages: list[Any] = field(default_factory=list)
    """Name, workers and executor after the first seconds."""
    left_out: str = ""
    """Why it was not measured."""
    error: str = ""

    @property
    def key(self) -> Key:
        return self.workload, self.workers, self.face

    @property
    def per_core(self) -> float:
        """The ratio of samples per busy core, which matters on a shared machine."""
        theirs, ours = self.cores
        return self.ratio * theirs / ours if ours else 0.0

    @property
    def fails(self) -> bool:
        return bool(self.error) or (not self.left_out and self.high < FAILS)


# In the process of one subject


def loader_of(
    face: str, work: Workload, workers: int, data: Any, *, shuffle: bool = False
) -> Any:
    """Return the loader: torch's, or one of ours with autotune on."""
    if face != "torch":
        import penstock as ps

        ps.set_enable_autotune(True)
    if face == "pipeline":
        alone = isinstance(data, IterableDataset)  # it has the order of one reader
        readers = None if alone else workers or None
        pipe = ps.Pipeline.from_dataset(data, num_parallel_workers=readers)
        pipe = pipe.shuffle(seed=0) if shuffle else pipe
        return pipe.batch(work.batch, collate_fn=work.collate)
    kind = torch.utils.data.DataLoader if face == "torch" else ps.DataLoader
    return kind(
        data,
        work.batch,
        shuffle=shuffle,
        collate_fn=work.collate,
        persistent_workers=workers > 0,
        **({"num_workers": workers} if workers else {}),  # an explicit 0 stays 0
    )


def endless(loader: Any) -> Iterator[Any]:
    """Yield batches of one epoch after another."""
    while True:
        yield from loader


def touch(batch: Any) -> None:
    """Read one number or one sample of a batch."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    if isinstance(batch, torch.Tensor):
        batch.view(-1)[0].item()


class Trainer:
    """Trains on one loader, and answers questions about it."""

    def __init__(self, loader: Any, work: Workload) -> None:
        self._loader, self._work = loader, work
        self._batches = endless(loader)

    def train(self, seconds: float) -> int:
        """Return how many batches it took, at least one."""
        end_s, count, step_s = time.perf_counter() + seconds, 0, self._work.step_s
        while not count or time.perf_counter() < end_s:
            touch(next(self._batches))
            count += 1
            if step_s:
                time.sleep(step_s)
        return count

    def window(self, settle_s: float, seconds: float) -> tuple[float, float]:
        """Return the samples per second, and the cores kept busy."""
        self.train(settle_s)
        start_s, cpu = time.perf_counter(), cpu_s()
        count = self.train(seconds)
        spent_s = time.perf_counter() - start_s
        return count * self._work.batch / spent_s, (cpu_s() - cpu) / spent_s

    def explain(self) -> dict[str, Any]:
        """Return what the loader's `explain()` says."""
        try:
            explanation = self._loader.explain()
        except Exception as error:  # noqa: BLE001 - the row says so
            return {"verdict": "none", "cause": f"{type(error).__name__}: {error}"}
        return {
            "verdict": explanation.verdict if explanation.trainer.steps else "none",
            "bottleneck": explanation.bottleneck,
            "cause": explanation.cause,
            "stages": [
                (stage.name, stage.num_parallel_workers, stage.executor)
                for stage in explanation.stages
            ],
        }

    def freeze(self) -> None:
        """Turn the tuner off, and keep the settings it found."""
        import penstock as ps

        ps.set_enable_autotune(False)


def described(batch: Any) -> str:
    """Return a text that is equal for equal data."""
    match batch:
        case torch.Tensor():
            digest = zlib.crc32(batch.numpy().tobytes())
            return f"{batch.dtype}{tuple(batch.shape)}{digest}"
        case dict():
            inner = [f"{key}:{described(value)}" for key, value in batch.items()]
            return f"{{{','.join(inner)}}}"
        case list() | tuple():
            kind = "list" if isinstance(batch, list) else "tuple"
            return f"{kind}({','.join(map(described, batch))})"
    return repr(batch)


def be(face: str, name: str, workers: int, folder: Path) -> None:
    """Answer each line, a method of the trainer and its numbers, with one of JSON."""
    work = WORKLOADS[name]
    data = work.make(folder)
    loader = loader_of(face, work, workers, data, shuffle=work.shuffle)
    trainer = Trainer(loader, work)
    for line in sys.stdin:
        method, *numbers = line.split()
        answer = getattr(trainer, method)(*map(float, numbers))
        print(json.dumps(answer), flush=True)
    os._exit(0)  # the interpreter's own shutdown takes longer than a window


# In the process that asks


class Bench:
    """Measures rows, with data in a folder of its own."""

    def __init__(self, folder: Path, pace: Pace, *, freeze: bool) -> None:
        self._folder, self._pace, self._freeze = folder, pace, freeze

    def measure(self, name: str, workers: int, faces: list[str]) -> list[Row]:
        """Return one row for each face."""
        if why := WORKLOADS[name].left_out:
            return [Row(name, workers, face, left_out=why) for face in faces]
        with contextlib.ExitStack() as stack:
            torchs, *ours = self._started(stack, name, workers, ["torch", *faces])
            explanations = [self._warmed(subject) for subject in ours]
            error = torchs.attempt(f"train {self._pace.torch_warm_s}")[1]
            turns = [torchs, *(s for s in ours if not s.error)]
            for number in range(0 if error else self._pace.windows):
                for subject in turns if number % 2 else reversed(turns):
                    subject.window(self._pace)
        pairs = zip(faces, ours, explanations, strict=True)
        return [
            row_of(Row(name, workers, face), torchs, subject, explanation)
            for face, subject, explanation in pairs
        ]

    def _started(
        self,
        stack: contextlib.ExitStack,
        name: str,
        workers: int,
        faces: list[str],
    ) -> list[Measured]:
        folder = self.written(name)
        subjects = []
        for face in faces:
            file = tempfile.TemporaryFile("w+")  # noqa: SIM115 the stack closes it
            noise = stack.enter_context(file)
            arguments = [__file__, "--subject", face, "--only", name]
            arguments += ["--workers", str(workers), "--folder", str(folder)]
            subject = Subject(*arguments, limit_s=LIMIT_S, stderr=noise)
            subjects.append(Measured(stack.enter_context(subject), noise))
        return subjects

    def _warmed(self, subject: Measured) -> dict[str, Any]:
        """Train for the first seconds; return the verdict."""
        subject.attempt(f"train {self._pace.warm_s}")
        explanation = subject.attempt("explain")[0] or {}
        if self._freeze:
            subject.attempt("freeze")
        return explanation

    def written(self, name: str) -> Path:
        """Return the folder of a workload's files, made if need be."""
        folder, write = self._folder / name, WORKLOADS[name].write
        if not folder.exists():
            folder.mkdir()
            if write is not None:
                write(folder)
        return folder


class Measured:
    """A subject, its windows and how it failed."""

    def __init__(self, subject: Subject, noise: IO[str]) -> None:
        self._subject, self._noise = subject, noise
        self.rates: list[float] = []
        self.cores: list[float] = []
        self.error = ""

    def attempt(self, question: str) -> tuple[Any, str]:
        """Return the answer and an empty text, or None and the reason."""
        if self.error:
            return None, self.error
        try:
            return self._subject.ask(question), ""
        except Ended as error:
            self._noise.seek(0)
            self.error = f"{error}: {self._noise.read()[-TAIL:]}"
            return None, self.error

    def window(self, pace: Pace) -> None:
        """Measure one more window."""
        answer, error = self.attempt(f"window {pace.settle_s} {pace.window_s}")
        if not error:
            self.rates.append(answer[0])
            self.cores.append(answer[1])


def row_of(
    row: Row, torchs: Measured, ours: Measured, explanation: dict[str, Any]
) -> Row:
    """Return the row with everything that was measured."""
    error = ours.error or (torchs.error and f"torch: {torchs.error}")
    fields: dict[str, Any] = asdict(row) | explanation
    fields |= {"torch": torchs.rates, "ours": ours.rates, "error": error}
    if not error:
        fields["ratio"], fields["low"], fields["high"] = compared(
            ours.rates, torchs.rates
        )
        middle = map(statistics.median, (torchs.cores, ours.cores))
        fields["cores"] = tuple(round(value, 2) for value in middle)
        rate = statistics.median(ours.rates)
        fields["right"] = is_right(WORKLOADS[row.workload], explanation, rate)
    return Row(**fields)


def compared(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the ratio of medians, and its 95 % interval: pairs are drawn together."""
    pairs = np.array([ours, theirs])
    draws = np.random.default_rng(0).integers(len(ours), size=(DRAWS, len(ours)))
    first, second = np.median(pairs[:, draws], axis=-1)
    low, high = np.quantile(first / second, (0.025, 0.975))
    return float(np.divide(*np.median(pairs, axis=-1))), float(low), float(high)


def is_right(work: Workload, explanation: dict[str, Any], rate: float) -> bool:
    """Whether verdict, stage and cause are those that the workload declares.

    A slow trainer may still lose a little to loading, as its rate shows.
    """
    if "trainer" in work.slow:
        lost_share = 1.0 - rate * work.step_s / work.batch
        low, high = LOST.get(explanation["verdict"], (1.0, 0.0))
        return low <= lost_share <= high
    name = explanation.get("bottleneck")
    if explanation["verdict"] != "input-bound" or name is None:
        return False
    stage = "collate" if re.search("collate|batch", name, re.IGNORECASE) else "read"
    return stage in work.slow and explanation["cause"].startswith(work.causes)


# The file, and the table of it


def read_rows(path: Path) -> dict[Key, Row]:
    """Return the newest row of each key."""
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.key: row for row in rows}


def show(rows: dict[Key, Row]) -> None:
    """Print the table, the worst first."""
    best: dict[str, float] = {}
    measured_rows = [row for row in rows.values() if not row.error and not row.left_out]
    for row in measured_rows:
        rate = statistics.median(row.torch)
        best[row.workload] = max(best.get(row.workload, 0.0), rate)
    print(
        "\nworkload          workers face        torch/s    ours/s  ratio (95 %)"
        "        a core  of best  cores    workers, verdict"
    )
    for row in sorted(rows.values(), key=lambda row: row.high):
        print(line_of(row, best.get(row.workload, 1.0)))
    failing = sum(row.fails for row in rows.values())
    right = sum(row.right for row in measured_rows)
    print(f"\n{failing} of {len(rows)} rows fail; the verdict is right on {right}.")
    for face in FACES:
        shares = [
            statistics.median(row.ours) / best[row.workload]
            for row in measured_rows
            if row.face == face
        ]
        if shares:
            print(f"{face}: {statistics.median(shares):.2f} of torch's best (median)")


def line_of(row: Row, best: float) -> str:
    """Return one line of the table."""
    mark = "!" if row.fails else " "
    head = f"{mark}{row.workload:<18} {row.workers:>5}  {row.face:<8}"
    if row.left_out or row.error:
        return f"{head}  {row.left_out or row.error}".replace("\n", " ")
    theirs, ours = statistics.median(row.torch), statistics.median(row.ours)
    stages = ", ".join(f"{workers} {kind}" for _, workers, kind in row.stages)
    verdict = "right" if row.right else f"WRONG: {row.bottleneck}; {row.cause[:60]}"
    return (
        f"{head} {theirs:>10,.0f} {ours:>10,.0f}"
        f"  {row.ratio:5.2f} ({row.low:5.2f} to {row.high:5.2f})"
        f"  {row.per_core:6.2f}   {ours / best:6.2f}"
        f"  {row.cores[0]:.1f} {row.cores[1]:.1f}"
        f"  [{stages}] {verdict}"
    )


def run(options: argparse.Namespace, bench: Bench) -> None:
    """Measure the requested rows that are not in the file yet."""
    path = options.resume or Path(tempfile.mkstemp(".jsonl", "ordinary-")[1])
    there = read_rows(path)
    print(f"rows are added to {path}", flush=True)
    done_keys = {key for key, row in there.items() if not row.left_out}
    if options.again:
        done_keys = {key for key, row in there.items() if not row.fails}
    for name in options.only:
        for workers in options.workers:
            faces = [f for f in options.faces if (name, workers, f) not in done_keys]
            if options.again:
                faces = [f for f in faces if (name, workers, f) in there]
            for row in bench.measure(name, workers, faces) if faces else []:
                with path.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                print(line_of(row, max(row.torch, default=1.0)), flush=True)
    show(read_rows(path))


def check(options: argparse.Namespace, bench: Bench) -> None:
    """Compare the first batches of all workloads with torch's, here and in order."""
    for name in options.only:
        work = WORKLOADS[name]
        if work.left_out:
            print(name, "left out:", work.left_out)
            continue
        for workers, face in itertools.product(options.workers, options.faces):
            try:
                same = is_same(face, work, workers, bench.written(name))
                print(name, workers, face, "same" if same else "DIFFERS", flush=True)
            except Exception as error:  # noqa: BLE001 - the others are compared, too
                print(name, workers, face, repr(error), flush=True)


def is_same(face: str, work: Workload, workers: int, folder: Path) -> bool:
    """Whether a face yields what torch does."""
    data = work.make(folder)
    # A pipeline reads an iterable in the order of one reader.
    alone = face == "pipeline" and isinstance(data, IterableDataset)
    theirs = first(loader_of("torch", work, 0 if alone else workers, data))
    return first(loader_of(face, work, workers, work.make(folder))) == theirs


def first(loader: Any) -> list[str]:
    """Return the first batches, and end the loop."""
    return [described(batch) for batch in itertools.islice(loader, CHECKED)]


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def names(text: str) -> list[str]:
    if unknown := set(parts := text.split(",")) - WORKLOADS.keys() - set(FACES):
        raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}")
    return parts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", type=names, default=list(WORKLOADS))
    parser.add_argument("--workers", type=numbers, default=list(WORKERS))
    parser.add_argument("--faces", type=names, default=list(FACES))
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--again", choices=["failing"])
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--subject", help="be one of those measured")
    parser.add_argument("--folder", type=Path, help="of the subject's files")
    options = parser.parse_args()
    if options.subject:
        (name,), (workers,) = options.only, options.workers
        be(options.subject, name, workers, options.folder)
        return
    # If it is ended from outside, it ends the processes that it stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        pace = QUICK if options.quick else Pace()
        bench = Bench(Path(folder), pace, freeze=options.freeze)
        (check if options.check else run)(options, bench)


if __name__ == "__main__":
    main()
