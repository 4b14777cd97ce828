"""Programs that load by Ray actors; run as a script, `NAME OUT ARGUMENTS`, one each.

Ray keeps descriptors and threads in a process that has used it, so none of the tests'
own processes does. A cluster here is made of real processes: a head, which has no CPUs,
and raylets.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from ray.cluster_utils import Cluster

import penstock as ps
from support.datasets import Numbers, Sample
from support.functions import augment, digest
from support.ray_processes import ACTOR, of_ray, title

SLEEP_S = 0.02
PATIENCE_S = 100.0
"""Seconds to wait for what should come, maybe beside other tests."""


# What the actors run


def sleepy(sample: Sample) -> Sample:
    time.sleep(SLEEP_S)
    return sample


def spanned(sample: Sample) -> tuple[int, int]:
    """Return when it began and ended, in ns of the host's clock."""
    begun_ns = time.monotonic_ns()
    time.sleep(SLEEP_S)
    return begun_ns, time.monotonic_ns()


def odd_ones(sample: Sample) -> bool:
    return sample[1] % 3 != 0


def noisy(sample: Sample, rng: np.random.Generator) -> dict[str, Any]:
    values, index = sample
    return {
        "values": torch.from_numpy(values * rng.normal()),
        "words": f"{index}",
        "large": np.full((40, 40), rng.integers(9), np.int16),
    }


def doubled(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "values": batch["values"] * 2 + float(rng.random())}


def in_lists(samples: list[Any]) -> list[Any]:
    return [list(column) for column in zip(*samples, strict=True)]


def deadly(sample: Sample) -> Sample:
    if sample[1] == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def placed(sample: Sample) -> str:
    return str(ray.get_runtime_context().get_node_id())


def faulty(sample: Sample) -> Sample:
    if sample[1] == 5:
        raise LookupError("the fifth")
    return sample


# Clusters


@contextlib.contextmanager
def started(cpus: int) -> Iterator[None]:
    """Start Ray on this machine, as a user's program does."""
    ray.init(
        "local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def clustered(
    *raylets: dict[str, Any], join: bool = True
) -> Iterator[tuple[Cluster, list[Any]]]:
    """A cluster that this process joins, and its raylets beside the head."""
    cluster = Cluster()
    cluster.add_node(num_cpus=0, include_dashboard=False)
    try:
        nodes = [cluster.add_node(**raylet) for raylet in raylets]
        if join:
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def actors() -> list[psutil.Process]:
    """Processes of our actors, on this machine."""
    folder = Path(os.environ["RAY_TMPDIR"])
    return [process for process in of_ray(folder) if title(process).startswith(ACTOR)]


def left() -> int:
    """How many actors do not end."""
    until(lambda: not actors())
    return len(actors())


def until(true: Callable[[], object]) -> bool:
    """Whether it becomes true before the test gives up."""
    end_s = time.monotonic() + PATIENCE_S
    while not (truth := bool(true())) and time.monotonic() < end_s:
        time.sleep(0.05)
    return truth


def most_at_once(spans: list[tuple[int, int]]) -> int:
    """How many of these times overlap at most."""
    steps = sorted([(end, -1) for _, end in spans] + [(begin, 1) for begin, _ in spans])
    return max(itertools.accumulate(step for _, step in steps))


# Programs


