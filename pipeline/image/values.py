"""Operators that change the values of pixels: of one image, or of a batch.

Pillow computes `color_jitter` and `rand_augment`, and the pixels are exactly its own.
Factors have the meaning they have in its `ImageEnhance`: 0 gives black or grey, 1
leaves the image as it is, and more than 1 strengthens it.

`mixup` and `cutmix` come after `batch`. A batch is `(images, labels)`: images `[N, H,
W, C]` or `[N, C, H, W]`, labels either class numbers `[N]` or the share of each class
`[N, classes]`. `normalize` makes the floats that a model is trained on.
"""
# ruff: noqa: N801

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import torch
from numpy.typing import NDArray

from ...errors import SampleError, check
from .codec import crop_extension, like, on_pixels, pixels_of
from .geometry import (
    Image,
    Matrix,
    Range,
    SampleParts,
    Warp,
    described,
    moved_annotations,
    on_image,
    typed,
    writable,
)

# Changes by a factor.
ENHANCERS: dict[str, Any] = {
    "brightness": PIL.ImageEnhance.Brightness,
    "saturation": PIL.ImageEnhance.Color,
    "contrast": PIL.ImageEnhance.Contrast,
    "sharpness": PIL.ImageEnhance.Sharpness,
}
# The changes of `color_jitter`, and the amounts that leave an image as it is.
UNCHANGED = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}


def changed_picture(
    picture: PIL.Image.Image, change: str, amount: float
) -> PIL.Image.Image:
    """Return a picture after a change that moves no pixel.

    Args:
        picture: the picture.
        change: its name; "identity" changes nothing.
        amount: a factor, or for "hue" a share of the circle, by which all hues turn in
            whole steps of 1/256. For the changes that only RandAugment has, a level
            from 0 to 1: the higher it is, the more bits are cleared, and the lower is
            the threshold above which pixels are inverted.
    """
    match change:
        case "hue":
            hue, *rest = picture.convert("HSV").split()
            steps = math.trunc(amount * 255) % 256
            hue = hue.point([(step + steps) % 256 for step in range(256)])
            picture = PIL.Image.merge("HSV", (hue, *rest)).convert("RGB")
        case "posterize":
            # At most four of eight bits are cleared.
            picture = PIL.ImageOps.posterize(picture, 8 - round(amount * 4))
        case "solarize":
            picture = PIL.ImageOps.solarize(picture, math.ceil(255 * (1 - amount)))
        case "autocontrast":
            picture = PIL.ImageOps.autocontrast(picture)
        case "equalize":
            picture = PIL.ImageOps.equalize(picture)
        case _ if change in ENHANCERS:
            picture = ENHANCERS[change](picture).enhance(amount)
    return picture


@dataclass(frozen=True, slots=True)
class color_jitter:
    """Change brightness, contrast, saturation and hue by random amounts.

    The four are applied in a random order (Howard, "Some Improvements on Deep
    Convolutional Neural Network Based Image Classification", 2013). The ranges are
    those of torchvision's `ColorJitter`.

    Args:
        brightness, contrast, saturation: x, for a factor drawn uniformly from 1 - x
            (but at least 0) to 1 + x; or its range, (min, max).
        hue: x <= 0.5, for a turn of the hue drawn uniformly from -x to x, as a share of
            the circle; or its range, (min, max).

    Raises:
        SpecError: an argument is out of range.
    """

    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            amount = getattr(self, name)
            low, high = self._range(name)
            check(
                0 <= low <= high and (isinstance(amount, tuple) or amount >= 0),
                f"`{name}` must be a number >= 0, or a range (min, max) of these, got"
                f" {amount}; 0.4 is usual",
            )
        low, high = self._range("hue")
        check(
            -0.5 <= low <= high <= 0.5,
            f"`hue` must be 0 to 0.5, or a range (min, max) within -0.5 and 0.5, got"
            f" {self.hue}; 0.1 is usual",
        )

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with the colors of its image changed.

        Raises:
            SampleError: it has no image.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        ranges = {name: self._range(name) for name in UNCHANGED}
        # A change whose range is fixed at "no change" is left out.
        names = [name for name, it in UNCHANGED.items() if ranges[name] != (it, it)]
        changes = [
            (names[at], rng.uniform(*ranges[names[at]]))
            for at in rng.permutation(len(names))
        ]

        def jittered(pixels: Image) -> Image:
            picture = PIL.Image.fromarray(pixels)
            for change, amount in changes:
                picture = changed_picture(picture, change, amount)
            return np.array(picture)  # `asarray` would be read-only

        return on_pixels(sample, jittered)

    def _range(self, name: str) -> Range:
        """Return the smallest and the largest amount of a change."""
        amount, none = getattr(self, name), UNCHANGED[name]
        is_range = isinstance(amount, tuple)
        return amount if is_range else (max(none - 1, none - amount), none + amount)


