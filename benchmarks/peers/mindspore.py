"""MindSpore's dataset: its own operators on photographs, else generators of Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore.dataset as ds
import numpy as np
from mindspore.dataset import vision

from .data import BATCH, SIZE, Arrays, Given, batches_of, rows_of

REPEATS = 1000
ORDINARY = [
    {"workers": 1, "whole": True},
    {"workers": 2, "whole": True},
    {"workers": 1},
]
SETTINGS: dict[str, Any] = {
    "photographs": {
        "mindspore, own boxes, no antialias": [
            {"workers": 1},
            {"workers": 2},
            {"workers": 2, "autotune": True},
        ]
    },
    "tiny": {"mindspore": ORDINARY},
    "arrays": {"mindspore": [{"workers": 1}, {"workers": 2}]},
    "text": {"mindspore": ORDINARY[:2]},
    "waits": {
        "mindspore": [
            {"workers": 2},
            {"workers": 2, "processes": True},
            {"workers": 2, "processes": True, "whole": True},
        ]
    },
}
LEFT_OUT = {"detection": "it batches arrays of one shape: no lists, no ragged arrays"}


def decode(data: bytes) -> np.ndarray:
    """Decode a whole JPEG."""
    pixels: np.ndarray = vision.Decode()(np.frombuffer(data, np.uint8))
    return pixels


def batches(data: Any) -> Iterator[Any]:
    """Yield arrays, epoch after epoch."""
    rows = data.repeat(REPEATS).create_tuple_iterator(num_epochs=1, output_numpy=True)
    return iter(rows)


def photographs(given: Given, *, workers: int, autotune: bool = False) -> Iterator[Any]:
    """Yield uint8 [64, 224, 224, 3], and labels."""
    ds.config.set_enable_autotune(autotune)
    folder = str(Path(given.folder) / "photographs")
    data = ds.ImageFolderDataset(folder, shuffle=False, num_parallel_workers=workers)
    data = data.repeat(REPEATS)
    crop = vision.RandomCropDecodeResize(SIZE)
    operators = [crop, vision.RandomHorizontalFlip(0.5)]
    data = data.map(operators, "image", num_parallel_workers=workers)
    return batches(data.batch(BATCH["photographs"], num_parallel_workers=workers))


def generated(
    workload: str,
    given: Given,
    columns: list[str],
    workers: int,
    *,
    whole: bool = False,
    processes: bool = False,
) -> Iterator[Any]:
    """Yield samples made by Python, on threads or in processes."""
    data = ds.GeneratorDataset(
        batches_of(workload, given) if whole else rows_of(workload, given),
        columns,
        shuffle=False,
        num_parallel_workers=workers,
        python_multiprocessing=processes,
    )
    return batches(data if whole else data.batch(BATCH[workload]))


def tiny(given: Given, *, workers: int, whole: bool = False) -> Iterator[Any]:
    """Yield float32 [256, 32], and labels."""
    return generated("tiny", given, ["row", "label"], workers, whole=whole)


def arrays(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield the same, from the rows of an array."""
    rows = Arrays()
    columns = (rows.rows, rows.labels)
    data = ds.NumpySlicesDataset(columns, shuffle=False, num_parallel_workers=workers)
    data = data.repeat(REPEATS)
    return batches(data.batch(BATCH["arrays"], num_parallel_workers=workers))


class Columns:
    """Batches as tuples, of dicts."""

    def __init__(self, given: Given) -> None:
        self.batches = batches_of("text", given)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return tuple(self.batches[index].values())


def text(given: Given, *, workers: int, whole: bool) -> Iterator[Any]:
    """Yield int64 [64, longest], a mask and labels: batches that Python pads."""
    return batches(
        ds.GeneratorDataset(
            Columns(given),
            ["ids", "mask", "label"],
            shuffle=False,
            num_parallel_workers=workers,
            python_multiprocessing=False,
        )
    )


def waits(
    given: Given, *, workers: int, processes: bool = False, whole: bool = False
) -> Iterator[Any]:
    """Yield 32 numbers; more workers than cores are refused."""
    more = {"whole": whole, "processes": processes}
    return generated("waits", given, ["number"], workers, **more)
