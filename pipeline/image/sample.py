"""The samples that image operators take: the image, and what moves with its pixels.

Annotations are boxes, masks and keypoints. They have the names and shapes that
torchvision's detection models expect, and may be arrays, tensors or lists:

- `boxes [n, 4]`: left, top, right, bottom in pixels; x grows to the right, y downwards;
- `masks [n, H, W]`: one per object; `mask [H, W]`: one class per pixel;
- `keypoints [n, k, 2 or 3]`: x and y in pixels, and whether the point is visible.

If nothing is left of a box, it is dropped, together with its entry under each name in
`PER_BOX` and each name in the operator's `per_box`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from ...errors import SampleError
from .geometry import Image, Points, Transform

Encoded: TypeAlias = bytes | bytearray | memoryview
"""A whole image file."""
Target: TypeAlias = Mapping[str, Any]
"""The annotations of an image, by name."""
Flags = NDArray[np.bool_]

PER_BOX = frozenset(
    ("boxes", "labels", "area", "iscrowd", "scores", "masks", "keypoints")
)
"""Names with one entry per box; an operator's `per_box` adds others."""

IMAGE = "image"
"""The key of the image in a dict."""
ANNOTATIONS = frozenset(("boxes", "masks", "mask", "keypoints"))
"""The entries of a dict that move with the pixels."""

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
    target: Target | None
    sample: Any
    place: int | None
    """The index of the annotations in a tuple."""

    @property
    def file(self) -> Encoded:
        """The bytes of a file that has no annotations; empty if it is not one."""
        plain = self.target is None and isinstance(self.image, Encoded)
        return self.image if plain else b""

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

    def made(self, image: Any, target: Target | None = None) -> Any:
        """Return the sample with this image and, unless None, these annotations."""
        if isinstance(self.sample, Mapping) and IMAGE in self.sample:
            return {**self.sample, **(target or {}), IMAGE: image}
        if not isinstance(self.sample, tuple) or not self.sample:
            return image
        changed = [image, *self.sample[1:]]
        if target is not None and self.place is not None:
            changed[self.place] = target
        make = getattr(type(self.sample), "_make", tuple)
        return make(changed)


def on_image(sample: Any, change: Callable[[Any], Any]) -> Any:
    """Return `sample` with its image replaced by `change(image)`.

    `SampleParts` says where the image is. Everything else stays as it is; a namedtuple
    stays a namedtuple.
    """
    parts = SampleParts.of(sample)
    return parts.made(change(parts.image))


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
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor {dtype} {list(value.shape)}"
    if isinstance(value, PIL.Image.Image):
        return f"a Pillow image {value.mode} {value.height} x {value.width}"
    return type(value).__name__


# Annotations move.


