"""Parquet files of a store have the rows of the same files on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec.asyn
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.pipeline.sources.remote_parquet import GAP
from support.http_store import served

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, GROUP = 600, 50
RNG = np.random.default_rng(0)
TABLE = pa.table(
    {
        "x": RNG.random(ROWS).astype(np.float32),
        "wide": [RNG.bytes(3 * GAP // GROUP) for _ in range(ROWS)],
        "pair": [[at, -at] for at in range(ROWS)],
        "at": np.arange(ROWS),
        "text": [f"row {at % 7}" for at in range(ROWS)],
    }
)


@pytest.fixture(scope="module", autouse=True)
def own_thread_of_fsspec() -> None:
    """Start fsspec's loop, which lasts as long as the process."""
    fsspec.asyn.get_loop()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two files of the table, by name."""
    folder, half = tmp_path_factory.mktemp("tables"), ROWS // 2
    for number in range(2):
        part = TABLE.slice(number * half, half)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=GROUP)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows(pipe: ps.Pipeline) -> list[Any]:
    with pipe.batch(32, collate_fn=list) as batches:
        return [row for batch in batches for row in batch]


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("columns", [None, ["at", "x"], ["pair"]])
def test_rows_are_those_of_the_files(
    columns: list[str] | None, executor: Any, files: dict[str, bytes]
) -> None:
    table = TABLE if columns is None else TABLE.select(columns)
    with served(files, latency_s=0) as store:
        urls = [f"{store.url}/{name}" for name in files]
        pipe = ps.Pipeline.from_parquet(
            urls, columns, executor=executor, num_parallel_workers=3
        )
        assert rows(pipe) == table.to_pylist()


def test_a_group_is_one_request_and_what_is_not_wanted_stays_there(
    files: dict[str, bytes],
) -> None:
    for columns, requests in ((None, 1), (["pair", "at", "text"], 1), (["x", "at"], 2)):
        with served(files, latency_s=0) as store:
            urls = [f"{store.url}/{name}" for name in files]
            pipe = ps.Pipeline.from_parquet(urls, columns, executor="inline")
            before, sent_bytes = store.asked.total(), store.sent.total()
            rows(pipe)
            ends = len(files)  # this process reads the end of each file once more
            assert store.asked.total() - before - ends == 12 * requests
            if columns is not None:
                assert store.sent.total() - sent_bytes < 12 * GAP + ends * (1 << 17)


def test_shuffled_batches_are_those_of_local_files(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    def batches(pipe: ps.Pipeline) -> list[Any]:
        with pipe.shuffle(seed=1, window=3).batch(16) as batched:
            return [batch["at"] for batch in batched]

    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    here = batches(ps.Pipeline.from_parquet(str(tmp_path / "*.parquet"), ["at"]))
    faults = {name: [503, "reset", "short"] for name in files}
    with served(files, faults=faults) as store:  # type: ignore[arg-type]
        urls = f"{store.url}/{{0..1}}.parquet"
        there = batches(ps.Pipeline.from_parquet(urls, ["at"]))
    assert len(here) == len(there)
    assert all(map(torch.equal, here, there))


def test_a_server_without_parts_is_refused(files: dict[str, bytes]) -> None:
    with served(files, latency_s=0, parts=False) as store:
        url = f"{store.url}/0.parquet"
        with pytest.raises(ps.SpecError, match="came whole"):
            ps.Pipeline.from_parquet(url)


def test_what_is_no_table_is_refused() -> None:
    with served({"a.parquet": b"no table"}, latency_s=0) as store:
        url = f"{store.url}/a.parquet"
        with pytest.raises(ps.SpecError, match="give Parquet files"):
            ps.Pipeline.from_parquet(url)
        with pytest.raises((ps.SpecError, FileNotFoundError), match=r"b\.parquet"):
            ps.Pipeline.from_parquet(f"{store.url}/b.parquet")
