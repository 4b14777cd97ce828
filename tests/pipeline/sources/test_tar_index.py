"""The index of a tar has the places of its files, whatever format it is in."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.pipeline.sources.files import StoredFile
from penstock.pipeline.sources.shards import Member, ReadAhead, members_of

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT}
FORMATS["pax"] = tarfile.PAX_FORMAT
FILES = {"file": tarfile.REGTYPE, "old": tarfile.AREGTYPE}
OTHERS = {"folder": tarfile.DIRTYPE, "link": tarfile.LNKTYPE, "pipe": tarfile.FIFOTYPE}

names = st.text("ab.é/ß漢", min_size=1, max_size=12) | st.builds(
    lambda folder, name: f"{folder * 20}/{name}.jpg",
    st.sampled_from(["folder", "漢字"]),
    st.sampled_from(["short", "long" * 40]),
)
members = st.tuples(
    names,
    st.binary(max_size=1200),
    st.sampled_from([*FILES.values(), *OTHERS.values()]),
    st.sampled_from([0, 1.5, 1e9 + 0.25]),
)


def written(entries: list[Any], form: int) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Return a tar, and the names and bytes of the regular files in it."""
    content, files = io.BytesIO(), []
    with tarfile.open(fileobj=content, mode="w", format=form) as tar:
        for name, body, kind, changed_s in entries:
            if kind == tarfile.AREGTYPE and name.endswith("/"):
                continue  # a folder to tarfile, which then takes its bytes for headers
            info = tarfile.TarInfo(name)
            info.type, info.mtime = kind, changed_s
            info.size = len(body) if info.isreg() else 0
            try:
                tar.addfile(info, io.BytesIO(body))
            except ValueError:
                continue  # ustar cannot hold such a name
            if info.isreg():
                files.append((name, body))
    return content.getvalue(), files


def found_in(content: bytes) -> list[Member]:
    """Return what is found in a file on this machine, and in one that is far."""

    def read(part: tuple[int, int]) -> bytes:
        return content[slice(*part)]

    index = members_of("a.tar", io.BytesIO(content))
    far = StoredFile(ReadAhead(read, len(content)), len(content))
    assert members_of("a.tar", far) == index
    return index


@pytest.mark.long
@given(st.lists(members, max_size=8), st.sampled_from(sorted(FORMATS)))
def test_the_index_has_the_places_of_all_regular_files(
    chosen: list[Any], form: str
) -> None:
    content, files = written(chosen, FORMATS[form])
    index = found_in(content)
    assert [content[at : at + nbytes] for _, at, nbytes in index] == [
        body for _, body in files
    ]
    assert [name.rstrip("/") for name, _, _ in index] == [
        name.rstrip("/") for name, _ in files
    ]


@pytest.mark.long
@given(st.data())
def test_a_damaged_tar_is_read_or_refused(data: st.DataObject) -> None:
    entries = data.draw(st.lists(members, min_size=1, max_size=4))
    content = bytearray(written(entries, tarfile.PAX_FORMAT)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    damaged_tar = bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        index = found_in(damaged_tar)
    except ps.SpecError:
        return
    assert all(at >= tarfile.BLOCKSIZE and nbytes >= 0 for _, at, nbytes in index)


def test_a_size_that_no_file_has_is_refused() -> None:
    content = bytearray(written([("a.jpg", b"x", tarfile.REGTYPE, 0)], 1)[0])
    content[124:136] = b"\x80" + b"\x7f" * 11
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    with pytest.raises(ps.SpecError, match=r"cannot read 'a\.tar'"):
        found_in(bytes(content))


def test_what_is_no_tar_is_refused() -> None:
    with pytest.raises(ps.SpecError, match=r"'a\.tar'.* are not compressed"):
        found_in(b"not a tar at all")


def test_an_error_of_the_store_is_not_blamed_on_the_tar() -> None:
    def read(_: tuple[int, int]) -> bytes:
        raise ps.BudgetError("too large")

    with pytest.raises(ps.BudgetError, match="^too large$"):
        members_of("a.tar", StoredFile(read, 2000))


def test_an_empty_tar_has_no_files() -> None:
    assert found_in(written([], tarfile.USTAR_FORMAT)[0]) == []
