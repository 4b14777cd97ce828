"""What `auto` finds, as the test says: nothing depends on how fast the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.engine import engine, makers
from penstock.engine.recipe import ResolvedExecutor

__all__ = ["workers_pay"]


@contextmanager
def workers_pay(after: int = 1) -> Iterator[None]:
    """Make `auto` find that other workers pay, after as many looks.

    Only this finding is faked. The check whether the data may move runs as usual.
    """
    looks = 0

    def found(*_: int, thread_safe: bool, **__: int) -> ResolvedExecutor | None:
        nonlocal looks
        looks += 1
        if looks < after:
            return None
        executor = "thread" if thread_safe else "process"
        return ResolvedExecutor(executor, "as the test says")  # type: ignore[arg-type]

    resolve = engine.resolve
    engine.resolve = makers.resolve = found
    try:
        yield
    finally:
        engine.resolve = makers.resolve = resolve
