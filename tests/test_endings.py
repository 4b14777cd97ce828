"""Ends and interrupts of a trainer's process, seen from outside: as a script.

Whatever ends it, nothing stays behind and nothing hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

import penstock as ps
from penstock.engine import engine
from penstock.engine.far import fork_server, processes
from support import warm
from support.datasets import KINDS, WORKERS, Numbers
from support.forked import End, forked
from support.functions import digest

PROMPT_S = 60.0
"""The limit for what ends at once; a busy machine may need that long."""
AN_HOUR_S = 3600.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PREAMBLE = """
import os, signal, sys, threading, time
import penstock as ps
from support.datasets import Numbers, WORKERS
from support.functions import digest

def pipe_of(kind, length=10**7, wait_s=0.001):
    data = Numbers(length, wait_s=wait_s)
    return ps.Pipeline.from_dataset(data, **WORKERS[kind]).shuffle(seed=2).batch(8)
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a script after the preamble, with stderr in its stdout."""
    return warm.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(script: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for its end; return its exit code and what else it printed."""
    try:
        printed, _ = script.communicate(timeout=PROMPT_S)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(script.pid).children(recursive=True):
            child.kill()
        script.kill()
        printed, _ = script.communicate()
        pytest.fail(f"it had not ended after {PROMPT_S} s; it printed {printed!r}")
    return script.returncode, printed


