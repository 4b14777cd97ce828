"""A folder of a store is found under the name that the user gives it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import fsspec
import pytest

import penstock as ps


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("memory://photos/train", "/photos/train"),
        (PurePosixPath("memory://photos/train"), "/photos/train"),
        ("memory://photos/2024:/train", "/photos/2024:/train"),
    ],
    ids=["a URL", "a path, which drops a slash", "a name with a colon"],
)
def test_a_folder_of_a_store_is_read_by_its_url(given: Any, folder: str) -> None:
    store = fsspec.filesystem("memory")
    store.pipe(f"{folder}/cats/1.jpg", b"a cat")
    try:
        with ps.Pipeline.from_folder(given).batch(1, collate_fn=list) as pipe:
            assert list(pipe) == [[(b"a cat", 0)]]
    finally:
        store.rm("/photos", recursive=True)
