"""FFCV: photographs and arrays, from files in its own format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, NDArrayField, RGBImageField
from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter
from PIL import Image

from .data import BATCH, SIZE, Arrays, Given, endless

PAGE = 1 << 25
"""Bytes; the largest photograph must fit into one."""
PYTHON = "it runs no Python of the user's for a sample"
LEFT_OUT = {
    "tiny": f"{PYTHON}; see arrays",
    "text": f"{PYTHON}, and its rows have one length",
    "detection": "it has no field for boxes of any number",
    "waits": PYTHON,
}
SETTINGS: dict[str, Any] = {
    "photographs": {"ffcv, its own JPEGs and boxes": [{"workers": 1}, {"workers": 2}]},
    "arrays": {"ffcv": [{"workers": 1}, {"workers": 2}]},
}


class Pictures:
    """Photographs as Pillow images, for FFCV's writer."""

    def __init__(self, given: Given) -> None:
        self.paths = given.paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return Image.open(self.paths[index]).convert("RGB"), index


class Labelled(Arrays):
    """Each row once."""

    def __len__(self) -> int:
        return self.count


def written(path: Path, dataset: Any, fields: dict[str, Any]) -> str:
    """Write a file in FFCV's format, unless it exists."""
    if not path.exists():
        part = path.with_suffix(".part")
        writer = DatasetWriter(str(part), fields, num_workers=1, page_size=PAGE)
        writer.from_indexed_dataset(dataset)
        part.rename(path)
    return str(path)


def loaded(path: str, size: int, workers: int, pipelines: Any) -> Iterator[Any]:
    """Yield batches."""
    loader = Loader(
        path,
        batch_size=size,
        num_workers=workers,
        order=OrderOption.SEQUENTIAL,
        pipelines=pipelines,
    )
    return endless(lambda: loader)


def photographs(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield uint8 [64, 224, 224, 3], and numbers."""
    fields = {"image": RGBImageField(write_mode="jpg"), "number": IntField()}
    path = written(Path(given.folder) / "photographs.beton", Pictures(given), fields)
    crop = RandomResizedCropRGBImageDecoder((SIZE, SIZE))
    pipelines = {
        "image": [crop, RandomHorizontalFlip(0.5), ToTensor()],
        "number": [IntDecoder(), ToTensor()],
    }
    return loaded(path, BATCH["photographs"], workers, pipelines)


def arrays(given: Given, *, workers: int) -> Iterator[Any]:
    """Yield float32 [256, 32], and labels."""
    row = NDArrayField(np.dtype("float32"), (32,))
    fields = {"row": row, "label": IntField()}
    path = written(Path(given.folder) / "arrays.beton", Labelled(), fields)
    pipelines = {
        "row": [NDArrayDecoder(), ToTensor()],
        "label": [IntDecoder(), ToTensor()],
    }
    return loaded(path, BATCH["arrays"], workers, pipelines)
