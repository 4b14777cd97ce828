"""A run in another process, shown while it runs: `penstock watch`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...errors import SpecError, check
from .recording import NO_LOG, Recorded, Recording, course_of
from .terminal import bar, stages_of

# Between two looks.
SECONDS = 1.0
# Between two states that are written to a file.
WRITTEN_S = 10.0
# Latest decisions that are shown.
DECISIONS = 5


def watch(target: str, console: Console, *, once: bool = False) -> None:
    """Show a run until its log ends, its process if that was given, or until Ctrl-C.

    Args:
        target: path of its log, or the number of its process.
        console: where to show it.
        once: show the present state and return.

    Raises:
        SpecError: there is no such log or process, or it writes none.
    """
    log, due_s = log_of(target), 0.0
    recording, process = Recording([log]), f"/proc/{target}"
    with Live(console=console, auto_refresh=False) as live:
        while True:
            killed = log != target and not os.path.exists(process)
            recording.read()
            seen = recording.pipelines
            ended = seen and all(each.end is not None for each in seen)
            over = once or killed or ended
            if console.is_terminal:
                live.update(shown(recording), refresh=True)
            elif over or time.monotonic() >= due_s:
                console.print(shown(recording))
                due_s = time.monotonic() + WRITTEN_S
            if over:
                return
            time.sleep(SECONDS)


def log_of(target: str) -> str:
    """Return the log that a target means: its path, or the log of a process.

    Raises:
        SpecError: there is none.
    """
    if not target.isdigit() or os.path.exists(target):
        check(os.path.isfile(target), NO_LOG.format(target, "No such file"))
        return target
    try:
        opened = [
            os.path.realpath(each) for each in Path(f"/proc/{target}/fd").iterdir()
        ]
    except OSError as error:
        raise SpecError(
            f"cannot see the files of process {target} ({error.strerror}); give the"
            " path of the log that it writes"
        ) from error
    logs = [path for path in opened if path.endswith(".jsonl")]
    check(
        bool(logs),
        f"process {target} writes no autotune log; start it by `penstock run --log"
        " PREFIX train.py`, or with set_enable_autotune(True, PREFIX)",
    )
    return logs[0]


def shown(recording: Recording) -> RenderableType:
    """Return what is known now."""
    parts = [part for each in recording.pipelines for part in _parts(each)]
    return Group(*parts) if parts else Text("nothing was measured yet", style="dim")


STYLES = {"input-bound": "red", "balanced": "yellow", "not input-bound": "green"}


def _parts(seen: Recorded) -> Iterator[RenderableType]:
    line = course_of(seen)
    if not seen.told:
        known = line or "nothing was measured yet"
        yield Text(f"{seen.name}: {known}", style="dim")
        return
    verdict = seen.told[-1]
    wait = verdict["wait_share"] if line is None else line.last.wait_share
    yield Text.assemble(
        (f"{seen.name}: ", "bold"),
        (str(verdict["verdict"]), STYLES.get(verdict["verdict"], "")),
        f"  waits {wait:.0%} [{bar(wait)}]",
        "" if line is None else f"  {line.last.rate}",
        "" if seen.end is None else "  (over)",
    )
    if line is not None:
        yield Text(str(line))
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "workers", "executor", "on a CPU", "blocked", "connector"):
        table.add_column(title, justify="left")
    for stage in stages_of(seen):
        now, blamed = stage["now"], stage["blamed"]
        mark, style = ("> ", "bold red") if blamed else ("  ", "")
        table.add_row(
            Text(mark + stage["name"], style),
            str(stage["num_parallel_workers"]),
            stage["executor"],
            bar((now or stage)["cpu"]),
            bar((now or stage)["blocked"]),
            bar(now["output"]) if now else "",
        )
    yield table
    yield Text(f"cause: {verdict['cause']}")
    for row in seen.said[-DECISIONS:]:
        yield Text(f"  {row['text']}", style="dim", overflow="ellipsis", no_wrap=True)
