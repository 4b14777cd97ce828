"""A worker process as torch's data sets and `worker_init_fn` expect to find it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torchs

__all__ = ["WorkerStart"]


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What is done once in a worker process, before its first sample.

    A worker that replaces another has the number of that one; the most there were at
    once may grow while training runs, so `num_workers` is that when a worker began.
    """

    dataset: Any
    num_workers: int
    """As the user asked for; 0 leaves it to the tuner."""
    init: Callable[[int], Any] | None
    """`worker_init_fn`."""

    def __call__(self, number: int) -> None:
        """Make this process worker `number`: `get_worker_info()` answers from here on.

        The generators are set as torch sets them in its worker of that number, which is
        what a `worker_init_fn` derives its seeds from.

        Raises:
            Exception: whatever the user's `worker_init_fn` raises.
        """
        seed = (torch.initial_seed() + number) & 0xFFFFFFFFFFFFFFFF
        torchs._worker_info = torchs.WorkerInfo(  # noqa: SLF001 the one place that `get_worker_info` reads
            id=number,
            num_workers=max(self.num_workers, number + 1),
            seed=seed,
            dataset=self.dataset,
        )
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 the global one
        if self.init is not None:
            self.init(number)
