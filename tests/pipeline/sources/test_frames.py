"""Tables in memory are datasets of rows, and batches what torch makes of these."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

import penstock as ps
from penstock.engine.batch.array_rows import columns_of
from penstock.errors import SpecError

ROWS = 100
RNG = np.random.default_rng(0)


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(
            equal(ours[name], theirs[name]) for name in theirs
        )
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


def batches_agree(data: Any, rows: list[Any], executor: Any = "thread") -> None:
    """Check batches of a shuffled pipeline against torch's of the same rows."""
    workers = None if executor == "inline" else 2
    pipe = ps.Pipeline.from_dataset(
        data, executor=executor, num_parallel_workers=workers
    )
    with pipe.shuffle(seed=2).batch(16) as batched:
        batches = list(batched)
    for batch in batches:
        wanted = default_collate([rows[at] for at in batch["at"].tolist()])
        assert equal(batch, wanted)
    assert sorted(torch.cat([b["at"] for b in batches]).tolist()) == [*range(ROWS)]


def arrays() -> dict[str, Any]:
    return {
        "x": RNG.random((ROWS, 3)),
        "at": torch.arange(ROWS),
        "y": np.arange(ROWS, dtype=np.float32),
    }


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_a_dict_of_arrays_is_a_table(executor: Any) -> None:
    columns = arrays()
    rows = StackDataset(**columns)
    batches_agree(columns, [rows[at] for at in range(ROWS)], executor)


def test_a_stack_of_arrays_is_read_by_column() -> None:
    x, at = arrays()["x"], torch.arange(ROWS)
    for data in (StackDataset(x, at), Subset(StackDataset(x, at), [*range(5, 95)])):
        with ps.Pipeline.from_dataset(data).batch(7) as pipe:
            found = list(pipe)
        rows = [data[at] for at in range(len(data))]
        wanted = [default_collate(rows[at : at + 7]) for at in range(0, len(rows), 7)]
        assert equal(found, wanted)
    assert columns_of(StackDataset(x, at)) is not None
    assert columns_of(StackDataset(x, TensorDataset(at))) is None
    assert columns_of(StackDataset(x, [*range(ROWS)])) is None


def test_a_dict_by_number_is_a_dataset_of_its_values() -> None:
    data = {at: np.full(2, at) for at in range(6)}
    with ps.Pipeline.from_dataset(data).batch(3) as pipe:
        assert [batch.tolist() for batch in pipe] == [
            [[0, 0], [1, 1], [2, 2]],
            [[3, 3], [4, 4], [5, 5]],
        ]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises((SpecError, ValueError), match=r"(?i)size mismatch|length"):
        ps.Pipeline.from_dataset({"x": np.zeros(3), "y": np.zeros(4)})


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_data_frame_has_the_rows_of_its_records(executor: Any) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "at": np.arange(ROWS),
            "x": RNG.random(ROWS).astype(np.float32),
            "odd": np.arange(ROWS) % 2 == 1,
            "text": [f"row {at}" for at in range(ROWS)],
            "kind": pandas.Categorical([f"k{at % 3}" for at in range(ROWS)]),
            "pair": [[at, -at] for at in range(ROWS)],
        }
    )
    batches_agree(frame, frame.to_dict("records"), executor)


def test_missing_numbers_of_a_data_frame_stay_nan() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, math.nan]})
    with ps.Pipeline.from_dataset(frame).batch(2) as pipe:
        (batch,) = pipe
    assert torch.equal(batch["x"].isnan(), torch.tensor([False, True]))


def test_tables_of_pyarrow_and_polars() -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {"at": np.arange(ROWS), "t": [str(at) for at in range(ROWS)]}
    table = pa.table(columns)
    parts = pa.Table.from_batches(table.to_batches(max_chunksize=7))
    for data in (table, parts, table.to_batches()[0]):
        batches_agree(data, table.to_pylist())
    polars = pytest.importorskip("polars")
    batches_agree(polars.DataFrame(columns), table.to_pylist())


@pytest.fixture(scope="module")
def what_a_process_makes_once() -> None:
    """Make the locks of datasets and tqdm now, without a thread that watches bars."""
    pytest.importorskip("tqdm.std").tqdm.monitor_interval = 0
    chosen = plain().remove_columns(["gap", "t"]).shuffle(seed=1).select(range(40))
    assert len(chosen.with_format("torch", columns=["x"])[:2]["x"]) == 2


def plain() -> Any:
    """A dataset of plain columns; some of its values are missing."""
    datasets = pytest.importorskip("datasets")
    columns = {
        "at": [*range(ROWS)],
        "x": RNG.random(ROWS).tolist(),
        "t": [str(at) for at in range(ROWS)],
        "gap": [None if at % 3 else at for at in range(ROWS)],
    }
    return datasets.Dataset.from_dict(columns)


@pytest.mark.usefixtures("what_a_process_makes_once")
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_datasets_of_hugging_face_are_read_by_column(executor: Any) -> None:
    data = plain().remove_columns("gap")
    batches_agree(data, [*data], executor)
    chosen = plain().shuffle(seed=1).select(range(40)).rename_column("x", "z")
    for each in (chosen, chosen.select_columns(["t", "gap"])):
        with ps.Pipeline.from_dataset(each).map(dict).batch(8, collate_fn=list) as pipe:
            assert [row for batch in pipe for row in batch] == [*each]


@pytest.mark.usefixtures("what_a_process_makes_once")
def test_a_format_that_is_set_later_counts() -> None:
    data = plain().remove_columns(["gap", "t"])
    pipe = ps.Pipeline.from_dataset(data, executor="inline").batch(50)
    data.set_format("torch", columns=["x"])
    with pipe:
        batches = list(pipe)
    assert {*batches[0]} == {"x"}
    assert batches[0]["x"].dtype == torch.float32
