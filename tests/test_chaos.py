"""Kills, stops and interrupts at random moments, again and again, on a busy machine."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil
import pytest
import torch

import penstock as ps
from support import warm
from support.datasets import Numbers
from support.functions import augment, digest, indices, waits
from support.leaks import children
from support.torch_datasets import Drawing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS = range(8)
KILLS = 100
GONE_S = 60.0
"""The limit for processes that end at once; a busy machine may need that long."""
BATCH = 8
SHARED_MEMORY = "/dev/shm"  # noqa: S108 looked at, not written to


@pytest.fixture(scope="module", autouse=True)
def _one_core_is_busy() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        yield
        burner.kill()


def described(batches: int, *, thread_safe: bool) -> ps.Pipeline:
    workers: dict[str, Any] = {"executor": "process", "num_parallel_workers": 4}
    return (
        ps.Pipeline.from_dataset(
            Numbers(batches * BATCH), thread_safe=thread_safe, **workers
        )
        .shuffle(seed=1)
        .map(augment, **workers)
        .map(partial(waits, wait_s=0.0005), **workers)
        .batch(BATCH)
    )


def kill_one(dice: random.Random) -> bool:
    """Kill a fork server or a worker of this process; return whether there was one."""
    family = children(recursive=True)
    ours = [child for child in family if "while True" not in " ".join(cmdline(child))]
    if not ours:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        dice.choice(ours).kill()
        return True
    return False


def cmdline(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.parametrize("round_", ROUNDS[:3])
def test_100_kills_of_workers_and_fork_server_in_one_epoch_change_no_byte(
    round_: int,
) -> None:
    lose_and_compare(round_, KILLS, thread_safe=round_ % 2 == 0, hosts=False)


@pytest.mark.parametrize("round_", ROUNDS[:1])
def test_kills_that_hit_the_host_too_change_no_byte(round_: int) -> None:
    """There are fewer: each kill restarts the host, the fork server and all workers."""
    lose_and_compare(round_, KILLS // 4, thread_safe=True, hosts=True)


def lose_and_compare(seed: int, kills: int, *, thread_safe: bool, hosts: bool) -> None:
    """Kill one process a batch and turn a knob; compare with a run in one process."""
    dice = random.Random(seed)
    batches = kills + 40
    killed, epoch = 0, []
    with described(batches, thread_safe=thread_safe) as pipe:
        for batch in pipe:
            epoch.append(batch)
            killed += killed < kills and kill_one(dice)
            run = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
            assert run is not None
            knobs = [k for k in run.knobs() if hosts or k.name != "host"]
            dice.choice(knobs).set(dice.randint(1, 6))
    assert killed >= kills * 0.9
    whole = ps.Pipeline.from_dataset(Numbers(batches * BATCH), executor="inline")
    with whole.shuffle(seed=1).map(augment).batch(BATCH) as pipe:
        assert digest(epoch) == digest(pipe)


@pytest.mark.parametrize("round_", ROUNDS[:2])
def test_kills_change_no_byte_of_a_dataloader(round_: int) -> None:
    dice = random.Random(round_)

    def loader(workers: int) -> ps.DataLoader[Any]:
        data = Drawing((KILLS + 40) * BATCH)
        torch.manual_seed(round_)
        return ps.DataLoader(
            data,
            BATCH,
            shuffle=True,
            num_workers=workers,
            sample_seeding=True,
            worker_init_fn=at_once,
        )

    killed, epoch = 0, []
    batches = loader(4)
    for batch in batches:
        epoch.append(batch)
        killed += killed < KILLS and kill_one(dice)
    assert killed >= KILLS * 0.9
    whole = list(loader(0))
    assert len(epoch) == len(whole)
    for got, expected in zip(epoch, whole, strict=True):
        assert all(map(torch.equal, got, expected))


def at_once(number: int) -> None:
    """Serve as a `worker_init_fn`."""


TRAINER = """
import sys, time
import penstock as ps
from functools import partial
from support.datasets import Numbers
from support.functions import waits
workers = dict(executor="process", num_parallel_workers=4)
pipe = (ps.Pipeline.from_dataset(Numbers(100000), thread_safe=sys.argv[1] == "safe")
    .map(partial(waits, wait_s=float(sys.argv[2])), **workers).batch(4))
try:
    for at, batch in enumerate(pipe):
        if at == 2:
            print("ready", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@contextlib.contextmanager
def trainer(*args: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a training script; yield it and its processes once it trains."""
    with warm.Popen(
        [sys.executable, "-c", TRAINER, *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        family = psutil.Process(script.pid).children(recursive=True)
        assert len(family) >= 2
        yield script, family


@pytest.mark.parametrize("round_", ROUNDS)
def test_a_killed_trainer_leaves_nothing(round_: int) -> None:
    dice = random.Random(round_)
    shared = set(os.listdir(SHARED_MEMORY))
    with trainer("safe" if round_ % 2 else "unsafe", "0.001") as (script, family):
        time.sleep(dice.random() * 0.05)  # any moment
        script.kill()
        assert psutil.wait_procs(family, timeout=GONE_S)[1] == []
    assert set(os.listdir(SHARED_MEMORY)) <= shared


@pytest.mark.parametrize("round_", ROUNDS)
def test_ctrl_c_ends_a_trainer_at_any_moment(round_: int) -> None:
    dice = random.Random(round_)
    with trainer("safe" if round_ % 2 else "unsafe", "0.001") as (script, family):
        time.sleep(dice.random() * 0.05)  # any moment
        script.send_signal(signal.SIGINT)
        assert script.wait(timeout=GONE_S) == 0
        assert psutil.wait_procs(family, timeout=GONE_S)[1] == []
        assert script.stdout is not None
        assert script.stdout.read() == "interrupted\n"


@pytest.mark.parametrize("round_", ROUNDS)
def test_a_stopped_worker_is_replaced_under_a_timeout(round_: int) -> None:
    dice = random.Random(round_)
    pipe = (
        ps.Pipeline.from_dataset(Numbers(400), executor="inline")
        .map(
            partial(waits, wait_s=0.002),
            executor="process",
            num_parallel_workers=dice.randint(1, 6),
            timeout=1.0,
        )
        .batch(BATCH)
    )
    stop_at = dice.randrange(20)
    batches = []
    with pipe:
        for at, batch in enumerate(pipe):
            batches.append(batch)
            if at == stop_at:
                workers = [
                    worker
                    for fork_server in children()
                    for worker in fork_server.children()
                ]
                dice.choice(workers).suspend()
    assert [i for batch in indices(batches) for i in batch] == list(range(400))
