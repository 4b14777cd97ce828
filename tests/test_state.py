"""A state restores exactly under any workers, both when taken and when loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import penstock as ps
from penstock.pipeline.testing import draw_photos
from support.datasets import WORKERS, Counting, Numbers
from support.functions import augment, digest
from support.work_counts import bytecodes, peak_bytes

State = dict[str, object]
EPOCH = 7
"""Batches of 8 in 50."""


def pipe_of(kind: str) -> ps.Pipeline:
    workers = WORKERS[kind]
    return (
        ps.Pipeline.from_dataset(Numbers(50), **workers)
        .shuffle(seed=5)
        .map(augment, **workers)
        .batch(8)
    )


def filtered(kind: str) -> ps.Pipeline:
    workers = WORKERS[kind]
    return (
        ps.Pipeline.from_dataset(Numbers(50), **workers)
        .shuffle(seed=5)
        .map(augment, **workers)
        .filter(lambda sample: sample[1] % 3 > 0, **workers)
        .batch(8)
    )


def iterated(kind: str) -> ps.Pipeline:
    pipe = ps.Pipeline.from_dataset(Counting(50)).map(augment, **WORKERS[kind])
    return pipe.filter(lambda sample: sample[1] % 3 > 0, **WORKERS[kind]).batch(8)


MAKERS = {"planned": pipe_of, "filtered": filtered, "iterable": iterated}


def through_json(state: State) -> State:
    restored: State = json.loads(json.dumps(state))
    assert restored == state
    return restored


Planned = tuple[Any, Any]
"""A batch and its plan."""


def planned(pipe: ps.Pipeline) -> Iterator[Planned]:
    """Yield the batches of an epoch, or of its rest."""
    for batch in pipe:
        yield batch, pipe.plan


def run(pipe: ps.Pipeline, epochs: int) -> Iterator[tuple[Planned, State]]:
    """Yield each batch with the state right after it."""
    for _ in range(epochs):
        for batch in planned(pipe):
            yield batch, through_json(pipe.state_dict())


def resumed(pipe: ps.Pipeline, state: State, epochs: int) -> list[Planned]:
    """Return the batches after `state`, to the end of the last of `epochs`."""
    with pipe:
        pipe.load_state_dict(state)
        return [batch for _ in range(epochs) for batch in planned(pipe)]


@pytest.mark.parametrize("maker", MAKERS)
def test_state_after_any_batch_restores_exactly(maker: str) -> None:
    make = MAKERS[maker]
    with make("inline") as pipe:
        pairs = list(run(pipe, 2))
    batches = [batch for batch, _ in pairs]
    for at, ((_, plan), state) in enumerate(pairs):
        epochs = 2 - plan.epoch
        rest = resumed(make("inline"), state, epochs)
        assert digest(rest) == digest(batches[at + 1 :]), f"after batch {at}"


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", ["2 threads", "16 threads", "3 processes"])
def test_state_moves_between_workers_of_all_kinds(maker: str, kind: str) -> None:
    """Each kind takes the states that one thread takes, and goes on from them."""
    make = MAKERS[maker]
    with make("inline") as pipe:
        pairs = list(run(pipe, 2))
    batches, states = map(list, zip(*pairs, strict=True))
    with make(kind) as pipe:
        assert [state for _, state in run(pipe, 2)] == states
    rest = resumed(make(kind), states[3], 2)
    assert digest(rest) == digest(batches[4:])


def test_batches_that_were_only_prefetched_do_not_count() -> None:
    with pipe_of("16 threads") as pipe:
        loop = iter(pipe)
        next(loop)
        next(loop)
        state = pipe.state_dict()
    assert (state["epoch"], state["batch"], state["position"]) == (0, 2, 16)


def test_a_state_may_be_loaded_into_the_running_pipeline() -> None:
    with pipe_of("2 threads") as pipe:
        pairs = list(run(pipe, 1))
        pipe.load_state_dict(pairs[2][1])
        assert digest(planned(pipe)) == digest(batch for batch, _ in pairs[3:])
        pipe.load_state_dict(pairs[2][1])
        assert pipe.state_dict() == pairs[2][1]


def test_before_the_first_loop_the_state_is_the_start() -> None:
    with pipe_of("inline") as pipe:
        start = pipe.state_dict()
        whole = list(planned(pipe))
    assert digest(resumed(pipe_of("2 threads"), start, 1)) == digest(whole)


def test_in_a_loop_before_its_first_batch_the_state_is_the_epochs_start() -> None:
    with pipe_of("2 threads") as pipe:
        list(pipe)
        loop = iter(pipe)
        state = pipe.state_dict()
        rest = [(batch, pipe.plan) for batch in loop]
    assert (state["epoch"], state["batch"]) == (1, 0)
    assert digest(resumed(pipe_of("2 threads"), state, 1)) == digest(rest)


@pytest.mark.parametrize("maker", MAKERS)
def test_after_a_loop_the_state_is_the_next_epochs_start(maker: str) -> None:
    make = MAKERS[maker]
    with make("inline") as pipe:
        list(pipe)
        state = pipe.state_dict()
        second = list(planned(pipe))
    assert (state["epoch"], state["batch"], state["position"]) == (1, 0, 0)
    assert digest(resumed(make("inline"), state, 1)) == digest(second)


def test_a_state_taken_at_the_last_batch_resumes_an_epoch_without_batches() -> None:
    with pipe_of("inline") as pipe:
        *_, ((_, last), state) = run(pipe, 1)
        second = list(planned(pipe))
    assert last.last
    with pipe_of("inline") as pipe:
        pipe.load_state_dict(state)
        assert list(pipe) == []
        assert digest(planned(pipe)) == digest(second)


def test_after_break_the_state_is_after_the_last_batch() -> None:
    with pipe_of("2 threads") as pipe:
        for at, _ in enumerate(pipe):
            if at == 2:
                break
        state = pipe.state_dict()
        pipe.load_state_dict(state)
        rest = [plan.batch for _, plan in planned(pipe)]
    assert state["batch"] == 3
    assert rest == [3, 4, 5, 6]


def test_set_epoch_wins_over_a_loaded_state() -> None:
    with pipe_of("inline") as pipe:
        first = [*run(pipe, 1)]
        pipe.load_state_dict(first[2][1])
        pipe.set_epoch(0)
        assert digest(planned(pipe)) == digest(batch for batch, _ in first)


def test_the_length_after_a_load_is_that_of_the_whole_epoch() -> None:
    with pipe_of("inline") as pipe:
        state = [*run(pipe, 1)][2][1]
        pipe.load_state_dict(state)
        assert len(pipe) == EPOCH


class Vast(Sequence[NDArray[np.int64]]):
    """A billion samples, none of them stored; counts what is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return np.array([index])