def pipelines() -> dict[str, Callable[[str], ps.Pipeline]]:
    """Pipelines of many kinds, by the executor of their functions."""
    source = ps.Pipeline.from_dataset

    def augmented(kind: str) -> ps.Pipeline:
        data = source(Numbers(61), executor=kind, num_parallel_workers=1)
        data = data.shuffle(seed=3)
        return data.map(augment, executor=kind, num_parallel_workers=2).batch(8)

    def mixed(kind: str) -> ps.Pipeline:
        data = source(Numbers(61, 2000), executor="thread").shuffle(seed=4)
        data = data.map(noisy, executor=kind, num_parallel_workers=1)
        data = data.batch(8, drop_last=True)
        return data.map(doubled, executor=kind, num_parallel_workers=1)

    def filtered(kind: str) -> ps.Pipeline:
        data = source(Numbers(61), executor="thread").shuffle(seed=5)
        data = data.filter(odd_ones, executor=kind, num_parallel_workers=1)
        return data.map(augment, executor="thread").batch(8)

    def collated(kind: str) -> ps.Pipeline:
        data = source(Numbers(61), executor=kind, num_parallel_workers=1)
        data = data.shuffle(seed=6).map(augment, executor="thread")
        return data.batch(8, collate_fn=in_lists)

    return {make.__name__: make for make in (augmented, mixed, filtered, collated)}


def same_bytes() -> dict[str, Any]:
    """Two epochs of each pipeline, by threads and by actors; and a resumed one."""
    with started(cpus=4):
        comparisons = {}
        for name, make in pipelines().items():
            with make("thread") as threads, make("ray") as far:
                of_threads = [digest(threads) for _ in range(2)]
                comparisons[name] = of_threads == [digest(far) for _ in range(2)]
                assert of_threads[0] != of_threads[1]
        comparisons["resumed"] = goes_on()
        return {"same": comparisons, "left": left()}


def goes_on() -> bool:
    """Whether actors go on where threads were left."""
    make = pipelines()["augmented"]
    with make("thread") as threads:
        loop = iter(threads)
        for _ in range(3):
            next(loop)
        state = threads.state_dict()
        rest = [values.tolist() for values, _ in loop]
    with make("ray") as far:
        far.load_state_dict(state)
        return rest == [values.tolist() for values, _ in far]


def two_raylets() -> dict[str, Any]:
    """How many actors work at once on one raylet with two CPUs, and on two."""
    with clustered({"num_cpus": 2}) as (cluster, _):
        counts = []
        for workers in (2, 4):
            pipe = ps.Pipeline.from_dataset(Numbers(100_000), executor="inline")
            pipe = pipe.map(spanned, executor="ray", num_parallel_workers=workers)
            with pipe.batch(10) as loading:
                counts.append(at_once(loading, workers))
            cluster.add_node(num_cpus=2)
        return {"found": counts, "left": left()}


def at_once(loading: ps.Pipeline, workers: int) -> int:
    """How many actors work at once, when there are so many or the test gives up."""
    most, batches = 0, iter(loading)

    def look() -> bool:
        nonlocal most
        spans = [pair for _ in range(8) for pair in next(batches)]
        begins, ends = spans[::2], spans[1::2]
        both = zip(torch.cat(begins).tolist(), torch.cat(ends).tolist(), strict=True)
        most = max(most, most_at_once(list(both)))
        return most >= workers

    until(look)
    return most


def deaths() -> dict[str, Any]:
    """A stream while actors and raylets are killed, whenever it has gone on."""
    with clustered({"num_cpus": 2}, {"num_cpus": 2}) as (cluster, nodes):
        pipe, plain = sleeping(Numbers(400), 4)
        epochs: list[bool] = []
        batch_count = 0
        over = threading.Event()

        def counted() -> Iterator[Any]:
            nonlocal batch_count
            for batch in pipe:
                batch_count += 1
                yield batch

        def load() -> None:
            while not over.is_set():
                epochs.append(digest(counted()) == digest(plain))

        with pipe, plain:
            loading = threading.Thread(target=load)
            loading.start()
            killed = kill(cluster, nodes, lambda: batch_count)
            over.set()
            loading.join()
        return {
            "exact": all(epochs),
            "epochs": len(epochs),
            "killed": killed,
            "left": left(),
        }


