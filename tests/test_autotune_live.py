"""The tuner at work on a running pipeline: it decides, and no byte changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.autotune import tuner
from penstock.autotune.log import read_saved
from penstock.pipeline.session import explanations
from support.datasets import WORKERS, Numbers
from support.functions import augment, digest, indices, waits
from support.json_lines import rows_in

LENGTH = 64
DEADLINE_S = 90.0
"""The tuner decides within a second; a machine with other work gets more."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("penstock.autotune"), "propagate", False)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tuner look more often than it does for users."""
    monkeypatch.setattr(tuner, "CONTROL_S", 0.1)


Told = Callable[[Path], list[dict[str, Any]]]


def slow_pipe(workers: Mapping[str, Any], wait_s: float = 0.004) -> ps.Pipeline:
    return (
        ps.Pipeline.from_dataset(Numbers(LENGTH), executor="inline")
        .shuffle(seed=3)
        .map(augment, executor="inline")
        .map(partial(waits, wait_s=wait_s), **workers)
        .batch(8)
    )


def rows(prefix: Path) -> list[dict[str, Any]]:
    return rows_in(Path(f"{prefix}_0.jsonl"))


def decisions(prefix: Path) -> list[dict[str, Any]]:
    return [row for row in rows(prefix) if row["event"] == "decision"]


def kept(prefix: Path) -> list[dict[str, Any]]:
    return [row for row in rows(prefix) if row["event"] == "outcome" and row["kept"]]


def train(pipe: ps.Pipeline, prefix: Path, until: Told = decisions) -> Iterator[str]:
    """Yield the digests of epochs until the tuner has logged such a line."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not until(prefix) and time.monotonic() < deadline_s:
        yield digest(pipe)


def untuned(epochs: int) -> list[str]:
    """Return the digests of the first epochs, loaded by the trainer alone."""
    ps.set_enable_autotune(False)
    with slow_pipe(WORKERS["inline"], wait_s=0.0) as pipe:
        return [digest(pipe) for _ in range(epochs)]


@pytest.mark.parametrize("workers", ["1 thread", "16 threads", "3 processes"])
def test_epochs_are_byte_identical_while_the_tuner_decides(
    workers: str, tmp_path: Path
) -> None:
    prefix = tmp_path / "tuned"
    ps.set_enable_autotune(True, str(prefix))
    with slow_pipe(WORKERS[workers]) as pipe:
        digests = [digest(pipe), *train(pipe, prefix), digest(pipe), digest(pipe)]
    assert decisions(prefix)
    assert digests == untuned(len(digests))


def test_inline_loading_is_left_alone_and_gives_the_same_bytes(
    tmp_path: Path,
) -> None:
    ps.set_enable_autotune(True, str(tmp_path / "tuned"))
    with slow_pipe(WORKERS["inline"], wait_s=0.001) as pipe:
        digests = [digest(pipe) for _ in range(5)]
    assert digests == untuned(5)
    assert decisions(tmp_path / "tuned") == []


def test_a_pipeline_that_starves_its_trainer_becomes_faster(tmp_path: Path) -> None:
    prefix = tmp_path / "tuned"
    ps.set_enable_autotune(True, str(prefix))
    with slow_pipe(WORKERS["1 thread"], wait_s=0.02) as pipe:
        list(pipe)
        list(train(pipe, prefix, until=kept))
        stats = pipe.stats()
    assert stats is not None
    assert stats.segments[-1].num_parallel_workers > 1
    assert kept(prefix)


def test_pinned_stages_and_bounds_are_respected(tmp_path: Path) -> None:
    prefix = tmp_path / "tuned"
    ps.set_enable_autotune(True, str(prefix))
    wait = partial(waits, wait_s=0.004)
    pipe = (
        ps.Pipeline.from_dataset(Numbers(LENGTH), executor="inline")
        .map(wait, executor="thread", num_parallel_workers=1, tune=False, name="pinned")
        .map(wait, executor="thread", num_parallel_workers=(1, 2), name="bounded")
        .batch(8)
    )
    with pipe:
        list(pipe)
        list(train(pipe, prefix))
        stats = pipe.stats()
    assert stats is not None
    segments = {segment.name: segment for segment in stats.segments}
    assert segments["Map(ID:1) pinned"].num_parallel_workers == 1
    assert segments["Map(ID:2) bounded"].num_parallel_workers <= 2
    assert all("pinned" not in row["op"] for row in decisions(prefix))


def test_tuning_can_be_turned_on_and_off_within_a_loop(tmp_path: Path) -> None:
    prefix = tmp_path / "tuned"
    with slow_pipe(WORKERS["1 thread"]) as pipe:
        loop = iter(pipe)
        first = next(loop)
        ps.set_enable_autotune(True, str(prefix))
        second = next(loop)
        ps.set_enable_autotune(False)
        rest = list(loop)
    rows = [index for batch in indices([first, second, *rest]) for index in batch]
    assert sorted(rows) == list(range(LENGTH))
    (saved_values,) = read_saved(f"{prefix}_0.json").values()
    assert saved_values.knobs


class Turning:
    """Making a sample is a loop in Python, which holds the GIL."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        return sum(range(20_000)) + index


