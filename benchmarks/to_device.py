"""How fast do batches reach a CUDA device, beside torch's pinning and async copy?

    python benchmarks/to_device.py [--rounds 5] [--workers 4]

Samples are images in memory, so loading costs little and what is measured is the way to
the device. A step keeps the device busy for some milliseconds, and every step ends with
the host waiting for it, as with `loss.item()`. Torch's DataLoader pins batches in a
thread. Beside it run penstock's with the same arguments and a `Pipeline` with
`to_device`, both with autotune on. Values on the device are compared first. Then both
are tuned for a while; that does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.utils.data as torchs
from versus import show, versus

import penstock as ps

BATCHES = 40
IMAGES = 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TUNED_S = 10.0
STEP_MS = (1, 30)
"""How long a step keeps the device busy: less than the way there takes, and more."""


class Images(torchs.Dataset[tuple[torch.Tensor, int]]):
    """Images in memory: `uint8 [224, 224, 3]`, or `float32 [3, 224, 224]`."""

    def __init__(self, length: int, *, floats: bool) -> None:
        self.length = length
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(
            0, 256, (IMAGES, 224, 224, 3), dtype=torch.uint8, generator=generator
        )
        self.images = normalised(images, "cpu") if floats else images

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % IMAGES].clone(), index


def normalised(images: torch.Tensor, device: str) -> torch.Tensor:
    """Return `uint8 [N, H, W, 3]` as normalised `float32 [N, 3, H, W]`."""
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
    return ((images / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()


def moved(loader: Iterable[Any], *, floats: bool) -> Iterable[Any]:
    """Copy a loader's batches to the device, as a training loop does by hand."""
    for images, labels in loader:
        on_device = images.to("cuda", non_blocking=True)
        if not floats:
            on_device = normalised(on_device, "cuda")
        yield on_device, labels.to("cuda", non_blocking=True)


def epoch(batches: Callable[[], Iterable[Any]], cycles: int) -> None:
    """Train for an epoch: each step keeps the device busy, and is waited for."""
    for images, _ in batches():
        torch.cuda._sleep(cycles)  # noqa: SLF001
        images.flatten()[0].item()


def cycles_of(milliseconds: float) -> int:
    """Return how many cycles the device sleeps in that time."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**7)  # noqa: SLF001 wakes the device
    start.record()
    torch.cuda._sleep(10**8)  # noqa: SLF001
    end.record()
    torch.cuda.synchronize()
    return round(10**8 * milliseconds / start.elapsed_time(end))


def compare(
    batch: int, workers: int, step_ms: int, rounds: int, *, floats: bool
) -> None:
    """Print one table."""
    data = Images(BATCHES * batch, floats=floats)
    settings: dict[str, Any] = {
        "batch_size": batch,
        "num_workers": workers,
        "pin_memory": True,
        "persistent_workers": workers > 0,
    }
    ours = ps.DataLoader(data, **settings)
    pipe = ps.Pipeline.from_dataset(data).batch(batch)
    pipe = pipe.to_device("cuda", normalize=None if floats else (MEAN, STD))
    theirs = torchs.DataLoader(data, **settings)
    with pipe:
        candidates: dict[str, Callable[[], Iterable[Any]]] = {
            "torch": lambda: moved(theirs, floats=floats),
            "penstock.DataLoader": lambda: moved(ours, floats=floats),
            "Pipeline.to_device": lambda: pipe,
        }
        loaders = (make() for make in candidates.values())
        for (a, i), (b, j), (c, k) in zip(*loaders, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
            assert torch.allclose(a, c, atol=1e-5)
            assert torch.equal(i, j)
            assert torch.equal(i, k)
        cycles = cycles_of(step_ms)
        for name in list(candidates)[1:]:
            end_s = time.monotonic() + TUNED_S
            while time.monotonic() < end_s:
                epoch(candidates[name], cycles)
        runs = {name: partial(epoch, it, cycles) for name, it in candidates.items()}
        form = "float32 [3, 224, 224]" if floats else "uint8 [224, 224, 3]"
        busy = f"{workers} workers, device busy {step_ms} ms a step"
        show(
            f"{form}, batch {batch}, {busy}",
            versus(runs, len(data), rounds),
            ["torch"],
        )
    ours.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    ps.set_enable_autotune(True)
    for floats, batch in ((True, 128), (False, 256)):
        for step_ms in STEP_MS:
            compare(batch, args.workers, step_ms, args.rounds, floats=floats)


if __name__ == "__main__":
    main()
