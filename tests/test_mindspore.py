"""A script written for MindSpore runs with one import changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock.mindspore as ds
from penstock.errors import SpecError
from support import warm

SCRIPT = """\
import numpy as np
import penstock.mindspore as ds

ds.config.set_seed(1)
ds.config.set_num_parallel_workers(2)
ds.config.set_enable_autotune(True, "log/run")

class Digits:
    def __init__(self):
        self.images = np.arange(48, dtype=np.float32).reshape(12, 2, 2)
    def __len__(self):
        return len(self.images)
    def __getitem__(self, index):
        return self.images[index], np.int32(index)

data = ds.GeneratorDataset(Digits(), ["image", "label"], shuffle=True)
data = data.map(operations=[lambda image: image / 255], input_columns="image")
data = data.batch(4, drop_remainder=True)
print(data.get_dataset_size())
rows = data.create_dict_iterator(num_epochs=2, output_numpy=True)
for epoch in range(2):
    for row in rows:
        print(row["image"].shape, sorted(row), row["label"].dtype)
"""


def test_a_script_runs_with_one_import_changed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done: subprocess.CompletedProcess[str] = warm.run(
        [sys.executable, "-P", "train.py"], cwd=tmp_path, brief=True
    )
    assert done.returncode == 0, done.stderr
    size, *rows = done.stdout.splitlines()
    assert size == "3"
    assert rows == ["(4, 2, 2) ['image', 'label'] int32"] * 6
    assert (tmp_path / "log" / "run_0.json").exists()


class Points:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.float32(index), index % 2


def columns(data: ds.Dataset) -> list[Any]:
    return [[each.tolist() for each in row] for row in data.create_tuple_iterator()]


def ordered() -> ds.Dataset:
    return ds.GeneratorDataset(Points(), ["x", "label"], shuffle=False)


def test_data_with_an_index_is_shuffled_by_default() -> None:
    shuffled = ds.GeneratorDataset(Points(), ["x", "label"]).batch(10)
    first, second = columns(shuffled), columns(shuffled)
    assert first != second
    assert sorted(first[0][0]) == columns(ordered().batch(10))[0][0]
    shuffled.close()


def test_a_map_replaces_splits_and_joins_columns() -> None:
    same = ordered().map(lambda x: x + 1, "x").batch(2)
    assert columns(same)[0] == [[1.0, 2.0], [0, 1]]
    split = ordered().map(lambda x: (x, -x), "x", ["a", "b"]).batch(2)
    assert split.get_col_names() == ["a", "b", "label"]
    assert columns(split)[0] == [[0.0, 1.0], [0.0, -1.0], [0, 1]]
    joined = ordered().map([lambda x, y: x + y, np.sqrt], ["x", "label"], "sum")
    assert joined.get_col_names() == ["sum"]
    (found,) = columns(joined.batch(2))[0]
    assert found == pytest.approx([0.0, 2.0**0.5])


def test_columns_are_tensors_or_arrays_and_may_be_selected() -> None:
    data = ordered().batch(5)
    (row, _) = data.create_dict_iterator()
    assert isinstance(row["x"], torch.Tensor)
    (array, _) = data.create_dict_iterator(output_numpy=True)
    assert isinstance(array["x"], np.ndarray)
    picked = [[*row] for row in data.create_tuple_iterator(columns=["label"])]
    assert [len(each) for each in picked] == [1, 1]


def test_a_generator_function_is_called_for_each_epoch() -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)

    data = ds.GeneratorDataset(numbers, "x").batch(2)
    assert [columns(data) for _ in range(2)] == [[[[0, 1]], [[2, 3]], [[4]]]] * 2


def test_ranks_share_an_epoch() -> None:
    seen = []
    for rank in range(2):
        part: Any = {"num_shards": 2, "shard_id": rank, "shuffle": False}
        data = ds.GeneratorDataset(Points(), ["x", "y"], **part)
        seen += [x for xs, _ in columns(data.batch(5)) for x in xs]
    assert sorted(seen) == list(range(10))


def test_class_folders_are_images_and_labels(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6), "red").save(tmp_path / name / "1.jpg")
    data = ds.ImageFolderDataset(tmp_path, shuffle=False, decode=True).batch(2)
    ((images, labels),) = columns(data)
    assert np.shape(images) == (2, 6, 8, 3)
    assert labels == [0, 1]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ds.MindDataset, "MindDataset"),
        (lambda: ds.NumpySlicesDataset, "TensorDataset"),
        (lambda: ordered().zip, "StackDataset"),
        (lambda: ordered().skip, "select"),
        (lambda: ordered().nothing, "see penstock.Pipeline"),
        (lambda: ds.config.set_numa_enable, "set_numa_enable"),
        (lambda: ds.config.set_error_samples_mode, "on_error='substitute'"),
    ],
)
def test_an_unsupported_call_names_its_replacement(call: Any, told: str) -> None:
    with pytest.raises(AttributeError, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ordered().map(abs, "y"), "there is no column 'y'"),
        (lambda: ordered().map(abs, cache=1), "`cache` is not supported"),
        (lambda: ordered().batch(2, per_batch_map=abs), "`per_batch_map` is not"),
        (lambda: ordered().repeat(), "needs a count > 0"),
        (lambda: next(iter(ordered())), "end it with .batch"),
        (lambda: ds.GeneratorDataset(Points(), "x", sampler=1), "`sampler` is not"),
        (lambda: ds.GeneratorDataset(Points(), "x", num_shards=2), "go together"),
    ],
)
def test_a_call_that_would_load_something_else_is_refused(call: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        call()
