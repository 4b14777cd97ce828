"""Cut, resize, mirror, set into a canvas: one move, of pixels and annotations alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .annotations import Points, moved
from .geometry import Box, mirror, resize
from .kinds import like, pixels_of, size_of
from .sample import Image, SampleParts

Fill = int | tuple[int, int, int]
"""What pixels around an image are, 0 to 255: one number, or one a channel."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which part of an image is taken, how large it becomes, and what is around it."""

    box: Box
    """The part that is taken."""
    height: int
    """Pixels that it is resized to."""
    width: int
    of: tuple[int, int]
    """Height and width of the image."""
    mirrored: bool = False
    canvas: Box | None = None
    """Where it begins (`top`, `left`) in an image of `height` by `width`; None: it is
    the image."""
    fill: Fill = 0
    antialias: bool = True

    @classmethod
    def whole(cls, of: tuple[int, int], **changes: Any) -> Placement:
        """Return the placement that takes all of an image, but for `changes`."""
        said = {"height": of[0], "width": of[1]} | changes
        return cls(Box(0, 0, *of), of=of, **said)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image that comes of it."""
        if self.canvas is None:
            return self.height, self.width
        return self.canvas.height, self.canvas.width

    @property
    def shown(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of what was the image."""
        left, top = self._offset()
        return left, top, left + self.width, top + self.height

    @property
    def cuts(self) -> bool:
        """Whether it takes less than all."""
        return (self.box.height, self.box.width) != self.of

    def pixels(self, image: Image) -> Image:
        """Return the image that comes of `image`, as new memory."""
        made = self.box.cut(image) if self.cuts else image
        if made.shape[:2] != (self.height, self.width):
            made = resize(made, self.height, self.width, antialias=self.antialias)
        if self.mirrored:
            made = mirror(made)
        if self.canvas is not None:
            around = np.empty((*self.size, made.shape[2]), np.uint8)
            around[:] = self.fill
            left, top = self._offset()
            around[top : top + self.height, left : left + self.width] = made
            return around
        # The batch must not keep a whole photo alive for a part of it.
        return made.copy() if np.may_share_memory(made, image) else made

    def points(self, points: Points) -> Points:
        """Return where points come to lie, `float64 [m, 2]`."""
        box = self.box
        scale = (self.width / box.width, self.height / box.height)
        found: Points = (points - (box.left, box.top)) * scale
        if self.mirrored:
            found[:, 0] = self.width - found[:, 0]
        return found + self._offset()

    def masks(self, masks: torch.Tensor, fill: int) -> torch.Tensor:
        """Return masks `[n, H, W]` of the image that comes of it, nearest pixels."""
        box = self.box
        made = masks[:, box.top : box.top + box.height, box.left : box.left + box.width]
        if made.shape[1:] != (self.height, self.width):
            made = nearest(made, self.height, self.width)
        if self.mirrored:
            made = made.flip(2)
        if self.canvas is not None:
            around = made.new_full((len(made), *self.size), fill)
            left, top = self._offset()
            around[:, top : top + self.height, left : left + self.width] = made
            return around
        return made.clone() if made._is_view() else made  # noqa: SLF001 public in use

    def _offset(self) -> tuple[int, int]:
        """Left and top of the image in its canvas."""
        return (0, 0) if self.canvas is None else (self.canvas.left, self.canvas.top)


def nearest(masks: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return `[n, H, W]` resized; each pixel is the one its middle lies in."""
    rows = nearest_places(masks.shape[1], height)
    columns = nearest_places(masks.shape[2], width)
    return masks[:, rows][:, :, columns]


def nearest_places(before: int, after: int) -> torch.Tensor:
    """Return which of `before` pixels each of `after` pixels shows, as Pillow does."""
    middles = (np.arange(after) + 0.5) * (before / after)
    return torch.from_numpy(np.minimum(middles.astype(np.int64), before - 1))


def placed(
    sample: Any,
    choose: Callable[[int, int], Placement],
    *,
    per_box: Sequence[str] = (),
    by_middle: bool = False,
    mask_fill: int = 0,
    draw: Callable[[Any, Placement], Image] | None = None,
) -> Any:
    """Return a sample with its image, and its annotations, placed.

    Args:
        sample: an image, or what holds one: see `SampleParts`.
        choose: given height and width, returns the placement.
        per_box: see `moved`.
        by_middle: see `moved`.
        mask_fill: see `moved`.
        draw: makes the pixels of the image as it was given; None: decodes all of it.
    """
    parts = SampleParts.of(sample)
    height, width = size_of(parts.image)
    placement = choose(height, width)
    if draw is None:
        pixels = placement.pixels(pixels_of(parts.image))
    else:
        pixels = draw(parts.image, placement)
    image = like(parts.image, pixels)
    if parts.target is None:
        return parts.made(image)
    target = moved(
        parts.target,
        placement,
        (height, width),
        per_box=per_box,
        by_middle=by_middle,
        mask_fill=mask_fill,
    )
    return parts.made(image, target)
