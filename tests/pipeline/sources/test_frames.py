"""Tables in memory are datasets of rows, and batches what torch makes of these."""

from __future__ import annotations

import math
import sys
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torchs
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

import penstock as ps
from penstock.engine.batch.array_rows import columns_of
from penstock.errors import SpecError
from support.equal import equal

ROWS = 100
RNG = np.random.default_rng(0)


def batches_agree(data: Any, rows: list[Any], executor: Any = "thread") -> None:
    """Check batches of a shuffled pipeline against torch's of the same rows."""
    workers = None if executor == "inline" else 2
    pipe = ps.Pipeline.from_dataset(
        data, executor=executor, num_parallel_workers=workers
    )
    with pipe.shuffle(seed=2).batch(16) as batched:
        batches = list(batched)
    for batch in batches:
        expected = default_collate([rows[at] for at in batch["at"].tolist()])
        assert equal(batch, expected)
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
            batches = list(pipe)
        rows = [data[at] for at in range(len(data))]
        expected = [default_collate(rows[at : at + 7]) for at in range(0, len(rows), 7)]
        assert equal(batches, expected)
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
    with pytest.raises(SpecError, match="one length"):
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
    selection = plain().remove_columns(["gap", "t"]).shuffle(seed=1).select(range(40))
    assert len(selection.with_format("torch", columns=["x"])[:2]["x"]) == 2


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
    selection = plain().shuffle(seed=1).select(range(40)).rename_column("x", "z")
    for view in (selection, selection.select_columns(["t", "gap"])):
        with ps.Pipeline.from_dataset(view).map(dict).batch(8, collate_fn=list) as pipe:
            assert [row for batch in pipe for row in batch] == [*view]


@pytest.mark.usefixtures("what_a_process_makes_once")
def test_a_format_that_is_set_later_counts() -> None:
    data = plain().remove_columns(["gap", "t"])
    pipe = ps.Pipeline.from_dataset(data, executor="inline").batch(50)
    data.set_format("torch", columns=["x"])
    with pipe:
        batches = list(pipe)
    assert {*batches[0]} == {"x"}
    assert batches[0]["x"].dtype == torch.float32


def changing(rows: Any) -> Any:
    """A `collate_fn` that takes what torch hands it for a list, and changes rows."""
    assert type(rows) is list
    for row in rows:
        row["twice"] = row["at"] * 2
        row.pop("x")
    return default_collate(rows)


@pytest.mark.usefixtures("what_a_process_makes_once")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["hub", "stack"])
def test_a_collate_fn_gets_what_torch_hands_it(kind: str, workers: int) -> None:
    data = plain().remove_columns(["gap", "t"])
    if kind == "stack":
        data = StackDataset(at=torch.arange(ROWS), x=RNG.random(ROWS))
    ps.set_enable_autotune(True)
    options: Any = {"batch_size": 8, "num_workers": workers, "collate_fn": changing}
    with ps.DataLoader(data, thread_safe=True, **options) as ours:
        batches = list(ours)
    assert equal(
        batches, list(torchs.DataLoader(data, batch_size=8, collate_fn=changing))
    )


@pytest.mark.usefixtures("what_a_process_makes_once")
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("drawn", [[3, 1], [-1, 0], [True, False], [0, 100]])
def test_any_indices_mean_what_they_mean_to_hugging_face(
    drawn: list[Any], *, chosen: bool
) -> None:
    data = plain().remove_columns("gap")
    data = data.shuffle(seed=1).select(range(10)) if chosen else data

    def outcome(loader: Any) -> Any:
        try:
            return list(loader(data, batch_size=2, sampler=drawn))
        except Exception as error:  # noqa: BLE001 torch's is compared
            return type(error), str(error).partition("\n")[0]

    assert equal(outcome(ps.DataLoader), outcome(torchs.DataLoader))


def test_a_module_of_the_users_may_be_called_datasets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dataset(list[int]):
        """One of a name that Hugging Face uses, too."""

    module = types.ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    for _ in range(2):
        with ps.Pipeline.from_dataset(Dataset(range(6))).batch(3) as pipe:
            assert torch.cat(list(pipe)).tolist() == [*range(6)]
        module.Dataset = Dataset  # type: ignore[attr-defined]


def test_odd_columns_of_a_data_frame_have_the_values_of_its_records() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "object": pandas.Series([np.float32(1.5), np.int32(2), None], dtype=object),
            "text": pandas.array(["a", None, "c"], dtype="string"),
            "gaps": pandas.array([1, None, 3], dtype="Int64"),
            "when": pandas.to_datetime(["2026-01-01", None, "2026-01-03"]),
            "huge": np.array([1, 2**63 + 5, 3], np.uint64),
            "half": np.array([1, 2, 3], np.float16),
            7: [1, 2, 3],
        }
    )
    twice = pandas.concat([frame[["half"]], frame[["text"]]], axis=1)
    twice.columns = ["same", "same"]
    for table in (frame, twice):
        rows = ps.Pipeline.from_dataset(table).batch(3, collate_fn=list)
        with warnings.catch_warnings(), rows:
            warnings.simplefilter("ignore")  # pandas says that names are not unique
            (batch,), records = list(rows), table.to_dict("records")
        kinds = [[*map(type, row.values())] for row in batch]
        assert repr(batch) == repr(records)
        assert kinds == [[*map(type, row.values())] for row in records]
    huge = ps.Pipeline.from_dataset(frame[["huge"]]).batch(3)
    with pytest.raises(Exception, match=r"(?i)overflow|too large"), huge:
        list(huge)


def test_a_data_frame_may_change_afterwards() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "t": ["x", "y"]})
    pipe = ps.Pipeline.from_dataset(frame).batch(2)
    frame.loc[0, "a"], frame.loc[0, "t"] = 99, "changed"
    with pipe:
        (batch,) = pipe
    assert (batch["a"].tolist(), batch["t"]) == ([1, 2], ["x", "y"])


def test_a_column_of_a_batch_owns_its_memory() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({f"c{at}": np.arange(64) for at in range(5)})
    with ps.Pipeline.from_dataset(table, executor="thread").batch(32) as pipe:
        batch = next(iter(pipe))
    for column in batch.values():
        assert column.untyped_storage().nbytes() == 32 * 8


def test_lone_readers_of_a_table_may_be_more(caplog: pytest.LogCaptureFixture) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"at": np.arange(64)})
    source = ps.Pipeline.from_dataset(table, num_parallel_workers=1)
    with source.shuffle(seed=0).batch(8) as pipe:
        assert len(list(pipe)) == 8
    assert caplog.text == ""


def test_the_indices_of_a_subset_may_be_an_object_that_wants_ints() -> None:
    class Reversed(list[int]):
        def __getitem__(self, at: Any) -> Any:
            assert type(at) is int
            return list.__getitem__(self, len(self) - 1 - at)

    data = Subset(TensorDataset(torch.arange(10)), Reversed(range(10)))
    with ps.Pipeline.from_dataset(data).batch(5) as pipe:
        batches = [tensor.tolist() for (tensor,) in pipe]
    assert batches == [[9, 8, 7, 6, 5], [4, 3, 2, 1, 0]]


def test_a_dict_that_is_no_table_is_refused() -> None:
    for data in ({"self": np.zeros(3)}, {"x": [1, 2]}, {}):
        with pytest.raises(SpecError):
            ps.Pipeline.from_dataset(data)
