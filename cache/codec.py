"""Codecs that make the body of a record smaller: lz4, zstd, zstd of predictions, none.

Measured on 100 photographs decoded and cropped to 224 x 224 x 3, as whole records (two
shared cores, Python 3.11): the stored size as a share, and the speed in bytes of the
photograph, including the copy out of the store:

    raw     1.00    encode 15 GB/s      decode 14 GB/s
    lz4     0.93    encode 1.7 GB/s     decode 8.5 GB/s
    zstd    0.86    encode 0.71 GB/s    decode 1.35 GB/s
    filter  0.49    encode 0.34 GB/s    decode 0.55 GB/s

(A record that a codec hardly shrinks is kept raw: half of these, with lz4.) lz4 and
zstd look for repeats, and a photograph has few; but its pixels can be predicted. The
share that zstd leaves of each predictor's residuals, all mod 256, and the microseconds
that undoing it takes in numpy:

    the pixel above                                     0.63     31
    the pixel to the left                               0.62     57
    green for red and blue, then above                  0.54     78
    the same, colours stored one after the other        0.52     83
    the same, then left                                 0.49    140
    the same, zstd in blocks of 48 KiB: "filter"        0.486   140

"filter" is chosen if room is short and samples are expensive, so size won.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Name = Literal["auto", "raw", "lz4", "zstd", "filter"]
# What users may pass; `record.Picker` resolves "auto".
NAMES: tuple[Name, ...] = get_args(Name)

Packed = bytes | bytearray | memoryview
Image = NDArray[np.uint8]

# A byte of lz4 yields at most this many (its block format, "linear small-integer").
LZ4_MAX_RATIO = 255

ZSTD_LEVEL = 1
# Each block gets its own Huffman codes: about the size of one colour of one image.
ZSTD_BLOCK_BYTES = 48 << 10

# 8 MiB: the largest window a frame may ask for; level 1 writes at most 512 KiB.
ZSTD_MAX_WINDOW_LOG = 23

MIN_IMAGE_BYTES = 1024


class CodecError(ValueError):
    """The bytes were not packed by this codec, or not from this many bytes."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a body is packed, and unpacked within a bound. Safe in any thread."""

    name: str
    number: int
    """Identifies the codec in records: never reused for another."""
    pack: Callable[[bytes], bytes]
    unpack: Callable[[memoryview, int], Packed]
    """Return exactly this many bytes, writable if nobody else holds them.

    Raises `CodecError` rather than produce more.
    """
    predicts: bool = False
    """Whether images are stored as residuals of a prediction."""


def codec(name: str) -> Codec:
    """Return the codec of this name."""
    return next(codec for codec in CODECS.values() if codec.name == name)


def kept(stored: memoryview, length: int) -> memoryview:
    """Return the body unchanged.

    Raises:
        CodecError: it does not have `length` bytes.
    """
    if len(stored) != length:
        raise CodecError(f"raw: {len(stored)} bytes stored of {length}")
    return stored


def lz4_pack(body: bytes) -> bytes:
    """Return one lz4 block, without its size."""
    import lz4.block

    return bytes(lz4.block.compress(body, store_size=False))


def lz4_unpack(stored: memoryview, length: int) -> bytearray:
    """Undo `lz4_pack`.

    Raises:
        CodecError: this is not a block of `length` bytes.
    """
    import lz4.block

    if length > LZ4_MAX_RATIO * len(stored):
        raise CodecError(f"lz4: {len(stored)} bytes cannot hold {length}")
    try:
        body: bytearray = lz4.block.decompress(
            stored, uncompressed_size=length, return_bytearray=True
        )
    except lz4.block.LZ4BlockError as error:
        raise CodecError(f"lz4: {error}") from error
    if len(body) != length:
        raise CodecError(f"lz4: {len(body)} bytes unpacked, {length} declared")
    return body


def zstd_pack(body: bytes) -> bytes:
    """Return one zstd frame."""
    return bytes(zstd().compress(body, ZSTD_LEVEL))


