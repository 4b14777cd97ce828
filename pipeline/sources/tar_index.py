"""Where each field of each sample lies in WebDataset's tar files.

As in the webdataset package, consecutive files whose names are equal up to the first
dot form one sample. Only headers are read. Those of usual tars are taken apart here, as
that takes a tenth of tarfile's time; tarfile reads all others.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from zlib import adler32

import numpy as np
from numpy.typing import NDArray

from ...errors import SpecError, check

NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")
"""A key, and the name of a field."""
NOTES = re.compile(r"__[^/]*__(/|$)")
"""Files about the shard itself, which webdataset skips."""
BLOCK = tarfile.BLOCKSIZE
ADLER = 65521
"""Adler-32's lower half is the sum of all bytes modulo this, plus one (RFC 1950)."""
HARMLESS = frozenset(
    ("mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment")
)
"""What a pax header may say that is neither the name of a file nor its size."""

ReadAt = Callable[[int, int], bytes]
"""Returns a number of bytes from a place on; fewer at the end of the file."""
Member = tuple[str, int, int]
"""Name, first byte and bytes of a file in a tar."""


class UnusualError(Exception):
    """A header that is left to tarfile, which also knows what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Index:
    """The places of the fields of all samples."""

    names: tuple[str, ...]
    """The name of each field, by number."""
    keys: list[str]
    shards: NDArray[np.int32]
    """The number of each sample's file, `[n]`."""
    firsts: NDArray[np.int64]
    """The place in `fields` where each sample's fields begin, `[n + 1]`."""
    fields: NDArray[np.int64]
    """Number of the name, first byte and bytes of each field, `[f, 3]`."""

    def only(self, names: set[str]) -> Index:
        """Return the same samples with these fields alone."""
        wanted = [number for number, name in enumerate(self.names) if name in names]
        kept = np.isin(self.fields[:, 0], wanted)
        before = np.concatenate(([0], np.cumsum(kept)))
        fields = self.fields[kept]
        return Index(self.names, self.keys, self.shards, before[self.firsts], fields)


def indexed(shards: Iterable[tuple[str, list[Member]]]) -> Index:
    """Return the index of shards, given the path and the members of each.

    Raises:
        SpecError: a field comes twice in one sample.
    """
    names: dict[str, int] = {}
    samples: list[tuple[str, int, int]] = []
    fields: list[tuple[int, int, int]] = []
    for shard, (path, members) in enumerate(shards):
        last, seen = None, set[str]()
        for member, start, nbytes in members:
            match = NAME.fullmatch(member)
            if match is None or NOTES.match(member):
                continue
            key, name = match[1], match[2].lower()
            if key != last:
                samples.append((key, shard, len(fields)))
                last, seen = key, set()
            check(
                name not in seen,
                f"`from_webdataset` found the field {name!r} of sample {key!r} twice in"
                f" {path!r}, and cannot tell which one is meant; write the shard"
                " again with one of them, or with different names",
            )
            seen.add(name)
            fields.append((names.setdefault(name, len(names)), start, nbytes))
    return Index(
        tuple(names),
        [key for key, _, _ in samples],
        np.array([shard for _, shard, _ in samples], np.int32),
        np.array([*(first for _, _, first in samples), len(fields)], np.int64),
        np.array(fields, np.int64).reshape(-1, 3),
    )


def members_of(path: str, read: ReadAt, reopen: Callable[[], Any]) -> list[Member]:
    """Return the regular files in a tar.

    Args:
        path: for an error.
        read: reads the tar at any place.
        reopen: opens it as a file, if tarfile has to read it.

    Raises:
        SpecError: the file is not a tar file, or is compressed.
    """
    with suppress(UnusualError):
        return [*usual_members(read)]
    try:
        with reopen() as file, tarfile.open(fileobj=file, mode="r:") as tar:
            return [*any_members(tar)]
    except tarfile.TarError as error:
        raise SpecError(
            f"`from_webdataset` cannot read {path!r}: {error}; give tar files that are"
            " not compressed: only these can be read at any place"
        ) from error


def any_members(tar: tarfile.TarFile) -> Iterator[Member]:
    """Yield the regular files as tarfile finds them."""
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps all members
        if member.isreg() and not member.issparse():
            yield member.name, member.offset_data, member.size


def usual_members(read: ReadAt) -> Iterator[Member]:
    """Yield the regular files of a tar as today's programs write them.

    Raises:
        UnusualError: a header says more than a name and a size, or is wrong.
    """
    at, said = 0, dict[str, str]()
    while True:
        header = read(at, BLOCK)
        kind = header[156:157]
        if not kind or not header.strip(b"\0"):
            if len(header) not in (0, BLOCK) or at == 0 or not read(at - 1, 1) or said:
                raise UnusualError
            return
        nbytes, at = size_in(header), at + BLOCK
        if kind in (b"x", b"L") and not said:
            said = long_name(kind, read(at, nbytes))
        elif kind == b"5" or (kind == b"\0" and text(header[:100]).endswith("/")):
            said, nbytes = {}, 0  # a folder
        elif kind in (b"0", b"\0"):
            nbytes = int(said.get("size", nbytes))
            yield said.get("path") or name_in(header), at, nbytes
            said = {}
        else:
            raise UnusualError
        at += -(-nbytes // BLOCK) * BLOCK


def size_in(header: bytes) -> int:
    """Return the size that a header gives, once its checksum is right."""
    try:
        nbytes = int(text(header[124:136]).strip() or "0", 8)
        checksum = int(text(header[148:156]).strip() or "0", 8)
    except ValueError:
        raise UnusualError from None
    found = (adler32(header) & 0xFFFF) - 1 - sum(header[148:156]) + 8 * ord(" ")
    if len(header) != BLOCK or nbytes < 0 or (found - checksum) % ADLER:
        raise UnusualError
    return nbytes


def name_in(header: bytes) -> str:
    """Return the name that a header gives."""
    name, prefix = text(header[:100]), text(header[345:500])
    return f"{prefix}/{name}" if prefix else name


def text(field: bytes) -> str:
    """Return the text in a field that a zero byte may end."""
    return field.split(b"\0", 1)[0].decode(errors="surrogateescape")


def long_name(kind: bytes, body: bytes) -> dict[str, str]:
    """Return the `path` and `size` of the next file, as far as a header gives them."""
    if kind == b"L":
        return {"path": text(body)}
    found = pax_records(body)
    if "path" in found:
        found["path"] = found["path"].rstrip("/")
    return found


def pax_records(body: bytes) -> dict[str, str]:
    """Return the `path` and `size` in a pax header.

    Each record is "length name=value" and a line feed, in UTF-8 (POSIX.1-2001, pax).
    """
    found, at = {}, 0
    try:
        while at < len(body):
            digits = body[at : body.index(b" ", at)]
            record = body[at : at + int(digits)].decode()
            if not digits.isdigit() or not record.endswith("\n"):
                raise UnusualError
            name, value = record.partition(" ")[2].removesuffix("\n").split("=", 1)
            if name == "path" or (name == "size" and value.isdecimal()):
                found[name] = value
            elif name not in HARMLESS:
                raise UnusualError
            at += int(digits)
    except ValueError:  # no number, no "=", or no UTF-8
        raise UnusualError from None
    return found
