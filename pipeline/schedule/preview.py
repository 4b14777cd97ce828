"""A schedule as a table that people can check before they train."""

from __future__ import annotations

from ..plan import Place, Setting
from ..plan.timeline import Timeline
from .scheduled import Resolved

__all__ = ["preview"]

MOST_LINES = 60
HEAD = ("epoch", "step", "batch", "image", "lr x", "momentum", "strength")


def preview(schedule: Resolved, samples: int, epochs: float | None) -> str:
    """Return one line for each stretch of batches that are alike, and the steps in all.

    Args:
        schedule: of global batches.
        samples: in an epoch.
        epochs: that are looked at; None: up to one after the last change of size.
    """
    timeline = Timeline(schedule, samples, drop_last=False)
    end = int(epochs or timeline.runs[-1].epoch + 1)
    total = timeline.place(end, 0).step
    lines: list[tuple[str, ...]] = []
    before: tuple[str, ...] | None = None
    for place in places(timeline, end):
        shown = show(schedule.at(place))
        if shown != before:
            lines.append((f"{place.samples / samples:g}", f"{place.step}", *shown))
        before = shown
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 : -1] = [("...",) * len(HEAD)]
    widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
    rows = ("  ".join(map(str.rjust, row, widths)).rstrip() for row in (HEAD, *lines))
    return "\n".join([*rows, f"{total} steps in {end} epochs of {samples} samples"])


def places(timeline: Timeline, end: int) -> list[Place]:
    """Return where to look: the start of each run, and of each epoch."""
    starts = {(run.epoch, run.batch) for run in timeline.runs if run.epoch < end}
    starts |= {(epoch, 0) for epoch in range(end)}
    return [timeline.place(epoch, batch) for epoch, batch in sorted(starts)]


def show(setting: Setting) -> tuple[str, ...]:
    """Return the cells of a line."""
    values = (
        setting.global_size,
        setting.image_size,
        setting.lr_mult,
        setting.momentum,
        setting.strength,
    )
    return tuple("-" if value is None else f"{value:.6g}" for value in values)
