"""However a loop ends, nothing stays; however a worker dies, the data is unchanged.

A fixture around every test (conftest.py) checks that nothing stays; what must be seen
from outside runs as a script of its own.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.engine import engine
from penstock.engine.far import fork_server, processes
from penstock.engine.far.child import Child
from penstock.engine.far.fork_server import ForkServer
from support import warm
from support.datasets import KINDS, WORKERS, Numbers, Sample
from support.forked import End, forked
from support.functions import augment, digest, pids, waits
from support.leaks import children
from support.waiting import until_collected

LENGTH = 160
EPOCH = 20
"""Batches of 8."""
PROMPT_S = 60.0
"""The limit for what ends at once; a busy machine may need that long."""
AT_WORK = pytest.mark.parametrize("kind", ["2 threads", "3 processes"])
"""For what does nothing new where the trainer's own thread does the work."""
WITHOUT_PROCESSES = pytest.mark.parametrize("kind", ["inline", "2 threads"])
"""For what the trainer's side decides, whoever works."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pipe_of(kind: str, length: int = LENGTH, wait_s: float = 0.0) -> ps.Pipeline:
    workers = WORKERS[kind]
    return (
        ps.Pipeline.from_dataset(Numbers(length, wait_s=wait_s), **workers)
        .shuffle(seed=2)
        .map(augment, **workers)
        .batch(8)
    )


def described(executor: Any = "process") -> ps.Pipeline:
    """Return a pipeline with workers that can be pickled."""
    data = Numbers(LENGTH)
    source = ps.Pipeline.from_dataset(data, executor=executor, num_parallel_workers=2)
    return source.batch(8)


def through_pickle(pipe: ps.Pipeline) -> ps.Pipeline:
    copied: ps.Pipeline = pickle.loads(pickle.dumps(pipe))  # noqa: S301
    return copied


def told_by(code: str) -> tuple[int, bytes]:
    """Run a script; return its exit code and its stderr."""
    command = [sys.executable, "-c", code]
    run = warm.run(command, timeout=PROMPT_S)
    return run.returncode, run.stderr.encode()


def epochs(count: int) -> list[str]:
    with pipe_of("inline") as pipe:
        return [digest(pipe) for _ in range(count)]


def is_stopped(pipe: ps.Pipeline) -> bool:
    return pipe.stats() is None and children(recursive=True) == []


# A loop that is left early


def test_break_stops_the_workers(kind: str) -> None:
    pipe = pipe_of(kind)
    for _ in pipe:
        break
    assert is_stopped(pipe)


@WITHOUT_PROCESSES
def test_an_exception_in_the_loops_body_stops_the_workers(kind: str) -> None:
    pipe = pipe_of(kind)
    with pytest.raises(ZeroDivisionError):
        sum(len(batch) // 0 for batch in pipe)
    assert is_stopped(pipe)


def test_close_stops_the_workers_and_the_loop(kind: str) -> None:
    pipe = pipe_of(kind)
    loop = iter(pipe)
    next(loop)
    pipe.close()
    assert is_stopped(pipe)
    with pytest.raises(ps.PenstockError, match="closed; iterate it again"):
        next(loop)
    pipe.close()


def test_close_returns_and_names_the_threads_that_go_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, released = threading.Semaphore(0), threading.Event()

    def hangs(sample: Sample) -> Sample:
        if sample[1] >= 16:
            stuck.release()
            released.wait()
        return sample

    async def hangs_too(sample: Sample) -> Sample:
        return hangs(sample)

    ps.set_prefetch_size(8)
    pipe = ps.Pipeline.from_dataset(Numbers(400), executor="thread")
    pipe = pipe.map(hangs, executor="thread", num_parallel_workers=3, name="wait")
    pipe = pipe.map(hangs_too, executor="async", name="await").batch(8)
    loop = iter(pipe)
    next(loop)
    for _ in range(3):
        assert stuck.acquire(timeout=PROMPT_S)
    waits_s = limits_of_joins(monkeypatch)
    pipe.close()
    released.set()  # only now: close() has returned although they are stuck
    assert 0 < sum(waits_s) <= engine.CLOSE_S < 2  # for all of them together
    (record,) = [r for r in caplog.records if "still in the functions" in r.message]
    assert "3 of its threads" in record.message
    assert "penstock Map(ID:1) wait (3)" in record.message


def limits_of_joins(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the limits for joins in which the thread does not end."""
    limits: list[float] = []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if thread.is_alive():
            assert timeout is not None
            limits.append(timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    return limits


@WITHOUT_PROCESSES
def test_a_closed_pipeline_may_be_iterated_again(kind: str) -> None:
    with pipe_of(kind) as pipe:
        next(iter(pipe))
        pipe.close()
        pipe.set_epoch(0)
        assert [digest(pipe)] == epochs(1)


def test_close_from_another_thread_ends_a_waiting_loop() -> None:
    with pipe_of("2 threads", length=10**6, wait_s=0.001) as pipe:
        loop = iter(pipe)
        next(loop)
        closer = threading.Thread(target=pipe.close)
        closer.start()
        with pytest.raises(ps.PenstockError, match="closed"):
            for _ in loop:
                pass
        closer.join()


@WITHOUT_PROCESSES
def test_leaving_a_with_block_stops_the_workers(kind: str) -> None:
    pipe = pipe_of(kind)
    loop = iter(pipe)
    with pytest.raises(KeyError), pipe:
        raise KeyError(next(loop))
    assert is_stopped(pipe)


@pytest.mark.parametrize("first", ["pipe", "loop"])
def test_dropping_pipeline_and_loop_in_either_order_stops_the_workers(
    kind: str, first: str
) -> None:
    references: dict[str, Any] = {"pipe": pipe_of(kind)}
    references["loop"] = iter(references["pipe"])
    next(references["loop"])
    run = weakref.ref(references["pipe"]._slot.run)  # noqa: SLF001 whether it is gone
    del references[first]
    if first == "pipe":
        assert next(references["loop"]) is not None
    references.clear()
    assert run() is None
    assert children(recursive=True) == []


def test_dropping_an_idle_pipeline_stops_its_workers(kind: str) -> None:
    pipe = pipe_of(kind)
    assert len(list(pipe)) == EPOCH
    run = weakref.ref(pipe._slot.run)  # noqa: SLF001 whether it is gone
    assert run() is not None
    del pipe
    assert run() is None
    assert children(recursive=True) == []


def test_the_collector_may_close_a_loop(kind: str) -> None:
    pipe = pipe_of(kind)
    loop: Any = iter(pipe)
    next(loop)
    ring = [loop]
    ring.append(ring)
    del loop, ring
    assert until_collected(lambda: is_stopped(pipe))


def test_data_is_freed_with_its_loader_before_any_collection(kind: str) -> None:
    workers = 2 if "processes" in kind else 0
    ps.set_enable_autotune(True)
    data = Numbers(LENGTH)
    gone = weakref.ref(data)
    pipe = ps.Pipeline.from_dataset(data, **WORKERS[kind]).batch(8)
    loader = ps.DataLoader(data, 8, num_workers=workers)  # type: ignore[arg-type]
    gc.collect()
    gc.disable()
    try:
        assert len(list(pipe)) == len(list(loader)) == EPOCH
        del pipe, loader, data
        assert gone() is None
    finally:
        gc.enable()


@WITHOUT_PROCESSES
def test_a_second_loop_ends_the_first(kind: str) -> None:
    with pipe_of(kind) as pipe:
        first = iter(pipe)
        next(first)
        second = iter(pipe)
        next(second)
        with pytest.raises(ps.PenstockError, match="closed"):
            next(first)
        assert len(list(second)) == EPOCH - 1


@WITHOUT_PROCESSES
def test_a_loop_begun_in_anothers_last_step_leaves_that_one_finished(
    kind: str,
) -> None:
    with pipe_of(kind) as pipe:
        for keeps in (False, True):
            steps, peek = 0, None
            for batch in pipe:
                steps += 1
                assert batch is not None
                if steps == EPOCH:
                    peek = iter(pipe)
                    next(peek)
                    peek = peek if keeps else None
            assert steps == EPOCH
            assert peek is None or len(list(peek)) == EPOCH - 1


@pytest.mark.parametrize(
    ("made_by", "running", "executor"),
    [
        (copy.copy, True, "process"),
        (copy.copy, False, "thread"),
        (copy.deepcopy, True, "thread"),
        (copy.deepcopy, False, "thread"),
        (through_pickle, True, "thread"),
        (through_pickle, False, "process"),
    ],
)
def test_a_copy_shares_nothing_that_runs_and_leaves_nothing_behind(
    made_by: Callable[[Any], Any],
    running: bool,  # noqa: FBT001
    executor: str,
) -> None:
    with described(executor) as pipe:
        loop = iter(pipe) if running else None
        first = None if loop is None else next(loop)
        copied = made_by(pipe)
        assert sum(1 for _ in copied) == EPOCH
        before = workers_of(executor)
        del copied
        assert until_collected(lambda: workers_of(executor) < before)
        assert loop is None or (first is not None and len(list(loop)) == EPOCH - 1)


def workers_of(executor: str) -> int:
    """Return how many fork servers, or threads, this process has."""
    return len(children()) if executor == "process" else threading.active_count()


def test_a_copy_begins_where_the_next_loop_would() -> None:
    with described("thread") as pipe:
        pipe.set_epoch(5)
        copied = through_pickle(pipe)
        next(iter(copied))
        assert copied.plan is not None
        assert copied.plan.epoch == 5
        copied.close()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_loop_used_in_a_forked_process_is_an_error_that_says_so(kind: str) -> None:
    pipe = ps.Pipeline.from_dataset(range(40), executor=kind).batch(4)  # type: ignore[arg-type]
    loop = iter(pipe)
    next(loop)

    def use(end: End) -> None:
        with pytest.raises(ps.PenstockError, match="before a fork"):
            next(loop)
        assert len(list(pipe)) == 10  # one of its own
        pipe.close()
        end.tell("done")

    with pipe, forked(use) as child:
        assert child.hear() == "done"
        assert child.ended() == 0
        assert len(list(loop)) == 9


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_loop_in_a_daemon_thread_ends_silently_with_the_program(kind: str) -> None:
    code = f"""
import threading, penstock as ps
data = ps.Pipeline.from_dataset(range(40), executor={kind!r})
pipe = data.batch(4, collate_fn=tuple)  # torch aborts where the end finds it at work
begun = threading.Event()
def loop():
    while True:
        for batch in pipe:
            begun.set()
threading.Thread(target=loop, daemon=True).start()
assert begun.wait(60)
"""
    assert told_by(code) == (0, b"")


@WITHOUT_PROCESSES
def test_a_finished_loop_stays_finished(kind: str) -> None:
    with pipe_of(kind) as pipe:
        loop = iter(pipe)
        assert len(list(loop)) == EPOCH
        again = iter(pipe)
        assert next(loop, None) is None
        assert len(list(again)) == EPOCH


# The next epoch


class Watched(Numbers):
    """Signals when more samples have been read than one epoch has."""

    def __init__(self) -> None:
        super().__init__(LENGTH)
        object.__setattr__(self, "reads", [])
        object.__setattr__(self, "read_ahead", threading.Event())

    reads: list[int]
    read_ahead: threading.Event

    def __getitem__(self, index: int) -> Sample:
        self.reads.append(index)
        if len(self.reads) > LENGTH:
            self.read_ahead.set()
        return super().__getitem__(index)


def test_the_next_epochs_first_batches_are_loaded_ahead_and_used() -> None:
    watched = Watched()
    with ps.Pipeline.from_dataset(watched, **WORKERS["1 thread"]).batch(8) as pipe:
        assert len(list(pipe)) == EPOCH
        assert watched.read_ahead.wait(PROMPT_S)
        loop = iter(pipe)
        assert len(list(loop)) == EPOCH
    assert watched.reads[: 2 * LENGTH] == [*range(LENGTH)] * 2


def test_set_epoch_drops_batches_loaded_ahead_and_gives_the_right_ones(
    kind: str,
) -> None:
    expected = epochs(5)
    with pipe_of(kind) as pipe:
        next(iter(pipe))
        pipe.set_epoch(1)  # after a loop that was left early, too
        assert digest(pipe) == expected[1]
        for epoch in (3, 0, 0, 2, 1):
            pipe.set_epoch(epoch)
            assert digest(pipe) == expected[epoch]
        assert digest(pipe) == expected[2]


# Several at once


@WITHOUT_PROCESSES
def test_two_pipelines_at_once_do_not_disturb_each_other(kind: str) -> None:
    with pipe_of(kind) as one, pipe_of(kind) as two:
        pairs = list(zip(one, two, strict=True))
    assert [digest(batches) for batches in zip(*pairs, strict=True)] == epochs(1) * 2


@AT_WORK
def test_two_pipelines_may_run_in_two_threads(kind: str) -> None:
    digests: dict[int, list[str]] = {}

    def train(number: int) -> None:
        with pipe_of(kind) as pipe:
            digests[number] = [digest(pipe), digest(pipe)]

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [digests[0], digests[1]] == [epochs(2)] * 2


# Workers that die


def workers_below() -> list[psutil.Process]:
    """Return the children of the fork server: their parent is not this process."""
    direct = children(recursive=False)
    return [child for child in children(recursive=True) if child not in direct]


def test_killed_workers_are_replaced_and_their_work_done_again() -> None:
    digests, batches = [], []
    with pipe_of("3 processes", wait_s=0.001) as pipe:
        for batch in pipe:
            batches.append(batch)
            if len(batches) in (2, 9):
                workers_below()[0].kill()
        digests.append(digest(batches))
        for worker in workers_below():  # which are idle now
            worker.kill()
        digests.append(digest(pipe))
    assert digests == epochs(2)


def test_fork_servers_may_be_killed_before_they_are_asked_for_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = ForkServer._start  # noqa: SLF001 nobody outside can be as quick
    doomed = iter(range(6))

    def start_doomed(fork_server: ForkServer) -> Child:
        server = start(fork_server)
        if next(doomed, None) is not None:
            server.kill()
            assert server.ends_within(PROMPT_S)
        return server

    monkeypatch.setattr(ForkServer, "_start", start_doomed)
    with pipe_of("3 processes") as pipe:
        assert digest(pipe) == epochs(1)[0]
    assert next(doomed, None) is None


@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_workers_may_die_at_the_moment_of_closing(times: int) -> None:
    with pipe_of("3 processes", length=10**6, wait_s=0.002) as pipe:
        for _ in range(times):
            loop = iter(pipe)
            next(loop)
            for worker in workers_below():
                worker.kill()
            pipe.close()
            assert is_stopped(pipe)


LOCK = multiprocessing.Lock()
with LOCK:  # from here on its memory counts as that of this process
    pass


class Locking(Numbers):
    """Samples are read under a lock that the processes share."""

    def __getitem__(self, index: int) -> Any:
        with LOCK:
            time.sleep(0.01)
            return super().__getitem__(index)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="processes"),
        pytest.param({"thread_safe": True}, id="lanes"),
        pytest.param({"host": "process"}, id="host"),
        pytest.param({"persistent_workers": False}, id="epochs"),
    ],
)
def test_workers_that_are_stopped_finish_their_sample(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker killed during a sample would keep the lock forever."""
    for module, limit in LIMITS:  # which a busy machine would reach
        monkeypatch.setattr(module, limit, PROMPT_S)
    workers: Any = {"executor": "process", "num_parallel_workers": 6}
    settings = dict(options)
    thread_safe = settings.pop("thread_safe", False)
    data = Locking(10**6)
    pipe = ps.Pipeline.from_dataset(data, **workers, thread_safe=thread_safe).batch(2)
    with pipe.options(**settings) as stopped:
        next(iter(stopped))
        if "persistent_workers" in settings:
            next(iter(stopped))  # the workers of the first epoch are stopped
        stopped.close()
        assert LOCK.acquire(timeout=PROMPT_S)
        LOCK.release()


LIMITS = [
    (engine, "CLOSE_S"),
    (processes, "FINISH_S"),
    (fork_server, "FINISH_S"),
    (fork_server, "END_S"),
]
"""How long workers may take to end before they are killed, in seconds."""


@pytest.mark.skipif(ps.config.budget().cpu_cores < 2, reason="one process of workers")
def test_work_is_spread_over_the_processes() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(320), **WORKERS["3 processes"])
    slow = pipe.map(partial(waits, wait_s=0.002), **WORKERS["3 processes"])
    with slow.map(pids, **WORKERS["3 processes"]).batch(8) as batched:
        process_ids = {int(pid) for batch in batched for pid in batch[1]}
    assert 1 < len(process_ids) <= 3
    assert os.getpid() not in process_ids


@pytest.mark.slow
def test_thirty_rounds_of_everything_leave_nothing(kind: str) -> None:
    for round_ in range(30):
        with pipe_of(kind) as pipe:
            for at, _ in enumerate(pipe):
                if at == round_ % EPOCH:
                    break
            loop: Iterator[Any] | None = iter(pipe)
            assert loop is not None
            next(loop)
            if round_ % 3 == 0:
                loop = None
            if round_ % 3 == 1:
                pipe.close()
        assert is_stopped(pipe)
