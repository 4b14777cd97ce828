"""Images with boxes, for the training of detectors such as Mask R-CNN.

    pipe = ps.Pipeline.from_dataset(coco).shuffle(seed=0)  # (image, target)
    pipe = pipe.map(ps.detection.resize(800, max_size=1333)).map(ps.detection.flip())
    pipe = pipe.batch(4, collate_fn=ps.detection.collate(size_divisor=32))

A sample is `(image, target)`, or a dict with an "image". The target is a dict with
`boxes`, `labels`, `masks` and `keypoints`, named as for torchvision's models. All
operators of `ps.image` move these along with the pixels. This module adds the operators
that only detectors need.
"""
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SampleError, check, whole_number
from .image import horizontal_flip
from .image.codec import pixels_of
from .image.geometry import (
    IMAGE,
    Box,
    Placement,
    Points,
    SampleParts,
    areas,
    box_at_random,
    boxes_of,
    described,
    middles_inside,
    writable,
)
from .image.operators import placed_sample

__all__ = ["aspect_groups", "collate", "crop", "flip", "resize"]

flip = horizontal_flip

# Parts of an image drawn before it is left whole (Liu et al. 2016).
TRIES = 50
# Minimum overlaps to choose from; 0: any overlap will do (Liu et al. 2016).
OVERLAPS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.0)


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
        for size in self._sizes():
            whole_number("size", size, 1, "800 pixels are usual")
        whole_number("max_size", self.max_size, 1, "1333 pixels are usual")

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

        return placed_sample(sample, choose)

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

        return placed_sample(sample, choose, per_box=self.per_box, by_middle=True)


def drawn_part(height: int, width: int, boxes: Points, rng: np.random.Generator) -> Box:
    """Draw a part of an image, by the rule of `crop`.

    Args:
        height: height of the image in pixels.
        width: its width, likewise.
        boxes: `float64 [n, 4]`, in pixels.
        rng: the generator to draw from.
    """
    whole = Box(0, 0, height, width)
    choice = int(rng.integers(len(OVERLAPS) + 1))
    if choice == len(OVERLAPS):
        return whole
    least = OVERLAPS[choice]
    for _ in range(TRIES):
        tall, wide = (max(1, int(s * rng.uniform(0.3, 1))) for s in (height, width))
        part = box_at_random(height, width, tall, wide, rng)
        if 0.5 <= tall / wide <= 2 and (
            not len(boxes)
            or (
                jaccard(boxes, part).max() >= least
                and middles_inside(boxes, edges_of(part)).any()
            )
        ):
            return part
    return whole


def jaccard(boxes: Points, part: Box) -> Points:
    """Return each box's intersection over union with a part, `float64 [n]`."""
    edges = edges_of(part)
    low = np.maximum(boxes[:, :2], edges[:2])
    intersection = areas(
        np.concatenate([low, np.minimum(boxes[:, 2:], edges[2:])], axis=1)
    )
    union = areas(boxes) + part.height * part.width - intersection
    return np.divide(intersection, union, out=np.zeros_like(union), where=union > 0)


def edges_of(part: Box) -> Points:
    """Return left, top, right, bottom in pixels, `float64 [4]`."""
    right, bottom = part.left + part.width, part.top + part.height
    return np.array([part.left, part.top, right, bottom], np.float64)


