"""Is each source at least as fast as its own library's loader?

    python benchmarks/sources.py [--rounds 5] [--only lmdb webdataset parquet ...]

The candidates of a row read the same files: penstock, and the format's own library
under torch's DataLoader, with the same number of workers; then penstock with autotune
on. All take turns, and medians count. The aims are 0.95 of the library's rate with the
same workers, and 1.2 when tuned. Samples are 2 KB and a label, as bytes, because this
measures reading and not decoding.
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
from collections.abc import Callable, Iterator, Sequence
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

Epoch = Callable[[], int]
"""Reads everything once; returns how many samples came."""


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(2000)


def numbers_of(shard: int) -> range:
    return range(shard * N // SHARDS, (shard + 1) * N // SHARDS)


def by_torch(dataset: Any) -> int:
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, num_workers=WORKERS, collate_fn=list
    )
    return sum(map(len, loader))


def by_penstock(make: Callable[..., ps.Pipeline], *, tuned: bool) -> int:
    workers = {} if tuned else {"num_parallel_workers": WORKERS}
    pipe = make(**workers).batch(BATCH, collate_fn=list)
    with pipe.options(persistent_workers=False) as batches:
        return sum(map(len, batches))


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


def lmdb_row(folder: Path) -> tuple[Epoch, Callable[..., ps.Pipeline]]:
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


def webdataset_row(folder: Path) -> tuple[Epoch, Callable[..., ps.Pipeline]]:
    import webdataset

    paths = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for number in numbers_of(shard):
                for name, content in (("bin", payload(number)), ("cls", b"%d" % 7)):
                    info = tarfile.TarInfo(f"{number:08d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))

    def theirs() -> int:
        dataset = webdataset.WebDataset(paths, shardshuffle=False).to_tuple(
            "bin", "cls"
        )
        return by_torch(dataset)

    ours = functools.partial(ps.Pipeline.from_webdataset, paths, ("bin", "cls"))
    return theirs, ours


def tables(folder: Path) -> list[Any]:
    import pyarrow as pa

    return [
        pa.table({"data": [*map(payload, numbers)], "label": [7] * len(numbers)})
        for numbers in map(numbers_of, range(SHARDS))
    ]


def parquet_row(folder: Path) -> tuple[Epoch, Callable[..., ps.Pipeline]]:
    import pyarrow.parquet as pq

    paths = [str(folder / f"{shard}.parquet") for shard in range(SHARDS)]
    for path, table in zip(paths, tables(folder), strict=True):
        pq.write_table(table, path, row_group_size=512)
    theirs = functools.partial(by_torch, ParquetRows(paths))
    return theirs, functools.partial(ps.Pipeline.from_parquet, paths)


def arrow_row(folder: Path) -> tuple[Epoch, Callable[..., ps.Pipeline]]:
    import datasets
    import pyarrow as pa

    paths = [str(folder / f"{shard}.arrow") for shard in range(SHARDS)]
    for path, table in zip(paths, tables(folder), strict=True):
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=512)
    parts = [datasets.Dataset.from_file(path) for path in paths]
    theirs = functools.partial(by_torch, datasets.concatenate_datasets(parts))
    return theirs, functools.partial(ps.Pipeline.from_arrow, paths)


def datasets_row(folder: Path) -> tuple[Epoch, Callable[..., ps.Pipeline]]:
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


def rate(epoch: Epoch) -> float:
    begun_s = time.perf_counter()
    found = epoch()
    spent_s = time.perf_counter() - begun_s
    assert found == N, found
    return found / spent_s


def measure(name: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs, make = ROWS[name](Path(folder))
        ways = {
            "theirs": theirs,
            "same": functools.partial(by_penstock, make, tuned=False),
            "tuned": functools.partial(by_penstock, make, tuned=True),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, epoch in ways.items():
                ps.set_enable_autotune(way == "tuned")
                found = rate(epoch)
                if number:
                    rates[way].append(found)
    best, same, tuned = (statistics.median(each) for each in rates.values())
    print(
        f"{name:12} {best:9.0f} {same:9.0f} {same / best:6.2f}x"
        f" {tuned:9.0f} {tuned / best:6.2f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[*ROWS], choices=[*ROWS])
    asked = parser.parse_args()
    print(f"samples a second, {WORKERS} workers; aims {EQUAL}x and {TUNED}x when tuned")
    print("source         library  penstock             tuned")
    for name in asked.only:
        measure(name, asked.rounds)


if __name__ == "__main__":
    main()
