"""The demo from its start to its last line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from ..config import set_enable_autotune
from ..pipeline.sources import Folder
from .lesson import Lesson, Remote, cached_photos, pipeline
from .screen import Screen
from .window import Window, train, whole

__all__ = ["tell"]

AS_SET_SHARE = 0.2
"""Of the time: on one worker a stage. The rest is tuned."""
WARM_SHARE = 0.25
"""Of the stretch before autotune: not measured, while torch and the disk warm up."""
FINAL_SHARE = 0.25
"""Of the stretch with autotune: measured, at its end."""
WAIT_AIMED = 0.05
"""Below this share of the step the trainer counts as fed."""


def tell(data: Path | None, *, latency_s: float, seconds: float) -> None:
    """Train on slow reads, turn autotune on, and print what it gained.

    Args:
        data: class sub-folders of images; None: photos drawn for it.
        latency_s: what each read waits, as for an object store.
        seconds: how long to train, drawing not counted.

    Raises:
        SpecError: `data` holds no images, or photos cannot be drawn.
    """
    screen = Screen()
    torch.set_num_threads(1)  # the other cores are for loading
    photos = Folder.scan(draw(screen) if data is None else data)
    screen.say(
        f"training on {len(photos)} photos in {len(photos.classes)} classes, "
        f"each read {1000 * latency_s:g} ms away"
    )
    pipe = pipeline(Remote(photos, latency_s))
    lesson = Lesson(len(photos.classes))
    with screen.decisions(), pipe, closing(train(pipe, lesson)) as windows:
        try:
            before, tuned = run(screen, windows, seconds)
        finally:
            set_enable_autotune(False)
        explanation = pipe.explain()
    conclude(screen, before, tuned)
    screen.say(str(explanation))
    screen.say(last_line(before, whole(last(tuned, FINAL_SHARE))))


def draw(screen: Screen) -> Path:
    """Return the folder of drawn photos."""
    with screen.progress("drawing photos") as show:
        return cached_photos(lambda n, of: show(n / of, f"{n} of {of}"))


def run(
    screen: Screen, windows: Iterator[Window], seconds: float
) -> tuple[Window, list[Window]]:
    """Train before and with autotune; return the one measured, the other whole."""
    as_set_s = AS_SET_SHARE * seconds
    before = stretch(screen, windows, "one worker a stage", as_set_s)
    set_enable_autotune(True)
    screen.say("autotune: on")
    tuned = stretch(screen, windows, "autotune", seconds - as_set_s)
    return whole(last(before, 1 - WARM_SHARE)), tuned


def stretch(
    screen: Screen, windows: Iterator[Window], what: str, seconds: float
) -> list[Window]:
    """Train for so long, showing each window."""
    seen: list[Window] = []
    elapsed_s = 0.0
    with screen.progress(what) as show:
        while elapsed_s < seconds:
            seen.append(next(windows))
            elapsed_s = seen[-1].end.time_s - seen[0].begin.time_s
            show(elapsed_s / seconds, f"{elapsed_s:2.0f} s, {seen[-1]}")
    return seen


def last(windows: list[Window], share: float) -> list[Window]:
    """Return the windows at the end that make up this share, at least one."""
    return windows[-max(1, round(share * len(windows))) :]


def conclude(screen: Screen, before: Window, tuned: list[Window]) -> None:
    """Say how long autotune took, and what was learned."""
    fed = [window for window in tuned if window.wait_share < WAIT_AIMED]
    if fed:
        took_s = fed[0].end.time_s - tuned[0].begin.time_s
        screen.say(
            f"autotune: the trainer waited less than {WAIT_AIMED:.0%} of its step "
            f"{took_s:.0f} s after it was turned on"
        )
    screen.say(
        f"trained {tuned[-1].end.trainer.steps} steps: "
        f"loss {before.loss:.2f} -> {whole(last(tuned, FINAL_SHARE)).loss:.2f}"
    )


def last_line(before: Window, after: Window) -> str:
    """Return the demo's last line, which others parse."""
    old, new = before.samples_per_s, after.samples_per_s
    return (
        f"demo: gain {new / old:.1f}x ({old:.0f} -> {new:.0f} samples/s), trainer wait "
        f"{100 * before.wait_share:.0f}% -> {100 * after.wait_share:.0f}%"
    )
