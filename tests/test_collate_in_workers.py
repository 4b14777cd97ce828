"""A `collate_fn` without state runs in the requested worker processes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import penstock as ps

LENGTH = 120


class Ragged:
    """Token ids of many lengths; a sample may fail, or end its process once."""

    def __init__(
        self, bad: frozenset[int] = frozenset(), dies: Path | None = None
    ) -> None:
        self.bad, self.dies = bad, dies

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise KeyError(index)
        if self.dies is not None and index == LENGTH // 2 and not self.dies.exists():
            self.dies.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"ids": list(range(index % 7 + 1)), "label": index}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(row["ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row["ids"])] = torch.tensor(row["ids"])
    labels = np.array([row["label"] for row in rows])
    return {"ids": ids, "labels": labels, "process": os.getpid()}


def drawing(rows: list[dict[str, Any]]) -> tuple[list[int], float, float, float]:
    labels = [row["label"] for row in rows]
    return labels, random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


@pytest.fixture(params=[True, False], ids=["tuned", "seeded"])
def either(request: pytest.FixtureRequest) -> None:
    """Let penstock load because it tunes, and because samples are seeded."""
    ps.set_enable_autotune(request.param)


def loader(data: Any, collate: Any, workers: int = 2, **options: Any) -> Any:
    return ps.DataLoader(
        data,
        4,
        collate_fn=collate,
        num_workers=workers,
        sample_seeding=True,
        **options,
    )


def without_process(batch: dict[str, Any]) -> list[Any]:
    return [batch["ids"].tolist(), batch["labels"].tolist()]


@pytest.mark.usefixtures("either")
def test_batches_made_in_workers_equal_torchs_and_stay_unchanged() -> None:
    torchs = torch.utils.data.DataLoader(Ragged(), 4, collate_fn=padded)
    expected = [without_process(batch) for batch in torchs]
    batches = list(loader(Ragged(), padded))  # keep all, so none is overwritten
    assert [without_process(batch) for batch in batches] == expected
    assert os.getpid() not in {batch["process"] for batch in batches}


@pytest.mark.usefixtures("either")
def test_a_batch_has_the_same_draws_for_any_number_of_workers() -> None:
    runs = []
    for workers in (0, 2):
        torch.manual_seed(1)
        runs.append([list(loader(Ragged(), drawing, workers)), float(torch.rand(()))])
    assert runs[0] == runs[1]
    assert len({batch[1:] for batch in runs[0][0]}) == LENGTH // 4


def test_a_killed_worker_changes_no_batch(tmp_path: Path) -> None:
    batches = list(loader(Ragged(dies=tmp_path / "died"), padded))
    expected = list(loader(Ragged(), padded, workers=0))
    assert list(map(without_process, batches)) == list(map(without_process, expected))


def test_an_error_is_raised_when_its_batch_is_due() -> None:
    def stacked(rows: list[dict[str, Any]]) -> torch.Tensor:
        if rows[0]["label"] == 88:
            raise RuntimeError("88")
        return torch.tensor([row["label"] for row in rows])

    loop = iter(loader(Ragged(), stacked))
    before = [next(loop).tolist() for _ in range(22)]
    assert before[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(RuntimeError, match="88") as caught:
        next(loop)
    assert "in the collate_fn of Batch(ID:1)" in "".join(caught.value.__notes__)
    assert next(loop).tolist() == [92, 93, 94, 95]


def test_a_sample_that_fails_is_the_error_of_its_batch() -> None:
    loop = iter(loader(Ragged(frozenset([85])), padded))
    for _ in range(21):
        next(loop)
    with pytest.raises(KeyError, match="85") as caught:
        next(loop)
    assert "sample index 85" in "".join(caught.value.__notes__)
    assert next(loop)["labels"].tolist() == [88, 89, 90, 91]


@pytest.mark.parametrize("bad", [[84, 85, 86], [1, 119]])
def test_substitutes_are_those_that_the_trainer_would_take(bad: list[int]) -> None:
    def labels(executor: Any) -> list[Any]:
        data = Ragged(frozenset(bad))
        pipe = ps.Pipeline.from_dataset(data, executor=executor)
        options: Any = {"on_error": "substitute", "error_budget": 0.5}
        with pipe.batch(4, collate_fn=padded, **options) as pipe:
            return list(map(without_process, pipe))

    assert labels("process") == labels("inline")


def test_a_batch_that_cannot_be_sent_is_collated_in_the_trainer() -> None:
    def closed(rows: list[dict[str, Any]]) -> Any:
        return lambda: [row["label"] for row in rows]

    batches = [batch() for batch in loader(Ragged(), closed)]
    assert batches == [list(range(at, at + 4)) for at in range(0, LENGTH, 4)]


@pytest.mark.skipif(ps.config.budget().cpu_cores < 2, reason="one process of workers")
def test_workers_moved_to_processes_collate_there() -> None:
    ps.set_enable_autotune(True)
    pipe = ps.Pipeline.from_dataset(Ragged(), num_parallel_workers=2)
    expected = list(map(without_process, pipe.batch(4, collate_fn=padded)))
    pids: list[int] = []
    # Who starts late is waited for.
    with pipe.repeat(10_000).batch(4, collate_fn=padded) as pipe:
        for number, batch in enumerate(pipe):
            assert without_process(batch) == expected[number % len(expected)]
            pids.append(batch["process"])
            if number == 3:
                run = pipe._slot.run  # noqa: SLF001 no other way to its knobs
                assert run is not None
                knobs = {knob.name: knob for knob in run.knobs()}
                knobs["executor"].set("process")
            if len({*pids[-20:]} - {os.getpid()}) == 2:
                break
    assert pids[0] == os.getpid()


def test_the_trainer_calls_a_collate_fn_that_counts() -> None:
    class Counting:
        calls = 0

        def __call__(self, rows: list[dict[str, Any]]) -> int:
            self.calls += 1
            return self.calls

    collate = Counting()
    counted = list(loader(Ragged(), collate))
    assert counted == list(range(1, LENGTH // 4 + 1))
    assert collate.calls == LENGTH // 4


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    "sample",
    [
        lambda index: torch.full((2,), float(index), requires_grad=True),
        lambda index: np.ones(2, ["f4", "f8"][index % 2]),
        lambda index: [torch.ones(2), torch.ones(2, dtype=torch.float64)][index % 2],
        lambda index: {"number": index, "tensor": torch.ones(index % 3 + 1)},
    ],
    ids=["of a graph", "narrow and wide arrays", "narrow and wide", "uneven"],
)
def test_what_is_collated_by_default_does_not_depend_on_the_place(
    sample: Callable[[int], Any],
) -> None:
    data = [sample(index) for index in range(24)]

    def batches(data_loader: Any) -> list[Any]:
        outcomes: list[Any] = []
        loop = iter(data_loader)
        for _ in range(len(data_loader)):
            try:
                batch = next(loop)
            except Exception as error:  # noqa: BLE001 it is compared
                outcomes.append((type(error), str(error).partition("\n")[0]))
            else:
                outcomes.append((batch.tolist(), batch.dtype, batch.requires_grad))
        return outcomes

    expected = batches(torch.utils.data.DataLoader(data, 4))  # type: ignore[arg-type]
    assert batches(loader(data, None)) == expected
