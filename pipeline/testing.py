"""Tools for tests of pipelines: drawn photos, and a check that a resume is exact.

The photos are a folder of JPEGs that decode and learn like a small photo set. One is a
sky over a ground, strewn with overlapping leaves whose sizes follow a power law. Such
"dead leaves" have the statistics of natural images: edges at every scale and a spectrum
that falls as 1/f, on which the size of a JPEG and the time to decode it depend (Lee,
Mumford, Huang: "Occlusion models for natural images", IJCV 2001). The class sets the
leaves' outline and their usual hues; everything else varies from photo to photo.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import torch.utils.data
from numpy.typing import NDArray
from simplejpeg import encode_jpeg

from ..autotune.log import PARTIAL, write_whole
from ..cache.fingerprint import tensor
from ..errors import SpecError

__all__ = [
    "assert_exact_resume",
    "draw_photos",
]

MANIFEST = "photos.json"
# Side of a texture tile in pixels.
TILE = 512
TILES = 4
LEAVES = 90
# Steps by it spread any number of classes evenly over the circle of hues.
GOLDEN = 0.618
# Corners of a class's leaves: 32 are as good as a disc.
CORNERS = (32, 4, 3, 6)


def draw_photos(
    folder: str | os.PathLike[str],
    n: int,
    *,
    classes: int = 4,
    size: tuple[int, int] = (500, 375),
    seed: int = 0,
    quality: int = 90,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Draw photo-like JPEGs, `folder/class_<k>/img_<i>.jpg`, and return `folder`.

    The same arguments draw the same files. Photos that exist already are not drawn
    again, so the next call completes an interrupted one. Several calls may run at once.

    Args:
        folder: a new or empty folder, or one that this function made.
        n: number of photos, dealt out to the classes in turn, >= 1.
        classes: number of classes, 1 to `n`.
        size: (width, height) in pixels, each >= 16.
        seed: >= 0.
        quality: quality of the JPEGs, 1 to 100; one in three has 4:2:0 chroma, the rest
            4:4:4.
        progress: called with (photos there, `n`) after each photo.

    Raises:
        SpecError: an argument is out of range, or `folder` holds something else.
    """
    within("n", n, 1, "512 photos are enough for a demonstration")
    within("classes", classes, 1, "have at least one photo a class", high=n)
    for side in size:
        within("size", side, 16, "(500, 375) is usual, width first")
    within("seed", seed, 0, "pass, for example, seed=0")
    within("quality", quality, 1, "90 is usual", high=100)
    root = Path(folder)
    facts = {"n": n, "classes": classes, "size": size, "seed": seed, "quality": quality}
    claim(root, json.dumps({"drawn_by": "penstock.testing.draw_photos", **facts}))
    for number in range(n):
        kind = number % classes
        path = root / f"class_{kind}" / f"img_{number // classes + 1:04d}.jpg"
        if not path.exists():
            rng = np.random.default_rng((seed, number))
            pixels = photo(size[1], size[0], kind, rng)
            chroma = "420" if rng.random() < 1 / 3 else "444"
            data = encode_jpeg(pixels, quality=quality, colorsubsampling=chroma)
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data)
        if progress is not None:
            progress(number + 1, n)
    return root


def within(
    name: str, value: int, low: int, cure: str, *, high: int | None = None
) -> None:
    """Raise `SpecError` unless `low` <= `value` <= `high`."""
    if value < low or (high is not None and value > high):
        rule = f">= {low}" if high is None else f"{low} to {high}"
        raise SpecError(f"`{name}` must be {rule}, got {value}; {cure}")


def claim(root: Path, recipe: str) -> None:
    """Mark `root` as drawn by a recipe, unless it holds something else: `SpecError`."""
    root.mkdir(parents=True, exist_ok=True)
    manifest = root / MANIFEST
    names = {path.name for path in root.iterdir() if path.suffix != PARTIAL}
    if not names:
        write_whole(manifest, recipe)
    elif MANIFEST not in names:
        raise SpecError(
            f"`folder` must be empty or drawn by this function, got {root} with other "
            "files in it; give a new folder"
        )
    elif (old_recipe := manifest.read_text()) != recipe:
        raise SpecError(
            "`folder` must be empty or drawn with the same arguments, got "
            f"{root} with {old_recipe}; give another folder, or remove this one"
        )


