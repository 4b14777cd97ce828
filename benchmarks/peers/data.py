"""The data that all peers load, made with numpy and plain Python and without a loader.

Sample i of a dataset is the same for all peers, and all take samples in order, so their
batches can be compared. Rows repeat, so that epochs are long.
"""

from __future__ import annotations

import io
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from burning import burn

SIZE = 224
EPOCH = 1 << 20
"""Samples."""
BATCH = {
    "photographs": 64,
    "tiny": 256,
    "arrays": 256,
    "text": 64,
    "detection": 16,
    "waits": 32,
}
WAIT_S = 0.020
GIVEN = "given.json"

Box = tuple[int, int, int, int]
"""Top, left, height and width, in pixels."""
Crop = Callable[[bytes, Box, bool], Any]
"""Makes `uint8 [224, 224, 3]` of a JPEG, the part of it, and whether to mirror that."""


def pillow(data: bytes, box: Box, flip: bool) -> np.ndarray:  # noqa: FBT001
    """Decode, crop, resize with antialiasing and mirror, all with Pillow."""
    from PIL import Image

    top, left, height, width = box
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def simplejpeg(data: bytes, box: Box, flip: bool) -> np.ndarray:  # noqa: FBT001
    """Decode with libjpeg-turbo; crop, resize (antialiased) and mirror with torch."""
    import torch
    from simplejpeg import decode_jpeg

    top, left, height, width = box
    part = decode_jpeg(data)[top : top + height, left : left + width]
    planes = torch.from_numpy(np.ascontiguousarray(part))[None].permute(0, 3, 1, 2)
    image = torch.nn.functional.interpolate(
        planes, size=(SIZE, SIZE), mode="bilinear", antialias=True
    )
    image = image[0].permute(1, 2, 0)
    if flip:
        image = torch.flip(image, (1,))
    return image.contiguous().numpy()


class Rows(ABC):
    """Sample i is `row(i % count)`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Any:
        if index >= EPOCH:
            raise IndexError(index)
        return self.row(index % self.count)

    @abstractmethod
    def row(self, index: int) -> Any:
        """Return one of the rows."""


class Files(Rows):
    """The bytes of a file, and its number."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(len(paths))
        self.paths = paths

    def row(self, index: int) -> tuple[bytes, int]:
        with open(self.paths[index], "rb") as file:
            return file.read(), index


class Photographs(Files):
    """A part of each file as pixels, and its number."""

    def __init__(self, given: Given, crop: Crop) -> None:
        super().__init__(given.paths)
        self.boxes, self.flips, self.crop = given.boxes, given.flips, crop

    def row(self, index: int) -> Any:
        data, _ = super().row(index)
        return self.crop(data, self.boxes[index], self.flips[index]), index


