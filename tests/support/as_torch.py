"""Whether a tuned loader gives what torch's gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.utils.data as torchs

import penstock as ps
from support.batches import same

LENGTH, SIZE = 24, 4
WORKERS = [None, 0, 2]
"""The number of workers that a program asks for; None: it says nothing."""


def outcome(loader: Any) -> list[Any]:
    """Return the batches, and the type of an exception that ended the loop."""
    batches: list[Any] = []
    loop = iter(loader)
    try:
        batches.extend(loop)
    except Exception as error:  # noqa: BLE001 it is compared
        batches.append(type(error))
        # The collector would wait seconds for each of torch's workers.
        getattr(loop, "_shutdown_workers", list)()
    return batches


def check(dataset: Any, workers: int | None, **options: Any) -> None:
    """Check that two epochs of a tuned loader are torch's."""
    if workers is not None:
        options["num_workers"] = workers
    torch.manual_seed(0)
    plain = torchs.DataLoader(dataset, **options)
    expected = [outcome(plain), outcome(plain)]
    ps.set_enable_autotune(True)
    torch.manual_seed(0)
    with closing(ps.DataLoader(dataset, **options)) as loader:
        epochs = [outcome(loader), outcome(loader)]
    assert same(epochs, expected)


def pairs(kinds: Iterable[str], *quick: str) -> list[Any]:
    """Return each kind and number of workers, and `quick` kinds with processes, too."""
    return [
        pytest.param(kind, workers, marks=pytest.mark.slow if late else ())
        for kind in kinds
        for workers in WORKERS
        for late in [workers != 0 and kind not in quick]
        if kind != "tensor" or not workers  # torch's loader leaves a thread behind
    ]


class Table(torchs.Dataset[Any]):
    """Reads batches at once, in the form of `make`."""

    def __init__(self, make: Callable[[list[Any]], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index])

    def __getitems__(self, indices: list[int]) -> Any:
        return self.make(indices)


def unchanged(batch: Any) -> Any:
    return batch
