"""Without requested workers the trainer makes the batches, as with torch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.engine import makers, run
from penstock.engine.core import connector
from penstock.engine.feed import EngineHost
from penstock.engine.makers import DirectHost
from support.moves import workers_pay

LENGTH = 40


class Rows:
    """Rows of a table, some of which draw."""

    def __init__(self, draw: Callable[[], float] | None = None, every: int = 1) -> None:
        self.table = np.arange(LENGTH * 3, dtype=np.float32).reshape(LENGTH, 3)
        self.draw, self.every = draw, every

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        number = self.draw() if self.draw and index % self.every == 0 else 0.0
        return self.table[index], self.table[index, 0], index, number


def plain(batches: Any) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in batches]


@pytest.fixture(autouse=True)
def _tuned() -> Iterator[None]:
    ps.set_enable_autotune(True)
    yield
    ps.set_enable_autotune(False)


def knob(loader: Any) -> Any:
    """Return the executor's knob once there is one."""
    knobs = loader._slot.run.knobs()  # noqa: SLF001
    return next((knob for knob in knobs if knob.name == "executor"), None)


def move(loader: Any, moves: list[str | None], step: int) -> None:
    """Ask for each executor in `moves` for two steps.

    On a busy machine a loader may already have moved to where it has no such choice.
    """
    executor = moves[step // 2] if step // 2 < len(moves) else None
    executor_knob = knob(loader)
    if executor_knob is not None and executor in executor_knob.choices:
        executor_knob.set(executor)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    moves=st.lists(st.sampled_from(["inline", "process", None]), max_size=6),
    draws=st.sampled_from([None, "all", "late"]),
)
def test_a_move_to_workers_and_back_changes_no_batch(
    moves: list[str | None], draws: str | None
) -> None:
    def loader() -> Any:
        every = 1 if draws == "all" else 17
        data = Rows(random.random if draws else None, every)
        generator = torch.Generator().manual_seed(3)
        return ps.DataLoader(data, 3, shuffle=True, generator=generator)

    torch.manual_seed(1)
    expected = plain(loader())
    torch.manual_seed(1)
    batches, moving = [], loader()
    for step, batch in enumerate(moving):
        batches += plain([batch])
        move(moving, moves, step)
    assert batches == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_samplers_batches_are_one_regime_whatever_their_sizes(workers: int) -> None:
    sizes = [3, 1, 8, 8, 2, 18]
    ends = np.cumsum(sizes)
    batches = [[*range(end - size, end)] for size, end in zip(sizes, ends, strict=True)]
    loader = ps.DataLoader(Rows(), batch_sampler=batches, num_workers=workers)  # type: ignore[arg-type]
    for _ in range(2):
        for size, batch in zip(sizes, loader, strict=True):
            assert len(batch[0]) == size
            assert loader._slot.run.read().regime == ""  # noqa: SLF001


def test_the_executor_follows_its_knob_there_and_back() -> None:
    with ps.Pipeline.from_dataset(Rows()).batch(2) as pipe:
        are_direct = []
        for step, _ in enumerate(pipe):
            assert pipe._slot.run is not None  # noqa: SLF001
            host = pipe._slot.run.host  # noqa: SLF001
            are_direct.append(isinstance(host, DirectHost))
            if step in (5, 9, 14):
                knob(pipe).set("inline" if step == 9 else "process")
    assert are_direct[0]  # on a busy machine tuning may soon find that threads pay
    assert are_direct[6:] == [*[False] * 4, *[True] * 5, *[False] * 5]


def test_a_host_that_was_wanted_is_forgotten_once_the_trainer_loads_again() -> None:
    ps.set_enable_autotune(False)
    with workers_pay(), ps.Pipeline.from_dataset(Rows()).batch(2) as pipe:
        loop = iter(pipe)
        next(loop)
        run: Any = pipe._slot.run  # noqa: SLF001
        next(knob for knob in run.knobs() if knob.name == "host").set("process")
        for executor in ("inline", "thread"):
            next(loop)
            knob(pipe).set(executor)
        hosts = [run.host.kind for _ in zip(range(3), loop, strict=False)]
    assert hosts == ["trainer"] * 3


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    moves=st.lists(st.sampled_from(["inline", "process", None]), max_size=5),
    size=st.integers(1, 7),
    left=st.integers(0, 9),
)
def test_a_move_changes_no_batch_after_a_filter_either(
    moves: list[str | None], size: int, left: int
) -> None:
    indices = [index for index in range(LENGTH) if index % 3 != 1]
    expected = [indices[at : at + size] for at in range(0, len(indices), size)]
    source = ps.Pipeline.from_dataset(Rows()).filter(lambda row: row[2] % 3 != 1)
    with source.batch(size) as pipe:
        for step, batch in enumerate(pipe):
            if step == left:
                break  # the next epoch omits nothing
            assert batch[2].tolist() == expected[step]
        batches = []
        for step, batch in enumerate(pipe):
            batches.append(batch[2].tolist())
            move(pipe, moves, step)
    assert batches == expected


