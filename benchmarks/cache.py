"""How much does a cache gain, what does it cost, and how fast is it on its own?

python benchmarks/cache.py --data DIR [jpeg first gets hits codecs room]

jpeg    second epochs of photos decoded to a short side of 256, cached, cropped and
        flipped, compared with no cache and with torch's DataLoader at its best
first   first epochs that fill a cache, compared with epochs without one
gets    reads of 100 KB records on one thread: RAM, disk, LMDB, diskcache, dict
hits    a cache with room for two fifths of incompressible samples, and LRU
codecs  compression ratio and speed on photos cropped to 224
room    later epochs of such photos, with room for half of them as they are, by codec
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
import timeit
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import diskcache
import lmdb
import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from versus import show, versus

import penstock as ps
from penstock.cache.codec import CODECS
from penstock.cache.disk import Disk
from penstock.cache.memory import create
from penstock.cache.record import KEY_BYTES, decode, encode
from penstock.pipeline.image.geometry import random_box
from penstock.pipeline.sources.folder import Folder

SIZE, SHORT, BATCH = 224, 256, 64
WARM_S = 12.0
"""Epochs of each pipeline before the rounds. A warm cache and a cold one need different
numbers of workers, and finding them takes some seconds."""
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
versions = itertools.count(time.time_ns())
"""Each number identifies another cache, so each starts with a cold one."""


def decode_short(sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
    """Decode, and resize the shorter side to 256."""
    return ps.image.resize_short_side(SHORT)(ps.image.decode(sample))  # type: ignore[return-value]


class Photos(Dataset[tuple[np.ndarray, int]]):
    """The same work for torch's DataLoader, with Pillow."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        data, label = self.folder[index]
        image = Image.open(io.BytesIO(data)).convert("RGB")
        ratio = SHORT / min(image.size)
        sides = (round(image.width * ratio), round(image.height * ratio))
        image = image.resize(sides, Image.Resampling.BILINEAR)
        rng = np.random.default_rng(random.getrandbits(64))
        box = random_box(image.height, image.width, SCALE, RATIO, rng)
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=corners)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image), label


def drain(batches: Any) -> None:
    """Run one epoch."""
    for _ in batches:
        pass


def cropped(source: ps.Pipeline, passes: int) -> ps.Pipeline:
    """Return a pipeline that crops, flips and batches photos, cached or not."""
    crop = ps.image.random_resized_crop(SIZE)
    samples = source.shuffle(seed=0).repeat(passes).map(crop)
    return samples.map(ps.image.horizontal_flip(0.5)).batch(BATCH)


