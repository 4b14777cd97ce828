"""How fast do real photos become batches for training?

    python benchmarks/imagenet_folder.py --data DIR

JPEGs in class folders are read, decoded, cropped and resized to 224, flipped, and put
into uint8 batches of 64, in whole epochs. In the first part, penstock and torch's
DataLoader (0 to 4 workers, kept between epochs) run the same function with Pillow. In
the second, penstock runs its own fused operator, compared with a bare loop over the
same operator on two threads. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from versus import show, versus

import penstock as ps
from penstock.pipeline.image.geometry import random_box
from penstock.pipeline.sources.folder import Folder

SIZE = 224
BATCH = 64
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def pillow(
    sample: tuple[bytes, int], rng: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Decode, random resized crop and flip, all with Pillow: uint8 [224, 224, 3]."""
    data, label = sample
    image = Image.open(io.BytesIO(data)).convert("RGB")
    box = random_box(image.height, image.width, SCALE, RATIO, rng)
    corners = (box.left, box.top, box.left + box.width, box.top + box.height)
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=corners)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image), label


class Photos(Dataset[tuple[np.ndarray, int]]):
    """The same for torch: each worker has its own generator."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed())
        return pillow(self.folder[index], self.rng)


def bare_loop(folder: Folder, threads: int = 2) -> None:
    """Read and transform every photo on several threads, and discard the result."""
    fused = ps.image.decode_random_resized_crop(SIZE, flip=0.5)

    def share(first: int) -> None:
        torch.set_num_threads(1)
        rng = np.random.default_rng(first)
        for index in range(first, len(folder), threads):
            fused(folder[index], rng=rng)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))


def drain(batches: object) -> None:
    """Run one epoch."""
    for _ in batches:  # type: ignore[attr-defined]
        pass


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="class folders")
    parser.add_argument("--passes", type=int, default=4, help="over the data, an epoch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Folder.scan(options.data)
    photos = Photos(folder)
    source = ps.Pipeline.from_folder(options.data).shuffle(seed=0)
    source = source.repeat(options.passes)
    same = source.map(pillow).batch(BATCH)
    fused = source.map(ps.image.decode_random_resized_crop(SIZE, flip=0.5)).batch(BATCH)
    repeated = torch.utils.data.ConcatDataset([photos] * options.passes)
    loaders = {
        f"DataLoader, Pillow, num_workers={workers}": DataLoader(
            repeated,
            BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        for workers in range(5)
    }
    candidates = {
        "penstock, Pillow": lambda: drain(same),
        "penstock, fused operator": lambda: drain(fused),
        "bare loop, fused operator, 2 threads": lambda: [
            bare_loop(folder) for _ in range(options.passes)
        ],
    }
    for name, loader in loaders.items():
        candidates[name] = lambda loader=loader: drain(loader)
    results = versus(candidates, len(repeated))
    show(f"{len(folder)} photos", results, list(loaders))
    by_name = {result.name: result for result in results}
    bare = by_name["bare loop, fused operator, 2 threads"].rate
    share = by_name["penstock, fused operator"].rate / bare
    print(f"  fused operator: {share:.2f} of the bare loop on two threads")


if __name__ == "__main__":
    main()
