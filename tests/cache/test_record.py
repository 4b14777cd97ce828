"""A record is returned whole and checked, or not at all."""

import itertools
import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from penstock.cache import record as module
from penstock.cache.codec import CODECS, Codec, codec
from penstock.cache.record import (
    CHECKSUM,
    HEADER,
    MAGIC,
    MAX_BYTES,
    VERSION,
    RecordError,
    UnstorableError,
    check,
    decode,
    encode,
)

KEY = bytes(range(16))
EACH = pytest.mark.parametrize("each", CODECS.values(), ids=lambda c: c.name)
LENGTHS = (8, 16, 24)
"""Offsets in the header of three lengths: of the structure, of the body, and stored."""


def sample() -> tuple[Any, ...]:
    """Return a sample that every codec makes smaller, with a value of each kind."""
    slope = np.add.outer(np.arange(16), np.arange(16))[..., None] + np.arange(3)
    image = slope.astype(np.uint8)
    words = {"caption": "a pipe, " * 10, "n": 2**70, 0.5: [None, True, np.float32(2)]}
    return image, torch.zeros(30, dtype=torch.bfloat16), b"bytes" * 9, words


def codec_of(record: bytes | bytearray | memoryview) -> str:
    """Return the name of the codec that a record says it is packed with."""
    return CODECS[record[5]].name


def shown(value: Any) -> str:
    """Return a sample as text."""
    return repr([value, *(array.tolist() for array in value[:2])])


@EACH
def test_every_codec_is_in_use_in_these_tests(each: Codec) -> None:
    record = encode(sample(), KEY, each)
    assert codec_of(record) == each.name
    *_, body_bytes = check(record, KEY)
    assert body_bytes == 768 + 64 + 48 + 80 + 4
    assert shown(decode(record, KEY)) == shown(sample())


@EACH
def test_a_record_with_any_byte_changed_is_refused(each: Codec) -> None:
    record = bytearray(encode(sample(), KEY, each))
    for place, change in itertools.product(range(len(record)), (0x01, 0x80, 0xFF)):
        record[place] ^= change
        refused(record)
        record[place] ^= change
    assert shown(decode(record, KEY)) == shown(sample())


@EACH
def test_a_record_that_is_cut_or_longer_is_refused(each: Codec) -> None:
    record = encode(sample(), KEY, each)
    for length in range(len(record)):
        refused(record[:length])
        refused(record[len(record) - length :])
    refused(record + b"\0")
    refused(record + record)


def refused(record: bytes | bytearray) -> None:
    """Assert that both ways of reading refuse it."""
    with pytest.raises(RecordError):
        decode(record, KEY)
    with pytest.raises(RecordError):
        check(record, KEY)


def resealed(record: bytes | bytearray) -> bytearray:
    """Return a record with a checksum that fits its changed content."""
    record = bytearray(record)
    checksum = xxh3_64_intdigest(record[: -CHECKSUM.size])
    record[-CHECKSUM.size :] = CHECKSUM.pack(checksum)
    return record


def sealed(number: int, structure: bytes, length: int, body: bytes) -> bytearray:
    """Return a record of that content, whatever it is."""
    lengths = len(structure), length, len(body)
    header = HEADER.pack(MAGIC, VERSION, number, 0, *lengths, KEY)
    return resealed(header + structure + body + bytes(CHECKSUM.size))


@EACH
def test_a_forged_record_raises_only_a_record_error(each: Codec) -> None:
    record = bytearray(encode(sample(), KEY, each))
    outcomes = set()
    for place, change in itertools.product(range(len(record)), (0x01, 0x80, 0xFF)):
        record[place] ^= change
        outcomes.add(outcome(resealed(record)))
        record[place] ^= change
    assert outcomes == {"read", "refused"}


def outcome(record: bytes | bytearray) -> str:
    """Return whether it was read or refused; pass on any error but a `RecordError`."""
    try:
        decode(record, KEY)
    except RecordError:
        return "refused"
    return "read"


