"""`host="process"`: a child of the trainer gives equal batches, states and errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import penstock as ps
from support.batches import COLLATES, Pair, Refusing, same
from support.datasets import KINDS, WORKERS, Counting, Numbers, Sample
from support.functions import BadSample, augment, digest, indices, waits
from support.hosted import (
    PROMPT_S,
    Kind,
    epochs,
    failing,
    host_of,
    hosted,
    odd,
    pipe_of,
    run_of,
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


# The same batches


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("inline", "2 threads"),
        ("2 threads", "3 processes"),
        ("3 processes", "inline"),
    ],
)
def test_epochs_are_byte_identical_to_those_of_the_trainer(
    first: str, second: str
) -> None:
    with pipe_of("process", WORKERS[first], WORKERS[second]) as pipe:
        assert [digest(pipe) for _ in range(2)] == epochs(2)


def test_a_batch_is_what_collate_fn_returns() -> None:
    """Each of several functions collates three batches, as a layout is sent once."""
    functions = list(COLLATES.values())

    def collate(samples: list[Sample]) -> Any:
        return functions[samples[0][1] // 24](samples)

    data = Numbers(24 * len(functions))
    pipe = ps.Pipeline.from_dataset(data).batch(8, collate_fn=collate)
    expected = list(pipe.options(host="trainer"))
    with pipe.options(host="process") as pipe:
        batches = list(pipe)
    assert len(batches) == 3 * len(functions)
    assert all(map(same, batches, expected))


def test_the_pipeline_has_the_plan_of_the_last_batch() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(20)).batch(8)
    with pipe.options(host="process") as pipe:
        plans = [pipe.plan for _ in pipe]
    assert [(p.step, p.n_rows) for p in plans if p] == [(0, 8), (1, 8), (2, 4)]


def test_a_namedtuple_keeps_its_type() -> None:
    collate = COLLATES["namedtuple"]
    pipe = ps.Pipeline.from_dataset(Numbers(8)).batch(8, collate_fn=collate)
    with pipe.options(host="process") as pipe:
        (batch,) = pipe
    assert isinstance(batch, Pair)


def test_batches_are_on_the_requested_device() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(8)).batch(8).to_device("meta")
    with pipe.options(host="process") as pipe:
        (batch,) = pipe
    assert [part.device.type for part in batch] == ["meta", "meta"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (Numbers(60), KINDS["3 processes"]),
        (Counting(60), KINDS["2 threads"]),
        (Counting(60), KINDS["inline"]),
    ],
)
def test_batches_after_a_filter_are_the_same(data: Any, kind: Kind) -> None:
    source = ps.Pipeline.from_dataset(data)
    pipe = source.map(augment, **kind).filter(odd, **kind).batch(8)
    with pipe.options(host="trainer") as pipe:
        expected = [digest(pipe), digest(pipe)]
    with pipe.options(host="process") as pipe:
        assert [digest(pipe), digest(pipe)] == expected


# State


def test_state_is_taken_at_consumption_and_restores_exactly(kind: Kind) -> None:
    batches = list(pipe_of("trainer", WORKERS["inline"], WORKERS["inline"]))
    with hosted(kind) as pipe:
        loop = iter(pipe)
        for _ in range(3):
            next(loop)
        pipe.load_state_dict(pipe.state_dict())
        assert digest(pipe) == digest(batches[3:])


@pytest.mark.parametrize("workers", ["inline", "2 threads"])
def test_set_epoch_break_and_a_new_loop_start_where_they_say(workers: str) -> None:
    first, second, third = epochs(3)
    with hosted(WORKERS[workers]) as pipe:
        for _ in pipe:
            break
        pipe.set_epoch(2)
        assert digest(pipe) == third
        pipe.set_epoch(0)
        assert [digest(pipe), digest(pipe)] == [first, second]


def test_workers_may_restart_with_each_epoch() -> None:
    data = [1, 2, 3, 4]
    pipe = ps.Pipeline.from_dataset(data, **WORKERS["3 processes"]).batch(4)
    with pipe.options(host="process", persistent_workers=False) as pipe:
        assert [batch.tolist() for batch in pipe] == [[1, 2, 3, 4]]
        data[:] = [5, 6, 7, 8]
        assert [batch.tolist() for batch in pipe] == [[5, 6, 7, 8]]


# Errors


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


def test_failed_samples_are_substituted_and_marked() -> None:
    options: Any = {"on_error": "substitute", "error_budget": 0.1}
    with failing(WORKERS["2 threads"], **options) as pipe:
        marks = [pipe.plan.substituted for _ in pipe]  # type: ignore[union-attr]
    assert marks == [(), (), (5,), (), ()]


def test_a_batch_that_cannot_be_handed_over_is_collated_by_the_trainer() -> None:
    def collate(samples: list[Sample]) -> Any:
        return Refusing() if samples[0][1] == 8 else len(samples)

    pipe = ps.Pipeline.from_dataset(Numbers(24)).batch(8, collate_fn=collate)
    with pipe.options(host="process") as pipe:
        first, second, third = pipe
    assert (first, type(second), third) == (8, Refusing, 8)


def test_a_dataset_that_cannot_start_says_so_at_iter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Iterator[None]:
        raise OSError(24, "too many open files")

    monkeypatch.setattr("penstock.engine.engine.EngineLock", broken)
    with pytest.raises(OSError, match="too many open files"):
        iter(hosted(WORKERS["2 threads"]))


# Memory


@pytest.mark.parametrize("workers", ["inline", "3 processes"])
def test_batches_that_the_trainer_keeps_stay_and_cost_no_descriptor(
    workers: str,
) -> None:
    with hosted(WORKERS[workers], 800) as pipe:
        batches, descriptor_counts = [], []
        for batch in pipe:
            batches.append(batch)
            descriptor_counts.append(len(os.listdir("/proc/self/fd")))
        child = host_of(pipe)
        assert median(descriptor_counts[40:]) <= median(descriptor_counts[:40])
        assert child.num_fds() < 100
        assert digest(batches) == epochs(1, 800)[0]


# Tuning


@pytest.mark.parametrize("workers", ["2 threads", "3 processes"])
def test_knobs_can_be_turned_and_everything_is_measured(workers: str) -> None:
    with hosted(WORKERS[workers], 800) as pipe:
        loop = iter(pipe)
        head = [next(loop) for _ in range(10)]
        run = run_of(pipe)
        assert {knob.set(4) for knob in run.knobs()} <= {4}
        assert {knob.value for knob in run.knobs()} <= {4}
        rest = list(loop)
        stats = pipe.stats()
    assert digest([*head, *rest]) == epochs(1, 800)[0]
    assert stats is not None
    assert (stats.trainer.steps, stats.trainer.rows) == (100, 800)
    assert stats.segments[-1].rows >= 800
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
