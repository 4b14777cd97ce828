"""Files with a cache: what has changed is read again, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec.asyn
import pytest

import penstock as ps
from penstock.cache.cache import COMPARED
from support.cached_data import EXECUTORS, statistics
from support.http_store import HttpStore, served

pytestmark = pytest.mark.usefixtures("own_runtime_folder")

INLINE = EXECUTORS["inline"]
CLASSES = ("ant", "bee", "cat")
EACH = 10
LENGTH = EACH * len(CLASSES)

WEB = {f"{at:03}.bin": bytes([at]) * (at + 1) for at in range(40)}


@pytest.fixture(scope="module", autouse=True)
def own_thread_of_fsspec() -> None:
    """Start fsspec's loop for reads outside ours; it lasts as long as the process."""
    fsspec.asyn.get_loop()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of files that nobody decodes."""
    for name in CLASSES:
        add_class(tmp_path / "photos", name)
    return tmp_path / "photos"


@pytest.fixture
def web() -> Iterator[HttpStore]:
    with served(WEB) as store:
        yield store


def add_class(photos: Path, name: str) -> None:
    (photos / name).mkdir(parents=True)
    for at in range(EACH):
        (photos / name / f"{at:02}.jpg").write_bytes(f"{name} {at}".encode())


def tagged(sample: tuple[bytes, int]) -> tuple[str, int]:
    content, label = sample
    return content.decode(), label


def epoch(photos: Path) -> tuple[dict[str, int], int]:
    """Return the labels by content, and how many samples had to be computed.

    The samples that each run computes once more for comparison do not count.
    """
    source = ps.Pipeline.from_folder(photos, **INLINE).map(tagged, **INLINE)
    with source.cache(disk=photos.parent / "disk").batch(8) as pipe:
        labels: dict[str, int] = {}
        for contents, numbers in pipe:
            labels.update(zip(contents, numbers.tolist(), strict=True))
        counts = statistics(pipe)
    again = counts.hits + counts.misses - len(labels)
    assert again in (0, COMPARED)
    return labels, counts.misses - again


def test_an_unchanged_folder_is_not_read_again(photos: Path) -> None:
    first, computed = epoch(photos)
    assert computed == LENGTH
    assert epoch(photos) == (first, 0)


def test_a_new_file_leaves_the_others_cached(photos: Path) -> None:
    before, _ = epoch(photos)
    (photos / "bee" / "00b.jpg").write_bytes(b"bee new")  # shifts all files after it
    assert epoch(photos) == ({**before, "bee new": 1}, 1)


def test_a_removed_file_leaves_the_others_cached(photos: Path) -> None:
    before, _ = epoch(photos)
    (photos / "ant" / "00.jpg").unlink()
    del before["ant 0"]
    assert epoch(photos) == (before, 0)


def test_only_a_changed_file_is_read_again(photos: Path) -> None:
    before, _ = epoch(photos)
    changed = photos / "bee" / "03.jpg"
    status = changed.stat()
    changed.write_bytes(b"bee X")  # with the same length
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    del before["bee 3"]
    assert epoch(photos) == ({**before, "bee X": 1}, 1)


def test_a_new_class_in_front_gives_all_files_their_new_labels(
    photos: Path,
) -> None:
    epoch(photos)
    add_class(photos, "aardvark")
    labels, _ = epoch(photos)
    assert len(labels) == LENGTH + EACH
    names = ("aardvark", *CLASSES)
    assert all(names[label] == text.split()[0] for text, label in labels.items())


def test_a_new_class_at_the_end_leaves_the_others_cached(
    photos: Path,
) -> None:
    before, _ = epoch(photos)
    add_class(photos, "dog")
    labels, computed = epoch(photos)
    assert computed == EACH
    assert {text: labels[text] for text in before} == before
    assert labels["dog 7"] == 3


def test_a_moved_folder_is_computed_again(photos: Path) -> None:
    before, _ = epoch(photos)
    moved = photos.rename(photos.parent / "moved")
    assert epoch(moved) == (before, len(before))  # another folder may have its place


# From a store


def urls(store: HttpStore) -> list[str]:
    return [f"{store.url}/{name}" for name in WEB]


def executor_of(pipe: ps.Pipeline) -> str:
    return str(pipe.explain().to_dict()["stages"][0]["executor"])


def length_of(content: bytes) -> tuple[int, int]:
    return content[0], len(content)


def test_files_read_in_an_event_loop_are_cached_in_the_loop(web: HttpStore) -> None:
    pipe = ps.Pipeline.from_files(urls(web)).cache(ram="1MB").batch(8)
    with pipe:
        first = [content for batch in pipe for content in batch]
        assert first == [*WEB.values()]
        assert web.most > 4  # many at once, cache or none
        assert executor_of(pipe) == "async"
        web.files = {}  # a request would now find no file
        assert [content for batch in pipe for content in batch] == first
        counts = statistics(pipe)
    assert counts.misses == len(WEB)
    assert counts.hits >= len(WEB)


def test_threads_read_if_a_plain_function_comes_before_the_cache(
    web: HttpStore,
) -> None:
    source = ps.Pipeline.from_files(urls(web), num_parallel_workers=8).map(length_of)
    with source.cache(ram="1MB").batch(8) as pipe:
        first = [pair for batch in pipe for pair in zip(*batch, strict=True)]
        assert [(int(a), int(b)) for a, b in first] == [
            (at, at + 1) for at in range(40)
        ]
        assert executor_of(pipe) == "thread"
        assert web.most > 1
        web.files = {}
        again = [pair for batch in pipe for pair in zip(*batch, strict=True)]
        assert again == first
        assert statistics(pipe).misses == len(WEB)


def test_labels_of_files_are_part_of_the_record(web: HttpStore, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    for shift in (0, 1):
        labels = [at + shift for at in range(40)]
        pipe = ps.Pipeline.from_files(urls(web), labels).cache(disk=disk).batch(8)
        with pipe:
            labels_read = [number for _, numbers in pipe for number in numbers.tolist()]
        assert labels_read == labels
