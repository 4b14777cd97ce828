"""Operators make the values of Pillow and of the papers' formulas."""

from __future__ import annotations

import io
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import torch

from penstock.errors import SpecError
from penstock.pipeline.image import (
    color_jitter,
    cutmix,
    mixup,
    normalize,
    pad,
    rand_augment,
    random_crop,
    resize,
)
from penstock.pipeline.image import values as value_operators
from penstock.pipeline.image.geometry import Image

Picture = PIL.Image.Image


def as_bytes(image: Image) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def as_tensor(image: Image) -> torch.Tensor:
    return torch.from_numpy(image.copy()).permute(2, 0, 1)


KINDS = pytest.mark.parametrize(
    "kind", [as_bytes, np.asarray, as_tensor, PIL.Image.fromarray]
)
Kind = Callable[[Image], Any]


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def values(image: Any) -> Any:
    """Return an image of any kind as `int [H, W, 3]`."""
    if isinstance(image, torch.Tensor):
        return image.permute(1, 2, 0).numpy().astype(int)
    return np.asarray(image).astype(int)


@pytest.fixture
def small(photo: Image) -> Image:
    return np.asarray(PIL.Image.fromarray(photo).resize((50, 37)))


@KINDS
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", PIL.ImageEnhance.Brightness),
        ("contrast", PIL.ImageEnhance.Contrast),
        ("saturation", PIL.ImageEnhance.Color),
    ],
)
def test_a_factor_of_color_acts_as_in_pillow(
    kind: Kind, name: str, enhance: Any, small: Image
) -> None:
    for factor in (0.0, 0.4, 1.7):
        image = color_jitter(**{name: (factor, factor)})(kind(small), seeded(0))
        expected = enhance(PIL.Image.fromarray(small)).enhance(factor)
        assert np.array_equal(values(image), values(expected))


def test_hue_turns_by_a_share_of_the_circle() -> None:
    red = np.full((2, 2, 3), (255, 0, 0), np.uint8)
    for share, color in ((1 / 3, (0, 255, 0)), (-1 / 3, (0, 0, 255))):
        image = color_jitter(hue=(share, share))(red, seeded(0))
        assert np.abs(image.astype(int) - color).max() <= 6


def references(picture: Picture, magnitude: int) -> list[Any]:
    """Return what each of the 14 changes makes of a picture, in both directions."""
    level, (width, height) = magnitude / 30, picture.size
    variants = [
        picture,
        PIL.ImageOps.autocontrast(picture),
        PIL.ImageOps.equalize(picture),
        PIL.ImageOps.solarize(picture, 255 * (1 - level)),
        PIL.ImageOps.posterize(picture, 8 - round(4 * level)),
    ]
    for sign in (-1, 1):
        factor, shear = 1 + sign * 0.9 * level, sign * 0.3 * level
        right = sign * int(150 / 331 * level * width)
        down = sign * int(150 / 331 * level * height)
        variants += [
            getattr(PIL.ImageEnhance, name)(picture).enhance(factor)
            for name in ("Brightness", "Color", "Contrast", "Sharpness")
        ]
        variants += [
            picture.transform(picture.size, PIL.Image.Transform.AFFINE, matrix)
            for matrix in (
                (1, shear, 0, 0, 1, 0),
                (1, 0, 0, shear, 1, 0),
                (1, 0, -right, 0, 1, 0),
                (1, 0, 0, 0, 1, -down),
            )
        ]
        variants.append(picture.rotate(sign * 30 * level))
    return [values(variant) for variant in variants]


@pytest.mark.long
@KINDS
def test_rand_augment_makes_one_of_pillows_changes_and_all_of_them_in_time(
    kind: Kind, small: Image
) -> None:
    expected = references(PIL.Image.fromarray(small), 17)
    images = [
        values(rand_augment(1, 17)(kind(small), seeded(seed))) for seed in range(300)
    ]
    met = {
        next(at for at, it in enumerate(expected) if np.array_equal(it, image))
        for image in images
    }
    distinct = {it.tobytes() for it in expected}
    assert len(met) == len(distinct)


