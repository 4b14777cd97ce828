"""`map()` after `batch()`: any workers make the same batches, with their own draws."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from support.moves import workers_pay
from support.waiting import until

SEED, LENGTH, SIZE = 5, 50, 8
STEPS = -(-LENGTH // SIZE)
KINDS = ("inline", "thread", "process")
"""Those that `auto` chooses from."""


class Rows:
    """Sample i is four floats, all i, and i."""

    def __init__(self, bad: frozenset[int] = frozenset()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index in self.bad:
            raise KeyError(index)
        return np.full(4, index, np.float32), index


Batch = tuple[torch.Tensor, torch.Tensor]


def mix_up(batch: Batch, rng: np.random.Generator) -> Batch:
    images, labels = batch
    share = float(rng.beta(0.8, 0.8))
    return share * images + (1 - share) * images[rng.permutation(len(labels))], labels


def told(batch: Batch, ctx: Any) -> dict[str, Any]:
    images, labels = batch
    return {"images": images, "labels": labels, "told": (ctx.epoch, ctx.step)}


def plain(batch: dict[str, Any]) -> Any:
    return batch["images"].tolist(), batch["labels"].tolist(), tuple(batch["told"])


def mixed(
    executor: Any, workers: int | None = None, data: Any = None, **options: Any
) -> ps.Pipeline:
    how = {"executor": executor, "num_parallel_workers": workers}
    pipe = ps.Pipeline.from_dataset(data or Rows()).shuffle(seed=SEED)
    return pipe.batch(SIZE, **options).map(mix_up, **how).map(told, **how)


def by_hand(epoch: int) -> list[Any]:
    """Make an epoch's batches in a plain loop, from the order and the seed alone."""
    shuffled = ps.Pipeline.from_dataset(Rows()).shuffle(seed=SEED).batch(SIZE)
    shuffled.set_epoch(epoch)
    with shuffled:
        order = labels_of(shuffled)
    batches = []
    for batch in range(STEPS):
        step = epoch * STEPS + batch
        labels = torch.tensor(order[batch * SIZE : (batch + 1) * SIZE])
        images = labels.to(torch.float32)[:, None].expand(-1, 4)
        rng = np.random.Generator(
            np.random.Philox(key=SEED, counter=[0, 3, step, epoch])
        )
        mixture, labels = mix_up((images, labels), rng)
        batches.append((mixture.tolist(), labels.tolist(), (epoch, step)))
    return batches


def labels_of(batches: Iterable[Any]) -> list[int]:
    return [label for _, labels in batches for label in labels.tolist()]


@pytest.mark.parametrize(
    ("executor", "workers", "collated"),
    [
        ("auto", None, True),
        ("inline", None, False),
        ("thread", 1, True),
        ("thread", 3, False),
        ("process", 1, False),
        ("process", 2, True),
    ],
)
def test_batches_are_those_of_a_plain_loop(
    executor: str,
    workers: int | None,
    collated: bool,  # noqa: FBT001
) -> None:
    options = {"collate_fn": torch.utils.data.default_collate} if collated else {}
    with mixed(executor, workers, **options) as pipe:
        assert len(pipe) == STEPS
        assert [plain(batch) for batch in pipe] == by_hand(0)
        assert [plain(batch) for batch in pipe] == by_hand(1)


def test_the_tuner_changes_no_batch() -> None:
    ps.set_enable_autotune(True)
    try:
        with mixed("auto") as pipe:
            assert [plain(batch) for batch in pipe] == by_hand(0)
    finally:
        ps.set_enable_autotune(False)


@pytest.mark.parametrize("executor", KINDS)
def test_a_state_within_an_epoch_resumes_with_other_workers(executor: str) -> None:
    with mixed("thread", 2) as pipe:
        loop = iter(pipe)
        for _ in range(3):
            next(loop)
        state = pipe.state_dict()
    with mixed(executor) as pipe:
        pipe.load_state_dict(state)
        assert [plain(batch) for batch in pipe] == by_hand(0)[3:]
        assert [plain(batch) for batch in pipe] == by_hand(1)


def test_an_engine_in_its_own_process_makes_the_same_batches() -> None:
    with mixed("thread", 2).options(host="process") as pipe:
        assert [plain(batch) for batch in pipe] == by_hand(0)


