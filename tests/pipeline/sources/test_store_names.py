"""A folder of a store is found under the name that the user gives it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

import penstock as ps
from penstock.pipeline.sources import files
from penstock.pipeline.sources.folder import Folder


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("memory://photos/train", "memory://photos/train"),
        (PurePosixPath("memory://photos/train"), "memory://photos/train"),
        ("memory://photos/2024:/train", "memory://photos/2024:/train"),
    ],
    ids=["a URL", "a path, which drops a slash", "a name with a colon"],
)
def test_a_folder_of_a_store_is_asked_for_by_its_url(
    given: Any, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[str] = []

    def find_folder(url: str, *_: object) -> Folder:
        urls.append(url)
        return Folder(url, ("a",), ("a.jpg",), (0,))

    monkeypatch.setattr(files, "find_folder", find_folder)
    ps.Pipeline.from_folder(given)
    assert urls == [asked]
