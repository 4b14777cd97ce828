"""Where an image and its annotations go: cut, resized, mirrored, on a canvas. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .annotations import Points
from .geometry import Box

Fill = int | tuple[int, int, int]
"""The value of pixels around an image, 0 to 255: one number, or one per channel."""


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
        said = {"height": of[0], "width": of[1]} | changes
        return cls(Box(0, 0, *of), of=of, **said)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the new image, in pixels."""
        if self.canvas is None:
            return self.height, self.width
        return self.canvas.height, self.canvas.width

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
    def resizes(self) -> bool:
        """Whether the part is made larger or smaller."""
        box = self.reduced
        return (box.height, box.width) != (self.height, self.width)

    @property
    def cuts(self) -> bool:
        """Whether it takes less than the whole image."""
        return (self.box.height, self.box.width) != self.of

    def points(self, points: Points) -> Points:
        """Return where points come to lie, `float64 [m, 2]`."""
        box = self.box
        scale = (self.width / box.width, self.height / box.height)
        found: Points = (points - (box.left, box.top)) * scale
        if self.mirrored:
            found[:, 0] = self.width - found[:, 0]
        return found + self._offset()

    def masks(self, masks: torch.Tensor, fill: int) -> torch.Tensor:
        """Return masks `[n, H, W]` of the new image, by nearest pixels."""
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
        """Return left and top of the part on its canvas, in pixels."""
        return (0, 0) if self.canvas is None else (self.canvas.left, self.canvas.top)


def nearest(masks: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return masks `[n, H, W]` resized: each pixel copies the one at its center."""
    rows = nearest_places(masks.shape[1], height)
    columns = nearest_places(masks.shape[2], width)
    return masks[:, rows][:, :, columns]


def nearest_places(before: int, after: int) -> torch.Tensor:
    """Return which of `before` pixels each of `after` pixels copies, as in Pillow."""
    middles = (np.arange(after) + 0.5) * (before / after)
    return torch.from_numpy(np.minimum(middles.astype(np.int64), before - 1))
