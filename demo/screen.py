"""Where the demo is told: lines and, below them on a terminal, how far it is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["Screen"]

LOGGER = logging.getLogger("penstock.autotune")
PACE_S = 1.0
"""Between two lines of progress where there is no bar."""
REFRESHES_PER_S = 4

Show = Callable[[float, str], None]
"""Is told how much is done, 0 to 1, and in words."""


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
        """Show how far something is, until the `with` ends."""
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
            yield lambda done, words: bar.update(task, completed=done, words=words)

    @contextmanager
    def decisions(self) -> Iterator[None]:
        """Print what the autotuner logs, as it falls."""
        handler, level = _Lines(self), LOGGER.level
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        try:
            yield
        finally:
            LOGGER.setLevel(level)
            LOGGER.removeHandler(handler)

    def _lines(self, what: str) -> Show:
        last_s = -PACE_S

        def show(done: float, words: str) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s - last_s >= PACE_S or done >= 1:
                last_s = now_s
                self.say(f"{what}: {words}")

        return show


class _Lines(logging.Handler):
    """Prints a logger's records on a screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.say(f"[autotune] {self.format(record)}")
