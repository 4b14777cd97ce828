"""Datasets of images: class folders; MNIST and CIFAR in binary files; COCO and VOC."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Unpack
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from ..errors import SpecError, check
from ..pipeline import image
from ..pipeline.sources.folder import Folder, Names
from .columns import Row, as_leaf, reads
from .dataset import Dataset
from .generator import Reading, made_of

Where = str | os.PathLike[str]
Bytes = NDArray[np.uint8]


class Labels:
    """Makes rows of a folder's files: an image, or its bytes, and `int32` label."""

    def __init__(self, labels: Sequence[int], *, decode: bool) -> None:
        self._labels, self._decode = list(labels), decode

    def __call__(self, sample: tuple[bytes, int]) -> Row:
        content, label = image.decode(sample) if self._decode else sample
        values = content if self._decode else np.frombuffer(content, np.uint8)
        return np.array(values), np.array(self._labels[label], np.int32)


class LabelledFolder(Folder):
    """A folder that knows all labels."""

    @property
    def labels(self) -> list[int]:
        """The label of each file."""
        return [self._label(index) for index in range(len(self))]


def ImageFolderDataset(
    dataset_dir: Where,
    num_samples: int | None = None,
    num_parallel_workers: int | None = None,
    shuffle: bool | None = None,
    sampler: Any = None,
    extensions: Sequence[str] | None = None,
    class_indexing: dict[str, int] | None = None,
    decode: bool = False,
    num_shards: int | None = None,
    shard_id: int | None = None,
    cache: Any = None,
) -> Dataset:
    """Load images from class sub-folders: columns `image` and `label`.

    Args:
        dataset_dir: the folder.
        num_samples: samples in an epoch; None: all.
        num_parallel_workers: workers to start with.
        shuffle: None: shuffle, as in MindSpore.
        sampler: chooses the rows; then leave out what else does.
        extensions: suffixes of files to read (default: those of images).
        class_indexing: the label of each class to read (default: all, in sorted order).
        decode: whether `image` is `uint8 [height, width, 3]`; otherwise it is the bytes
            of the file, `uint8 [n]`.
        num_shards: number of ranks.
        shard_id: number of this rank.
        cache: ignored, with a note.

    Raises:
        SpecError: the folder has no such images, or only one of `num_shards` and
            `shard_id` is given.
    """
    folder: Folder = LabelledFolder.scan(dataset_dir)
    if extensions or class_indexing:
        folder = narrowed(folder, extensions, class_indexing)
    classes = class_indexing or {name: at for at, name in enumerate(folder.classes)}
    first = Labels([classes[name] for name in folder.classes], decode=decode)
    reading = {
        "num_samples": num_samples,
        "num_parallel_workers": num_parallel_workers,
        "shuffle": shuffle,
        "sampler": sampler,
        "num_shards": num_shards,
        "shard_id": shard_id,
        "cache": cache,
    }
    return made_of(folder, ["image", "label"], reading, first=first, classes=classes)


def narrowed(
    folder: Folder, suffixes: Sequence[str] | None, classes: dict[str, int] | None
) -> Folder:
    """Return the part of a folder with these suffixes, and these classes.

    Raises:
        SpecError: no file is left.
    """
    parts = {
        name: [folder.names[at] for at in range(*ends)]
        for name, ends in zip(folder.classes, pairwise((0, *folder.ends)), strict=True)
        if classes is None or name in classes
    }
    ending = tuple(suffixes or ("",))
    matches = {
        k: [name for name in part if name.endswith(ending)] for k, part in parts.items()
    }
    names = [name for part in matches.values() for name in part]
    check(names, f"no file is left of {folder!r} with {suffixes!r} and {classes!r}")
    ends = tuple(accumulate(map(len, matches.values())))
    return replace(folder, classes=tuple(matches), ends=ends, names=Names.of(names))


class Labelled:
    """Images in memory, with one label or two.

    Args:
        images: `uint8 [n, ...]`.
        labels: `uint32 [n, k]`.
        name: the name in the log.
    """

    def __init__(self, images: Bytes, labels: NDArray[np.uint32], name: str) -> None:
        self._images, self._labels, self.name = images, labels, name

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Row:
        return np.array(self._images[index]), *(
            np.array(label) for label in self._labels[index]
        )

    @property
    def labels(self) -> NDArray[np.uint32]:
        """The last label of each image."""
        return self._labels[:, -1]


def MnistDataset(
    dataset_dir: Where, usage: str | None = None, **reading: Unpack[Reading]
) -> Dataset:
    """Load MNIST's files: `image`, `uint8 [28, 28, 1]`, and `label`, `uint32`.

    Args:
        dataset_dir: the folder with files such as train-images-idx3-ubyte.
        usage: "train", "test", or "all" (default).
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no such file, or it is something else.
    """
    parts = parts_of(usage, {"train": ["train"], "test": ["t10k"]}, ["t10k", "train"])
    paths = found(dataset_dir, [f"{part}-images-idx3-ubyte" for part in parts])
    images = [read_idx(path, 3) for path in paths]
    names = [path.name.replace("images-idx3", "labels-idx1") for path in paths]
    labels = [read_idx(found(dataset_dir, [name])[0], 1) for name in names]
    for path, some, others in zip(paths, images, labels, strict=True):
        check(
            len(some) == len(others),
            f"{str(path)!r} has {len(some)} images, and there are {len(others)} labels;"
            " download both files again",
        )
    pictures = np.concatenate(images)[..., None]
    rows = Labelled(
        pictures, np.concatenate(labels)[:, None].astype(np.uint32), "Mnist"
    )
    return made_of(rows, ["image", "label"], reading)


