"""The small files that programs for MindSpore's datasets read.

MindRecord files are written by MindSpore alone; the tests have copies of them.
"""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RECORDS = ("one.mindrecord", "two.mindrecord0", "two.mindrecord1", "ints.mindrecord")


def write_files(folder: Path) -> None:
    """Write what all programs read, but for MindRecord files."""
    for name, count in (("ape", 1), ("cat", 2), ("dog", 1)):
        (folder / "images" / name).mkdir(parents=True)
        for at in range(count):
            pixels = np.full((2, 3, 3), at * 10 + count, np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{at}.bmp")
    write_annotated(folder)
    write_mnist(folder / "mnist")
    write_cifar(folder / "cifar10", "test_batch.bin", labels=1)
    write_cifar(folder / "cifar100", "test.bin", labels=2)
    (folder / "a.txt").write_text("one\n\ntwo words \nthree")
    for at in range(2):
        write_tfrecord(folder / f"{at}.tfrecord", at)
    content = bytearray((folder / "0.tfrecord").read_bytes())
    content[40] ^= 1
    (folder / "damaged.tfrecord").write_bytes(content)
    columns = {"ids": {"type": "int32", "rank": 1, "shape": [2]}}
    columns["img"] = {"type": "uint8", "rank": 1}
    schema = {"datasetType": "TF", "numRows": 2, "columns": columns}
    (folder / "schema.json").write_text(json.dumps(schema))


def write_annotated(folder: Path) -> None:
    """Write two photographs with boxes and masks, as COCO and Pascal VOC have them."""
    top = folder / "voc"
    for name in ("JPEGImages", "Annotations", "SegmentationClass"):
        (top / name).mkdir(parents=True)
    for at, name in enumerate(("b", "a")):
        Image.new("RGB", (16, 8), (9, 9, 9)).save(top / "JPEGImages" / f"{name}.jpg")
        Image.new("P", (16, 8), at).save(top / "SegmentationClass" / f"{name}.png")
        objects = "".join(
            f"<object><name>{kind}</name>{marks}<bndbox><xmin>{1 + at}</xmin>"
            "<ymin>1</ymin><xmax>5</xmax><ymax>3</ymax></bndbox></object>"
            for kind, marks in (
                ("dog", "<truncated>1</truncated><difficult>0</difficult>"),
                ("cat", "<difficult>1</difficult>"),
            )
        )
        size = "<size><width>16</width><height>8</height><depth>3</depth></size>"
        text = (
            f"<annotation><filename>{name}.jpg</filename>{size}{objects}</annotation>"
        )
        (top / "Annotations" / f"{name}.xml").write_text(text)
    for part in ("Main", "Segmentation"):
        (top / "ImageSets" / part).mkdir(parents=True)
        (top / "ImageSets" / part / "train.txt").write_text("b\na\n")
    images = [
        {"id": number, "file_name": f"{name}.jpg", "height": 8, "width": 16}
        for name, number in (("b", 7), ("a", 3), ("c", 5))
    ]
    boxes: list[dict[str, Any]] = [
        {"image_id": 7, "category_id": 2, "bbox": [1, 1, 2, 2], "iscrowd": 0},
        {"image_id": 3, "category_id": 1, "bbox": [0, 0, 1.5, 1], "iscrowd": 1},
        {"image_id": 7, "category_id": 1, "bbox": [0, 1, 3, 2], "iscrowd": 0},
    ]
    for at, box in enumerate(boxes):
        box |= {"id": at, "area": 4, "segmentation": [[1, 1, 2, 1, 2, 2]]}
    kinds = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    boxes[1]["segmentation"] = {"counts": [1, 2], "size": [8, 16]}
    annotations = {"images": images, "annotations": boxes, "categories": kinds}
    (folder / "coco.json").write_text(json.dumps(annotations))


def write_mnist(folder: Path) -> None:
    """Write three images to learn from, and two to test with."""
    folder.mkdir()
    for part, count in (("train", 3), ("t10k", 2)):
        pixels = bytes(at % 251 for at in range(count * 784))
        head = struct.pack(">IIII", 2051, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + pixels)
        head = struct.pack(">II", 2049, count)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + bytes(range(count)))


def write_cifar(folder: Path, name: str, labels: int) -> None:
    """Write as many images as MindSpore wants to see in a file."""
    folder.mkdir()
    records = np.zeros((10_000, labels + 3072), np.uint8)
    records[:, :labels] = (np.arange(10_000) % 10)[:, None] + np.arange(labels) * 10
    records[:, labels:] = np.arange(10_000 * 3072).reshape(10_000, 3072) % 251
    records.tofile(folder / name)


