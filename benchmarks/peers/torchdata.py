"""torchdata: its nodes, and its StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate
from torchdata.nodes import (
    Batcher,
    IterableWrapper,
    Loader,
    Mapper,
    ParallelMapper,
    Prefetcher,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from .data import BATCH, COLLATE, EPOCH, Given, batches_of, endless, rows_of, stacked

NODES = {"kind": "batches", "method": "thread"}
STATEFUL = {"kind": "stateful"}
ORDINARY = {
    "torchdata": [
        NODES | {"workers": 1},
        NODES | {"workers": 2},
        {"kind": "batches", "method": "process", "workers": 2},
        STATEFUL | {"workers": 0},
        STATEFUL | {"workers": 2},
    ]
}
SETTINGS: dict[str, Any] = {
    "photographs": {
        "torchdata, simplejpeg": [
            NODES | {"workers": 2},
            NODES | {"workers": 3},
            {"kind": "samples", "method": "thread", "workers": 4},
            STATEFUL | {"workers": 2},
        ]
    },
    "tiny": ORDINARY,
    "arrays": ORDINARY,
    "text": ORDINARY,
    "detection": ORDINARY,
    "waits": {
        "torchdata": [
            {"kind": "samples", "method": "thread", "workers": 64},
            {"kind": "batches", "method": "process", "workers": 64},
        ]
    },
}


def loaded(
    workload: str, given: Given, *, kind: str, workers: int, method: str = ""
) -> Iterator[Any]:
    """Yield batches."""
    size, rows = BATCH[workload], rows_of(workload, given)
    if kind == "stateful":
        loader: Any = StatefulDataLoader(
            rows,
            size,
            num_workers=workers,
            collate_fn=COLLATE.get(workload, default_collate),
            persistent_workers=workers > 0,
        )
    elif kind == "samples":
        samples: Any = IterableWrapper(range(EPOCH))
        samples = ParallelMapper(samples, rows.__getitem__, workers, method=method)
        batches = Batcher(samples, size)
        loader = Loader(Mapper(batches, COLLATE.get(workload, stacked)))
    else:
        whole = batches_of(workload, given)
        numbers = IterableWrapper(range(len(whole)))
        mapper = ParallelMapper(numbers, whole.__getitem__, workers, method=method)
        loader = Loader(Prefetcher(mapper, 2))
    return endless(lambda: loader)


torch.set_num_threads(1)
photographs, tiny, arrays, text, detection, waits = (
    partial(loaded, workload) for workload in BATCH
)
