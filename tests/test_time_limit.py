"""`timeout=`: a stuck worker shows where it is and is replaced, and nothing is lost."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.engine.far import child, far_pool, processes
from penstock.engine.far.processes import ProcessPool, WorkerChild
from support.datasets import Counting, Numbers
from support.functions import indices
from support.leaks import children

LIMIT_S = 3600.0
"""No sample takes as long, not even on a busy machine: what is late, a clock says."""
LEAP_NS = 10**15
POLL_S = 0.001


class Leaping:
    """The watchdog's clock: it leaps when nothing is left to do but stuck samples.

    Args:
        stuck: returns how often a worker has got stuck so far.
        writes: what a stuck worker's stacks have in them; the clock waits for it.
        alone: whether all other work must be done first.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        stuck: Callable[[], int],
        *,
        writes: str = "",
        alone: bool = True,
    ) -> None:
        self._stuck, self._writes, self._alone = stuck, writes, alone
        self._killed: set[WorkerChild] = set()
        self._leaps = 0
        patch.setattr(processes, "time", self)
        patch.setattr(processes, "STACKS_NS", LEAP_NS)
        # A leap is no Ctrl-Z.
        patch.setattr(processes, "LATE_NS", 9 * LEAP_NS)
        watch = ProcessPool._watch  # noqa: SLF001 to be looked at more often

        def often(pool: ProcessPool) -> tuple[float | None, list[WorkerChild]]:
            self._look([*pool._children])  # noqa: SLF001
            wait_s, lost_children = watch(pool)
            return None if wait_s is None else min(wait_s, POLL_S), lost_children

        patch.setattr(ProcessPool, "_watch", often)

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self._leaps * LEAP_NS

    monotonic = staticmethod(time.monotonic)

    def _look(self, children: list[WorkerChild]) -> None:
        self._killed.update(child for child in children if child.killed_ns)
        # A child may have a second errand, which waits for the stuck one.
        busy_count = sum(bool(child.errands) for child in children)
        self._leaps = 0
        if self._stuck() > len(self._killed) and (busy_count == 1 or not self._alone):
            self._leaps = 1 + any(map(self._has_written, children))

    def _has_written(self, child: WorkerChild) -> bool:
        return bool(child.asked_ns) and self._writes in child.status_page.text()


def pipe_of(
    function: Any, *, workers: int = 3, length: int = 60, **settings: Any
) -> ps.Pipeline:
    source = ps.Pipeline.from_dataset(Numbers(length), executor="inline")
    stage = source.map(
        function, executor="process", num_parallel_workers=workers, **settings
    )
    return stage.batch(6)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def whole(pipe: ps.Pipeline) -> list[int]:
    return [index for batch in indices(pipe) for index in batch]


