"""Rows of tables are what pyarrow says, and batches what torch makes of these rows."""

from __future__ import annotations

import datetime as dt
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import penstock as ps
from penstock.pipeline.sources.columnar import Arrow, Columnar, Parquet
from penstock.pipeline.sources.row_groups import RowGroup, RowGroups
from support.equal import equal

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, GROUP = 500, 64
RNG = np.random.default_rng(0)


def numbers() -> dict[str, Any]:
    """Columns of each type of numbers."""
    names = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
    ints = {name: RNG.integers(0, 100, ROWS).astype(name) for name in names}
    floats = {name: RNG.random(ROWS).astype(name) for name in ("float32", "float64")}
    more = {"again": RNG.random(ROWS).astype("float32"), "bool": RNG.random(ROWS) < 0.5}
    return {**ints, **floats, **more}


def others() -> dict[str, Any]:
    """Columns that are no plain numbers."""
    day = dt.date(2026, 1, 1)
    return {
        "text": [f"row {at}" for at in range(ROWS)],
        "bytes": [bytes([at % 256]) for at in range(ROWS)],
        "pair": [[at, at + 1] for at in range(ROWS)],
        "huge": pa.array(np.arange(ROWS), pa.uint64()),
        "half": RNG.random(ROWS).astype("float16"),
        "day": [day + dt.timedelta(at) for at in range(ROWS)],
        "struct": [{"a": at, "b": str(at)} for at in range(ROWS)],
        "word": pa.array([f"w{at % 3}" for at in range(ROWS)]).dictionary_encode(),
    }


def gaps() -> dict[str, Any]:
    """Columns without a value in one place, or in one group of rows."""
    one: list[Any] = list(range(ROWS))
    one[5] = None
    group: list[Any] = [float(at) for at in range(ROWS)]
    group[GROUP : 2 * GROUP] = [None] * GROUP
    return {"one": one, "group": group, "full": np.arange(ROWS)}


def written(kind: str, columns: dict[str, Any], folder: Path) -> tuple[Columnar, Any]:
    """Return the rows of a file, and its table."""
    table, path = pa.table(columns), str(folder / "table")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=GROUP)
        return Parquet.find(path, None, 4), table
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=GROUP)
    return Arrow.find(path, None, 4), table


tables = pytest.mark.parametrize("make", [numbers, others, gaps])
kinds = pytest.mark.parametrize("kind", ["parquet", "arrow"])
ORDERS = (
    range(ROWS),
    range(70, 90),
    range(GROUP, 2 * GROUP),
    [3],
    [5, 3, 5, 499, 0, 130],
    RNG.permutation(ROWS).tolist(),
)


def typed(value: Any) -> Any:
    """Return a value with the types within it, to be compared."""
    if isinstance(value, dict):
        return {name: typed(part) for name, part in value.items()}
    return type(value), value


@kinds
@tables
def test_rows_are_those_of_the_table(kind: str, make: Any, tmp_path: Path) -> None:
    source, table = written(kind, make(), tmp_path)
    for order in ORDERS:
        rows = source.__getitems__(list(order))
        expected = table.take(list(order)).to_pylist()
        assert len(rows) == len(expected)
        assert [*map(typed, rows)] == [*map(typed, expected)]
        assert [typed(rows[at]) for at in range(len(rows))] == [*map(typed, expected)]
        assert [*map(typed, rows[1:3])] == [*map(typed, expected[1:3])]
    assert typed(source[7]) == typed(table.slice(7, 1).to_pylist()[0])
    with pytest.raises(IndexError, match="row 500 of 500"):
        source.__getitems__([0, ROWS])
    with pytest.raises(IndexError, match="row -1 of 500"):
        source.__getitems__([-1])
    assert len(source.__getitems__([])) == 0


