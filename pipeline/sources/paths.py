"""The local files that a source reads, given as paths or a pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from ...errors import SpecError, check
from .folder import URL

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]
"""Files one by one, or one pattern that matches them."""


def files_here(source: str, paths: Paths) -> tuple[str, ...]:
    """Return the files at `paths`; those of a pattern are sorted.

    Args:
        source: name of the method that the user called, for an error.
        paths: the paths or the pattern that the user gave.

    Raises:
        SpecError: there is no file, or one is not on this machine.
    """
    alone = isinstance(paths, (str, os.PathLike))
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    given = [os.fspath(each) for each in listed]
    for each in given:
        check(not each.startswith("pipe:"), f"`{source}` {NO_PIPES}, got {each!r}")
        check(
            not URL.match(each),
            f"`{source}` reads files of this machine, got {each!r}; mount the store, or"
            " copy its shards to a disk first",
        )
    if alone and glob.has_magic(given[0]):
        given = sorted(glob.glob(given[0], recursive=True))
    absent = next((each for each in given if not os.path.exists(each)), None)
    if absent is not None or not given:
        raise SpecError(
            f"`{source}` found no file {absent or paths!r}; give paths, or one pattern"
            ' such as "train-*"'
        )
    return tuple(map(os.path.abspath, given))


NO_PIPES = "runs no commands: `pipe:` would hand what it reads to a program"
