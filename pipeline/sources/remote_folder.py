"""Class folders of images in a store, listed once and then read as files."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, ClassVar

from ...engine.recipe import Executor
from ...errors import SpecError, check
from .files import AsyncFiles, Files, Store, is_awaited
from .folder import SUFFIXES
from .patience import Patience


class RemoteFolder(Files):
    """Sample i is `(bytes of the file, label)`, as in a folder on this machine."""

    KIND: ClassVar[str] = "Folder"


class AsyncRemoteFolder(RemoteFolder, AsyncFiles):
    """A `RemoteFolder` whose samples are awaited in an event loop."""


def find_folder(
    root: str,
    options: Mapping[str, Any] | None,
    executor: Executor,
    patience: Patience,
) -> Files:
    """Return the images in class folders below a URL; labels number sorted folders.

    Raises:
        SpecError: there is no image in a class folder; or executor="async" with a file
            system that an event loop cannot read.
    """
    from fsspec.core import url_to_fs

    store = Store(root, options or {}, patience)
    store.kind()
    files, top = url_to_fs(root, **store.options)
    try:
        # `find` skips folders that cannot be listed, even if that is all of them.
        found = files.find(top) or files.ls(top, detail=False)
    except Exception as error:
        raise SpecError(
            f"`from_folder` could not list {root!r}: {type(error).__name__}: {error};"
            " see that the URL is right and that it may be read from here"
        ) from error
    classes = {path: class_of(path, top) for path in found if is_image(path)}
    paths = sorted(path for path, name in classes.items() if name)
    check(
        paths,
        f"`from_folder` found no image in class folders below {root!r}, and"
        f" {len(classes)} in none; give the folder that holds one sub-folder per class,"
        f" with files ending in {' '.join(sorted(SUFFIXES))}",
    )
    names = sorted({classes[path] for path in paths})
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers[classes[path]] for path in paths]
    kind = AsyncRemoteFolder if is_awaited(store, executor) else RemoteFolder
    return kind(store, tuple(paths), labels, (root,))


def class_of(path: str, top: str) -> str:
    """Return the class folder that holds a file; empty if there is none."""
    name, inside, _ = posixpath.relpath(path, top).partition("/")
    return name if inside else ""


def is_image(path: str) -> bool:
    """Whether a file is an image, judged by its suffix."""
    return posixpath.splitext(path)[1].lower() in SUFFIXES
