"""Small programs for MindSpore's datasets, and what the real package makes of them.

    python tests/mindspore_peer.py tests/golden

Run it where mindspore 2.10 is installed, with numpy below 2. It writes the files that
it alone can write, and `mindspore.json`: the outcome of each program.
`test_mindspore_peer.py` runs the same programs with penstock.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mindspore_files import RECORDS, write_files, write_mindrecords


def outcome(program: Callable[[], Any]) -> Any:
    """Return what a program returns, as JSON would; or that it raises."""
    try:
        return json.loads(json.dumps(program()))
    except Exception:  # noqa: BLE001 the two packages have their own
        return "raises"


def rows(data: Any) -> list[dict[str, Any]]:
    """Return type, shape and values of all columns of all rows."""
    iterator = data.create_dict_iterator(num_epochs=1, output_numpy=True)
    return [{name: shown(value) for name, value in row.items()} for row in iterator]


def shown(value: Any) -> Any:
    """Return type, shape and values of an array; of a large one, their sum."""
    kind = {"U": "text", "S": "bytes"}.get(value.dtype.kind, str(value.dtype))
    if value.dtype.kind == "S":
        return [kind, list(value.shape), [text.decode() for text in value.reshape(-1)]]
    if value.size > 40:
        return [kind, list(value.shape), zlib.crc32(np.ascontiguousarray(value))]
    return [kind, list(value.shape), value.tolist()]


def column(data: Any, name: str = "x") -> list[Any]:
    """Return the values of one column."""
    return [row[name][2] for row in rows(data)]


def columns(data: Any) -> list[Any]:
    """Return all columns of each row."""
    return [[value.tolist() for value in row] for row in data.create_tuple_iterator()]


def sizes(data: Any) -> list[int]:
    """Return the sizes of batches."""
    return [row["x"][1][0] for row in rows(data)]


class Points:
    """Ten rows: a float and a label."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.float32(index), index % 2


def numbers() -> Iterator[tuple[Any, Any]]:
    """Yield five rows."""
    for at in range(5):
        yield np.float32(at), at


class Indices:
    """A sampler of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter((5, 2))


def programs(ds: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return all programs, by name."""
    runs: dict[str, Callable[[], Any]] = {}
    for part in (reading, mapping, batching, ordering, looping, files, records):
        runs.update(part(ds, folder))
    return runs


def ordered(ds: Any, **options: Any) -> Any:
    """Return the ten points in order."""
    return ds.GeneratorDataset(Points(), ["x", "y"], shuffle=False, **options)


