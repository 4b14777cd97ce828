"""The files that a source reads, given as paths or as a pattern."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from ...errors import SpecError, check
from .folder import URL

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]
"""Files one by one, or one pattern that matches them."""
BRACES = re.compile(r"[{](?:(\d+)[.][.](\d+)|([^{}]*,[^{}]*))[}]")
"""Numbers from one to another, or alternatives."""
MAX_FILES = 1_000_000
"""More names than this in braces are taken for a mistake."""


def files_here(source: str, paths: Paths) -> tuple[str, ...]:
    """Return the files at `paths`; those of a pattern are sorted.

    Args:
        source: name of the method that the user called, for an error.
        paths: the paths or the pattern that the user gave.

    Raises:
        SpecError: there is no file, or one is not on this machine.
    """
    given = listed(source, paths)
    for each in given:
        check(
            not URL.match(each),
            f"`{source}` reads files of this machine, got {each!r}; mount the store, or"
            " copy its shards to a disk first",
        )
    if isinstance(paths, (str, os.PathLike)):
        given = [path for each in given for path in matches(each)]
    absent = next((each for each in given if not os.path.exists(each)), None)
    if absent is not None or not given:
        raise SpecError(
            f"`{source}` found no file {absent or paths!r}; give paths, or one pattern"
            ' such as "train-*" or "train-{000..099}"'
        )
    return tuple(map(os.path.abspath, given))


def first_of(paths: Sequence[str]) -> str:
    """Return the first path, with dots if there are more, as pipelines print it."""
    return f"{paths[0]}, ..." if len(paths) > 1 else paths[0]


def matches(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted; a file's own name first."""
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))


def listed(source: str, paths: Paths) -> list[str]:
    """Return the paths, URLs or patterns that were given, without braces.

    Raises:
        SpecError: one is a command, or the braces stand for too many.
    """
    alone = isinstance(paths, (str, os.PathLike))
    found: list[str] = []
    for given in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        each = os.fspath(given)
        check(not each.startswith("pipe:"), f"`{source}` {NO_PIPES}, got {each!r}")
        found += islice(expanded(each), MAX_FILES + 1 - len(found))
        check(
            len(found) <= MAX_FILES,
            f"`{source}` got braces for more than {MAX_FILES} files: {each!r}; see that"
            " the numbers in them are right",
        )
    check(
        found or alone,
        f"`{source}` needs at least one file, got {paths!r}"
        "; check the listing or the pattern that made it",
    )
    return found


def expanded(path: str) -> Iterator[str]:
    """Yield the paths that braces stand for, as a shell does; a file's own name first.

    "a-{08..10}.tar" is a-08.tar, a-09.tar and a-10.tar, and "{train,val}.tar" two.
    """
    found = None if os.path.exists(path) else BRACES.search(path)
    if found is None:
        yield path
        return
    for choice in choices(found):
        yield from expanded(path[: found.start()] + choice + path[found.end() :])


def choices(found: re.Match[str]) -> Iterator[str]:
    """Yield what a pair of braces stands for."""
    first, last, named = found.groups()
    if named is not None:
        yield from named.split(",")
        return
    padded = any(len(each) > 1 and each[0] == "0" for each in (first, last))
    width = max(len(first), len(last)) if padded else 0
    begin, end = int(first), int(last)
    step = 1 if begin <= end else -1
    for number in range(begin, end + step, step):
        yield f"{number:0{width}}"


NO_PIPES = "runs no commands: `pipe:` would hand what it reads to a program"
