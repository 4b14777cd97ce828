"""Samples of tars on this machine that are asked for together are read together."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.sources import shards as tar_shards
from penstock.pipeline.sources.shards import OpenTar, find_shards

SAMPLES = 12
"""In two shards of equal length."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard * SAMPLES // 2, (shard + 1) * SAMPLES // 2):
                info = tarfile.TarInfo(f"{number:02d}.bin")
                info.size = 1 + 100 * number
                tar.addfile(info, io.BytesIO(bytes([number]) * info.size))
    return str(folder / "*.tar")


def opened(shards: str) -> Any:
    """Return a new source: it keeps the shards open as long as it lives."""
    return find_shards(shards, ("bin",), None, "auto")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Note each read: the shard's name, the first byte and the byte after it."""
    parts: list[tuple[str, int, int]] = []
    read = OpenTar.read

    def noting(tar: OpenTar, begin: int, end: int) -> bytes:
        parts.append((Path(tar.path).name, begin, end))
        return read(tar, begin, end)

    monkeypatch.setattr(OpenTar, "read", noting)
    return parts


def test_samples_asked_for_together_are_those_asked_for_alone(shards: str) -> None:
    # Not drawn by Hypothesis, which keeps its last example, and so the open shards.
    source, dice = opened(shards), random.Random(0)
    for length in range(100):
        indices = dice.choices(range(SAMPLES), k=length // 5)
        assert source.__getitems__(indices) == [source[index] for index in indices]


def test_what_lies_side_by_side_is_one_read_a_shard(
    shards: str, reads: list[Any]
) -> None:
    opened(shards).__getitems__([3, 1, 2, 7, 6, 2])
    assert [name for name, *_ in reads] == ["0.tar", "1.tar"]


def test_a_gap_ends_a_read(shards: str, reads: list[Any]) -> None:
    opened(shards).__getitems__([0, 1, 3, 5])
    assert len(reads) == 3


def test_a_read_has_a_limit_but_for_a_sample_that_is_longer(
    shards: str, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(shards)
    source.__getitems__([3, 4])
    ((_, begin, end),) = reads
    for limit, count in [(end - begin, 1), (end - begin - 1, 2), (1, 2)]:
        monkeypatch.setattr(tar_shards, "RUN_BYTES", limit)
        reads.clear()
        source.__getitems__([3, 4])
        assert len(reads) == count


@pytest.mark.parametrize("index", [-1, SAMPLES])
def test_there_is_no_sample_beyond_either_end(shards: str, index: int) -> None:
    source = opened(shards)
    with pytest.raises(IndexError, match=f"sample {index} of {SAMPLES}"):
        source[index]
    with pytest.raises(IndexError):
        source.__getitems__([index])
