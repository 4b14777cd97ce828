"""Each restriction of a setting is met by a program, and told once it matters.

First, real programs meet the reasons. Whether one matters is seen in windows made for
it, so that no test depends on how busy the machine is.
"""

from __future__ import annotations

import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.autotune.explain import explain
from penstock.autotune.log import AutotuneLog
from penstock.autotune.policies.bottleneck_law import BottleneckLaw
from penstock.autotune.tuner import Tuner
from penstock.engine import in_children
from penstock.engine.observe.observation import (
    Knob,
    Move,
    Observation,
    Restriction,
    TrainerObservation,
)
from penstock.system.resources import Budget
from support.windows import DECODE, READ, ROOMY, computing, starved

BATCH = 8
WAITS_S = 0.002
"""A sample waits this long, so that workers would pay."""


class Slow:
    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(WAITS_S)
        return index


class Few(Slow):
    def __len__(self) -> int:
        return 4 * BATCH


class Counts(Slow):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return super().__getitem__(index)


class Draws(Slow):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + random.random()


class Grows(Slow):
    def __init__(self) -> None:
        self.weight = torch.ones(1, requires_grad=True)

    def __getitem__(self, index: int) -> Any:
        return self.weight * super().__getitem__(index)


class Reads(Slow):
    """Reads from one open file."""

    def __init__(self) -> None:
        self.file = io.BytesIO(b"content")

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index % 7)
        return super().__getitem__(index)


class Asks(Slow):
    """Holds threads of its own."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)


class Streams(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(100_000)


class Looks(torch.utils.data.Sampler[int]):
    """A sampler of the program's own, which may see what the loop does."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def __iter__(self) -> Iterator[int]:
        return (len(self.losses) + index for index in range(2_000))

    def __len__(self) -> int:
        return 2_000


def doubled(sample: Any) -> Any:
    time.sleep(WAITS_S)
    return sample


def of(data: Any, **options: Any) -> ps.Pipeline:
    return ps.Pipeline.from_dataset(data, **options).batch(BATCH)


