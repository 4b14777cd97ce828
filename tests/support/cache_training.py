"""Trains on a pipeline with a cache and reports, as JSON, whether all data was right.

It runs as a script, with a JSON object of settings. It is a process of its own, so that
it can be killed, or get limits and file systems of its own.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from support.cache_damage import quiet

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
SAMPLES = 64
WIDTH = 20_000


class Noise:
    """Sample i is 20 kB that no codec can compress, and i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        return noise(index), index


def noise(index: int) -> NDArray[np.uint8]:
    """Return the bytes of that sample."""
    return np.random.default_rng(index).integers(0, 256, WIDTH, np.uint8)


def pipeline(executor: str = "thread", **cache: Any) -> ps.Pipeline:
    """Return a pipeline with this cache."""
    workers: dict[str, Any] = {"executor": executor, "num_parallel_workers": 2}
    source = ps.Pipeline.from_dataset(Noise(), **workers)
    return source.cache(**cache).shuffle(seed=1).batch(8)


def trained(pipe: ps.Pipeline) -> Iterator[list[int]]:
    """Yield the samples of each batch, as they come; assert that they are right."""
    for images, indices in pipe:
        for image, index in zip(images, indices.tolist(), strict=True):
            assert np.array_equal(image.numpy(), noise(index)), index
        yield indices.tolist()


def train(epochs: int = 2, **described: Any) -> dict[str, Any]:
    """Train; return the warnings, the hits of the disk and its contents.

    Assert that each epoch has every sample once, and that each is right.
    """
    with quiet() as warnings, closing(pipeline(**described)) as pipe:
        for _ in range(epochs):
            indices = [index for batch in trained(pipe) for index in batch]
            assert sorted(indices) == list(range(SAMPLES))
        reading = pipe.stats()
    caches = [] if reading is None else reading.caches
    tiers = {tier.name: tier for cache in caches for tier in cache.tiers}
    records = {name: tier.records for name, tier in tiers.items()}
    nbytes = {name: tier.nbytes for name, tier in tiers.items()}
    hits = sum(cache.hits for cache in caches)
    return {"told": warnings, "records": records, "nbytes": nbytes, "hits": hits}


def see_own_mounts() -> None:
    """Let this process mount file systems of its own, as root of a new namespace."""
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(CLONE_NEWNS | (CLONE_NEWUSER if uid else 0)):
        raise PermissionError("mounting is not permitted here")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    shell("mount --make-rprivate /")


def shell(line: str, *arguments: str) -> None:
    """Run a command in a shell."""
    subprocess.run(["/bin/sh", "-c", line, *arguments], check=True)


def main() -> None:
    """Change the machine as the arguments say, then train."""
    described = json.loads(sys.argv[1])
    logging.basicConfig(stream=sys.stderr)
    if first := described.pop("first", ""):
        see_own_mounts()
        shell(first, described["disk"])
    if "file_bytes" in described:
        limit = described.pop("file_bytes")
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if described.pop("to_the_last_byte", False):
        from penstock.cache import folder as spare

        spare.SPARE = -(1 << 40)
    if described.pop("until_killed", False):
        with quiet(), pipeline(**described) as pipe:
            print(next(trained(pipe)), flush=True)
            sys.stdin.read()
    print(json.dumps(train(**described)))


if __name__ == "__main__":
    main()