def reading(ds: Any, _: Path) -> dict[str, Callable[[], Any]]:
    """Return programs that read Python objects."""
    mixed = [(1, 2.5, "a", True, np.int8(3), [1, 2], ["p", "qq"])]
    names = list("abcdefg")
    generator = ds.GeneratorDataset
    slices = ds.NumpySlicesDataset
    two = {"a": [1, 2], "b": np.array([3, 4], np.float32)}

    def sampled(sampler: Any) -> Any:
        data = generator(Points(), ["x", "y"], sampler=sampler)
        return data.get_dataset_size(), column(data)

    def shard(at: int, of: int = 3, **options: Any) -> Any:
        return column(ordered(ds, num_shards=of, shard_id=at, **options))

    return {
        "types": lambda: rows(generator(mixed, names, shuffle=False)),
        "shards": lambda: [shard(at) for at in range(3)],
        "shards of many": lambda: [shard(at, 12) for at in (0, 9, 10, 11)],
        "samples of a shard": lambda: shard(1, num_samples=2),
        "samples": lambda: column(ordered(ds, num_samples=3)),
        "half a shard": lambda: ordered(ds, num_shards=2),
        "distributed": lambda: [
            sampled(ds.DistributedSampler(3, at, shuffle=False, offset=offset))
            for at in range(3)
            for offset in (-1, 0, 1, 2)
        ],
        "distributed samples": lambda: sampled(
            ds.DistributedSampler(3, 1, shuffle=False, num_samples=2)
        ),
        "distributed, shuffled": lambda: len(sampled(ds.DistributedSampler(3, 1))[1]),
        "sequential": lambda: sampled(ds.SequentialSampler(2, 5)),
        "sequential to the end": lambda: sampled(ds.SequentialSampler(8, 5))[1],
        "subset": lambda: sampled(ds.SubsetSampler([3, 1, 3])),
        "subset beyond": lambda: sampled(ds.SubsetSampler([3, 11])),
        "subset, random": lambda: sorted(sampled(ds.SubsetRandomSampler([3, 1]))[1]),
        "random": lambda: sorted(sampled(ds.RandomSampler())[1]),
        "random, some": lambda: len(sampled(ds.RandomSampler(num_samples=4))[1]),
        "random, more": lambda: len(sampled(ds.RandomSampler(num_samples=40))[1]),
        "random, again": lambda: len(
            sampled(ds.RandomSampler(replacement=True, num_samples=20))[1]
        ),
        "weighted": lambda: sampled(ds.WeightedRandomSampler([0, 0, 1] + [0] * 7, 4)),
        "a list": lambda: sampled([3, 1]),
        "an object": lambda: sampled(Indices()),
        "no sampler": lambda: sampled(3),
        "a sampler and samples": lambda: column(
            generator(
                Points(), ["x", "y"], num_samples=2, sampler=ds.SequentialSampler()
            )
        ),
        "a sampler and shuffle": lambda: column(
            generator(
                Points(), ["x", "y"], shuffle=False, sampler=ds.SequentialSampler()
            )
        ),
        "classes without labels": lambda: sampled(ds.PKSampler(1)),
        "a function": lambda: rows(generator(numbers, ["x", "y"])),
        "a function's size": lambda: generator(numbers, ["x", "y"]).get_dataset_size(),
        "a function's first": lambda: column(
            generator(numbers, ["x", "y"], num_samples=3)
        ),
        "a function's shard": lambda: column(
            generator(numbers, ["x", "y"], num_shards=2, shard_id=1)
        ),
        "a function's sampler": lambda: column(
            generator(numbers, ["x", "y"], sampler=ds.SequentialSampler())
        ),
        "fewer names": lambda: rows(generator(Points(), ["x"], shuffle=False)),
        "more names": lambda: rows(generator(Points(), ["x", "y", "z"], shuffle=False)),
        "a list of text": lambda: rows(generator(["a", "bbb"], "x", shuffle=False)),
        "slices": lambda: rows(slices([[1, 2], [3, 4]], shuffle=False)),
        "slices of columns": lambda: rows(
            slices(([1, 2], [3.5, 4.5], ["a", "b"]), ["p", "q", "r"], shuffle=False)
        ),
        "slices of a dict": lambda: rows(slices(two, shuffle=False)),
        "slices without names": lambda: rows(slices(([1, 2], [3, 4]), shuffle=False)),
        "slices, fewer names": lambda: rows(slices(([1, 2], [3, 4]), ["a"])),
        "slices of a shard": lambda: rows(
            slices(list(range(5)), "x", num_shards=2, shard_id=1, shuffle=False)
        ),
        "padded": lambda: rows(
            ds.PaddedDataset([{"x": np.array([1]), "y": np.float32(2)}])
        ),
        "padded shards": lambda: [padded(ds, at) for at in range(3)],
        "another sampler": lambda: resampled(ds),
    }


def padded(ds: Any, shard: int) -> Any:
    """Return a shard of points that are filled up."""
    more = ds.PaddedDataset([{"x": np.float32(99), "y": np.array(7)}] * 2)
    data = ordered(ds) + more
    data.use_sampler(ds.DistributedSampler(3, shard, shuffle=False, num_samples=None))
    return data.get_dataset_size(), column(data)


def resampled(ds: Any) -> Any:
    """Return points that another sampler chooses."""
    data = ordered(ds)
    data.use_sampler(ds.SequentialSampler(1, 2))
    return column(data)


