"""Class folders in a store are read like those on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import penstock as ps

CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write twelve images in three classes, one of them nested, and other files."""
    for number in range(12):
        name = CLASSES[number % 3]
        path = tmp_path / "photos" / name / ("deep" if number > 9 else "") / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".JPG" if number % 2 else ".png").write_bytes(bytes([number]))
    (tmp_path / "photos" / "loose.jpg").write_bytes(b"of no class")
    (tmp_path / "photos" / "ant" / "notes.txt").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture
def store(folder: Path) -> Iterator[str]:
    """Return the same folder in fsspec's memory."""
    files = fsspec.filesystem("memory")
    for path in folder.rglob("*.*"):
        files.pipe(f"/train/{path.relative_to(folder)}", path.read_bytes())
    yield "memory://train"
    files.rm("/train", recursive=True)


def samples(pipe: ps.Pipeline) -> list[tuple[bytes, int]]:
    with pipe.batch(5, collate_fn=list) as batches:
        return [sample for batch in batches for sample in batch]


def test_a_store_has_the_samples_of_the_disk(folder: Path, store: str) -> None:
    expected = samples(ps.Pipeline.from_folder(folder))
    assert len(expected) == 12
    assert sorted(expected) == [(bytes([n]), n % 3) for n in range(12)]
    assert samples(ps.Pipeline.from_folder(store)) == expected
    assert samples(ps.Pipeline.from_folder(f"file://{folder}")) == expected
    assert samples(ps.Pipeline.from_folder(store, executor="thread")) == expected


def test_a_remote_folder_prints_and_is_identified_as_a_folder(
    folder: Path, store: str
) -> None:
    pipe = ps.Pipeline.from_folder(store)
    assert str(pipe) == "Pipeline.from_folder('memory://train')"
    source: Any = pipe._stages[0]  # noqa: SLF001
    assert source.kind == "Folder"
    prints = source.dataset.sample_fingerprints()
    assert prints.shape == (12, 2)
    assert len(np.unique(prints, axis=0)) == 12


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nothing", "could not list 'memory://nothing': FileNotFoundError"),
        ("memory://train/ant", "no image in class folders below .* and 4 in none"),
        ("s4://bucket/train", "cannot read 's4://bucket/train'"),
        ("/no/such/folder", "does not exist"),
    ],
)
def test_a_place_without_class_folders_is_refused(
    store: str, url: str, message: str
) -> None:
    del store
    with pytest.raises(ps.SpecError, match=message):
        ps.Pipeline.from_folder(url)


def test_a_file_system_without_coroutines_is_not_awaited(store: str) -> None:
    with pytest.raises(ps.SpecError, match="read in an event loop"):
        ps.Pipeline.from_folder(store, executor="async")
