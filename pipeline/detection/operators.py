"""Resize, flip and crop as in the training of detectors; annotations move along."""
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
from ..image.placement import Placement
from ..image.placing import placed
from ..image.sample import SampleParts

flip = horizontal_flip

TRIES = 50
"""Parts of an image drawn before it is left whole (Liu et al. 2016)."""
OVERLAPS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
"""Minimum overlaps to choose from; 0: any overlap will do (Liu et al. 2016)."""


@dataclass(frozen=True, slots=True)
class resize:
    """Resize an image by its shorter side, with a limit on the longer one.

    The aspect is kept, and the smaller of the two possible scales is used (Ren et al.,
    "Faster R-CNN", 2015; Lin et al., "Feature Pyramid Networks", 2017, use 800 and
    1333). Sides are rounded down to whole pixels, as in torchvision's detectors.

    Args:
        size: pixels of the shorter side. If there are several numbers, one is drawn for
            each image.
        max_size: most pixels of the longer side.
        antialias: filter when shrinking, as Pillow does. torchvision's detectors do
            not.

    Raises:
        SpecError: `size` or `max_size` is not a number of pixels.
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
        """Return the sample with its image resized; annotations move with it.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        sizes = self._sizes()
        size = sizes[int(rng.integers(len(sizes))) if len(sizes) > 1 else 0]

        def choose(height: int, width: int) -> Placement:
            low, high = min(height, width), max(height, width)
            is_short = size * high <= self.max_size * low
            # In whole numbers: in floats, 49 * (800 / 49) is less than 800.
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
    """Cut a random part out of an image that overlaps a box sufficiently.

    This is the crop of SSD's training (Liu et al., "SSD: Single Shot MultiBox
    Detector", ECCV 2016, section 2.2). One of seven choices is drawn, all equally
    likely: leave the image whole, or cut out a part whose Jaccard index with at least
    one box is 0.1, 0.3, 0.5, 0.7 or 0.9 or more, or anything. Each side of the part is
    0.3 to 1 of the image's, and its aspect is between 1/2 and 2. If 50 tries find no
    such part, the image stays whole. Boxes are kept if their center is inside the part,
    and are cut off at its edges.

    Args:
        per_box: further annotations that have one entry per box, by name.
    """

    _: KW_ONLY
    per_box: tuple[str, ...] = ()

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with a part as its image, or as it is.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        target = SampleParts.of(sample).target
        boxes = boxes_of(target["boxes"] if target and "boxes" in target else [])

        def choose(height: int, width: int) -> Placement:
            box = drawn_part(height, width, boxes, rng)
            return Placement(box, box.height, box.width, (height, width))

        return placed(sample, choose, per_box=self.per_box, by_middle=True)


def drawn_part(height: int, width: int, boxes: Points, rng: np.random.Generator) -> Box:
    """Draw a part of an image, by the rule of `crop`.

    Args:
        height: height of the image in pixels.
        width: its width, likewise.
        boxes: `float64 [n, 4]`, in pixels.
        rng: the generator to draw from.
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
    """Return each box's intersection over union with a part, `float64 [n]`."""
    edges = edges_of(part)
    low = np.maximum(boxes[:, :2], edges[:2])
    shared = areas(np.concatenate([low, np.minimum(boxes[:, 2:], edges[2:])], axis=1))
    union = areas(boxes) + part.height * part.width - shared
    found: Points = np.divide(shared, union, out=np.zeros_like(union), where=union > 0)
    return found


def middle_inside(boxes: Points, part: Box) -> Flags:
    """Return whether the center of each box is inside a part, `bool [n]`."""
    edges = edges_of(part)
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (middles >= edges[:2]) & (middles < edges[2:])
    found: Flags = np.all(inside, axis=1)
    return found


def edges_of(part: Box) -> Points:
    """Return left, top, right, bottom in pixels, `float64 [4]`."""
    right, bottom = part.left + part.width, part.top + part.height
    return np.array([part.left, part.top, right, bottom], np.float64)
