"""Ctrl-C between any two lines of a loop's `__next__` closes the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

import penstock as ps
from penstock.pipeline.dataloader import Loop
from penstock.pipeline.session import Epoch


def pipeline() -> ps.Pipeline:
    return ps.Pipeline.from_dataset(range(8), executor="thread").batch(4)


def loader() -> ps.DataLoader[int]:
    return ps.DataLoader(range(8), 4, sample_seeding=True)  # type: ignore[arg-type]


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th line that the loops' methods run.

    The first line of a `__next__` is its `try`, before which nothing has happened.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.raised_at = ""
        self._watched: dict[CodeType, int] = {}
        for method in (*vars(Epoch).values(), *vars(Loop).values()):
            code = getattr(method, "__code__", None)
            if code is not None and code.co_name not in ("__init__", "abandon"):
                first = min(line for *_, line in code.co_lines() if line)
                self._watched[code] = first + (code.co_name == "__next__")

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in self._watched:
            return None
        if event == "line" and frame.f_lineno > self._watched[frame.f_code]:
            self.left -= 1
            if self.left == 0:
                self.raised_at = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(face: Any, at: int) -> tuple[str, BaseException | None]:
    """Interrupt an epoch at the `at`-th line; return where, and the error."""
    interrupt = Interrupt(at)
    before = sys.gettrace()
    loop = iter(face)
    try:
        sys.settrace(interrupt)
        for _ in loop:
            pass
    except KeyboardInterrupt as error:
        return interrupt.raised_at, error
    finally:
        sys.settrace(before)
        del loop
    return "", None


@pytest.mark.parametrize("make", [pipeline, loader])
def test_a_loop_that_is_interrupted_on_any_line_is_closed(
    make: Callable[[], Any],
) -> None:
    face = make()
    for at in range(1, 1000):
        where, error = interrupted(face, at)
        if error is None:
            break
        busy = face._slot.busy  # noqa: SLF001 while the traceback is held
        assert not busy, where
    assert at > 20
    assert len(list(face)) == 2
    face.close()
