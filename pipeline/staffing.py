"""Who works on a stage: how many, of which kind, and how long a sample may take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .errors import check
from .printing import name_of
from .recipe import Executor

__all__ = [
    "Workers",
    "check_kind",
    "check_staff",
    "is_async",
    "wanted_by",
]

EXECUTORS: tuple[Executor, ...] = ("auto", "inline", "thread", "process", "async")
Workers = int | tuple[int, int] | None
"""Exactly n; between lo and hi, starting at lo; or as configured."""
STOPPABLE: tuple[Executor, ...] = ("auto", "process", "async")
"""Whose work can be broken off: of these `auto` then takes processes."""


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


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is a coroutine function, a partial of one, or called as one."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 not whether, but which
    )


def wanted_by(function: Callable[..., Any]) -> frozenset[str]:
    """Return which of `rng` and `ctx` a function asks for, beyond its sample."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins without a signature ask for neither
        return frozenset()
    return frozenset(names[1:]) & {"rng", "ctx"}


def check_kind(function: Callable[..., Any], executor: Executor) -> None:
    """Check that this kind of workers can run this kind of function."""
    name = name_of(function)
    if is_async(function):
        check(
            executor in ("auto", "async"),
            f"{name} is a coroutine function (async def), which an event loop runs, "
            f"got executor={executor!r}; leave `executor` out",
        )
    else:
        check(
            executor != "async",
            f'executor="async" runs coroutine functions (async def), got {name}, which '
            'is a plain one; write it with async def, or use executor="thread"',
        )


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
