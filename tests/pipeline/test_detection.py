"""Operators for images with boxes equal plain loops on random samples."""

from __future__ import annotations

import bisect
import math
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from penstock.pipeline.detection import aspect_groups, collate, crop, flip, resize

SAMPLES = 300
Sample = tuple[Any, dict[str, Any]]


def drawn_sample(rng: np.random.Generator) -> Sample:
    """Return an image whose pixels say their own column and row, and a target."""
    height, width = (int(side) for side in rng.integers(4, 40, 2))
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0], image[..., 1] = np.arange(width), np.arange(height)[:, None]
    count = int(rng.integers(1, 5))
    places = np.sort(rng.uniform(0, 1, (count, 2, 2)), axis=1) * (width, height)
    target = {
        "boxes": places.reshape(count, 4),
        "labels": torch.arange(count),
        "masks": rng.integers(0, 2, (count, height, width)).astype(bool),
        "keypoints": np.dstack(
            [
                rng.uniform(0, 1, (count, 2, 2)) * (width, height),
                rng.integers(0, 2, (count, 2)),
            ]
        ),
    }
    return image, target


def scaled(coordinates: Any, x: float, y: float) -> Any:
    array = np.array(coordinates)
    array[..., 0] *= x
    array[..., 1] *= y
    if array.shape[-1] == 4:
        array[..., 2] *= x
        array[..., 3] *= y
    return array


def visible(keypoints: Any) -> Any:
    """Return the keypoints, with zeros for those that are not visible."""
    return keypoints * (keypoints[..., 2:] > 0)


def test_a_flip_mirrors_pixels_masks_boxes_and_keypoints() -> None:
    rng = np.random.default_rng(0)
    for _ in range(SAMPLES):
        image, target = drawn_sample(rng)
        width = image.shape[1]
        pixels, moved = flip(1.0)((image, target), rng)
        assert np.array_equal(pixels, image[:, ::-1])
        assert np.array_equal(moved["masks"], target["masks"][:, :, ::-1])
        boxes = [[width - r, t, width - x, b] for x, t, r, b in target["boxes"]]
        np.testing.assert_allclose(moved["boxes"], boxes)
        points = target["keypoints"] * (-1, 1, 1) + (width, 0, 0)
        np.testing.assert_allclose(moved["keypoints"], visible(points))
        assert moved["labels"].equal(target["labels"])


