"""Who works on a stage: how many, of which kind, and how long a sample may take."""

from __future__ import annotations

from typing import Literal

from .errors import SpecError

__all__ = ["Executor", "Workers", "check", "check_staff"]

Executor = Literal["auto", "inline", "thread", "process", "async"]
EXECUTORS: tuple[Executor, ...] = ("auto", "inline", "thread", "process", "async")
Workers = int | tuple[int, int] | None
"""Exactly n; between lo and hi, starting at lo; or as configured."""
STOPPABLE: tuple[Executor, ...] = ("auto", "process", "async")
"""Whose work can be broken off: of these `auto` then takes processes."""


def check(condition: object, text: str) -> None:
    """Raise `SpecError` with this text unless the condition holds."""
    if not condition:
        raise SpecError(text)


def check_staff(workers: Workers, executor: Executor, timeout: float | None) -> None:
    """Check the settings that every stage with a function has."""
    check(
        executor in EXECUTORS,
        f"`executor` must be one of {', '.join(EXECUTORS)}, got {executor!r}",
    )
    if workers is not None:
        _check_workers(workers, executor)
    if timeout is not None:
        _check_timeout(timeout, executor)


def _check_workers(workers: int | tuple[int, int], executor: Executor) -> None:
    bounds = workers if isinstance(workers, tuple) else (workers, workers)
    check(
        len(bounds) == 2,
        f"`num_parallel_workers` must be n or (lo, hi), got {workers!r}",
    )
    for count in bounds:
        check(
            type(count) is int and count >= 1,
            f"`num_parallel_workers` must be >= 1, got {workers!r}; to work in the "
            'trainer\'s own thread use executor="inline"',
        )
    low, high = bounds
    check(
        low <= high,
        f"`num_parallel_workers=(lo, hi)` must have lo <= hi, got {workers!r}",
    )
    check(
        executor != "inline" or workers == 1,
        f'executor="inline" has one worker, the trainer itself, got '
        f'`num_parallel_workers={workers!r}`; leave it out, or use executor="thread"',
    )


def _check_timeout(timeout: float, executor: Executor) -> None:
    check(
        isinstance(timeout, (int, float))
        and not isinstance(timeout, bool)
        and timeout > 0,
        f"`timeout` is the seconds a sample may take, > 0, got {timeout!r}; leave it "
        "out for no limit",
    )
    check(
        executor in STOPPABLE,
        f"`timeout` needs workers that can be stopped, which {executor!r} ones cannot "
        'be; use executor="process", "async" or "auto"',
    )
