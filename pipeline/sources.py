"""Sources: what a pipeline may read from, and how.

A map-style source is anything with `__len__` and `__getitem__`: a torch dataset, a
list, an array, an HF dataset. An iterable source is anything else with `__iter__`.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from ..errors import SpecError, check
from .source import Source, digest

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
)
"""Files taken for images, in any case of letters."""
URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""Its beginning, also where a `Path` made one slash of two."""


ONCE = frozenset(("builtins", "itertools", "_csv", "_io"))
"""Modules whose iterators do not begin again: generators, `zip`, open files."""


@dataclass(frozen=True)
class Folder(Source, Sequence[tuple[bytes, int]]):
    """Images in class sub-folders: sample i is `(bytes of the file, label)`.

    Labels number the class folders in sorted order, as torchvision's ImageFolder does.
    """

    KIND: ClassVar[str] = "Folder"
    root: str
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]

    @classmethod
    def scan(cls, root: str | os.PathLike[str]) -> Folder:
        """List the images below `root`.

        Raises:
            SpecError: no such folder, no class folders in it, or no images in these.
        """
        top = Path(root)
        if not top.is_dir():
            raise SpecError(
                f"`from_folder` needs a folder, got {str(root)!r}, which "
                f"{'is a file' if top.exists() else 'does not exist'}; give the folder "
                "that holds one sub-folder of images per class"
            )
        found = [(c.name, list_images(c)) for c in sorted(top.iterdir()) if c.is_dir()]
        classes = [(name, files) for name, files in found if files]
        check(classes, empty(top, [name for name, _ in found]))
        names, paths, labels = [], [], []
        for label, (name, files) in enumerate(classes):
            names.append(name)
            paths += files
            labels += [label] * len(files)
        return cls(str(root), tuple(names), tuple(paths), tuple(labels))

    @property
    def shown(self) -> tuple[object, ...]:
        """How the arguments that made it print."""
        return (self.root,)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        with open(self.paths[index], "rb", buffering=0) as file:
            return file.readall(), self.labels[index]

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return what tells each file, and its label, from others: `uint64 [n, 2]`."""
        from ..cache.fingerprint.key import file_fingerprints

        return file_fingerprints(self.paths, labels=self.labels)

    def identity(self) -> str:
        """Return the hash of the names of its files, from the folder on."""
        return digest([os.path.relpath(path, self.root) for path in self.paths])

    def __repr__(self) -> str:
        return (
            f"<Folder {self.root!r}: {len(self.paths)} images in "
            f"{len(self.classes)} classes>"
        )


def list_images(folder: Path) -> list[str]:
    """Return the paths of all images in `folder` and below, sorted."""
    return sorted(_walk(str(folder)))


def _walk(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path)
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                yield entry.path


def empty(top: Path, folders: list[str]) -> str:
    """Say why nothing was found in `top`, and what would help."""
    kinds = " ".join(sorted(SUFFIXES))
    if folders:
        return (
            f"`from_folder` found no image below {str(top)!r}: {len(folders)} "
            f"sub-folders ({', '.join(folders[:3])}, ...) hold no file ending in "
            f"{kinds}"
        )
    if list_images(top):
        return (
            f"`from_folder` found images, but no class folders, in {str(top)!r}; move "
            "them into one sub-folder per class (a single one will do), or use "
            "from_dataset with a list of paths and a map() that reads them"
        )
    return (
        f"`from_folder` found nothing in {str(top)!r}: it is empty of class folders "
        f"and images; give the folder that holds one sub-folder per class, with files "
        f"ending in {kinds}"
    )


def is_iterable(dataset: Any) -> bool:
    """Tell an iterable dataset from a map-style one.

    Raises:
        SpecError: it is neither.
    """
    if isinstance(dataset, IterableDataset):
        return True
    cure = cure_of(dataset)
    check(
        not cure,
        f"`from_dataset` cannot take {type(dataset).__name__} objects: {cure}",
    )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise SpecError(
        f"`from_dataset` needs a dataset with __len__ and __getitem__, or one with "
        f"__iter__, got {type(dataset).__name__}; give an object of a torch Dataset, a "
        "list or an array"
    )


def cure_of(data: Any) -> str:
    """Say why an object is no data set though it looks like one; empty: it may be."""
    package = type(data).__module__.partition(".")[0]
    kind = f"{package}.{type(data).__name__}"
    if isinstance(data, (str, bytes, os.PathLike)):
        return (
            "a path is not what it leads to; use from_folder(path) or"
            " from_files(pattern)"
        )
    if kind == "pandas.DataFrame":
        return 'an index picks a column of it; give its rows: df.to_dict("records")'
    if kind in ("pyarrow.Table", "pyarrow.RecordBatch"):
        return (
            "an index picks a column of it; give its rows, table.to_pylist(), or"
            " datasets.Dataset(table), which reads them when they are asked for"
        )
    if isinstance(data, Mapping) and len(data) and 0 not in data:
        return (
            "samples are asked for by number, and its keys are none; for a dict of"
            " columns give torch.utils.data.StackDataset(**columns)"
        )
    if isinstance(data, Iterator) and type(data).__module__ in ONCE:
        return (
            "it can be read once, and each epoch begins at the start; give an object"
            " whose __iter__ begins again, as a torch IterableDataset"
        )
    return ""


def warn_of(data: Any) -> None:
    """Warn where an object looks like a data set to torch, and is none.

    Torch would take the letters of a path for samples. A mapping is left alone, as a
    sampler may draw its keys.
    """
    if not isinstance(data, Mapping) and (cure := cure_of(data)):
        kind = type(data).__name__
        text = f"this {kind} is no data set: {cure}"
        warnings.warn(text, UserWarning, stacklevel=3)


# Which data set it is, as far as it says so: what a state is held against.


def identity_of(dataset: Any) -> str | None:
    """Return 32 hex digits; None where only its length can be told.

    penstock's own sources say what they are, others by `__penstock_fingerprint__` or
    the `_fingerprint` of Hugging Face's. Nothing else about an object is sure to be the
    same in the next run, and a run that cannot be resumed is worse than one that can.
    """
    if isinstance(dataset, Source):
        return dataset.identity()
    from ..cache.fingerprint.digest import said_fingerprint

    said = said_fingerprint(dataset)
    return None if said is None else hashlib.blake2b(said, digest_size=16).hexdigest()