def photo(
    height: int, width: int, kind: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Draw one photo of class `kind`: `uint8 [height, width, 3]`."""
    picture = PIL.Image.new("RGB", (width, height), tint(rng.random(), rng))
    canvas = PIL.ImageDraw.Draw(picture)
    horizon = rng.uniform(0.3, 0.7) * height
    canvas.rectangle((0, horizon, width, height), tint(rng.random(), rng))
    # From a third to a fiftieth of the side, with a density of radius^-3.
    shares = (3.0**2 + (50.0**2 - 3.0**2) * rng.random(LEAVES)) ** -0.5
    for radius in sorted(shares * min(height, width), reverse=True):
        circle = rng.uniform(0, width), rng.uniform(0, height), radius
        hue = (kind * GOLDEN + 0.1 * rng.standard_normal()) % 1
        canvas.regular_polygon(
            circle, CORNERS[kind % len(CORNERS)], rng.uniform(0, 360), tint(hue, rng)
        )
    pixels = np.asarray(picture) * (1 + 0.15 * texture(height, width, rng))[..., None]
    pixels += rng.normal(0, 3.0, pixels.shape)
    return np.asarray(pixels.clip(0, 255), np.uint8)


def tint(hue: float, rng: np.random.Generator) -> str:
    """Return a colour of `hue` 0 to 1, as muted as in photos."""
    return f"hsv({360 * hue}, {rng.uniform(15, 60)}%, {rng.uniform(35, 90)}%)"


def texture(height: int, width: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return a random cut of a noise tile: `float32 [height, width]`."""
    tile = noise_tile(int(rng.integers(TILES)))
    top, left = rng.integers(TILE, size=2)
    rows = np.arange(top, top + height) % TILE
    columns = np.arange(left, left + width) % TILE
    return tile.take(rows, axis=0).take(columns, axis=1)


@lru_cache(maxsize=TILES)
def noise_tile(number: int) -> NDArray[np.float32]:
    """Return a periodic tile of 1/f noise, mean 0, deviation 1: `[TILE, TILE]`."""
    white = np.random.default_rng(number).standard_normal((TILE, TILE))
    frequency = np.hypot(np.fft.rfftfreq(TILE), np.fft.fftfreq(TILE)[:, None])
    frequency[0, 0] = np.inf  # takes the mean out
    noise = np.fft.irfft2(np.fft.rfft2(white) / frequency, s=(TILE, TILE))
    return np.asarray(noise / noise.std(), np.float32)


def assert_exact_resume(
    make_pipeline: Callable[[], Any], *, epochs: int = 1, every: int = 1
) -> None:
    """Run a pipeline, then resume it from states taken on the way, and compare.

    Each state that is checked has to be JSON. A new pipeline that loads the state has
    to return the same state, and from there on to yield the same batches, to the byte,
    and the same stamps as the uninterrupted run. One NaN is like another.

    Args:
        make_pipeline: makes the same pipeline (or DataLoader) each time.
        epochs: number of epochs to run.
        every: check the state before each n-th batch; the states at the ends of epochs
            are always checked.

    Raises:
        AssertionError: a check fails; the message names the state and the difference.
    """
    pipe = make_pipeline()
    # With the number of the epoch, and of the batches before.
    states: list[tuple[Any, int, int]] = []
    batches: list[tuple[Any, Any]] = []
    ends: set[int] = set()
    for epoch in range(epochs):
        states.append((carried(pipe), epoch, len(batches)))
        for batch in pipe:
            batches.append((batch, pipe.plan))
            states.append((carried(pipe), epoch, len(batches)))
        assert len(batches) > 0, f"epoch {epoch} has no batch"
        ends.add(len(states) - 1)
    pipe.close()
    for at in sorted(ends.union(range(0, len(states), every))):
        state, epoch, count = states[at]
        check(make_pipeline, state, at, batches, count, epochs=epochs - epoch)


def carried(pipe: Any) -> Any:
    """Return the state of a pipeline after a round trip through JSON."""
    return json.loads(json.dumps(pipe.state_dict()))


def check(
    make_pipeline: Callable[[], Any],
    state: Any,
    at: int,
    batches: list[tuple[Any, Any]],
    count: int,
    *,
    epochs: int,
) -> None:
    """Resume at one state, and compare all later batches with those that are due.

    Args:
        make_pipeline: makes the same pipeline each time.
        state: the state.
        at: its number.
        batches: all batches of the uninterrupted run, with their stamps.
        count: how many of them came before the state.
        epochs: the epochs that are left, with the one that the state was taken in.
    """
    pipe = make_pipeline()
    pipe.load_state_dict(state)
    again = carried(pipe)
    assert again == state, f"state {at} is {again} once loaded, was {state}"
    rest = [(batch, pipe.plan) for _ in range(epochs) for batch in pipe]
    is_loader = isinstance(pipe, torch.utils.data.DataLoader)
    for step, ((batch, plan), (due_batch, before)) in enumerate(
        zip(rest, batches[count:], strict=False), count
    ):
        # A loader counts its steps since it began; torch's own workers stamp nothing.
        stamp = before._replace(step=plan.step) if is_loader and before else before
        assert plan == stamp, f"after state {at}: stamp {plan}, was {stamp}"
        assert content(batch) == content(due_batch), (
            f"after state {at}: batch of step {step} differs"
        )
    due = len(batches) - count
    assert len(rest) == due, (
        f"after state {at}: {len(rest)} batches are left, and there were {due}"
    )
    pipe.close()


def content(value: Any) -> tuple[type, Any]:
    """Return the type of a value and its content, to be compared to the byte."""
    own = value
    match value:
        case torch.Tensor():
            own = tensor(value)
        case np.ndarray() if value.dtype.hasobject:
            own = value.shape, content(value.tolist())
        case np.ndarray() | np.generic():
            own = value.dtype, value.shape, value.tobytes()
        case dict():
            own = {key: content(part) for key, part in value.items()}
        case list() | tuple():
            own = [content(part) for part in value]
        case float() | complex():  # by `==`, 0.0 is -0.0, and no NaN is another
            own = repr(value)
    return type(value), own
