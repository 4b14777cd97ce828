"""One stored sample: self-describing, returned whole and checked or not at all.

    header      48 bytes: magic, version, codec, flags, three lengths, key
    structure   JSON, padded with spaces up to where a body may start
    body        the buffers one after another, packed as one by the codec
    checksum    8 bytes: xxh3_64 of everything before

Integers are little-endian. Nothing is pickled: `structure` lists what a record can
hold, and reading one calls nothing that a record names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64

from .codec import CODECS, Codec, Image, Packed, is_image, predicted
from .structure import (
    ALIGNMENT,
    WRONG,
    Reader,
    TakenBytes,
    UnstorableError,
    aligned,
)

MAX_BYTES = 512 << 20
"""Largest body, and so the largest allocation that reading a record makes."""

MAX_STRUCTURE_BYTES = 8 << 20
"""Largest structure: once read, JSON takes up to some 40 times its size in memory."""

KEY_BYTES = 16
MAGIC = b"psrc"
VERSION = 1
HEADER = struct.Struct("<4sBBHQQQ16s")
CHECKSUM = struct.Struct("<Q")
PIECE = 96 << 10
"""Bytes hashed at once: from 100 KB on, xxhash releases the GIL."""
KEPT_BYTES = 1 << 21
"""Parts larger than this are hashed at once, without the GIL."""
WORTH = 0.97
"""A body that does not shrink to this share stays raw, and is read at no cost."""


class RecordError(ValueError):
    """The bytes are not a whole, undamaged, current record of that sample."""


ENCODER = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
)


def encode(sample: Any, key: bytes, codec: Codec) -> bytes:
    """Return the record of a sample: see `encode_parts`.

    Raises:
        UnstorableError: the sample, or a named part of it, would not come back equal.
        ValueError: the key is not 16 bytes long.
    """
    return b"".join(encode_parts(sample, key, codec))


def encode_parts(sample: Any, key: bytes, codec: Codec) -> list[bytes | memoryview]:
    """Return the record of a sample, as consecutive parts.

    Parts of a raw record may be the sample's own memory, so nothing is copied before it
    is written. A body that the codec hardly shrinks is stored raw.

    Args:
        sample: anything that `structure` can express: see the error's text.
        key: the key it is stored under, 16 bytes.
        codec: see `codec.codec`.

    Raises:
        UnstorableError: the sample, or a named part of it, would not come back equal.
        ValueError: the key is not 16 bytes long.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, a record's {KEY_BYTES}")
    taken = TakenBytes(sample)
    structure = written(taken)
    body = parts(taken.buffers, codec)
    length = sum(map(len, body))
    if length > MAX_BYTES:
        raise UnstorableError(
            f"sample has {length} bytes, but a cached one may have at most {MAX_BYTES};"
            " put the cache before the stage that makes it this large"
        )
    if codec.number:
        packed = codec.pack(b"".join(body))
        if len(packed) <= WORTH * length:
            return sealed(codec.number, structure, length, [packed], key)
    return sealed(0, structure, length, parts(taken.buffers, CODECS[0]), key)


def decode(record: Packed, key: bytes) -> Any:
    """Return the sample of a record.

    Arrays and tensors are contiguous, writable, and share memory with nobody else.

    Args:
        record: a writable one is assumed to be a copy made for this call. Large arrays
            of a raw record are then views of it, which saves a copy.
        key: the key it is stored under.

    Raises:
        RecordError: it is not a whole, undamaged, current record of that key.
    """
    codec, text, stored, body_bytes = check(record, key)
    try:
        structure = json.loads(str(text, "utf-8", "surrogatepass"))
        body = memoryview(codec.unpack(stored, body_bytes))
        is_ours = not body.readonly and (codec.number > 0 or is_aligned(body))
        return Reader(body, is_ours, codec.predicts).read(structure)
    except WRONG as error:
        raise RecordError(f"a record's content is wrong: {error}") from error


def unpacked_bytes(record: Sequence[bytes | memoryview]) -> int:
    """Return the unpacked size of the body of a record that is given in parts."""
    nbytes: int = HEADER.unpack(record[0])[5]
    return nbytes