def test_each_rank_has_its_own_draws_and_the_same_with_any_workers() -> None:
    def of(rank: int, executor: Any) -> list[Any]:
        pipe = ps.Pipeline.from_dataset(Rows(), shard=ps.Shard(rank, 2))
        pipe = pipe.batch(4).map(lambda _, rng: rng.random(), executor=executor)
        with pipe:
            return list(pipe)

    first, second = of(0, "inline"), of(1, "inline")
    assert first == of(0, "thread") == of(0, "process")
    assert second == of(1, "thread")
    assert len({*first, *second}) == 2 * len(first)


def drop(batch: Batch) -> torch.Tensor:
    return batch[1][: len(batch[1]) // 3]


def twice(batch: Batch) -> torch.Tensor:
    return torch.cat([batch[1], batch[1]])


@pytest.mark.parametrize(
    ("executor", "function"), [("inline", drop), ("thread", twice), ("process", drop)]
)
def test_a_map_of_batches_may_change_the_number_of_rows(
    executor: Any, function: Any
) -> None:
    data = ps.Pipeline.from_dataset(Rows()).batch(SIZE)
    with data.map(function, executor=executor) as pipe, data as whole:
        expected = [function(batch).tolist() for batch in whole]
        assert [batch.tolist() for batch in pipe] == expected
        assert len(pipe) == len(expected)
        assert pipe.plan is not None
        assert (pipe.plan.step, pipe.plan.n_rows) == (STEPS - 1, LENGTH % SIZE)


def odd_one(batch: Batch) -> Batch:
    if 17 in batch[1].tolist():
        raise ValueError("seventeen")
    return batch


@pytest.mark.parametrize(
    ("executor", "on_error"),
    [
        ("auto", "raise"),
        ("inline", "substitute"),
        ("thread", "raise"),
        ("thread", "substitute"),
        ("process", "raise"),
    ],
)
def test_an_error_is_raised_when_its_batch_is_due(executor: Any, on_error: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE, on_error=on_error)
    with pipe.map(odd_one, executor=executor) as mapped:
        loop = iter(mapped)
        firsts = [next(loop)[1][0].item() for _ in range(2)]
        with pytest.raises(ValueError, match="seventeen") as caught:
            next(loop)
        firsts += [labels[0].item() for _, labels in loop]
    assert firsts == [0, 8, 24, 32, 40, 48]
    notes = "".join(caught.value.__notes__)
    assert "in Map(ID:2) odd_one, the batch of epoch 0, step 2" in notes


def nothing(batch: Batch) -> None:
    """Forget to return the batch."""


@pytest.mark.parametrize("executor", KINDS)
def test_none_is_not_a_batch(executor: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE).map(nothing, executor=executor)
    with pipe, pytest.raises(ps.SampleError, match="None, which is not a batch"):
        next(iter(pipe))


@pytest.mark.parametrize("executor", KINDS)
def test_substituted_samples_stay_marked(executor: Any) -> None:
    bad = frozenset([3, 20])
    pipe = mixed(executor, None, Rows(bad), on_error="substitute", error_budget=0.1)
    inline = mixed("inline", None, Rows(bad), on_error="substitute", error_budget=0.1)
    with pipe, inline:
        for batch, same in zip(pipe, inline, strict=True):
            assert plain(batch) == plain(same)
            assert pipe.plan == inline.plan
            assert not bad & set(batch["labels"].tolist())


@pytest.mark.parametrize("executor", KINDS)
def test_a_map_works_on_a_tail_whose_samples_all_failed(
    executor: Any,
) -> None:
    bad = frozenset([48, 49])
    pipe = ps.Pipeline.from_dataset(Rows(bad)).batch(
        SIZE, on_error="substitute", error_budget=0.1
    )
    with pipe.map(twice, executor=executor) as mapped:
        assert [len(batch) for batch in mapped] == [16] * 6 + [4]


class Numbering:
    """A `collate_fn` that counts its calls, and says which process makes them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: list[Any]) -> tuple[torch.Tensor, int, int]:
        self.calls += 1
        return torch.tensor([row[1] for row in rows]), self.calls, os.getpid()


def passed(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("executor", KINDS)
def test_a_collate_fn_that_counts_is_called_in_order_by_the_trainer(
    executor: Any,
) -> None:
    pipe = ps.Pipeline.from_dataset(
        Rows(),
        executor=executor,
        num_parallel_workers=None if executor == "inline" else 2,
    )
    pipe = pipe.batch(SIZE, collate_fn=Numbering())
    with pipe.map(passed, executor=executor) as mapped:
        batches = list(mapped)
    assert [batch[1] for batch in batches] == list(range(1, STEPS + 1))
    assert {batch[2] for batch in batches} == {os.getpid()}


class Reusing:
    """Makes each batch in the same memory, and signals when it has begun another.

    A tensor counts its writes; a NumPy array does not.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        # It counts outside of itself, as a change of its attributes would be noticed.
        self.again = os.eventfd(0, os.EFD_SEMAPHORE)

    def fill(self, labels: list[int]) -> torch.Tensor:
        for at, label in enumerate(labels):
            self.memory[at] = label
        os.eventfd_write(self.again, 1)
        return torch.as_tensor(self.memory[: len(labels)])

    def collate(self, rows: list[Any]) -> torch.Tensor:
        return self.fill([row[1] for row in rows])

    def map(self, batch: Batch) -> torch.Tensor:
        return self.fill(batch[1].tolist())

    def read(self, batch: torch.Tensor) -> list[int]:
        """Read a batch after another was begun in its memory, or if none will be."""
        os.eventfd_read(self.again)
        select.select([self.again], [], [], 0.05)
        return batch.tolist()


@pytest.mark.parametrize("executor", ["collate_fn", "auto", "inline"])
@pytest.mark.parametrize("zeros", [torch.zeros, np.zeros])
def test_reused_memory_is_reused_only_after_its_batch_is_done(
    executor: Any, zeros: Any
) -> None:
    reusing = Reusing(zeros(SIZE))
    pipe = ps.Pipeline.from_dataset(Rows())
    if executor == "collate_fn":
        pipe = pipe.batch(SIZE, collate_fn=reusing.collate)
    else:
        pipe = pipe.batch(SIZE).map(reusing.map, executor=executor)
    with pipe.map(reusing.read, executor="thread", num_parallel_workers=2) as mapped:
        batches = list(mapped)
    os.close(reusing.again)
    assert sum(batches, []) == list(range(LENGTH))  # noqa: RUF017 short


def test_inline_maps_without_state_run_ahead_of_the_trainer() -> None:
    sizes: list[int] = []

    def light(batch: Batch) -> Batch:
        sizes.append(len(batch[1]))
        return batch

    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE).map(passed, executor="inline")
    with pipe.map(light, executor="thread", num_parallel_workers=4) as mapped:
        loop = iter(mapped)
        next(loop), next(loop), next(loop)
        assert until(lambda: len(sizes) > 3)


