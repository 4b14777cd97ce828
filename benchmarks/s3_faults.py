"""How much do faults of an object store cost, if they are retried and hedged?

    python benchmarks/s3_faults.py

A local S3 server (moto) stands behind a proxy that answers after 50 ms. Epochs run in
turn: without faults; with 1 % errors (503) and 1 % stalls of 5 s; and with the same
faults but no hedging, as in a loader that only retries. Server and proxy run in a
process of their own. Every epoch's samples are compared with the stored objects.

Batches come in order, so each stall that is not hedged holds up the epoch.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from faulty_proxy import proxied

AIM = 0.9
"""Aim, as a share of the rate without faults."""
LATENCY_S = 0.05
EVERY = 100
READERS = 16
BATCH = 32
SECRETS = {"key": "none", "secret": "none"}


@dataclass(frozen=True)
class Loads:
    """One way to read the store."""

    name: str
    faults: bool
    hedge: bool = True


WAYS = (
    Loads("no faults", faults=False),
    Loads("1 % errors, 1 % stalls", faults=True),
    Loads("the same, not hedged", faults=True, hedge=False),
)


def body(number: int) -> bytes:
    """Return the contents of an object."""
    return np.random.default_rng(number).bytes(2000)


def key(number: int) -> str:
    """Return the key of an object."""
    return f"{number:05d}.bin"


def serve(count: int, pipe: Connection) -> None:
    """Run the store, without faults and with, until the pipe ends."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",  # noqa: S106 there is no secret
    )
    client.create_bucket(Bucket="bucket")
    for number in range(count):
        client.put_object(Bucket="bucket", Key=key(number), Body=body(number))
    with ExitStack() as stack:
        plain = stack.enter_context(proxied(url, LATENCY_S))
        faulty = stack.enter_context(proxied(url, LATENCY_S, every=EVERY))
        pipe.send((plain.url, faulty.url))
        pipe.poll(None)
    moto.stop()


def epoch(url: str, count: int, *, hedge: bool, prefetch: int) -> float:
    """Read everything once; return the samples per second."""
    import penstock as ps

    ps.set_prefetch_size(prefetch)
    server: dict[str, Any] = {"endpoint_url": url, "region_name": "us-east-1"}
    pipe = ps.Pipeline.from_files(
        [f"s3://bucket/{key(number)}" for number in range(count)],
        storage_options={**SECRETS, "client_kwargs": server},
        num_parallel_workers=READERS,
        hedge=hedge,
    )
    with pipe.batch(BATCH, collate_fn=list) as batches:
        begun_s = time.perf_counter()
        contents = [content for batch in batches for content in batch]
        spent_s = time.perf_counter() - begun_s
    assert contents == [body(number) for number in range(count)]
    return count / spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--objects", type=int, default=1200)
    parser.add_argument("--no-unhedged", action="store_true")
    parser.add_argument("--prefetch", type=int, default=8)
    options = parser.parse_args()
    ways = WAYS[:2] if options.no_unhedged else WAYS
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(options.objects, theirs), daemon=True)
    server.start()
    plain, faulty = ours.recv()
    rates: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(options.rounds + 1):
        for way in ways:
            url = faulty if way.faults else plain
            rate = epoch(
                url, options.objects, hedge=way.hedge, prefetch=options.prefetch
            )
            print(f"round {number}: {way.name}: {rate:.0f}/s", file=sys.stderr)
            if number:
                rates[way.name].append(rate)
    ours.close()
    server.terminate()
    server.join()
    best = statistics.median(rates[ways[0].name])
    print(f"samples a second, {READERS} readers, medians of {options.rounds}, in turn")
    for name, values in rates.items():
        rate = statistics.median(values)
        low, high = min(values), max(values)
        print(f"{name:24} {rate:6.0f}  {rate / best:5.2f}x  ({low:.0f} to {high:.0f})")
    reached = statistics.median(rates[ways[1].name]) / best
    print(f"aim: {AIM} with faults; {'reached' if reached >= AIM else 'missed'}")


if __name__ == "__main__":
    main()