def parts_of(
    usage: str | None, parts: dict[str, list[str]], whole: list[str]
) -> list[str]:
    """Return the names of a part of the data, or of the whole.

    Raises:
        SpecError: there is no such part.
    """
    check(
        usage in (None, "all", *parts),
        f"`usage` must be one of {', '.join(parts)} and all, got {usage!r}; name one",
    )
    return parts.get(usage or "", whole)


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Return the array of bytes in an IDX file.

    Raises:
        SpecError: it is not one of so many dimensions.
    """
    content = np.fromfile(path, np.uint8)
    right = content[:4].tolist() == [0, 0, 8, dimensions]
    body = content[4 + 4 * dimensions :]
    with reads(path, SpecError):
        sizes = content[4 : 4 + 4 * dimensions].view(">i4")
        check(
            right and body.size == np.prod(sizes),
            f"this is not an IDX file of {dimensions} dimensions of bytes, or is cut"
            " off; download it again, and unpack it",
        )
        return body.reshape(sizes)


def Cifar10Dataset(
    dataset_dir: Where, usage: str | None = None, **reading: Unpack[Reading]
) -> Dataset:
    """Load CIFAR-10's binary version: `image`, `uint8 [32, 32, 3]`; `label`, `uint32`.

    Args:
        dataset_dir: the folder with files such as data_batch_1.bin.
        usage: "train", "test", or "all" (default).
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no such file, or it is something else.
    """
    patterns = {"train": ["data_batch_*.bin"], "test": ["test_batch.bin"]}
    both = ["data_batch_*.bin", "test_batch.bin"]
    rows = read_cifar(dataset_dir, parts_of(usage, patterns, both), 1, "Cifar10")
    return made_of(rows, ["image", "label"], reading)


def Cifar100Dataset(
    dataset_dir: Where, usage: str | None = None, **reading: Unpack[Reading]
) -> Dataset:
    """Load CIFAR-100's binary version: as CIFAR-10's, with a coarse and a fine label.

    Args:
        dataset_dir: the folder with train.bin and test.bin.
        usage: "train", "test", or "all" (default).
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no such file, or it is something else.
    """
    patterns = {"train": ["train.bin"], "test": ["test.bin"]}
    names = parts_of(usage, patterns, ["train.bin", "test.bin"])
    rows = read_cifar(dataset_dir, names, 2, "Cifar100")
    return made_of(rows, ["image", "coarse_label", "fine_label"], reading)


def read_cifar(
    folder: Where, patterns: Sequence[str], labels: int, name: str
) -> Labelled:
    """Return the images of binary files with so many labels each.

    Raises:
        SpecError: there is no such file, or it is something else.
    """
    parts = [np.fromfile(path, np.uint8) for path in found(folder, patterns)]
    check(
        all(part.size and part.size % (labels + 3072) == 0 for part in parts),
        f"a file {patterns} in {os.fspath(folder)!r} does not consist of images of 32"
        " by 32 pixels; download CIFAR's binary version",
    )
    records = np.concatenate(parts).reshape(-1, labels + 3072)
    planes = records[:, labels:].reshape(-1, 3, 32, 32)
    return Labelled(
        planes.transpose(0, 2, 3, 1), records[:, :labels].astype(np.uint32), name
    )


class Annotated:
    """Rows of image files, and of what is known of each.

    Args:
        files: the files of each row: a photograph, and perhaps a mask.
        notes: the other columns of each row.
        name: the name in the log.
        decode: whether images are `uint8 [height, width, 3]`, and not their bytes.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Path]],
        notes: Sequence[Row],
        name: str,
        *,
        decode: bool,
    ) -> None:
        check(files, f"{name} found no image; name another folder, or another list")
        self._files, self._notes, self._decode = files, notes, decode
        self.name = name

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Row:
        contents = (path.read_bytes() for path in self._files[index])
        make = image.decode if self._decode else partial(np.frombuffer, dtype=np.uint8)
        return *map(as_leaf, map(make, contents)), *map(as_leaf, self._notes[index])


