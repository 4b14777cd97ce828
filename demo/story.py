"""The demo, from its start to its last line.

`tell` runs it. `train` is its training loop, divided into windows that are measured.
`Screen` shows a progress bar on a terminal, and plain lines elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..config import set_enable_autotune
from ..engine.observe.observation import Observation, TrainerObservation, ratio
from ..pipeline.pipeline import Pipeline
from ..pipeline.sources.folder import Folder
from .lesson import Lesson, Remote, cached_photos, pipeline

# Share of the time without autotune, on one worker per stage.
AS_SET_SHARE = 0.2
# Share of the time without autotune that is not measured: torch and the disk warm up.
WARM_SHARE = 0.25
# Share of the time with autotune, at its end, that is measured.
FINAL_SHARE = 0.25
# Wait, as a share of the step, below which loading counts as keeping up.
WAIT_AIMED = 0.05


def tell(data: Path | None, *, latency_s: float, seconds: float) -> None:
    """Train on slow reads, turn autotune on, and print how much faster training got.

    Args:
        data: a folder of class sub-folders with images; None: draw photos.
        latency_s: seconds that each read waits, as for an object store.
        seconds: how long to train, not counting the time to draw.

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
    # The log is a part of the story.
    with redirect_stderr(sys.stdout), pipe, closing(train(pipe, lesson)) as windows:
        try:
            before, tuned = run(screen, windows, seconds)
        finally:
            set_enable_autotune(False)
        explanation = pipe.explain()
    conclude(screen, before, tuned)
    screen.say(str(explanation))
    screen.say(last_line(before, whole(last(tuned, FINAL_SHARE))))


def draw(screen: Screen) -> Path:
    """Return the folder of drawn photos, showing progress."""
    with screen.progress("drawing photos") as show:
        return cached_photos(lambda n, of: show(n / of, f"{n} of {of}"))


def run(
    screen: Screen, windows: Iterator[DemoWindow], seconds: float
) -> tuple[DemoWindow, list[DemoWindow]]:
    """Train without and then with autotune.

    Returns:
        The measured window without autotune, and all windows with it.
    """
    as_set_s = AS_SET_SHARE * seconds
    before = stretch(screen, windows, "one worker a stage", as_set_s)
    set_enable_autotune(True)
    screen.say("autotune: on")
    tuned = stretch(screen, windows, "autotune", seconds - as_set_s)
    return whole(last(before, 1 - WARM_SHARE)), tuned


def stretch(
    screen: Screen, windows: Iterator[DemoWindow], what: str, seconds: float
) -> list[DemoWindow]:
    """Train for some seconds; show each window, and return them."""
    shown_windows: list[DemoWindow] = []
    elapsed_s = 0.0
    with screen.progress(what) as show:
        while elapsed_s < seconds:
            shown_windows.append(next(windows))
            elapsed_s = shown_windows[-1].end.time_s - shown_windows[0].begin.time_s
            show(elapsed_s / seconds, f"{elapsed_s:2.0f} s, {shown_windows[-1]}")
    return shown_windows


def last(windows: list[DemoWindow], share: float) -> list[DemoWindow]:
    """Return the last windows, at least one, that make up this share of them."""
    return windows[-max(1, round(share * len(windows))) :]


def conclude(screen: Screen, before: DemoWindow, tuned: list[DemoWindow]) -> None:
    """Print how long autotune took, and how the loss changed."""
    fed_windows = [window for window in tuned if window.wait_share < WAIT_AIMED]
    if fed_windows:
        took_s = fed_windows[0].end.time_s - tuned[0].begin.time_s
        screen.say(
            f"autotune: {took_s:.0f} s after it was turned on, the trainer waited for "
            f"less than {WAIT_AIMED:.0%} of each step"
        )
    screen.say(
        f"trained {tuned[-1].end.trainer.steps} steps: "
        f"loss {before.loss:.2f} -> {whole(last(tuned, FINAL_SHARE)).loss:.2f}"
    )


def last_line(before: DemoWindow, after: DemoWindow) -> str:
    """Return the demo's last line. Other programs parse it."""
    old, new = before.samples_per_s, after.samples_per_s
    return (
        f"demo: gain {new / old:.1f}x ({old:.0f} -> {new:.0f} samples/s), trainer wait "
        f"{100 * before.wait_share:.0f}% -> {100 * after.wait_share:.0f}%"
    )


WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class DemoWindow:
    """About one second of training."""

    begin: Observation
    end: Observation
    loss: float
    """Mean loss of its steps."""

    @property
    def trainer(self) -> TrainerObservation:
        """The trainer's side. Segments may be others at the end than at the begin."""
        return self.end.trainer - self.begin.trainer

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second of elapsed time."""
        return ratio(self.trainer.rows, self.end.window_s - self.begin.window_s)

    @property
    def wait_share(self) -> float:
        """Exposed wait as a share of the step, 0 to 1."""
        return self.trainer.wait_share

    def __str__(self) -> str:
        return (
            f"{self.samples_per_s:.0f} samples/s, trainer wait "
            f"{100 * self.wait_share:.0f}%, loss {self.loss:.2f}"
        )


def whole(windows: Sequence[DemoWindow]) -> DemoWindow:
    """Return consecutive windows, at least one, as a single window."""
    loss = fmean(window.loss for window in windows)
    return DemoWindow(windows[0].begin, windows[-1].end, loss)


def train(pipe: Pipeline, lesson: Lesson) -> Generator[DemoWindow]:
    """Train epoch after epoch, and yield each window as it ends.

    Closing the iterator stops the pipeline's workers. The first batch waits for workers
    to start, and belongs to no window.
    """
    begin: Observation | None = None
    losses: list[float] = []
    for images, labels in chain.from_iterable(repeat(pipe)):
        losses.append(lesson.step(images, labels))
        now = pipe.stats()
        assert now is not None
        if begin is None or now.time_s - begin.time_s >= WINDOW_S:
            if begin is not None:
                yield DemoWindow(begin, now, fmean(losses))
            begin, losses = now, []


# Seconds between two lines of progress if there is no bar.
PACE_S = 1.0
REFRESHES_PER_S = 4

# Shows progress, given as a share from 0 to 1 and in words.
Show = Callable[[float, str], None]


class Screen:
    """Standard output: lines from any thread, and one bar at a time."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        self._console = Console(file=sys.stdout, force_terminal=terminal)

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Show]:
        """Show the progress of something until the `with` ends."""
        if not self._console.is_terminal:
            yield self._lines(what)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[words]}"),
        )
        with Progress(
            *columns,
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=1.0, words="")
            yield lambda share, words: bar.update(task, completed=share, words=words)

    def _lines(self, what: str) -> Show:
        last_s = -PACE_S

        def show(share: float, words: str) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s - last_s >= PACE_S or share >= 1:
                last_s = now_s
                self.say(f"{what}: {words}")

        return show
