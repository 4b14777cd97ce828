"""Rows in files of records: TFRecord, lines of text, and where all of them begin."""

from __future__ import annotations

import glob
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError, check
from .columns import Row, as_leaf, reads
from .dataset import Dataset, Names, names_of
from .generator import Reading, made_of
from .samplers import DistributedSampler, SubsetRandomSampler, SubsetSampler
from .settings import Schema, Shuffle

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# First byte and size of each part of each record of a file, `[n, parts, 2]`.
Extents = NDArray[np.int64]


class Records:
    """Rows by their index, each made of some parts of a file.

    Args:
        files: paths.
        extents: the records of each file.
        make: returns a row, given the bytes of each part.
        name: the name in the log.
    """

    def __init__(
        self,
        files: Sequence[str],
        extents: Sequence[Extents],
        make: Callable[..., Row],
        name: str,
    ) -> None:
        self._files, self._extents, self._make = files, extents, make
        self.group_sizes = [len(records) for records in extents]
        self._ends = list(accumulate(self.group_sizes))
        self.name = name

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        at = bisect_right(self._ends, range(len(self))[index])
        extents = self._extents[at][index - self._ends[at]]
        parts = []
        with open(self._files[at], "rb", buffering=0) as file:
            for first, size in extents.tolist():
                file.seek(first)
                parts.append(file.read(size))
        with reads(self._files[at], SampleError):
            if list(map(len, parts)) != extents[:, 1].tolist():
                raise SampleError(f"it ends within record {index}; write it again")
            return self._make(*parts)


def files_of(files: Files) -> list[str]:
    """Return the paths that names and patterns stand for.

    Raises:
        SpecError: there is no file of a name, or of a pattern.
    """
    names = [
        os.fspath(name)
        for name in ([files] if isinstance(files, (str, os.PathLike)) else files)
    ]
    found = [
        sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        for name in names
    ]
    missing = [name for name, paths in zip(names, found, strict=True) if not paths]
    check(
        names and not missing,
        f"there is no file {', '.join(map(repr, missing)) or repr(files)}; give paths"
        " of files that are there, or patterns",
    )
    return [*chain.from_iterable(found)]


def of_records(
    rows: Records, columns: Sequence[str], reading: dict[str, Any]
) -> Dataset:
    """Return a dataset of records. `Shuffle.FILES` and `INFILE` mix file by file."""
    windowed = reading.get("shuffle") in (Shuffle.FILES, Shuffle.INFILE)
    if not windowed or len(rows.group_sizes) == 1:
        return made_of(rows, columns, reading)
    return made_of(rows, columns, {**reading, "shuffle": False}).shuffled_by_file()


# TFRecord: a record is its length, a sum of that, the data, and a sum of these.


def TFRecordDataset(
    dataset_files: Files,
    schema: Schema | str | os.PathLike[str] | None = None,
    columns_list: Names = None,
    shard_equal_rows: bool = False,
    **reading: Unpack[Reading],
) -> Dataset:
    """Load the examples of TFRecord files; all sums are checked.

    Args:
        dataset_files: paths, or patterns.
        schema: type and shape of the columns to read. Without one, integers are
            `int64`, floats `float32`, and text the bytes `uint8`.
        columns_list: the columns to read, in this order (default: all).
        shard_equal_rows: whether a shard is a part of the rows, equally long for all;
            otherwise shards are every `num_shards`-th file.
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no file, or no such column; a file is damaged; or there are
            fewer files than shards.
    """
    files, options = files_of(dataset_files), dict[str, Any](reading)
    shards: Any = options.get("num_shards")
    if shards is not None and options.get("shard_id") is not None:
        DistributedSampler(shards, options["shard_id"])  # refuses what is no shard
        check(
            options.get("sampler") is None,
            f"`sampler` decides the order alone, got {shards} shards, too; leave one"
            " of them out",
        )
        check(
            shard_equal_rows or len(files) >= shards,
            f"{shards} shards need as many files, got {len(files)}; pass"
            " shard_equal_rows=True",
        )
        if not shard_equal_rows:
            files = files[options.pop("shard_id") :: options.pop("num_shards")]
    row_schema = (
        schema if isinstance(schema, Schema) or schema is None else Schema(schema)
    )
    extents = list(map(tf_extents, files))
    specs = (
        row_schema.columns if row_schema else {k: {} for k in tf_names(files, extents)}
    )
    columns = names_of(columns_list) or list(specs)
    for name in columns:
        check(
            name in specs, f"there is no column {name!r}; there are {', '.join(specs)}"
        )
    make = partial(tf_row, specs={name: specs[name] for name in columns})
    rows = Records(files, extents, make, "TFRecord")
    if options.get("num_samples") is None and row_schema and row_schema.rows:
        options["num_samples"] = row_schema.rows
    return of_records(rows, columns, in_blocks(options, len(rows)))


