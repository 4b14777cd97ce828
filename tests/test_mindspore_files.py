"""The files of MindSpore's datasets: their formats, and files made to harm."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_examples
from hypothesis import strategies as st
from mindspore_files import (
    as_example,
    sum_of,
    unpack_mindrecords,
    write_folders,
    write_tfrecord,
)
from mindspore_peer import columns

import penstock.mindspore as ds
from penstock.errors import SampleError, SpecError
from penstock.mindspore.records import crc32c, masked_crc, read_example


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
    features = read_example(as_example(**columns))
    assert {name: values for name, (_, values) in features.items()} == columns


def test_files_of_records_are_mixed_file_by_file(tmp_path: Path) -> None:
    for at in range(3):
        (tmp_path / f"{at}.txt").write_text("".join(f"{at}{n}\n" for n in range(9)))
    data = ds.TextFileDataset(str(tmp_path / "*.txt"), shuffle=ds.Shuffle.FILES)
    lines = [str(row[0]) for row in data]
    assert len({*lines}) == 27
    assert len([0 for a, b in itertools.pairwise(lines) if a[0] != b[0]]) == 2


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("line\n")
    (tmp_path / "folder.txt").mkdir()
    assert len(ds.TextFileDataset([str(tmp_path / "**" / "*.txt")])) == 2
    for missing in ("d.txt", "folder*"):
        paths = [tmp_path / "a.txt", tmp_path / missing]
        with pytest.raises(SpecError, match=re.escape(f"no file {str(paths[1])!r};")):
            ds.TextFileDataset(paths)


@pytest.mark.parametrize("damage", ["head", "cut", "index", "names", "version"])
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
    elif damage == "names":
        content = mind.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header["schema"][0]["blob_fields"], header["shard_addresses"] = [], [1]
        changed = json.dumps(header, separators=(",", ":")).encode()
        mind.write_bytes(content[:8] + changed.ljust(end - 8) + content[end:])
    else:
        mind.write_bytes(mind.read_bytes().replace(b'"3.0"', b'"9.0"'))
    dataset_class: Any = ds.MindDataset
    path = str(mind)
    if damage in ("head", "cut"):
        dataset_class, path = ds.TFRecordDataset, str(record)
    with pytest.raises(SpecError):
        dataset_class(path)


def test_bytes_of_records_keep_their_zeros(tmp_path: Path) -> None:
    unpack_mindrecords(Path(__file__).parent / "golden", tmp_path)
    data = ds.MindDataset(str(tmp_path / "one.mindrecord"), ["image"], shuffle=False)
    images = [row[0].tolist() for row in data]
    assert images == [[at, 0] * at for at in range(1, 5)]


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
    write_folders(folder)
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
            rows = columns(FILES[name](path))
        except (SpecError, SampleError, OSError) as error:
            assert str(folder) in str(error)  # noqa: PT017
        else:
            assert name == "0.tfrecord" or flip is not None or rows == right
            assert name != "0.tfrecord" or rows == right[: len(rows)]

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
    write_folders(tmp_path)
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
        for example in examples:
            head = struct.pack("<Q", len(example))
            file.write(head + masked_crc(head) + example + masked_crc(example))
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
    data = body
    for key in (kind, 2):
        data = bytes([key << 3 | 2, len(data)]) + data
    for key, start in ((1, b"\x0a\x01x"), (1, b"")):
        data = bytes([key << 3 | 2, len(start + data)]) + start + data
    return data


def test_empty_lists_keep_their_types(tmp_path: Path) -> None:
    kinds = [np.uint8, np.float32, np.int64]
    for kind, dtype in enumerate(kinds, 1):
        path = write_examples(tmp_path / f"{kind}", entry(kind, b""))
        (row,) = ds.TFRecordDataset(path).create_tuple_iterator(output_numpy=True)
        assert (row[0].dtype, row[0].shape) == (dtype, (0,))


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
