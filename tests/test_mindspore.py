"""A script written for MindSpore runs with one import changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mindspore_files import (
    write_cifar,
    write_folders,
    write_mnist,
)
from mindspore_peer import columns
from PIL import Image

import penstock.mindspore as ds
from penstock.errors import SpecError
from penstock.mindspore import settings
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
    process: subprocess.CompletedProcess[str] = warm.run(
        [sys.executable, "-P", "train.py"], cwd=tmp_path, brief=True
    )
    assert process.returncode == 0, process.stderr
    size, *rows = process.stdout.splitlines()
    assert size == "3"
    assert rows == ["(4, 2, 2) ['image', 'label'] int32"] * 6
    assert (tmp_path / "log" / "run_0.json").exists()


class Points:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.float32(index), index % 2


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
    sums = ordered().map([lambda x, y: x + y, np.sqrt], ["x", "label"], "sum")
    assert sums.get_col_names() == ["sum"]
    (values,) = columns(sums.batch(2))[0]
    assert values == pytest.approx([0.0, 2.0**0.5])


def test_columns_are_tensors_or_arrays_and_may_be_selected() -> None:
    data = ordered().batch(5)
    (row, _) = data.create_dict_iterator()
    assert isinstance(row["x"], torch.Tensor)
    (array, _) = data.create_dict_iterator(output_numpy=True)
    assert isinstance(array["x"], np.ndarray)
    rows = [[*row] for row in data.create_tuple_iterator(columns=["label"])]
    assert [len(row) for row in rows] == [1, 1]


def test_a_generator_function_is_called_for_each_epoch() -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)

    data = ds.GeneratorDataset(numbers, "x").batch(2)
    assert [columns(data) for _ in range(2)] == [[[[0, 1]], [[2, 3]], [[4]]]] * 2


def test_ranks_share_an_epoch() -> None:
    values = []
    for rank in range(2):
        part: Any = {"num_shards": 2, "shard_id": rank, "shuffle": False}
        data = ds.GeneratorDataset(Points(), ["x", "y"], **part)
        values += [x for xs, _ in columns(data.batch(5)) for x in xs]
    assert sorted(values) == list(range(10))


def test_class_folders_are_images_and_labels(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 6), "red").save(tmp_path / name / "1.jpg")
    data = ds.ImageFolderDataset(tmp_path, shuffle=False, decode=True).batch(2)
    ((images, labels),) = columns(data)
    assert np.shape(images) == (2, 6, 8, 3)
    assert labels == [0, 1]


class Images:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, str]:
        return np.full((2, 3), index, np.uint8), f"{index}.jpg"


def named() -> ds.Dataset:
    return ds.GeneratorDataset(Images(), ["image", "name"], shuffle=False)


def test_what_loops_yield_can_be_asked_for_its_array() -> None:
    for data in (named().batch(2), named()):
        row = next(data.create_dict_iterator())
        assert isinstance(row["image"], torch.Tensor)
        assert isinstance(row["image"].asnumpy(), np.ndarray)
        assert row["image"].asnumpy().base is not row["image"].sum().numpy()
        assert type(row["image"] + 1) is torch.Tensor
        assert type(row["name"].asnumpy()) is np.ndarray
    assert row["name"].asnumpy() == "0.jpg"


def test_text_is_batched_as_an_array() -> None:
    lists = ds.GeneratorDataset([(["a", "b"],), (["ccc", "d"],)], "x", shuffle=False)
    twice = lists.batch(1).map(np.char.upper, "x").batch(2)
    (row,) = twice.create_dict_iterator(num_epochs=1, output_numpy=True)
    assert row["x"].tolist() == [[["A", "B"]], [["CCC", "D"]]]


def test_loops_beside_each_other_see_all_rows() -> None:
    data = ordered().batch(5)
    sizes = [(len(xs), len(ys)) for [xs, _] in data for [_, ys] in data]
    assert sizes == [(5, 5)] * 4
    pairs = zip(data, data.create_tuple_iterator(["x"], num_epochs=1), strict=True)
    assert all(torch.equal(first[0], second[0]) for first, second in pairs)
    data.close()


def test_loops_beside_one_that_was_left_have_other_orders() -> None:
    data = ds.GeneratorDataset(Points(), ["x", "y"]).batch(10)
    loop = data.create_tuple_iterator()
    next(loop)
    first, second = columns(data), columns(data)
    assert first != second
    assert sorted(first[0][0]) == sorted(second[0][0])
    data.close()


def test_epochs_of_batches_are_repeated_by_the_pipeline_if_that_is_the_same() -> None:
    data = ds.GeneratorDataset(Points(), ["x", "y"])
    whole = data.batch(4, drop_remainder=True).repeat(3)
    assert "repeat(3)" in repr(whole.pipeline)
    assert len(whole) == 6
    passes = [x for xs, _ in columns(whole) for x in xs]
    assert [len({*passes[at : at + 8]}) for at in (0, 8, 16)] == [8] * 3
    assert "repeat" not in repr(data.batch(4).repeat(3).pipeline)
    assert len(columns(data.batch(4).repeat(3))) == 9
    assert len(columns(ordered().repeat().take(25))) == 25


def test_a_buffer_mixes_rows_differently_in_each_epoch() -> None:
    def numbers() -> Iterator[int]:
        yield from range(40)

    data = ds.GeneratorDataset(numbers, "x").shuffle(10).batch(40)
    first, second = columns(data), columns(data)
    assert first != second
    assert sorted(first[0][0]) == sorted(second[0][0]) == [*range(40)]
    early = first[0][0][:5]
    assert max(early) < 15


def test_operations_that_draw_get_the_generator_of_the_sample() -> None:
    def noise(x: Any, rng: np.random.Generator) -> Any:
        return x + rng.integers(1 << 30)

    def made(workers: int) -> Any:
        data = ordered().map([noise], "x", num_parallel_workers=workers).batch(5)
        return columns(data)

    assert made(1) == made(2)
    assert len({*made(1)[0][0]}) == 5


class Halves:
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


def test_samplers_of_torch_and_of_scripts_choose_rows() -> None:
    def chosen(sampler: Any) -> Any:
        return columns(
            ds.GeneratorDataset(Points(), ["x", "y"], sampler=sampler).batch(9)
        )

    assert chosen(Halves())[0][0] == [0, 2, 4, 6, 8]
    assert chosen(torch.utils.data.SequentialSampler(range(3)))[0][0] == [0, 1, 2]
    sampler = ds.WeightedRandomSampler([0, 1, 1] + [0] * 7, 9)
    data = ds.GeneratorDataset(Points(), ["x", "y"], sampler=sampler).batch(9)
    first, second = columns(data), columns(data)
    assert {*first[0][0]} <= {1, 2}
    assert first != second
    assert len(data) == 1


def test_a_sampler_of_classes_draws_from_each(tmp_path: Path) -> None:
    for name, count in (("ape", 5), ("cat", 1)):
        (tmp_path / name).mkdir()
        for at in range(count):
            Image.new("RGB", (4, 4)).save(tmp_path / name / f"{at}.png")
    data = ds.ImageFolderDataset(tmp_path, sampler=ds.PKSampler(3, shuffle=True))
    labels = [int(row[1]) for row in data]
    assert sorted(labels) == [0, 0, 0, 1, 1, 1]


def test_all_images_are_those_of_the_files_that_are_there(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar", "data_batch_3.bin", labels=1)
    assert len(ds.Cifar10Dataset(tmp_path / "cifar")) == 10_000
    with pytest.raises(SpecError, match="no test_batch.bin"):
        ds.Cifar10Dataset(tmp_path / "cifar", "test")
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").unlink()
    assert len(ds.MnistDataset(tmp_path / "mnist")) == 3
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(b"nothing of the kind")
    with pytest.raises(SpecError, match="is not an IDX file"):
        ds.MnistDataset(tmp_path / "mnist")


def test_settings_of_mindspores_engine_are_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings.note.cache_clear()
    for _ in range(2):
        ds.config.set_numa_enable(True)
    assert ds.config.get_numa_enable() is True
    for _ in range(2):
        ordered().map(abs, "x", cache=ds.DatasetCache(session_id=1, size=0))
    heads = [record.message.split(":")[0] for record in caplog.records]
    assert heads == [
        "config.set_numa_enable has no effect",
        "DatasetCache has no effect",
    ]


def test_a_dataset_can_be_described(tmp_path: Path) -> None:
    description = ds.serialize(ordered().batch(2), str(tmp_path / "data.json"))
    assert description == json.loads((tmp_path / "data.json").read_text())
    assert description["columns"] == ["x", "label"]
    assert ".batch(2)" in description["pipeline"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ds.CelebADataset, "CelebA"),
        (lambda: ds.CSVDataset, "pandas"),
        (lambda: ds.deserialize, "load_autotune"),
        (lambda: ds.text, "penstock.text"),
        (lambda: ds.audio, "functions of your own"),
        (lambda: ds.Nothing, "see penstock.Pipeline"),
        (lambda: ordered().device_que, "to_device"),
        (lambda: ordered().sync_wait, "on_batch"),
        (lambda: ordered().nothing, "see penstock.Pipeline"),
        (lambda: ds.config.set_nothing, "set_nothing"),
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
        (lambda: ordered().map(abs, callbacks=1), "`callbacks` is not an option"),
        (lambda: ordered().batch(2, padding=1), "`padding` is not an option"),
        (lambda: ordered().repeat(0), "needs a count > 0"),
        (lambda: ordered().take(-2), "needs a count > 0"),
        (lambda: ordered().skip(-2), "needs a count >= 0"),
        (lambda: ordered().rename("x", ["a", "b"]), "1 columns and 2 names"),
        (lambda: ordered().batch(2).use_sampler([1]), "before map"),
        (lambda: ds.DistributedSampler(2, 2), "the first shard is 0"),
        (lambda: eight(num_shards=0, shard_id=0), "got 0 of 0; the first shard is 0"),
        (lambda: ds.GeneratorDataset(Points(), "x", sampler=1), "must yield indices"),
        (lambda: ds.GeneratorDataset(Points(), "x", num_shards=2), "go together"),
        (lambda: ds.GeneratorDataset(1, "x"), "needs a dataset"),
        (lambda: ds.GeneratorDataset(Points(), "x", batch_sampler=1), "not an option"),
        (lambda: ds.GeneratorDataset(Counted(), "x", mixed=True), "not an option"),
        (lambda: ds.GeneratorDataset(Counted(), "x", num_samples=0), "must be > 0"),
        (lambda: list(eight().batch(lambda info: 0)), "returned 0 for batch 0"),
    ],
)
def test_a_call_that_would_load_something_else_is_refused(call: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        call()


# A dataset stays as it is, whatever is done with its rows, and asked of it.


def doubled(x: Any) -> Any:
    x *= 2
    return x


KINDS: dict[str, Any] = {
    "coco": (lambda at, **how: ds.CocoDataset(at, at / "coco.json", **how), "bbox"),
    "coco's bytes": (
        lambda at, **how: ds.CocoDataset(at, at / "coco.json", **how),
        "image",
    ),
    "mnist": (lambda at, **how: ds.MnistDataset(at / "mnist", **how), "image"),
    "folder": (
        lambda at, **how: ds.ImageFolderDataset(at / "images", **how),
        "image",
    ),
    "objects": (
        lambda _, **how: ds.GeneratorDataset([(np.ones(2),)] * 2, "x", **how),
        "x",
    ),
    "arrays": (
        lambda _, **how: ds.NumpySlicesDataset(np.ones((2, 2)), "x", **how),
        "x",
    ),
    "tfrecord": (
        lambda at, **how: ds.TFRecordDataset(str(at / "0.tfrecord"), **how),
        "img",
    ),
    "mindrecord": (
        lambda at, **how: ds.MindDataset(str(at / "one.mindrecord"), **how),
        "image",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_functions_may_change_arrays_in_place(tmp_path: Path, kind: str) -> None:
    write_folders(tmp_path)
    make, name = KINDS[kind]

    def epoch(data: ds.Dataset) -> list[Any]:
        rows = data.create_dict_iterator(num_epochs=1, output_numpy=True)
        return [row[name].tolist() for row in rows]

    before = epoch(make(tmp_path, shuffle=False))
    data = make(tmp_path, shuffle=False)
    changed = data.map(doubled, name)
    assert epoch(changed) == epoch(changed) != before
    for row in data.create_dict_iterator(num_epochs=1, output_numpy=True):
        row[name] += 1
    assert epoch(data) == before


def eight(**options: Any) -> ds.Dataset:
    return ds.NumpySlicesDataset(list(range(8)), ["a"], **options)


def stream() -> Iterator[int]:
    yield from range(8)


def taught(x: Any) -> bool:
    return bool(x < 7)


MADE: dict[str, Any] = {
    "batches": lambda: eight().batch(2),
    "a shard": lambda: eight(num_shards=2, shard_id=0).filter(taught).batch(2),
    "filtered": lambda: eight().filter(taught).batch(2),
    "drawn": lambda: eight(sampler=ds.RandomSampler(replacement=True)),
    "weighted": lambda: eight(sampler=ds.WeightedRandomSampler([1.0] * 8)),
    "of classes": lambda: eight().batch(3).skip(1),
    "mixed": lambda: ds.GeneratorDataset(stream, "a").shuffle(4).batch(2),
    "mixed batches": lambda: eight().batch(2).shuffle(3),
    "repeated": lambda: eight().batch(3).repeat(2),
    "sized": lambda: eight().batch(lambda info: 1 + info.get_epoch_num()),
    "zipped": lambda: ds.zip((eight().batch(2), eight().batch(2).rename("a", "b"))),
    "appended": lambda: eight().batch(3) + eight().filter(taught).batch(3),
}


def asked(data: ds.Dataset) -> None:
    data.output_shapes()
    data.output_types()
    data.get_dataset_size()


@pytest.mark.parametrize("kind", MADE)
def test_questions_change_no_epoch(kind: str) -> None:
    def epochs(act: Any) -> list[Any]:
        data, rounds = MADE[kind](), []
        act(data)
        for _ in range(2):
            rounds.append([])
            for row in data.create_tuple_iterator(num_epochs=1):
                rounds[-1].append([value.tolist() for value in row])
                act(data)
        data.close()
        return rounds

    untouched = epochs(lambda _: None)
    assert epochs(asked) == untouched
    assert untouched[0] != untouched[1]


@pytest.mark.parametrize("kind", MADE)
def test_a_reset_begins_at_the_first_epoch_again(kind: str) -> None:
    data = MADE[kind]()
    first = columns(data), columns(data)
    data.reset()
    assert (columns(data), columns(data)) == first
    data.close()


def test_a_loaded_state_continues_in_the_order_of_its_epoch() -> None:
    data, later = MADE["mixed"](), MADE["mixed"]()
    columns(data)
    rows = iter(data)
    next(rows)
    later.pipeline.load_state_dict(data.pipeline.state_dict())
    rest = [[value.tolist() for value in row] for row in rows]
    assert columns(later) == rest
    data.close()


def test_the_epoch_after_an_error_is_whole() -> None:
    broken = [True]

    def fails(x: Any) -> Any:
        if x == 5 and broken:
            raise KeyError(broken.pop())
        return x

    for data in (eight(shuffle=False), ds.GeneratorDataset(stream, "a")):
        broken[:] = [True]
        rows = data.map(fails, "a").batch(2).create_tuple_iterator(num_epochs=2)
        with pytest.raises(KeyError):
            list(rows)
        assert [len(list(rows)) for _ in range(2)] == [4, 4]
        with pytest.raises(RuntimeError, match="yielded all its epochs"):
            list(rows)


def test_a_dataset_and_its_renamed_copy_go_side_by_side() -> None:
    data = eight().batch(2)
    pairs = columns(ds.zip((data, data.rename("a", "b"))))
    assert len(pairs) == 4
    assert all(a == b for a, b in pairs)
    loops = zip(data, data.rename("a", "b"), strict=True)
    assert [len(a) for (a,), _ in loops] == [2] * 4


def test_a_renamed_column_keeps_its_name_in_each_pass() -> None:
    twice = eight(shuffle=False).batch(4).rename("a", "b").repeat(2)
    assert twice.get_col_names() == ["b"]
    assert columns(twice) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]] * 2


def test_a_function_of_batches_may_return_views() -> None:
    def views(values: Any, _: ds.BatchInfo) -> Any:
        return np.stack(values)[::-1], np.broadcast_to(np.int64(9), len(values))

    for data in (
        eight(shuffle=False).batch(4, per_batch_map=views, output_columns=["a", "b"]),
        eight(shuffle=False).batch(4).map(lambda a: views(a, None), "a", ["a", "b"]),
    ):
        assert columns(data)[1] == [[7, 6, 5, 4], [9] * 4]


def test_a_sampler_chooses_from_two_datasets() -> None:
    sampler = ds.RandomSampler(replacement=True)
    few = ds.NumpySlicesDataset([0, 1], "a", sampler=sampler)
    many = ds.NumpySlicesDataset(np.arange(100), "a", sampler=sampler)
    assert [len(columns(data)) for data in (few, many, few)] == [2, 100, 2]


def test_parts_of_shuffled_batches_have_no_row_in_common() -> None:
    parts = eight().batch(2).shuffle(4).split([2, 2], randomize=False)
    for _ in range(2):
        values = [x for part in parts for (xs,) in columns(part) for x in xs]
        assert sorted(values) == [*range(8)]


SHUFFLED: dict[str, Any] = {
    "rows": eight,
    "batches": lambda: eight().batch(1).map(doubled, "a"),
    "a buffer": lambda: ds.GeneratorDataset(stream, "a").shuffle(4).skip(0),
    "a sampler": lambda: eight(sampler=ds.WeightedRandomSampler([1.0] * 8)),
    "appended": lambda: eight(shuffle=False).take(4) + eight().take(4),
    "zipped": lambda: ds.zip((eight(shuffle=False), eight().rename("a", "b"))),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_a_split_of_shuffled_rows_says_that_its_parts_exchange_them(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    eight(shuffle=False).split([4, 4])
    eight(sampler=ds.SubsetSampler(range(8))).batch(1).split([4, 4], randomize=False)
    assert caplog.records == []
    SHUFFLED[kind]().split([4, 4], randomize=False)
    (record,) = caplog.records
    assert "give the dataset shuffle=False" in record.message


class Counted:
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.loops = 0

    def __iter__(self) -> Iterator[int]:
        self.loops += 1
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def test_an_iterable_has_as_many_epochs_as_it_is_asked_for() -> None:
    data = ds.GeneratorDataset(stream, "x").batch(2)
    assert [len(columns(data)) for _ in range(20)] == [4] * 20


def test_an_iterable_with_a_length_is_not_read_for_it() -> None:
    source = Counted()
    assert ds.GeneratorDataset(source, "x").get_dataset_size() == 5
    assert source.loops == 0
