"""`host="auto"`: the engine leaves the trainer's process when it slows the trainer."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

import penstock as ps
from penstock.autotune import tuner
from penstock.autotune.policies.kinds import Kinds
from penstock.autotune.trial import Trial, Verdict
from penstock.engine import recipe, trainer_cost
from penstock.engine.feed import EngineHost
from penstock.engine.observe.observation import ContentionObservation
from penstock.engine.run import Run
from support.datasets import Numbers
from support.functions import augment, digest
from support.leaks import children

LENGTH = 30 * 8
PACE_S = 0.003
"""A trainer's own part of a step, in which the next batches are made."""


def burn(wanted_s: float) -> None:
    """Hold the GIL for this much of the thread's CPU time."""
    end_s = time.thread_time() + wanted_s
    while time.thread_time() < end_s:
        pass


def costly(sample: Any) -> Any:
    """Take so long that a batch of eight is worth a thread of its own."""
    burn(0.0005)
    return sample


def as_it_is(sample: Any) -> Any:
    return sample


def pipe_of(
    function: Any = as_it_is, length: int = 1 << 20, **kind: Any
) -> ps.Pipeline:
    """Return a pipeline that chooses a thread of the trainer's process by itself."""
    source = ps.Pipeline.from_dataset(Numbers(length), num_parallel_workers=1)
    return source.shuffle(seed=2).map(augment).map(function, **kind).batch(8)


def run_of(pipe: ps.Pipeline) -> Run:
    run = pipe._slot.run  # noqa: SLF001 there is no other way to one that is live
    assert run is not None
    return run


def said(caplog: pytest.LogCaptureFixture) -> str:
    lines = (record.getMessage() for record in caplog.records)
    return "\n".join(line for line in lines if "Pipeline" in line)


def host_when(pipe: ps.Pipeline, text: str, log: Any, step: Any) -> str:
    """Train until the log has this line; return where work is done then."""
    deadline_s = time.monotonic() + 50
    loop = iter(pipe)
    while text not in said(log):
        next(loop)
        step()
        assert time.monotonic() < deadline_s, said(log)
    return run_of(pipe).read().host


def host_once_measured(pipe: ps.Pipeline, step: Any) -> str:
    """Train until contention has been measured and a little longer; return the host."""
    deadline_s = time.monotonic() + 50
    after = 30
    for _ in pipe:
        step()
        run = run_of(pipe)
        after -= run.contention.comparison is not None
        if after <= 0:
            return run.read().host
        assert time.monotonic() < deadline_s
    raise AssertionError


