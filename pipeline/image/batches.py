"""Operators for a `map` after `batch`: mixup, cutmix, and pixels to floats.

A batch is `(images, labels)`: images `[N, H, W, C]` or `[N, C, H, W]`, labels either
class numbers `[N]` or the share of each class `[N, classes]`.
"""
# ruff: noqa: N801

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import SampleError, check
from .codec import crop_extension, pixels_of
from .geometry import described, on_image


@dataclass(frozen=True, slots=True)
class Mixing(ABC):
    """Mixes each image of a batch with another one, by the same share for all.

    Args:
        num_classes: number of classes; labels are 0 to `num_classes` - 1.
        alpha: the share is drawn from Beta(alpha, alpha): the larger `alpha`, the
            closer it is to a half.
        p: probability that a batch is mixed. Labels become shares of classes in any
            case.

    Raises:
        SpecError: an argument is out of range.
    """

    num_classes: int
    alpha: float = 1.0
    p: float = 1.0

    def __post_init__(self) -> None:
        check(
            type(self.num_classes) is int and self.num_classes >= 2,
            f"`num_classes` must be an int >= 2, got {self.num_classes!r}; give the"
            " number of classes of the dataset",
        )
        check(
            self.alpha > 0,
            f"`alpha` must be > 0, got {self.alpha}; 0.2 to 1.0 are usual",
        )
        check(
            0 <= self.p <= 1,
            f"`p` must be a probability, 0 to 1, got {self.p}; 1.0 mixes every batch",
        )

    def __call__(self, batch: Any, rng: np.random.Generator) -> Any:
        """Return the batch with its images mixed, and labels `float32 [N, classes]`.

        Images keep their dtype and layout. Everything else in the batch is passed on.

        Raises:
            SampleError: the batch does not start with images and labels, or the labels
                do not fit `num_classes`.
        """
        images, labels = pair_of(batch)
        shares = self._shares(labels)
        mixed = images
        if rng.random() < self.p:
            share = float(rng.beta(self.alpha, self.alpha))
            other = torch.from_numpy(rng.permutation(len(images)))
            mixed, share = self._mixed(images, images[other], share, rng)
            shares = share * shares + (1 - share) * shares[other]
        made: tuple[Any, Any] = (mixed, shares)
        if not isinstance(batch[0], torch.Tensor):
            made = (mixed.numpy(), shares.numpy())
        make = getattr(type(batch), "_make", type(batch))  # a namedtuple stays one
        return make((*made, *batch[2:]))

    @abstractmethod
    def _mixed(
        self,
        images: torch.Tensor,
        others: torch.Tensor,
        share: float,
        rng: np.random.Generator,
    ) -> tuple[torch.Tensor, float]:
        """Return mixed images, and the share of `images` in them."""

    def _shares(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the share of each class, `float32 [N, classes]`.

        Raises:
            SampleError: the labels are neither class numbers nor shares of classes.
        """
        if labels.ndim == 2 and labels.shape[1] == self.num_classes:
            return labels.to(torch.float32)
        if labels.ndim != 1 or labels.is_floating_point():
            raise SampleError(
                "labels must be class indices [N], or class probabilities"
                f" [N, {self.num_classes}], got {described(labels)}; convert them in a"
                " map() before this stage"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < (
            self.num_classes
        ):
            raise SampleError(
                f"labels must be 0 to {self.num_classes - 1}, got {int(labels.min())}"
                f" to {int(labels.max())}; `num_classes` is {self.num_classes}: raise"
                " it, or number the classes from 0"
            )
        return torch.nn.functional.one_hot(labels.long(), self.num_classes).float()


@dataclass(frozen=True, slots=True)
class mixup(Mixing):
    """Blend each image, and its label, with another one of the batch.

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018. Pixels
    of integer images are rounded to the nearest integer.
    """

    def _mixed(
        self,
        images: torch.Tensor,
        others: torch.Tensor,
        share: float,
        rng: np.random.Generator,
    ) -> tuple[torch.Tensor, float]:
        del rng
        if images.is_floating_point():
            return torch.lerp(others, images, share), share
        mixed = torch.lerp(others.to(torch.float32), images.to(torch.float32), share)
        return mixed.round_().to(images.dtype), share


@dataclass(frozen=True, slots=True)
class cutmix(Mixing):
    """Replace a part of each image by the same part of another one; mix labels alike.

    Source: Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers
    with Localizable Features", ICCV 2019, section 3 and appendix A. The part's sides
    are sqrt(1 - share) of the image's, and its center is uniform. It is cut off at the
    edges of the image, and the labels are mixed by the share of pixels that remain.
    """

    def _mixed(
        self,
        images: torch.Tensor,
        others: torch.Tensor,
        share: float,
        rng: np.random.Generator,
    ) -> tuple[torch.Tensor, float]:
        rows, columns = (2, 3) if images.shape[1] <= 4 else (1, 2)  # channels first?
        height, width = images.shape[rows], images.shape[columns]
        side = math.sqrt(1 - share)
        top, bottom = drawn_span(height, side, rng)
        left, right = drawn_span(width, side, rng)
        part: list[Any] = [slice(None)] * 4
        part[rows], part[columns] = slice(top, bottom), slice(left, right)
        mixed = images.clone()
        mixed[tuple(part)] = others[tuple(part)]
        return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def drawn_span(length: int, side: float, rng: np.random.Generator) -> tuple[int, int]:
    """Draw the start and the end of a part, in pixels, cut off at the image's edges."""
    middle, half = int(rng.integers(length)), int(length * side) // 2
    return max(0, middle - half), min(length, middle + half)


def pair_of(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and the labels of a batch, as tensors.

    Raises:
        SampleError: the batch does not start with images and one label for each.
    """
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        images, labels = (
            each if isinstance(each, torch.Tensor) else torch.as_tensor(each)
            for each in batch[:2]
        )
        if images.ndim == 4 and labels.ndim >= 1 and len(images) == len(labels):
            return images, labels
    is_pair = isinstance(batch, list | tuple)
    found = [described(each) for each in batch] if is_pair else described(batch)
    raise SampleError(
        "mixing takes a batch (images, labels): images [N, H, W, C] or [N, C, H, W],"
        f" and one label for each, got {found}; call it in a map() after batch()"
    )


# From pixels to the floats that a model is trained on.

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training set by channel, for pixels scaled
to 0 to 1: the values that torchvision's models were trained with."""


@dataclass(frozen=True, slots=True)
class normalize:
    """Turn pixels into floats: `(pixel / 255 - mean) / std`, by channel.

    It takes one image of any kind, or a batch of images: an array or a tensor `uint8
    [N, H, W, 3]`, or a tensor `uint8 [N, 3, H, W]`. The result is a tensor for a
    tensor, and an array for everything else, or a tensor if numpy has no such type.

    Args:
        mean: of each channel, for pixels scaled to 0 to 1 (default: ImageNet's).
        std: standard deviation of each channel, likewise.
        channels_first: put the channels before height and width, as torch's models
            expect. False: leave them where they are.
        dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`.

    Raises:
        SpecError: `mean` or `std` is not three numbers, `std` is not positive, or
            `dtype` is another one.
    """

    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    _: KW_ONLY
    channels_first: bool = True
    dtype: torch.dtype = torch.float32
    table: NDArray[Any] = field(init=False, repr=False, compare=False)
    """The bits of the value that each pixel becomes, by channel: `[3, 256]`."""

    def __post_init__(self) -> None:
        check(
            self.dtype in BITS,
            f"`dtype` must be one of {', '.join(map(str, BITS))}, got {self.dtype};"
            " convert the batch after this, or leave `dtype` out",
        )
        check(
            len(self.mean) == len(self.std) == 3 and min(self.std) > 0,
            "`mean` and `std` must be three numbers each, and `std` > 0, got"
            f" {self.mean} and {self.std}; ImageNet's are the default",
        )
        pixels = torch.arange(256, dtype=torch.uint8, device="cpu").expand(3, 1, 256)
        values = self._numbers(pixels, -3).view(BITS[self.dtype])
        object.__setattr__(self, "table", values.numpy().reshape(3, 256))

    def __call__(self, sample: Any) -> Any:
        """Return the sample with its image, or images, as floats.

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
        made = self._numbers(tensor, -1)
        return made if self.dtype is torch.bfloat16 else made.numpy()

    def _numbers(self, pixels: torch.Tensor, axis: int) -> torch.Tensor:
        extension, _ = crop_extension()
        if extension is not None and axis == -1 and pixels.device.type == "cpu":
            return self._looked_up(pixels.contiguous(), extension)
        shape = (3, 1, 1) if axis == -3 else (3,)
        scales = [1 / (255 * std) for std in self.std]
        shifts = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        scale, shift = (
            torch.tensor(each, device=pixels.device).view(shape)
            for each in (scales, shifts)
        )
        if axis == -1 and self.channels_first:
            pixels = pixels.movedim(-1, -3).contiguous()
            scale, shift = scale.view(3, 1, 1), shift.view(3, 1, 1)
        return torch.addcmul(shift, pixels.to(torch.float32), scale).to(self.dtype)

    def _looked_up(self, pixels: torch.Tensor, extension: Any) -> torch.Tensor:
        """Return the values of pixels `[..., H, W, 3]`, in one pass without the GIL."""
        *before, height, width, _ = pixels.shape
        last = not self.channels_first
        shape = (height, width, 3) if last else (3, height, width)
        made = torch.empty((*before, *shape), dtype=self.dtype, device="cpu")
        count, size = math.prod(before), height * width
        values = made.view(BITS[self.dtype]).numpy()
        extension.normalize(
            pixels.numpy().reshape(count, size, 3),
            self.table,
            values.reshape((count, size, 3) if last else (count, 3, size)),
            last,
        )
        return made


BITS = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""The types of pixels' values, and those of their bits."""


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
