"""`host="process"`: the same batches, from a child that may die and outlives no one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.pipeline.hosts import serving
from penstock.pipeline.run import Run
from support.batches import COLLATES, Pair, Refusing, same
from support.datasets import KINDS, WORKERS, Counting, Numbers, Sample
from support.functions import BadSample, augment, digest, fails_on, indices, waits
from support.leaks import children

Kind = Mapping[str, Any]

PROMPT_S = 20.0
"""What ends at once, with all the time that a busy machine may need."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def pipe_of(host: Any, first: Kind, second: Kind, length: int = 52) -> ps.Pipeline:
    return (
        ps.Pipeline.from_dataset(Numbers(length), **first)
        .shuffle(seed=3)
        .map(augment, **second)
        .batch(8)
        .options(host=host)
    )


def hosted(kind: Kind, length: int = 52) -> ps.Pipeline:
    return pipe_of("process", kind, kind, length)


def epochs(count: int, length: int = 52) -> list[str]:
    """Return the digests of the first epochs, as made by the trainer itself."""
    inline = WORKERS["inline"]
    with pipe_of("trainer", inline, inline, length) as pipe:
        return [digest(pipe) for _ in range(count)]


def host_of(pipe: ps.Pipeline) -> psutil.Process:
    """Return the process that hosts the engine of a pipeline."""
    (child,) = children()
    assert pipe.stats() is not None
    return child


def run_of(pipe: ps.Pipeline) -> Run:
    run = pipe._slot.run  # noqa: SLF001 there is no other way to one that is live
    assert run is not None
    return run.run


