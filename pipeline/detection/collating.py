"""Images of several sizes, made into one batch: a `collate_fn`."""
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

    Samples are `(image, target, ...)`, or dicts with an "image". The batch is
    `(images, targets, ...)`: a tensor `uint8 [N, 3, H, W]` (`float32` where the images
    are), and lists of what else the samples have; or a dict of these. `sizes` of the
    images before padding are `[N, 2]`, height and width, in a dict under "sizes"; in a
    tuple they come last.

    Args:
        size_divisor: height and width are a multiple of it; feature pyramids need 32.
        fill: what pixels on the right and below become.
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
        """Return a batch of these samples."""
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
                "`collate` takes samples (image, target), or dicts with an"
                f' "image", got {described(samples[0])}'
            )
        columns = list(zip(*samples, strict=True))
        images, sizes = self._padded(columns[0])
        return (images, *map(list, columns[1:]), sizes)

    def _padded(self, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images `[N, 3, H, W]`, and their sizes `int64 [N, 2]`."""
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
    """Return an image of any kind as `[3, H, W]`; numbers of `normalize` stay floats.

    Raises:
        SampleError: it is no image.
    """
    numbers = torch.from_numpy(writable(image)) if is_numbers(image) else image
    if isinstance(numbers, torch.Tensor) and numbers.ndim == 3:
        if numbers.shape[0] == 3:
            return numbers
        if numbers.shape[-1] == 3:
            return numbers.permute(2, 0, 1)
    return torch.from_numpy(writable(pixels_of(image))).permute(2, 0, 1)


def is_numbers(image: Any) -> bool:
    """Whether it is an array that `normalize` has made."""
    return isinstance(image, np.ndarray) and image.dtype == np.float32
