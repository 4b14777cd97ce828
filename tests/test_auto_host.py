"""`host="auto"`: the engine leaves the trainer's process when it is in its way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import penstock as ps
from penstock.engine.host import contention, relocation
from penstock.engine.host.local import TrainerHost
from penstock.engine.host.process import ProcessHost
from support.datasets import Numbers
from support.functions import augment, digest, waits
from support.leaks import children

pytestmark = pytest.mark.timeout(60)
FAR = 60 * 8


def burn(wanted_s: float) -> None:
    """Hold the GIL for so long, of this thread's own time."""
    end_s = time.thread_time() + wanted_s
    while time.thread_time() < end_s:
        pass


def costly(sample: Any) -> Any:
    burn(0.0002)
    return sample


def pipe_of(function: Any = costly, length: int = 1 << 20, **kind: Any) -> ps.Pipeline:
    """One that runs on a thread of the trainer's process, by its own choice."""
    source = ps.Pipeline.from_dataset(Numbers(length), num_parallel_workers=1)
    return source.shuffle(seed=2).map(augment).map(function, **kind).batch(8)


def host_of(pipe: ps.Pipeline) -> object:
    run = pipe._slot.run  # noqa: SLF001 there is no other way to one that is live
    assert run is not None
    return run.run.host


def said(caplog: pytest.LogCaptureFixture) -> str:
    lines = (record.getMessage() for record in caplog.records)
    return "\n".join(line for line in lines if line.startswith("Pipeline: host"))


def host_when(pipe: ps.Pipeline, text: str, log: Any, step: Any) -> type:
    """Train until the log has it; return what hosts the engine then."""
    deadline_s = time.monotonic() + 50
    loop = iter(pipe)
    while text not in said(log):
        next(loop)
        step()
        assert time.monotonic() < deadline_s, said(log)
    return type(host_of(pipe))


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.autotune")


def always_moved(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> None:
    """Let every finding lead to a move, and every trial end as wanted."""
    monkeypatch.setattr(contention.Contention, "costly", True)
    monkeypatch.setattr(contention.Trial, "kept", kept)


@pytest.mark.skipif(ps.config.budget().cpu_cores < 2, reason="it would be as much so")
@pytest.mark.slow  # on a machine that others burn it finds otherwise, and may
def test_an_engine_in_the_trainers_way_moves_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pipe_of() as pipe:
        kind = host_when(pipe, "on trial", caplog, lambda: burn(0.006))
    assert kind is ProcessHost
    assert "the trainer's own part of a step takes" in said(caplog)


@pytest.mark.slow  # on a machine that others burn it finds otherwise, and may
def test_a_trainer_that_computes_nothing_keeps_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pipe_of() as pipe:
        kind = host_when(pipe, "stays", caplog, lambda: time.sleep(0.03))
    assert kind is TrainerHost
    assert "host trainer stays: the trainer's own part of a step takes" in said(caplog)


def test_loading_that_mostly_waits_is_in_nobodys_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pipe_of(partial(waits, wait_s=0.0005)) as pipe:
        kind = host_when(pipe, "stays", caplog, lambda: time.sleep(0.01))
    assert kind is TrainerHost
    assert "host trainer stays: the trainer's own part of a step takes" in said(caplog)


@pytest.mark.parametrize("kept", [True, False])
def test_batches_are_the_same_wherever_they_come_from(
    kept: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_moved(monkeypatch, kept=kept)
    with pipe_of(length=FAR * 4) as pipe:
        found = [digest(slowly(pipe)) for _ in range(2)]
    with pipe_of(length=FAR * 4).options(host="trainer") as pipe:
        assert found == [digest(pipe) for _ in range(2)]
    assert ("kept" if kept else "taken back") in said(caplog)
    assert children() == []


def slowly(pipe: ps.Pipeline) -> Iterator[Any]:
    """Hand batches on, with a trainer's pace."""
    for batch in pipe:
        burn(0.004)
        yield batch


def test_what_was_set_or_found_goes_along(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_moved(monkeypatch, kept=True)
    with pipe_of() as pipe:
        loop = iter(pipe)
        for _ in range(10):
            next(loop)
            burn(0.004)
        run = pipe._slot.run  # noqa: SLF001 the tuner's way to the knobs
        assert run is not None
        for knob in run.run.knobs():
            knob.set(3)
        while "on trial" not in said(caplog):
            next(loop)
            burn(0.004)
        assert {knob.value for knob in run.run.knobs()} == {3}
        assert pipe.stats() is not None


def test_batches_that_cannot_be_handed_over_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_moved(monkeypatch, kept=True)

    def collate(samples: list[Any]) -> Any:
        return [threading.Lock() for _ in samples]

    source = ps.Pipeline.from_dataset(Numbers(1 << 20)).map(costly)
    with source.batch(8, collate_fn=collate) as pipe:
        for _ in pipe:
            burn(0.004)
            if "stays" in said(caplog):
                break
    assert "batches cannot be handed over (TypeError: cannot pickle" in said(caplog)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda pipe: pipe.options(host="trainer"),
        lambda _: pipe_of(executor="thread"),
    ],
    ids=["host", "executor"],
)
def test_what_was_chosen_by_hand_stays(
    chosen: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_moved(monkeypatch, kept=True)
    with chosen(pipe_of(length=1600)) as pipe:
        for at, _ in enumerate(pipe):
            burn(0.002)
            if at == 150:
                break
        assert said(caplog) == ""


def test_a_loop_that_is_left_while_the_engine_holds_still_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relocation, "WARM_STEPS", 0)
    for steps in range(20, 40):
        with pipe_of() as pipe:
            for at, _ in enumerate(pipe):
                burn(0.002)
                if at == steps:
                    break
            start_s = time.monotonic()
        assert time.monotonic() - start_s < 5
        assert children() == []


def test_an_epoch_that_ends_while_the_engine_holds_still_is_followed_by_the_next() -> (
    None
):
    for batches in range(29, 37):
        with pipe_of(length=8 * batches) as pipe:
            for _ in range(3):
                count = 0
                for _ in pipe:
                    burn(0.002)
                    count += 1
                assert count == batches
