"""Images and their annotations: where samples have them, and where they go. Pure.

Pixels are `uint8 [H, W, 3]`; torch works on them without holding the GIL. They are cut,
resized, mirrored and put on a canvas (`Placement`), or warped (`Warp`).

Annotations are boxes, masks and keypoints, and move with the pixels. They have the
names and shapes that torchvision's detection models expect, and may be arrays, tensors
or lists:

- `boxes [n, 4]`: left, top, right, bottom in pixels; x grows to the right, y downwards;
- `masks [n, H, W]`: one per object; `mask [H, W]`: one class per pixel;
- `keypoints [n, k, 2 or 3]`: x and y in pixels, and whether the point is visible.

If nothing is left of a box, it is dropped, together with its entry under each name in
`PER_BOX` and each name in the operator's `per_box`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from ...errors import SampleError

# `uint8 [H, W, 3]`, RGB.
Image: TypeAlias = NDArray[np.uint8]
# `[m, 2]`: x and y in pixels.
Points = NDArray[np.float64]
# The smallest and the largest value; both are included.
Range: TypeAlias = tuple[float, float]

# The value of pixels around an image, 0 to 255: one number, or one per channel.
Fill = int | tuple[int, int, int]

# Boxes drawn before the central one is taken.
TRIES = 10


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of whole pixels inside an image; all numbers are pixels."""

    top: int
    left: int
    height: int
    width: int

    def reduced(self, factor: int) -> Box:
        """Return the box that covers the same part of the image at 1/`factor` scale.

        Its edges are off by at most half a (reduced) pixel.
        """
        top, left = round(self.top / factor), round(self.left / factor)
        bottom = round((self.top + self.height) / factor)
        right = round((self.left + self.width) / factor)
        return Box(top, left, bottom - top, right - left)

    def cut(self, image: Image) -> Image:
        """Return this part of `image` `uint8 [H, W, 3]`, as a view of it."""
        return image[
            self.top : self.top + self.height, self.left : self.left + self.width
        ]