def with_process(rows: list[Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor([row[1] for row in rows]), os.getpid()


def test_a_stateless_collate_fn_moves_to_the_workers_before_the_map() -> None:
    data = ps.Pipeline.from_dataset(Rows(), executor="process", num_parallel_workers=2)
    pipe = data.repeat(4).batch(SIZE, collate_fn=with_process)
    with pipe.map(passed, executor="thread") as mapped:
        batches = list(mapped)
    assert labels_of((0, labels) for labels, _ in batches) == [*range(LENGTH)] * 4
    assert batches[0][1] == os.getpid()
    assert os.getpid() not in {process for _, process in batches[15:]}


def failing(rows: list[Any]) -> torch.Tensor:
    if rows[0][1] == 16:
        raise RuntimeError("sixteen")
    return torch.tensor([row[1] for row in rows])


@pytest.mark.parametrize("executor", KINDS)
def test_an_error_in_a_collate_fn_belongs_to_its_batch(executor: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE, collate_fn=failing)
    with pipe.map(passed, executor=executor) as mapped:
        loop = iter(mapped)
        firsts = [next(loop)[0].item() for _ in range(2)]
        with pytest.raises(RuntimeError, match="sixteen") as caught:
            next(loop)
        firsts += [labels[0].item() for labels in loop]
    assert firsts == [0, 8, 24, 32, 40, 48]
    assert "in the collate_fn of Batch(ID:1)" in "".join(caught.value.__notes__)


class Killer:
    """Ends its process at the third batch: once, or always."""

    def __init__(self, died: Path | None) -> None:
        self.died = died

    def __call__(self, batch: Batch) -> Batch:
        if 17 in batch[1].tolist() and (self.died is None or not self.died.exists()):
            if self.died is not None:
                self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def test_a_killed_worker_changes_no_batch(tmp_path: Path) -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE)
    how = {"executor": "process", "num_parallel_workers": 2}
    with pipe.map(Killer(tmp_path / "died"), **how) as mapped:
        labels = labels_of(mapped)
    assert labels == list(range(LENGTH))
    assert (tmp_path / "died").exists()


def test_a_batch_that_kills_every_worker_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE)
    with pipe.map(Killer(None), executor="process") as mapped:
        loop = iter(mapped)
        assert [len(next(loop)[1]) for _ in range(2)] == [SIZE] * 2
        with pytest.raises(ps.WorkerError, match="times on the batch of step 2"):
            next(loop)
        assert sum(len(labels) for _, labels in loop) == LENGTH - 3 * SIZE
    assert "while working on the batch of step 2:" in caplog.text


