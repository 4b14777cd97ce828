"""How much does each image operator cost on one and two threads, compared with Pillow?

    python benchmarks/image_ops.py [--data DIR]

Files are read into memory first. The rows of one comparison run interleaved, and each
figure is the median of five passes. Ratios are to the first row, usually Pillow, on the
same number of threads. If two threads had fewer than some 1.8 cores, another program
was busy: run it again, or use the CPU time of one thread. Last come the differences
from Pillow's pixels, and how fast pure Python is beside a thread that decodes.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, repeat
from pathlib import Path

import numpy as np
import PIL.Image
import torch

from penstock.engine.plan import Context
from penstock.pipeline.image import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    decode,
    decode_only_random_resized_crop,
    decode_random_resized_crop,
    horizontal_flip,
    normalize,
    random_resized_crop,
)
from penstock.pipeline.image.codec import size_of
from penstock.pipeline.image.geometry import random_box
from penstock.pipeline.testing import draw_photos

PASSES = 5
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
CONTEXT = Context(epoch=0, step=0, image_size=None)
BILINEAR = PIL.Image.Resampling.BILINEAR


@dataclass(frozen=True)
class Photos:
    """The same photos as files, as arrays and as Pillow's images."""

    files: list[bytes]
    arrays: list[np.ndarray]
    pictures: list[PIL.Image.Image]


@dataclass(frozen=True)
class Row:
    """One way to do the work; `run(i, rng)` does it for photo i."""

    name: str
    run: Callable[[int, np.random.Generator], object]


def load(folder: Path | None, count: int) -> Photos:
    """Read the photos of `folder`, or draw some."""
    with tempfile.TemporaryDirectory() as workspace:
        root = folder or draw_photos(workspace, count)
        paths = sorted(
            p for p in root.rglob("*") if p.suffix.lower() in {".jpg", ".jpeg"}
        )
        files = [path.read_bytes() for path in paths[:count]]
    pictures = [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in files]
    return Photos(files, [np.array(p) for p in pictures], pictures)


def pillow_crop(
    picture: PIL.Image.Image, size: int, rng: np.random.Generator
) -> object:
    """Crop and resize as torchvision does with a Pillow image."""
    box = random_box(picture.height, picture.width, SCALE, RATIO, rng)
    part = picture.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    return np.asarray(part.resize((size, size), BILINEAR))


def pillow_chain(data: bytes, size: int, rng: np.random.Generator) -> object:
    """Decode, crop, resize and flip with Pillow."""
    crop = pillow_crop(PIL.Image.open(io.BytesIO(data)).convert("RGB"), size, rng)
    return np.asarray(crop)[:, ::-1].copy() if rng.random() < 0.5 else crop


def torchs_floats(image: np.ndarray) -> torch.Tensor:
    """Return pixels as torchvision's `ToTensor` and `Normalize` make them."""
    pixels = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return pixels.to(torch.float32).div(255).sub_(mean).div_(std)


def comparisons(photos: Photos, size: int) -> dict[str, list[Row]]:
    """Return the rows to compare, Pillow's first."""
    files, arrays, pictures = photos.files, photos.arrays, photos.pictures
    mirrored = PIL.Image.Transpose.FLIP_LEFT_RIGHT
    crop, flip = random_resized_crop(size), horizontal_flip(1.0)
    half = horizontal_flip(0.5)
    fused = decode_random_resized_crop(size, flip=0.5)
    only = decode_only_random_resized_crop(size, flip=0.5)
    images = [fused(data, np.random.default_rng(0)) for data in files]
    floats = normalize()
    version = fused.decoder.__penstock_fingerprint__()
    return {
        "normalize": [
            Row("torch", lambda i, _: torchs_floats(images[i])),
            Row("normalize", lambda i, _: floats(images[i])),
        ],
        "decode": [
            Row(
                "Pillow",
                lambda i, _: PIL.Image.open(io.BytesIO(files[i])).convert("RGB"),
            ),
            Row("decode", lambda i, _: decode(files[i])),
        ],
        f"random resized crop {size}": [
            Row("Pillow", lambda i, rng: pillow_crop(pictures[i], size, rng)),
            Row("random_resized_crop", lambda i, rng: crop(arrays[i], rng)),
        ],
        "flip": [
            Row("Pillow", lambda i, _: pictures[i].transpose(mirrored)),
            Row("horizontal_flip", lambda i, rng: flip(arrays[i], rng)),
        ],
        f"decode, random resized crop {size}, flip": [
            Row("Pillow", lambda i, rng: pillow_chain(files[i], size, rng)),
            Row(
                "three operators", lambda i, rng: half(crop(decode(files[i]), rng), rng)
            ),
            Row("decode_random_resized_crop", lambda i, rng: fused(files[i], rng)),
        ],
        f"crop decoding, crop {size}, flip; {version}": [
            Row(
                "three operators", lambda i, rng: half(crop(decode(files[i]), rng), rng)
            ),
            Row("decode_random_...", lambda i, rng: fused(files[i], rng)),
            Row("decode_only_random_...", lambda i, rng: only(files[i], rng)),
        ],
    }


