"""Is each source at least as fast as its own library's loader?

    python benchmarks/sources.py [--rounds 5] [--only lmdb webdataset parquet ...]

Every row reads the same files: by penstock, and by what the format's own library has
for it under torch's DataLoader, with the same number of workers. Then penstock as it
finds its own workers. Loaders live on from epoch to epoch, torch's with persistent
workers. All take turns of a second or more, after the tuner has had its time; medians
count. Aims: 0.95 of the library's rate at the same workers, 1.2 when tuned. The last
two columns are the seconds from nothing to the end of a first epoch: penstock indexes
tars by then.

Samples are 2 KB and a label: reading is measured, not decoding. Each row returns the
same values in the same order within a file, none shuffled (the values are compared
first), and both sides decode a tar's label to an int. The libraries give each worker
files of its own, so their samples come in another order with other numbers of workers;
penstock's do not.
"""

from __future__ import annotations

import argparse
import functools
import io
import shutil
import statistics
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps

N = 16384
SHARDS = 8
BATCH = 64
WORKERS = 2
EQUAL, TUNED = 0.95, 1.2
TURN_S = 1.0
"""A turn is as many epochs as take this long."""
TUNING_S = 15.0
"""What the tuner has before the first turn."""

Batches = Iterable[list[Any]]
Loader = Callable[[], AbstractContextManager[Batches]]
"""Opens what yields an epoch's batches each time it is iterated."""


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(2000)


