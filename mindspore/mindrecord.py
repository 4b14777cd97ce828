"""MindRecord files: pages of records, and an SQLite database that says where they are.

A file begins with the size of its header, which is JSON: the schema, and the sizes of
the header and of a page. Pages follow. A record has a part in a page of values, a
MessagePack map behind its size, and a part in a page of blobs behind theirs: arrays and
bytes, one after another in the order of `blob_fields`. If there are several, the size
of each, big-endian, comes before it. Arrays of integers are packed: their number, two
bits for each that give its width, and then each in as few bytes as it needs.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from ..errors import SampleError, SpecError, check
from .columns import DAMAGE, Row, as_leaf
from .dataset import Dataset, Names, names_of
from .generator import Slices, made_of
from .records import Extents, Records, of_records

PLACES = (
    "SELECT PAGE_ID_RAW, PAGE_OFFSET_RAW, PAGE_OFFSET_RAW_END,"
    " PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES ORDER BY ROW_ID"
)

TABLE = (
    "SELECT type, sql FROM sqlite_master WHERE name = 'INDEXES' COLLATE NOCASE"
    " AND type IN ('table', 'view')"
)
# Bytes that a value of the database may have.
CELL = 1 << 20


def MindDataset(
    dataset_files: str | os.PathLike[str] | Sequence[str] | None = None,
    columns_list: Names = None,
    num_parallel_workers: int | None = None,
    padded_sample: Mapping[str, Any] | None = None,
    num_padded: int | None = None,
    dataset_file: str | None = None,
    **reading: Any,
) -> Dataset:
    """Load the records of MindRecord files. Bytes are `uint8 [n]`.

    Args:
        dataset_files: a path: it and the files that were written with it; or several:
            these only.
        columns_list: the columns to read, in this order (default: all).
        num_parallel_workers: workers to start with.
        padded_sample: a row to append, so that the rows fill all shards.
        num_padded: how often.
        dataset_file: what older scripts call `dataset_files`.
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no such file or column, or a file is something else.
    """
    paths = dataset_files or dataset_file or ""
    several = not isinstance(paths, (str, os.PathLike))
    files = [os.fspath(paths)] if isinstance(paths, (str, os.PathLike)) else [*paths]
    headers = [*map(header_of, files)]
    if not several:
        folder = Path(files[0]).parent
        files = [
            str(folder / Path(name).name) for name in headers[0]["shard_addresses"]
        ]
        headers = [*map(header_of, files)]
    schema = headers[0]["schema"][0]
    columns = names_of(columns_list) or sorted(schema["schema"])
    for name in columns:
        specs = schema["schema"]
        check(
            name in specs, f"there is no column {name!r}; there are {', '.join(specs)}"
        )
    make = partial(row_of, schema=schema, columns=columns)
    extents = [*map(extents_of, files, headers)]
    rows: Any = Records(files, extents, make, "MindRecord")
    settings = {"num_parallel_workers": num_parallel_workers, **reading}
    if padded_sample and num_padded:
        more: Any = Slices(
            [[np.asarray(padded_sample[name])] * num_padded for name in columns]
        )
        return made_of(ConcatDataset([rows, more]), columns, settings)
    return of_records(rows, columns, settings)


def header_of(path: str) -> dict[str, Any]:
    """Return the header of a file.

    Raises:
        SpecError: it is no MindRecord file, or one of an unknown version.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(size, 1 << 26)))
        is_readable = header["version"] in ("2.0", "3.0")
        schema = header["schema"][0]
        sizes = (header["header_size"], header["page_size"])
        right = isinstance(schema["schema"], dict) and {*map(type, sizes)} == {int}
        names = [*schema["blob_fields"], *header["shard_addresses"]]
        if not right or {*map(type, names)} - {str}:
            raise ValueError("its header has other fields")
    except (OSError, *DAMAGE) as error:
        raise SpecError(
            f"{path!r} is not a MindRecord file: {error}; give the files that a"
            " FileWriter wrote"
        ) from error
    check(
        is_readable,
        f"{path!r} is MindRecord version {header['version']}; 3.0 can be read",
    )
    return header