def mapping(ds: Any, _: Path) -> dict[str, Callable[[], Any]]:
    """Return programs that change columns."""

    def mapped(*arguments: Any, **options: Any) -> Any:
        return rows(ordered(ds).take(2).map(*arguments, **options))

    def five() -> Any:
        return ordered(ds).batch(5)

    return {
        "map": lambda: mapped(lambda x: x * x, "x"),
        "map the first": lambda: mapped(lambda x: x * x),
        "map to two": lambda: mapped(lambda x: (x, -x), ["x"], ["a", "b"]),
        "map the second": lambda: mapped(lambda y: (y, -y), ["y"], ["a", "b"]),
        "map two": lambda: mapped(lambda x, y: (y, x), ["x", "y"], ["a", "b"]),
        "map two to one": lambda: mapped(lambda x, y: x + y, ["x", "y"], ["z"]),
        "map in turn": lambda: mapped([lambda x: (x, x), lambda a, b: a + b], ["x"]),
        "map to a list": lambda: mapped(lambda x: [x, x], ["x"]),
        "map to a number": lambda: mapped(lambda x: 1, ["x"]),
        "map to text": lambda: mapped(lambda x: "abc", ["x"]),
        "map to more": lambda: mapped(lambda x: (x, x), ["x"]),
        "map to fewer": lambda: mapped(lambda x: x, ["x"], ["a", "b"]),
        "map two without names": lambda: mapped(lambda x, y: x, ["x", "y"]),
        "map an unknown one": lambda: mapped(lambda x: x, ["q"]),
        "map a batch": lambda: rows(five().map(lambda x: x * x, ["x"])),
        "map a batch to a number": lambda: rows(five().map(lambda x: x.sum(), ["x"])),
        "map a batch and batch": lambda: rows(
            five().map(lambda x: (x + 1, x * 2), ["x"], ["a", "b"]).batch(2)
        ),
        "filter": lambda: column(ordered(ds).filter(lambda x: x > 6, "x")),
        "filter by all": lambda: column(ordered(ds).filter(lambda x, y: y == 1)),
        "filter's size": lambda: (
            ordered(ds).filter(lambda x: x > 6, "x").get_dataset_size()
        ),
        "filter, batch": lambda: column(
            ordered(ds).filter(lambda x: x != 3, ["x"]).batch(4)
        ),
        "filter batches": lambda: column(five().filter(lambda x: x.sum() > 10, ["x"])),
        "project": lambda: rows(ordered(ds).take(1).project(["y", "x"])),
        "project one": lambda: rows(ordered(ds).take(1).project("y")),
        "project batches": lambda: rows(five().project(["y"])),
        "project an unknown one": lambda: rows(ordered(ds).project(["q"])),
        "rename": lambda: rows(ordered(ds).take(1).rename("y", "z")),
        "rename two": lambda: (
            ordered(ds).rename(["x", "y"], ["a", "b"]).get_col_names()
        ),
        "apply": lambda: column(ordered(ds).apply(lambda data: data.take(2))),
        "apply nothing": lambda: ordered(ds).apply(lambda data: 3),
    }