@kinds
@tables
def test_rows_of_groups_that_are_wanted_together_again_and_again(
    kind: str, make: Any, tmp_path: Path
) -> None:
    source, table = written(kind, make(), tmp_path)
    rng, groups = np.random.default_rng(1), len(source.group_sizes)
    for _ in range(8):
        few = rng.choice(groups, 3, replace=False)
        rows = np.concatenate([np.arange(ROWS)[g * GROUP :][:GROUP] for g in few])
        rng.shuffle(rows)
        for order in np.array_split(rows, 4):
            expected = table.take(order).to_pylist()
            samples = source.__getitems__(order)
            assert [*map(typed, samples)] == [*map(typed, expected)]


def test_threads_that_want_the_same_groups_read_each_of_them_once() -> None:
    table, loads = pa.table(numbers()), Counter[int]()
    sizes = [GROUP] * (ROWS // GROUP)

    def load(number: int) -> RowGroup:
        loads[number] += 1
        return RowGroup.of(table.slice(number * GROUP, GROUP), mapped=False)

    rows = RowGroups(sizes, load, len(sizes), mapped=False)
    orders = [np.random.default_rng(at).permutation(len(rows)) for at in range(8)]
    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(rows, orders))
    for order, batch in zip(orders, batches, strict=True):
        assert [*map(typed, batch)] == [*map(typed, table.take(order).to_pylist())]
    assert loads == Counter(range(len(sizes)))


def test_a_group_that_cannot_be_read_fails_its_own_rows_alone() -> None:
    table, broken = pa.table({"at": range(100)}), False

    def load(number: int) -> RowGroup:
        if broken and number == 7:
            raise OSError("group 7")
        return RowGroup.of(table.slice(number * 10, 10), mapped=False)

    rows = RowGroups([10] * 10, load, 4, mapped=False)
    for _ in range(2):
        rows([*range(0, 100, 10)])  # wanted together twice
    broken = True
    assert [*rows([1, 41])] == [{"at": 1}, {"at": 41}]
    assert [*rows([1])] == [{"at": 1}]
    with pytest.raises(OSError, match="group 7"):
        rows([1, 71])


def test_of_columns_with_one_name_a_row_has_the_last() -> None:
    for columns in ([[1, 2], ["x", "y"]], [["x", "y"], [1, 2]]):
        table = pa.table([*map(pa.array, columns)], names=["a", "a"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pyarrow says so
            expected = [dict(zip(["a", "a"], row)) for row in zip(*columns)]  # noqa: B905
        assert [*RowGroup.of(table, mapped=False).rows(np.arange(2))] == expected


@kinds
@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("names", [None, ["text", "pair", "huge"]])
def test_batches_are_those_that_torch_makes_of_the_rows(
    kind: str, executor: Any, names: list[str] | None, tmp_path: Path
) -> None:
    columns = numbers() if names is None else {n: others()[n] for n in names}
    columns["at"] = np.arange(ROWS)
    source, table = written(kind, columns, tmp_path)
    rows = table.to_pylist()
    reader = ps.Pipeline.from_dataset(source, executor=executor, num_parallel_workers=2)
    with reader.shuffle(seed=3).batch(48) as pipe:
        batches = list(pipe)
    for batch in batches:
        assert equal(batch, default_collate([rows[at] for at in batch["at"].tolist()]))
    assert sorted(torch.cat([b["at"] for b in batches]).tolist()) == [*range(ROWS)]


def test_files_may_differ_in_a_columns_type(tmp_path: Path) -> None:
    contents = [{"a": [1, 2]}, {"a": [0.5, 1.5]}, {"a": ["text", "more"]}]
    paths = [str(tmp_path / str(at)) for at in range(3)]
    for path, columns in zip(paths, contents, strict=True):
        pq.write_table(pa.table(columns), path)
    rows = Parquet.find(paths, None, 4).__getitems__([5, 0, 3, 1])
    expected = ["more", 1, 1.5, 2]
    assert [typed(row["a"]) for row in rows] == [*map(typed, expected)]


def test_files_may_have_different_columns(tmp_path: Path) -> None:
    contents = [{"a": [1, 2]}, {"a": [3, 4], "w": [0.5, 1.5]}, {"t": ["x", "y"]}]
    paths = [str(tmp_path / str(at)) for at in range(3)]
    for path, columns in zip(paths, contents, strict=True):
        pq.write_table(pa.table(columns), path)
    rows = Parquet.find(paths, None, 4).__getitems__([5, 0, 3, 1])
    assert list(rows) == [{"t": "y"}, {"a": 1}, {"a": 4, "w": 1.5}, {"a": 2}]


@pytest.mark.skipif(not hasattr(pa, "string_view"), reason="an older pyarrow")
def test_columns_of_views_are_read(tmp_path: Path) -> None:
    text = pa.array(["one", "two", None, "four"], pa.string_view())
    table = pa.table({"text": text, "at": [0, 1, 2, 3]})
    path = str(tmp_path / "table")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    source = Arrow.find(path, None, 4)
    for order in ([3, 0, 2], [1], [1, 2]):
        expected = [table.to_pylist()[at] for at in order]
        assert list(source.__getitems__(order)) == expected


def test_a_filter_keeps_the_rows_that_it_was_shown(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(10))}), tmp_path / "table")
    reader = ps.Pipeline.from_parquet(str(tmp_path / "table"))
    odd_rows = reader.filter(lambda row: row.setdefault("odd", row["a"] % 2) == 1)
    with odd_rows.map(lambda row: row["odd"]).batch(5) as pipe:
        assert torch.cat(list(pipe)).tolist() == [1] * 5


