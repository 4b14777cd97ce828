"""Makes the data folder of all peers: photographs, and the part to take of each."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
from burning import rounds_for
from PIL import Image
from suite_rows import photograph

from penstock.pipeline.image.geometry import random_box

from .data import Given

__all__ = ["prepare"]

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
FLIP = 0.5
MADE = 64
"""Photographs to draw, if none are given."""


def prepare(folder: Path, data: Path | None, most: int) -> Given:
    """Fill a folder, and return its contents.

    Args:
        folder: an empty folder.
        data: class folders of JPEGs, of which those in color are used; None: draw some.
        most: most photographs.
    """
    photographs = folder / "photographs"
    if data is None:
        make(photographs / "made")
    else:
        copy(photographs, data, most)
    paths = sorted(map(str, photographs.glob("*/*")))
    parts = [part_of(path, number) for number, path in enumerate(paths)]
    boxes, flips = map(list, zip(*parts, strict=True))
    given = Given(str(folder), paths, boxes, flips, rounds=rounds_for(0.001))
    given.write()
    return given


def make(folder: Path) -> None:
    """Write parts of a drawn photograph."""
    folder.mkdir(parents=True)
    with Image.open(io.BytesIO(photograph())) as whole:
        for number in range(MADE):
            part = whole.crop((number, number, number + 400, number + 300))
            part.save(folder / f"{number:04}.jpg", quality=90)


def copy(folder: Path, data: Path, most: int) -> None:
    """Copy photographs: some readers want class folders of nothing else."""
    count = 0
    for path in sorted(data.glob("*/*.[jJ][pP]*[gG]")):
        with Image.open(path) as image:
            usual = image.format == "JPEG" and image.mode == "RGB"
        if usual and count < most:
            count += 1
            there = folder / path.parent.name
            there.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, there / path.name)
    if not count:
        raise SystemExit(f"no JPEGs in class folders: {data}; --data DIR takes others")


def part_of(path: str, number: int) -> tuple[tuple[int, int, int, int], bool]:
    """Return what the fused operator draws from a generator seeded by `number`."""
    rng = np.random.default_rng(number)
    with Image.open(path) as image:
        box = random_box(image.height, image.width, SCALE, RATIO, rng)
    part = (box.top, box.left, box.height, box.width)
    return part, bool(rng.random() < FLIP)