def test_a_resized_image_has_the_short_side_or_else_the_longest_allowed() -> None:
    rng = np.random.default_rng(1)
    for _ in range(SAMPLES):
        image, target = drawn_sample(rng)
        height, width = image.shape[:2]
        size, longest = int(rng.integers(2, 40)), int(rng.integers(2, 60))
        low, high = min(height, width), max(height, width)
        short, long = size, size * high // low
        if size * high > longest * low:
            short, long = max(1, longest * low // high), longest
        tall, wide = (short, long) if height <= width else (long, short)
        pixels, moved = resize(size, longest)((image, target), rng)
        assert pixels.shape == (tall, wide, 3)
        bilinear = PIL.Image.Resampling.BILINEAR
        expected = np.asarray(PIL.Image.fromarray(image).resize((wide, tall), bilinear))
        assert np.abs(pixels.astype(int) - expected).max() <= 1
        x, y = wide / width, tall / height
        np.testing.assert_allclose(moved["boxes"], scaled(target["boxes"], x, y))
        points = visible(scaled(target["keypoints"], x, y))
        np.testing.assert_allclose(moved["keypoints"], points)
        (down, rows), (across, columns) = nearest(height, tall), nearest(width, wide)
        masks = target["masks"][:, rows][:, :, columns]
        assert np.array_equal(moved["masks"][:, down][:, :, across], masks)


def nearest(before: int, after: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which pixels have a single nearest source pixel, and which one it is."""
    at = 2 * np.arange(after) + 1
    clear = at * before % (2 * after) != 0
    return np.flatnonzero(clear), at[clear] * before // (2 * after)


@pytest.mark.parametrize("short", [49, 98, 107, 600, 1601])
def test_no_pixel_of_the_short_side_is_lost_to_rounding(short: int) -> None:
    image = np.zeros((short, short, 3), np.uint8)
    pixels = resize(800)(image, np.random.default_rng(0))
    assert pixels.shape == (800, 800, 3)


def jaccard(box: Any, part: tuple[int, int, int, int]) -> float:
    width = min(box[2], part[2]) - max(box[0], part[0])
    height = min(box[3], part[3]) - max(box[1], part[1])
    shared = max(width, 0) * max(height, 0)
    areas = [(it[2] - it[0]) * (it[3] - it[1]) for it in (box, part)]
    return float(shared / (sum(areas) - shared))


def has_middle(box: Any, part: tuple[int, int, int, int]) -> bool:
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return bool(part[0] <= x < part[2] and part[1] <= y < part[3])


def cut_point(point: Any, part: tuple[int, int, int, int]) -> list[float]:
    x, y, is_shown = point
    if not is_shown or not (part[0] <= x <= part[2] and part[1] <= y <= part[3]):
        return [0, 0, 0]
    return [x - part[0], y - part[1], is_shown]


def check_part(part: tuple[int, int, int, int], sample: Sample, seed: int) -> None:
    """Check that a crop obeys the rule of the paper, unless it is the whole image."""
    height, width = sample[0].shape[:2]
    if part == (0, 0, width, height):
        return
    wide, tall = part[2] - part[0], part[3] - part[1]
    assert 0.5 <= tall / wide <= 2
    assert wide >= math.floor(0.3 * width)
    assert tall >= math.floor(0.3 * height)
    least = (0.1, 0.3, 0.5, 0.7, 0.9, 0.0)[np.random.default_rng(seed).integers(7)]
    boxes = sample[1]["boxes"]
    assert max(jaccard(box, part) for box in boxes) >= least - 1e-9
    assert any(has_middle(box, part) for box in boxes)


def test_a_crop_overlaps_a_box_and_keeps_the_targets_inside_it() -> None:
    rng, parts = np.random.default_rng(2), 0
    for seed in range(SAMPLES):
        image, target = sample = drawn_sample(rng)
        pixels, moved = crop()((image, target), np.random.default_rng(seed))
        left, top = (int(value) for value in pixels[0, 0, :2])
        right, bottom = (int(value) + 1 for value in pixels[-1, -1, :2])
        part = left, top, right, bottom
        assert np.array_equal(pixels, image[top:bottom, left:right])
        check_part(part, sample, seed)
        is_whole = pixels.shape == image.shape
        parts += not is_whole
        boxes = target["boxes"]
        stays = [
            at for at, box in enumerate(boxes) if is_whole or has_middle(box, part)
        ]
        expected = np.clip(boxes[stays], (left, top) * 2, (right, bottom) * 2)
        np.testing.assert_allclose(moved["boxes"], expected - (left, top) * 2)
        assert moved["labels"].tolist() == stays
        masks = target["masks"][stays][:, top:bottom, left:right]
        assert np.array_equal(moved["masks"], masks)
        points = [
            [cut_point(it, part) for it in target["keypoints"][at]] for at in stays
        ]
        np.testing.assert_allclose(moved["keypoints"], points)
    assert parts > SAMPLES / 4


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 8])
def test_aspects_are_grouped_at_even_steps_of_their_logarithm(groups: int) -> None:
    sizes = np.random.default_rng(groups).integers(1, 999, (SAMPLES, 2))
    steps = max(1, groups - 2)
    borders = [2 ** (2 * at / steps - 1) for at in range(groups - 1)]
    if groups == 2:
        borders = [1.0]
    expected = [bisect.bisect_right(borders, wide / tall) for tall, wide in sizes]
    assert aspect_groups(sizes, groups).tolist() == expected


@pytest.mark.parametrize("groups", [2, 4, 6, 8])
def test_an_even_number_of_groups_separates_portrait_from_landscape(
    groups: int,
) -> None:
    upright, lying = aspect_groups([[101, 100], [100, 101]], groups)
    assert upright != lying


def test_a_batch_has_each_image_at_the_top_left_and_fill_elsewhere() -> None:
    rng = np.random.default_rng(3)
    for _ in range(SAMPLES // 4):
        samples = [drawn_sample(rng) for _ in range(4)]
        divisor, fill = int(rng.integers(1, 33)), int(rng.integers(256))
        images, targets, sizes = collate(divisor, fill)(samples)
        height, width = (
            math.ceil(max(image.shape[axis] for image, _ in samples) / divisor)
            * divisor
            for axis in (0, 1)
        )
        expected = np.full((4, 3, height, width), fill, np.uint8)
        for row, (image, _) in zip(expected, samples, strict=True):
            row[:, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
        assert np.array_equal(images.numpy(), expected)
        assert sizes.tolist() == [[*image.shape[:2]] for image, _ in samples]
        assert all(it is s[1] for it, s in zip(targets, samples, strict=True))


def test_images_of_all_kinds_make_one_batch_without_warnings() -> None:
    image = drawn_sample(np.random.default_rng(4))[0]
    frozen = image.copy()
    frozen.flags.writeable = False
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    mirrored = image[:, ::-1].copy()[:, ::-1]
    for picture in (frozen, tensor, PIL.Image.fromarray(image), mirrored):
        images, labels, _ = collate(1)([(picture, 5)])
        assert images[0].equal(tensor)
        assert labels == [5]
