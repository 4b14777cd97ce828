"""`penstock bench`: how fast a user's own data loads, as set and tuned."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from . import config
from .autotune.explain import Explanation
from .errors import SpecError, check
from .pipeline.image import decode_random_resized_crop
from .pipeline.pipeline import Pipeline

CROP = 224
NO_FACTORY = (
    "{!r} is neither a folder of images nor MODULE:FUNCTION; give the name of a"
    " function that returns a penstock.DataLoader or a Pipeline"
)


def bench(
    target: str, *, seconds: float, step_s: float, batch_size: int, console: Console
) -> None:
    """Loop over a user's data, and print the results.

    Args:
        target: a folder with class sub-folders of images, or `module:function`, a
            function without arguments that returns what to loop over.
        seconds: how long to measure in all.
        step_s: how long each training step sleeps, in seconds.
        batch_size: batch size for a folder.
        console: where to print.

    Raises:
        SpecError: `target` is neither, or yields no batch.
    """
    bench_loader = face_of(target, batch_size)  # the log calls it "bench"
    check(
        hasattr(bench_loader, "explain"),
        f"{target!r} returns a {type(bench_loader).__name__}, which penstock cannot"
        " tune; let it return a penstock.DataLoader or a Pipeline",
    )
    # A quarter of the time goes by as set. The tuned rate is that of the last quarter
    # of the rest.
    as_set_s, tuned_s = 0.25 * seconds, 0.75 * seconds
    with Progress(
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        rate = partial(rate_of, bench_loader, step_s=step_s, progress=progress)
        before = rate("as set", seconds=as_set_s, last_s=as_set_s)
        as_set = settings_of(bench_loader.explain())
        config.set_enable_autotune(enable=True)
        after = rate("tuned", seconds=tuned_s, last_s=0.25 * tuned_s)
    explanation = bench_loader.explain()
    config.set_enable_autotune(enable=False)
    bench_loader.close()
    tuned = (
        "with autotune, which changed nothing"
        if settings_of(explanation) == as_set
        else "tuned"
    )
    console.print(
        f"as set: {before:,.0f} samples/s; {tuned}: {after:,.0f} samples/s",
        soft_wrap=True,
    )
    console.print(str(explanation), markup=False, highlight=False, soft_wrap=True)


def face_of(target: str, batch_size: int) -> Any:
    """Return what to loop over."""
    if os.path.isdir(target):
        return (
            Pipeline.from_folder(target)
            .shuffle(seed=0)
            .map(decode_random_resized_crop(CROP))
            .batch(batch_size)
            .options(name="bench")
        )
    module, separator, name = target.partition(":")
    check(bool(module and separator and name), NO_FACTORY.format(target))
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"{NO_FACTORY.format(target)} ({error})") from error
    return make()


def settings_of(explanation: Explanation) -> list[tuple[int, int, str] | None]:
    """Return what the tuner may change of each stage: None where the trainer loads."""
    return [
        None
        if stage.executor == "inline"
        else (stage.num_parallel_workers, stage.prefetch_size, stage.executor)
        for stage in explanation.stages
    ]


def rate_of(
    face: Any,
    description: str,
    *,
    seconds: float,
    last_s: float,
    step_s: float,
    progress: Progress,
) -> float:
    """Train for some seconds; return the samples per second over the last of them."""
    task = progress.add_task(description, total=seconds)
    begun_s = time.perf_counter()
    since_s, rows = 0.0, 0
    for batch in endless(face):
        if step_s:
            time.sleep(step_s)
        spent_s = time.perf_counter() - begun_s
        progress.update(task, completed=spent_s)
        if since_s:
            rows += rows_of(batch)
        elif spent_s >= seconds - last_s:
            since_s = spent_s
        if spent_s >= seconds and since_s < spent_s:
            return rows / (spent_s - since_s)
    raise SpecError(
        "the loader yields no batch, so nothing can be measured; give one that does"
    )


def endless(face: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after another, while there are any."""
    for epoch in repeat(face):
        empty = True
        for batch in epoch:
            empty = False
            yield batch
        if empty:
            return


def rows_of(batch: Any) -> int:
    """Return how many samples a batch has: the length of its first tensor or list."""
    while isinstance(batch, (dict, list, tuple)) and batch:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        if not isinstance(first, (torch.Tensor, dict, list, tuple)):
            return len(batch)
        batch = first
    has_rows = hasattr(batch, "__len__") and getattr(batch, "ndim", 1) > 0
    return len(batch) if has_rows else 1
