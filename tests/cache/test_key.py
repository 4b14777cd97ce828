"""Only the same sample of the same data and code finds a record again."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cache import fingerprint as key
from penstock.cache.fingerprint import (
    Fingerprint,
    file_fingerprints,
    fingerprint,
)
from support.cache_things import Compose, Scale, Squares, Stamped, even


class Files:
    """A dataset that identifies each of its samples."""

    def __init__(self, told: Any, length: int = 3) -> None:
        self.told = told
        self.length = length
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.length

    def sample_fingerprints(self) -> Any:
        return self.told


class MoreFiles(Files):
    pass


def told(*rows: int) -> np.ndarray[Any, Any]:
    return np.array([[row, 0] for row in rows], np.uint64)


def keys(
    dataset: Any, *functions: Any, version: str | int | None = None
) -> list[bytes]:
    identity = fingerprint(
        dataset, [("function", function) for function in functions], version
    )
    assert identity.private_because is None
    return [identity.key(index, None) for index in range(3)]


def test_equal_data_and_code_have_equal_keys() -> None:
    assert keys([1, 2, 3], even, Scale(2)) == keys([1, 2, 3], even, Scale(2))
    assert keys(Files(told(1, 2, 3))) == keys(Files(told(1, 2, 3)))


def test_data_code_order_and_version_make_other_keys() -> None:
    variants = [
        keys([1, 2, 3]),
        keys([1, 2, 4]),
        keys((1, 2, 3)),
        keys(np.array([1, 2, 3])),
        keys([1, 2, 3], even),
        keys([1, 2, 3], even, Scale(2)),
        keys([1, 2, 3], Scale(2), even),
        keys([1, 2, 3], even, Scale(3)),
        keys([1, 2, 3], version=1),
        keys([1, 2, 3], version="1"),
        keys(Squares(3, abs)),
        keys(Squares(4, abs)),
        keys(Squares(3, Compose([abs]))),
        keys(Stamped("a")),
        keys(Stamped("b")),
    ]
    assert len({key for variant in variants for key in variant}) == 3 * len(variants)


def test_a_functions_name_in_the_pipeline_is_not_part_of_the_key() -> None:
    digests = [fingerprint([1], [(name, even)]).digest for name in ("a", "b")]
    assert digests[0] == digests[1]


def test_keys_differ_for_all_samples_and_sizes() -> None:
    identity = fingerprint([1], [])
    sizes = (None, 0, 128, 224)
    all_keys = {identity.key(index, size) for index in range(25_000) for size in sizes}
    assert len(all_keys) == 100_000
    assert {len(key) for key in all_keys} == {16}


def test_keys_of_one_fingerprint_and_size_share_their_first_bytes() -> None:
    for samples in (None, told(*range(100))):
        identity = Fingerprint(bytes(16), samples=samples)
        namespace = identity.namespace(224)
        assert {identity.key(index, 224)[:8] for index in range(100)} == {namespace}
        assert len(namespace) == 8
        assert identity.namespace(None) != namespace


def test_keys_are_the_same_after_pickling() -> None:
    for samples in (None, told(1, 2)):
        identity = Fingerprint(bytes(16), samples=samples)
        again = pickle.loads(pickle.dumps(identity))  # noqa: S301 - our own
        assert again.key(1, 224) == identity.key(1, 224)
        assert identity.key(np.int64(1), None) == identity.key(1, None)  # type: ignore[arg-type]


def test_a_changed_sample_leaves_the_keys_of_the_others() -> None:
    before, after = keys(Files(told(1, 2, 3))), keys(Files(told(1, 9, 3)))
    assert [x == y for x, y in zip(before, after, strict=True)] == [True, False, True]
    longer = Files(told(1, 2, 3, 4), 4)
    assert keys(longer) == before
    assert set(keys(MoreFiles(told(1, 2, 3)))).isdisjoint(before)


@pytest.mark.parametrize(
    "wrong", [told(1, 2), np.zeros((3, 2)), np.zeros(3, np.uint64), [[1, 2]] * 3]
)
def test_a_dataset_identifies_samples_by_one_row_each(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"of Files must be uint64 \[3, 2\], .* got"):
        fingerprint(Files(wrong), [])


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_an_index_without_a_sample_has_no_key(index: int) -> None:
    identity = Fingerprint(bytes(16), samples=told(1, 2))
    with pytest.raises(IndexError, match=f"there are 2 samples, .* number {index}"):
        identity.key(index, None)


def test_data_that_cannot_be_digested_belongs_to_this_run_alone() -> None:
    dataset = Compose([threading.Lock()])
    identities = [fingerprint(dataset, []) for _ in range(2)]
    assert identities[0].private_because == "dataset.transforms[0] (lock)"
    assert identities[0].digest != identities[1].digest
    assert {len(identity.digest) for identity in identities} == {16}

    generator = (x for x in "ab")
    identities = [fingerprint([1], [("decode", lambda x: (x, generator))])]
    assert (
        identities[0].private_because == "decode.__closure__['generator'] (generator)"
    )


def test_files_are_identified_by_path_size_time_and_label(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b", "missing")]
    for path in paths[:2]:
        Path(path).write_bytes(b"1")
        os.utime(path, ns=(1, 1))
    before = file_fingerprints(paths)
    assert (before.dtype, before.shape) == (np.uint64, (3, 2))
    assert len({row.tobytes() for row in before}) == 3
    assert np.array_equal(file_fingerprints(paths), before)

    def changed() -> list[bool]:
        return [*(file_fingerprints(paths) != before).all(axis=1)]

    os.utime(paths[0], ns=(1, 2))
    assert changed() == [True, False, False]
    os.utime(paths[0], ns=(1, 1))
    assert changed() == [False, False, False]
    Path(paths[1]).write_bytes(b"12")
    os.utime(paths[1], ns=(1, 1))
    Path(paths[2]).write_bytes(b"")
    assert changed() == [False, True, True]
    labels = [
        file_fingerprints(paths, labels=classes) for classes in ([0, 1, 2], [0, 2, 2])
    ]
    assert [*(labels[0] != labels[1]).all(axis=1)] == [False, True, False]


def test_folders_that_look_alike_are_told_apart_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(b"1")
        os.utime(tmp_path / name / "a", (2e9, 2e9))
    fingerprints = [
        file_fingerprints([str(tmp_path / name / "a")]) for name in ["train", "val"]
    ]
    assert (fingerprints[0] != fingerprints[1]).all()
    monkeypatch.chdir(tmp_path / "val")
    assert np.array_equal(file_fingerprints(["a"]), fingerprints[1])
    (tmp_path / "now").symlink_to("train")
    assert np.array_equal(file_fingerprints([str(tmp_path / "now/a")]), fingerprints[0])
    (tmp_path / "now").unlink()
    (tmp_path / "now").symlink_to("val")
    assert np.array_equal(file_fingerprints([str(tmp_path / "now/a")]), fingerprints[1])


def test_a_link_to_another_target_is_another_file(tmp_path: Path) -> None:
    fingerprints = []
    for name in ("train", "val"):
        (tmp_path / name).write_bytes(b"1")
        os.utime(tmp_path / name, (2e9, 2e9))
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(name)
        fingerprints.append(file_fingerprints([str(tmp_path / "link")]))
    assert (fingerprints[0] != fingerprints[1]).all()


@pytest.mark.parametrize("at_s", [0, 1, 315_532_800, 1_700_000_000, 1_700_000_000.5])
def test_files_whose_times_were_set_are_identified_by_content(
    tmp_path: Path, at_s: float
) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(40)]

    def put(path: str, content: bytes) -> None:
        Path(path).write_bytes(content)
        os.utime(path, (at_s, at_s))

    for path in paths:
        put(path, b"old")
    before = file_fingerprints(paths)
    put(paths[7], b"new")
    changes = (file_fingerprints(paths) != before).all(axis=1)
    assert [*changes.nonzero()[0]] == [7]


def test_files_with_times_of_their_own_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(40)]
    for at, path in enumerate(paths):
        Path(path).write_bytes(b"1")
        os.utime(path, ns=(10**18 + at // 3, 10**18 + at // 3))
    monkeypatch.setattr(key, "content_of", None)
    assert file_fingerprints(paths).shape == (40, 2)


def test_threads_look_at_files_of_a_slow_disk_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(200)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(bytes(number % 7))
    quick = file_fingerprints(paths)
    monkeypatch.setattr(key, "SLOW_STAT_S", 0.0)
    assert np.array_equal(file_fingerprints(paths), quick)


def test_objects_in_a_store_are_identified_by_store_path_and_label() -> None:
    fingerprints = [
        file_fingerprints(["a", "b"], store="s3"),
        file_fingerprints(["a", "b"], store="gs"),
        file_fingerprints(["a", "b"], store="s3", labels=[0, 1]),
        file_fingerprints(["a", "b"], store="s3", labels=["0", "1"]),
        file_fingerprints(["a", "b"], store="s3", labels=[np.array([0]), (1, None)]),
    ]
    assert len({row.tobytes() for array in fingerprints for row in array}) == 10
    assert np.array_equal(file_fingerprints(["a", "b"], store="s3"), fingerprints[0])


def test_labels_must_be_as_many_as_paths() -> None:
    with pytest.raises(ValueError, match="zip"):
        file_fingerprints(["a", "b"], store="s3", labels=[0])


def test_no_files_have_no_fingerprints() -> None:
    assert file_fingerprints([]).shape == (0, 2)