def timed(row: Row, count: int, threads: int) -> tuple[float, float]:
    """Run over all photos; return wall time and CPU time per photo, in ms."""

    def share(first: int) -> None:
        torch.set_num_threads(1)  # as a worker of the pipeline does
        rng = np.random.default_rng(first)
        for index in range(first, count, threads):
            row.run(index, rng)

    with ThreadPoolExecutor(threads) as pool:
        began, cpu_began = time.perf_counter(), time.process_time()
        list(pool.map(share, range(threads)))
        spent_s, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return spent_s / count * 1e3, cpu / count * 1e3


def compare(title: str, rows: list[Row], count: int) -> None:
    """Time `rows` in turn, five times, and print their medians and ratios."""
    passes: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(PASSES):
        for row in rows:
            for threads in (1, 2):
                key = row.name, threads
                passes.setdefault(key, []).append(timed(row, count, threads))
    medians = {
        key: [statistics.median(column) for column in zip(*values, strict=True)]
        for key, values in passes.items()
    }
    peer = rows[0].name
    print(f"\n{title}")
    for row in rows:
        (one, cpu), (two, cpu_two) = medians[row.name, 1], medians[row.name, 2]
        gains = [medians[peer, n][0] / medians[row.name, n][0] for n in (1, 2)]
        gains.append(medians[peer, 1][1] / cpu)
        print(
            f"  {row.name:<26} {one:6.3f} ms, on 2 threads {two:6.3f} ms = "
            f"{one / two:4.2f}x ({cpu_two / two:.1f} cores); "
            f"vs {peer} {gains[0]:5.2f}x {gains[1]:5.2f}x, by CPU {gains[2]:5.2f}x"
        )


def accuracy(photos: Photos, size: int) -> None:
    """Print how far the fused operator's pixels are from Pillow's, for several gaps."""
    print(f"\ndifference from Pillow, crop {size}, mean over photos (of 255)")
    exact = [
        np.asarray(pillow_crop(picture, size, np.random.default_rng(i)), int)
        for i, picture in enumerate(photos.pictures)
    ]
    for gap in (1.0, 2.0, 3.0, 4.0, float("inf")):
        operator = decode_random_resized_crop(size, reducing_gap=gap)
        reduced: list[float] = []
        full: list[float] = []
        for i, data in enumerate(photos.files):
            image = np.asarray(operator(data, np.random.default_rng(i)))
            box = random_box(*size_of(data), SCALE, RATIO, np.random.default_rng(i))
            kind = reduced if min(box.height, box.width) >= 2 * gap * size else full
            kind.append(float(np.abs(image - exact[i]).mean()))
        means = [statistics.fmean(kind) if kind else 0.0 for kind in (reduced, full)]
        print(
            f"  reducing_gap={gap:<4} all {statistics.fmean(reduced + full):.3f}; "
            f"decoded reduced {means[0]:.3f} ({len(reduced)}), in full {means[1]:.3f}"
        )


def beside(photos: Photos, size: int) -> None:
    """Print how fast a Python loop is while a thread decodes eight photos a call.

    Beside a process that computes, the other core is just as busy.
    """
    fused, over = decode_random_resized_crop(size, flip=0.5), threading.Event()
    rng = np.random.default_rng(0)
    parts = [
        photos.files[first : first + 8] for first in range(0, len(photos.files), 8)
    ]

    def decode_all() -> None:
        for part in cycle(parts):
            samples = fused.__penstock_rows__(part, repeat(rng, len(part)), CONTEXT)
            if any(sample is None for sample in samples):
                raise RuntimeError("the extension did not decode; see penstock doctor")
            if over.is_set():
                break

    def loops() -> int:
        """Return how often a loop is run in a second."""
        count, end = 0, time.perf_counter() + 1
        while time.perf_counter() < end:
            sum(range(1000))
            count += 1
        return count

    shares: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2 * PASSES + 1):
            with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
                usual = loops()
                busy.kill()
            over.clear()
            decoding = pool.submit(decode_all)
            shares.append(loops() / usual)
            over.set()
            decoding.result()
    share = statistics.median(shares)
    print(
        "\na loop of pure Python beside a thread that decodes, to one beside a process:"
        f" {share:.3f} ({min(shares):.3f} to {max(shares):.3f})"
    )


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of JPEGs; else drawn")
    parser.add_argument("--count", type=int, default=200, help="photos to use")
    parser.add_argument("--size", type=int, default=224, help="side of the crops")
    parser.add_argument("--only", default="", help="comparisons named so")
    options = parser.parse_args()
    photos = load(options.data, options.count)
    if not photos.files:
        sys.exit(f"no .jpg or .jpeg under {options.data}; give a folder that has some")
    for title, rows in comparisons(photos, options.size).items():
        if options.only in title:
            compare(title, rows, len(photos.files))
    if not options.only:
        for size in (options.size, 64, 32):
            accuracy(photos, size)
        beside(photos, options.size)


if __name__ == "__main__":
    main()
