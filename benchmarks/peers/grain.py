"""Grain: threads that make samples or whole batches, and processes of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import grain
from absl import flags

from .data import BATCH, COLLATE, Given, batches_of, endless, rows_of, stacked

WHOLE = {"whole": True}
ORDINARY = {
    "grain": [
        {"threads": 0},
        {"threads": 0} | WHOLE,
        {"threads": 2} | WHOLE,
        {"threads": 0, "processes": 2} | WHOLE,
    ]
}
SETTINGS: dict[str, Any] = {
    "photographs": {
        "grain, simplejpeg": [
            {"threads": 2},
            {"threads": 3},
            {"threads": 2} | WHOLE,
            {"threads": 1, "processes": 2} | WHOLE,
        ]
    },
    "tiny": ORDINARY,
    "arrays": ORDINARY,
    "text": ORDINARY,
    "detection": ORDINARY,
    "waits": {
        "grain": [
            {"threads": 64},
            {"threads": 16, "processes": 2} | WHOLE,
            {"threads": 32, "processes": 2} | WHOLE,
        ]
    },
}


def loaded(
    workload: str,
    given: Given,
    *,
    threads: int,
    processes: int = 0,
    whole: bool = False,
) -> Iterator[Any]:
    """Yield batches."""
    size = BATCH[workload]
    ahead = max(4, 2 * threads) if whole else max(500, 4 * size)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    if whole:
        batches = batches_of(workload, given)
        data = grain.MapDataset.source(batches).to_iter_dataset(options)
    else:
        data = grain.MapDataset.source(rows_of(workload, given))
        data = data.to_iter_dataset(options)
        data = data.batch(size, batch_fn=COLLATE.get(workload, stacked))
    if processes:
        data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes))
    return endless(lambda: data)


flags.FLAGS.mark_as_parsed()  # by a script's own `app.run`, where there is one
photographs, tiny, arrays, text, detection, waits = (
    partial(loaded, workload) for workload in BATCH
)
