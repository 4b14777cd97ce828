"""A box decoded alone has the pixels of a full decode, or is left to a full decode."""

from __future__ import annotations

import io
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.cache.fingerprint import fingerprint
from penstock.pipeline.image import (
    codec,
    decode_only_random_resized_crop,
    decode_random_resized_crop,
)
from penstock.pipeline.image.codec import (
    CropDecoder,
    crop_extension,
    decode_reduced,
    made_by,
    shaped,
    size_of,
)
from penstock.pipeline.image.geometry import Box, Image, Placement, mirror, resize

EXTENSION, WHY_NOT = crop_extension()
needs_extension = pytest.mark.skipif(EXTENSION is None, reason=WHY_NOT)
SAMPLINGS = ("444", "422", "440", "420", "411", "Gray")
TAKEN = {"444", "422", "440", "420", "Gray"}


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def noise(height: int, width: int, seed: int = 0) -> Image:
    """Return pixels that differ from those beside them: a smooth photo hides faults."""
    return seeded(seed).integers(0, 256, (height, width, 3), np.uint8)


def jpeg(pixels: Image, sampling: str, quality: int = 90) -> bytes:
    color = "RGB"
    if sampling == "Gray":
        pixels, color = np.ascontiguousarray(pixels[:, :, :1]), "Gray"
    data: bytes = simplejpeg.encode_jpeg(
        pixels, quality, colorspace=color, colorsubsampling=sampling
    )
    return data


def by_pillow(pixels: Image, mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    options = {"format": "JPEG", "quality": 90, **options}
    PIL.Image.fromarray(pixels).convert(mode).save(file, **options)
    return file.getvalue()


def decoded_box(
    data: bytes, size: tuple[int, int], box: Box, *, to_end: bool
) -> Image | None:
    """Return a box as the extension makes it, neither resized nor mirrored."""
    only = box.height, box.width
    placement = Placement(box, *only, size)
    (image,) = made_by(EXTENSION, [data], [placement], only, to_end=to_end)
    return image


def outcome(decode: Callable[[], Any]) -> Any:
    """Return what a call returns or raises, to compare it with another call."""
    try:
        return decode().tobytes()
    except ValueError as error:
        return str(error)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, Box]:
    """Draw the height and width of an image, and a box in it."""
    side = st.one_of(st.integers(1, 40), st.integers(1, 200))
    height, width = draw(side), draw(side)
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    tall = draw(st.integers(1, height - top))
    wide = draw(st.integers(1, width - left))
    return height, width, Box(top, left, tall, wide)


@pytest.mark.long
@needs_extension
@settings(max_examples=200)
@given(
    drawn=boxes(),
    sampling=st.sampled_from(SAMPLINGS),
    quality=st.integers(1, 100),
    to_end=st.booleans(),
)
def test_a_box_decoded_alone_has_the_pixels_of_a_full_decode(
    drawn: tuple[int, int, Box], sampling: str, quality: int, *, to_end: bool
) -> None:
    height, width, box = drawn
    data = jpeg(noise(height, width), sampling, quality)
    image = decoded_box(data, (height, width), box, to_end=to_end)
    assert (image is not None) == (sampling in TAKEN)
    if image is not None:
        assert np.array_equal(image, box.cut(decode_reduced(data, 1)))


@needs_extension
@pytest.mark.parametrize("sampling", sorted(TAKEN))
def test_a_box_may_begin_and_end_at_any_pixel_of_an_imcu(sampling: str) -> None:
    data = jpeg(noise(67, 70), sampling)
    whole = decode_reduced(data, 1)
    for first, last in itertools.product(range(35), (36, 40, 48, 49, 63, 64, 65, 67)):
        for box in (
            Box(first, 3, last - first, 41),
            Box(5, first, 40, last - first),
        ):
            image = decoded_box(data, (67, 70), box, to_end=False)
            assert image is not None, box
            assert np.array_equal(image, box.cut(whole)), box


