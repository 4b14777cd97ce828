"""SPDL: tasks of samples or of whole batches, on threads or processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from spdl.pipeline import PipelineBuilder

from .data import BATCH, COLLATE, EPOCH, Given, batches_of, rows_of, stacked

WHOLE = {"whole": True}
ORDINARY = {
    "spdl": [
        {"threads": 1} | WHOLE,
        {"threads": 2} | WHOLE,
        {"processes": 2} | WHOLE,
    ]
}
SETTINGS: dict[str, Any] = {
    "photographs": {
        "spdl, simplejpeg": [
            {"threads": 2} | WHOLE,
            {"threads": 3} | WHOLE,
            {"threads": 4},
        ]
    },
    "tiny": ORDINARY,
    "arrays": ORDINARY,
    "text": ORDINARY,
    "detection": ORDINARY,
    "waits": {"spdl": [{"threads": 64}, {"processes": 64} | WHOLE]},
}

task: Any = None
"""Makes a sample from a number. Worker processes are forked after it is set."""


def run_task(number: int) -> Any:
    """Make one sample, or one batch, in a worker process."""
    return task(number)


def loaded(
    workload: str,
    given: Given,
    *,
    threads: int = 0,
    processes: int = 0,
    whole: bool = False,
) -> Iterator[Any]:
    """Yield batches, in order."""
    global task  # noqa: PLW0603 - what a forked process finds
    size = BATCH[workload]
    rows = batches_of(workload, given) if whole else rows_of(workload, given)
    task = rows.__getitem__
    executor = ProcessPoolExecutor(processes) if processes else None
    builder = PipelineBuilder().add_source(range(EPOCH // size if whole else EPOCH))
    builder = builder.pipe(
        run_task,
        concurrency=threads or processes,
        executor=executor,
        output_order="input",
    )
    if not whole:
        builder = builder.aggregate(size).pipe(COLLATE.get(workload, stacked))
    pipeline = builder.add_sink(3).build(num_threads=(threads or 1) + 1)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


photographs, tiny, arrays, text, detection, waits = (
    partial(loaded, workload) for workload in BATCH
)