def jpeg(folder: Folder, workspace: Path, passes: int) -> None:
    """Second epochs."""
    source = ps.Pipeline.from_folder(folder.root).map(decode_short)
    pipes = {
        "no cache": cropped(source, passes),
        "cache in RAM": cropped(
            source.cache(ram="2GB", version=next(versions)), passes
        ),
        "cache on disk": cropped(
            source.cache(disk=workspace, version=next(versions)), passes
        ),
    }
    for name, pipe in pipes.items():  # each pipeline finds its number of workers
        print(f"warming up: {name}", file=sys.stderr, flush=True)
        end_s = time.monotonic() + WARM_S
        while time.monotonic() < end_s:
            drain(pipe)
    candidates: dict[str, Callable[[], object]] = {
        name: lambda pipe=pipe: drain(pipe) for name, pipe in pipes.items()
    }
    repeated = ConcatDataset([Photos(folder)] * passes)
    loaders = {
        f"DataLoader, Pillow, num_workers={workers}": DataLoader(
            repeated,
            BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        for workers in range(5)
    }
    for name, loader in loaders.items():
        candidates[name] = lambda loader=loader: drain(loader)
    results = versus(candidates, len(repeated))
    show(f"{len(folder)} photos, second epochs", results, list(loaders))
    rate = {result.name: result.rate for result in results}
    ram, disk, none = (
        rate[name] for name in ("cache in RAM", "cache on disk", "no cache")
    )
    print(f"  RAM: {ram / none:.2f} of no cache; disk: {disk / ram:.2f} of RAM")
    for pipe in pipes.values():
        pipe.close()


class Slow:
    """Samples of a store whose reads take 20 ms."""

    def __init__(self, samples: int) -> None:
        self.data = np.random.default_rng(0).bytes(100_000)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __penstock_fingerprint__(self) -> str:
        """Return a fingerprint, so that caches are kept between processes."""
        return "slow"

    def __getitem__(self, index: int) -> bytes:
        time.sleep(0.02)
        return self.data


class Often:
    """A folder several times over, as if all photos were different."""

    def __init__(self, folder: Folder, times: int) -> None:
        self.folder, self.times = folder, times

    def __len__(self) -> int:
        return self.times * len(self.folder)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self.folder[index % len(self.folder)]  # type: ignore[no-any-return]


class Keep:
    """The least work that keeps samples: copying each into a list."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def __call__(self, sample: Any) -> Any:
        """Keep a copy of the sample, and return the sample."""
        content = sample[0] if isinstance(sample, tuple) else sample
        self.kept.append(bytes(bytearray(content)))
        return sample


def first(folder: Folder, workspace: Path, rounds: int = 7) -> None:
    """First epochs, each into a cold cache."""
    reads = ps.Pipeline.from_dataset(Slow(1200), num_parallel_workers=16)
    often = Often(folder, 6)
    photos = ps.Pipeline.from_dataset(often, num_parallel_workers=2, executor="thread")
    photos = photos.map(decode_short, executor="thread")
    cases = (
        ("reads of 20 ms bind", reads, 1200, lambda p: p.batch(BATCH, collate_fn=len)),
        ("the CPU binds (JPEG)", photos, len(often), lambda p: cropped(p, 1)),
    )
    for title, source, samples, rest in cases:
        ways: dict[str, Callable[[], ps.Pipeline]] = {
            "no cache": lambda s=source: s,
            "RAM": lambda s=source: s.cache(ram="2GB", version=next(versions)),
            "disk": lambda s=source: s.cache(disk=workspace, version=next(versions)),
            "a copy kept": lambda s=source: s.map(Keep(), executor="thread"),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number, (name, make) in itertools.product(range(rounds + 1), ways.items()):
            print(f"round {number}: {name}", file=sys.stderr, flush=True)
            pipe = rest(make())
            start = time.perf_counter()
            for _ in itertools.islice(pipe, samples // BATCH - 2):
                pass
            if number:
                times[name].append(time.perf_counter() - start)
            pipe.close()
        median = {name: statistics.median(values) for name, values in times.items()}
        print(f"\nfirst epoch, {title} (medians of {rounds}, interleaved)")
        for name, took in median.items():
            print(f"  {name:<12} {took:6.2f} s  {took / median['no cache'] - 1:+.1%}")


@contextmanager
def stores(workspace: Path, count: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the functions that write and read a record, with the name of the store."""
    raw = CODECS[0]
    arena = create("benchmark", 2 * count * size, count)
    disk = Disk(workspace / "gets")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        env = lmdb.open(shm, map_size=1 << 36, sync=False, metasync=False)
        other = diskcache.Cache(workspace / "diskcache", eviction_policy="none")
        plain: dict[bytes, Any] = {}

        def put_lmdb(key: bytes, sample: np.ndarray) -> None:
            with env.begin(write=True) as txn:
                txn.put(key, encode(sample, key, raw))

        def get_lmdb(key: bytes) -> np.ndarray:
            with env.begin(buffers=True) as txn:
                return decode(bytearray(txn.get(key)), key)  # type: ignore[no-any-return]

        yield {
            "RAM": (
                lambda key, sample: arena.put(key, encode(sample, key, raw)),
                lambda key: decode(arena.get(key), key),  # type: ignore[arg-type]
            ),
            "disk (page cache warm)": (
                lambda key, sample: disk.put([(key, encode(sample, key, raw))], "gets"),
                lambda key: decode(disk.get(key), key),  # type: ignore[arg-type]
            ),
            "LMDB on tmpfs": (put_lmdb, get_lmdb),
            "diskcache (pickle)": (other.set, other.get),
            "dict, and a copy": (
                lambda key, sample: plain.__setitem__(key, sample.copy()),
                lambda key: plain[key].copy(),
            ),
        }
        other.close()
        env.close()
    disk.close()
    arena.close()


def gets(workspace: Path, count: int = 1500, size: int = 100_000) -> None:
    """Write and read records on one thread."""
    sample = np.frombuffer(os.urandom(size), np.uint8)
    keys = [b"benchmrk" + os.urandom(8) for _ in range(count)]
    with stores(workspace, count, size) as ways:
        put_s: dict[str, float] = {}
        for name, (put, _) in ways.items():
            start = time.perf_counter()
            for key in keys:
                put(key, sample)
            put_s[name] = time.perf_counter() - start
        get_s: dict[str, list[float]] = {name: [] for name in ways}
        for _, (name, (_, get)) in itertools.product(range(7), ways.items()):
            start = time.perf_counter()
            for key in keys:
                get(key)
            get_s[name].append(time.perf_counter() - start)
    print(f"\n{count} arrays of {size} bytes, one thread, checked (median of 7)")
    for name, times in get_s.items():
        took = statistics.median(times) / count
        one_put_s = put_s[name] / count
        print(
            f"  {name:<24} get {took * 1e6:6.1f} us {size / took / 1e9:6.2f} GB/s"
            f"   put {one_put_s * 1e6:7.1f} us"
        )


class Noise:
    """Samples that no codec can compress."""

    def __init__(self, samples: int, size: int) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 256, self.size, np.uint8)


