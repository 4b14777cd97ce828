"""A script written for MindSpore runs with one import changed."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_examples
from hypothesis import strategies as st
from mindspore_peer import (
    as_example,
    sum_of,
    unpack_mindrecords,
    write_cifar,
    write_mnist,
    write_tfrecord,
)
from PIL import Image

import penstock.mindspore as ds
from penstock.errors import SampleError, SpecError
from penstock.mindspore import settings
from penstock.mindspore.records import crc32c, masked_crc, read_example
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
    seen = [(len(xs), len(ys)) for [xs, _] in data for [_, ys] in data]
    assert seen == [(5, 5)] * 4
    pairs = zip(data, data.create_tuple_iterator(["x"], num_epochs=1), strict=True)
    assert all(torch.equal(first[0], second[0]) for first, second in pairs)
    data.close()


def test_loops_beside_one_that_was_left_have_other_orders() -> None:
    data = ds.GeneratorDataset(Points(), ["x", "y"]).batch(10)
    left = data.create_tuple_iterator()
    next(left)
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
    drawn = ds.WeightedRandomSampler([0, 1, 1] + [0] * 7, 9)
    data = ds.GeneratorDataset(Points(), ["x", "y"], sampler=drawn).batch(9)
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
    found = ds.serialize(ordered().batch(2), str(tmp_path / "data.json"))
    assert found == json.loads((tmp_path / "data.json").read_text())
    assert found["columns"] == ["x", "label"]
    assert ".batch(2)" in found["pipeline"]


@given(data=st.binary(max_size=9000))
def test_the_sum_of_a_record_is_castagnolis(data: bytes) -> None:
    assert masked_crc(data) == sum_of(data)


def test_the_sum_of_known_data_is_known() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@given(
    name=st.text(max_size=40),
    numbers=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=9),
    floats=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9),
)
def test_an_example_is_read_as_it_was_written(
    name: str, numbers: list[int], floats: list[float]
) -> None:
    columns: dict[str, Any] = {"name": [name.encode()], "floats": floats}
    if numbers:
        columns["numbers"] = numbers
    found = read_example(as_example(**columns))
    assert {name: values for name, (_, values) in found.items()} == columns


def test_files_of_records_are_mixed_file_by_file(tmp_path: Path) -> None:
    for at in range(3):
        (tmp_path / f"{at}.txt").write_text("".join(f"{at}{n}\n" for n in range(9)))
    data = ds.TextFileDataset(str(tmp_path / "*.txt"), shuffle=ds.Shuffle.FILES)
    lines = [str(row[0]) for row in data]
    assert len({*lines}) == 27
    assert len([0 for a, b in itertools.pairwise(lines) if a[0] != b[0]]) == 2


@pytest.mark.parametrize("damage", ["head", "cut", "index", "version"])
def test_damaged_files_of_records_are_refused(tmp_path: Path, damage: str) -> None:
    write_tfrecord(tmp_path / "0.tfrecord", 0)
    unpack_mindrecords(Path(__file__).parent / "golden", tmp_path)
    record, mind = tmp_path / "0.tfrecord", tmp_path / "one.mindrecord"
    if damage == "head":
        record.write_bytes(b"\x01" + record.read_bytes()[1:])
    elif damage == "cut":
        record.write_bytes(record.read_bytes()[:-1])
    elif damage == "index":
        mind.with_name("one.mindrecord.db").write_bytes(b"no database" * 99)
    else:
        mind.write_bytes(mind.read_bytes().replace(b'"3.0"', b'"9.0"'))
    made: Any = ds.MindDataset
    path = str(mind)
    if damage in ("head", "cut"):
        made, path = ds.TFRecordDataset, str(record)
    with pytest.raises(SpecError):
        made(path)


def test_bytes_of_records_keep_their_zeros(tmp_path: Path) -> None:
    unpack_mindrecords(Path(__file__).parent / "golden", tmp_path)
    data = ds.MindDataset(str(tmp_path / "one.mindrecord"), ["image"], shuffle=False)
    images = [row[0].tolist() for row in data]
    assert images == [[at, 0] * at for at in range(1, 5)]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ds.CelebADataset, "CelebA"),
        (lambda: ds.CSVDataset, "pandas"),
        (lambda: ds.deserialize, "load_autotune"),
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


def folders(folder: Path) -> None:
    (folder / "images" / "ape").mkdir(parents=True)
    for name in ("1.jpg", "images/ape/1.jpg"):
        (folder / name).write_bytes(b"\x01\x02")
    coco = {
        "images": [{"id": 1, "file_name": "1.jpg"}],
        "annotations": [{"image_id": 1, "bbox": [1, 2, 3, 4], "category_id": 1}],
        "categories": [{"id": 1, "name": "ape"}],
    }
    (folder / "coco.json").write_text(json.dumps(coco))
    write_mnist(folder / "mnist")
    write_tfrecord(folder / "0.tfrecord", 0)
    unpack_mindrecords(Path(__file__).parent / "golden", folder)


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
    folders(tmp_path)
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
        data, found = MADE[kind](), []
        act(data)
        for _ in range(2):
            found.append([])
            for row in data.create_tuple_iterator(num_epochs=1):
                found[-1].append([each.tolist() for each in row])
                act(data)
        data.close()
        return found

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
    rest = [[each.tolist() for each in row] for row in rows]
    assert columns(later) == rest
    data.close()


def test_the_epoch_after_an_error_is_whole() -> None:
    broken = [True]

    def fails(x: Any) -> Any:
        if x == 5 and broken:
            raise KeyError(broken.pop())
        return x

    for made in (eight(shuffle=False), ds.GeneratorDataset(stream, "a")):
        broken[:] = [True]
        rows = made.map(fails, "a").batch(2).create_tuple_iterator(num_epochs=2)
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


def test_a_sampler_chooses_from_two_datasets() -> None:
    sampler = ds.RandomSampler(replacement=True)
    few = ds.NumpySlicesDataset([0, 1], "a", sampler=sampler)
    many = ds.NumpySlicesDataset(np.arange(100), "a", sampler=sampler)
    assert [len(columns(each)) for each in (few, many, few)] == [2, 100, 2]


def test_parts_of_shuffled_batches_have_no_row_in_common() -> None:
    parts = eight().batch(2).shuffle(4).split([2, 2], randomize=False)
    for _ in range(2):
        seen = [x for part in parts for (xs,) in columns(part) for x in xs]
        assert sorted(seen) == [*range(8)]


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


# Files that are damaged, or made to harm.


def voc(folder: Path, objects: str, listed: str = "1\n") -> ds.Dataset:
    for name in ("ImageSets/Main", "JPEGImages", "Annotations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "ImageSets/Main/train.txt").write_text(listed)
    (folder / "Annotations/1.xml").write_text(objects)
    return ds.VOCDataset(folder, "Detection")


FILES: dict[str, Any] = {
    "0.tfrecord": lambda at: ds.TFRecordDataset(str(at), shuffle=False),
    "one.mindrecord": lambda at: ds.MindDataset([str(at)], shuffle=False),
    "ints.mindrecord": lambda at: ds.MindDataset([str(at)], shuffle=False),
    "one.mindrecord.db": lambda at: ds.MindDataset([str(at)[:-3]], shuffle=False),
    "coco.json": lambda at: ds.CocoDataset(at.parent, at, shuffle=False),
    "mnist/train-images-idx3-ubyte": lambda at: ds.MnistDataset(
        at.parent, "train", shuffle=False
    ),
    "mnist/train-labels-idx1-ubyte": lambda at: ds.MnistDataset(
        at.parent, "train", shuffle=False
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_gives_right_rows_or_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    folder = tmp_path_factory.mktemp("files")
    folders(folder)
    path = folder / name
    content = path.read_bytes()
    right = columns(FILES[name](path))
    most = len(content.rstrip(b"\0"))

    @given(
        at=st.integers(0, most - 1) | st.integers(0, min(most, 1024) - 1),
        flip=st.none() | st.integers(1, 255),
    )
    @settings_of_examples(max_examples=60, deadline=None)
    def proposition(at: int, flip: int | None) -> None:
        flipped = b"" if flip is None else bytes([content[at] ^ flip])
        rest = b"" if flip is None else content[at + 1 :]
        path.write_bytes(content[:at] + flipped + rest)
        try:
            found = columns(FILES[name](path))
        except (SpecError, SampleError, OSError) as error:
            assert str(folder) in str(error)  # noqa: PT017
        else:
            assert name == "0.tfrecord" or flip is not None or found == right
            assert name != "0.tfrecord" or found == right[: len(found)]

    proposition()


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("DELETE FROM INDEXES", "is empty"),
        (
            (
                "CREATE TABLE NEW AS SELECT * FROM INDEXES; DROP TABLE INDEXES;"
                " ALTER TABLE NEW RENAME TO INDEXES;"
                " UPDATE INDEXES SET PAGE_OFFSET_RAW = NULL"
            ),
            "int()",
        ),
        ("UPDATE INDEXES SET PAGE_OFFSET_RAW = 'x'", "invalid literal"),
        ("UPDATE INDEXES SET PAGE_OFFSET_RAW_END = 0", "does not have"),
        ("UPDATE INDEXES SET PAGE_OFFSET_RAW_END = 1 << 62", "does not have"),
        ("UPDATE INDEXES SET PAGE_ID_RAW = -9", "does not have"),
        ("UPDATE INDEXES SET PAGE_OFFSET_RAW = PAGE_OFFSET_RAW + 1", "another size"),
        ("CREATE VIEW VIEWED AS SELECT 1; DROP TABLE INDEXES", "no table INDEXES"),
        (
            (
                "ALTER TABLE INDEXES RENAME TO OLD;"
                " CREATE VIEW INDEXES AS SELECT * FROM OLD a, OLD b, OLD c"
            ),
            "no table INDEXES",
        ),
    ],
)
def test_an_index_that_names_other_places_is_refused(
    tmp_path: Path, sql: str, told: str
) -> None:
    unpack_mindrecords(Path(__file__).parent / "golden", tmp_path)
    path = tmp_path / "one.mindrecord"
    with closing(sqlite3.connect(f"{path}.db")) as index:
        index.executescript(sql)
    with pytest.raises((SpecError, SampleError), match=re.escape(told)):
        columns(ds.MindDataset([str(path)]))


BOX = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox>"


@pytest.mark.parametrize(
    ("objects", "listed", "told"),
    [
        (f"<a><object>{BOX}</object>", "1\n", "Annotations/1.xml"),
        ("<a><object><name>ape</name></object></a>", "1\n", "Annotations/1.xml"),
        (f"<a><object>{BOX}</object></a>", "../../../1\n", "is outside"),
        ("<a></a>", "1\n \n", "found no image"),
    ],
)
def test_annotations_that_cannot_be_read_are_named(
    tmp_path: Path, objects: str, listed: str, told: str
) -> None:
    with pytest.raises(SpecError, match=told):
        voc(tmp_path, objects, listed)


@pytest.mark.parametrize("name", ["/etc/hostname", "../1.jpg"])
def test_images_are_read_in_their_folder_only(tmp_path: Path, name: str) -> None:
    folders(tmp_path)
    path = tmp_path / "coco.json"
    path.write_text(path.read_text().replace("1.jpg", name))
    with pytest.raises(SpecError, match="is outside"):
        ds.CocoDataset(tmp_path, path)


@pytest.mark.parametrize("usage", ["Test", "Train", ""])
@pytest.mark.parametrize(
    "make", [ds.MnistDataset, ds.Cifar10Dataset, ds.Cifar100Dataset]
)
def test_another_part_of_the_data_is_refused(make: Any, usage: str) -> None:
    with pytest.raises(SpecError, match="`usage` must be one of train, test and all"):
        make(".", usage)


def write_examples(path: Path, *examples: bytes) -> str:
    with path.open("wb") as file:
        for each in examples:
            head = struct.pack("<Q", len(each))
            file.write(head + masked_crc(head) + each + masked_crc(each))
    return str(path)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("order", "told"),
    [
        ({"num_shards": 2, "shard_id": 2}, "the first shard is 0"),
        ({"num_shards": 2, "shard_id": -1}, "the first shard is 0"),
        ({"num_shards": 2, "shard_id": 0, "sampler": [0]}, "decides the order alone"),
    ],
)
def test_a_shard_of_records_is_one_of_them(
    tmp_path: Path, order: Any, told: str, *, equal: bool
) -> None:
    for at in range(2):
        write_tfrecord(tmp_path / f"{at}.tfrecord", at)
    with pytest.raises(SpecError, match=told):
        ds.TFRecordDataset(str(tmp_path / "*"), shard_equal_rows=equal, **order)


def entry(kind: int, body: bytes) -> bytes:
    """Return an example whose feature x is a list of this kind."""
    found = body
    for key in (kind, 2):
        found = bytes([key << 3 | 2, len(found)]) + found
    for key, start in ((1, b"\x0a\x01x"), (1, b"")):
        found = bytes([key << 3 | 2, len(start + found)]) + start + found
    return found


def test_empty_lists_keep_their_types(tmp_path: Path) -> None:
    kinds = [np.uint8, np.float32, np.int64]
    for kind, wanted in enumerate(kinds, 1):
        path = write_examples(tmp_path / f"{kind}", entry(kind, b""))
        (row,) = ds.TFRecordDataset(path).create_tuple_iterator(output_numpy=True)
        assert (row[0].dtype, row[0].shape) == (wanted, (0,))


@pytest.mark.parametrize(
    "data",
    [
        b"\x08\x05",
        b"\x0a\x02\x0a\x00",
        b"\x0a\x09\x0a",
        b"\xff" * 99,
        entry(3, b"\x0a"),
    ],
)
def test_a_record_that_is_no_example_is_refused(tmp_path: Path, data: bytes) -> None:
    path = write_examples(tmp_path / "no example", data)
    with pytest.raises(SampleError, match="no example"):
        list(ds.TFRecordDataset(path))


def test_texts_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    texts = [b"a" * 5000] + [b""] * 9000
    path = write_examples(tmp_path / "bomb", as_example(x=texts))
    with pytest.raises(SampleError, match=r"bomb.*9001 texts"):
        list(ds.TFRecordDataset(path))
    schema = ds.Schema()
    schema.add_column("x", "string")
    assert len(list(ds.TFRecordDataset(path, schema))) == 1
