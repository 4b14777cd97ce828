"""Tars on a web server: indexed by their headers, and read as byte ranges."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.pipeline.sources.files import StoredFile
from penstock.pipeline.sources.shards import FIRST_BYTES, ReadAhead
from support.http_store import Fault, HttpStore, served

N = 24
SHARDS = 3


@pytest.fixture(scope="module", autouse=True)
def own_thread_of_fsspec() -> None:
    """Start fsspec's loop for reads outside ours; it lasts as long as the process."""
    fsspec.asyn.get_loop()


def body(number: int) -> bytes:
    return np.random.default_rng(number).bytes(3000 * (number % 5))


def tar_of(numbers: range, body_bytes: int = 0) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number in numbers:
            for field, data in (
                ("bin", body(number) + bytes(body_bytes)),
                ("cls", b"%d" % number),
            ):
                info = tarfile.TarInfo(f"{number:04d}.{field}")
                info.size, info.mtime = len(data), 1.5
                tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


FILES = {
    f"train-{shard:02d}.tar": tar_of(range(shard * 8, shard * 8 + 8))
    for shard in range(SHARDS)
}
EXPECTED = [(body(number), number) for number in range(N)]


@pytest.fixture
def web() -> Iterator[HttpStore]:
    with served(FILES) as store:
        yield store


def shards(place: object, **settings: Any) -> ps.Pipeline:
    pattern = f"{place}/train-{{00..{SHARDS - 1:02d}}}.tar"
    return ps.Pipeline.from_webdataset(pattern, ("bin", "cls"), **settings)


def samples(pipe: ps.Pipeline) -> list[tuple[bytes, int]]:
    with pipe.batch(5, collate_fn=list) as batches:
        return [sample for batch in batches for sample in batch]


def source_of(pipe: ps.Pipeline) -> Any:
    stage: Any = pipe._stages[0]  # noqa: SLF001
    return stage.dataset


@pytest.mark.parametrize("executor", ["auto", "async", "thread", "process", "inline"])
def test_samples_from_a_web_server_arrive_in_order(
    executor: Any, web: HttpStore
) -> None:
    workers = None if executor == "inline" else 3
    pipe = shards(web.url, executor=executor, num_parallel_workers=workers)
    assert samples(pipe) == EXPECTED


@pytest.mark.long
def test_an_epoch_is_left_and_resumed_between_ranges(web: HttpStore) -> None:
    ps.testing.assert_exact_resume(
        lambda: shards(web.url).shuffle(seed=3, window=2).map(len_of).batch(5), every=3
    )


def len_of(sample: tuple[bytes, int]) -> tuple[int, int]:
    return len(sample[0]), sample[1]


def test_a_shard_is_never_read_whole() -> None:
    """Headers are read ahead, and after them only the wanted fields."""
    files = {"train-00.tar": tar_of(range(6), body_bytes=40 * FIRST_BYTES)}
    with served(files) as web:
        url = f"{web.url}/train-00.tar"
        pipe = ps.Pipeline.from_webdataset(url, ("cls",), executor="thread")
        indexed_bytes, requests = web.sent.total(), web.asked.total()
        assert 0 < indexed_bytes < len(files["train-00.tar"]) / 10
        source = source_of(pipe)
        assert [source[at] for at in range(6)] == [(at,) for at in range(6)]
        assert web.sent.total() == indexed_bytes + 6
        assert web.asked.total() == requests + 6


def test_short_samples_are_indexed_by_few_requests(web: HttpStore) -> None:
    """One request asks for the length; the others read growing parts."""
    shards(web.url)
    assert web.asked.total() <= SHARDS * 4


@pytest.mark.parametrize("executor", ["async", "thread"])
def test_transient_faults_are_retried(executor: Any) -> None:
    faults: dict[str, list[Fault]] = {"train-01.tar": [503, "reset", 500, "short"]}
    with served(FILES) as web:
        pipe = shards(web.url, executor=executor)
        web.faults = {name: iter(shard_faults) for name, shard_faults in faults.items()}
        assert samples(pipe) == EXPECTED


@pytest.mark.long
def test_a_cache_keeps_the_samples_that_arrived(
    web: HttpStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> ps.Pipeline:
        pipe = shards(web.url, num_parallel_workers=2)  # more may compare them all
        return pipe.map(len_of).cache(disk=tmp_path / "kept")

    expected = [len_of(sample) for sample in EXPECTED]
    assert samples(make()) == expected
    assert not [line for line in caplog.messages if "is private to this run" in line]
    pipe, requests = make(), web.asked.total()
    assert samples(pipe) == expected
    assert web.asked.total() - requests < N, "some are computed again to be compared"


def test_a_fingerprint_survives_a_copy_and_changes_with_the_places() -> None:
    with served(FILES) as web:
        first, again = source_of(shards(web.url)), source_of(shards(web.url))
        prints = first.sample_fingerprints()
        assert len(np.unique(prints, axis=0)) == N
        assert np.array_equal(prints, again.sample_fingerprints())
        copy = pickle.loads(pickle.dumps(first))  # noqa: S301 our own
        assert np.array_equal(prints, copy.sample_fingerprints())
        assert first.identity() == copy.identity()
        web.files = {name: tar_of(range(8), 1) for name in FILES}
        new_prints = source_of(shards(web.url)).sample_fingerprints()
        assert not (prints == new_prints).all(axis=1).any()


def test_a_pattern_is_expanded_where_the_store_can_list(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe({f"/tars/{name}": content for name, content in FILES.items()})
    try:
        for pattern in ("train-*.tar", "train-{00..02}.tar", "train-0{0,1,2}.tar"):
            url = f"memory://tars/{pattern}"
            assert samples(ps.Pipeline.from_webdataset(url, ("bin", "cls"))) == EXPECTED
    finally:
        store.rm("/tars", recursive=True)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for place in (tmp_path, f"file://{tmp_path}"):
        assert samples(shards(place)) == EXPECTED


def test_a_server_without_byte_ranges_is_refused_with_the_cure() -> None:
    with (
        served(FILES, parts=False) as web,
        pytest.raises(ps.SpecError, match="a server that sends byte ranges"),
    ):
        shards(web.url)


def test_a_missing_file_and_one_that_is_not_a_tar_are_refused() -> None:
    with served({"train-00.tar": b"no tar" * 999}) as web:
        with pytest.raises(ps.SpecError, match=r"cannot index .*FileNotFound"):
            ps.Pipeline.from_webdataset(f"{web.url}/train-07.tar")
        with pytest.raises(ps.SpecError, match="are not compressed"):
            ps.Pipeline.from_webdataset(f"{web.url}/train-00.tar")


@given(
    st.binary(max_size=300),
    st.lists(st.tuples(st.integers(0, 310), st.integers(0, 60)), max_size=20),
)
def test_reading_ahead_gives_the_bytes_of_the_file(
    content: bytes, asked: list[tuple[int, int]]
) -> None:
    parts: list[tuple[int, int]] = []

    def read(part: tuple[int, int]) -> bytes:
        parts.append(part)
        assert 0 <= part[0] < part[1] <= len(content)
        return content[slice(*part)]

    ahead = StoredFile(ReadAhead(read, len(content)), len(content))
    for at, nbytes in sorted(asked):
        ahead.seek(at)
        assert ahead.tell() == at
        assert ahead.read(nbytes) == content[at : at + nbytes]
    assert all(first[0] < second[0] for first, second in pairwise(parts))
