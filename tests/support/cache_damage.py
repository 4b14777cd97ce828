"""Caches whose files are damaged, or cannot be written.

This runs as a script, in a process of its own, so that a crash is noticed.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.cache.disk import Disk
from penstock.cache.folder import FOLDER
from support.cache_faults import (
    FEW,
    cache_in,
    found_in,
    key,
    record,
    right,
    value_at,
)
from support.tiers import ask


class Told(logging.Handler):
    """Collects warnings; forked processes print theirs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._pid = os.getpid()

    def emit(self, line: logging.LogRecord) -> None:
        """Keep one."""
        if os.getpid() == self._pid:
            self.lines.append(line.getMessage())
        else:
            print(line.getMessage(), file=sys.stderr, flush=True)


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Collect the warnings of caches within."""
    logger, handler = logging.getLogger("penstock"), Told()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.lines
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def small(folder: Path, samples: int) -> None:
    """Fill a cache with a few records, some of them twice, and close it."""
    for index in range(samples):
        disk = Disk(folder / FOLDER)
        disk.put([record(index)], "values")
        disk.close()
    disk = Disk(folder / FOLDER)
    disk.forget(key(0))
    disk.put([record(0)], "values")
    disk.sync()
    disk.close()


def used(folder: Path, samples: int) -> int:
    """Use a cache as two runs would; return how many samples it held at first."""
    cache = cache_in(folder)
    first = found_in(cache, samples)
    for index in range(samples + 2):
        right(ask(cache, index, None, value_at(index)), index)
    cache.close()
    again = cache_in(folder)
    found_in(again, samples)
    again.close()
    return len(first)


def damage(
    data: bytes, dice: random.Random, step: int, first: int
) -> Iterator[tuple[str, bytes]]:
    """Yield damaged copies of a file: bits flipped, cut short, or replaced.

    One bit is flipped of byte `first` and of each `step` bytes further. Those with four
    different `first` make all cuts together.
    """
    for other in (b"", b"{}", b"[1]", b"null", b"[" * 4000, dice.randbytes(5000)):
        yield f"{other[:6]!r}", other
    for at in range(first, len(data), step):
        bit = dice.randrange(8)
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        yield f"bit {bit} of byte {at}", bytes(changed)
    pages = range(0, len(data), 4096)
    cuts = {*pages, *(at + 1 for at in pages), *(at + 2000 for at in pages)}
    for length in sorted(cut for cut in cuts if cut < len(data))[first % 4 :: 4]:
        yield f"cut to {length}", data[:length]


def harm(place: Path, name: str, step: int, first: int) -> None:
    """Open a cache again and again, each time with one file of it damaged."""
    samples = 4
    dice = random.Random(first)
    pristine, folder = place / "pristine", place / "harmed"
    small(pristine, samples)
    path = pristine / FOLDER / name
    data = path.read_bytes() if path.exists() else b""
    whole = count = 0
    with quiet():
        for what, damaged in damage(data, dice, step, first):
            shutil.copytree(pristine, folder)
            (folder / FOLDER / name).write_bytes(damaged)
            print(f"{name}: {what}", file=sys.stderr)  # the last line says what crashed
            whole += used(folder, samples)
            count += 1
            shutil.rmtree(folder)
    print(f"{count} files, {whole} of {count * samples} records served")


def limited(place: Path, step: int) -> None:
    """Fill caches under a limit on the size of files, a little larger each time.

    So each write fails once: of the state, and of page after page of the database.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    pristine, folder = place / "pristine", place / "limited"
    small(pristine, 2)
    end = (pristine / FOLDER / "data.mdb").stat().st_size + (1 << 16)
    limits = records = 0
    for nbytes in (*range(0, 200, 40), *range(step, end, step)):
        shutil.copytree(pristine, folder)
        with quiet() as warnings, shorter_than(nbytes):
            used(folder, FEW)
        assert len(warnings) <= 2, f"{nbytes} bytes: {warnings}"  # of two runs
        stored = used(folder, FEW)
        assert stored >= 2, f"{nbytes} bytes: what was there is gone"
        assert warnings or stored == FEW, f"{nbytes} bytes: not told that it is off"
        limits, records = limits + bool(warnings), records + stored
        shutil.rmtree(folder)
    print(f"{limits} limits were met, {records} records kept")


@contextmanager
def shorter_than(nbytes: int) -> Iterator[None]:
    """Limit the size of files, in bytes, until the `with` ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def main() -> None:
    """Run the function that the arguments name."""
    what, *arguments = sys.argv[1:]
    match what, arguments:
        case "harm", [place, name, step, first]:
            harm(Path(place), name, int(step), int(first))
        case "limited", [place, step]:
            limited(Path(place), int(step))


if __name__ == "__main__":
    main()
