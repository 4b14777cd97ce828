"""Class folders of images on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import SpecError, check
from .source import Source, digest

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
)
"""Suffixes of image files, in upper or lower case."""
URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""The beginning of a URL, even if a `Path` dropped one of two slashes."""


@dataclass(frozen=True)
class Folder(Source, Sequence[tuple[bytes, int]]):
    """Images in class sub-folders: sample i is `(bytes of the file, label)`.

    Labels number the class folders in sorted order, as torchvision's ImageFolder does.
    """

    KIND = "Folder"
    root: str
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]

    @classmethod
    def scan(cls, root: str | os.PathLike[str]) -> Folder:
        """List the images below `root`.

        Raises:
            SpecError: the folder does not exist, has no class folders, or has no images
                in these.
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
        """The arguments of this source as code."""
        return (self.root,)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        with open(self.paths[index], "rb", buffering=0) as file:
            return file.readall(), self.labels[index]

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each file and its label: `uint64 [n, 2]`."""
        from ...cache.fingerprint import file_fingerprints

        return file_fingerprints(self.paths, labels=self.labels)

    def identity(self) -> str:
        """Return the hash of the names of all files, relative to the folder."""
        return digest([os.path.relpath(path, self.root) for path in self.paths])

    def __repr__(self) -> str:
        return (
            f"<Folder {self.root!r}: {len(self.paths)} images in "
            f"{len(self.classes)} classes>"
        )


def list_images(folder: Path) -> list[str]:
    """Return the paths of all images in `folder` and below, sorted."""

    def refuse(error: OSError) -> None:
        raise error

    found = os.walk(folder, onerror=refuse, followlinks=True)
    return sorted(
        os.path.join(here, name)
        for here, _, names in found
        for name in names
        if is_image(name)
    )


def is_image(name: str) -> bool:
    """Whether a file is an image, judged by its suffix."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def empty(top: Path, folders: list[str]) -> str:
    """Say why nothing was found in `top`, and how to fix it."""
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