def hits(samples: int = 2000, size: int = 20_000, epochs: int = 5) -> None:
    """Print the shares of hits with room for two fifths of the samples."""
    room = int(0.4 * samples * (size + 150))
    pipe = ps.Pipeline.from_dataset(Noise(samples, size)).cache(ram=room)
    pipe = pipe.shuffle(seed=0).batch(50)
    pipe = pipe.options(persistent_workers=False)  # so no epoch begins in another
    lru: OrderedDict[int, None] = OrderedDict()
    capacity = int(0.4 * samples)
    shares, before = [], 0
    orders = np.random.default_rng(0)
    least_recent = []
    for _ in range(epochs):
        for _ in pipe:
            pass
        caches = pipe.stats().caches  # type: ignore[union-attr]
        shares.append((caches[0].hits - before) / samples)
        before = caches[0].hits
        least_recent.append(
            lru_epoch(lru, capacity, orders.permutation(samples)) / samples
        )
    pipe.close()
    print(f"\nroom for 40 % of {samples} samples: shares found, epoch by epoch")
    print("  penstock", *(f"{share:6.1%}" for share in shares))
    print("  LRU     ", *(f"{share:6.1%}" for share in least_recent))


def lru_epoch(lru: OrderedDict[int, None], room: int, order: np.ndarray) -> int:
    """Read all samples once through a least-recently-used cache; return the hits."""
    hit_count = 0
    for index in order.tolist():
        if index in lru:
            hit_count += 1
            lru.move_to_end(index)
            continue
        lru[index] = None
        if len(lru) > room:
            lru.popitem(last=False)
    return hit_count


def codecs(folder: Folder, count: int = 100) -> None:
    """Print ratio and speed of each codec on photos cropped to 224."""
    crop = ps.image.center_crop(SIZE)
    indices = range(0, len(folder), max(1, len(folder) // count))
    photos = [crop(decode_short(folder[index]))[0] for index in indices]
    nbytes = photos[0].nbytes
    print(f"\n{len(photos)} decoded photos of 224 x 224 (ratio of record to bytes)")
    key = bytes(KEY_BYTES)
    for codec in CODECS.values():
        sizes, packs, unpacks = [], [], []
        for photo in photos:
            record = bytearray(encode(photo, key, codec))
            sizes.append(len(record) / nbytes)
            packs.append(best_s(partial(encode, photo, key, codec)))
            unpacks.append(best_s(partial(decode, record, key)))
        print(
            f"  {codec.name:<7} {statistics.fmean(sizes):5.2f}"
            f"   encode {nbytes / 1e9 / statistics.fmean(packs):6.2f} GB/s"
            f"   decode {nbytes / 1e9 / statistics.fmean(unpacks):6.2f} GB/s"
        )


def best_s(work: Callable[[], object]) -> float:
    """Return the seconds that this takes: the best of three, as others may compute."""
    return min(timeit.repeat(work, repeat=3, number=1))


def room(folder: Folder) -> None:
    """Print the rate of later epochs with room for half of the raw photos."""
    crop = ps.image.center_crop(SIZE)
    half = len(folder) * SIZE * SIZE * 3 // 2
    photos = ps.Pipeline.from_folder(folder.root, num_parallel_workers=2)
    photos = photos.map(lambda sample: crop(decode_short(sample)), executor="thread")
    ways: dict[str, dict[str, Any]] = {
        "no cache": {},
        **{codec.name: {"codec": codec.name} for codec in CODECS.values()},
        "auto": {"codec": "auto"},
    }
    pipes = {}
    for name, how in ways.items():
        version = f"room {name} {next(versions)}"
        samples = photos.cache(ram=half, version=version, **how) if how else photos
        pipes[name] = samples.shuffle(seed=0).batch(BATCH)
        drain(pipes[name])
    candidates: dict[str, Callable[[], object]] = {
        name: lambda pipe=pipe: drain(pipe) for name, pipe in pipes.items()
    }
    show("later epochs, room for half", versus(candidates, len(folder)), ["no cache"])
    for pipe in pipes.values():
        pipe.close()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("jpeg", "first", "gets", "hits", "codecs", "room")
    parser.add_argument("parts", nargs="*", default=parts, help=" ".join(parts))
    parser.add_argument("--data", type=Path, required=True, help="class folders")
    parser.add_argument("--passes", type=int, default=4, help="over the data, an epoch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Folder.scan(options.data)
    with tempfile.TemporaryDirectory() as place:
        workspace = Path(place)
        jobs: dict[str, Callable[[], None]] = {
            "jpeg": lambda: jpeg(folder, workspace, options.passes),
            "first": lambda: first(folder, workspace),
            "gets": lambda: gets(workspace),
            "hits": hits,
            "codecs": lambda: codecs(folder),
            "room": lambda: room(folder),
        }
        for part in options.parts:
            jobs[part]()


if __name__ == "__main__":
    main()