@dataclass(frozen=True, slots=True)
class collate:
    """Pad images to the largest of the batch, and keep their targets in a list.

    Samples are `(image, target, ...)`, or dicts with an "image". The batch is `(images,
    targets, ..., sizes)`, or a dict with "image", the samples' other keys and "sizes":

    - the images are a tensor `uint8 [N, 3, H, W]` (`float32` if the images are);
    - targets, and everything else, are lists of the samples' values;
    - the sizes are a tensor `int64 [N, 2]`: height and width before padding, in pixels.

    Args:
        size_divisor: height and width of the batch are multiples of this; feature
            pyramids need 32.
        fill: value of the pixels added on the right and at the bottom.

    Raises:
        SpecError: `size_divisor` is not an int >= 1.
    """

    size_divisor: int = 32
    fill: float = 0

    def __post_init__(self) -> None:
        check(
            type(self.size_divisor) is int and self.size_divisor >= 1,
            f"`size_divisor` must be an int >= 1, got {self.size_divisor!r}; 32 is"
            " usual",
        )

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return a batch of these samples.

        Raises:
            SampleError: a sample has no image.
            ValueError: an image is the bytes of a file that cannot be decoded.
        """
        if isinstance(samples[0], dict):
            images, sizes = self._padded([sample[IMAGE] for sample in samples])
            rest = {
                key: [sample[key] for sample in samples]
                for key in samples[0]
                if key != IMAGE
            }
            return {IMAGE: images, **rest, "sizes": sizes}
        if not isinstance(samples[0], tuple):
            raise SampleError(
                '`collate` takes samples (image, target), or dicts with an "image", got'
                f" {described(samples[0])}; convert them in a map() before batch()"
            )
        columns = list(zip(*samples, strict=True))
        images, sizes = self._padded(columns[0])
        return (images, *map(list, columns[1:]), sizes)

    def _padded(self, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images `[N, 3, H, W]`, and their sizes before, `int64 [N, 2]`."""
        tensors = [channels_first(image) for image in images]
        sizes = torch.tensor([tuple(tensor.shape[1:]) for tensor in tensors])
        by = self.size_divisor
        tall, wide = (-(-int(side) // by) * by for side in sizes.amax(dim=0))
        kind = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        batch = torch.full((len(tensors), 3, tall, wide), self.fill, dtype=kind)
        for row, tensor in zip(batch, tensors, strict=True):
            row[:, : tensor.shape[1], : tensor.shape[2]] = tensor
        return batch, sizes


def channels_first(image: Any) -> torch.Tensor:
    """Return an image of any kind as a tensor `[3, H, W]`; floats stay floats.

    Raises:
        SampleError: it is not an image.
        ValueError: it is the bytes of a file that cannot be decoded.
    """
    is_float = isinstance(image, np.ndarray) and image.dtype == np.float32
    numbers = torch.from_numpy(writable(image)) if is_float else image
    if isinstance(numbers, torch.Tensor) and numbers.ndim == 3:
        if numbers.shape[0] == 3:
            return numbers
        if numbers.shape[-1] == 3:
            return numbers.permute(2, 0, 1)
    return torch.from_numpy(writable(pixels_of(image))).permute(2, 0, 1)


def aspect_groups(sizes: Any, groups: int = 7) -> NDArray[np.int64]:
    """Return the group of each image by its aspect, `int64 [N]`, 0 to `groups` - 1.

    Pass it to `.batch(n, lengths=...)`. Images of a group then share batches, except
    where one group ends and the next begins. The borders between groups are evenly
    spaced on a logarithmic scale from 1:2 to 2:1, as in torchvision's reference scripts
    for detection.

    Args:
        sizes: height and width of each image in pixels, `[N, 2]`.
        groups: number of groups. An even number separates portrait from landscape.

    Raises:
        SpecError: `sizes` does not have this shape, or `groups` is below 1.
    """
    sides = np.asarray(sizes, np.float64)
    check(
        sides.ndim == 2 and sides.shape[1] == 2 and (sides > 0).all(),
        "`sizes` must be height and width of each image, [N, 2] and > 0, got"
        f" {[*sides.shape]}; take them from the dataset's index or the files' headers",
    )
    check(groups >= 1, f"`groups` must be >= 1, got {groups}; 7 is usual")
    # A single border belongs at 1:1; linspace would put it at the lower end.
    borders = np.ones(1) if groups == 2 else 2 ** np.linspace(-1, 1, groups - 1)
    numbers = np.searchsorted(borders, sides[:, 1] / sides[:, 0], side="right")
    return numbers.astype(np.int64)