def zstd_pack_blocks(body: bytes) -> bytes:
    """Return one zstd frame of short blocks, for bytes whose mixture changes."""
    compressor = zstd().ZstdCompressor(ZSTD_LEVEL)
    compressor.set_pledged_input_size(len(body))
    view = memoryview(body)
    blocks = [
        compressor.compress(view[at : at + ZSTD_BLOCK_BYTES], compressor.FLUSH_BLOCK)
        for at in range(0, len(body), ZSTD_BLOCK_BYTES)
    ]
    return b"".join([*blocks, compressor.flush()])


def zstd_unpack(stored: memoryview, length: int) -> bytes:
    """Undo `zstd_pack` and `zstd_pack_blocks`.

    The declared size is not trusted: a frame may expand beyond it, 32000 times its own
    size, before the library notices. So the output has a bound of its own.

    Raises:
        CodecError: this is not one frame of `length` bytes.
    """
    library = zstd()
    limits = {library.DecompressionParameter.window_log_max: ZSTD_MAX_WINDOW_LOG}
    decompressor = library.ZstdDecompressor(options=limits)
    try:
        if library.get_frame_info(stored).decompressed_size != length:
            raise CodecError(f"zstd: the frame is not one of {length} bytes")
        body: bytes = decompressor.decompress(stored, max_length=length)
    except library.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if len(body) != length or not decompressor.eof or decompressor.unused_data:
        raise CodecError(f"zstd: not one whole frame of {length} bytes")
    return body


def zstd() -> ModuleType:
    """Return the module, part of Python since 3.14."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


# By number, the simplest first.
CODECS = {
    codec.number: codec
    for codec in (
        Codec("raw", 0, bytes, kept),
        Codec("lz4", 1, lz4_pack, lz4_unpack),
        Codec("zstd", 2, zstd_pack, zstd_unpack),
        Codec("filter", 3, zstd_pack_blocks, zstd_unpack, predicts=True),
    )
}


def is_image(shape: Sequence[int]) -> bool:
    """Whether bytes of this shape are worth predicting."""
    return len(shape) > 1 and math.prod(shape) >= MIN_IMAGE_BYTES


def predicted(image: Image) -> Image:
    """Return the residuals of an image: one row, as many bytes as the image has."""
    channels, width, is_interleaved = planes_of(image.shape)
    planes = image.reshape(-1, channels).T if is_interleaved else image
    planes = planes.reshape(channels, -1).copy()
    if channels > 2:
        planes[0] -= planes[1]
        planes[2] -= planes[1]
    flat = planes.reshape(-1)
    flat[1:] -= flat[:-1]
    flat[width:] -= flat[:-width]
    return flat


def restored(left: Image, shape: Sequence[int]) -> Image:
    """Undo `predicted`: return an image of that shape in memory of its own.

    `left` is not modified.
    """
    channels, width, is_interleaved = planes_of(shape)
    planes = summed(summed(left, 1), width).reshape(channels, -1)
    if channels > 2:
        planes[0] += planes[1]
        planes[2] += planes[1]
    if is_interleaved:
        planes = np.stack([*planes], axis=-1)  # 5 times as fast as `planes.T.copy()`
    return planes.reshape(shape)


def planes_of(shape: Sequence[int]) -> tuple[int, int, bool]:
    """Return an image's channels, its width, and whether channels come last.

    Shapes are [..., H, W, C], [C, H, W] or [..., H, W], with C up to 4. A wrong guess
    costs some bytes and nothing else.
    """
    if len(shape) > 2 and shape[-1] <= 4:
        return shape[-1], shape[-2], True
    if len(shape) == 3 and shape[0] <= 4:
        return shape[0], shape[-1], False
    return 1, shape[-1], False


def summed(values: Image, stride: int) -> Image:
    """Return running sums, mod 256, of every `stride`-th value, in new memory.

    Each pass doubles the reach of a sum (W. D. Hillis and G. L. Steele, CACM 29, 1986).
    The log2(n / stride) passes over the whole row, each one call that releases the GIL,
    are 6 times as fast as `np.add.accumulate`.
    """
    now, spare = values.copy(), np.empty_like(values)
    while stride < len(values):
        np.add(now[stride:], now[:-stride], out=spare[stride:])
        spare[:stride] = now[:stride]
        now, spare = spare, now
        stride *= 2
    return now