@pytest.fixture(autouse=True)
def _tuned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.autotune")
    ps.set_enable_autotune(True)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose threads for any work, and measure and decide from the first steps on."""
    monkeypatch.setattr(recipe, "WORTH_WORKERS_NS", 0)
    monkeypatch.setattr(trainer_cost, "SHARE", 0.5)
    monkeypatch.setattr(tuner, "CONTROL_S", 0.05)


def always_moved(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> None:
    """Make every measurement lead to a move, and every trial end as requested."""
    verdict = Verdict.KEEP if kept else Verdict.ROLL_BACK
    contention = ContentionObservation(20.0, 10.0, certain=True)
    monkeypatch.setattr(trainer_cost, "compare", lambda *_, **__: contention)
    monkeypatch.setattr(Trial, "verdict", lambda *_: verdict)
    monkeypatch.setattr(Kinds, "other_executor", lambda *_, **__: ())
    monkeypatch.setattr(Kinds, "unprobed", lambda *_: False)
    monkeypatch.setattr(Kinds, "alone", lambda *_: ())


@pytest.mark.serial  # measures time
@pytest.mark.skipif(ps.config.budget().cpu_cores < 2, reason="one core gains nothing")
@pytest.mark.slow  # on a machine that others burn it finds otherwise, and may
def test_an_engine_that_slows_the_trainer_moves_out(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Workers in processes would relieve the trainer, too: what is tried first depends
    # on whether it happens to wait.
    monkeypatch.setattr(Kinds, "other_executor", lambda *_, **__: ())
    with pipe_of(costly) as pipe:
        kind = host_when(pipe, "to new value: [process]", caplog, lambda: burn(0.006))
    assert kind in ("trainer", "process")
    assert "the trainer's own part of a step takes" in said(caplog)


@pytest.mark.serial  # measures time
@pytest.mark.slow  # on a machine that others burn it finds otherwise, and may
def test_a_trainer_that_computes_nothing_keeps_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pipe_of(costly) as pipe:
        assert host_once_measured(pipe, lambda: time.sleep(0.03)) == "trainer"
    assert "to new value: [process]" not in said(caplog)


@pytest.mark.usefixtures("soon")
def test_without_autotune_the_engine_stays_and_its_cost_is_measured() -> None:
    ps.set_enable_autotune(False)
    deadline_s = time.monotonic() + 50
    with pipe_of() as pipe:
        for _ in pipe:
            time.sleep(PACE_S)
            run = run_of(pipe)
            assert run.read().host == "trainer"
            assert time.monotonic() < deadline_s
            if run.contention._looks:  # noqa: SLF001 what looks have found
                break
        assert run.contention.comparison is not None


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kept", [True, False])
def test_batches_are_the_same_wherever_they_come_from(
    kept: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_moved(monkeypatch, kept=kept)
    outcome = f"host trainer -> process {'kept' if kept else 'rolled back'}"
    digests, deadline_s = [], time.monotonic() + 120
    with pipe_of(length=LENGTH) as pipe:
        while outcome not in said(caplog):
            assert time.monotonic() < deadline_s, caplog.text
            digests.append(digest(slowly(pipe)))
        digests.append(digest(pipe))
    with pipe_of(length=LENGTH).options(host="trainer") as pipe:
        assert digests == [digest(pipe) for _ in digests]
    assert children() == []


def slowly(pipe: ps.Pipeline) -> list[Any]:
    """Train an epoch at a trainer's pace."""
    batches = []
    for batch in pipe:
        time.sleep(PACE_S)
        batches.append(batch)
    return batches


def values(run: Run) -> dict[tuple[str, str], object]:
    """Return the values of the knobs that are numbers."""
    knobs = [knob for knob in run.knobs() if isinstance(knob.value, int)]
    return {(knob.operator, knob.name): knob.value for knob in knobs}


def test_no_observation_spans_two_engines() -> None:
    # The tuner's thread may look at any moment of a move.
    ps.set_enable_autotune(False)
    threads = {"executor": "thread", "num_parallel_workers": 1}
    numbers = ps.Pipeline.from_dataset(Numbers(LENGTH), executor="inline")
    with numbers.batch(8) as pipe, numbers.map(augment, **threads).batch(8) as other:
        loop, others = iter(pipe), iter(other)
        next(loop), next(others)
        run, engine = run_of(pipe), run_of(other).host
        assert run.observe() is not None
        first, run.host = run.host, engine
        assert run.observe() is None
        assert run.recent().segments
        run.host = first


@pytest.mark.usefixtures("soon")
def test_a_reading_names_the_host_whose_workers_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The tuner's thread may look while the old host closes, which takes a while.
    always_moved(monkeypatch, kept=True)
    readings: list[tuple[str, str]] = []
    with pipe_of() as pipe:
        close = EngineHost.close

        def closed(host: EngineHost) -> None:
            now = run_of(pipe).read()
            readings.append((now.host, now.segments[-1].executor))
            close(host)

        for _ in pipe:
            time.sleep(PACE_S)
            monkeypatch.setattr(EngineHost, "close", closed)
            if run_of(pipe).read().host == "process":
                break
    assert readings[0] == ("trainer", "thread")


@pytest.mark.usefixtures("soon")
def test_knobs_keep_their_values_when_the_engine_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_moved(monkeypatch, kept=True)
    with pipe_of() as pipe:
        before: dict[tuple[str, str], object] = {}
        for _ in pipe:
            time.sleep(PACE_S)
            run = run_of(pipe)
            if run.read().host == "process":
                after = values(run)
                break
            before = values(run)
        assert after
        assert after.items() <= before.items()


