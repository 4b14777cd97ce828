"""s3fs: objects are read whole, and the store's answer decides about retries.

The store serves objects by path, as S3 does; nothing is listed or signed for real.
"""

from __future__ import annotations

import asyncio
from typing import Any

import fsspec.asyn
import pytest

import penstock as ps
from support.http_store import Fault, HttpStore, served

s3fs = pytest.importorskip("s3fs")

CONTENTS = {f"bucket/{at:02}.bin": bytes([at]) * (at + 1) for at in range(12)}
FAULTY = "bucket/03.bin"
ONCE = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
"""botocore's own retries, which come before ours, are off."""


@pytest.fixture(scope="module", autouse=True)
def own_threads_of_fsspec() -> None:
    """Start fsspec's loop and its resolver, which last as long as the process."""
    fsspec.asyn.sync(fsspec.asyn.get_loop(), asyncio.to_thread, int)


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let s3fs itself try once; it would try transient errors five times."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


def contents(store: HttpStore, times: int = 1, **settings: Any) -> list[bytes]:
    options = {"endpoint_url": store.url, "config_kwargs": ONCE}
    urls = [f"s3://{name}" for name in CONTENTS] * times
    pipe = ps.Pipeline.from_files(urls, storage_options=options, **settings).batch(4)
    with pipe.options(persistent_workers=False) as batches:
        return [content for batch in batches for content in batch]


@pytest.mark.parametrize("kind", ["auto", "thread", "process"])
def test_objects_arrive_whole_and_in_order(kind: Any) -> None:
    with served(CONTENTS) as store:
        assert contents(store, executor=kind) == [*CONTENTS.values()]
        assert {*store.asked.values()} == {1}, "it asked for the size first"


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_as_many_requests_are_in_flight_as_there_are_workers(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few, none is answered until more are there than botocore's ten."""
    many, answer = asyncio.Event(), HttpStore.answer

    async def answer_all_at_once(store: HttpStore, request: Any) -> Any:
        store.inside += 1
        store.most = max(store.most, store.inside)
        if store.inside > 20:
            many.set()
        if store.asked.total() >= 20:
            await many.wait()
        store.inside -= 1
        return await answer(store, request)

    monkeypatch.setattr(HttpStore, "answer", answer_all_at_once)
    with served(CONTENTS, latency_s=0) as store:
        settings = {"executor": kind, "num_parallel_workers": 60, "hedge": False}
        bodies = contents(store, times=10, **settings)
        assert bodies == [*CONTENTS.values()] * 10
        assert 20 < store.most <= 60


PASSING: list[Fault] = [500, 503, 429, "reset", "short"]


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("fault", PASSING)
def test_transient_errors_are_retried_until_they_pass(fault: Fault, kind: Any) -> None:
    with served(CONTENTS, faults={FAULTY: [fault] * 2}) as store:
        bodies = contents(store, executor=kind, backoff=0.001)
        assert bodies == [*CONTENTS.values()]
        assert store.asked[FAULTY] == 3 or fault == "reset"  # aiohttp retries, too


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("status", [400, 403, 404])
def test_lasting_errors_are_not_retried(status: int, kind: Any) -> None:
    with served(CONTENTS, faults={FAULTY: [status] * 9}) as store:
        with pytest.raises(OSError, match=r".") as caught:
            contents(store, executor=kind, backoff=0.001)
        assert store.asked[FAULTY] == 1
    assert "sample index 3" in caught.value.__notes__[0]