def test_targets_move_with_the_image_under_rand_augment() -> None:
    rng = seeded(0)
    for seed in range(300):
        left, top = (int(value) for value in rng.integers(8, 20, 2))
        mask = np.zeros((1, 40, 48), np.uint8)
        mask[0, top : top + 12, left : left + 12] = 1
        sample = {
            "image": np.repeat(mask[0, :, :, None] * np.uint8(100), 3, axis=2),
            "masks": mask,
            "boxes": [[left, top, left + 12, top + 12]],
            "keypoints": np.array([[[left + 6, top + 6, 1]]], np.float32),
        }
        output = rand_augment(1, 9)(sample, seeded(seed))
        assert ((output["image"][..., 0] > 40) != output["masks"][0]).sum() <= 2
        rows, columns = np.nonzero(output["masks"][0])
        x, y, right, bottom = output["boxes"][0]
        edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(np.subtract((x, y, right, bottom), edges)).max() <= 1.5
        middle = columns.mean() + 0.5, rows.mean() + 0.5
        assert np.abs(output["keypoints"][0, 0, :2] - middle).max() <= 1


@pytest.mark.parametrize(
    "operator", [color_jitter(0.4, 0.4, 0.4, 0.1), rand_augment(), rand_augment(0)]
)
def test_a_changed_array_is_writable(operator: Any, small: Image) -> None:
    assert operator(small, seeded(0)).flags.writeable


@KINDS
@pytest.mark.parametrize("size", [(20, 31), (90, 80), 37])
def test_a_resized_image_equals_that_of_pillow(
    kind: Kind, size: Any, small: Image
) -> None:
    tall, wide = (size, size) if isinstance(size, int) else size
    bilinear = PIL.Image.Resampling.BILINEAR
    expected = PIL.Image.fromarray(small).resize((wide, tall), bilinear)
    pixels = values(resize(size)(kind(small)))
    assert np.abs(pixels - values(expected)).max() <= 1


@KINDS
def test_a_padded_image_equals_that_of_pillow(kind: Kind, small: Image) -> None:
    picture, fill = PIL.Image.fromarray(small), (9, 8, 7)
    border = PIL.ImageOps.expand(picture, (1, 2, 3, 4), fill)
    image = pad((1, 2, 3, 4), fill=fill)(kind(small))
    assert np.array_equal(values(image), values(border))
    square = PIL.ImageOps.pad(picture, (50, 60), color=fill, centering=(0, 0))
    image = pad(to=(60, 1), fill=fill)(kind(small))
    assert np.array_equal(values(image), values(square))


@KINDS
def test_a_random_crop_is_a_part_of_the_padded_image_with_its_targets(
    kind: Kind, small: Image
) -> None:
    padded = np.pad(small, ((4, 4), (4, 4), (0, 0)), constant_values=3).astype(int)
    height, width = small.shape[:2]
    numbers = np.arange(height * width).reshape(height, width) + 1
    target = {
        "mask": numbers,
        "boxes": [[10.0, 10.0, 20.0, 20.0]],
        "keypoints": [[[15.0, 15.0, 1.0]]],
    }
    for seed in range(30):
        crop = random_crop((32, 30), padding=4, fill=3, mask_fill=0)
        image, cut_target = crop((kind(small), target), seeded(seed))
        row, column = (int(value) for value in np.argwhere(cut_target["mask"])[0])
        at = int(cut_target["mask"][row, column]) - 1
        top, left = at // width + 4 - row, at % width + 4 - column
        expected = padded[top : top + 32, left : left + 30]
        assert np.array_equal(values(image), expected)
        x, y = 14 - left, 14 - top
        box = np.clip([x, y, x + 10, y + 10], 0, (30, 32) * 2)
        if box[0] == box[2] or box[1] == box[3]:
            assert cut_target["boxes"] == cut_target["keypoints"] == []
            continue
        np.testing.assert_allclose(cut_target["boxes"], [box])
        is_in = 0 <= x + 5 <= 30 and 0 <= y + 5 <= 32
        point = [x + 5, y + 5, 1] if is_in else [0, 0, 0]
        np.testing.assert_allclose(cut_target["keypoints"], [[point]])