def numbers_of(shard: int) -> range:
    return range(shard * N // SHARDS, (shard + 1) * N // SHARDS)


@contextmanager
def by_torch(dataset: Any) -> Iterator[Batches]:
    yield torch.utils.data.DataLoader(
        dataset,
        BATCH,
        num_workers=WORKERS,
        collate_fn=list,
        persistent_workers=True,
    )


@contextmanager
def by_penstock(make: Callable[..., ps.Pipeline], *, tuned: bool) -> Iterator[Batches]:
    workers = {} if tuned else {"num_parallel_workers": WORKERS}
    with make(**workers).batch(BATCH, collate_fn=list) as pipe:
        yield pipe


class LmdbDataset(torch.utils.data.Dataset[bytes]):
    """LMDB as its users read it: opened in each worker."""

    def __init__(self, path: str) -> None:
        self.path, self.environment = path, None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> bytes:
        import lmdb

        if self.environment is None:
            self.environment = lmdb.open(
                self.path, readonly=True, lock=False, readahead=False
            )
        with self.environment.begin() as transaction:
            return transaction.get(b"%08d" % index)


class ParquetRows(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Rows as pyarrow reads them: in batches, each worker from its own files."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import pyarrow.parquet as pq

        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for path in self.paths[first::step]:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(BATCH):
                    yield from batch.to_pylist()


def lmdb_row(folder: Path) -> tuple[Loader, Callable[..., ps.Pipeline]]:
    import lmdb

    path, copy = str(folder / "lmdb"), str(folder / "copy")
    with (
        lmdb.open(path, map_size=1 << 28) as environment,
        environment.begin(write=True) as transaction,
    ):
        for number in range(N):
            transaction.put(b"%08d" % number, payload(number))
    shutil.copytree(path, copy)  # a process opens a database once, and workers fork
    theirs = functools.partial(by_torch, LmdbDataset(copy))
    return theirs, functools.partial(ps.Pipeline.from_lmdb, path)


def webdataset_row(folder: Path) -> tuple[Loader, Callable[..., ps.Pipeline]]:
    import webdataset

    paths = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for number in numbers_of(shard):
                for name, content in (("bin", payload(number)), ("cls", b"%d" % 7)):
                    info = tarfile.TarInfo(f"{number:08d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))

    def theirs() -> AbstractContextManager[Batches]:
        dataset = webdataset.WebDataset(paths, shardshuffle=False).decode()
        return by_torch(dataset.to_tuple("bin", "cls"))

    ours = functools.partial(ps.Pipeline.from_webdataset, paths, ("bin", "cls"))
    return theirs, ours


def tables(folder: Path) -> list[Any]:
    import pyarrow as pa

    return [
        pa.table({"data": [*map(payload, numbers)], "label": [7] * len(numbers)})
        for numbers in map(numbers_of, range(SHARDS))
    ]


def parquet_row(folder: Path) -> tuple[Loader, Callable[..., ps.Pipeline]]:
    import pyarrow.parquet as pq

    paths = [str(folder / f"{shard}.parquet") for shard in range(SHARDS)]
    for path, table in zip(paths, tables(folder), strict=True):
        pq.write_table(table, path, row_group_size=512)
    theirs = functools.partial(by_torch, ParquetRows(paths))
    return theirs, functools.partial(ps.Pipeline.from_parquet, paths)


def arrow_row(folder: Path) -> tuple[Loader, Callable[..., ps.Pipeline]]:
    import datasets
    import pyarrow as pa

    paths = [str(folder / f"{shard}.arrow") for shard in range(SHARDS)]
    for path, table in zip(paths, tables(folder), strict=True):
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=512)
    parts = [datasets.Dataset.from_file(path) for path in paths]
    theirs = functools.partial(by_torch, datasets.concatenate_datasets(parts))
    return theirs, functools.partial(ps.Pipeline.from_arrow, paths)


def datasets_row(folder: Path) -> tuple[Loader, Callable[..., ps.Pipeline]]:
    import datasets

    parts = [datasets.Dataset(table) for table in tables(folder)]
    whole = datasets.concatenate_datasets(parts)
    theirs = functools.partial(by_torch, whole)
    return theirs, functools.partial(ps.Pipeline.from_dataset, whole)


ROWS = {
    "lmdb": lmdb_row,
    "webdataset": webdataset_row,
    "parquet": parquet_row,
    "arrow": arrow_row,
    "datasets": datasets_row,
}


def epochs(batches: Batches, least_s: float) -> float:
    """Read everything until time is up; return the samples a second."""
    begun_s, total = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - begun_s) < least_s or not total:
        count = sum(map(len, batches))
        assert count == N, count
        total += count
    return total / spent_s


def values(sample: Any) -> Any:
    """Return a sample's values without the types that a library wraps them in."""
    match sample:
        case dict():
            return tuple((name, values(sample[name])) for name in sorted(sample))
        case tuple() | list():
            return tuple(map(values, sample))
        case bytes() | bytearray() | memoryview():
            return bytes(sample)
        case _:
            return int(sample)


def contents(loader: Loader) -> Counter[Any]:
    """Return the samples of an epoch, however they are ordered."""
    with loader() as batches:
        return Counter(values(sample) for batch in batches for sample in batch)


def first_epoch(loader: Loader) -> float:
    """Return the seconds until everything was read once, from nothing."""
    begun_s = time.perf_counter()
    with loader() as batches:
        epochs(batches, 0.0)
        return time.perf_counter() - begun_s


def measure(name: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        theirs, make = ROWS[name](Path(folder))
        loaders: dict[str, Loader] = {
            "theirs": theirs,
            "same": functools.partial(by_penstock, make, tuned=False),
            "tuned": functools.partial(by_penstock, make, tuned=True),
        }
        ps.set_enable_autotune(False)
        assert contents(theirs) == contents(loaders["same"])
        first = [
            statistics.median(first_epoch(loaders[way]) for _ in range(rounds))
            for way in ("theirs", "same")
        ]
        open_ones = {
            way: stack.enter_context(loader()) for way, loader in loaders.items()
        }
        rates: dict[str, list[float]] = {way: [] for way in loaders}
        for number in range(rounds + 1):
            for way, batches in open_ones.items():
                ps.set_enable_autotune(way == "tuned")
                warm_s = TUNING_S if way == "tuned" and not number else TURN_S
                rate = epochs(batches, warm_s)
                if number:
                    rates[way].append(rate)
    best, same, tuned = (statistics.median(speeds) for speeds in rates.values())
    print(
        f"{name:12} {best:9.0f} {same:9.0f} {same / best:6.2f}x"
        f" {tuned:9.0f} {tuned / best:6.2f}x {first[0]:9.2f} {first[1]:9.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[*ROWS], choices=[*ROWS])
    options = parser.parse_args()
    print(f"samples a second, {WORKERS} workers; aims {EQUAL}x and {TUNED}x when tuned")
    print("source         library  penstock             tuned           first s   ours")
    for name in options.only:
        measure(name, options.rounds)


if __name__ == "__main__":
    main()
