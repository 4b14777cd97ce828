"""Which data set it is, as far as it says so: what a state is held against."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from .files import Files
from .sources import Folder

__all__ = ["identity_of"]


def identity_of(dataset: Any) -> str | None:
    """Return 32 hex digits; None where only its length can be told.

    Folders and files are told by the names of their files, in order, from the folder
    on: a copy elsewhere is the same. Other data sets by `__penstock_fingerprint__`, or
    the `_fingerprint` of Hugging Face's; nothing else about an object is sure to be the
    same in the next run, and a run that cannot be resumed is worse than one that can.
    """
    match dataset:
        case Folder():
            names = [os.path.relpath(path, dataset.root) for path in dataset.paths]
            return digest(names)
        case Files():
            return digest(dataset.paths)
    from ..cache.digest import said_fingerprint

    said = said_fingerprint(dataset)
    return None if said is None else hashlib.blake2b(said, digest_size=16).hexdigest()


def digest(names: Sequence[str]) -> str:
    """Return the hash of names, each ended by a zero byte."""
    found = hashlib.blake2b(digest_size=16)
    for name in names:
        found.update(os.fsencode(name) + b"\0")
    return found.hexdigest()
