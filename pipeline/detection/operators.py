"""Resize, flip and crop as detectors are trained; each also takes boxes along."""
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ..image import horizontal_flip
from ..image.annotations import Flags, Points, areas, boxes_of
from ..image.geometry import Box
from ..image.operators import check_size
from ..image.placement import Placement, placed
from ..image.sample import SampleParts

flip = horizontal_flip

TRIES = 50
"""For a part of an image, before it is taken whole (Liu et al. 2016)."""
OVERLAPS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
"""Least overlaps that a part is drawn for; 0: any (Liu et al. 2016)."""


@dataclass(frozen=True, slots=True)
class resize:
    """Resize an image so that its shorter side is `size`, its longer one `max_size`.

    The aspect is kept; the smaller of the two scales counts (Ren et al., "Faster
    R-CNN", 2015; Lin et al., "Feature Pyramid Networks", 2017, have 800 and 1333).
    Sides are whole pixels, rounded down, as those of torchvision's detectors are.

    Args:
        size: pixels of the shorter side; several: one is drawn for each image.
        max_size: pixels of the longer side, at most.
        antialias: filter when shrinking, as Pillow does. Torchvision's detectors do
            not.
    """

    size: int | Sequence[int] = 800
    max_size: int = 1333
    _: KW_ONLY
    antialias: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.size, int):
            object.__setattr__(self, "size", tuple(self.size))
        for each in self._sizes():
            check_size(each)
        check_size(self.max_size)

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample resized, its boxes, masks and keypoints with it."""
        sizes = self._sizes()
        size = sizes[int(rng.integers(len(sizes))) if len(sizes) > 1 else 0]

        def choose(height: int, width: int) -> Placement:
            low, high = min(height, width), max(height, width)
            is_short = size * high <= self.max_size * low
            # Whole numbers: 49 * (800 / 49) is less than 800 in floats.
            new, old = (size, low) if is_short else (self.max_size, high)
            tall, wide = (max(1, side * new // old) for side in (height, width))
            return Placement.whole(
                (height, width), height=tall, width=wide, antialias=self.antialias
            )

        return placed(sample, choose)

    def _sizes(self) -> tuple[int, ...]:
        return (self.size,) if isinstance(self.size, int) else tuple(self.size)


@dataclass(frozen=True, slots=True)
class crop:
    """Cut a random part out of an image that overlaps a box by enough.

    As SSD is trained (Liu et al., "SSD: Single Shot MultiBox Detector", ECCV 2016,
    section 2.2): with equal chance the image stays whole, or a part is drawn of which
    every side is 0.3 to 1 of the image's, with an aspect between 1/2 and 2, and that
    overlaps at least one box by a least Jaccard index of 0.1, 0.3, 0.5, 0.7, 0.9, or
    any. Boxes stay whose middle is in the part, cut off at its edges. Where no part is
    found in 50 tries the image stays whole.

    Args:
        per_box: names of what has one entry a box, besides the usual ones.
    """

    _: KW_ONLY
    per_box: tuple[str, ...] = ()

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return a sample with the part as its image, or as it is."""
        target = SampleParts.of(sample).target
        boxes = boxes_of(target["boxes"] if target and "boxes" in target else [])

        def choose(height: int, width: int) -> Placement:
            box = drawn_part(height, width, boxes, rng)
            return Placement(box, box.height, box.width, (height, width))

        return placed(sample, choose, per_box=self.per_box, by_middle=True)


def drawn_part(height: int, width: int, boxes: Points, rng: np.random.Generator) -> Box:
    """Draw a part of an image, by the rule of `crop`.

    Args:
        height: of the image, in pixels.
        width: likewise.
        boxes: `float64 [n, 4]`.
        rng: what is drawn from.
    """
    whole = Box(0, 0, height, width)
    chosen = int(rng.integers(len(OVERLAPS) + 1))
    if chosen == len(OVERLAPS):
        return whole
    least = OVERLAPS[chosen]
    for _ in range(TRIES):
        tall, wide = (max(1, int(s * rng.uniform(0.3, 1))) for s in (height, width))
        top = int(rng.integers(height - tall + 1))
        left = int(rng.integers(width - wide + 1))
        if not 0.5 <= tall / wide <= 2:
            continue
        part = Box(top, left, tall, wide)
        if not len(boxes):
            return part
        if jaccard(boxes, part).max() >= least and middle_inside(boxes, part).any():
            return part
    return whole


def jaccard(boxes: Points, part: Box) -> Points:
    """Return of each box `[n, 4]` the share of the union that it has with a part."""
    edges = edges_of(part)
    low = np.maximum(boxes[:, :2], edges[:2])
    shared = areas(np.concatenate([low, np.minimum(boxes[:, 2:], edges[2:])], axis=1))
    union = areas(boxes) + part.height * part.width - shared
    found: Points = np.divide(shared, union, out=np.zeros_like(union), where=union > 0)
    return found


def middle_inside(boxes: Points, part: Box) -> Flags:
    """Return of each box `[n, 4]` whether its middle is in a part."""
    edges = edges_of(part)
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (middles >= edges[:2]) & (middles < edges[2:])
    found: Flags = np.all(inside, axis=1)
    return found


def edges_of(part: Box) -> Points:
    """Return left, top, right, bottom."""
    right, bottom = part.left + part.width, part.top + part.height
    return np.array([part.left, part.top, right, bottom], np.float64)