def moved(
    target: Target,
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
    found = dict(target)
    kept: Flags | None = None
    if "boxes" in target:
        before = boxes_of(target["boxes"])
        after, kept = moved_boxes(before, move, by_middle=by_middle)
        found["boxes"] = as_given(after, target["boxes"])
        if "area" in target:
            found["area"] = scaled_area(target["area"], before, after)
    if "masks" in target:
        found["masks"] = moved_masks(target["masks"], move, size, "masks", 0)
    if "mask" in target:
        found["mask"] = moved_masks(target["mask"], move, size, "mask", mask_fill)
    if "keypoints" in target:
        found["keypoints"] = moved_keypoints(target["keypoints"], move)
    if kept is not None and not kept.all():
        for name in (PER_BOX | set(per_box)) & found.keys():
            found[name] = chosen(found[name], kept, name)
    return found


def boxes_of(given: Any) -> Points:
    """Return boxes as `float64 [n, 4]`.

    Raises:
        SampleError: they are not numbers, or have another shape.
    """
    boxes = numbers(given, "boxes")
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
    left, top, right, bottom = move.shown
    inside = np.clip(whole, (left, top) * 2, (right, bottom) * 2)
    kept = areas(inside) > 0
    if by_middle:
        kept &= middles_inside(whole, move.shown)
    return inside, kept


def middles_inside(boxes: Points, edges: Any) -> Flags:
    """Return whether the middle of each box is inside these edges, `bool [n]`."""
    low, high = edges[:2], edges[2:]
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    found: Flags = ((middles >= low) & (middles < high)).all(axis=1)
    return found


def areas(boxes: Points) -> NDArray[np.float64]:
    """Return the area of each box `[n, 4]` in pixels; 0 if its edges are swapped."""
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    found: NDArray[np.float64] = sides[:, 0] * sides[:, 1]
    return found


def scaled_area(given: Any, before: Points, after: Points) -> Any:
    """Return `area [n]`, scaled as the areas of the boxes have changed.

    Raises:
        SampleError: it does not have one number per box.
    """
    was = areas(before)
    share = np.divide(areas(after), was, out=np.ones_like(was), where=was > 0)
    area = numbers(given, "area")
    if area.shape != share.shape:
        raise SampleError(
            f"`area` must have one number per box, [{len(share)}], got"
            f" {[*area.shape]}; give the area of each box, in pixels"
        )
    return as_given(area * share, given)


def moved_keypoints(given: Any, move: Transform) -> Any:
    """Return keypoints `[n, k, 2 or 3]`; those outside become 0, and not visible.

    Raises:
        SampleError: they have another shape.
    """
    points = numbers(given, "keypoints")
    if points.size == 0:
        return given
    if points.ndim != 3 or points.shape[2] not in (2, 3):
        raise SampleError(
            "`keypoints` must be [n, k, 3] (x, y, visibility) or [n, k, 2] (x, y), got"
            f" {[*points.shape]}; convert them in a map() before this"
        )
    places = move.points(points[..., :2].reshape(-1, 2)).reshape(*points.shape[:2], 2)
    if points.shape[2] == 2:
        return as_given(places, given)
    left, top, right, bottom = move.shown
    is_shown = (places >= (left, top)).all(-1) & (places <= (right, bottom)).all(-1)
    is_shown &= points[..., 2] > 0
    found = np.concatenate([places, points[..., 2:]], axis=2) * is_shown[..., None]
    return as_given(found, given)


def moved_masks(
    given: Any, move: Transform, size: tuple[int, int], name: str, fill: int
) -> Any:
    """Return masks `[n, H, W]`, or a mask `[H, W]`, as they are after a move.

    Raises:
        SampleError: they are not of the image's height and width.
    """
    array = given if isinstance(given, torch.Tensor) else np.asarray(given)
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
    found = move.masks(whole.to(torch.uint8) if is_bool else whole, fill)
    found = found.to(array.dtype).reshape(*array.shape[:-2], *found.shape[-2:])
    return found if isinstance(given, torch.Tensor) else found.numpy()


def chosen(given: Any, kept: Flags, name: str) -> Any:
    """Return the entries of the boxes that are kept.

    Raises:
        SampleError: there is not one entry per box.
    """
    if len(given) != len(kept):
        raise SampleError(
            f"`{name}` must have one entry per box, {len(kept)}, got {len(given)}; if"
            " it belongs to the whole image, give it another name"
        )
    if isinstance(given, torch.Tensor):
        return given[torch.from_numpy(kept)]
    if isinstance(given, np.ndarray):
        return given[kept]
    return type(given)(each for each, stays in zip(given, kept, strict=True) if stays)


def numbers(given: Any, name: str) -> Points:
    """Return the numbers in a list, an array or a tensor as a new `float64` array.

    Raises:
        SampleError: they are not numbers.
    """
    try:
        return np.array(given, np.float64)
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"`{name}` must be a list, an array or a tensor of numbers, got"
            f" {described(given)}: {error}"
        ) from error


def as_given(found: Points, given: Any) -> Any:
    """Return numbers as a list, an array or a tensor, whichever `given` is.

    Floats keep their dtype; integers become `float32`.
    """
    if isinstance(given, torch.Tensor):
        kind = given.dtype if given.is_floating_point() else torch.float32
        return torch.from_numpy(found).to(kind)
    if isinstance(given, np.ndarray):
        return found.astype(given.dtype if given.dtype.kind == "f" else np.float32)
    return found.tolist()