def batching(ds: Any, _: Path) -> dict[str, Callable[[], Any]]:
    """Return programs that make batches."""
    lengths = (0, 5, 1, 4, 2, 3, 6, 7)

    def made(items: Any) -> Any:
        return ds.GeneratorDataset(items, "x", shuffle=False)

    def long(*sizes: int) -> Any:
        items = [(np.arange(size + 1), size) for size in sizes]
        return ds.GeneratorDataset(items, ["x", "y"], shuffle=False)

    def numbered(xs: Any, info: Any) -> Any:
        plus = info.get_batch_num() * 100 + info.get_epoch_num() * 1000
        return ([x + np.float32(plus) for x in xs],)

    def both(xs: Any, ys: Any, _: Any) -> Any:
        return np.stack(xs), np.stack(ys), np.stack(xs) + 1

    def two(xs: Any, _: Any) -> Any:
        return np.stack(xs), np.stack(xs) + 1

    def grown(info: Any) -> Any:
        return info.get_batch_num() + 1

    def batched(size: Any = 4, *rest: Any, **options: Any) -> Any:
        return rows(ordered(ds).batch(size, *rest, **options))

    def bucketed(*arguments: Any, **options: Any) -> Any:
        return rows(long(*lengths).bucket_batch_by_length(*arguments, **options))

    open_ = {"x": ([None], 0)}
    return {
        "batch": batched,
        "batch, full": lambda: batched(4, drop_remainder=True),
        "batch, none full": lambda: batched(20, drop_remainder=True),
        "batch of 0": lambda: batched(0),
        "batch of batches": lambda: rows(ordered(ds).batch(2).batch(2)),
        "batch of short batches": lambda: rows(ordered(ds).batch(4).batch(2)),
        "batch of text": lambda: rows(made(["a", "bbb"]).batch(2)),
        "batch of lists of text": lambda: rows(
            made([(["a", "c", "d"],), (["bbb", "e", "f"],)]).batch(2)
        ),
        "batches of batches of text": lambda: rows(
            made(["a", "bbb", "c", "d"]).batch(2).batch(2)
        ),
        "batch of uneven ones": lambda: rows(long(1, 2).batch(2)),
        "batch by a function": lambda: sizes(ordered(ds).batch(grown)),
        "per_batch_map": lambda: batched(per_batch_map=numbered, input_columns=["x"]),
        "per_batch_map, more": lambda: batched(
            per_batch_map=both, input_columns=["x", "y"], output_columns=["x", "y", "z"]
        ),
        "per_batch_map of one": lambda: batched(
            per_batch_map=two, input_columns=["y"], output_columns=["p", "z"]
        ),
        "per_batch_map of all": lambda: batched(per_batch_map=lambda x, y, _: (x, y)),
        "per_batch_map, too many": lambda: batched(per_batch_map=both),
        "per_batch_map of a stream": lambda: rows(
            ds.GeneratorDataset(numbers, ["x", "y"]).batch(
                2, per_batch_map=numbered, input_columns=["x"]
            )
        ),
        "per_batch_map, epochs": lambda: epochs(
            ordered(ds).batch(4, per_batch_map=numbered, input_columns=["x"])
        ),
        "padded_batch": lambda: rows(
            long(0, 1, 2, 3).padded_batch(2, pad_info={"x": ([5], -1)})
        ),
        "padded_batch of all": lambda: rows(
            long(0, 1, 2, 3).padded_batch(2, pad_info={})
        ),
        "padded_batch, open": lambda: rows(
            long(0, 1, 2, 3).padded_batch(3, pad_info={"x": ([None], 7)})
        ),
        "padded_batch, cut": lambda: rows(
            long(0, 1, 2, 3).padded_batch(
                2, drop_remainder=True, pad_info={"x": ([2], 0)}
            )
        ),
        "padded_batch without": lambda: rows(long(0, 1).padded_batch(2)),
        "bucket": lambda: bucketed(["x"], [3, 6], [2, 2, 1], pad_info=open_),
        "bucket, full": lambda: bucketed(
            ["x"], [3, 6], [2, 2, 1], len, open_, drop_remainder=True
        ),
        "bucket up to the boundary": lambda: bucketed(
            ["x"], [4, 9], [2, 2, 1], len, open_, pad_to_bucket_boundary=True
        ),
        "bucket, too long": lambda: bucketed(
            ["x"], [3, 6], [2, 2, 1], len, open_, pad_to_bucket_boundary=True
        ),
        "bucket, two sizes": lambda: bucketed(["x"], [3, 6], [2, 2]),
    }


def epochs(data: Any) -> Any:
    """Return two epochs of one iterator."""
    iterator = data.create_dict_iterator(num_epochs=2, output_numpy=True)
    return [[row["x"].tolist() for row in iterator] for _ in range(2)]


