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


@pytest.mark.parametrize(
    ("urls", "rule"),
    [
        ("memory://nothing/*.tar", "no file that matches"),
        (["memory://a/0.tar", "http://b/1.tar"], "of one file system"),
        ("nosuch://a/0.tar", "cannot read"),
    ],
)
@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_an_error_about_a_store_names_no_source_that_the_user_did_not_call(
    urls: Any, rule: str, kind: str
) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    make = getattr(ps.Pipeline, f"from_{kind}")
    with pytest.raises(ps.SpecError, match=rule) as info:
        make(urls)
    assert "from_files" not in str(info.value)
