"""Sources: a folder of classes, and the difference between map-style and iterable."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from penstock.errors import SpecError
from penstock.pipeline.sources import folder as folder_module
from penstock.pipeline.sources.folder import Folder, Names, list_images
from penstock.pipeline.sources.source import digest, is_iterable


def touch(path: Path, content: bytes = b"") -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_labels_number_the_class_folders_in_sorted_order(tmp_path: Path) -> None:
    for name in ("dog/2.jpg", "dog/1.PNG", "cat/x/deep.webp", "cat/a.jpeg"):
        touch(tmp_path / name, name.encode())
    touch(tmp_path / "dog" / "notes.txt")
    touch(tmp_path / "loose.jpg")
    folder = Folder.scan(tmp_path)
    assert folder.classes == ("cat", "dog")
    assert len(folder) == 4
    assert [folder[at] for at in range(4)] == [
        (b"cat/a.jpeg", 0),
        (b"cat/x/deep.webp", 0),
        (b"dog/1.PNG", 1),
        (b"dog/2.jpg", 1),
    ]


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/../{name}", ".", "./", "../{name}"])
def test_a_folder_is_the_same_however_it_is_given(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.jpg", "b/deep/2.jpg"):
        touch(tmp_path / name, name.encode())
    monkeypatch.chdir(tmp_path)
    folder = Folder.scan(form.format(tmp_path, name=tmp_path.name))
    assert [folder[at] for at in range(2)] == [(b"a/1.jpg", 0), (b"b/deep/2.jpg", 1)]
    assert list(folder.names) == ["a/1.jpg", "b/deep/2.jpg"]
    # A state that was saved long ago knows a folder by this.
    assert folder.identity() == digest(["a/1.jpg", "b/deep/2.jpg"])


def test_a_folder_may_be_what_a_listing_of_its_parent_returned(tmp_path: Path) -> None:
    touch(tmp_path / "train" / "a" / "1.jpg", b"1")
    (entry,) = os.scandir(tmp_path)
    assert Folder.scan(entry)[0] == (b"1", 0)


def test_a_file_that_is_longer_than_it_says_is_read_whole() -> None:
    read = folder_module.native_read()
    assert read(
        ["/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"]
    ) == [
        None,
        None,
    ]


def test_a_class_folder_without_images_is_not_a_class(tmp_path: Path) -> None:
    touch(tmp_path / "a" / "readme.md")
    touch(tmp_path / "b" / "1.jpg")
    folder = Folder.scan(str(tmp_path))
    assert (folder.classes, folder[0]) == (("b",), (b"", 0))


def test_a_folder_travels_to_other_processes(tmp_path: Path) -> None:
    touch(tmp_path / "b" / "1.jpg")
    folder = Folder.scan(tmp_path)
    assert pickle.loads(pickle.dumps(folder)) == folder  # noqa: S301 our own
    assert repr(folder) == f"<Folder {str(tmp_path)!r}: 1 images in 1 classes>"


def none_read(paths: list[str]) -> list[None]:
    return [None] * len(paths)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_files_that_are_read_together_are_those_that_are_read_alone(
    native: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native:
        monkeypatch.setattr(folder_module, "native_read", lambda: none_read)
    rng = np.random.default_rng(0)
    for at in range(40):  # some are empty, and one name is no text
        name = os.fsdecode(b"\xff.jpg") if at == 7 else f"{at}.jpg"
        content = rng.bytes(int(rng.integers(300_000)) * (at % 9 > 0))
        touch(tmp_path / "abc"[at % 3] / name, content)
    folder = Folder.scan(tmp_path)
    order = [*rng.permutation(40).tolist(), 3, 3, -1]
    assert folder.__getitems__(order) == [folder[index] for index in order]
    with pytest.raises(IndexError):
        folder.__getitems__([0, 40])


def test_a_file_that_has_gone_is_named(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "a/3.jpg"):
        touch(tmp_path / name, b"1")
    folder = Folder.scan(tmp_path)
    (tmp_path / "a" / "2.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"2\.jpg"):
        folder.__getitems__([0, 1, 2])


def test_names_take_one_piece_of_memory_for_each_hundred_thousand() -> None:
    names = [f"/data/train/n{at % 1000:08}/n{at:016}.JPEG" for at in range(100_000)]
    stored_names = Names.of(names)
    assert list(stored_names) == names
    assert (stored_names[-1], stored_names[-len(stored_names)]) == (names[-1], names[0])
    assert stored_names[np.uint8(200)] == names[200]
    assert list(Names.of([])) == []
    assert len(pickle.dumps(stored_names)) < 60 * len(stored_names)


def test_images_are_listed_sorted_whatever_their_suffix_looks_like(
    tmp_path: Path,
) -> None:
    for name in ("b.JPG", "a.tiff", "c/d.gif", "e.jpg.part", "f"):
        touch(tmp_path / name)
    images = [
        Path(path).relative_to(tmp_path.name).as_posix()
        for path in list_images(tmp_path)
    ]
    assert images == ["a.tiff", "b.JPG", "c/d.gif"]


@pytest.mark.parametrize(
    ("files", "root", "told", "cure"),
    [
        ([], "missing", "does not exist", "give the folder"),
        (["file"], "file", "is a file", "one sub-folder of images per class"),
        (["there/"], "there", "it is empty", "one sub-folder per class"),
        (["there/1.jpg"], "there", "no class folders", "move them into one sub-folder"),
        (["there/a/x.txt"], "there", "1 sub-folders (a", "ending in .bmp"),
    ],
)
def test_a_folder_without_images_is_refused_by_name_rule_and_cure(
    files: list[str], root: str, told: str, cure: str, tmp_path: Path
) -> None:
    for name in files:
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            touch(tmp_path / name)
    with pytest.raises(SpecError, match=re.escape(told)) as caught:
        Folder.scan(tmp_path / root)
    assert repr(str(tmp_path / root)) in str(caught.value)
    assert "`from_folder`" in str(caught.value)
    assert cure in str(caught.value)


class Numbers(IterableDataset[int]):
    """An iterable dataset that could be indexed as well."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 3


class Unsized(Dataset[int]):
    """Has neither a length nor an iterator."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "iterable"),
    [
        ([1, 2], False),
        (np.zeros(3), False),
        (range(3), False),
        (TensorDataset(), False),
        (Numbers(), True),
        ({1, 2}, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dataset_with_length_and_index_is_map_style(
    dataset: Any,
    iterable: bool,  # noqa: FBT001
) -> None:
    assert is_iterable(dataset) is iterable


@pytest.mark.parametrize(
    "dataset", [5, None, object()], ids=["a number", "None", "an object"]
)
def test_an_object_that_is_no_dataset_is_refused_by_type_rule_and_cure(
    dataset: Any,
) -> None:
    with pytest.raises(SpecError, match="needs a dataset with __len__") as caught:
        is_iterable(dataset)
    assert type(dataset).__name__ in str(caught.value)
    assert "give an object of a torch Dataset, a list or an array" in str(caught.value)


def test_a_dataset_with_an_index_but_no_length_is_refused() -> None:
    with pytest.raises(SpecError, match="got Unsized"):
        is_iterable(Unsized())