def ordering(ds: Any, _: Path) -> dict[str, Callable[[], Any]]:
    """Return programs that choose and order rows."""

    def plain() -> Any:
        return ordered(ds)

    def getters(data: Any) -> Any:
        return [
            data.get_batch_size(),
            data.get_repeat_count(),
            data.get_dataset_size(),
            data.get_col_names(),
            data.output_shapes(),
            [str(kind).lower() for kind in data.output_types()],
            len(data),
        ]

    def split(*arguments: Any, **options: Any) -> Any:
        return [column(part) for part in plain().split(*arguments, **options)]

    return {
        "shuffle": lambda: sorted(column(plain().shuffle(4))),
        "shuffle by 1": lambda: plain().shuffle(1),
        "shuffle batches": lambda: sorted(column(plain().batch(5).shuffle(3))),
        "shuffle a stream": lambda: sorted(
            column(ds.GeneratorDataset(numbers, ["x", "y"]).shuffle(2))
        ),
        "repeat, batch": lambda: column(plain().repeat(2).batch(4)),
        "batch, repeat": lambda: column(plain().batch(4).repeat(2)),
        "full batches, repeat": lambda: column(
            plain().batch(4, drop_remainder=True).repeat(2)
        ),
        "even batches, repeat": lambda: column(plain().batch(5).repeat(2)),
        "repeat a stream": lambda: column(
            ds.GeneratorDataset(numbers, ["x", "y"]).repeat(2).batch(3)
        ),
        "repeat 0": lambda: plain().repeat(0),
        "repeat without end": lambda: plain().repeat().get_dataset_size(),
        "take": lambda: column(plain().take(2)),
        "take more": lambda: column(plain().take(20)),
        "take 0": lambda: plain().take(0),
        "take batches": lambda: column(plain().batch(3).take(2)),
        "skip": lambda: column(plain().skip(7)),
        "skip all": lambda: [
            plain().skip(20).get_dataset_size(),
            column(plain().skip(20)),
        ],
        "skip batches": lambda: column(plain().batch(3).skip(2)),
        "split": lambda: split([4, 6], randomize=False),
        "split by shares": lambda: split([0.25, 0.75], randomize=False),
        "split in three": lambda: [len(part) for part in split([0.2, 0.2, 0.6])],
        "split in halves": lambda: [
            len(column(part))
            for part in ds.NumpySlicesDataset(list(range(5)), "x").split([0.5, 0.5])
        ],
        "split too much": lambda: split([4, 7]),
        "split batches": lambda: [
            column(part) for part in plain().batch(2).split([2, 3], randomize=False)
        ],
        "zip": lambda: rows(
            ds.zip((plain(), plain().rename(["x", "y"], ["a", "b"]).take(3)))
        ),
        "zip, batch": lambda: rows(
            plain().zip(plain().rename(["x", "y"], ["a", "b"])).batch(4)
        ),
        "zip the same names": lambda: rows(plain().zip(plain())),
        "concat": lambda: column(plain() + plain().take(2)),
        "concat, batch": lambda: column(plain().concat([plain()]).batch(8)),
        "concat's size": lambda: (plain() + plain()).batch(3).get_dataset_size(),
        "concat other names": lambda: column(plain() + plain().rename("x", "q")),
        "concat batches": lambda: column(plain().batch(4) + plain().batch(4)),
        "getters": lambda: getters(plain()),
        "getters of batches": lambda: getters(plain().batch(4)),
        "getters of repeats": lambda: getters(
            plain().batch(4, drop_remainder=True).repeat(3)
        ),
        "getters of repeated": lambda: getters(plain().repeat(2).batch(3)),
        "getters of a map": lambda: getters(
            plain().map(lambda x, y: (x, y), ["x", "y"], ["y", "a"])
        ),
        "getters of batches of batches": lambda: getters(plain().batch(2).batch(5)),
        "repeats of repeats": lambda: plain().repeat(2).repeat(3).get_repeat_count(),
    }


def looping(ds: Any, _: Path) -> dict[str, Callable[[], Any]]:
    """Return programs that loop in several ways."""

    def again() -> Any:
        iterator = ordered(ds).create_dict_iterator(num_epochs=1)
        return [len([*iterator]), len([*iterator])]

    def left() -> Any:
        iterator = ordered(ds).create_dict_iterator(output_numpy=True)
        next(iter(iterator))
        return [row["x"].tolist() for row in iterator]

    def stepped() -> Any:
        iterator, values = ordered(ds).create_tuple_iterator(num_epochs=2), []
        for _ in range(23):
            row = next(iterator, None)
            values.append(None if row is None else row[0].asnumpy().tolist())
            if len(values) == 22:
                break
        return values, outcome(lambda: next(iterator))

    def inner() -> Any:
        data = ordered(ds).batch(5)
        return [len([*data]) for _ in data]

    return {
        "a second loop": again,
        "a loop that was left": left,
        "next": stepped,
        "a loop in a loop": inner,
        "columns": lambda: [
            [value.asnumpy().tolist() for value in row]
            for row in ordered(ds)
            .batch(5)
            .create_tuple_iterator(["y", "x"], num_epochs=1)
        ],
        "an unknown column": lambda: [*ordered(ds).create_tuple_iterator(["q"])],
    }