def same(one: Any, other: Any) -> bool:
    """Whether two samples would come back identical: types, bytes and all.

    Raises:
        UnstorableError: one of them cannot be stored.
    """
    first, second = TakenBytes(one), TakenBytes(other)
    return written(first) == written(second) and all(
        map(np.array_equal, first.buffers, second.buffers)
    )


def written(taken: TakenBytes) -> bytes:
    """Return the structure as JSON, padded so that the body starts aligned.

    Raises:
        UnstorableError: it is longer than `MAX_STRUCTURE_BYTES`.
    """
    text = ENCODER.encode(taken.structure).encode("utf-8", "surrogatepass")
    if len(text) > MAX_STRUCTURE_BYTES:
        raise UnstorableError(
            f"sample has a structure of {len(text)} bytes, but a cache keeps at most"
            f" {MAX_STRUCTURE_BYTES}; put numbers into arrays"
        )
    return text.ljust(aligned(HEADER.size + len(text)) - HEADER.size)


def parts(buffers: Sequence[Image], codec: Codec) -> list[bytes | memoryview]:
    """Return the parts of the body before it is packed."""
    found: list[bytes | memoryview] = []
    length = 0
    for buffer in buffers:
        is_predicted = codec.predicts and is_image(buffer.shape)
        data = predicted(buffer) if is_predicted else buffer.reshape(-1)
        found += [bytes(-length % ALIGNMENT), data.data]
        length = aligned(length) + buffer.size
    return found


def sealed(
    number: int,
    structure: bytes,
    length: int,
    stored: Sequence[bytes | memoryview],
    key: bytes,
) -> list[bytes | memoryview]:
    """Return the parts of a record: header, structure, body and checksum."""
    stored_bytes = sum(map(len, stored))
    lengths = (len(structure), length, stored_bytes)
    header = HEADER.pack(MAGIC, VERSION, number, 0, *lengths, key)
    checksum = xxh3_64(header + structure)
    for part in stored:
        add_to(checksum, part)
    return [header, structure, *stored, CHECKSUM.pack(checksum.intdigest())]


def check(record: Packed, key: bytes) -> tuple[Codec, memoryview, memoryview, int]:
    """Check the header, lengths and checksum of a record.

    Returns:
        its codec, its structure, its body, and the size of the body unpacked.

    Raises:
        RecordError: it is not a whole, undamaged, current record of that key.
    """
    view = memoryview(record)
    if len(view) < HEADER.size + CHECKSUM.size:
        raise RecordError(f"{len(view)} bytes are too few for a record")
    magic, version, number, flags, *lengths, its_key = HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise RecordError(
            f"a record of kind {magic!r} {version}, not {MAGIC!r} {VERSION}: written"
            " by another version of penstock, or by another program; clear the cache"
        )
    end = len(view) - CHECKSUM.size
    checksum = xxh3_64()
    add_to(checksum, view[:end])
    if CHECKSUM.unpack_from(view, end)[0] != checksum.intdigest():
        raise RecordError(f"a record of {len(view)} bytes is damaged; delete it")
    if its_key != key:
        raise RecordError(
            f"a record of key {its_key.hex()} stands under {key.hex()}; delete it"
        )
    structure, body, stored = lengths
    if flags or number not in CODECS or HEADER.size + structure + stored != end:
        raise RecordError(f"a record's header is wrong: {number=} {flags=} {lengths=}")
    if structure > MAX_STRUCTURE_BYTES + ALIGNMENT or body > MAX_BYTES:
        raise RecordError(f"a record of {lengths} bytes is too large to be one of ours")
    start = HEADER.size + structure
    return CODECS[number], view[HEADER.size : start], view[start:end], body


def add_to(checksum: xxh3_64, part: bytes | memoryview) -> None:
    """Add bytes to a checksum.

    Parts of up to `KEPT_BYTES` are hashed in pieces for which xxhash keeps the GIL.
    When other threads want it, too, getting it back takes longer than hashing them.
    """
    if not PIECE < len(part) <= KEPT_BYTES:
        checksum.update(part)
        return
    view = memoryview(part)
    for start in range(0, len(view), PIECE):
        checksum.update(view[start : start + PIECE])


def is_aligned(view: memoryview) -> bool:
    """Whether the memory starts where any array may start."""
    if not view:
        return True
    start: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return start % ALIGNMENT == 0