# RandAugment: Cubuk et al., "RandAugment: Practical automated data augmentation with a
# reduced search space", 2019. The list of changes, and the amount that a magnitude
# stands for in each, are those of torchvision's `RandAugment` with its 31 bins.

# The warps, and the largest amount of each: pixels of shift per pixel of distance, a
# share of the side in its direction (images in the paper have 331 pixels), and degrees.
# Its sign is drawn, as for a factor.
WARPS = {
    "shear x": 0.3,
    "shear y": 0.3,
    "shift x": 150 / 331,
    "shift y": 150 / 331,
    "rotate": 30.0,
}
CHANGES = (
    *WARPS,
    *ENHANCERS,
    *("posterize", "solarize", "autocontrast", "equalize", "identity"),
)


def matrix_of(warp: str, amount: float, size: tuple[int, int]) -> Matrix:
    """Return the matrix of a warp.

    Args:
        warp: "shear x" shifts each row sideways in proportion to its y, "shear y" each
            column; "shift x" and "shift y" shift by whole pixels, "rotate" turns
            counter-clockwise about the center.
        amount: pixels per pixel, a share of the side, or degrees.
        size: height and width of the image in pixels.
    """
    height, width = size
    match warp:
        case "shear x":
            return 1, amount, 0, 0, 1, 0
        case "shear y":
            return 1, 0, 0, amount, 1, 0
        case "shift x":
            return 1, 0, -int(amount * width), 0, 1, 0
        case "shift y":
            return 1, 0, 0, 0, 1, -int(amount * height)
    angle = -math.radians(amount)
    cosine, sine = math.cos(angle), math.sin(angle)
    x, y = width / 2, height / 2
    return (
        cosine, sine, x - cosine * x - sine * y,
        -sine, cosine, y + sine * x - cosine * y,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class rand_augment:
    """Apply a few changes, drawn from 14, to an image, all of the same magnitude.

    If the image is sheared, shifted or turned, boxes, masks and keypoints move with it.
    A turned box becomes the upright box around it.

    Args:
        num_ops: how many changes to apply, one after another.
        magnitude: of each change, 0 to `bins` - 1.
        bins: number of magnitudes.
        fill: value of the pixels that come in from outside the image, 0 to 255.
        per_box: further annotations that have one entry per box, by name.

    Raises:
        SpecError: an argument is out of range.
    """

    num_ops: int = 2
    magnitude: int = 9
    _: KW_ONLY
    bins: int = 31
    fill: int = 0
    per_box: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(
            type(self.num_ops) is int and self.num_ops >= 0,
            f"`num_ops` must be an int >= 0, got {self.num_ops!r}; 2 is usual",
        )
        check(
            self.bins >= 2 and 0 <= self.magnitude < self.bins,
            f"`magnitude` must be 0 to `bins` - 1, {self.bins - 1}, got"
            f" {self.magnitude}; magnitude=9, bins=31 are usual",
        )

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Return the sample with its image changed; annotations move with it.

        Raises:
            SampleError: it has no image, or its annotations have wrong shapes.
            ValueError: it has the bytes of a file that cannot be decoded.
        """
        parts = SampleParts.of(typed(sample))  # types do not depend on what is drawn
        picture = PIL.Image.fromarray(pixels_of(parts.image))
        size, target = (picture.height, picture.width), parts.target
        level = self.magnitude / (self.bins - 1)
        for number in rng.integers(len(CHANGES), size=self.num_ops):
            change, sign = CHANGES[number], 1 if rng.random() < 0.5 else -1
            if change in WARPS:
                matrix = matrix_of(change, sign * level * WARPS[change], size)
                picture = picture.transform(
                    picture.size,
                    PIL.Image.Transform.AFFINE,
                    matrix,
                    fillcolor=(self.fill,) * 3,
                )
                if target is not None:
                    target = moved_annotations(
                        target, Warp(matrix, size), size, per_box=self.per_box
                    )
            else:
                # A factor is 0.1 to 1.9.
                amount = 1 + sign * level * 0.9 if change in ENHANCERS else level
                picture = changed_picture(picture, change, amount)
        return parts.with_image(like(parts.image, np.array(picture)), target)


# Images of a batch mixed.


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
        if rng.random() < self.p:
            share = float(rng.beta(self.alpha, self.alpha))
            other = torch.from_numpy(rng.permutation(len(images)))
            images, share = self._mixed(images, images[other], share, rng)
            shares = share * shares + (1 - share) * shares[other]
        pair = [
            part if isinstance(batch[0], torch.Tensor) else part.numpy()
            for part in (images, shares)
        ]
        # A namedtuple stays one.
        return getattr(type(batch), "_make", type(batch))((*pair, *batch[2:]))

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
        blend = torch.lerp(others.to(torch.float32), images.to(torch.float32), share)
        return blend.round_().to(images.dtype), share


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
        mixture = images.clone()
        mixture[tuple(part)] = others[tuple(part)]
        return mixture, 1 - (bottom - top) * (right - left) / (height * width)


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
            column if isinstance(column, torch.Tensor) else torch.as_tensor(column)
            for column in batch[:2]
        )
        if images.ndim == 4 and labels.ndim >= 1 and len(images) == len(labels):
            return images, labels
    is_row = isinstance(batch, list | tuple)
    raise SampleError(
        "mixing takes a batch (images, labels): images [N, H, W, C] or [N, C, H, W],"
        f" and one label for each, got"
        f" {[*map(described, batch)] if is_row else described(batch)}; call it in a"
        " map() after batch()"
    )


# From pixels to the floats that a model is trained on.

IMAGENET_MEAN = (0.485, 0.456, 0.406)
# Mean and standard deviation of ImageNet's training set by channel, for pixels scaled
# to 0 to 1: the values that torchvision's models were trained with.
IMAGENET_STD = (0.229, 0.224, 0.225)


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
            is_pixels = image.dtype == torch.uint8 and image.ndim in (3, 4)
            # If either axis may be that of the channels, it is the first, as in torch.
            axes = [axis for axis in (-3, -1) if is_pixels and image.shape[axis] == 3]
            if not axes:
                raise no_images(image)
            return self._numbers(image, axes[0])
        is_batch = isinstance(image, np.ndarray) and image.ndim == 4
        pixels = image if is_batch else pixels_of(image)
        if pixels.dtype != np.uint8 or pixels.shape[-1] != 3:
            raise no_images(pixels)
        floats = self._numbers(torch.from_numpy(writable(pixels)), -1)
        return floats if self.dtype is torch.bfloat16 else floats.numpy()

    def _numbers(self, pixels: torch.Tensor, axis: int) -> torch.Tensor:
        extension, _ = crop_extension()
        if extension is not None and axis == -1 and pixels.device.type == "cpu":
            return self._looked_up(pixels.contiguous(), extension)
        if axis == -1 and self.channels_first:
            pixels, axis = pixels.movedim(-1, -3).contiguous(), -3
        shape = (3, 1, 1) if axis == -3 else (3,)
        scales = [1 / (255 * std) for std in self.std]
        shifts = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        scale, shift = (
            torch.tensor(values, dtype=torch.float32, device=pixels.device).view(shape)
            for values in (scales, shifts)
        )
        return torch.addcmul(shift, pixels.to(torch.float32), scale).to(self.dtype)

    def _looked_up(self, pixels: torch.Tensor, extension: Any) -> torch.Tensor:
        """Return the values of pixels `[..., H, W, 3]`, in one pass without the GIL."""
        *before, height, width, _ = pixels.shape
        last = not self.channels_first
        shape = (height, width, 3) if last else (3, height, width)
        floats = torch.empty((*before, *shape), dtype=self.dtype, device="cpu")
        count, size = math.prod(before), height * width
        values = floats.view(BITS[self.dtype]).numpy()
        extension.normalize(
            pixels.numpy().reshape(count, size, 3),
            self.table,
            values.reshape((count, size, 3) if last else (count, 3, size)),
            last,
        )
        return floats


# The types of pixels' values, and those of their bits.
BITS = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def no_images(value: Any) -> SampleError:
    """Return the error about a value that is neither an image nor several."""
    return SampleError(
        "`normalize` takes an image uint8 [H, W, 3] or [3, H, W], or a batch of images,"
        f" got {described(value)}; call it once, on the pixels as they were decoded"
    )