def test_resuming_far_into_a_billion_samples_costs_what_the_first_step_does() -> None:
    def resume(steps: int) -> State:
        """Load the state after so many steps, and take another."""
        cursor = {"batch": steps, "step": steps, "position": 64 * steps}
        data = Vast()
        pipe = ps.Pipeline.from_dataset(data, executor="inline")
        with pipe.shuffle(seed=1).batch(64) as pipe:
            pipe.load_state_dict(pipe.state_dict() | cursor)
            next(iter(pipe))
            assert pipe.plan is not None
            assert pipe.plan.step == steps
            reads.append(data.reads)
            return pipe.state_dict()

    reads: list[int] = []
    first, far = resume(0), resume(10**6)
    assert far == first | {
        "batch": 10**6 + 1,
        "step": 10**6 + 1,
        "position": 64 * (10**6 + 1),
    }
    assert reads == [64, 64]
    assert len(json.dumps(far)) < 1000
    assert bytecodes(lambda: resume(10**6)) < 2 * bytecodes(lambda: resume(0))
    assert peak_bytes(lambda: resume(10**6)) < 2 * peak_bytes(lambda: resume(0))


# States that do not fit


def test_a_state_of_another_pipeline_is_refused_naming_both() -> None:
    state = ps.Pipeline.from_dataset(Numbers(40)).shuffle(seed=5).batch(4).state_dict()
    with pytest.raises(ps.StateError, match="length: saved 40, now 50") as caught:
        pipe_of("inline").load_state_dict(state)
    assert "schedule: saved" in str(caught.value)


def test_a_state_of_another_seed_is_refused() -> None:
    state = ps.Pipeline.from_dataset(Numbers(50)).shuffle(seed=6).batch(8).state_dict()
    with pytest.raises(ps.StateError, match="order: saved .*6.*, now .*5"):
        pipe_of("inline").load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 99, "step": 99}, "the state is damaged"),
        ({"position": 3}, "the state is damaged"),
        ({"epoch": -1}, "state `epoch` must be an int >= 0, got -1"),
        ({"version": 99}, "state `version` must be 1, got 99"),
        ({"plan": "0" * 32}, "`plan` and `facts` do not agree"),
    ],
)
def test_a_damaged_state_is_refused(change: State, message: str) -> None:
    with pipe_of("inline") as pipe, pytest.raises(ps.StateError, match=message):
        pipe.load_state_dict(pipe.state_dict() | change)


def test_a_value_that_is_not_a_state_is_refused() -> None:
    with pytest.raises(ps.StateError, match="a state must be a dict, got list"):
        pipe_of("inline").load_state_dict([])  # type: ignore[arg-type]


def test_a_refused_state_changes_nothing() -> None:
    with pipe_of("2 threads") as pipe:
        loop = iter(pipe)
        next(loop)
        before = pipe.state_dict()
        with pytest.raises(ps.StateError):
            pipe.load_state_dict({})
        assert pipe.state_dict() == before
        assert len(list(loop)) == EPOCH - 1


class Fingerprinted(list[int]):
    """Samples with a fingerprint of their own."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(range(count))
        self.name = name

    def __penstock_fingerprint__(self) -> str:
        return self.name


def test_a_state_of_another_dataset_of_the_same_length_is_refused() -> None:
    pipe = ps.Pipeline.from_dataset(Fingerprinted(12, "march")).batch(4)
    with pipe:
        next(iter(pipe))
        state = pipe.state_dict()
    other = ps.Pipeline.from_dataset(Fingerprinted(12, "april")).batch(4)
    with pytest.raises(ps.StateError, match="belongs to another dataset.*override="):
        other.load_state_dict(state)
    other.load_state_dict(state, override=True)
    with other:
        assert [batch.tolist() for batch in other] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    unknown = ps.Pipeline.from_dataset(range(12)).batch(4)
    unknown.load_state_dict(state)


def test_a_folder_copied_elsewhere_is_the_same_dataset(tmp_path: Path) -> None:
    draw_photos(tmp_path / "here", 6, size=(32, 32))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    here = ps.Pipeline.from_folder(tmp_path / "here").batch(2, collate_fn=len)
    there = ps.Pipeline.from_folder(tmp_path / "there").batch(2, collate_fn=len)
    there.load_state_dict(here.state_dict())
    photo = next((tmp_path / "there").rglob("*.jpg"))
    photo.rename(photo.with_name("renamed.jpg"))
    renamed = ps.Pipeline.from_folder(tmp_path / "there").batch(2, collate_fn=len)
    with pytest.raises(ps.StateError, match="another dataset"):
        renamed.load_state_dict(here.state_dict())