def loader(data: Any, **options: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(data, batch_size=BATCH, **options)


def two_stages(**options: Any) -> ps.Pipeline:
    """A stage that the trainer runs, and one that threads run."""
    source = ps.Pipeline.from_dataset(Slow())
    return source.map(doubled, num_parallel_workers=2, **options)


PROGRAMS: dict[Restriction, Callable[[], Any]] = {
    Restriction.PINNED: lambda: two_stages(tune=False).batch(BATCH),
    Restriction.GIVEN: lambda: of(Slow(), num_parallel_workers=2, executor="thread"),
    Restriction.ALONE: lambda: of(Counts(), num_parallel_workers=1, executor="process"),
    Restriction.HOSTED: lambda: two_stages().batch(BATCH).options(host="trainer"),
    Restriction.ZERO: lambda: loader(Slow(), num_workers=0),
    Restriction.SHORT: lambda: loader(Few()),
    Restriction.SAMPLER: lambda: loader(Slow(), sampler=Looks()),
    Restriction.ITERABLE: lambda: of(Streams()),
    Restriction.SHARED: lambda: of(Reads()),
    Restriction.CHANGES_THERE: lambda: of(
        Counts(), num_parallel_workers=1, executor="process"
    ),
    Restriction.CHANGES: lambda: loader(Counts()),
    Restriction.BELONGS: lambda: loader(Asks()),
    Restriction.DREW: lambda: of(Draws()),
    Restriction.GRADIENTS: lambda: loader(Grows()),
    Restriction.FORKLESS: lambda: two_stages().batch(BATCH),
}
MEASURED = {
    Restriction.BOUNDED,
    Restriction.MEMORY,
    Restriction.TRIED,
    Restriction.TRIED_MORE,
}
"""Reasons that are no state of the program's, but numbers of a window."""


def test_every_reason_is_tested() -> None:
    assert PROGRAMS.keys() | MEASURED == set(Restriction)


def as_pattern(reason: str) -> str:
    return ".+".join(map(re.escape, reason.split("{}")))


@pytest.mark.parametrize("reason", PROGRAMS, ids=lambda reason: reason.name)
def test_a_program_meets_the_reason(
    reason: Restriction, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason is Restriction.FORKLESS:
        monkeypatch.setattr(in_children, "FORKS", False)
    ps.set_enable_autotune(True)
    reasons: set[str] = set()
    with PROGRAMS[reason]() as face:
        for _ in chain.from_iterable(repeat(face, 3)):
            segments = face.stats().segments
            reasons |= {s.held for s in segments} | {s.stays for s in segments}
            if any(re.search(as_pattern(reason), why) for why in reasons):
                return
    pytest.fail(f"{reasons}")


# A window in which the setting is wanted


def filled(reason: Restriction) -> str:
    return reason.format(*["`x`"] * reason.count("{}"))


def short_of_workers(**changes: Any) -> Observation:
    observation = starved()
    return replace(
        observation,
        segments=(replace(observation.segments[0], **changes), observation.segments[1]),
    )


def at_the_gil(**changes: Any) -> Observation:
    observation = replace(computing(), gil_held=0.9)
    last = replace(observation.segments[1], num_parallel_workers=4, **changes)
    return replace(observation, segments=(observation.segments[0], last))


def uneven(**changes: Any) -> Observation:
    observation = starved()
    trainer = TrainerObservation(steps=10, rows=64, wait_s=0.5, gap_s=0.5)
    late = {"run_s": 1.2, "wait_input_s": 0.0, "wait_credit_s": 2.8, "cpu_s": 0.0}
    more: Any = {"num_parallel_workers": 4, "worker_s": 4.0, **late, **changes}
    last = replace(observation.segments[1], **more)
    first = replace(observation.segments[0], run_s=0.1)
    return replace(observation, trainer=trainer, segments=(first, last))


BACK = Move(DECODE, "process", "thread", "moved", "slower", time_s=0.5)
WANTED: dict[Restriction, tuple[Observation, Budget]] = {
    Restriction.BOUNDED: (short_of_workers(max_workers=1), ROOMY),
    Restriction.ALONE: (short_of_workers(held=filled(Restriction.ALONE)), ROOMY),
    Restriction.TRIED_MORE: (short_of_workers(held=Restriction.TRIED_MORE), ROOMY),
    Restriction.ITERABLE: (short_of_workers(iterable=True), ROOMY),
    Restriction.TRIED: (at_the_gil(moves=(BACK,)), ROOMY),
    Restriction.MEMORY: (
        replace(uneven(), held_bytes=4 << 20, batch_bytes=1 << 20),
        Budget(100.0, 4 << 20),
    ),
}
INLINE = (
    Restriction.ZERO,
    Restriction.SHORT,
    Restriction.SAMPLER,
    Restriction.SHARED,
    Restriction.BELONGS,
    Restriction.DREW,
)
"""Reasons for which the trainer makes batches itself."""


def windows(reason: Restriction) -> Iterator[tuple[Observation, Budget]]:
    """Yield windows in which the reason matters."""
    if reason in WANTED:
        yield WANTED[reason]
    elif reason is Restriction.PINNED:
        yield short_of_workers(held=reason), ROOMY
        yield at_the_gil(held=reason), ROOMY
        yield uneven(held=reason), ROOMY
    elif reason in INLINE:
        yield short_of_workers(executor="inline", stays=filled(reason)), ROOMY
    elif reason is Restriction.CHANGES_THERE:
        why = Restriction.ALONE.format(filled(reason))
        yield short_of_workers(held=why, executor="process"), ROOMY
    else:
        yield at_the_gil(stays=filled(reason)), ROOMY
        yield short_of_workers(executor="inline", stays=filled(reason)), ROOMY


class Still:
    """A pipeline of which nothing may be changed, and that is always as in a window."""

    calm = True
    tried: Mapping[str, str] = MappingProxyType({})

    def __init__(self, observation: Observation) -> None:
        self.observation, self.looks = observation, 0

    @property
    def trained(self) -> TrainerObservation:
        return replace(self.observation.trainer, steps=self.looks * 10)

    def observe(self) -> Observation:
        self.looks += 1
        return replace(self.observation, time_s=float(self.looks), step=self.looks * 10)

    def knobs(self) -> tuple[Knob, ...]:
        return ()


TRIALS = {Restriction.TRIED, Restriction.TRIED_MORE}
"""Those which the log has told already."""
CHOICES = {Restriction.GIVEN, Restriction.HOSTED, Restriction.MEMORY}
"""What the program chose: the advice is to choose otherwise."""


@pytest.mark.parametrize("reason", Restriction, ids=lambda reason: reason.name)
def test_the_reason_is_told_and_no_advice_asks_for_what_is_restricted(
    reason: Restriction, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.autotune")
    for observation, budget in windows(reason):
        explanation = explain(observation, budget, tuned=True)
        assert re.search(as_pattern(reason), explanation.cause)
        assert explanation.restricted is not None
        assert explanation.restricted.why in explanation.cause
        if reason not in CHOICES:
            assert not explanation.advice
            untuned = explain(observation, budget).advice
            assert (
                reason is Restriction.PINNED
                or not untuned
                or reason is Restriction.TRIED
            )
        caplog.clear()
        with AutotuneLog() as log:
            tuner = Tuner(Still(observation), BottleneckLaw(), budget, log)
            for _ in range(12):
                tuner.step()
        lines = [line for line in caplog.messages if "stays" in line]
        reports = [line for line in lines if explanation.restricted.why in line]
        assert len(reports) == (reason not in TRIALS)
        assert all(READ in line or DECODE in line for line in reports)