def test_ctrl_c_ends_a_loop_at_once_and_leaves_nothing(kind: str) -> None:
    script = start(
        """
        pipe = pipe_of(sys.argv[1])
        try:
            for at, batch in enumerate(pipe):
                if at == 2:
                    print("ready", flush=True)
        except KeyboardInterrupt:
            print(threading.active_count(), pipe.stats() is None)
        """,
        kind,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    family = psutil.Process(script.pid).children(recursive=True)
    script.send_signal(signal.SIGINT)
    assert finish(script) == (0, "1 True\n")
    assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []


INTERRUPTED_AGAIN_AND_AGAIN = """
pipe = pipe_of(sys.argv[1], wait_s=0.0)
looping = threading.Event()

def interrupt():
    while True:
        looping.wait()
        looping.clear()
        time.sleep(time.perf_counter_ns() % 2000 * 1e-6)
        os.kill(os.getpid(), signal.SIGINT)

def train():
    for at, batch in enumerate(pipe):
        if at == 2:
            looping.set()

threading.Thread(target=interrupt, daemon=True).start()
for _ in range(int(sys.argv[2])):
    try:
        train()
    except KeyboardInterrupt:
        pipe.close()
print("done")
"""


@pytest.mark.parametrize("times", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_ctrl_c_works_at_any_moment(kind: str, times: int) -> None:
    """It would go on if a lock were held forever, or if an interrupt were lost."""
    times *= 1 if kind == "3 processes" else 6
    script = start(INTERRUPTED_AGAIN_AND_AGAIN, kind, str(times))
    assert finish(script) == (0, "done\n")


def test_sys_exit_within_a_loop_keeps_its_code() -> None:
    script = start("loop = iter(pipe_of('3 processes')); next(loop); sys.exit(7)")
    assert finish(script) == (7, "")


@pytest.mark.parametrize("kind", ["2 threads"])
def test_an_uncaught_exception_shows_one_traceback(kind: str) -> None:
    script = start("for batch in pipe_of(sys.argv[1]): batch.missing", kind)
    code, printed = finish(script)
    assert code == 1
    assert printed.count("Traceback") == 1
    assert "AttributeError" in printed.splitlines()[-1]


def test_when_the_trainer_is_killed_its_processes_vanish() -> None:
    script = start(
        """
        for at, batch in enumerate(pipe_of("3 processes")):
            if at == 2:
                print("ready", flush=True)
        """
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    family = psutil.Process(script.pid).children(recursive=True)
    assert len(family) >= 2  # the fork server, and children for three workers
    script.kill()
    assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []
    assert finish(script)[0] == -signal.SIGKILL


def test_the_collector_may_run_while_the_engine_is_locked() -> None:
    """Drop a loop in a cycle, for the collector to find at each of many allocations."""
    script = start(
        """
        import gc
        from penstock.engine import engine
        engine.STUCK_S = 0.02  # what is waited for is not the question
        pipe = pipe_of("2 threads")
        gc.freeze()
        for allocations in range(1, 80):
            gc.disable()
            ring = [loop := iter(pipe)]
            next(loop)
            ring.append(ring)
            del loop, ring
            gc.set_threshold(gc.get_count()[0] + allocations, 1, 1)
            gc.enable()
            pipe.stats()
            gc.disable()
            gc.collect()
        print("done")
        """
    )
    assert finish(script) == (0, "done\n")


@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
@pytest.mark.parametrize(
    "state", [pytest.param("idle", marks=pytest.mark.slow), "busy"]
)
def test_a_forked_trainer_may_run_the_pipeline_by_itself(
    workers: str, state: str
) -> None:
    pipe = pipe_of(workers, 80)
    expected = digest(pipe)
    loop = iter(pipe)
    if state == "idle":
        list(loop)

    def train(end: End) -> None:
        pipe.set_epoch(0)
        end.tell(digest(pipe))
        pipe.close()

    with pipe:
        with forked(train) as child:
            assert child.hear() == expected
            assert child.ended() == 0
        pipe.set_epoch(0)
        assert digest(pipe) == expected


def pipe_of(kind: str, length: int) -> ps.Pipeline:
    source = ps.Pipeline.from_dataset(Numbers(length), **WORKERS[kind])
    return source.shuffle(seed=2).batch(8)


def test_a_fork_that_lives_on_does_not_keep_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end by themselves: to be killed, they would have to live on for an hour."""
    for module, limit in ((engine, "CLOSE_S"), (processes, "FINISH_S")):
        monkeypatch.setattr(module, limit, AN_HOUR_S)
    for limit in ("FINISH_S", "END_S"):
        monkeypatch.setattr(fork_server, limit, AN_HOUR_S)
    with pipe_of("3 processes", 10**7) as pipe:
        loop = iter(pipe)
        next(loop)
        with forked(lives_on) as child:
            assert child.hear() == "alive"
            pipe.close()
            child.tell("end")
            assert child.hear() == "still alive"


def lives_on(end: End) -> None:
    end.tell("alive")
    end.hear()
    end.tell("still alive")


LISTED = """
import threading
import penstock as ps

ps.set_enable_autotune(True)
loader = ps.DataLoader(range(10_000), 8)
loop = iter(loader)
next(loop)
with threading._active_limbo_lock:  # as if the collector ran inside `enumerate`
    del loop, loader
print("closed")
"""


def test_the_collector_may_run_while_python_lists_its_threads() -> None:
    """A thread that ends leaves that list, for which it needs the same lock."""
    process = warm.run([sys.executable, "-P", "-c", LISTED], timeout=60)
    assert (process.stdout, process.returncode) == ("closed\n", 0), process.stderr


def test_a_second_close_returns_only_when_the_first_has_closed() -> None:
    """A finaliser may be closing while the program ends."""
    loader = ps.DataLoader(range(64), 8, sample_seeding=True)
    list(loader)
    slot = loader._slot  # noqa: SLF001
    assert slot.run is not None
    has_begun, may_end, order = threading.Event(), threading.Event(), list[str]()
    close = slot.run.close

    def slowly() -> None:
        has_begun.set()
        may_end.wait(60)
        close()
        order.append("closed")

    def again() -> None:
        slot.close()
        order.append("returned")

    slot.run.close = slowly  # type: ignore[method-assign]
    threads = [threading.Thread(target=target) for target in (slot.close, again)]
    threads[0].start()
    assert has_begun.wait(60)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert order == ["closed", "returned"]