@pytest.mark.parametrize("workers", [1, 9])
def test_a_sample_that_is_stuck_once_is_repeated(
    workers: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = tmp_path / "stuck"
    Leaping(monkeypatch, lambda: size_of(stuck), writes="gets_stuck_here")

    def gets_stuck_here(sample: Any) -> Any:
        if sample[1] == 31 and not stuck.exists():
            stuck.write_text("1")
            threading.Event().wait()
        return sample

    # Long enough that no worker reaches this sample of the next epoch meanwhile.
    pipe = pipe_of(gets_stuck_here, workers=workers, length=240, timeout=LIMIT_S)
    with caplog.at_level(logging.WARNING, "penstock"), pipe:
        assert whole(pipe) == list(range(240))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "while working on sample index 31" in line
    assert "replaced as it was stuck" in line
    assert "gets_stuck_here" in line  # its stack


class Together(Numbers):
    """Ends the process that reads several samples in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        os._exit(3)


def test_samples_with_a_limit_are_read_one_by_one() -> None:
    kind = {"executor": "process", "num_parallel_workers": 1}
    source = ps.Pipeline.from_dataset(Together(60), timeout=LIMIT_S, **kind)
    with source.batch(6) as pipe:
        assert whole(pipe) == list(range(60))


def test_whoever_watches_the_samples_hands_them_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The pool's thread waits for as long as the last lease may take: of one that
    # somebody else has handed out, it would not know.
    hand_out, trainer = ProcessPool._hand_out, threading.get_ident()  # noqa: SLF001
    by: set[int] = set()

    def noted(pool: ProcessPool) -> None:
        by.add(threading.get_ident())
        hand_out(pool)

    monkeypatch.setattr(ProcessPool, "_hand_out", noted)
    with pipe_of(lambda sample: sample, workers=1, timeout=LIMIT_S) as pipe:
        assert whole(pipe) == list(range(60))
    assert trainer not in by


def test_a_sample_that_is_always_stuck_is_given_up_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "stuck"
    Leaping(monkeypatch, lambda: size_of(stuck), writes="gets_stuck_here")

    def gets_stuck_here(sample: Any) -> Any:
        if sample[1] == 31:
            with stuck.open("a") as file:
                file.write("1")
            threading.Event().wait()
        return sample

    with pipe_of(gets_stuck_here, timeout=LIMIT_S) as pipe:
        loop = iter(pipe)
        assert len([next(loop) for _ in range(5)]) == 5
        with pytest.raises(ps.WorkerError, match="5 times on sample index 31") as error:
            next(loop)
        assert "gets_stuck_here" in str(error.value)
        assert [batch[1].tolist()[0] for batch in loop] == [36, 42, 48, 54]


def test_many_slow_samples_within_the_limit_are_not_disturbed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that all processes share, each takes nine tenths of the limit."""
    with mmap.mmap(-1, 8) as page, memoryview(page).cast("q") as now_ns:
        now_ns[0] = 1
        clock = SimpleNamespace(
            monotonic_ns=lambda: now_ns[0], monotonic=time.monotonic
        )
        for module in (child, far_pool, processes):
            monkeypatch.setattr(module, "time", clock)

        def takes_its_time(sample: Any) -> Any:
            now_ns[0] += int(0.9 * LIMIT_S * 1e9)
            time.sleep(POLL_S)  # in which the watchdog looks
            return sample

        watch = ProcessPool._watch  # noqa: SLF001 to be looked at more often
        often = lambda self: (POLL_S / 4, watch(self)[1])  # noqa: E731
        monkeypatch.setattr(ProcessPool, "_watch", often)
        with pipe_of(takes_its_time, workers=1, timeout=LIMIT_S) as pipe:
            assert whole(pipe) == list(range(60))
            assert now_ns[0] > 10 * LIMIT_S * 1e9
    assert not caplog.records


def test_a_stopped_worker_is_replaced_and_reported_as_stopped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_pids: list[int] = []
    Leaping(monkeypatch, lambda: len(stopped_pids), alone=False)
    with pipe_of(same, workers=1, length=600, timeout=LIMIT_S) as pipe:
        loop = iter(pipe)
        batches = [next(loop)]
        (worker,) = children()[0].children()
        worker.suspend()
        while worker.status() != psutil.STATUS_STOPPED:
            os.sched_yield()  # a busy machine lets it stop when its turn comes
        stopped_pids.append(worker.pid)
        batches += loop
    assert list(indices(batches)) == [[*range(at, at + 6)] for at in range(0, 600, 6)]
    assert "stopped by a signal (SIGSTOP" in caplog.text


def same(sample: Any) -> Any:
    return sample


def test_a_stopped_worker_without_a_limit_does_not_prevent_closing() -> None:
    with pipe_of(same, length=6000) as pipe:
        next(iter(pipe))
        for child in children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()  # nobody lets it go on


def test_auto_chooses_workers_that_can_be_stopped_if_there_is_a_limit() -> None:
    with ps.Pipeline.from_dataset(Numbers(8)).map(abs_of, timeout=9).batch(4) as pipe:
        list(pipe)
        stats = pipe.stats()
    assert stats is not None
    assert stats.segments[-1].executor == "process"


def abs_of(sample: Any) -> Any:
    return abs(sample[1])


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_workers_that_cannot_be_stopped_refuse_a_limit(executor: Any) -> None:
    with pytest.raises(ps.SpecError, match="needs workers that can be stopped"):
        ps.Pipeline.from_dataset([1]).map(abs, executor=executor, timeout=1)


@pytest.mark.parametrize("limit", [0, -1, "1", True])
def test_a_limit_must_be_a_positive_number_of_seconds(limit: Any) -> None:
    with pytest.raises(ps.SpecError, match="`timeout` is the seconds"):
        ps.Pipeline.from_dataset([1]).map(abs, timeout=limit)


def test_an_iterable_read_in_the_trainer_refuses_a_limit() -> None:
    with pytest.raises(ps.SpecError, match="cannot be interrupted"):
        ps.Pipeline.from_dataset(Counting(8), timeout=1)
