"""An S3 server on this machine: it is listed and read, and sometimes late or wrong."""

from __future__ import annotations

import asyncio
import io
import itertools
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import fsspec.asyn
import numpy as np
import pytest
import torch
from faulty_proxy import proxied

import penstock as ps
from penstock.pipeline.sources import files

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
N = 480
BODIES = [
    np.random.default_rng(n).integers(0, 256, 2000, np.uint8).tobytes()
    for n in range(N)
]
KEYS = {"key": "none", "secret": "none"}


SHARDS = 4
SHARD = N // SHARDS


def tar_of(shard: int) -> bytes:
    """Return a shard with its part of the bodies."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number in range(shard * SHARD, (shard + 1) * SHARD):
            for field, data in (("bin", BODIES[number]), ("cls", b"%d" % number)):
                info = tarfile.TarInfo(f"{number:05d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


def options(url: str) -> dict[str, Any]:
    """Return what s3fs needs to know about a server."""
    return {**KEYS, "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"}}


@pytest.fixture(scope="module", autouse=True)
def own_thread_of_fsspec() -> None:
    """Start fsspec's thread, which lasts; else the guard would find it after a test.

    It resolves names in a thread of its loop, which lasts as well.
    """
    loop = fsspec.asyn.get_loop()
    fsspec.asyn.sync(loop, resolve)


async def resolve() -> None:
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80)


SERVE = """
import logging, sys
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Return the URL of an empty server.

    It has a process of its own. Its threads answer requests that the client has given
    up, and would be found after a test.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-c", SERVE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


@pytest.fixture(scope="module")
def store(served: str) -> str:
    """Return the URL of a server with three class folders in a bucket."""
    import boto3

    url = served
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",  # noqa: S106 there is no secret
    )
    client.create_bucket(Bucket="bucket")
    for number, body in enumerate(BODIES):
        key = f"train/{'abc'[number % 3]}/{number:05d}.jpg"
        client.put_object(Bucket="bucket", Key=key, Body=body)
    for shard in range(SHARDS):
        key = f"tars/train-{shard:03d}.tar"
        client.put_object(Bucket="bucket", Key=key, Body=tar_of(shard))
    client.close()
    return url


def folder(url: str, **settings: Any) -> ps.Pipeline:
    return ps.Pipeline.from_folder(
        "s3://bucket/train", storage_options=options(url), **settings
    )


def expected() -> list[tuple[bytes, int]]:
    by_class = (range(label, N, 3) for label in range(3))
    return [(BODIES[n], n % 3) for n in itertools.chain.from_iterable(by_class)]


def samples(pipe: ps.Pipeline) -> list[tuple[bytes, int]]:
    """Return the samples of an epoch."""
    with pipe.batch(32, collate_fn=list) as batches:
        return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("executor", ["auto", "thread"])
def test_class_folders_of_a_bucket_are_listed_and_read(
    store: str, executor: Any
) -> None:
    pairs = samples(folder(store, executor=executor, num_parallel_workers=16))
    assert pairs == expected()


def test_tables_of_a_bucket_are_read_by_group(store: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"at": np.arange(N), "x": np.random.default_rng(0).random(N)})
    settings = options(store)
    target = fsspec.filesystem("s3", **settings)
    for number in range(2):
        with target.open(f"s3://bucket/tables/{number}.parquet", "wb") as file:
            part = table.slice(number * N // 2, N // 2)
            pq.write_table(part, file, row_group_size=40)
    pattern = "s3://bucket/tables/*.parquet"
    data = ps.Pipeline.from_parquet(pattern, storage_options=settings)
    with data.shuffle(seed=1, window=3).batch(32) as pipe:
        batches = list(pipe)
    at = torch.cat([batch["at"] for batch in batches])
    assert sorted(at.tolist()) == [*range(N)]
    assert torch.equal(
        torch.cat([b["x"] for b in batches]), torch.tensor(table["x"].to_numpy())[at]
    )


def test_an_epoch_resumes_where_it_was_left(store: str) -> None:
    def make() -> ps.Pipeline:
        return folder(store, num_parallel_workers=16).shuffle(seed=1).batch(32)

    with make() as pipe:
        whole = [batch[1].tolist() for batch in pipe]
    with make() as pipe:
        batches = iter(pipe)
        first = [next(batches)[1].tolist() for _ in range(7)]
        state = pipe.state_dict()
    with make() as pipe:
        pipe.load_state_dict(state)
        rest = [batch[1].tolist() for batch in pipe]
    assert first + rest == whole


@pytest.mark.parametrize(
    ("names", "executor"),
    [("train-{000..003}.tar", "auto"), ("train-*.tar", "thread")],
)
def test_tars_in_a_bucket_are_read_sample_by_sample(
    store: str, names: str, executor: Any
) -> None:
    pipe = ps.Pipeline.from_webdataset(
        f"s3://bucket/tars/{names}",
        ("bin", "cls"),
        storage_options=options(store),
        executor=executor,
        num_parallel_workers=16,
    )
    pairs = samples(pipe)
    assert pairs == [(body, number) for number, body in enumerate(BODIES)]


def test_tars_resume_and_lose_nothing_to_faults(store: str) -> None:
    with proxied(store, 0.01, every=100, stall_s=1.0) as proxy:

        def make() -> ps.Pipeline:
            pipe = ps.Pipeline.from_webdataset(
                "s3://bucket/tars/train-{000..003}.tar",
                storage_options=options(proxy.url),
                num_parallel_workers=16,
            )
            return pipe.shuffle(seed=1, window=2).batch(32, collate_fn=list)

        with make() as pipe:
            whole = [[sample["cls"] for sample in batch] for batch in pipe]
        assert sorted(itertools.chain.from_iterable(whole)) == [*range(N)]
        with make() as pipe:
            batches = iter(pipe)
            first = [[sample["cls"] for sample in next(batches)] for _ in range(7)]
            state = pipe.state_dict()
        with make() as pipe:
            pipe.load_state_dict(state)
            rest = [[sample["cls"] for sample in batch] for batch in pipe]
    assert first + rest == whole


def test_faults_lose_no_sample_and_no_stall_is_waited_for(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests fail, and some stall until the proxy ends.

    Samples come in order, so an epoch that waits for one of those would not end.
    """
    monkeypatch.setattr(files, "STALLED_S", 3600.0)
    with proxied(store, 0.01, every=150, stall_s=3600.0) as proxy:
        pairs = samples(folder(proxy.url, num_parallel_workers=16))
    assert pairs == expected()
    assert proxy.seen["errors"] > 0
    assert proxy.seen["stalls"] > 0
