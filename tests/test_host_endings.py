"""`host="process"`: the child may die within a loop, and never outlives the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.engine import engine
from penstock.engine.far import fork_server
from support import warm
from support.datasets import KINDS, WORKERS, Numbers
from support.functions import BadSample, digest, indices
from support.hosted import (
    PROMPT_S,
    Kind,
    epochs,
    failing,
    hangs,
    host_of,
    hosted,
    kill,
    run_of,
    suicide,
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


# What the trainer holds


def test_batches_stay_as_they_are_when_the_child_ends() -> None:
    with hosted(WORKERS["inline"], 8000) as pipe:
        expected = digest(islice(pipe, 60))
    for _ in range(3):
        with hosted(WORKERS["3 processes"], 8000) as pipe:
            batches = list(islice(pipe, 60))  # while others are being filled
        assert digest(batches) == expected


# The child's death


def test_a_child_that_is_killed_is_replaced_and_no_byte_changes(kind: Kind) -> None:
    with hosted(kind, 200) as pipe:
        batches = []
        for at, batch in enumerate(pipe):
            batches.append(batch)
            if at in (3, 14):
                kill(host_of(pipe))
        digests = [digest(batches)]
        kill(host_of(pipe))  # between epochs
        digests.append(digest(pipe))
    assert digests == epochs(2, 200)


def test_an_error_is_raised_once_although_the_child_dies_after_it() -> None:
    with failing(WORKERS["inline"]) as pipe:
        loop = iter(pipe)
        for _ in range(2):
            next(loop)
        with pytest.raises(BadSample):
            next(loop)
        kill(host_of(pipe))
        assert list(indices(loop)) == [list(range(24, 32)), list(range(32, 40))]


def test_a_child_that_always_dies_is_given_up_and_named() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(40)).map(suicide, executor="inline")
    with pipe.batch(8).options(host="process") as pipe:
        loop = iter(pipe)
        assert [next(loop)[1][0].item() for _ in range(2)] == [0, 8]
        message = r"died 5 times on sample index 20(?s:.*)SIGKILL"
        with pytest.raises(ps.WorkerError, match=message):
            next(loop)


def test_a_death_that_the_trainer_hears_of_first_has_a_successor() -> None:
    """It may come to hear while the pool's thread sleeps, and nothing is being made."""
    with hosted(WORKERS["2 threads"], 800) as pipe:
        loop = iter(pipe)
        batches = [next(loop)]
        engine = run_of(pipe).host.engine
        assert engine is not None
        pool: Any = engine.segments[0].pool
        while any(child.errands for child in pool._children):  # noqa: SLF001
            time.sleep(0.001)
        with pool._serving:  # noqa: SLF001 as `serve_now` does
            pool._reap(pool._children[0])  # noqa: SLF001
        batches += loop
    assert [digest(batches)] == epochs(1, 800)


def test_tuning_survives_the_child() -> None:
    with hosted(WORKERS["2 threads"], 800) as pipe:
        loop = iter(pipe)
        next(loop)
        run = run_of(pipe)
        before = run.knobs()
        kill(host_of(pipe))
        assert [knob.name for knob in run.knobs()] == [k.name for k in before]
        assert [knob.value for knob in before] == [2, 2]
        assert pipe.stats() is not None
        for _ in range(5):
            next(loop)
        assert run.observe() is not None


# The end


@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
def test_close_returns_although_a_function_hangs(workers: str) -> None:
    kind = WORKERS[workers]
    pipe = ps.Pipeline.from_dataset(Numbers(400)).map(hangs, **kind).batch(8)
    with pipe.options(host="process") as pipe:
        loop = iter(pipe)
        next(loop)
        family = host_of(pipe).children(recursive=True)
        pipe.close()
        assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []


def test_a_stopped_child_is_ended_too() -> None:
    with hosted(WORKERS["2 threads"], 400) as pipe:
        loop = iter(pipe)
        next(loop)
        host_of(pipe).suspend()
        pipe.close()  # nobody lets the child go on


def test_all_limits_of_an_end_together_are_below_two_seconds() -> None:
    """So `close` takes at most 2 s, whatever is stuck: one after the other."""
    assert engine.CLOSE_S + fork_server.FINISH_S < 2
    assert fork_server.FINISH_S < fork_server.END_S
    assert fork_server.FINISH_S >= 0.3  # so that most samples can be finished


def test_a_pipeline_may_be_dropped_within_a_loop() -> None:
    pipe = hosted(WORKERS["2 threads"], 400)
    loop = iter(pipe)
    next(loop)
    child = host_of(pipe)
    del pipe, loop
    assert psutil.wait_procs([child], timeout=PROMPT_S)[1] == []


def test_iterating_again_after_close_starts_over() -> None:
    pipe = hosted(WORKERS["2 threads"])
    first = digest(pipe)
    pipe.close()
    with pipe:
        assert [first, digest(pipe)] == epochs(2)


def test_closing_while_others_use_the_pipeline_is_safe() -> None:
    pipe = hosted(WORKERS["2 threads"], 10_000)
    loop = iter(pipe)
    next(loop)
    asking = threading.Thread(target=ask_until_closed, args=(pipe,))
    asking.start()
    for _ in range(50):
        next(loop)
    pipe.close()
    asking.join()


def ask_until_closed(pipe: ps.Pipeline) -> None:
    with contextlib.suppress(AttributeError):
        while pipe.stats() is not None:
            pass


SCRIPT = """
import sys, threading
import penstock as ps
from support.datasets import WORKERS, Numbers

data = Numbers(10**7, wait_s=0.001)
pipe = ps.Pipeline.from_dataset(data, **WORKERS[sys.argv[1]]).batch(8)
pipe = pipe.options(host="process")
try:
    for at, batch in enumerate(pipe):
        if at == 2:
            print("ready", flush=True)
except KeyboardInterrupt:
    print(threading.active_count(), pipe.stats() is None)
"""


@contextlib.contextmanager
def trainer_of(
    kind: str,
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a trainer in its own process; yield it, in its loop, and its children."""
    with warm.Popen(
        [sys.executable, "-c", SCRIPT, kind],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as script:
        try:
            assert script.stdout is not None
            assert script.stdout.readline() == "ready\n"
            yield script, psutil.Process(script.pid).children(recursive=True)
        finally:
            script.kill()


@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
def test_ctrl_c_ends_all_at_once(workers: str) -> None:
    with trainer_of(workers) as (script, family):
        script.send_signal(signal.SIGINT)
        assert script.communicate(timeout=PROMPT_S)[0] == "1 True\n"
    assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []


@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
def test_when_the_trainer_is_killed_its_processes_vanish(workers: str) -> None:
    with trainer_of(workers) as (script, family):
        assert len(family) >= (3 if workers == "3 processes" else 1)
        script.kill()
    assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []
