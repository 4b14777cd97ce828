"""Files of this machine: class folders of images, and what paths and patterns name."""

from __future__ import annotations

import glob
import hashlib
import importlib
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import check
from .source import Source

# Suffixes of image files, in upper or lower case.
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
)
# The beginning of a URL, even if a `Path` dropped one of two slashes.
URL = re.compile(r"[A-Za-z][\w+.-]+:/")


@dataclass(frozen=True)
class Names(Sequence[str]):
    """Many names in one piece of memory, which forked processes share.

    A million strings would be copied into each of them, page by page, as whoever looks
    at one counts that in the string itself.
    """

    block: bytes
    """The names in the encoding of the file system, each ended by a zero byte."""
    ends: array[int]
    """Where the next one begins."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Return these names."""
        pieces = [os.fsencode(name) + b"\0" for name in names]
        return cls(b"".join(pieces), array("Q", accumulate(map(len, pieces))))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        at: int = range(len(self))[index]
        start = self.ends[at - 1] if at else 0
        return os.fsdecode(self.block[start : self.ends[at] - 1])


@dataclass(frozen=True)
class Folder(Source):
    """Images in class sub-folders: sample i is `(bytes of the file, label)`.

    Labels number the class folders in sorted order, as torchvision's ImageFolder does.
    """

    KIND = "Folder"
    root: str
    classes: tuple[str, ...]
    ends: tuple[int, ...]
    """The number of the first file behind each class."""
    names: Names
    """The files, from the root on."""

    @classmethod
    def scan(cls, root: str | os.PathLike[str]) -> Folder:
        """List the images below `root`.

        Raises:
            SpecError: the folder does not exist, has no class folders, or has no images
                in these.
        """
        top = Path(root)
        check(
            top.is_dir(),
            f"`from_folder` needs a folder, got {str(root)!r}, which "
            f"{'is a file' if top.exists() else 'does not exist'}; give the folder "
            "that holds one sub-folder of images per class",
        )
        folders = [
            (folder.name, Names.of(list_images(folder)))
            for folder in sorted(top.iterdir())
            if folder.is_dir()
        ]
        classes = [(name, files) for name, files in folders if files]
        check(classes, empty(top, [name for name, _ in folders]))
        kinds = tuple(name for name, _ in classes)
        ends = accumulate(len(files) for _, files in classes)
        names = Names.of(name for _, files in classes for name in files)
        return cls(os.fspath(root), kinds, tuple(ends), names)

    @property
    def shown(self) -> tuple[object, ...]:
        return (self.root,)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        with open(self._path(index), "rb", buffering=0) as file:
            return file.readall(), self._label(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, whose files are read outside the GIL if possible."""
        contents = native_read()([*map(self._path, indices)])
        return [
            self[index] if content is None else (content, self._label(index))
            for index, content in zip(indices, contents, strict=True)
        ]

    def _path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def _label(self, index: int) -> int:
        return bisect_right(self.ends, range(len(self))[index])

    def sample_fingerprints(self) -> NDArray[np.uint64]:
        """Return a fingerprint of each file and its label: `uint64 [n, 2]`."""
        from ...cache.fingerprint import file_fingerprints

        numbers = range(len(self))
        paths, labels = map(self._path, numbers), map(self._label, numbers)
        return file_fingerprints([*paths], labels=[*labels])

    def identity(self) -> str:
        """Return the hash of the names of all files, as `digest` makes it."""
        return hashlib.blake2b(self.names.block, digest_size=16).hexdigest()

    def __repr__(self) -> str:
        return (
            f"<Folder {self.root!r}: {len(self)} images in {len(self.classes)} classes>"
        )


@cache
def native_read() -> Callable[[list[str]], list[bytes | None]]:
    """Return what reads whole files outside the GIL; None for those that it leaves."""
    try:
        read: Callable[[list[str]], list[bytes | None]]
        read = importlib.import_module("..image._photos", __package__).read
    except (ImportError, AttributeError):  # there is none, or an older one
        return lambda paths: [None] * len(paths)
    return read


def list_images(folder: Path) -> list[str]:
    """Return all images in `folder` and below, sorted, from its own name on."""
    before = len(str(folder)) - len(folder.name)

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=refuse, followlinks=True)
    return sorted(
        os.path.join(here, name)[before:]
        for here, _, names in walk
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


# Files one by one, or by a pattern.

# Files or URLs one by one, or one pattern that matches them.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# Numbers from one to another, or alternatives.
BRACES = re.compile(r"[{](?:(\d+)[.][.](\d+)|([^{}]*,[^{}]*))[}]")
# More names than this in braces are taken for a mistake.
MAX_FILES = 1_000_000


def files_here(source: str, paths: Paths) -> tuple[str, ...]:
    """Return the files at `paths`; those of a pattern are sorted.

    Args:
        source: name of the method that the user called, for an error.
        paths: the paths or the pattern that the user gave.

    Raises:
        SpecError: there is no file, or one is not on this machine.
    """
    names = listed(source, paths)
    for name in names:
        check(
            not URL.match(name),
            f"`{source}` reads files of this machine, got {name!r}; mount the store, or"
            " copy its shards to a disk first",
        )
    if isinstance(paths, (str, os.PathLike)):
        names = [path for name in names for path in matches(name)]
    absent = next((name for name in names if not os.path.exists(name)), None)
    check(
        names and absent is None,
        f"`{source}` found no file {absent or paths!r}; give paths, or one pattern"
        ' such as "train-*" or "train-{000..099}"',
    )
    return tuple(map(os.path.abspath, names))


def first_of(paths: Sequence[str]) -> str:
    """Return the first path, with dots if there are more, as pipelines print it."""
    return f"{paths[0]}, ..." if len(paths) > 1 else paths[0]


def matches(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted; a file's own name first."""
    is_name = os.path.exists(pattern) or not glob.has_magic(pattern)
    return [pattern] if is_name else sorted(glob.glob(pattern, recursive=True))


def listed(source: str, paths: Paths) -> list[str]:
    """Return the paths, URLs or patterns that were given, without braces.

    Raises:
        SpecError: one is a command, or the braces stand for too many.
    """
    names: list[str] = []
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        name = os.fspath(path)
        check(
            not name.startswith("pipe:"),
            f"`{source}` runs no commands: `pipe:` would hand what it reads to a"
            f" program, got {name!r}",
        )
        names += islice(expanded(name), MAX_FILES + 1 - len(names))
        check(
            len(names) <= MAX_FILES,
            f"`{source}` got braces for more than {MAX_FILES} files: {name!r}; see that"
            " the numbers in them are right",
        )
    check(
        names,
        f"`{source}` needs at least one file, got {paths!r}"
        "; check the listing or the pattern that made it",
    )
    return names


def expanded(path: str) -> Iterator[str]:
    """Yield the paths that braces stand for, as a shell does; a file's own name first.

    "a-{08..10}.tar" is a-08.tar, a-09.tar and a-10.tar, and "{train,val}.tar" two.
    """
    braces = None if os.path.exists(path) else BRACES.search(path)
    if braces is None:
        yield path
        return
    for choice in choices(braces):
        yield from expanded(path[: braces.start()] + choice + path[braces.end() :])


def choices(braces: re.Match[str]) -> Iterable[str]:
    """Return what a pair of braces stands for."""
    first, last, alternatives = braces.groups()
    if alternatives is not None:
        return str(alternatives).split(",")
    padded = any(len(number) > 1 and number[0] == "0" for number in (first, last))
    width = max(len(first), len(last)) if padded else 0
    begin, end = int(first), int(last)
    step = 1 if begin <= end else -1
    # One by one: there may be more numbers than memory.
    return (f"{number:0{width}}" for number in range(begin, end + step, step))
