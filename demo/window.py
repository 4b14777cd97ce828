"""The demo's loop: training without end, cut into windows that are measured."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..pipe import Pipeline
from ..pipeline.monitor import Reading, difference
from ..pipeline.observation import Observation
from .lesson import Lesson

__all__ = ["Window", "train", "whole"]

WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """A second or so of training."""

    begin: Reading
    end: Reading
    loss: float
    """Mean over its steps."""

    @property
    def seen(self) -> Observation:
        """What the pipeline's monitor saw."""
        return difference(self.begin, self.end)

    @property
    def samples_per_s(self) -> float:
        """Samples trained on, a second of the clock."""
        return self.seen.rows_per_s

    @property
    def wait_share(self) -> float:
        """Exposed wait as a share of the step, 0 to 1."""
        return self.seen.trainer.wait_share

    def __str__(self) -> str:
        return (
            f"{self.samples_per_s:.0f} samples/s, trainer wait "
            f"{100 * self.wait_share:.0f}%, loss {self.loss:.2f}"
        )


def whole(windows: Sequence[Window]) -> Window:
    """Return neighbouring windows, at least one, as one."""
    loss = fmean(window.loss for window in windows)
    return Window(windows[0].begin, windows[-1].end, loss)


def train(pipe: Pipeline, lesson: Lesson) -> Generator[Window]:
    """Train, epoch after epoch; yield each window as it ends.

    Closing the iterator stops the pipeline's workers. The first batch, which waits for
    the workers to start, is in no window.
    """
    begin: Reading | None = None
    losses: list[float] = []
    for images, labels in endless(pipe):
        losses.append(lesson.step(images, labels))
        now = pipe.stats()
        assert now is not None
        if begin is None or now.time_s - begin.time_s >= WINDOW_S:
            if begin is not None:
                yield Window(begin, now, fmean(losses))
            begin, losses = now, []


def endless(pipe: Pipeline) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from pipe
