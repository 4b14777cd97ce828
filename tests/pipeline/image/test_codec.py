"""Decoding: every format to RGB, and every damaged file to an error."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.EpsImagePlugin
import PIL.Image
import pytest

from penstock.errors import SampleError
from penstock.pipeline.image import decode
from penstock.pipeline.image.codec import decode_reduced, opened_picture, size_of
from penstock.pipeline.image.geometry import Image


def encoded(pixels: Image, mode: str, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def by_pillow(data: bytes) -> Image:
    return np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))


FORMATS = [
    ("RGB", "JPEG", {"quality": 90}),
    ("RGB", "JPEG", {"progressive": True}),
    ("RGB", "JPEG", {"restart_marker_blocks": 4}),
    ("L", "JPEG", {}),
    ("CMYK", "JPEG", {}),
    ("RGB", "PNG", {}),
    ("RGBA", "PNG", {}),
    ("P", "GIF", {}),
    ("RGB", "WEBP", {}),
]
JPEGS = FORMATS[:5]


@pytest.mark.parametrize(("mode", "kind", "options"), FORMATS)
def test_every_format_decodes_to_the_pixels_of_pillow(
    photo: Image, mode: str, kind: str, options: dict[str, object]
) -> None:
    data = encoded(photo, mode, kind, **options)
    pixels = decode(data)
    assert isinstance(pixels, np.ndarray)
    assert (pixels.dtype, pixels.shape) == (np.uint8, photo.shape)
    assert pixels.flags.writeable
    assert np.abs(pixels.astype(int) - by_pillow(data)).max() <= 1
    assert size_of(data) == photo.shape[:2]


@pytest.mark.parametrize(("mode", "kind", "options"), JPEGS)
def test_a_jpeg_cut_anywhere_is_an_error(
    photo: Image, mode: str, kind: str, options: dict[str, object]
) -> None:
    data = encoded(photo, mode, kind, **options)
    cuts = {*range(0, len(data), len(data) // 40), *(len(data) - i for i in (1, 2, 3))}
    for cut in sorted(cuts):
        with pytest.raises(ValueError, match=rf"got {cut} bytes.*leave it out"):
            decode(data[:cut])


def test_a_truncated_jpeg_is_reported_as_such(photo_file: bytes) -> None:
    with pytest.raises(ValueError, match="got 5000 bytes: Premature end of JPEG file"):
        decode(photo_file[:5000])


def test_entropy_data_that_ends_early_is_an_error(photo_file: bytes) -> None:
    data = photo_file[:20_000] + b"\xff\xd9"
    with pytest.raises(ValueError, match="premature end of data segment"):
        decode(data)


def test_stray_bytes_that_cost_no_pixel_are_skipped(photo_file: bytes) -> None:
    stray = photo_file[:-2] + bytes(30) + photo_file[-2:]
    assert np.array_equal(decode(stray), decode(photo_file))


POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 100 100
%%EndComments
showpage
%%EOF
"""


def test_no_image_starts_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\necho called >> {tmp_path}/called\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        PIL.EpsImagePlugin, "gs_binary", None
    )  # Pillow looks for the program again
    for read in (decode, size_of):
        with pytest.raises(ValueError, match="must be one of .*JPEG"):
            read(POSTSCRIPT)
    assert not (tmp_path / "called").exists()
    with pytest.raises(OSError, match="."), PIL.Image.open(io.BytesIO(POSTSCRIPT)) as p:
        p.load()
    assert (tmp_path / "called").exists()  # so the test would have noticed


SAVED = ["AVIF", "BLP", "BMP", "DDS", "EPS", "GIF", "ICNS", "ICO", "IM", "JPEG"]
SAVED += ["JPEG2000", "MPO", "PCX", "PDF", "PNG", "PPM", "QOI", "SGI", "TGA", "TIFF"]
SAVED += ["WEBP"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Pillow warns of damage that it reads past
@pytest.mark.parametrize("kind", SAVED)
def test_any_damage_to_an_image_is_a_value_error(kind: str) -> None:
    rng = random.Random(kind)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 31, 3), np.uint8)
    try:
        whole = encoded(pixels, "P" if kind == "BLP" else "RGB", kind)
    except (KeyError, OSError) as error:
        pytest.skip(f"this Pillow writes no {kind}: {error}")
    refused = 0
    for _ in range(50):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 2, 4, 10])):
            at = rng.randrange(min(len(data), rng.choice([64, 300, len(data)])))
            data[at] = rng.choice([0, 1, 128, 255])
        try:
            decode(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
        except ValueError as error:
            refused += str(error).endswith("leave it out")
    assert refused > 0


def test_too_little_memory_is_not_called_damage(photo_file: bytes) -> None:
    with pytest.raises(MemoryError), opened_picture(photo_file) as picture:
        picture.frombytes(bytes(1 << 62))


def test_bytes_that_are_not_an_image_are_shown() -> None:
    with pytest.raises(ValueError, match=re.escape("start with b'{\"label\"'")):
        decode(b'{"label": 3}')
    with pytest.raises(ValueError, match="must not be empty, got 0 bytes"):
        decode(b"")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_picture_of_more_than_twice_pillows_limit_is_refused(
    photo: Image, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(photo, "RGB", kind)
    height, width, _ = photo.shape
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", height * width // 2 - 1)
    for read in (decode, size_of):
        with pytest.raises(ValueError, match=r"187[45]\d\d"):
            read(data)


def test_an_orientation_in_exif_is_not_applied(photo: Image) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    pixels = decode(encoded(photo, "RGB", "JPEG", exif=exif))
    assert isinstance(pixels, np.ndarray)
    assert pixels.shape == photo.shape


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_reduced_picture_has_the_size_rounded_up_and_looks_the_same(
    photo: Image, kind: str, factor: int
) -> None:
    data = encoded(photo, "RGB", kind)
    small = decode_reduced(data, factor)
    height, width, _ = photo.shape
    assert small.shape == (-(-height // factor), -(-width // factor), 3)
    expected = PIL.Image.fromarray(by_pillow(data)).reduce(factor)
    assert np.abs(small.astype(int) - np.asarray(expected)).mean() < 1


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_like_object_is_accepted(photo_file: bytes, kind: type) -> None:
    assert np.array_equal(decode(kind(photo_file)), decode(photo_file))


def test_the_other_items_of_a_tuple_stay_unchanged(photo_file: bytes) -> None:
    label = object()
    result = decode((photo_file, label, "name"))
    assert isinstance(result, tuple)
    assert np.array_equal(result[0], decode(photo_file))
    assert result[1] is label
    assert result[2] == "name"


class Pair(NamedTuple):
    image: object
    label: int


def test_a_namedtuple_stays_a_namedtuple(photo_file: bytes) -> None:
    result = decode(Pair(photo_file, 3))
    assert isinstance(result, Pair)
    assert result.label == 3


@pytest.mark.parametrize("sample", [{"file": b""}, (), None, "a.jpg", ("a.jpg", 1)])
def test_a_sample_without_bytes_is_an_error_that_describes_it(
    sample: object,
) -> None:
    first = sample[0] if isinstance(sample, tuple) and sample else sample
    with pytest.raises(SampleError, match=f"takes bytes, got {type(first).__name__}"):
        decode(sample)
