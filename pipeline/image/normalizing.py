"""From pixels to the floats that a model is trained on."""
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from ...errors import SampleError, check
from .codec import pixels_of
from .sample import described, on_image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training set by channel, for pixels scaled
to 0 to 1: the values that torchvision's models were trained with."""


@dataclass(frozen=True, slots=True)
class normalize:
    """Turn pixels into floats: `(pixel / 255 - mean) / std`, by channel.

    It takes one image of any kind, or a batch of images: an array or a tensor `uint8
    [N, H, W, 3]`, or a tensor `uint8 [N, 3, H, W]`. The result is a `float32` tensor
    for a tensor, and a `float32` array for everything else. One call per batch, in a
    `map` after `batch`, is faster than one per image.

    Args:
        mean: of each channel, for pixels scaled to 0 to 1 (default: ImageNet's).
        std: standard deviation of each channel, likewise.
        channels_first: put the channels before height and width, as torch's models
            expect. False: leave them where they are.

    Raises:
        SpecError: `mean` or `std` is not three numbers, or `std` is not positive.
    """

    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    _: KW_ONLY
    channels_first: bool = True

    def __post_init__(self) -> None:
        check(
            len(self.mean) == len(self.std) == 3 and min(self.std) > 0,
            "`mean` and `std` must be three numbers each, and `std` > 0, got"
            f" {self.mean} and {self.std}; ImageNet's are the default",
        )

    def __call__(self, sample: Any) -> Any:
        """Return the sample with its image, or images, as `float32`.

        Raises:
            SampleError: it has no image.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        return on_image(sample, self._normalized)

    def _normalized(self, image: Any) -> Any:
        if isinstance(image, torch.Tensor):
            return self._numbers(image, channel_axis(image))
        is_batch = isinstance(image, np.ndarray) and image.ndim == 4
        pixels = image if is_batch else pixels_of(image)
        if pixels.dtype != np.uint8 or pixels.shape[-1] != 3:
            raise no_images(pixels)
        tensor = torch.from_numpy(np.require(pixels, requirements=("C", "W")))
        return self._numbers(tensor, -1).numpy()

    def _numbers(self, pixels: torch.Tensor, axis: int) -> torch.Tensor:
        shape = (3, 1, 1) if axis == -3 else (3,)
        scale = torch.tensor([1 / (255 * std) for std in self.std]).view(shape)
        moments = zip(self.mean, self.std, strict=True)
        shift = torch.tensor([-mean / std for mean, std in moments]).view(shape)
        if axis == -1 and self.channels_first:
            pixels = pixels.movedim(-1, -3).contiguous()
            scale, shift = scale.view(3, 1, 1), shift.view(3, 1, 1)
        return torch.addcmul(shift, pixels.to(torch.float32), scale)


def channel_axis(pixels: torch.Tensor) -> int:
    """Return the axis of the channels, -1 or -3; if it may be either, -3 as in torch.

    Raises:
        SampleError: these are not images.
    """
    if pixels.dtype == torch.uint8 and pixels.ndim in (3, 4):
        for axis in (-3, -1):
            if pixels.shape[axis] == 3:
                return axis
    raise no_images(pixels)


def no_images(given: Any) -> SampleError:
    """Return the error about a value that is neither an image nor several."""
    return SampleError(
        "`normalize` takes an image uint8 [H, W, 3] or [3, H, W], or a batch of images,"
        f" got {described(given)}; call it once, on the pixels as they were decoded"
    )
