"""Batches of images of different sizes: a `collate_fn`."""
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

from ...errors import SampleError, check
from ..image.geometry import writable
from ..image.kinds import pixels_of
from ..image.sample import IMAGE, described


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
        sizes = torch.tensor([tuple(each.shape[1:]) for each in tensors])
        by = self.size_divisor
        tall, wide = (-(-int(side) // by) * by for side in sizes.amax(dim=0))
        kind = reduce(torch.promote_types, [each.dtype for each in tensors])
        batch = torch.full((len(tensors), 3, tall, wide), self.fill, dtype=kind)
        for row, each in zip(batch, tensors, strict=True):
            row[:, : each.shape[1], : each.shape[2]] = each
        return batch, sizes


def channels_first(image: Any) -> torch.Tensor:
    """Return an image of any kind as a tensor `[3, H, W]`; floats stay floats.

    Raises:
        SampleError: it is not an image.
        ValueError: it is the bytes of a file that cannot be decoded.
    """
    numbers = torch.from_numpy(writable(image)) if is_numbers(image) else image
    if isinstance(numbers, torch.Tensor) and numbers.ndim == 3:
        if numbers.shape[0] == 3:
            return numbers
        if numbers.shape[-1] == 3:
            return numbers.permute(2, 0, 1)
    return torch.from_numpy(writable(pixels_of(image))).permute(2, 0, 1)


def is_numbers(image: Any) -> bool:
    """Whether this is an array `float32`, as `normalize` makes."""
    return isinstance(image, np.ndarray) and image.dtype == np.float32