@KINDS
def test_normalized_pixels_follow_the_formula(kind: Kind, small: Image) -> None:
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.9)
    expected = ((small / 255 - mean) / std).transpose(2, 0, 1)
    pixels = normalize(mean, std)(kind(small))
    np.testing.assert_allclose(np.asarray(pixels), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False], ids=["CHW", "HWC"])
def test_normalized_pixels_are_torchs_to_the_bit(
    dtype: torch.dtype,
    first: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = normalize(channels_first=first, dtype=dtype)
    rng = seeded(0)
    sizes = [(1, 1), (1, 3), (3, 1), (7, 9), (16, 20), (224, 224)]
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    images += [np.stack([image] * 3) for image in images] + [images[0][None][:0]]
    images.append(np.asfortranarray(images[3]))
    kinds = [*images, *map(torch.from_numpy, images[6:12])]
    outputs = [operator((image, 7)) for image in kinds]
    monkeypatch.setattr(value_operators, "crop_extension", lambda: (None, ""))
    for image, (value, label) in zip(kinds, outputs, strict=True):
        expected, _ = operator((image, 7))
        assert (type(value), value.dtype, label) == (type(expected), expected.dtype, 7)
        assert torch.as_tensor(value).equal(torch.as_tensor(expected))


def test_normalize_does_not_depend_on_the_default_device(small: Image) -> None:
    expected = normalize()(small)
    with torch.device("meta"):
        assert np.array_equal(normalize()(small), expected)


@pytest.mark.parametrize("kind", [np.asarray, as_tensor])
def test_normalize_does_not_depend_on_the_default_type(kind: Any, small: Image) -> None:
    image = kind(small)
    expected = torch.as_tensor(normalize()(image))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.as_tensor(normalize()(image)).equal(expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_type_that_pixels_are_not_normalized_to_is_refused() -> None:
    with pytest.raises(SpecError, match=r"one of torch.float32.* got torch.int64"):
        normalize(dtype=torch.int64)


def drawn_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = seeded(seed)
    images = rng.integers(0, 256, (6, 3, 16, 20)).astype(np.uint8)
    return torch.from_numpy(images), torch.arange(6)


def test_mixup_blends_images_by_the_share_of_their_labels() -> None:
    for seed in range(100):
        images, labels = drawn_batch(seed)
        mixed, shares = mixup(6)((images, labels), seeded(seed))
        expected = torch.einsum("nk,kchw->nchw", shares, images.float())
        assert (mixed - expected).abs().max() <= 0.51
        assert shares.sum(dim=1).allclose(torch.ones(6))


def test_cutmix_takes_each_pixel_from_one_image_by_the_share_of_their_labels() -> None:
    for seed in range(100):
        images, labels = drawn_batch(seed)
        mixed, shares = cutmix(6)((images, labels), seeded(seed))
        for at in range(6):
            own = (mixed[at] == images[at]).all(dim=0)
            other = int((shares[at] - (labels == at) * 2.0).argmax())
            if shares[at, at] == 1:
                assert own.all()
                continue
            assert (mixed[at] == images[other]).all(dim=0)[~own].all()
            assert own.float().mean() == pytest.approx(float(shares[at, at]), abs=1e-6)


@pytest.mark.parametrize("operator", [mixup(6), cutmix(6), mixup(6, p=0)])
def test_a_batch_that_is_a_namedtuple_stays_a_namedtuple(operator: Any) -> None:
    pair = namedtuple("pair", ("images", "labels"))  # noqa: PYI024
    batch = operator(pair(*drawn_batch(0)), seeded(0))
    assert type(batch) is pair
    assert batch.labels.shape == (6, 6)