async def awaited(batch: Batch, rng: np.random.Generator) -> Batch:
    await asyncio.sleep(0.001)
    return mix_up(batch, rng)


def test_a_coroutine_function_is_awaited() -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).shuffle(seed=SEED).batch(SIZE)
    with pipe.map(awaited).map(told) as mapped:
        assert [plain(batch) for batch in mapped] == by_hand(0)


def test_functions_with_global_draws_stay_with_the_trainer() -> None:
    def drawing(batch: Batch) -> float:
        return random.random()

    random.seed(3)
    expected = [random.random() for _ in range(STEPS)]
    random.seed(3)
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE).map(drawing)
    with workers_pay(), pipe:
        assert list(pipe) == expected
        stats = pipe.stats()
    assert stats is not None
    assert stats.segments[-1].executor == "inline"


# After a filter or an iterable


def stream() -> Iterator[tuple[Any, int]]:
    data = Rows()
    return (data[index] for index in range(LENGTH))


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return stream()


@pytest.mark.parametrize("data", [Rows(), Stream()])
def test_batches_formed_at_run_time_are_mapped_and_resumed(data: Any) -> None:
    def pipeline() -> ps.Pipeline:
        pipe = ps.Pipeline.from_dataset(data).filter(lambda sample: sample[1] % 3)
        return pipe.batch(SIZE).map(mix_up).map(told)

    with pipeline() as pipe:
        whole = [plain(batch) for batch in pipe]
    indices = [index for index in range(LENGTH) if index % 3]
    assert [label for _, labels, _ in whole for label in labels] == indices
    assert [step for _, _, (_, step) in whole] == list(range(len(whole)))
    with pipeline() as pipe:
        loop = iter(pipe)
        next(loop), next(loop)
        state = pipe.state_dict()
    with pipeline() as pipe:
        pipe.load_state_dict(state)
        assert [plain(batch) for batch in pipe] == whole[2:]


def test_an_error_for_a_batch_formed_at_run_time_costs_only_that_batch() -> None:
    with ps.Pipeline.from_dataset(Stream()).batch(SIZE).map(odd_one) as pipe:
        loop = iter(pipe)
        firsts = [next(loop)[1][0].item() for _ in range(2)]
        with pytest.raises(ValueError, match="seventeen"):
            next(loop)
        firsts += [labels[0].item() for _, labels in loop]
    assert firsts == [0, 8, 24, 32, 40, 48]


# Where a map may be, and what it may be combined with


@pytest.mark.parametrize("executor", KINDS)
def test_a_map_knows_what_a_schedule_sets_for_its_batch(executor: Any) -> None:
    schedule = ps.schedule.of(
        global_batch_size=ps.schedule.steps({0: 8, 1: 16}),
        image_size=ps.schedule.steps({0: 32, 0.5: 64}),
        strength=lambda epoch: epoch / 2,
    )
    data = ps.Pipeline.from_dataset(Rows(), schedule=schedule).batch()
    with data.map(scheduled, executor=executor) as pipe:
        for _ in range(2):
            for rows, size, strength in pipe:
                plan = pipe.plan
                assert plan is not None
                settings = plan.n_rows, plan.image_size, plan.strength
                assert (rows, size, strength) == settings