def files(ds: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return programs that read images and text."""

    def images(**options: Any) -> Any:
        return ds.ImageFolderDataset(str(folder / "images"), shuffle=False, **options)

    def mnist(usage: str | None) -> Any:
        return rows(ds.MnistDataset(str(folder / "mnist"), usage, shuffle=False))

    def text(name: str, **options: Any) -> Any:
        return rows(ds.TextFileDataset(str(folder / name), shuffle=False, **options))

    def cifar(dataset: Any, name: str) -> Any:
        return rows(dataset(str(folder / name), "test", shuffle=False, num_samples=3))

    def coco(**options: Any) -> Any:
        photos = str(folder / "voc" / "JPEGImages")
        annotations = str(folder / "coco.json")
        return ds.CocoDataset(photos, annotations, shuffle=False, **options)

    def voc(**options: Any) -> Any:
        return ds.VOCDataset(str(folder / "voc"), shuffle=False, **options)

    def boxes(data: Any) -> Any:
        return rows(
            data.project([name for name in data.get_col_names() if name != "image"])
        )

    some = {"dog": 5, "cat": 2}
    return {
        "coco": lambda: rows(coco()),
        "coco, decoded": lambda: rows(coco(decode=True)),
        "coco's boxes": lambda: boxes(coco()),
        "coco's classes": lambda: coco().get_class_indexing(),
        "voc": lambda: rows(voc()),
        "voc, photographs": lambda: rows(voc(decode=True).project("image")),
        "voc, boxes": lambda: boxes(voc(task="Detection")),
        "voc, decoded": lambda: rows(voc(task="Detection", decode=True)),
        "voc, some classes": lambda: boxes(
            voc(task="Detection", class_indexing={"cat": 4})
        ),
        "voc's classes": lambda: voc(task="Detection").get_class_indexing(),
        "voc, no list": lambda: rows(voc(usage="none")),
        "folder": lambda: rows(images()),
        "folder, decoded": lambda: rows(images(decode=True)),
        "folder, some classes": lambda: rows(images(class_indexing=some)),
        "folder, a shard": lambda: rows(images(num_shards=3, shard_id=1)),
        "folder's classes": lambda: [
            images().get_class_indexing(),
            images().num_classes(),
            images().batch(2).num_classes(),
            images(class_indexing=some).num_classes(),
            images().get_dataset_size(),
        ],
        "folder, one of a class": lambda: [
            row["label"][2]
            for row in rows(
                ds.ImageFolderDataset(str(folder / "images"), sampler=ds.PKSampler(1))
            )
        ],
        "no folder": lambda: rows(ds.ImageFolderDataset(str(folder / "none"))),
        "mnist": lambda: mnist(None),
        "mnist, train": lambda: mnist("train"),
        "mnist, test": lambda: mnist("test"),
        "mnist, batch": lambda: rows(
            ds.MnistDataset(str(folder / "mnist"), "test", shuffle=False).batch(2)
        ),
        "no mnist": lambda: rows(ds.MnistDataset(str(folder / "images"))),
        "cifar10": lambda: cifar(ds.Cifar10Dataset, "cifar10"),
        "cifar100": lambda: cifar(ds.Cifar100Dataset, "cifar100"),
        "no cifar": lambda: rows(ds.Cifar10Dataset(str(folder / "images"))),
        "text": lambda: text("a.txt"),
        "text, some": lambda: text("a.txt", num_samples=2),
        "no text": lambda: text("none.txt"),
    }


def records(ds: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return programs that read files of records."""

    def mind(name: Any, columns: Any = None, **options: Any) -> Any:
        return ds.MindDataset(name, columns, shuffle=False, **options)

    def tf(name: str = "0.tfrecord", *schema: Any, **options: Any) -> Any:
        return ds.TFRecordDataset(str(folder / name), *schema, shuffle=False, **options)

    def both(**options: Any) -> Any:
        paths = [str(folder / "0.tfrecord"), str(folder / "1.tfrecord")]
        options = {"num_parallel_workers": 1, "shuffle": False, **options}
        return [ids[0] for ids in column(ds.TFRecordDataset(paths, **options), "ids")]

    def schema(**columns: Any) -> Any:
        description = ds.Schema()
        for name, (kind, shape) in columns.items():
            description.add_column(name, kind, shape)
        return description

    def shards(of: int, *, equal: bool) -> Any:
        parts = range(of)
        options = {"num_shards": of, "shard_equal_rows": equal}
        return [both(shard_id=part, **options) for part in parts]

    one, two = str(folder / "one.mindrecord"), str(folder / "two.mindrecord0")
    some = ["label", "name"]
    more = {"label": 77, "name": "x"}
    full = schema(
        ids=("int32", [2]),
        img=("uint8", [2, 2]),
        score=("float64", None),
        name=("string", [1]),
        many=("string", None),
    )
    return {
        "mindrecord": lambda: rows(mind(one, ["id"])),
        "mindrecord's values": lambda: rows(
            mind(two, ["big", "box", "label", "mask", "name", "score", "w"])
        ),
        "mindrecord's integers": lambda: rows(mind(str(folder / "ints.mindrecord"))),
        "mindrecord's order": lambda: rows(mind(two, ["score", "label"])),
        "mindrecord, one file": lambda: column(mind([two], ["label"]), "label"),
        "mindrecord's size": lambda: mind(two).get_dataset_size(),
        "mindrecord's names": lambda: mind(two).get_col_names(),
        "mindrecord, no column": lambda: rows(mind(two, ["nope"])),
        "mindrecord, no file": lambda: rows(mind(str(folder / "none"))),
        "mindrecord, shards": lambda: [
            column(mind(two, ["label"], num_shards=3, shard_id=at), "label")
            for at in range(3)
        ],
        "mindrecord, sampler": lambda: column(
            ds.MindDataset(two, ["label"], sampler=ds.SequentialSampler(1, 3)), "label"
        ),
        "mindrecord, padded": lambda: [
            column(
                mind(
                    two,
                    some,
                    num_shards=3,
                    shard_id=at,
                    padded_sample=more,
                    num_padded=2,
                ),
                "label",
            )
            for at in range(3)
        ],
        "tfrecord": lambda: rows(tf()),
        "tfrecord's columns": lambda: rows(tf(columns_list=["score", "ids"])),
        "tfrecord, schema": lambda: rows(tf("0.tfrecord", full)),
        "tfrecord, schema's column": lambda: rows(
            tf("0.tfrecord", full, columns_list=["img"])
        ),
        "tfrecord, open shape": lambda: rows(
            tf("0.tfrecord", schema(ids=("int64", [-1]), score=("float32", [])))
        ),
        "tfrecord, other shape": lambda: rows(
            tf("0.tfrecord", schema(ids=("int64", [1])))
        ),
        "tfrecord, no column": lambda: rows(
            tf("0.tfrecord", schema(no=("int64", [1])))
        ),
        "tfrecord, schema file": lambda: rows(
            tf("0.tfrecord", str(folder / "schema.json"))
        ),
        "tfrecord, batch": lambda: rows(tf(columns_list=["ids", "score"]).batch(2)),
        "tfrecord, damaged": lambda: rows(tf("damaged.tfrecord")),
        "tfrecord, no file": lambda: rows(tf("none.tfrecord")),
        "tfrecords": both,
        "tfrecords, some": lambda: both(num_samples=4),
        "tfrecords, a file each": lambda: shards(2, equal=False),
        "tfrecords, too few": lambda: shards(3, equal=False),
        "tfrecords, rows": lambda: shards(3, equal=True),
        "tfrecords, uneven rows": lambda: shards(4, equal=True),
    }


def main(golden: Path) -> None:
    """Write the outcomes of the real package, and its files."""
    import mindspore.dataset as ds  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        write_mindrecords(folder)
        (golden / "mindrecord").mkdir(exist_ok=True)
        for file in (*RECORDS, *(f"{name}.db" for name in RECORDS)):
            archive = gzip.compress((folder / file).read_bytes(), mtime=0)
            (golden / "mindrecord" / f"{file}.gz").write_bytes(archive)
        outcomes = {name: outcome(run) for name, run in programs(ds, folder).items()}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in outcomes.items())
    (golden / "mindspore.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