def test_rows_may_have_no_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "table")
    source = Parquet.find(str(tmp_path / "table"), [], 4)
    assert list(source.__getitems__([1, 0])) == [{}, {}]


def test_numbers_that_torch_refuses_are_refused(tmp_path: Path) -> None:
    huge = {"huge": pa.array([2**63] * 8, pa.uint64())}
    for columns, error in ((gaps(), "NoneType"), (huge, "Overflow|int too big")):
        source, _ = written("parquet", columns, tmp_path)
        pipe = ps.Pipeline.from_dataset(source).batch(8)
        with pytest.raises(Exception, match=error), pipe:
            list(pipe)


def test_maps_get_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, table = written("parquet", {**numbers(), **others()}, tmp_path)
    caplog.set_level("INFO", "penstock")
    rows = []

    def look(row: Any) -> int:
        rows.append(row)
        return int(row["int64"])

    reader = ps.Pipeline.from_dataset(source, executor="inline")
    looks = reader.map(look, executor="inline", name="looks")
    with looks.batch(16) as pipe:
        values = torch.cat(list(pipe)).tolist()
    lines = [m for m in caplog.messages if "looks gets rows of a table" in m]
    assert len(lines) == 1
    assert "a dict of 19 columns" in lines[0]
    assert values == table.column("int64").to_pylist()
    assert [*map(typed, rows)] == [*map(typed, table.to_pylist())]


def test_maps_after_batch_get_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, table = written("parquet", numbers(), tmp_path)
    caplog.set_level("INFO", "penstock")
    reader = ps.Pipeline.from_dataset(source, executor="inline")
    with reader.batch(16).map(lambda batch: batch["int64"] * 2) as pipe:
        values = torch.cat(list(pipe)).tolist()
    assert values == [2 * value for value in table.column("int64").to_pylist()]
    assert not [m for m in caplog.messages if "gets rows" in m]


def test_a_cache_of_rows_that_are_read_faster_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = written("parquet", numbers(), tmp_path)
    reader = ps.Pipeline.from_dataset(source, executor="inline", name="rows")
    cached_pipe = reader.cache(ram="8MB").batch(16)
    with cached_pipe:
        list(cached_pipe)
    line = "Cache(ID:1) keeps each row of Parquet(ID:0) rows, which takes longer"
    assert line in caplog.text
    caplog.clear()
    with reader.map(dict).cache(ram="8MB").batch(16) as computed_pipe:
        list(computed_pipe)
    assert "keeps each row" not in caplog.text
