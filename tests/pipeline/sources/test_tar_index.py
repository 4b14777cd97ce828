"""The index of a tar has the places that tarfile finds, but is faster."""

from __future__ import annotations

import io
import tarfile
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.pipeline.sources.tar_shards import (
    Member,
    any_members,
    members_of,
    usual_members,
)

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT}
FORMATS["pax"] = tarfile.PAX_FORMAT
KINDS = {"file": tarfile.REGTYPE, "old": tarfile.AREGTYPE, "folder": tarfile.DIRTYPE}
LINKS = {"link": tarfile.LNKTYPE, "symbol": tarfile.SYMTYPE, "pipe": tarfile.FIFOTYPE}

names = st.text("ab.é/ß漢", min_size=1, max_size=12) | st.builds(
    lambda folder, name: f"{folder * 20}/{name}.jpg",
    st.sampled_from(["folder", "漢字"]),
    st.sampled_from(["short", "long" * 40]),
)
members = st.tuples(
    names,
    st.binary(max_size=1200),
    st.sampled_from([*KINDS.values(), *LINKS.values()]),
    st.sampled_from([0, 1.5, 1e9 + 0.25]),
)


def written(chosen: list[Any], form: int) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as tar:
        for name, body, kind, changed_s in chosen:
            info = tarfile.TarInfo(name)
            info.type, info.mtime = kind, changed_s
            info.size = len(body) if info.isreg() else 0
            try:
                tar.addfile(info, io.BytesIO(body))
            except ValueError:
                continue  # ustar cannot hold such a name
    return content.getvalue()


def read_from(content: bytes, at: int, nbytes: int) -> bytes:
    return content[at : at + nbytes]


def found_in(content: bytes) -> list[Member]:
    reopen = partial(io.BytesIO, content)
    return members_of("a.tar", partial(read_from, content), reopen)


@pytest.mark.long
@given(st.lists(members, max_size=8), st.sampled_from(sorted(FORMATS)))
def test_the_index_has_the_places_that_tarfile_finds(
    chosen: list[Any], form: str
) -> None:
    content = written(chosen, FORMATS[form])
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        expected = [*any_members(tar)]
    assert found_in(content) == expected
    usual = {"file", "folder"} if any(n.endswith("/") for n, *_ in chosen) else KINDS
    if expected and {each[2] for each in chosen} <= {KINDS[name] for name in usual}:
        assert [*usual_members(partial(read_from, content))] == expected


@pytest.mark.long
@given(st.data())
def test_a_damaged_tar_is_read_as_far_as_tarfile_reads_it(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(members, min_size=1, max_size=4))
    content = bytearray(written(chosen, tarfile.PAX_FORMAT))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(1, len(content)))])
    expected: list[Member] | None
    try:
        with tarfile.open(fileobj=io.BytesIO(damaged), mode="r:") as tar:
            expected = [*any_members(tar)]
    except (tarfile.TarError, ValueError):
        expected = None
    try:
        found = found_in(damaged)
    except (ps.SpecError, ValueError):
        assert expected is None
    else:
        assert found == expected


@pytest.mark.parametrize("form", FORMATS)
def test_tars_from_webdataset_and_tar_programs_need_no_tarfile(form: str) -> None:
    chosen = [(f"train/{at:05}.jpg", b"x" * at, tarfile.REGTYPE, 1.5) for at in (0, 9)]
    content = written(chosen, FORMATS[form])
    read = partial(read_from, content)
    assert [name for name, _, _ in usual_members(read)] == [each[0] for each in chosen]
    with pytest.raises(tarfile.HeaderError):
        list(usual_members(partial(read_from, b"not a tar at all")))


def test_an_empty_name_after_a_prefix_is_not_a_folder() -> None:
    """Ustar splits a long name at a slash, and the part after it may be empty."""
    for form in ("ustar", "pax"):
        content = written([("b" * 101 + "/", b"x", tarfile.AREGTYPE, 0)], FORMATS[form])
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            expected = [*any_members(tar)]
        assert found_in(content) == expected
    empty = written([], tarfile.USTAR_FORMAT)
    assert found_in(empty) == []
