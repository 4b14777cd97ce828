"""Which members of a tar make a sample, and which are no part of any."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.pipeline.sources.shards import Index, index_of


def indexed(*shards: list[str]) -> Index:
    """Return the index of shards with these members, each 10 bytes long."""
    members = [
        [(name, 512 * (2 * at + 1), 10) for at, name in enumerate(names)]
        for names in shards
    ]
    return index_of(
        (f"{at}.tar", shard_members) for at, shard_members in enumerate(members)
    )


def samples(index: Index) -> list[tuple[Any, ...]]:
    """Return shard, key and fields, with the block each starts in, of all samples."""
    all_samples = []
    for at, key in enumerate(index.keys):
        rows = index.fields[index.firsts[at] : index.firsts[at + 1]].tolist()
        assert all(nbytes == 10 for *_, nbytes in rows)
        fields = {index.names[name]: start // 512 for name, start, _ in rows}
        all_samples.append((int(index.shards[at]), key, fields))
    return all_samples


def test_neighbours_with_one_key_are_one_sample_of_their_shard() -> None:
    rows = samples(indexed(["a/0.jpg", "a/0.cls", "1.JPG"], ["1.cls", "b.x/2.seg.png"]))
    assert rows == [
        (0, "a/0", {"jpg": 1, "cls": 3}),
        (0, "1", {"jpg": 5}),
        (1, "1", {"cls": 1}),
        (1, "b.x/2", {"seg.png": 3}),
    ]


@pytest.mark.parametrize(
    "other", ["README", "a/README", ".hidden", "__meta__", "__meta__/info.json"]
)
def test_what_has_no_field_or_is_about_the_shard_is_skipped(other: str) -> None:
    names = ["0.jpg", other, "0.cls", other]
    assert samples(indexed(names)) == [(0, "0", {"jpg": 1, "cls": 5})]


def test_a_field_twice_in_a_sample_is_an_error_and_in_two_samples_is_none() -> None:
    assert len(indexed(["0.jpg", "1.jpg", "0.jpg"]).keys) == 3
    with pytest.raises(ps.SpecError, match="'jpg' of sample '0' twice in '0.tar'"):
        indexed(["0.jpg", "0.JPG"])


def test_an_index_of_some_fields_has_all_samples_and_those_fields_alone() -> None:
    whole = indexed(["0.jpg", "0.cls", "1.jpg", "2.cls", "2.jpg"])
    assert samples(whole.only({"cls"})) == [
        (0, "0", {"cls": 3}),
        (0, "1", {}),
        (0, "2", {"cls": 7}),
    ]
    assert samples(whole.only({"cls", "jpg"})) == samples(whole)