def scheduled(batch: Batch, ctx: Any) -> tuple[int, int, float]:
    return len(batch[1]), ctx.image_size, ctx.strength


@pytest.mark.parametrize(
    "write",
    [
        lambda pipe: pipe.cache(ram="1MB"),
        lambda pipe: pipe.filter(bool),
        lambda pipe: pipe.shuffle(seed=1),
        lambda pipe: pipe.take(3),
        lambda pipe: pipe.batch(2),
    ],
)
def test_only_maps_and_a_device_may_follow_batch(write: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE).map(passed)
    with pytest.raises(ps.SpecError, match=r"cannot come after \.batch\(\)"):
        write(pipe)


def test_a_map_cannot_follow_to_device() -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE).to_device("cpu")
    with pytest.raises(ps.SpecError, match=r"cannot come after \.to_device\(\)"):
        pipe.map(passed)


@pytest.mark.parametrize(
    "how", [{"num_parallel_workers": 2}, {"executor": "process"}, {"timeout": 1.0}]
)
def test_maps_of_batches_formed_by_the_trainer_have_no_workers(how: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Stream()).batch(SIZE)
    with pytest.raises(ps.SpecError, match="cannot have workers of its own"):
        pipe.map(passed, **how)


@pytest.mark.parametrize("executor", KINDS)
def test_microbatches_and_devices_come_last(executor: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE, microbatches=2, drop_last=True)
    with pipe.map(twice, executor=executor).to_device("cpu") as mapped:
        parts = next(iter(mapped))
    assert [part.tolist() for part in parts] == [list(range(SIZE))] * 2


# How a map is reported and bounded


def test_a_map_has_its_own_row_and_can_be_the_bottleneck() -> None:
    def slow(batch: Batch) -> Batch:
        time.sleep(0.005)  # as if a GPU augmented it
        return batch

    pipe = ps.Pipeline.from_dataset(Rows()).repeat(10).batch(SIZE)
    with pipe.map(slow, executor="thread", num_parallel_workers=1) as mapped:
        for _ in mapped:
            pass
        explanation = mapped.explain()
    assert [stage.name for stage in explanation.stages][-1] == "Map(ID:3) slow"
    assert explanation.stages[-1].num_parallel_workers == 1
    assert explanation.bottleneck == "Map(ID:3) slow"


def test_work_on_batches_formed_by_the_trainer_counts_as_batching() -> None:
    def slow(batch: Batch) -> Batch:
        time.sleep(0.005)
        return batch

    with ps.Pipeline.from_dataset(Stream()).batch(2).map(slow) as pipe:
        for _ in pipe:
            pass
        explanation = pipe.explain()
    assert explanation.bottleneck == "Batch(ID:1)"
    others = "while others use them" in explanation.cause  # as on a busy machine
    assert others or explanation.cause.startswith(
        "collate: putting samples together takes "
    )


def test_collating_in_the_trainer_has_a_row_of_its_own() -> None:
    pipe = ps.Pipeline.from_dataset(Rows()).batch(SIZE, collate_fn=Numbering())
    with pipe.map(passed, executor="thread") as mapped:
        list(mapped)
        names = [stage.name for stage in mapped.explain().stages]
    assert names[1:] == ["Batch(ID:1) collate", "Map(ID:2) passed"]


@pytest.mark.parametrize("executor", KINDS)
def test_a_budget_of_one_batch_is_enough(executor: Any) -> None:
    class Large(Rows):
        def __getitem__(self, index: int) -> Any:
            return np.full(100_000, index, np.float32), index

    ps.set_memory_budget(10 * SIZE * 100_000)
    data = ps.Pipeline.from_dataset(Large()).batch(SIZE)
    with data.map(passed, executor=executor) as pipe:
        labels = labels_of(pipe)
        stats = pipe.stats()
    assert labels == list(range(LENGTH))
    assert stats is not None
    assert stats.peak_bytes <= (10 + 5) * SIZE * 100_000