@pytest.mark.usefixtures("soon")
@pytest.mark.usefixtures("two_cores")
def test_an_engine_whose_batches_cannot_be_handed_over_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_moved(monkeypatch, kept=True)

    def collate(samples: list[Any]) -> Any:
        return [threading.Lock() for _ in samples]

    source = ps.Pipeline.from_dataset(Numbers(1 << 20)).map(as_it_is)
    with source.batch(8, collate_fn=collate) as pipe:
        kind = host_when(pipe, "process failed", caplog, lambda: time.sleep(PACE_S))
    assert kind == "trainer"
    assert "batches cannot be handed over (TypeError: cannot pickle" in said(caplog)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "chosen",
    [
        lambda pipe: pipe.options(host="trainer"),
        lambda _: pipe_of(executor="thread"),
    ],
    ids=["host", "executor"],
)
def test_an_explicitly_chosen_host_stays(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_moved(monkeypatch, kept=True)
    with chosen(pipe_of(length=1600)) as pipe:
        for at, _ in enumerate(pipe):
            time.sleep(PACE_S)
            assert [k for k in run_of(pipe).knobs() if k.name == "host"] == []
            if at == 60:
                break


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_loop_that_is_left_while_the_engine_is_paused_ends_at_once(
    executor: str,
) -> None:
    with pipe_of(executor=executor) as pipe:
        for _ in pipe:
            run_of(pipe).calm = True
            time.sleep(PACE_S)
            if run_of(pipe).contention._paused:  # noqa: SLF001 its state
                break
    assert children() == []


@pytest.mark.usefixtures("soon")
def test_an_epoch_that_ends_while_the_engine_is_paused_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_cost, "KNOWN", 1 << 30)
    paused: list[bool] = []
    while not any(paused):
        for batches in range(29, 33):
            with pipe_of(length=8 * batches) as pipe:
                for _ in range(3):
                    count = 0
                    for _ in pipe:
                        run_of(pipe).calm = True
                        time.sleep(PACE_S)
                        count += 1
                        meter = run_of(pipe).contention
                        ends_paused = meter._paused is not None  # noqa: SLF001 its state
                    assert count == batches
                    paused.append(ends_paused)


def waiting(sample: Any) -> Any:
    """Wait for longer than eight threads of a batch hide: 4 ms a sample."""
    time.sleep(0.004)
    return sample


class Counting:
    """Waits, too, and notes how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        return waiting(sample)


def hosts(pipe: ps.Pipeline, steps: int = 12) -> list[str]:
    """Return where work is done after each of some steps."""
    return [run_of(pipe).read().host for _, _ in zip(range(steps), pipe, strict=False)]


def test_with_many_cores_costly_work_leaves_the_trainer_at_once() -> None:
    ps.set_cpu_budget(8)
    with pipe_of(waiting, length=200) as pipe:
        loop = iter(pipe)
        for _ in range(12):
            next(loop)
        reading = run_of(pipe).read()
        [reason] = [move.reason for move in reading.moves if move.knob == "host"]
        assert reading.host == "process"
        assert "with 8 cores, worker processes load instead" in reason
        digests = [digest(pipe) for _ in range(2)]
    with pipe_of(waiting, length=200).options(host="trainer") as pipe:
        next(iter(pipe))
        assert digests == [digest(pipe) for _ in digests]
    assert children() == []


@pytest.mark.parametrize(
    ("cores", "function", "tuned"),
    [(2, waiting, True), (8, as_it_is, True), (8, waiting, False)],
    ids=["few cores", "cheap", "no tuner"],
)
def test_other_work_does_not_leave_at_once(
    cores: int,
    function: Any,
    tuned: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "CONTROL_S", 1000.0)  # the tuner does not look
    ps.set_enable_autotune(tuned)
    ps.set_cpu_budget(cores)
    with pipe_of(function, length=200) as pipe:
        assert set(hosts(pipe)) == {"trainer"}


def test_work_that_keeps_a_state_stays_however_many_cores_there_are() -> None:
    ps.set_cpu_budget(8)
    counting = Counting()
    with pipe_of(counting, length=200) as pipe:
        assert set(hosts(pipe, 25)) == {"trainer"}
    assert counting.calls == 200