def kill(cluster: Cluster, nodes: list[Any], count: Callable[[], int]) -> Counter[str]:
    """Kill actors, and replace raylets, once ten more batches were seen each time.

    In the main thread: Ray sets signal handlers when it starts a raylet.
    """
    draws, killed = random.Random(0), Counter[str]()
    for what in ("actor", "actor", "raylet", "actor", "raylet", "actor", "none"):
        before = count()
        assert until(lambda: count() - before >= 10), killed  # noqa: B023
        if what == "actor" and until(actors):
            with contextlib.suppress(psutil.NoSuchProcess):
                # A node that goes away sends SIGTERM first.
                number = (signal.SIGTERM, signal.SIGKILL)[killed["actors"] % 2]
                draws.choice(actors()).send_signal(number)
                killed["actors"] += 1
        elif what == "raylet":
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
            nodes.append(cluster.add_node(num_cpus=2))
            killed["raylets"] += 1
    return killed


def tuned(prefix: str) -> dict[str, Any]:
    """The workers that the tuner settles on where there is room for four actors."""
    with started(cpus=4):
        ps.set_enable_autotune(True, prefix)
        pipe = ps.Pipeline.from_dataset(Numbers(100_000), executor="inline")
        pipe = pipe.map(sleepy, executor="ray", num_parallel_workers=(1, 64))
        workers: list[tuple[str, int]] = []
        with pipe.batch(10) as loading:
            loop = iter(loading)

            def look() -> bool:
                next(loop)
                (segment,) = [
                    s for s in loading.stats().segments if s.executor == "ray"
                ]
                workers.append((segment.executor, segment.num_parallel_workers))
                return segment.num_parallel_workers >= 4

            until(look)
        ps.set_enable_autotune(False)
        return {"workers": sorted({count for _, count in workers})}


def too_small() -> dict[str, Any]:
    """Three stages of actors where there is room for two."""
    with started(cpus=2):
        pipe = ps.Pipeline.from_dataset(Numbers(20), executor="ray")
        pipe = pipe.map(augment, executor="ray", num_parallel_workers=1)
        pipe = pipe.map(sleepy, executor="ray", num_parallel_workers=1).batch(5)
        message = ""
        try:
            next(iter(pipe))
        except ps.SpecError as error:
            message = str(error)
        actor_count = len(actors())
        two = ps.Pipeline.from_dataset(Numbers(20), executor="inline")
        for function in (augment, sleepy):
            two = two.map(function, executor="ray", num_parallel_workers=(3, 8))
        with two.batch(5) as both:
            shared = sum(len(values) for values, _ in both)
            assert shared == 20
        smaller = pipe.options(ray_options={"num_cpus": 0.5})
        with smaller:
            rows = sum(len(values) for values, _ in smaller)
        return {"said": message, "begun": actor_count, "rows": rows}


def without_head() -> dict[str, Any]:
    """A stream whose cluster, named by RAY_ADDRESS, loses its head."""
    with clustered({"num_cpus": 2}, join=False) as (cluster, _):
        os.environ["RAY_ADDRESS"] = cluster.address
        pipe, plain = sleeping(Numbers(600), 2)
        with pipe, plain:
            exact, after = digest(pipe) == digest(plain), "ray"
            cluster.head_node.kill_gcs_server(check_alive=False)
            end_s = time.monotonic() + PATIENCE_S
            while after == "ray" and time.monotonic() < end_s:
                exact = digest(pipe) == digest(plain) and exact
                after = pipe.stats().segments[-1].executor
            until(lambda: not ray.is_initialized())
            exact = digest(pipe) == digest(plain) and exact
        return {"exact": exact, "after": after, "ray": ray.is_initialized()}


def without_ray() -> dict[str, Any]:
    """A stream whose program shuts Ray down meanwhile."""
    pipe, plain = sleeping(Numbers(200), 2)
    with pipe, plain:
        with started(cpus=2):
            exact, loop = digest(pipe) == digest(plain), iter(pipe)
            head = [next(loop)[0].tolist() for _ in range(2)]
        batches = head + [values.tolist() for values, _ in loop]
        exact = exact and batches == [values.tolist() for values, _ in plain]
        after = pipe.stats().segments[-1].executor
    return {"exact": exact, "after": after, "ray": ray.is_initialized()}