def write_tfrecord(path: Path, number: int) -> None:
    """Write three examples, bit by bit."""
    with path.open("wb") as file:
        for at in range(3):
            example = as_example(
                ids=[number * 10 + at, -1],
                name=[b"n%d" % at],
                score=[at / 2],
                img=[bytes([at, 0, 1, 2])],
                many=[b"a", b"bcd"],
            )
            head = struct.pack("<Q", len(example))
            file.write(head + sum_of(head) + example + sum_of(example))


def sum_of(data: bytes) -> bytes:
    """Return TFRecord's masked CRC32C, taken bit by bit."""
    total = 0xFFFFFFFF
    for byte in data:
        total ^= byte
        for _ in range(8):
            total = total >> 1 ^ (0x82F63B78 if total & 1 else 0)
    total ^= 0xFFFFFFFF
    checksum = ((total >> 15 | total << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", checksum)


def as_example(**columns: list[Any]) -> bytes:
    """Return a `tf.train.Example`."""
    entries = (
        field(1, name.encode()) + field(2, as_feature(values))
        for name, values in columns.items()
    )
    return field(1, b"".join(field(1, entry) for entry in entries))


def as_feature(values: list[Any]) -> bytes:
    """Return the values of a column."""
    if isinstance(values[0], bytes):
        return field(1, b"".join(field(1, value) for value in values))
    if isinstance(values[0], float):
        return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
    return field(3, field(1, b"".join(map(as_varint, values))))


def field(number: int, body: bytes) -> bytes:
    """Return a field behind its size."""
    return as_varint(number << 3 | 2) + as_varint(len(body)) + body


def as_varint(value: int) -> bytes:
    """Return a number, seven bits in a byte."""
    rest, septets = value & (1 << 64) - 1, []
    while rest > 127:
        septets.append(rest & 127 | 128)
        rest >>= 7
    return bytes((*septets, rest))


def write_mindrecords(folder: Path) -> None:
    """Write MindRecord files with the real package."""
    types = ("int32", "int64", "float32", "float64")
    schema = {f"{kind}s": {"type": kind, "shape": [-1]} for kind in types}
    values = np.array([0, -1, 127, -128, 128, 300, -40_000, 2**31 - 1])
    many = {f"{kind}s": values.astype(kind) for kind in types}
    wide = {**many, "int64s": np.array([2**62, -(2**62), 2**40, 5, -6])}
    write_mindrecord(folder / "ints.mindrecord", 1, schema, [many, wide])
    plain = {"id": {"type": "int32"}, "image": {"type": "bytes"}}
    write_mindrecord(
        folder / "one.mindrecord",
        1,
        plain,
        [{"id": at, "image": bytes([at, 0] * at)} for at in range(1, 5)],
    )
    schema = {
        "name": {"type": "string"},
        "label": {"type": "int32"},
        "big": {"type": "int64"},
        "score": {"type": "float32"},
        "w": {"type": "float64"},
        "data": {"type": "bytes"},
        "mask": {"type": "int64", "shape": [-1]},
        "box": {"type": "float32", "shape": [2, 2]},
    }
    rows_ = [
        {
            "name": "é" * at + ".jpg" * (at * 3),
            "label": at - 2,
            "big": at * 10**12,
            "score": at / 2,
            "w": at / 3,
            "data": bytes(range(at + 3)),
            "mask": np.arange(at + 1, dtype=np.int64),
            "box": np.full((2, 2), at, np.float32),
        }
        for at in range(7)
    ]
    write_mindrecord(folder / "two.mindrecord", 2, schema, rows_)


def write_mindrecord(path: Path, files: int, schema: Any, content: Any) -> None:
    """Write one dataset in small pages."""
    from mindspore.mindrecord import FileWriter  # type: ignore[import-not-found]

    writer = FileWriter(str(path), files, overwrite=True)
    writer.set_header_size(16 << 10)
    writer.set_page_size(32 << 10)
    writer.add_schema(schema, "test")
    writer.write_raw_data(content)
    writer.commit()


def unpack_mindrecords(golden: Path, folder: Path) -> None:
    """Write the MindRecord files that are kept beside the outcomes."""
    for name in RECORDS:
        for file_name in (name, f"{name}.db"):
            content = (golden / "mindrecord" / f"{file_name}.gz").read_bytes()
            (folder / file_name).write_bytes(gzip.decompress(content))


def write_folders(folder: Path) -> None:
    """Write a few rows of each kind that a folder can have."""
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