def kill(process: psutil.Process) -> None:
    """Kill it, and wait until it is dead; whoever owns it may still bury it."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


# The same batches


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("inline", "inline"),
        ("2 threads", "2 threads"),
        ("3 processes", "3 processes"),
        ("2 threads", "3 processes"),
        ("3 processes", "inline"),
    ],
)
def test_epochs_are_byte_identical_to_those_of_the_trainer(
    first: str, second: str
) -> None:
    with pipe_of("process", WORKERS[first], WORKERS[second]) as pipe:
        assert [digest(pipe) for _ in range(3)] == epochs(3)


@pytest.mark.parametrize("collate", COLLATES.values(), ids=COLLATES)
def test_a_batch_is_what_collate_fn_returns(collate: Callable[..., Any]) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(40)).batch(8, collate_fn=collate)
    expected = list(pipe.options(host="trainer"))
    with pipe.options(host="process") as pipe:
        found = list(pipe)
    assert len(found) == 5
    assert all(map(same, found, expected))


def test_batches_and_the_pipeline_carry_the_plan() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(20)).batch(8, collate_fn=COLLATES["class"])
    with pipe.options(host="process") as pipe:
        for at, batch in enumerate(pipe):
            assert batch.plan is pipe.plan
            assert (batch.plan.step, batch.plan.n_rows) == (at, (8, 8, 4)[at])


def test_a_namedtuple_keeps_its_type() -> None:
    collate = COLLATES["namedtuple"]
    pipe = ps.Pipeline.from_dataset(Numbers(8)).batch(8, collate_fn=collate)
    with pipe.options(host="process") as pipe:
        (batch,) = pipe
    assert isinstance(batch, Pair)


def odd(sample: Sample) -> bool:
    return sample[1] % 2 == 1


@pytest.mark.parametrize("data", [Numbers(60), Counting(60)], ids=["map", "iterable"])
def test_what_a_filter_leaves_makes_the_same_batches(data: Any, kind: Kind) -> None:
    source = ps.Pipeline.from_dataset(data)
    pipe = source.map(augment, **kind).filter(odd, **kind).batch(8)
    with pipe.options(host="trainer") as pipe:
        expected = [digest(pipe), digest(pipe)]
    with pipe.options(host="process") as pipe:
        assert [digest(pipe), digest(pipe)] == expected


def test_batches_are_on_the_device_asked_for() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(8)).batch(8).to_device("meta")
    with pipe.options(host="process") as pipe:
        (batch,) = pipe
    assert [part.device.type for part in batch] == ["meta", "meta"]
    assert batch.plan.n_rows == 8


# State


def test_state_is_taken_at_consumption_and_restores_exactly(kind: Kind) -> None:
    whole = list(pipe_of("trainer", WORKERS["inline"], WORKERS["inline"]))
    with hosted(kind) as pipe:
        loop = iter(pipe)
        for _ in range(3):
            next(loop)
        state = pipe.state_dict()
    with hosted(kind) as pipe:
        pipe.load_state_dict(state)
        assert digest(pipe) == digest(whole[3:])


def test_set_epoch_break_and_a_new_loop_start_where_they_say(kind: Kind) -> None:
    first, second, third = epochs(3)
    with hosted(kind) as pipe:
        for _ in pipe:
            break
        pipe.set_epoch(2)
        assert digest(pipe) == third
        pipe.set_epoch(0)
        assert [digest(pipe), digest(pipe)] == [first, second]


def test_workers_may_begin_anew_with_each_epoch() -> None:
    data = [1, 2, 3, 4]
    pipe = ps.Pipeline.from_dataset(data, **WORKERS["3 processes"]).batch(4)
    with pipe.options(host="process", persistent_workers=False) as pipe:
        assert [batch.tolist() for batch in pipe] == [[1, 2, 3, 4]]
        data[:] = [5, 6, 7, 8]
        assert [batch.tolist() for batch in pipe] == [[5, 6, 7, 8]]


# Errors


def failing(kind: Kind, **batch: Any) -> ps.Pipeline:
    return (
        ps.Pipeline.from_dataset(Numbers(40), **kind)
        .map(fails_on(21), **kind, name="check")
        .batch(8, **batch)
        .options(host="process")
    )


def test_an_exception_arrives_whole_and_the_next_batch_after_it(kind: Kind) -> None:
    with failing(kind) as pipe:
        loop = iter(pipe)
        before = [next(loop)[1][0].item() for _ in range(2)]
        with pytest.raises(BadSample) as caught:
            next(loop)
        after = [batch[1][0].item() for batch in loop]
    assert (before, after) == ([0, 8], [24, 32])
    assert caught.value.args == (21,)
    assert "Map(ID:1) check" in "".join(caught.value.__notes__)
    assert "in _fail" in str(caught.value.__cause__)


def test_failed_samples_are_substituted_and_marked(kind: Kind) -> None:
    with failing(kind, on_error="substitute", error_budget=0.1) as pipe:
        marks = [batch.plan.substituted for batch in pipe]
    assert marks == [(), (), (5,), (), ()]


def test_a_batch_that_cannot_be_handed_over_says_so() -> None:
    def collate(samples: list[Sample]) -> Any:
        return Refusing() if samples[0][1] == 8 else len(samples)

    pipe = ps.Pipeline.from_dataset(Numbers(24)).batch(8, collate_fn=collate)
    with pipe.options(host="process") as pipe:
        loop = iter(pipe)
        assert next(loop) == 8
        with pytest.raises(TypeError, match='it stays here.*use host="trainer"'):
            next(loop)
        assert list(loop) == [8]


# Memory


def test_what_the_trainer_keeps_stays_and_costs_no_descriptor(kind: Kind) -> None:
    with hosted(kind, 800) as pipe:
        kept, seen = [], []
        for batch in pipe:
            kept.append(batch)
            seen.append(len(os.listdir("/proc/self/fd")))
        child = host_of(pipe)
        assert max(seen[40:]) <= max(seen[:40])
        assert child.num_fds() < 100
        assert digest(kept) == epochs(1, 800)[0]


# Tuning


def test_knobs_turn_and_all_is_measured(kind: Kind) -> None:
    with hosted(kind, 800) as pipe:
        loop = iter(pipe)
        head = [next(loop) for _ in range(10)]
        run = run_of(pipe)
        assert {knob.turn(4) for knob in run.knobs()} <= {4}
        assert {knob.value for knob in run.knobs()} <= {4}
        rest = list(loop)
        stats = pipe.stats()
    assert digest([*head, *rest]) == epochs(1, 800)[0]
    assert stats is not None
    assert (stats.trainer.steps, stats.trainer.rows) == (100, 800)
    assert stats.segments[-1].total.rows >= 800
    assert pipe.explain().stages[-1].name == "Map(ID:2) augment"


def test_the_tuner_decides_for_a_child(tmp_path: Path) -> None:
    ps.set_enable_autotune(True, str(tmp_path / "tuned"))
    slow = partial(waits, wait_s=0.004)
    pipe = ps.Pipeline.from_dataset(Numbers(64)).map(slow, num_parallel_workers=(1, 16))
    deadline_s = time.monotonic() + PROMPT_S
    log = tmp_path / "tuned_0.jsonl"
    with pipe.batch(8).options(host="process") as pipe:
        while time.monotonic() < deadline_s:
            assert [row for batch in indices(pipe) for row in batch] == list(range(64))
            if '"decision"' in log.read_text():
                break
        run = run_of(pipe)
        workers = [k for k in run.knobs() if k.name == "num_parallel_workers"]
    assert '"decision"' in log.read_text()
    assert workers[-1].value > 1


# The child's death


@pytest.fixture
def few_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have most of what is due die with the child."""
    monkeypatch.setattr(serving, "MOST_AHEAD", serving.LEAST_AHEAD)