class Clock:
    """The clocks by which the trainer decides, turned by hand."""

    def __init__(self) -> None:
        self.now_ns = self.cpu_ns = 1_000_000_000

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def thread_time_ns(self) -> int:
        return self.cpu_ns

    def work(self, ms: float) -> None:
        self.cpu_ns += int(ms * 1e6)
        self.wait(ms)

    def wait(self, ms: float) -> None:
        self.now_ns += int(ms * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (makers, connector, run):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Stream(torch.utils.data.IterableDataset[int]):
    """Slow enough to be worth a thread: a sample takes a millisecond."""

    opened = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        for index in range(100):
            self.clock.work(1)
            yield index


def host_of(pipe: ps.Pipeline) -> type:
    assert pipe._slot.run is not None  # noqa: SLF001
    return type(pipe._slot.run.host)  # noqa: SLF001


@pytest.mark.parametrize(
    ("trains_ms", "away", "host"),
    [
        (0.0, (), DirectHost),
        (1.6, (), DirectHost),  # a thread would take most of that for itself
        (2.0, (), EngineHost),
        (5.0, (), EngineHost),
        (0.0, (5, 15), DirectHost),  # as if it evaluated
    ],
)
def test_a_thread_reads_an_iterable_if_the_trainer_computes_meanwhile(
    trains_ms: float, away: tuple[int, ...], host: type, clock: Clock
) -> None:
    with ps.Pipeline.from_dataset(Stream(clock)).batch(4) as pipe:
        for step, batch in enumerate(pipe):
            assert batch.tolist() == [*range(4 * step, 4 * step + 4)]
            clock.work(200 if step in away else trains_ms)
        assert host_of(pipe) is host


def test_a_thread_continues_the_iterator_that_the_trainer_began(clock: Clock) -> None:
    stream = Stream(clock)
    with ps.Pipeline.from_dataset(stream).batch(7) as pipe:
        hosts = []
        for _ in range(2):
            values = []
            for batch in pipe:
                values += batch.tolist()
                clock.work(5)  # training time that a thread can use to load
                hosts.append(host_of(pipe))
            assert values == list(range(100))
        assert hosts[0] is DirectHost
        assert hosts[-1] is EngineHost
        for _ in zip(range(5), pipe, strict=False):
            state = pipe.state_dict()
    assert stream.opened == 3
    with ps.Pipeline.from_dataset(Stream(clock)).batch(7) as pipe:
        pipe.load_state_dict(state)
        assert [at for batch in pipe for at in batch.tolist()] == list(range(35, 100))


class Watching:
    """A sampler whose choice depends on what the trainer has done so far."""

    def __init__(self) -> None:
        self.chosen = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            yield self.chosen

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("wait_s", [0.0, 0.01], ids=["fast", "slow"])
@pytest.mark.parametrize("face", [torch.utils.data.DataLoader, ps.DataLoader])
def test_a_sampler_may_watch_the_trainer(face: Any, wait_s: float) -> None:
    class Waiting(Rows):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            time.sleep(wait_s)  # long enough that workers would pay
            return super().__getitem__(index)

    sampler = Watching()
    indices = []
    for step, batch in enumerate(face(Waiting(), 1, sampler=sampler)):
        indices.append(int(batch[2]))
        sampler.chosen = step + 1
    assert indices == list(range(10))


def test_the_report_charges_the_trainer_for_what_it_makes() -> None:
    source = ps.Pipeline.from_dataset(Rows(), executor="inline")
    with source.batch(4, collate_fn=torch.utils.data.default_collate) as pipe:
        list(pipe)
        stats = pipe.stats()
    assert stats is not None
    (segment,) = stats.segments
    assert segment.executor == "inline"
    assert segment.rows == LENGTH
    assert 0 < segment.run_s <= stats.trainer.wait_s
    assert [part.name.split("(")[0] for part in segment.parts] == ["Dataset", "Batch"]
    took_s = sum(part.run_s_per_row * part.rows for part in segment.parts)
    assert took_s == pytest.approx(segment.run_s)


def test_a_failed_sample_is_named_and_the_loop_goes_on_after_its_batch() -> None:
    class Failing(Rows):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            if index == 9:
                raise ValueError("nine")
            return super().__getitem__(index)

    loop = iter(ps.DataLoader(Failing(), 4))
    next(loop), next(loop)
    with pytest.raises(ValueError, match="nine") as caught:
        next(loop)
    assert "sample index 9" in "".join(caught.value.__notes__)
    assert next(loop)[2].tolist() == [12, 13, 14, 15]


def slow(row: tuple[Any, ...]) -> tuple[Any, ...]:
    time.sleep(0.001)
    return row


def test_each_stage_that_the_trainer_runs_has_its_own_time() -> None:
    source = ps.Pipeline.from_dataset(Rows(), executor="inline")
    with source.map(slow, executor="inline").batch(4) as pipe:
        list(pipe)
        stats = pipe.stats()
    assert stats is not None
    (segment,) = stats.segments
    kinds = [part.name.split("(")[0] for part in segment.parts]
    assert kinds == ["Dataset", "Map", "Batch"]
    read_s, map_s, collate_s = (part.run_s_per_row for part in segment.parts)
    assert read_s < map_s > collate_s
