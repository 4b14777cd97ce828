"""Moves images and their annotations to where a placement says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .annotations import moved
from .codec import is_bomb
from .crop_decoder import CropDecoder, shaped
from .kinds import like, pixels_of, size_of
from .placement import Placement
from .sample import Encoded, Image, SampleParts

DECODER = CropDecoder()


def placed(
    sample: Any,
    choose: Callable[[int, int], Placement],
    *,
    per_box: Sequence[str] = (),
    by_middle: bool = False,
    mask_fill: int = 0,
    to_end: bool = True,
) -> Any:
    """Return a sample with its image and its annotations placed.

    Args:
        sample: an image, or a sample that holds one: see `SampleParts`.
        choose: returns the placement for an image of this height and width.
        per_box: see `moved`.
        by_middle: see `moved`.
        mask_fill: see `moved`.
        to_end: see `CropDecoder.crops`.

    Raises:
        SampleError: it has no image, or its annotations have wrong shapes.
        ValueError: it has the bytes of a file that cannot be decoded.
    """
    parts = SampleParts.of(sample)
    height, width = size_of(parts.image)
    placement = choose(height, width)
    if isinstance(parts.image, Encoded):
        made = DECODER.crop(parts.image, placement, to_end=to_end)
        image = on_canvas(made, placement)
    else:
        image = like(parts.image, drawn(pixels_of(parts.image), placement))
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


def placed_together(
    samples: Sequence[Any],
    rngs: Iterator[np.random.Generator],
    choose: Callable[[np.random.Generator, int, int], Placement],
    *,
    to_end: bool = True,
) -> list[Any]:
    """Return samples with their images placed, made in one call without the GIL.

    Args:
        samples: as for `placed`.
        rngs: the generator of each.
        choose: returns the placement for an image of this height and width.
        to_end: see `CropDecoder.crops`.

    Returns:
        None for a sample that must be made by itself: its image is no file, or one that
        the extension refuses, or it has annotations.
    """
    made: list[Any] = [None] * len(samples)
    parts = [SampleParts.of(sample) for sample in samples]
    files = [part.file for part in parts]
    chosen = {
        at: choose(rng, height, width)
        for at, ((height, width), rng) in enumerate(
            zip(DECODER.sizes(files), rngs, strict=True)
        )
        if height and not is_bomb(height, width)
    }
    taken = [files[at] for at in chosen]
    images = DECODER.crops(taken, [*chosen.values()], to_end=to_end)
    for (at, placement), image in zip(chosen.items(), images, strict=True):
        if image is not None:
            made[at] = parts[at].made(on_canvas(image, placement))
    return made


def drawn(image: Image, placement: Placement) -> Image:
    """Return the new image, `uint8 [H, W, 3]`, in new memory."""
    part = placement.box.cut(image) if placement.cuts else image
    made = on_canvas(shaped(part, placement), placement)
    # The batch must not keep a whole photo alive for a part of it.
    return made.copy() if np.may_share_memory(made, image) else made


def on_canvas(image: Image, placement: Placement) -> Image:
    """Return an image with what goes around it; itself if that is nothing."""
    if placement.canvas is None:
        return image
    around: Image = np.empty((*placement.size, image.shape[2]), np.uint8)
    around[:] = placement.fill
    left, top = placement.canvas.left, placement.canvas.top
    around[top : top + placement.height, left : left + placement.width] = image
    return around
