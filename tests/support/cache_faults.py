"""Caches whose processes are killed. Run as a script: a function, then its arguments.

It is a process of its own, so that a crash is noticed, and small, so that it forks
quickly.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.cache.cache import Cache, Opening
from penstock.cache.codec import CODECS
from penstock.cache.disk import Disk
from penstock.cache.fingerprint import Fingerprint
from penstock.cache.folder import FOLDER
from penstock.cache.record import encode
from penstock.system.file_locks import locked_folder
from support.forked import End, Forked, forked
from support.tiers import ask as ask_for

SAMPLES = 150
RAM = 4 << 20
MAX_REPORTS = 3
LONGEST_S = 0.03
"""A process is killed so long after some of its reports, at most."""
ROUNDS_A_FOLDER = 20
FEW = 8
PEERS = 3
KEYS = Fingerprint(bytes(16))


def value(index: int) -> NDArray[np.uint8]:
    """Return the sample of that index: some bytes, or some pages."""
    dice = np.random.default_rng(index)
    return dice.integers(0, 256, 100 + 911 * (index % 11), np.uint8)


def value_at(index: int) -> Callable[[int], NDArray[np.uint8]]:
    """Return the function that computes that sample."""
    return lambda _: value(index)


def right(sample: NDArray[np.uint8], index: int) -> None:
    """Assert that it is that sample."""
    assert np.array_equal(sample, value(index)), f"sample {index} is wrong"


def key(index: int) -> bytes:
    """Return the key of that sample."""
    return KEYS.key(index, None)


def record(index: int) -> tuple[bytes, bytes]:
    """Return the record that a disk stores."""
    return key(index), encode(value(index), key(index), CODECS[0])


def cache_in(folder: Path | None, ram: int = 0) -> Cache:
    """Return a cache of the samples above."""
    opening = Opening(
        "Cache(ID:1)", "values", "auto", SAMPLES, disk=folder, disk_limit=None
    )
    return Cache(opening, KEYS, ram)


def found_in(cache: Cache, samples: int = SAMPLES) -> set[int]:
    """Return which samples are stored, and assert that each is right."""
    cache.open()
    here = cache._mine()  # noqa: SLF001 to compute nothing
    records = {index: here.find(key(index)) for index in range(samples)}
    for index, record in records.items():
        if record is not None:
            right(record.sample, index)
    return {index for index, record in records.items() if record is not None}


# Kills


def asks(cache: Cache, seed: int, end: End) -> None:
    """Read samples from a cache without end; report those that reached the disk."""
    dice = random.Random(seed)
    computed: list[int] = []
    end.tell("")

    def compute(index: int) -> Any:
        computed.append(index)
        return value(index)

    def ask(index: int) -> None:
        sample = ask_for(cache, index, None, lambda _: compute(index))
        right(sample, index)

    with ThreadPoolExecutor(2) as threads:
        while True:
            list(threads.map(ask, [dice.randrange(SAMPLES) for _ in range(12)]))
            cache.flush()
            end.tell(" ".join(map(str, computed)))


def killed(child: Forked) -> set[int]:
    """Kill a child, which must still run; return all of its reports."""
    child.kill()
    assert child.ended() == -signal.SIGKILL, f"{child.ended()}: {child.hear()}"
    return numbers(" ".join(iter(child.hear, "")))


def numbers(line: str) -> set[int]:
    """Return the samples that a child reported."""
    return set(map(int, line.split()))


def kill_some(cache: Cache, dice: random.Random, children: int) -> set[int]:
    """Kill processes that use a cache; return the samples they reported as on disk."""
    reports: set[int] = set()
    with ExitStack() as stack:
        seeds = [dice.randrange(1 << 30) for _ in range(children)]
        alive = [stack.enter_context(forked(partial(asks, cache, s))) for s in seeds]
        for child in alive:
            child.hear()  # it is at work
        for child in alive:
            for _ in range(dice.randrange(MAX_REPORTS)):
                reports |= numbers(child.hear())
            time.sleep(dice.random() * LONGEST_S)
            reports |= killed(child)
    return reports


def kill_loop(rounds: int, place: Path, tiers: str) -> None:
    """Kill processes that use one cache; check it twice after each round."""
    dice = random.Random(rounds)
    most = 0
    for first in range(0, rounds, ROUNDS_A_FOLDER):
        folder = place / str(first) if "disk" in tiers else None
        reports: set[int] = set()
        shared = cache_in(folder, RAM if "ram" in tiers else 0)
        for number in range(first, min(first + ROUNDS_A_FOLDER, rounds)):
            reports |= kill_some(shared_open(shared), dice, 1 + number % 2)
            samples = found_in(shared)
            most = max(most, len(samples))
            if folder is not None:
                shared.close()
                samples = found_in(alone := cache_in(folder))
                alone.close()
                assert reports <= samples, (
                    f"round {number}: {reports - samples} are gone"
                )
        shared.close()
    assert most > SAMPLES // 4, f"only {most} samples were there: nothing was tested"
    print(f"at most {most} samples were there at once")


def shared_open(cache: Cache) -> Cache:
    """Open it as a trainer does before its workers are forked."""
    cache.open()
    return cache


def stops_within(folder: Path, kind: str, end: End) -> None:
    """Stop in the middle of a transaction, and wait to be killed."""
    disk = Disk(folder / FOLDER)
    environment = disk._env  # noqa: SLF001 a transaction of its own, to stop in
    if kind == "writer":
        with locked_folder(disk.folder, 30.0), environment.begin(write=True) as txn:
            for index in range(SAMPLES):
                txn.put(*record(index))
            end.tell("within")
            signal.pause()
    with environment.begin(buffers=True) as txn:
        txn.get(key(0))
        end.tell("within")
        signal.pause()


def goes_on(folder: Path, end: End) -> None:
    """Store a sample for each number received; report the size of the file."""
    disk = Disk(folder / FOLDER)
    end.tell("open")
    for index in map(int, iter(end.hear, "")):
        disk.forget(key(index))
        disk.put([record(index)], "values")
        samples = {
            sample for sample in range(SAMPLES) if disk.get(key(sample)) is not None
        }
        end.tell(" ".join(map(str, samples)))
    disk.close()


def kill_in_transactions(rounds: int, folder: Path, kind: str) -> None:
    """Kill processes within a transaction while another one uses the folder."""
    stored: set[int] = set()
    sizes = []
    with forked(partial(goes_on, folder)) as other:
        assert other.hear() == "open"
        for number in range(rounds):
            with forked(partial(stops_within, folder, kind)) as child:
                assert child.hear() == "within"
                killed(child)
            index = number % FEW
            stored.add(index)
            other.tell(str(index))
            samples = set(map(int, other.hear().split()))
            assert samples == stored, f"round {number}: {samples ^ stored}"
            cache = cache_in(folder)
            assert found_in(cache) == stored
            cache.close()
            sizes.append((folder / FOLDER / "data.mdb").stat().st_size)
    assert sizes[-1] <= 2 * sizes[FEW], f"room is not used again: {sizes}"
    print(f"the database took {sizes[0]} bytes at first and {sizes[-1]} at last")


def comes_and_goes(folder: Path, first: int, end: End) -> None:
    """Open the folder, store, find it, close it, again and again."""
    for index in range(first, SAMPLES, PEERS):
        disk = Disk(folder / FOLDER)
        disk.put([record(index)], "values")
        assert disk.get(key(index)) == record(index)[1]
        disk.close()
    end.tell("done")


def churn(folder: Path) -> None:
    """Run many processes at once, so that some open a cache as the last one closes."""
    with ExitStack() as stack:
        works = [partial(comes_and_goes, folder, number) for number in range(PEERS)]
        children = [stack.enter_context(forked(work)) for work in works]
        for child in children:
            assert (said := child.hear()) == "done", said
    cache = cache_in(folder)
    assert found_in(cache) == set(range(SAMPLES))
    cache.close()


def main() -> None:
    """Run the function that the arguments name."""
    what, *arguments = sys.argv[1:]
    match what, arguments:
        case "kills", [rounds, place, tiers]:
            kill_loop(int(rounds), Path(place), tiers)
        case "transactions", [rounds, place, kind]:
            kill_in_transactions(int(rounds), Path(place), kind)
        case "churn", [place]:
            churn(Path(place))


if __name__ == "__main__":
    main()
