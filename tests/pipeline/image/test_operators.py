"""The image operators as a pipeline uses them."""

from __future__ import annotations

import inspect
import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from penstock.errors import SampleError, SpecError
from penstock.pipeline.image import (
    center_crop,
    decode,
    decode_only_random_resized_crop,
    decode_random_resized_crop,
    horizontal_flip,
    rand_augment,
    random_resized_crop,
    resize_short_side,
)
from penstock.pipeline.image.geometry import Image, random_box

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@dataclass
class Context:
    image_size: int | None


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def by_pillow(photo: Image, size: int, seed: int) -> Image:
    box = random_box(*photo.shape[:2], SCALE, RATIO, seeded(seed))
    picture = PIL.Image.fromarray(box.cut(photo))
    return np.asarray(picture.resize((size, size), PIL.Image.Resampling.BILINEAR))


def test_a_random_crop_is_pillows_crop_of_the_same_box(photo: Image) -> None:
    for seed in range(10):
        crop = random_resized_crop(64)(photo, seeded(seed))
        assert isinstance(crop, np.ndarray)
        assert crop.flags.c_contiguous
        assert np.abs(crop.astype(int) - by_pillow(photo, 64, seed)).max() <= 1


def test_the_fused_operator_gives_the_pixels_of_the_three_it_fuses(
    photo_file: bytes,
) -> None:
    fused = decode_random_resized_crop(96, flip=0.5, reducing_gap=math.inf)
    crop, flip = random_resized_crop(96), horizontal_flip(0.5)
    for seed in range(10):
        rng = seeded(seed)
        expected = flip(crop(decode((photo_file, 7)), rng), rng)
        image, label = fused((photo_file, 7), seeded(seed))
        assert np.array_equal(image, expected[0])
        assert label == 7


def test_decoding_at_a_smaller_scale_stays_near_pillow(
    photo_file: bytes, photo: Image
) -> None:
    operator = decode_random_resized_crop(40)
    exact = decode_random_resized_crop(40, reducing_gap=math.inf)
    differences, reduced = [], 0
    for seed in range(40):
        image = operator(photo_file, seeded(seed))
        assert isinstance(image, np.ndarray)
        differences.append(
            np.abs(image.astype(int) - by_pillow(photo, 40, seed)).mean()
        )
        reduced += not np.array_equal(image, exact(photo_file, seeded(seed)))
    assert reduced >= 20
    assert np.mean(differences) <= 1.5


def test_a_png_is_cropped_as_a_jpeg_is(photo: Image) -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(photo).save(file, "PNG")
    image = decode_random_resized_crop(128)(file.getvalue(), seeded(3))
    assert np.array_equal(image, random_resized_crop(128)(photo, seeded(3)))


def test_a_truncated_file_is_an_error_at_every_scale(photo_file: bytes) -> None:
    for size in (8, 224):
        with pytest.raises(ValueError, match="Premature end of JPEG file"):
            decode_random_resized_crop(size)(photo_file[:-2000], seeded(0))


def test_the_size_comes_from_the_context_if_none_is_given(
    photo: Image, photo_file: bytes
) -> None:
    ctx = Context(image_size=48)
    assert random_resized_crop(None)(photo, seeded(0), ctx).shape == (48, 48, 3)
    fused = decode_random_resized_crop(None)
    assert fused(photo_file, seeded(0), ctx=ctx).shape == (48, 48, 3)
    assert decode_random_resized_crop(32)(photo_file, seeded(0), ctx).shape[0] == 32
    with pytest.raises(SpecError, match=r"`size` is None.*give the operator a size"):
        fused(photo_file, seeded(0), Context(image_size=None))


def test_the_bytes_do_not_depend_on_the_number_of_threads(photo_file: bytes) -> None:
    operator = decode_random_resized_crop(64, flip=0.5)

    def run(seed: int) -> bytes:
        return operator(photo_file, seeded(seed)).tobytes()

    before = torch.get_num_threads()
    expected = [run(seed) for seed in range(24)]
    try:
        for torch_threads, workers in ((1, 1), (1, 4), (3, 4)):
            torch.set_num_threads(torch_threads)
            with ThreadPoolExecutor(workers) as pool:
                assert list(pool.map(run, range(24))) == expected
    finally:
        torch.set_num_threads(before)


def test_a_result_has_memory_of_its_own(photo: Image) -> None:
    square = photo[:64, :64].copy()
    whole = random_resized_crop(64, scale=(1, 1), ratio=(1, 1))(square, seeded(0))
    assert np.array_equal(whole, square)
    for result in (
        whole,
        center_crop(64)(square),
        resize_short_side(64)(square),
        horizontal_flip(1.0)(square, seeded(0)),
    ):
        assert not np.shares_memory(result, square)


def test_a_flip_is_as_likely_as_requested(photo: Image) -> None:
    small = photo[:4, :6]
    mirrored = small[:, ::-1]
    rng = seeded(0)
    flips = [
        np.array_equal(horizontal_flip(0.25)(small, rng), mirrored) for _ in range(1000)
    ]
    assert np.mean(flips) == pytest.approx(0.25, abs=0.05)
    assert np.array_equal(horizontal_flip(0.0)(small, rng), small)


