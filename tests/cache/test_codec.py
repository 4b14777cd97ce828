"""Codecs give back what they were given, and never more than was declared."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.cache.codec import (
    CODECS,
    NAMES,
    Codec,
    CodecError,
    Image,
    codec,
    predicted,
    restored,
    zstd,
)

EACH = pytest.mark.parametrize("each", CODECS.values(), ids=lambda c: c.name)
BLOCK_BYTES = 128 << 10


def photograph(height: int = 64, width: int = 80) -> Image:
    """Return [H, W, 3]: slopes and noise as in photographs, all colours alike."""
    generator = np.random.default_rng(0)
    slope = np.add.outer(np.arange(height) * 2, np.arange(width))[..., None]
    light = slope + generator.integers(0, 12, (height, width, 1))
    colours = light + generator.integers(0, 3, (height, width, 3))
    return colours.astype(np.uint8)


@EACH
@given(body=st.binary(max_size=500).flatmap(lambda b: st.sampled_from([b, b * 50])))
def test_packed_bytes_are_unpacked_exactly(each: Codec, body: bytes) -> None:
    packed = memoryview(each.pack(body))
    assert bytes(each.unpack(packed, len(body))) == body


@EACH
def test_another_length_than_was_packed_is_refused(each: Codec) -> None:
    packed = memoryview(each.pack(bytes(range(256)) * 10))
    for length in (0, 2559, 2561, 10**6):
        with pytest.raises(CodecError):
            each.unpack(packed, length)


@pytest.mark.parametrize("name", ["zstd", "filter", "lz4"])
def test_bytes_of_no_codec_are_refused(name: str) -> None:
    for stored in (b"", b"\0", b"no packed bytes at all", bytes(1000)):
        with pytest.raises(CodecError):
            codec(name).unpack(memoryview(stored), 100_000)


def liar(declared: int, blocks: int) -> bytes:
    """Return a zstd frame that declares a size, and holds blocks of 128 KiB.

    RFC 8878, 3.1.1: a window of 8 MiB, the content's size in 4 bytes, then blocks that
    repeat one byte.
    """
    header = struct.pack("<IBBI", 0xFD2FB528, 0x80, 13 << 3, declared)
    repeat = (BLOCK_BYTES << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (BLOCK_BYTES << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return header + repeat * (blocks - 1) + last


def test_a_frame_that_tells_the_truth_is_read() -> None:
    frame = memoryview(liar(2 * BLOCK_BYTES, blocks=2))
    assert codec("zstd").unpack(frame, 2 * BLOCK_BYTES) == bytes(2 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("stored", "declared"),
    [
        (liar(1000, blocks=4000), 1000),
        (liar(BLOCK_BYTES, blocks=4000), BLOCK_BYTES),
        (liar(1000, blocks=1), 1000),
        (liar(500 << 20, blocks=4000), 1000),
        (liar(1000, blocks=4000), 500 << 20),
        (zstd().compress(bytes(10)) + liar(1 << 30, blocks=8000), 10),
    ],
    ids=["beyond", "later", "short", "large", "larger", "second frame"],
)
def test_a_frame_expands_to_no_more_than_it_declares(
    stored: bytes, declared: int
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            codec("zstd").unpack(memoryview(stored), declared)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_may_not_ask_for_a_large_window() -> None:
    asks = bytearray(liar(2 * BLOCK_BYTES, blocks=2))
    asks[5] = 17 << 3  # 128 MiB
    with pytest.raises(CodecError, match="too much memory"):
        codec("zstd").unpack(memoryview(asks), 2 * BLOCK_BYTES)


def test_lz4_allocates_nothing_for_an_impossible_length() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="cannot hold"):
            codec("lz4").unpack(memoryview(bytes(20)), 500 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


shapes = arrays.array_shapes(min_dims=2, max_dims=4, max_side=24) | st.sampled_from(
    [(3, 20, 30), (1, 7, 300), (40, 30, 3), (2, 5, 6, 4), (5, 5, 1), (300, 2)]
)


@given(arrays.arrays(np.uint8, shapes))
def test_an_image_is_restored_from_its_residuals(image: Image) -> None:
    before = image.copy()
    residuals = predicted(image)
    copy = residuals.copy()
    again = restored(residuals, image.shape)
    assert residuals.shape == (image.size,)
    assert np.array_equal(image, before)
    assert np.array_equal(residuals, copy)
    assert np.array_equal(again, image)
    assert again.shape == image.shape
    assert again.flags.writeable
    assert again.flags.c_contiguous
    assert not np.shares_memory(again, residuals)


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1)], ids=["HWC", "CHW"])
def test_a_photograph_is_smaller_by_prediction(axes: tuple[int, int, int]) -> None:
    image = np.ascontiguousarray(photograph().transpose(axes))
    packed = {c.name: len(c.pack(image.tobytes())) for c in CODECS.values()}
    nbytes = len(codec("filter").pack(predicted(image).tobytes()))
    assert nbytes < 0.7 * min(packed.values())


def test_every_name_but_auto_is_a_codec() -> None:
    assert [codec(name).name for name in NAMES if name != "auto"] == list(NAMES[1:])
    assert [codec.number for codec in CODECS.values()] == [0, 1, 2, 3]