def in_blocks(reading: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return arguments that read a block of so many rows as a shard."""
    options = dict(reading)
    shards, shard = options.pop("num_shards", None), options.pop("shard_id", None)
    if shards is None or shard is None:
        return reading
    share = -(-rows // shards)
    part = (shard * share + np.arange(share)) % rows
    random = options.pop("shuffle", None) is not False
    kind = SubsetRandomSampler if random else SubsetSampler
    return {
        **options,
        "num_samples": None,
        "sampler": kind(part, options.get("num_samples")),
    }


def tf_extents(path: str) -> Extents:
    """Return where the records of a file are, without reading them.

    Raises:
        SpecError: the file is damaged.
    """
    extents, at, end = [], 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while at < end:
            file.seek(at)
            head = file.read(12)
            right = len(head) == 12 and masked_crc(head[:8]) == head[8:]
            size = int.from_bytes(head[:8], "little") + 16
            check(
                right and at + size <= end,
                f"{path!r} is not a TFRecord file, or is damaged at byte {at}; write it"
                " again, without compression",
            )
            extents.append(((at, size),))
            at += size
    return np.array(extents, np.int64).reshape(-1, 1, 2)


def tf_names(files: Sequence[str], extents: Sequence[Extents]) -> list[str]:
    """Return the columns of the first record, sorted."""
    rows = Records(files, extents, lambda record: (example(record),), "")
    check(len(rows), f"there is no record in {files!r}; give files that have some")
    return sorted(rows[0][0])


def example(record: bytes) -> dict[str, tuple[int, list[Any]]]:
    """Return what each feature of a record has, by name.

    Raises:
        SampleError: it is damaged.
    """
    data = record[12:-4]
    if masked_crc(data) != record[-4:]:
        raise SampleError(
            "a TFRecord is damaged: its sum is wrong; write the file again"
        )
    return read_example(data)


def tf_row(record: bytes, specs: dict[str, dict[str, Any]]) -> Row:
    """Return the columns of a record.

    Raises:
        SampleError: it lacks one, or has other values.
    """
    features = example(record)
    row = []
    for name, spec in specs.items():
        if name not in features:
            raise SampleError(f"a record has no {name!r}; it has {', '.join(features)}")
        row.append(as_leaf(tf_column(name, *features[name], spec, len(record))))
    return tuple(row)


def tf_column(
    name: str, list_kind: int, values: list[Any], spec: dict[str, Any], size: int
) -> NDArray[Any]:
    """Return the values of a column, as a schema says.

    Args:
        name: the name of the column.
        list_kind: the kind of its list: see `feature`.
        values: what is in that.
        spec: its type and shape.
        size: bytes of the whole record.

    Raises:
        SampleError: the values fit no such shape, or would fill the memory.
    """
    kind, shape = spec.get("type"), spec.get("shape")
    if list_kind == 1 and kind == "string":
        array = np.array([value.decode() for value in values], np.str_)
    elif list_kind == 1:
        long = max(map(len, values), default=0)
        if long * len(values) > max(ROOMY, TIMES * size):
            raise SampleError(
                f"the {len(values)} texts of the column {name!r}, all filled up to"
                f" {long} bytes, are {TIMES} times as large as their record; give the"
                " column the type 'string' in a schema"
            )
        content = b"".join(value.ljust(long) for value in values)
        array = np.frombuffer(content, np.uint8)
    else:
        array = np.array(values, np.float32 if list_kind == 2 else np.int64)
    if kind not in (None, "string"):
        array = array.astype(kind)
    try:
        return array if shape is None else array.reshape(shape)
    except ValueError as error:
        raise SampleError(
            f"the column {name!r} of a record has {array.size} values, and in the"
            f" schema the shape {shape}; change the schema"
        ) from error


# How large texts of one size may be: a multiple of their record, or bytes.
TIMES, ROOMY = 100, 1 << 24


# tf.train.Example in the wire format of protocol buffers.


def read_example(data: bytes) -> dict[str, tuple[int, list[Any]]]:
    """Return what each feature of a `tf.train.Example` has, by name."""
    feature_lists = {}
    for _, features in fields(data):
        for _, entry in fields(features):
            parts = dict(fields(entry))
            feature_lists[parts[1].decode()] = feature(parts.get(2, b""))
    return feature_lists


def feature(data: bytes) -> tuple[int, list[Any]]:
    """Return the kind of a feature (1: bytes; 2: floats; 3: integers), and values."""
    kind, items = 3, list[Any]()
    for kind, values in fields(data):
        for _, value in fields(values):
            if kind == 1:
                items.append(value)
            elif kind == 2:
                items += np.frombuffer(value, "<f4").tolist()
            else:
                items += [signed(value)] if isinstance(value, int) else packed(value)
    return kind, items


def packed(data: bytes) -> Iterator[int]:
    """Yield signed numbers that stand one after another."""
    at = 0
    while at < len(data):
        number, at = varint(data, at)
        yield signed(number)


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message.

    Raises:
        SampleError: it has a field of an old or unknown kind.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        if kind not in FIXED:
            raise SampleError(f"a record has a field of kind {kind}; it is no Example")
        size, at = (FIXED[kind], at) if kind != 2 else varint(data, at)
        if at + size > len(data):
            raise SampleError("a record ends within a field; write the file again")
        yield key >> 3, data[at : at + size]
        at += size


# Bytes of a field by its kind; 2: its size comes first.
FIXED = {1: 8, 2: 0, 5: 4}


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, seven bits in a byte, and the place behind it.

    Raises:
        SampleError: it has more than 64 bits.
    """
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise SampleError("a record has a number of more than 64 bits; write it again")


def signed(value: int) -> int:
    """Return the signed number that 64 bits stand for."""
    return value - (1 << 64) if value >> 63 else value


# CRC32C (Castagnoli), as TFRecord masks it.

# Bytes whose sum is taken step by step, side by side with those of other lanes.
LANE = 64
# Bytes from which on lanes pay.
LONG = 64 * LANE


@cache
def crc_tables() -> tuple[list[int], NDArray[np.uint32], list[list[int]]]:
    """Return what a byte does to a sum, and what a lane of zeros does to each byte."""
    table: NDArray[Any] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    lanes = []
    for byte in range(4):
        sums: NDArray[Any] = np.arange(256, dtype=np.uint32) << np.uint32(8 * byte)
        for _ in range(LANE):
            sums = table[sums & 255] ^ (sums >> 8)
        lanes.append(sums.tolist())
    return table.tolist(), table, lanes


def crc32c(data: bytes) -> int:
    """Return the CRC32C of data."""
    steps, table, (first, second, third, fourth) = crc_tables()
    total, at = 0xFFFFFFFF, 0
    if len(data) >= LONG:
        count = len(data) // LANE
        at = count * LANE
        lanes = np.frombuffer(data, np.uint8, at).reshape(count, LANE).T
        sums = np.zeros(count, np.uint32)
        for byte in lanes:
            sums = table[(sums ^ byte) & 255] ^ (sums >> np.uint32(8))
        for lane_sum in sums.tolist():
            total = (
                first[total & 255]
                ^ second[total >> 8 & 255]
                ^ third[total >> 16 & 255]
                ^ fourth[total >> 24]
                ^ lane_sum
            )
    for value in data[at:]:
        total = steps[(total ^ value) & 255] ^ (total >> 8)
    return total ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> bytes:
    """Return the sum as TFRecord stores it, 4 bytes."""
    total = crc32c(data)
    return struct.pack("<I", ((total >> 15 | total << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# Lines of text.


def TextFileDataset(dataset_files: Files, **reading: Unpack[Reading]) -> Dataset:
    """Load the lines of files that are not empty: the column `text`.

    Args:
        dataset_files: paths, or patterns.
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no such file.
    """
    files = files_of(dataset_files)
    rows = Records(files, list(map(line_extents, files)), text_row, "TextFile")
    return of_records(rows, ["text"], dict(reading))


def line_extents(path: str) -> Extents:
    """Return where the lines of a file are that are not empty."""
    extents, at = [], 0
    with open(path, "rb") as file:
        for line in file:
            size = len(line.rstrip(b"\r\n"))
            if size:
                extents.append(((at, size),))
            at += len(line)
    return np.array(extents, np.int64).reshape(-1, 1, 2)


def text_row(line: bytes) -> Row:
    """Return the row of a line."""
    return (line.decode(),)