def kinds_of(value: object) -> object:
    """Return the types of annotations, as far as they can be seen."""
    if isinstance(value, dict):
        return [(name, kinds_of(part)) for name, part in value.items()]
    if isinstance(value, list):
        return [kinds_of(part) for part in value]
    return type(value), getattr(value, "dtype", None)


@pytest.mark.parametrize("operator", [horizontal_flip(), rand_augment(1)])
@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_types_do_not_depend_on_what_is_drawn(operator: Any, kind: Any) -> None:
    target = {
        "boxes": kind([[8, 9, 20, 21]]),
        "labels": [3],
        "area": kind([144]),
        "masks": [np.ones((32, 32), np.uint8)],
        "keypoints": kind([[[10, 11, 1]]]),
    }
    image = np.zeros((32, 32, 3), np.uint8)
    first, *others = [
        kinds_of(operator((image, target), seeded(seed))[1]) for seed in range(30)
    ]
    assert others == [first] * 29


def test_the_usual_chain_for_evaluation_works(photo_file: bytes) -> None:
    image, label = center_crop(224)(resize_short_side(256)(decode((photo_file, 5))))
    assert (image.shape, image.dtype, label) == ((224, 224, 3), np.uint8, 5)
    assert image.flags.c_contiguous


def test_a_crop_larger_than_the_image_names_both_and_the_cure(photo: Image) -> None:
    message = r"needs 400 pixels.*got 375 x 500; put resize_short_side\(400\) before it"
    with pytest.raises(ValueError, match=message):
        center_crop(400)(photo)


OPERATORS = [
    random_resized_crop(224, scale=(0.2, 0.9)),
    horizontal_flip(0.25),
    resize_short_side(256),
    center_crop(224),
    decode_random_resized_crop(None, flip=0.5),
    decode_only_random_resized_crop(None, flip=0.5),
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: type(o).__name__)
def test_an_operator_prints_as_its_call_and_can_be_pickled(operator: object) -> None:
    assert eval(repr(operator)) == operator  # noqa: S307
    assert pickle.loads(pickle.dumps(operator)) == operator  # noqa: S301
    assert hash(operator) == hash(pickle.loads(pickle.dumps(operator)))  # noqa: S301


def test_an_operators_signature_says_what_it_asks_for() -> None:
    wishes = {
        type(operator).__name__: {"rng", "ctx"}
        & set(inspect.signature(operator).parameters)
        for operator in OPERATORS
    }
    assert wishes == {
        "random_resized_crop": {"rng", "ctx"},
        "horizontal_flip": {"rng"},
        "resize_short_side": set(),
        "center_crop": set(),
        "decode_random_resized_crop": {"rng", "ctx"},
        "decode_only_random_resized_crop": {"rng", "ctx"},
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: random_resized_crop(0), "`size` must be an int >= 1.*got 0"),
        (lambda: center_crop(1.5), "`size` must be an int >= 1.*got 1.5"),
        (lambda: resize_short_side(-1), "`size` must be an int >= 1.*got -1"),
        (lambda: random_resized_crop(9, scale=(0, 1)), r"`scale`.*got \(0, 1\)"),
        (lambda: random_resized_crop(9, scale=(0.5, 1.1)), r"`scale`.*1\.1"),
        (lambda: decode_random_resized_crop(9, ratio=(2, 1)), r"`ratio`.*got \(2, 1\)"),
        (lambda: decode_random_resized_crop(9, flip=2), "`flip`.*0 to 1, got 2"),
        (lambda: horizontal_flip(-0.1), "`p`.*0 to 1, got -0.1"),
        (
            lambda: decode_random_resized_crop(9, reducing_gap=0.5),
            "`reducing_gap`.*0.5",
        ),
    ],
)
def test_an_argument_out_of_range_is_an_error_when_it_is_given(
    make: type, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize(
    ("sample", "kind"),
    [
        (np.zeros((4, 4), np.uint8), r"an array uint8 \[4, 4\]"),
        (np.zeros((4, 4, 3), np.float32), r"an array float32 \[4, 4, 3\]"),
        (np.zeros((0, 4, 3), np.uint8), r"an array uint8 \[0, 4, 3\]"),
        (torch.zeros(4, 4, 3), r"a tensor float32 \[4, 4, 3\]"),
        (PIL.Image.new("L", (4, 4)), "a Pillow image L 4 x 4"),
    ],
)
def test_a_value_that_is_not_an_image_is_an_error_that_describes_it(
    sample: object, kind: str
) -> None:
    with pytest.raises(SampleError, match=kind):
        center_crop(2)(sample)


def test_a_size_may_be_a_number_of_numpys() -> None:
    pixels = np.zeros((40, 40, 3), np.uint8)
    size: object = np.int64(24)
    crop = random_resized_crop(size)  # type: ignore[arg-type]
    assert np.asarray(crop(pixels, seeded(0))).shape[:2] == (24, 24)
