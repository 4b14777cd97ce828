"""The modules that a sample, a decision and a cache hit cross, counted while they run.

    python tests/journeys.py    # prints them; tests/test_journeys.py has their limits

Real pipelines run under Python's profiler hook, and each call of a function of ours
notes its module. What is counted is one journey after the start: what runs in each of
several stretches of steps, so that what runs only now and then is left out.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from pathlib import Path
from types import FrameType
from typing import Any

import penstock as ps

Journeys = dict[str, frozenset[str]]
"""The modules of each journey, by its name."""

LOOK = "penstock.autotune.tuner", "step"
SET = "penstock.engine.observe.observation", "set"
ASKED = "penstock.engine.program.operations", "_now"
"""Where a decision begins and ends, and where a cache is asked: module and function."""
STRETCHES, STEPS = 4, 24
WARM_STEPS = 100
PATIENCE_S = 60.0
"""How long to wait for a decision."""


def module_of(frame: FrameType) -> str:
    """Return the module of ours that a frame runs, also code that a dataclass wrote."""
    name = frame.f_globals.get("__name__", "")
    return name if name.partition(".")[0] == "penstock" else ""


@contextmanager
def followed(hook: Any) -> Iterator[None]:
    """Have the hook called in this thread and in those that begin meanwhile.

    Children that are forked meanwhile inherit it.
    """
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation says


class Stretches:
    """Notes which modules run in each process, in a file for each stretch of steps.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stretch = mmap.mmap(-1, 1)  # shared with the children; 0: not now
        self._noted: set[tuple[int, int, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call: a hook for `followed`."""
        at = self._stretch[0]
        if not at or event != "call" or not (module := module_of(frame)):
            return
        noted = (at, os.getpid(), module)
        if noted not in self._noted:
            self._noted.add(noted)
            with open(self._folder / f"{at}-{os.getpid()}", "a") as file:
                file.write(f"{module}\n")

    def of(self, batches: Iterator[Any]) -> dict[int, frozenset[str]]:
        """Return the modules that run in each process in all stretches of a loop."""
        for _ in islice(batches, WARM_STEPS):
            pass
        for at in range(STRETCHES):
            self._stretch[0] = at + 1
            for _ in islice(batches, STEPS):
                pass
        self._stretch[0] = 0
        files = [path.name.split("-") for path in self._folder.iterdir()]
        return {pid: self._in_all(pid) for pid in {int(pid) for _, pid in files}}

    def _in_all(self, pid: int) -> frozenset[str]:
        files = (self._folder / f"{at + 1}-{pid}" for at in range(STRETCHES))
        return frozenset.intersection(
            *(frozenset(path.read_text().split()) for path in files if path.exists())
        )


class Slow:
    """Numbers that take so long that all wait for them.

    Args:
        seconds: how long each takes.
    """

    def __init__(self, seconds: float = 0.0005) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> float:
        time.sleep(self._seconds)
        return float(index)


def halved(number: float) -> float:
    """Return half of a number, in the stage after the read."""
    return number / 2


def looped(pipe: ps.Pipeline) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    return chain.from_iterable(repeat(pipe))


def of_samples(executor: Any) -> dict[int, frozenset[str]]:
    """Return what runs in each process while two workers of a kind make samples."""
    source = ps.Pipeline.from_dataset(Slow(), num_parallel_workers=2, executor=executor)
    pipe = source.map(halved, num_parallel_workers=2, executor=executor).batch(8)
    with tempfile.TemporaryDirectory() as folder:
        hook = Stretches(Path(folder))
        with followed(hook), pipe:
            return hook.of(looped(pipe))


class Decisions:
    """Notes which modules run between a look of the tuner and a knob that it sets."""

    def __init__(self) -> None:
        self.found: list[frozenset[str]] = []
        self._since: dict[int, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call: a hook for `followed`."""
        module, function = module_of(frame), frame.f_code.co_name
        thread = threading.get_ident()
        if event == "call" and (module, function) == LOOK:
            self._since[thread] = set()
        noted = self._since.get(thread)
        if noted is None or not module:
            return
        if event == "call":
            noted.add(module)
        elif event == "return" and (module, function) == SET:
            self.found.append(frozenset(noted))


def of_decision() -> frozenset[str]:
    """Return what runs in the tuner's thread up to its first decision."""
    hook = Decisions()
    pipe = ps.Pipeline.from_dataset(
        Slow(0.02), num_parallel_workers=(1, 64), executor="thread"
    ).batch(8)
    ps.set_cpu_budget(2)  # so that it shares the cores with no other tuner
    ps.set_enable_autotune(True)
    try:
        with followed(hook), pipe:
            due_s = time.monotonic() + PATIENCE_S
            for _ in looped(pipe):
                if hook.found or time.monotonic() > due_s:
                    break
    finally:
        ps.set_enable_autotune(False)
    return hook.found[0]


class Hits:
    """Notes which modules run to find a sample, while it may."""

    def __init__(self) -> None:
        self.on = False
        self.found: set[str] = set()
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call: a hook for `followed`."""
        module = module_of(frame)
        if not self.on or event not in ("call", "return"):
            return
        if (module, frame.f_code.co_name) == ASKED:
            self._depth += 1 if event == "call" else -1
        if event == "call" and self._depth and module:
            self.found.add(module)


def of_hit() -> frozenset[str]:
    """Return what runs in the thread that finds a sample in RAM."""
    hook = Hits()
    data = list(map(float, range(256)))
    source = ps.Pipeline.from_dataset(data, executor="inline")
    pipe = source.map(halved, executor="inline").cache(ram="16MB").batch(8)
    with followed(hook), pipe:
        batches = looped(pipe)
        for _ in islice(batches, 64):  # two epochs: all is there, and was looked at
            pass
        hook.on = True
        for _ in islice(batches, 16):
            pass
        hook.on = False
    return frozenset(hook.found)


def by_processes() -> Journeys:
    """Return what a sample by processes crosses here, and in its worker process."""
    by_process = of_samples("process")
    trainer = by_process.pop(os.getpid())
    children = max(by_process.values(), key=len)
    return {"by processes, trainer": trainer, "by processes, worker": children}


def journeys() -> Journeys:
    """Return all journeys."""
    return {
        "by threads": of_samples("thread")[os.getpid()],
        **by_processes(),
        "decision": of_decision(),
        "cache hit": of_hit(),
    }


if __name__ == "__main__":
    for journey, crossed in journeys().items():
        print(f"{journey}: {len(crossed)} modules")
        for module in sorted(crossed):
            print(f"  {module.removeprefix('penstock.')}")