class Arrays(Rows):
    """`float32 [32]` and an int: 200,000 of each in memory."""

    def __init__(self) -> None:
        super().__init__(200_000)
        draw = np.random.default_rng(0)
        self.rows = draw.random((self.count, 32), np.float32)
        self.labels = draw.integers(0, 10, self.count)

    def row(self, index: int) -> Any:
        return self.rows[index], self.labels[index]

    def take(self, indices: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and labels of a whole batch."""
        at = np.asarray(indices) % self.count
        return self.rows[at], self.labels[at]


class Tiny(Arrays):
    """The same, one at a time, with labels as Python has them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.labels.tolist()

    def row(self, index: int) -> Any:
        return self.rows[index], self.numbers[index]


class Text(Rows):
    """Lists of 10 to 200 token ids, with a label."""

    def __init__(self) -> None:
        super().__init__(4000)
        draw = np.random.default_rng(19)
        self.lists = [
            (draw.integers(0, 30_000, length).tolist(), int(length) % 2)
            for length in draw.integers(10, 200, self.count)
        ]

    def row(self, index: int) -> Any:
        return self.lists[index]


def pad(rows: Iterable[tuple[list[int], int]]) -> dict[str, np.ndarray]:
    """Make a batch of the longest row's width, with zeros after each row's end."""
    lists, labels = zip(*rows, strict=True)
    ids = np.zeros((len(lists), max(map(len, lists))), np.int64)
    mask = np.zeros_like(ids)
    for at, tokens in enumerate(lists):
        ids[at, : len(tokens)] = tokens
        mask[at, : len(tokens)] = 1
    return {"ids": ids, "mask": mask, "label": np.array(labels)}


class Detection(Rows):
    """Images, each with its own number of boxes.

    Args:
        tensor: converts an array to the type that the peer's users have.
    """

    def __init__(self, tensor: Callable[[np.ndarray], Any] = np.asarray) -> None:
        super().__init__(400)
        self.tensor = tensor
        draw = np.random.default_rng(19)
        self.images = draw.integers(0, 255, (self.count, 3, 96, 96), "u1")
        self.boxes = [
            draw.random((number % 9 + 1, 4), np.float32) for number in range(self.count)
        ]

    def row(self, index: int) -> Any:
        boxes = self.boxes[index]
        image = self.images[index].astype(np.float32) / 255
        return self.tensor(image), {
            "boxes": self.tensor(boxes),
            "labels": self.tensor(np.ones(len(boxes), np.int64)),
        }


def listed(rows: Iterable[Any]) -> Any:
    """Keep samples as they are, for detection models."""
    return tuple(zip(*rows, strict=True))


class Waits(Rows):
    """Sample i is i, after 20 ms of waiting and 1 ms of Python.

    Args:
        rounds: rounds of Python.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__(EPOCH)
        self.rounds = rounds

    def row(self, index: int) -> int:
        time.sleep(WAIT_S)
        burn(self.rounds)
        return index


@dataclass(frozen=True)
class Given:
    """The data for the peers that does not come from fixed seeds."""

    folder: str
    """A folder with photographs/, in folders of classes, and the files of peers."""
    paths: list[str]
    """Paths of the photographs."""
    boxes: list[Box]
    """The part of each photograph to take."""
    flips: list[bool]
    """Whether to mirror it."""
    rounds: int
    """Rounds of Python in 1 ms."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what `write` wrote."""
        return cls(**json.loads((folder / GIVEN).read_text()))

    def write(self) -> None:
        """Keep it in its folder."""
        (Path(self.folder) / GIVEN).write_text(json.dumps(asdict(self)))

    @cached_property
    def waits(self) -> Waits:
        """Samples that wait."""
        return Waits(self.rounds)


class Batches(Sequence[Any]):
    """Batch i as a sample, for peers that give whole batches to their workers."""

    def __init__(self, rows: Rows, size: int, collate: Callable[[Any], Any]) -> None:
        self.rows, self.size, self.collate = rows, size, collate

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        first = index * self.size
        indices = range(first, first + self.size)
        return self.collate(list(map(self.rows.__getitem__, indices)))


def stacked(rows: Iterable[Any]) -> Any:
    """Make arrays of samples that are tuples or numbers."""
    rows = list(rows)
    if isinstance(rows[0], tuple):
        return tuple(np.stack(column) for column in zip(*rows, strict=True))
    return np.stack(rows)


COLLATE: dict[str, Callable[[Any], Any]] = {"text": pad, "detection": listed}
"""The functions that make batches, for workloads that are not `stacked`."""


def rows_of(workload: str, given: Given) -> Rows:
    """Return the samples of a workload, for peers that take any Python object."""
    match workload:
        case "photographs":
            return Photographs(given, simplejpeg)
        case "waits":
            return given.waits
    rows = {"tiny": Tiny, "arrays": Arrays, "text": Text, "detection": Detection}
    return rows[workload]()


def batches_of(workload: str, given: Given) -> Batches:
    """Return the same samples, in whole batches."""
    if workload == "arrays":
        return Taken()
    collate = COLLATE.get(workload, stacked)
    return Batches(rows_of(workload, given), BATCH[workload], collate)


class Taken(Batches):
    """Batches that are read from arrays at once."""

    def __init__(self) -> None:
        self.arrays = Arrays()
        super().__init__(self.arrays, BATCH["arrays"], stacked)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        first = index * self.size
        return self.arrays.take(np.arange(first, first + self.size))


def endless(batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from batches()


def main_part(batch: Any) -> np.ndarray:
    """Return a batch's images, ids, rows or numbers as one array."""
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    part = batch[0] if isinstance(batch, list | tuple) else batch
    if isinstance(part, list | tuple):
        return np.stack([np.asarray(value) for value in part])
    return np.asarray(part)
