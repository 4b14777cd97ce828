"""torch's DataLoader, with Pillow and with simplejpeg."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from .data import (
    BATCH,
    Arrays,
    Detection,
    Given,
    Photographs,
    Text,
    Tiny,
    endless,
    listed,
    pad,
    pillow,
    simplejpeg,
)


def of(*workers: int, **more: Any) -> list[dict[str, Any]]:
    """Return a setting for each number of workers."""
    return [{"workers": count, **more} for count in workers]


SETTINGS = {
    "photographs": {
        "torch, Pillow": of(1, 2, 3, 4, decoder="pillow"),
        "torch, simplejpeg": of(1, 2, 3, 4, decoder="simplejpeg"),
    },
    "tiny": {"torch": of(0, 1, 2, 4)},
    "arrays": {"torch": of(0, 1, 2, 4)},
    "text": {"torch": of(0, 1, 2, 4)},
    "detection": {"torch": of(0, 1, 2, 4)},
    "waits": {"torch": of(16, 32, 64)},
}
CROPS = {"pillow": pillow, "simplejpeg": simplejpeg}


def loaded(
    dataset: Any,
    size: int | None,
    workers: int,
    collate: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Iterator[Any]:
    """Yield batches."""
    loader = DataLoader(
        dataset,
        size,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=workers > 0,
        **more,
    )
    return endless(lambda: loader)


def photographs(given: Given, *, decoder: str, workers: int) -> Iterator[Any]:
    """Yield uint8 [64, 224, 224, 3], and numbers."""
    rows = Photographs(given, CROPS[decoder])
    return loaded(rows, BATCH["photographs"], workers)


def tiny(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield float32 [256, 32], and labels."""
    return loaded(Tiny(), BATCH["tiny"], workers)


class Whole(Arrays):
    """Sample [i, j, ...] is a whole batch."""

    def __getitem__(self, indices: Any) -> Any:
        return tuple(map(torch.from_numpy, self.take(indices)))


def arrays(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield the same, by a sampler of whole batches."""
    rows = Whole()
    order = BatchSampler(SequentialSampler(rows), BATCH["arrays"], drop_last=True)
    return loaded(rows, None, workers, sampler=order)


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Make a batch of tensors."""
    return {key: torch.from_numpy(array) for key, array in pad(rows).items()}


def text(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield int64 [64, longest], a mask and labels."""
    return loaded(Text(), BATCH["text"], workers, padded)


def detection(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield tuples of 16 images and of 16 dicts of boxes and labels."""
    return loaded(Detection(torch.from_numpy), BATCH["detection"], workers, listed)


def waits(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield 32 numbers."""
    return loaded(given.waits, BATCH["waits"], workers)