def extents_of(path: str, header: dict[str, Any]) -> Extents:
    """Return where the two parts of each record are.

    Raises:
        SpecError: its database is missing, or is something else.
    """
    uri, end = (
        f"{Path(path + '.db').absolute().as_uri()}?mode=ro",
        os.path.getsize(path),
    )
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, CELL)
            table = database.execute(TABLE).fetchall()
            check(
                [kind for kind, sql in table if sql.startswith("CREATE TABLE")]
                == ["table"],
                "it has no table INDEXES",
            )
            rows = database.execute(PLACES).fetchmany(end // 8 + 1)
        numbers = np.array(rows, np.int64)
        places = numbers.reshape(-1, 2, 3)
        pages = header["header_size"] + header["page_size"] * places[..., 0]
        firsts = pages + places[..., 1]
        sizes = places[..., 2] - places[..., 1]
        right = (firsts >= 0) & (firsts <= end) & (sizes >= 8) & (sizes <= end - firsts)
        check(
            right.all() and len(right) <= end // 8,
            f"it names places that {path!r} does not have",
        )
    except (sqlite3.Error, *DAMAGE) as error:
        raise SpecError(
            f"the index {path + '.db'!r} cannot be read: {error}; keep both files"
            " beside each other under the names they were written with"
        ) from error
    return np.stack([firsts, sizes], axis=-1)


def row_of(
    raw: bytes, blob: bytes, schema: dict[str, Any], columns: Sequence[str]
) -> Row:
    """Return the columns of a record.

    Raises:
        SampleError: its parts are of other sizes than they say.
    """
    for part in (raw, blob):
        if int.from_bytes(part[:8], "little") != len(part) - 8:
            raise SampleError(
                "a part of a record is of another size than it says; write it again"
            )
    values, _ = unpacked(raw, 8)
    blobs = blobs_of(blob[8:], schema["blob_fields"])
    row = []
    for name in columns:
        spec = schema["schema"][name]
        if name in blobs:
            row.append(as_leaf(array_of(blobs[name], spec)))
        else:
            kind = spec["type"]
            row.append(
                str(values[name]) if kind == "string" else np.array(values[name], kind)
            )
    return tuple(row)


def blobs_of(content: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Return the blobs of a record by name."""
    if len(names) == 1:
        return {names[0]: content}
    blobs, at = {}, 0
    for name in names:
        size = int.from_bytes(content[at : at + 8], "big")
        blobs[name] = content[at + 8 : at + 8 + size]
        at += 8 + size
    return blobs


def array_of(content: bytes, spec: dict[str, Any]) -> NDArray[Any]:
    """Return the array that a blob stands for."""
    kind = spec["type"]
    if kind in ("int32", "int64"):
        return integers(content).astype(kind).reshape(spec["shape"])
    array = np.frombuffer(content, "u1" if kind == "bytes" else kind)
    return array.reshape(spec["shape"]) if "shape" in spec else array


def integers(content: bytes) -> NDArray[np.int64]:
    """Return packed integers."""
    count = int.from_bytes(content[:4], "big")
    bits = np.frombuffer(content, np.uint8, -(-count // 4), 4)
    codes = (bits[:, None] >> np.array([6, 4, 2, 0]) & 3).reshape(-1)[:count]
    widths = 1 << codes
    firsts = 4 + len(bits) + np.cumsum(widths) - widths
    body, values = np.frombuffer(content, np.uint8), np.empty(count, np.int64)
    for code in range(4):
        indices = np.flatnonzero(codes == code)
        places = firsts[indices, None] + np.arange(1 << code)
        values[indices] = body[places].view(f"<i{1 << code}")[:, 0]
    return values


# MessagePack, as far as MindRecord uses it.

NUMBERS = {0xCA + at: f">{code}" for at, code in enumerate("fdBHIQbhiq")}
# How the size of a longer text, or of a larger map, is stored.
SIZES = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDE: ">H", 0xDF: ">I"}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpacked(data: bytes, at: int) -> tuple[Any, int]:
    """Return the value at a place, and the place behind it.

    Raises:
        SpecError: it is of a kind that MindRecord does not write.
    """
    kind, at = data[at], at + 1
    if kind < 0x80 or kind >= 0xE0:
        return (kind if kind < 0x80 else kind - 256), at
    if kind in CONSTANTS:
        return CONSTANTS[kind], at
    form = NUMBERS.get(kind) or SIZES.get(kind)
    if form:
        (number,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        if kind in NUMBERS:
            return number, at
    else:
        number = kind & (0x1F if kind >= 0xA0 else 0x0F)
    if 0xA0 <= kind < 0xC0 or 0xD9 <= kind <= 0xDB:
        check(
            at + number <= len(data),
            "a text of a MindRecord file is cut off; write it again",
        )
        return data[at : at + number].decode(), at + number
    check(
        0x80 <= kind < 0x90 or kind >= 0xDE,
        f"a MindRecord file has a value of kind {kind:#x}; it is damaged",
    )
    mapping = {}
    for _ in range(number):
        key, at = unpacked(data, at)
        mapping[key], at = unpacked(data, at)
    return mapping, at