trees = st.recursive(
    st.none()
    | st.integers(-1, 2**64)
    | st.floats(allow_nan=False)
    | st.sampled_from([*"atldspbuBUif", "|B", "<f8", "<U3", "<M8[ns]", "uint8", "ff"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=60)
@given(trees.map(lambda tree: json.dumps(tree).encode()) | st.binary(max_size=60))
@example(b"[" * 100_000)
@example(b'["t",' * 5000)
@example(b"NaN")
@example(b"9" * 5000)
@example(b'["a","|B",' + b"9" * 5000 + b"]")
@example(b"[]  []")
@example(b"\xff")
@example(b"")
def test_every_structure_is_read_or_refused(structure: bytes) -> None:
    for each in CODECS.values():
        body = each.pack(bytes(range(32)))
        outcome(sealed(each.number, structure, 32, body))


def test_a_record_of_another_key_is_refused_with_both_named() -> None:
    record = encode(sample(), KEY, CODECS[0])
    other = bytes(16)
    with pytest.raises(RecordError, match=f"{KEY.hex()} stands under {other.hex()}"):
        decode(record, other)
    with pytest.raises(RecordError, match="stands under"):
        check(record, KEY[:15])
    assert codec_of(record) == "raw"


def test_a_record_of_another_version_is_refused_with_the_cure() -> None:
    record = bytearray(encode(sample(), KEY, CODECS[0]))
    record[4] += 1
    with pytest.raises(RecordError, match="b'psrc' 2, not b'psrc' 1.*clear the cache"):
        decode(resealed(record), KEY)


@EACH
def test_a_length_that_is_forged_is_refused_at_no_cost(each: Codec) -> None:
    record = encode(sample(), KEY, each)
    for place, length in itertools.product(LENGTHS, (0, 1, 2**31, 2**63, 2**64 - 1)):
        forgery = bytearray(record)
        struct.pack_into("<Q", forgery, place, length)
        with within(1 << 20), pytest.raises(RecordError):
            decode(resealed(forgery), KEY)


@pytest.mark.parametrize("name", ["zstd", "filter"])
@pytest.mark.parametrize("declared", [1000, MAX_BYTES + 1])
def test_a_record_expands_to_no_more_than_it_may(name: str, declared: int) -> None:
    bomb = codec("zstd").pack(bytes(64 << 20))
    number = codec(name).number
    record = sealed(number, b'["b",67108864]'.ljust(16), declared, bomb)
    with within(1 << 20), pytest.raises(RecordError):
        decode(record, KEY)


@contextmanager
def within(most_bytes: int) -> Iterator[None]:
    """Assert that no more than this is ever allocated."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


@EACH
def test_a_sample_that_no_codec_makes_smaller_is_stored_raw(each: Codec) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)
    for value in (noise, noise.tobytes(), 3, ()):
        assert codec_of(encode(value, KEY, each)) == "raw"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_record_is_read_from_any_bytes_like_object(kind: Any) -> None:
    for each in CODECS.values():
        record = kind(encode(sample(), KEY, each))
        assert shown(decode(record, KEY)) == shown(sample())
        assert codec_of(record) == each.name


@pytest.mark.parametrize("key", [b"", bytes(15), bytes(17)])
def test_a_key_of_another_length_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match=f"the key has {len(key)} bytes"):
        encode(1, key, CODECS[0])


def test_a_sample_too_large_for_a_record_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    assert decode(encode(bytes(100), KEY, CODECS[0]), KEY) == bytes(100)
    with pytest.raises(UnstorableError, match="has 101 bytes, but a cached one may"):
        encode(bytes(101), KEY, CODECS[0])


def test_a_sample_of_too_many_values_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_STRUCTURE_BYTES", 1000)
    assert decode(encode(["x" * 900], KEY, CODECS[0]), KEY) == ["x" * 900]
    with pytest.raises(UnstorableError, match="put numbers into arrays"):
        encode([0.123456] * 1000, KEY, CODECS[0])


def test_the_body_of_a_record_is_aligned_for_any_array() -> None:
    for length in range(40):
        record = encode(("x" * length, np.arange(3.0)), KEY, CODECS[0])
        structure = HEADER.unpack_from(record)[4]
        assert (HEADER.size + structure) % 16 == 0


def test_the_same_sample_makes_the_same_record_every_time() -> None:
    for each in CODECS.values():
        assert encode(sample(), KEY, each) == encode(sample(), KEY, each)