def random_box(
    height: int, width: int, scale: Range, ratio: Range, rng: np.random.Generator
) -> Box:
    """Draw the box of a random resized crop, by the same rule as torchvision.

    The box's share of the image's area is uniform in `scale`, its aspect (width /
    height) is log-uniform in `ratio`, and its place is uniform. If a box does not fit,
    another is drawn, 10 in all. If none fits, the largest central box with an aspect
    within `ratio` is taken. (Szegedy et al., "Going deeper with convolutions", CVPR
    2015, section 6. The number of tries and the rounding are those of torchvision's
    `RandomResizedCrop`.)
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(TRIES):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(low, high))
        tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < tall <= height and 0 < wide <= width:
            return box_at_random(height, width, tall, wide, rng)
    tall, wide = height, width
    if width / height < ratio[0]:
        tall = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        wide = max(1, round(height * ratio[1]))
    return central_box(height, width, tall, wide)


def box_at_random(
    height: int, width: int, tall: int, wide: int, rng: np.random.Generator
) -> Box:
    """Draw the place of a box of `tall` by `wide` pixels in an image, uniformly."""
    top = int(rng.integers(height - tall + 1))
    return Box(top, int(rng.integers(width - wide + 1)), tall, wide)


def central_box(height: int, width: int, tall: int, wide: int) -> Box:
    """Return the box of `tall` by `wide` pixels in the middle of an image."""
    return Box((height - tall) // 2, (width - wide) // 2, tall, wide)


def short_side_size(
    height: int, width: int, short: int, longest: int | None = None
) -> tuple[int, int]:
    """Return (height, width) of the same aspect whose smaller side is `short` pixels.

    If the larger side would then exceed `longest`, it becomes `longest`, and the
    smaller side is below `short`.
    """
    low, high = min(height, width), max(height, width)
    long = max(short, short * high // low)
    if longest is not None and long > longest:
        short, long = max(1, longest * low // high), longest
    return (short, long) if height <= width else (long, short)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which part of an image to take, how large to make it, and what goes around it."""

    box: Box
    """The part to take."""
    height: int
    """Its height in pixels, after resizing."""
    width: int
    """Its width, likewise."""
    of: tuple[int, int]
    """Height and width of the original image, in pixels."""
    mirrored: bool = False
    canvas: Box | None = None
    """The new image, of `height` by `width`, with the part placed at `top`, `left`.
    None: the part is the new image."""
    fill: Fill = 0
    antialias: bool = True
    factor: int = 1
    """The n of the scale 1/n at which a file is decoded: 1, 2, 4 or 8."""

    @classmethod
    def whole(cls, of: tuple[int, int], **changes: Any) -> Placement:
        """Return the placement that leaves an image as it is, apart from `changes`."""
        return cls(
            Box(0, 0, *of), of=of, **{"height": of[0], "width": of[1], **changes}
        )

    @property
    def shown(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the old image in the new one, in pixels."""
        left, top = self._offset()
        return left, top, left + self.width, top + self.height

    @property
    def reduced(self) -> Box:
        """The part to take, in pixels of the image at 1/`factor` scale."""
        return self.box if self.factor == 1 else self.box.reduced(self.factor)

    @property
    def cuts(self) -> bool:
        """Whether it takes less than the whole image."""
        return (self.box.height, self.box.width) != self.of

    def points(self, points: Points) -> Points:
        """Return where points come to lie, `float64 [m, 2]`."""
        box = self.box
        scale = (self.width / box.width, self.height / box.height)
        places = (points - (box.left, box.top)) * scale
        if self.mirrored:
            places[:, 0] = self.width - places[:, 0]
        return places + self._offset()

    def masks(self, masks: torch.Tensor, fill: int) -> torch.Tensor:
        """Return masks `[n, H, W]` of the new image, by nearest pixels."""
        box = self.box
        part = masks[:, box.top : box.top + box.height, box.left : box.left + box.width]
        if part.shape[1:] != (self.height, self.width):
            rows = nearest_places(part.shape[1], self.height)
            part = part[:, rows][:, :, nearest_places(part.shape[2], self.width)]
        if self.mirrored:
            part = part.flip(2)
        if self.canvas is not None:
            around = part.new_full(
                (len(part), self.canvas.height, self.canvas.width), fill
            )
            left, top = self._offset()
            around[:, top : top + self.height, left : left + self.width] = part
            return around
        return part.clone() if part._is_view() else part  # noqa: SLF001 public in use

    def _offset(self) -> tuple[int, int]:
        """Return left and top of the part on its canvas, in pixels."""
        return (0, 0) if self.canvas is None else (self.canvas.left, self.canvas.top)


def nearest_places(before: int, after: int) -> torch.Tensor:
    """Return which of `before` pixels each of `after` pixels copies, as in Pillow.

    It is the one at its center.
    """
    middles = (np.arange(after) + 0.5) * (before / after)
    return torch.from_numpy(np.minimum(middles.astype(np.int64), before - 1))


# Two rows of three, as for Pillow's `transform`.
Matrix = tuple[float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Warp:
    """An affine move: the new pixel (x, y) shows the old one at `matrix` (x, y, 1)."""

    matrix: Matrix
    size: tuple[int, int]
    """Height and width in pixels, which do not change."""
    cuts: ClassVar[bool] = True
    """Whether a part of the old image may lie outside the new one."""

    @property
    def shown(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the visible part, in pixels."""
        return 0, 0, self.size[1], self.size[0]

    def points(self, points: Points) -> Points:
        """Return the new places of points, `float64 [m, 2]`."""
        a, b, c, d, e, f = self.matrix
        return cast("Points", np.linalg.solve([[a, b], [d, e]], (points - (c, f)).T).T)

    def masks(self, masks: torch.Tensor, fill: int) -> torch.Tensor:
        """Return masks `[n, H, W]` warped, by nearest pixels."""
        height, width = self.size
        a, b, c, d, e, f = self.matrix
        # A pixel's place is its center.
        y, x = np.mgrid[:height, :width] + 0.5
        column = np.floor(a * x + b * y + c).astype(np.int64)
        row = np.floor(d * x + e * y + f).astype(np.int64)
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        new_masks = masks.new_full(masks.shape, fill)
        new_masks[:, torch.from_numpy(inside)] = masks[:, row[inside], column[inside]]
        return new_masks


# Where an operator moves the places of an image.
Transform: TypeAlias = Placement | Warp


def resize(image: Image, height: int, width: int, *, antialias: bool) -> Image:
    """Return `image` resized bilinearly, in new memory: `uint8 [height, width, 3]`.

    With `antialias`, each pixel is within 1/255 of Pillow's `BILINEAR`.
    """
    # torch has a vectorised path for channels-last memory, which is twice as fast. All
    # is done in one call: each call releases the GIL, and getting it back takes some
    # 50 us if other threads want it.
    tall, wide, channels = image.shape
    planes = torch.as_strided(
        torch.from_numpy(writable(image)),
        (1, channels, tall, wide),
        (image.size, 1, wide * channels, channels),
    )
    pixels = torch.nn.functional.interpolate(
        planes, size=(height, width), mode="bilinear", antialias=antialias
    )
    return np.ascontiguousarray(pixels.numpy()[0].transpose(1, 2, 0))


def mirror(image: Image) -> Image:
    """Return `image` with left and right exchanged, in new memory."""
    # numpy copies reversed rows one pixel at a time, which is 20 times slower.
    return cast("Image", torch.flip(torch.from_numpy(writable(image)), (1,)).numpy())


def writable(image: Image) -> Image:
    """Return `image` in memory that torch accepts: contiguous and writable."""
    return np.require(image, requirements=("C", "W"))


# Samples.

# A whole image file.
Encoded: TypeAlias = bytes | bytearray | memoryview
Flags = NDArray[np.bool_]

# Names with one entry per box; an operator's `per_box` adds others.
PER_BOX = frozenset(
    ("boxes", "labels", "area", "iscrowd", "scores", "masks", "keypoints")
)

# The key of the image in a dict.
IMAGE = "image"
# The entries of a dict that move with the pixels.
ANNOTATIONS = frozenset(("boxes", "masks", "mask", "keypoints"))

CURE = (
    "an operator takes an image, a tuple that starts with an image, or a dict with an"
    ' "image"; for other samples, write a function that calls the operator on the image'
)


@dataclass(frozen=True, slots=True)
class SampleParts:
    """A sample taken apart: its image, and the annotations that move with it.

    The image is the sample itself, the first element of a tuple, or a dict's "image".
    The annotations are in the dict itself, or in the first dict of the tuple that has
    some.
    """

    image: Any
    target: Mapping[str, Any] | None
    sample: Any
    place: int | None
    """The index of the annotations in a tuple."""

    @classmethod
    def of(cls, sample: Any) -> SampleParts:
        """Take a sample apart, without copying anything."""
        if isinstance(sample, Mapping) and IMAGE in sample:
            target = sample if ANNOTATIONS & sample.keys() else None
            return cls(sample[IMAGE], target, sample, None)
        if not isinstance(sample, tuple) or not sample:
            return cls(sample, None, sample, None)
        for place, part in enumerate(sample):
            if place and isinstance(part, Mapping) and ANNOTATIONS & part.keys():
                return cls(sample[0], part, sample, place)
        return cls(sample[0], None, sample, None)

    def with_image(self, image: Any, target: Mapping[str, Any] | None = None) -> Any:
        """Return the sample with this image and, unless None, these annotations."""
        if isinstance(self.sample, Mapping) and IMAGE in self.sample:
            return {**self.sample, **(target or {}), IMAGE: image}
        if not isinstance(self.sample, tuple) or not self.sample:
            return image
        elements = [image, *self.sample[1:]]
        if target is not None and self.place is not None:
            elements[self.place] = target
        return getattr(type(self.sample), "_make", tuple)(elements)


def on_image(sample: Any, change: Callable[[Any], Any]) -> Any:
    """Return `sample` with its image replaced by `change(image)`.

    `SampleParts` says where the image is. Everything else stays as it is; a namedtuple
    stays a namedtuple.
    """
    parts = SampleParts.of(sample)
    return parts.with_image(change(parts.image))


def require_encoded(value: object) -> Encoded:
    """Return `value` if it is the bytes of a file.

    Raises:
        SampleError: it is not.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return value
    raise SampleError(f"decoding takes bytes, got {described(value)}; {CURE}")


def require_image(value: object) -> Image:
    """Return `value` if it is an array `uint8 [H, W, 3]` that is not empty.

    Raises:
        SampleError: it is not.
    """
    if (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.shape[2:] == (3,)
        and value.size > 0
    ):
        return cast("Image", value)
    raise SampleError(
        "an image must be a numpy array uint8 [H, W, 3], a tensor uint8 [3, H, W], a"
        f" Pillow image in RGB, or the bytes of a file, got {described(value)}; {CURE}"
    )


def described(value: object) -> str:
    """Return the kind of `value`; for arrays and tensors, also dtype and shape."""
    if isinstance(value, np.ndarray | torch.Tensor):
        kind = "an array" if isinstance(value, np.ndarray) else "a tensor"
        return f"{kind} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, PIL.Image.Image):
        return f"a Pillow image {value.mode} {value.height} x {value.width}"
    return type(value).__name__


# Annotations move.


def moved_annotations(
    target: Mapping[str, Any],
    move: Transform,
    size: tuple[int, int],
    *,
    per_box: Sequence[str] = (),
    by_middle: bool = False,
    mask_fill: int = 0,
) -> dict[str, Any]:
    """Return annotations as they are after a move.

    Args:
        target: the annotations; everything else in their dict is passed on.
        move: the move that the image made.
        size: height and width of the image before, in pixels.
        per_box: names of further entries that have one value per box.
        by_middle: keep the boxes whose middle is inside the image. False: keep each box
            that has any part inside.
        mask_fill: the class that `mask` gets around the image.

    Raises:
        SampleError: an annotation does not have the shape that its name stands for.
    """
    annotations = dict(target)
    flags: Flags | None = None
    if "boxes" in target:
        before = boxes_of(target["boxes"])
        after, flags = moved_boxes(before, move, by_middle=by_middle)
        annotations["boxes"] = as_given(after, target["boxes"])
        if "area" in target:
            annotations["area"] = scaled_area(target["area"], before, after)
    for name, fill in (("masks", 0), ("mask", mask_fill)):
        if name in target:
            annotations[name] = moved_masks(
                target[name], move, size, name=name, fill=fill
            )
    if "keypoints" in target:
        annotations["keypoints"] = moved_keypoints(target["keypoints"], move)
    if flags is not None and not flags.all():
        for name in (PER_BOX | set(per_box)) & annotations.keys():
            annotations[name] = kept_entries(annotations[name], flags, name)
    return annotations


def typed(sample: Any) -> Any:
    """Return a sample with annotations of the types of moved ones, moved or not.

    Raises:
        SampleError: boxes, areas or keypoints are not numbers.
    """
    parts = SampleParts.of(sample)
    target = parts.target or {}
    places = {
        name: as_given(numbers(target[name], name), target[name])
        for name in target.keys() & {"boxes", "area", "keypoints"}
    }
    masks = {
        name: np.asarray(target[name])
        for name in target.keys() & {"masks", "mask"}
        if not isinstance(target[name], torch.Tensor)
    }
    return parts.with_image(parts.image, {**target, **places, **masks})


def boxes_of(annotation: Any) -> Points:
    """Return boxes as `float64 [n, 4]`.

    Raises:
        SampleError: they are not numbers, or have another shape.
    """
    boxes = numbers(annotation, "boxes")
    if boxes.size == 0:
        return boxes.reshape(0, 4)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise SampleError(
            f"`boxes` must have shape [n, 4] (left, top, right, bottom), got"
            f" {[*boxes.shape]}; convert them in a map() before this stage"
        )
    return boxes


def moved_boxes(
    boxes: Points, move: Transform, *, by_middle: bool
) -> tuple[Points, Flags]:
    """Return the upright boxes around the moved ones, and which of them to keep.

    The boxes are cut off at the edges of the image. All `n` are returned, as `float64
    [n, 4]`.
    """
    corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2)
    places = move.points(corners).reshape(-1, 4, 2)
    whole = np.concatenate([places.min(axis=1), places.max(axis=1)], axis=1)
    if not move.cuts:
        return whole, np.ones(len(boxes), bool)
    inside = np.clip(whole, move.shown[:2] * 2, move.shown[2:] * 2)
    flags = areas(inside) > 0
    if by_middle:
        flags &= middles_inside(whole, move.shown)
    return inside, flags


def middles_inside(boxes: Points, edges: Any) -> Flags:
    """Return whether the middle of each box is inside these edges, `bool [n]`."""
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (middles >= edges[:2]) & (middles < edges[2:])
    return cast("Flags", inside.all(axis=1))


def areas(boxes: Points) -> Points:
    """Return the area of each box `[n, 4]` in pixels; 0 if its edges are swapped."""
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    return cast("Points", sides[:, 0] * sides[:, 1])


def scaled_area(annotation: Any, before: Points, after: Points) -> Any:
    """Return `area [n]`, scaled as the areas of the boxes have changed.

    Raises:
        SampleError: it does not have one number per box.
    """
    was = areas(before)
    share = np.divide(areas(after), was, out=np.ones_like(was), where=was > 0)
    area = numbers(annotation, "area")
    if area.shape != share.shape:
        raise SampleError(
            f"`area` must have one number per box, [{len(share)}], got"
            f" {[*area.shape]}; give the area of each box, in pixels"
        )
    return as_given(area * share, annotation)


def moved_keypoints(annotation: Any, move: Transform) -> Any:
    """Return keypoints `[n, k, 2 or 3]`; those outside become 0, and not visible.

    Raises:
        SampleError: they have another shape.
    """
    points = numbers(annotation, "keypoints")
    if points.size == 0:
        return annotation
    if points.ndim != 3 or points.shape[2] not in (2, 3):
        raise SampleError(
            "`keypoints` must be [n, k, 3] (x, y, visibility) or [n, k, 2] (x, y), got"
            f" {[*points.shape]}; convert them in a map() before this"
        )
    places = move.points(points[..., :2].reshape(-1, 2)).reshape(*points.shape[:2], 2)
    if points.shape[2] == 2:
        return as_given(places, annotation)
    is_shown = (places >= move.shown[:2]).all(-1) & (places <= move.shown[2:]).all(-1)
    is_shown &= points[..., 2] > 0
    keypoints = np.concatenate([places, points[..., 2:]], axis=2) * is_shown[..., None]
    return as_given(keypoints, annotation)


def moved_masks(
    annotation: Any, move: Transform, size: tuple[int, int], *, name: str, fill: int
) -> Any:
    """Return masks `[n, H, W]`, or a mask `[H, W]`, as they are after a move.

    Raises:
        SampleError: they are not of the image's height and width.
    """
    array = (
        annotation if isinstance(annotation, torch.Tensor) else np.asarray(annotation)
    )
    dimensions = 3 if name == "masks" else 2
    if array.ndim != dimensions or tuple(array.shape[-2:]) != size:
        lead = "n, " if name == "masks" else ""
        raise SampleError(
            f"`{name}` must be [{lead}{size[0]}, {size[1]}], the size of the image, got"
            f" {described(array)}; resize them together with the image"
        )
    if not isinstance(array, torch.Tensor):
        array = torch.from_numpy(np.require(array, requirements=("C", "W")))
    whole = array.reshape(-1, *size)
    is_bool = whole.dtype == torch.bool
    masks = move.masks(whole.to(torch.uint8) if is_bool else whole, fill)
    masks = masks.to(array.dtype).reshape(*array.shape[:-2], *masks.shape[-2:])
    return masks if isinstance(annotation, torch.Tensor) else masks.numpy()


def kept_entries(entries: Any, flags: Flags, name: str) -> Any:
    """Return the entries of the boxes that are kept.

    Raises:
        SampleError: there is not one entry per box.
    """
    if len(entries) != len(flags):
        raise SampleError(
            f"`{name}` must have one entry per box, {len(flags)}, got {len(entries)};"
            " if it belongs to the whole image, give it another name"
        )
    if isinstance(entries, np.ndarray | torch.Tensor):
        return entries[flags]
    return type(entries)(
        entry for entry, stays in zip(entries, flags, strict=True) if stays
    )


def numbers(value: Any, name: str) -> Points:
    """Return the numbers in a list, an array or a tensor as a new `float64` array.

    Raises:
        SampleError: they are not numbers.
    """
    try:
        # Of a tensor itself, numpy would make an array with a warning.
        return np.array(np.asarray(value), np.float64)
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"`{name}` must be a list, an array or a tensor of numbers, got"
            f" {described(value)}: {error}"
        ) from error


def as_given(values: Points, annotation: Any) -> Any:
    """Return numbers as a list, an array or a tensor, whichever `annotation` is.

    Floats keep their dtype; integers become `float32`.
    """
    match annotation:
        case torch.Tensor():
            kind = annotation.dtype if annotation.is_floating_point() else torch.float32
            return torch.from_numpy(values).to(kind)
        case np.ndarray():
            return values.astype(
                annotation.dtype if annotation.dtype.kind == "f" else np.float32
            )
    return values.tolist()