@pytest.mark.slow
@pytest.mark.serial  # needs cores
def test_threads_that_take_turns_at_the_gil_are_reported() -> None:
    source = ps.Pipeline.from_dataset(
        Turning(), executor="thread", num_parallel_workers=4
    )
    with source.batch(8) as pipe:
        end, cause = time.monotonic() + DEADLINE_S, ""
        for number, _ in enumerate(chain.from_iterable(repeat(pipe))):
            if number % 50 == 0:
                cause = pipe.explain().cause
            if cause.startswith("the GIL: held") or time.monotonic() > end:
                break
    assert cause.startswith("the GIL: held")


def test_listeners_get_verdicts_until_they_fail_or_unsubscribe(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports: list[tuple[str, dict[str, float]]] = []

    def fails(name: str, _: object) -> None:
        raise ValueError(name)

    end = ps.on_verdict(lambda name, verdict: reports.append((name, verdict.scalars())))
    ps.on_verdict(fails)
    ps.set_enable_autotune(True)
    with (
        ps.Pipeline.from_dataset(list(range(40_000)))
        .batch(4)
        .options(name="train") as p
    ):
        for _ in p:
            time.sleep(0.002)
            if reports:
                break
    end()
    assert reports
    assert {name for name, _ in reports} == {"train"}
    assert all(0 <= scalars["wait_share"] <= 1 for _, scalars in reports)
    assert caplog.text.count("a listener of verdicts failed") == 1
    before = len(reports)
    with ps.Pipeline.from_dataset(list(range(400))).batch(4) as p:
        for _ in p:
            time.sleep(0.002)
    assert len(reports) == before


def test_two_tuned_loaders_of_one_name_are_explained_apart() -> None:
    ps.set_enable_autotune(True)
    loaders = [ps.DataLoader(list(range(400)), 4, name="train") for _ in range(2)]
    loops = [iter(loader) for loader in loaders]
    for loop in loops:
        next(loop)
    assert sorted(explanations()) == ["train", "train-2"]
    for loader in loaders:
        loader.close()


def test_a_listener_that_never_returns_does_not_stop_a_close(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    called, released = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        called.set()
        released.wait()

    end = ps.on_verdict(stuck)
    ps.set_enable_autotune(True, str(tmp_path / "run"))
    try:
        with ps.Pipeline.from_dataset(list(range(40_000))).batch(4) as pipe:
            for _ in pipe:
                time.sleep(0.002)
                if called.is_set():
                    break
        (tuner,) = (t for t in threading.enumerate() if t.name == "penstock-autotune")
        assert "a function given to on_verdict has not returned" in caplog.text
    finally:
        end()
        released.set()
    tuner.join()
    assert "autotune failed" not in caplog.text