def with_second_scan(data: bytes) -> bytes:
    """Return a file whose entropy data is followed by the header of a scan."""
    return data[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + data[-2:]


def arithmetic(data: bytes) -> bytes:
    """Return a file that says its codes are arithmetic."""
    return data.replace(b"\xff\xc0", b"\xff\xc9", 1)


PIXELS = noise(90, 120)
UNUSUAL = {
    "progressive": by_pillow(PIXELS, progressive=True),
    "CMYK": by_pillow(PIXELS, "CMYK"),
    "PNG": by_pillow(PIXELS, format="PNG", quality=None),
    "WEBP": by_pillow(PIXELS, format="WEBP"),
    "4:1:1": jpeg(PIXELS, "411"),
    "a second scan": with_second_scan(jpeg(PIXELS, "420")),
    "arithmetic": arithmetic(jpeg(PIXELS, "420")),
    "cut off": jpeg(PIXELS, "420")[:-700],
    "no end": jpeg(PIXELS, "420")[:-2],
    "half a marker": jpeg(PIXELS, "420")[:-1],
    "stray bytes": jpeg(PIXELS, "420")[:-2] + bytes(30) + b"\xff\xd9",
    "empty": b"",
    "no image": b'{"label": 3}',
}
USUAL = {
    "restart markers": by_pillow(PIXELS, restart_marker_blocks=3),
    "RGB": by_pillow(PIXELS, keep_rgb=True),
    "bytes after the end": jpeg(PIXELS, "420") + bytes(30),
    "no Huffman table of its own": by_pillow(PIXELS, optimize=True),
}


@contextmanager
def no_extension() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "crop_extension", lambda: (None, "for a test"))
        yield


OPERATORS = [decode_random_resized_crop, decode_only_random_resized_crop]
both = pytest.mark.parametrize("make", OPERATORS)


@both
@pytest.mark.parametrize("name", [*UNUSUAL, *USUAL])
def test_every_file_decodes_as_it_does_without_the_extension(
    make: Any, name: str
) -> None:
    data, operator = {**UNUSUAL, **USUAL}[name], make(32, flip=0.5)
    for seed in range(8):
        result = outcome(lambda seed=seed: operator(data, seeded(seed)))
        with no_extension():
            expected = outcome(lambda seed=seed: operator(data, seeded(seed)))
        assert result == expected


def middle(data: bytes, *, to_end: bool) -> Image | None:
    return decoded_box(data, (90, 120), Box(20, 20, 30, 40), to_end=to_end)


@needs_extension
@pytest.mark.parametrize("to_end", [True, False])
def test_the_extension_takes_usual_files_and_leaves_others(to_end: bool) -> None:  # noqa: FBT001
    usual = {name for name in USUAL if middle(USUAL[name], to_end=to_end) is not None}
    unusual = {name for name in UNUSUAL if middle(UNUSUAL[name], to_end=to_end) is None}
    assert usual == USUAL.keys()
    assert unusual == UNUSUAL.keys() - (set() if to_end else {"stray bytes"})