def sleeping(data: Numbers, workers: int) -> tuple[ps.Pipeline, ps.Pipeline]:
    """A pipeline whose last map sleeps in actors, and the same without that map."""
    pipe = ps.Pipeline.from_dataset(data, executor="thread")
    pipe = pipe.shuffle(seed=2).map(augment, executor="thread")
    far = pipe.map(sleepy, executor="ray", num_parallel_workers=workers)
    return far.batch(8), pipe.batch(8)


def resized() -> dict[str, Any]:
    """The actors while a busy stage gets fewer, and then more than there is room for.

    Another pipeline then takes its part of the room beside it.
    """
    with started(cpus=3):
        pipe, _ = sleeping(Numbers(100_000), 3)
        counts = []
        with pipe:
            loop = iter(pipe)
            next(loop)
            (knob,) = knobs_of(pipe)
            for workers in (1, 64):
                knob.set(workers)
                counts.append(count_until(loop, min(workers, 3)))
            with sleeping(Numbers(20), 3)[0] as other:
                rows = sum(len(values) for values, _ in other)
                count = count_until(loop, 2)
            return {"found": counts, "most": knob.upper, "rows": rows, "beside": count}


def knobs_of(pipe: ps.Pipeline) -> list[Any]:
    """The knob of the stage in actors."""
    run = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
    assert run is not None
    knobs = run.knobs()
    return [k for k in knobs if "sleepy" in k.operator and "workers" in k.name]


def count_until(loop: Iterator[Any], target: int, wait_s: float = PATIENCE_S) -> int:
    """How many actors there are once there are so many, or after so long."""
    end_s = time.monotonic() + wait_s
    # Once: with one not there yet, another may leave before it comes.
    while (count := len(actors())) != target and time.monotonic() < end_s:
        next(loop)
    return count


def places() -> dict[str, Any]:
    """The nodes of actors that claim what one raylet has."""
    claim = {"num_cpus": 0, "resources": {"loader": 1}}
    with clustered({"num_cpus": 2}, {"num_cpus": 1, "resources": {"loader": 2}}) as (
        _,
        nodes,
    ):
        pipe = ps.Pipeline.from_dataset(Numbers(40), executor="thread")
        pipe = pipe.map(placed, executor="ray", num_parallel_workers=2)
        with pipe.batch(10).options(ray_options=claim) as loading:
            node_ids = {node for batch in loading for node in batch}
        return {"seen": sorted(node_ids), "wanted": [nodes[1].node_id]}


def errors() -> dict[str, Any]:
    """What a failing function, a killing one and an unfit one look like."""
    failures = {}
    with started(cpus=2):
        for function in (faulty, deadly, threading.Lock().__enter__):
            pipe = ps.Pipeline.from_dataset(Numbers(20), executor="inline")
            pipe = pipe.map(function, executor="ray", num_parallel_workers=1)
            with pipe.batch(4) as loading:
                try:
                    list(loading)
                except Exception as error:  # noqa: BLE001 any
                    notes = getattr(error, "__notes__", [])
                    text = "\n".join([str(error), *notes])
                    failures[function.__name__] = type(error).__name__, text
        return {"found": failures, "left": left()}


def own_ray() -> dict[str, Any]:
    """Ray started by the pipeline, and whether it ends with it."""
    make = pipelines()["augmented"]
    claim = {"num_cpus": 0.5}
    with make("thread") as threads, make("ray").options(ray_options=claim) as far:
        same = digest(threads) == digest(far)
        during = ray.is_initialized()
    until(lambda: not ray.is_initialized())
    return {"same": same, "during": during, "after": ray.is_initialized()}


if __name__ == "__main__":
    program, out, *arguments = sys.argv[1:]
    result = globals()[program](*arguments)
    Path(out).write_text(json.dumps(result))