@pytest.mark.usefixtures("few_ahead")
def test_a_child_that_is_killed_is_replaced_and_no_byte_changes(kind: Kind) -> None:
    found = []
    with hosted(kind, 200) as pipe:
        for epoch in range(2):
            batches = []
            for at, batch in enumerate(pipe):
                batches.append(batch)
                if at % 10 == 3 + epoch:
                    kill(host_of(pipe))
            found.append(digest(batches))
    assert found == epochs(2, 200)


def test_a_child_that_is_killed_between_epochs_is_replaced(kind: Kind) -> None:
    with hosted(kind) as pipe:
        first = digest(pipe)
        kill(host_of(pipe))
        assert [first, digest(pipe)] == epochs(2)


@pytest.mark.usefixtures("few_ahead")
def test_an_error_is_told_once_though_the_child_dies_after_it() -> None:
    with failing(WORKERS["inline"]) as pipe:
        loop = iter(pipe)
        for _ in range(2):
            next(loop)
        with pytest.raises(BadSample):
            next(loop)
        kill(host_of(pipe))
        assert list(indices(loop)) == [list(range(24, 32)), list(range(32, 40))]


def suicide(sample: Sample) -> Sample:
    if sample[1] == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_child_that_always_dies_is_given_up_and_named() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(40)).map(suicide, executor="inline")
    with pipe.batch(8).options(host="process") as pipe:
        loop = iter(pipe)
        assert [next(loop)[1][0].item() for _ in range(2)] == [0, 8]
        with pytest.raises(ps.WorkerError, match=r"pid \d+\) died 6 .*SIGKILL"):
            next(loop)


@pytest.mark.usefixtures("few_ahead")
def test_the_tuners_side_survives_the_child() -> None:
    with hosted(WORKERS["2 threads"], 800) as pipe:
        loop = iter(pipe)
        next(loop)
        run = run_of(pipe)
        before = run.knobs()
        kill(host_of(pipe))
        assert [knob.name for knob in run.knobs()] == [k.name for k in before]
        assert [knob.value for knob in before] == [2, 2, 2, 2]
        assert pipe.stats() is not None
        assert run.observe() is not None
        for _ in range(5):
            next(loop)
        assert run.observe() is None  # another engine, whose counters began anew
        assert run.observe() is not None


# The end


def hangs(sample: Sample) -> Sample:
    if sample[1] == 16:
        time.sleep(1000)
    return sample


def test_close_is_prompt_though_a_function_hangs(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(400)).map(hangs, **kind).batch(8)
    with pipe.options(host="process") as pipe:
        loop = iter(pipe)
        next(loop)
        family = host_of(pipe).children(recursive=True)
        start_s = time.monotonic()
        pipe.close()
        assert time.monotonic() - start_s < 5.0
        assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []


def test_a_stopped_child_is_ended_all_the_same() -> None:
    with hosted(WORKERS["2 threads"], 400) as pipe:
        loop = iter(pipe)
        next(loop)
        host_of(pipe).suspend()
        start_s = time.monotonic()
        pipe.close()
        assert time.monotonic() - start_s < 5.0


def test_a_pipeline_may_be_dropped_in_mid_loop() -> None:
    pipe = hosted(WORKERS["2 threads"], 400)
    loop = iter(pipe)
    next(loop)
    child = host_of(pipe)
    del pipe, loop
    assert psutil.wait_procs([child], timeout=PROMPT_S)[1] == []


def test_iterating_again_after_close_starts_anew(kind: Kind) -> None:
    pipe = hosted(kind)
    first = digest(pipe)
    pipe.close()
    with pipe:
        assert [first, digest(pipe)] == epochs(2)


def test_closing_while_others_ask_is_safe() -> None:
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
    """Start a trainer in a process of its own; give it, in mid loop, and all its."""
    with subprocess.Popen(
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


@pytest.mark.parametrize("workers", KINDS)
def test_ctrl_c_ends_all_at_once(workers: str) -> None:
    with trainer_of(workers) as (script, family):
        script.send_signal(signal.SIGINT)
        assert script.communicate(timeout=PROMPT_S)[0] == "1 True\n"
    assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []


@pytest.mark.parametrize("workers", KINDS)
def test_when_the_trainer_is_killed_its_processes_vanish(workers: str) -> None:
    with trainer_of(workers) as (script, family):
        assert len(family) >= (3 if workers == "3 processes" else 1)
        script.kill()
    assert psutil.wait_procs(family, timeout=PROMPT_S)[1] == []


def test_a_dataset_that_cannot_start_says_so_at_iter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Iterator[None]:
        raise OSError(24, "too many open files")

    monkeypatch.setattr("penstock.pipeline.engine.Gate", broken)
    with pytest.raises(OSError, match="too many open files"):
        iter(hosted(WORKERS["2 threads"]))