@needs_extension
@both
def test_a_file_cut_anywhere_raises_the_documented_error(
    make: Any, photo_file: bytes
) -> None:
    operator = make(64)
    cuts = {*range(0, len(photo_file), len(photo_file) // 40)}
    for cut in sorted(cuts | {len(photo_file) - 1, len(photo_file) - 2}):
        with pytest.raises(ValueError, match=rf"got {cut} bytes.*leave it out"):
            operator(photo_file[:cut], seeded(cut))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file with some bytes flipped, and sometimes cut, doubled or filled."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 5, 20))):
        at = rng.randrange(rng.choice((len(changed), min(len(changed), 700))))
        changed[at] = rng.choice((rng.randrange(256), changed[at] ^ 1, 0xFF, 0))
    start, end = sorted(rng.randrange(len(changed)) for _ in range(2))
    match rng.randrange(6):
        case 0:
            del changed[start:]
        case 1:
            del changed[start:end]
        case 2:
            changed[start:start] = changed[start:end]
        case 3:
            changed[start:end] = bytes(end - start)
    return bytes(changed)


def said_size(data: bytes) -> tuple[int, int]:
    """Return the size in the header, from whichever decoder can read it."""
    try:
        return size_of(data)
    except ValueError:
        return 67, 70


@pytest.mark.long
@needs_extension
@pytest.mark.parametrize("to_end", [True, False])
def test_damage_never_makes_pixels_that_a_full_decode_does_not_make(
    to_end: bool,  # noqa: FBT001
) -> None:
    rng, decoded, unnoticed = random.Random(19), 0, 0
    files = [jpeg(noise(67, 70, 1), sampling) for sampling in sorted(TAKEN)]
    files += [by_pillow(noise(67, 70), restart_marker_blocks=2), UNUSUAL["progressive"]]
    for _ in range(3000):
        data = damaged(rng.choice(files), rng)
        size = said_size(data) if rng.random() < 0.9 else (90, 120)
        box = Box(*(rng.randrange(1, rng.choice((35, 70))) for _ in range(4)))
        image = decoded_box(data, size, box, to_end=to_end)
        if image is None:
            continue
        decoded += 1
        assert size == size_of(data)
        try:
            expected = box.cut(decode_reduced(data, 1))
        except ValueError:
            unnoticed += 1
        else:
            assert np.array_equal(image, expected)
    assert 60 < decoded < 1500
    assert (unnoticed == 0) == to_end


CROP = np.array([(90, 120, 1, 5, 6, 20, 30, 0)], np.int32)
ROOM = np.zeros((1, 20, 20, 3), np.uint8)


@needs_extension
@pytest.mark.parametrize(
    ("crops", "pixels"),
    [
        (CROP, ROOM[0]),
        (CROP, ROOM[:, :, :, :2]),
        (CROP, ROOM.astype(np.float32)),
        (CROP, ROOM.astype(np.int8)),
        (CROP, np.zeros((2, 20, 20, 3), np.uint8)),
        (CROP, np.zeros((1, 0, 20, 3), np.uint8)),
        (CROP, ROOM[:, ::2]),
        (CROP, np.broadcast_to(ROOM[:, :1], ROOM.shape)),
        (CROP, b"123"),
        (CROP[0], ROOM),
        (CROP.astype(np.int64), ROOM),
        (CROP[:, :7], ROOM),
        (np.zeros((0, 8), np.int32), ROOM),
    ],
)
def test_memory_of_another_shape_or_type_is_refused(crops: Any, pixels: Any) -> None:
    with pytest.raises((ValueError, BufferError)):
        EXTENSION.crops([jpeg(PIXELS, "420")], crops, pixels, True)  # noqa: FBT003


@needs_extension
def test_what_is_no_list_of_bytes_is_refused() -> None:
    for files in ((b"",), [1], [None], [memoryview(b"abcd")[::2]]):
        with pytest.raises((TypeError, BufferError)):
            EXTENSION.sizes(files, np.zeros((1, 2), np.int32))


@needs_extension
@pytest.mark.parametrize(
    "place", [(81, 0), (0, 111), (2**31 - 1, 0), (0, 2**31 - 1), (-1, 0), (0, -1)]
)
@pytest.mark.parametrize("factor", [1, 2])
def test_a_box_beyond_the_image_is_refused(place: tuple[int, int], factor: int) -> None:
    crop = np.array([(90, 120, factor, *place, 10, 10, 0)], np.int32)
    assert EXTENSION.crops([jpeg(PIXELS, "420")], crop, ROOM.copy(), True) == b"\0"  # noqa: FBT003


@needs_extension
@pytest.mark.parametrize("factor", [-1, 0, 9, 2**31 - 1])
def test_a_scale_that_is_none_is_refused(factor: int) -> None:
    crop = np.array([(90, 120, factor, 0, 0, 10, 10, 0)], np.int32)
    assert EXTENSION.crops([jpeg(PIXELS, "420")], crop, ROOM.copy(), True) == b"\0"  # noqa: FBT003


@st.composite
def resizings(draw: st.DrawFn) -> tuple[Image, int, int]:
    """Draw an image, and the height and width to resize it to."""
    side = st.one_of(st.integers(1, 40), st.integers(1, 700))
    height, width = draw(side), draw(side)
    image = noise(height, width, draw(st.integers(0, 9)))
    if draw(st.booleans()):
        image[:] = draw(st.sampled_from((0, 1, 254, 255)))
    return image, draw(side), draw(side)


@pytest.mark.long
@needs_extension
@settings(max_examples=100)
@given(resizings(), st.booleans(), st.booleans())
def test_an_image_is_resized_as_torch_does_it(
    drawn: tuple[Image, int, int],
    mirrored: bool,  # noqa: FBT001
    plainly: bool,  # noqa: FBT001
) -> None:
    image, height, width = drawn
    pixels = np.empty((height, width, 3), np.uint8)
    EXTENSION.resize(image, pixels, mirrored, plainly)
    expected = resize(image, height, width, antialias=True)
    assert np.array_equal(pixels, mirror(expected) if mirrored else expected)


@pytest.mark.long
@needs_extension
@settings(max_examples=100)
@given(
    drawn=boxes(),
    sampling=st.sampled_from(sorted(TAKEN)),
    factor=st.sampled_from((1, 2, 4, 8)),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    mirrored=st.booleans(),
)
def test_a_crop_is_a_full_decode_cut_resized_and_mirrored(
    drawn: tuple[int, int, Box],
    sampling: str,
    factor: int,
    size: tuple[int, int],
    *,
    mirrored: bool,
) -> None:
    height, width, box = drawn
    # Of 3 x 3 pixels, 3/8 makes as many as a half, and simplejpeg takes the smaller.
    assume(factor == 1 or min(height, width) >= 8)
    data = jpeg(noise(height, width), sampling)
    of = (height, width)
    placement = Placement(box, *size, of, mirrored=mirrored, factor=factor)
    (pixels,) = made_by(EXTENSION, [data], [placement], size, to_end=True)
    reduced = placement.reduced
    if 0 in (reduced.height, reduced.width):
        assert pixels is None
        return
    part = reduced.cut(decode_reduced(data, factor))
    expected = resize(part, *size, antialias=True)
    assert np.array_equal(pixels, mirror(expected) if mirrored else expected)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("mirrored", [True, False])
def test_any_array_of_an_image_is_resized_as_torch_does_it(
    antialias: bool,  # noqa: FBT001
    mirrored: bool,  # noqa: FBT001
) -> None:
    image = noise(60, 80)
    fixed = image.copy()
    fixed.flags.writeable = False
    wide = noise(2, 65_501)
    for array in (image, image[5:50, 7:61], image[::-2, ::-1], fixed, wide):
        expected = resize(array, 20, 33, antialias=antialias)
        expected = mirror(expected) if mirrored else expected
        pixels = shaped(
            array,
            Placement.whole(
                array.shape[:2],
                height=20,
                width=33,
                antialias=antialias,
                mirrored=mirrored,
            ),
        )
        assert np.array_equal(pixels, expected)


def test_a_side_longer_than_any_jpegs_is_made_without_the_extension() -> None:
    operator, data = ps.image.resize_short_side(64), jpeg(noise(16, 20_000), "420")
    with no_extension():
        expected = operator(data)
    assert expected.shape == (64, 80_000, 3)
    (image,) = through([data], operator)
    assert np.array_equal(image, expected)


ANNOTATED = {"image": jpeg(PIXELS, "420"), "boxes": np.array([[1.0, 2.0, 50.0, 60.0]])}


@both
@pytest.mark.parametrize("antialias", [True, False])
def test_samples_made_together_are_those_made_one_by_one(
    make: Any,
    antialias: bool,  # noqa: FBT001
) -> None:
    operator = make(32, flip=0.5, antialias=antialias)
    good = [*USUAL.values(), *(jpeg(PIXELS, s) for s in SAMPLINGS)]
    samples = [*((file, at) for at, file in enumerate(good)), ANNOTATED, good[0]]
    with no_extension():
        alone = list(through(samples, operator))
    with ps.Pipeline.from_dataset(samples).map(operator).batch(1, collate_fn=only) as p:
        assert [shown(sample) for sample in p] == [shown(sample) for sample in alone]


def only(samples: list[Any]) -> Any:
    return samples[0]


def through(samples: list[Any], operator: Any) -> Iterator[Any]:
    with ps.Pipeline.from_dataset(samples).map(operator).batch(1, collate_fn=only) as p:
        yield from p


def shown(sample: Any) -> Any:
    """Return a sample in a form that compares."""
    if isinstance(sample, dict):
        return {name: shown(part) for name, part in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(shown, sample))
    return np.asarray(sample).tolist()


def test_a_file_that_cannot_be_decoded_fails_alone() -> None:
    samples = [jpeg(PIXELS, "420")] * 20
    samples[7] = UNUSUAL["cut off"]
    pipe = ps.Pipeline.from_dataset(samples).map(decode_random_resized_crop(8))
    with pipe.batch(20, on_error="substitute", error_budget=0.1) as pipe:
        (batch,) = pipe
    alike = [row for row in range(20) if np.array_equal(batch[row], batch[7])]
    assert alike == [7, 8]  # the next one stands in for it


@needs_extension
def test_other_threads_run_while_the_extension_decodes() -> None:
    # No thread is forced to release the GIL: only the decoder can have let others run.
    data = jpeg(noise(1500, 1500), "444")
    box, beside, end = Box(0, 0, 1500, 1500), [0], threading.Event()

    def count() -> None:
        while not end.is_set():
            beside[0] += 1
            time.sleep(0)  # releases the GIL

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = beside[0]
        for _ in range(200):
            decoded_box(data, (1500, 1500), box, to_end=False)
            if beside[0] > before:
                break
        assert beside[0] > before
    finally:
        sys.setswitchinterval(interval)
        end.set()
        thread.join()


@both
def test_the_bytes_do_not_depend_on_the_number_of_threads(
    make: Any, photo_file: bytes
) -> None:
    operator = make(64, flip=0.5)

    def run(seed: int) -> bytes:
        return operator(photo_file, seeded(seed)).tobytes()

    with no_extension():
        expected = [run(seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(40))) == expected


# Where the extension cannot be used


@pytest.fixture
def asked_again() -> Any:
    """Look for the extension again, both in the test and after it."""
    crop_extension.cache_clear()
    yield
    crop_extension.cache_clear()


NAME = "penstock.pipeline.image._photos"


@pytest.mark.usefixtures("asked_again")
def test_without_the_extension_photographs_are_decoded_in_full(
    monkeypatch: pytest.MonkeyPatch, photo_file: bytes
) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    assert crop_extension() == (None, "it was not built")
    assert CropDecoder().__penstock_fingerprint__() == "in full"
    image = decode_random_resized_crop(32)(photo_file, seeded(1))
    assert np.asarray(image).shape == (32, 32, 3)


@needs_extension
@pytest.mark.usefixtures("asked_again")
def test_an_extension_that_decodes_other_pixels_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crops(files: Any, crops: Any, pixels: Image, *end: bool) -> bytes:
        flags: bytes = EXTENSION.crops(files, crops, pixels, *end)
        pixels[0, -1, -1, -1] ^= 1
        return flags

    fake = SimpleNamespace(crops=crops, VERSION="1, libjpeg 9")
    monkeypatch.setitem(sys.modules, NAME, fake)
    expected = "its pixels differ from simplejpeg's or torch's (version 1, libjpeg 9)"
    assert crop_extension() == (None, expected)


@pytest.mark.usefixtures("asked_again")
def test_an_extension_that_does_not_load_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("libjpeg.so.62: cannot open shared object file")

    monkeypatch.setattr(codec.importlib, "import_module", missing)
    extension, why_not = crop_extension()
    assert extension is None
    assert why_not.endswith("libjpeg.so.62: cannot open shared object file")


@both
@pytest.mark.parametrize("inside", ["a pipeline", "a function of the user's"])
def test_a_cache_knows_which_decoder_filled_it(
    monkeypatch: pytest.MonkeyPatch, make: Any, inside: str
) -> None:
    operator = make(8)

    def calls_it(sample: bytes) -> Any:
        return operator(sample)

    def keyed(version: str) -> bytes:
        extension = SimpleNamespace(VERSION=version)
        monkeypatch.setattr(codec, "crop_extension", lambda: (extension, ""))
        own = operator if inside == "a pipeline" else calls_it
        identity = fingerprint([b""], [("map", own)])
        assert identity.private_because is None
        return identity.digest

    assert keyed("1") == keyed("1") != keyed("2")