def CocoDataset(
    dataset_dir: Where,
    annotation_file: Where,
    task: str = "Detection",
    decode: bool = False,
    **reading: Unpack[Reading],
) -> Dataset:
    """Load the images that have boxes: `image`, `bbox`, `category_id` and `iscrowd`.

    Args:
        dataset_dir: the folder of images.
        annotation_file: COCO's JSON file.
        task: "Detection", the only one that is here.
        decode: whether `image` is `uint8 [height, width, 3]`; otherwise it is the bytes
            of the file.
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no such image, or another task is named.
    """
    check(
        task == "Detection",
        f"CocoDataset reads the task 'Detection' here, got {task!r}; for others use"
        " GeneratorDataset of torchvision.datasets.CocoDetection",
    )
    content = Path(annotation_file).read_bytes()
    boxes: dict[int, list[Any]] = {}
    with reads(annotation_file, SpecError):
        document = json.loads(content)
        for note in document["annotations"]:
            values = (note["bbox"], note["category_id"], note.get("iscrowd", 0))
            boxes.setdefault(note["image_id"], []).append(values)
        names = {photo["id"]: photo["file_name"] for photo in document["images"]}
        files = [[inside(Path(dataset_dir), names[number])] for number in boxes]
        notes = [*map(boxed, boxes.values())]
        classes = {
            category["name"]: [category["id"]] for category in document["categories"]
        }
    rows = Annotated(files, notes, "Coco", decode=decode)
    columns = ["image", "bbox", "category_id", "iscrowd"]
    return made_of(rows, columns, reading, classes=classes)


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file that another file names.

    Raises:
        SpecError: it is outside the folder.
    """
    check(
        not Path(name).is_absolute() and ".." not in Path(name).parts,
        f"the file {name!r} is outside {str(folder)!r}; name files in that folder",
    )
    return folder / name


def boxed(objects: Sequence[Sequence[Any]]) -> Row:
    """Return boxes, `float32 [n, 4]`, and numbers of each, `uint32 [n, 1]`."""
    boxes, *numbers = zip(*objects, strict=True)
    columns = (np.array(values, np.uint32)[:, None] for values in numbers)
    return np.array(boxes, np.float32), *columns


def VOCDataset(
    dataset_dir: Where,
    task: str = "Segmentation",
    usage: str = "train",
    class_indexing: dict[str, int] | None = None,
    decode: bool = False,
    **reading: Unpack[Reading],
) -> Dataset:
    """Load Pascal VOC's images, in the order of a list in ImageSets.

    Args:
        dataset_dir: the folder with JPEGImages.
        task: "Segmentation": columns `image` and `target`; or "Detection": `image`,
            `bbox` (left, top, width, height), `label`, `difficult` and `truncate`.
        usage: the name of the list.
        class_indexing: the label of each class to read (default: all, sorted).
        decode: whether images are `uint8 [height, width, 3]`; otherwise they are the
            bytes of the files.
        **reading: as in `Reading`.

    Raises:
        SpecError: there is no such list, or another task is named.
    """
    lists = {"Segmentation": "Segmentation", "Detection": "Main"}
    check(
        task in lists,
        f"`task` must be one of {', '.join(lists)}, got {task!r}; these are here",
    )
    top = Path(dataset_dir)
    (path,) = found(top / "ImageSets" / lists[task], [f"{usage}.txt"])
    with reads(path, SpecError):
        lines = path.read_text().splitlines()
        names = [line.split()[0] for line in lines if line.strip()]
        photos = [inside(top / "JPEGImages", f"{name}.jpg") for name in names]
    if task == "Segmentation":
        masks = [top / "SegmentationClass" / f"{name}.png" for name in names]
        pairs = [*zip(photos, masks, strict=True)]
        rows = Annotated(pairs, [()] * len(pairs), "VOC", decode=decode)
        return made_of(rows, ["image", "target"], reading)
    objects = [voc_objects(top / "Annotations" / f"{name}.xml") for name in names]
    class_names = sorted({name for group in objects for name, *_ in group})
    classes = class_indexing or {name: at for at, name in enumerate(class_names)}
    box_lists = [
        [(box, classes[name], *marks) for name, box, *marks in group if name in classes]
        for group in objects
    ]
    files = [[photo] for photo, boxes in zip(photos, box_lists, strict=True) if boxes]
    notes = [boxed(boxes) for boxes in box_lists if boxes]
    rows = Annotated(files, notes, "VOC", decode=decode)
    columns = ["image", "bbox", "label", "difficult", "truncate"]
    return made_of(rows, columns, reading, classes=classes)


def voc_objects(path: Path) -> list[tuple[Any, ...]]:
    """Return the objects of a file: name, box, whether difficult, whether truncated.

    Raises:
        SpecError: it is damaged.
    """
    objects, ends = [], ("xmin", "ymin", "xmax", "ymax")
    with reads(path, SpecError):
        # Expat loads nothing from elsewhere, and stops where entities multiply.
        for node in ET.parse(path).getroot().iter("object"):  # noqa: S314
            sides = (float(node.findtext(f"bndbox/{end}", "")) for end in ends)
            left, top, right, bottom = sides
            marks = (int(node.findtext(of, "0")) for of in ("difficult", "truncated"))
            box = (left, top, right - left, bottom - top)
            objects.append((node.findtext("name", ""), box, *marks))
    return objects


def found(folder: Where, patterns: Sequence[str]) -> list[Path]:
    """Return the files of a folder that match.

    Raises:
        SpecError: there are none.
    """
    files = [
        path for pattern in patterns for path in sorted(Path(folder).glob(pattern))
    ]
    names = " or ".join(patterns)
    check(files, f"there is no {names} in {os.fspath(folder)!r}; name another folder")
    return files
