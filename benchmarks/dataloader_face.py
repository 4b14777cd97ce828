"""Does changing one import cost anything, and how much does it gain?

    python benchmarks/dataloader_face.py [--data DIR] [--rounds 5]

It measures whole epochs of tiny samples in memory, of JPEG images (from a folder of
class folders, or else one photograph repeated) and of reads that wait 20 ms. First
torch's DataLoader and penstock's run with autotune off and 0, 1, 2 and 4 workers, kept
between epochs. Then penstock's runs with autotune on, starting without workers, and is
compared with the best of torch's; for JPEG also with workers kept between epochs.
Epochs in which it is tuned do not count. Last come the seconds to a first batch, with
workers restarted: medians of 20.
"""

from __future__ import annotations

import argparse
import gc
import io
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data as torchs
from PIL import Image
from suite_rows import photograph
from tiny_samples import Tiny
from versus import Result, show, versus

import penstock as ps

WORKERS = (0, 1, 2, 4)
TUNED_S = 20.0
"""Seconds of tuning before the epochs that count."""
FIRSTS = 20


class Photos(torchs.Dataset[torch.Tensor]):
    """JPEG files, decoded and resized by Pillow."""

    def __init__(self, folder: Path | None) -> None:
        self.files = (
            [path.read_bytes() for path in sorted(folder.glob("*/*"))]
            if folder
            else [photograph()] * 500
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(io.BytesIO(self.files[index])) as image:
            small = np.asarray(image.convert("RGB").resize((224, 224)))
        return torch.from_numpy(small.transpose(2, 0, 1).copy())


class Reads(torchs.Dataset[int]):
    """Samples that wait for a store."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> int:
        time.sleep(0.020)
        return index


def loaders(data: Any, batch: int, kind: Any, **own: Any) -> dict[str, Any]:
    """Return a candidate for each number of workers."""
    return {
        f"{kind.__module__.partition('.')[0]}, {workers} workers": kind(
            data,
            batch,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            **own,
        )
        for workers in WORKERS
    }


def drain(batches: Any) -> None:
    for _ in batches:
        pass


def compare(title: str, data: Any, batch: int, rounds: int, **own: Any) -> None:
    """Print one table; `own` are further arguments for the tuned loader."""
    theirs = loaders(data, batch, torchs.DataLoader)
    ours = loaders(data, batch, ps.DataLoader, sample_seeding=False)
    candidates: dict[str, Callable[[], object]] = {}
    for pair in zip(theirs.items(), ours.items(), strict=True):
        for name, loader in pair:
            candidates[name] = lambda loader=loader: drain(loader)
    tuned = ps.DataLoader(data, batch, shuffle=True, **own)

    ps.set_enable_autotune(True)  # this does not affect `ours`
    end = time.perf_counter() + TUNED_S
    while time.perf_counter() < end:
        drain(tuned)
    candidates["penstock, autotuned"] = lambda: drain(tuned)
    gc.freeze()  # the garbage collector may otherwise run in any candidate
    results = {r.name: r for r in versus(candidates, len(data), rounds)}
    show(title, list(results.values()), list(theirs))
    tell_pairs(results)
    tuned.close()
    ps.set_enable_autotune(False)


def tell_pairs(results: dict[str, Result]) -> None:
    for workers in WORKERS:
        pair = [results[f"{kind}, {workers} workers"] for kind in ("penstock", "torch")]
        print(f"  {workers} workers: {pair[0].rate / pair[1].rate:.2f} of torch's")


def first_batch(kind: Any, workers: int) -> float:
    """Return the seconds to a first batch."""
    start = time.perf_counter()
    batches = iter(kind(Reads(), 8, shuffle=True, num_workers=workers))
    next(batches)
    return time.perf_counter() - start


def firsts() -> None:
    """Print the time to a first batch."""
    print(f"\nfirst batch (medians of {FIRSTS}, in turn)")
    for workers in (0, 2):
        for tuned in (False, True):
            times: dict[Any, list[float]] = {torchs.DataLoader: [], ps.DataLoader: []}
            for _ in range(FIRSTS):
                for kind, seconds in times.items():
                    ps.set_enable_autotune(tuned and kind is ps.DataLoader)
                    seconds.append(first_batch(kind, workers))
                    ps.set_enable_autotune(False)
            torch_s, ours_s = map(statistics.median, times.values())
            print(
                f"  {workers} workers, autotune {'on' if tuned else 'off'}: torch"
                f" {1000 * torch_s:.0f} ms, penstock {1000 * ours_s:.0f} ms"
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    compare("tiny samples", Tiny(), 256, options.rounds)
    photos, extra = Photos(options.data), {"num_workers": 2, "persistent_workers": True}
    compare("JPEG", photos, 32, options.rounds)
    compare("JPEG, tuned workers kept, too", photos, 32, options.rounds, **extra)
    compare("reads of 20 ms", Reads(), 16, options.rounds)
    firsts()


if __name__ == "__main__":
    main()
