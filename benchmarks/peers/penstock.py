"""penstock, tuned by itself and set by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

import penstock as ps

from .data import (
    BATCH,
    EPOCH,
    SIZE,
    Arrays,
    Detection,
    Files,
    Given,
    Photographs,
    Text,
    Tiny,
    endless,
    listed,
    pillow,
)
from .torch import Whole, padded

AUTOTUNE = {"autotune": True}
THREADS = [{"workers": workers, "executor": "thread"} for workers in (1, 2, 3, 4)]
ORDINARY = {
    "penstock, autotune": [AUTOTUNE],
    "penstock.DataLoader, autotune": [AUTOTUNE | {"face": "loader"}],
    "penstock, by hand": [
        {"executor": "inline"},
        {"workers": 1, "executor": "thread"},
        {"workers": 2, "executor": "process"},
    ],
}
SETTINGS: dict[str, Any] = {
    "photographs": {
        "penstock, autotune": [AUTOTUNE],
        "penstock, by hand": THREADS,
        "penstock, Pillow": [
            setting | {"decoder": "pillow"} for setting in THREADS[1:3]
        ],
        "penstock, decoding less": [
            setting | {"decoder": "less"} for setting in THREADS[1:3]
        ],
    },
    "tiny": ORDINARY,
    "arrays": {
        "penstock": [
            {"how": how, "executor": executor}
            for how in ("getitems", "collate", "tensors")
            for executor in ("inline", "thread")
        ],
        "penstock.DataLoader, autotune": [AUTOTUNE | {"how": "batches"}],
    },
    "text": ORDINARY,
    "detection": ORDINARY,
    "waits": {
        "penstock, autotune": [AUTOTUNE],
        "penstock.DataLoader, autotune": [AUTOTUNE | {"face": "loader"}],
        "penstock, by hand": [{"workers": workers} for workers in (48, 64, 80)],
    },
}


class Crop:
    """The fused operator, which draws the same part of each photograph for all peers.

    Args:
        **options: options of the operator.
    """

    def __init__(self, kind: Any, **options: Any) -> None:
        self.crop = kind(SIZE, flip=0.5, **options)

    def __call__(self, sample: tuple[bytes, int]) -> tuple[np.ndarray, int]:
        data, number = sample
        return self.crop(data, rng=np.random.default_rng(number)), number


CROPS = {
    "same": Crop(ps.image.decode_random_resized_crop, reducing_gap=float("inf")),
    "less": Crop(ps.image.decode_only_random_resized_crop),
}


class Many(Arrays):
    """Rows, read many at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows, labels = self.take(indices)
        return list(zip(rows, labels.tolist(), strict=True))


def loaded(
    dataset: Any,
    size: int,
    *,
    face: str = "pipeline",
    autotune: bool = False,
    crop: Any = None,
    collate: Any = None,
    prefetch: int | None = None,
    workers: int | None = None,
    **source: Any,
) -> Iterator[Any]:
    """Yield batches of a pipeline, or of the other face."""
    ps.set_enable_autotune(autotune)
    if face == "loader":
        loader: Any = ps.DataLoader(dataset, size, collate_fn=collate)
    else:
        if prefetch is not None:
            ps.set_prefetch_size(prefetch)
        stage = dict(source, num_parallel_workers=workers)
        if crop is None:
            loader = ps.Pipeline.from_dataset(dataset, **stage)
        else:
            loader = ps.Pipeline.from_dataset(dataset).map(crop, **stage)
        loader = loader.batch(size, collate_fn=collate)
    yield from endless(lambda: loader)


def photographs(
    given: Given, *, decoder: str = "same", **setting: Any
) -> Iterator[Any]:
    """Yield uint8 [64, 224, 224, 3], and numbers."""
    size = BATCH["photographs"]
    if decoder == "pillow":
        return loaded(Photographs(given, pillow), size, **setting)
    return loaded(Files(given.paths), size, crop=CROPS[decoder], **setting)


def tiny(given: Given, **setting: Any) -> Iterator[Any]:
    """Yield float32 [256, 32], and labels."""
    return loaded(Tiny(), BATCH["tiny"], **setting)


def arrays(given: Given, *, how: str, **setting: Any) -> Iterator[Any]:
    """Yield the same, from the rows of an array."""
    size, rows = BATCH["arrays"], Many()
    if how == "getitems":
        return loaded(rows, size, **setting)
    if how == "collate":
        return loaded(range(EPOCH), size, collate=partial(taken, rows), **setting)
    if how == "tensors":
        tensors = map(torch.from_numpy, (rows.rows, rows.labels))
        return loaded(TensorDataset(*tensors), size, **setting)
    ps.set_enable_autotune(setting["autotune"])
    order = BatchSampler(SequentialSampler(rows), size, drop_last=True)
    loader = ps.DataLoader(Whole(), None, sampler=order)
    return endless(lambda: loader)


def taken(rows: Arrays, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch of the indices in it."""
    some, labels = rows.take(indices)
    return torch.from_numpy(some), torch.from_numpy(labels)


def text(given: Given, **setting: Any) -> Iterator[Any]:
    """Yield int64 [64, longest], a mask and labels."""
    return loaded(Text(), BATCH["text"], collate=padded, **setting)


def detection(given: Given, **setting: Any) -> Iterator[Any]:
    """Yield tuples of 16 images and of 16 dicts of boxes and labels."""
    rows = Detection(torch.from_numpy)
    return loaded(rows, BATCH["detection"], collate=listed, **setting)


def waits(given: Given, *, workers: int | None = None, **setting: Any) -> Iterator[Any]:
    """Yield 32 numbers."""
    if workers is not None:
        setting |= {"workers": workers, "executor": "process", "prefetch": 16}
        setting["thread_safe"] = True
    return loaded(given.waits, BATCH["waits"], **setting)
