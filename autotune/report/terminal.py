"""A tuned run in a terminal, from its log: what was slow, what changed, what to do.

`report_on` tells of a run as text, and `watch` shows one in another process meanwhile.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.console import Group as Stacked
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...engine.observe.observation import ratio
from ...errors import SpecError, check
from ..phrases import per_s
from .recording import (
    NO_LOG,
    Group,
    Recorded,
    Recording,
    Row,
    Spent,
    course_of,
    groups,
    read_recording,
)

# A stage's name in the log.
STAGE = re.compile(r"(?P<kind>\w+)\(ID:\d+\)(?: (?P<label>.+))?")
METHODS = {
    "Dataset": "Pipeline.from_dataset({}, ",
    "Files": "Pipeline.from_files(..., ",
    "Folder": "Pipeline.from_folder(..., ",
    "Filter": ".filter({}, ",
    "Map": ".map({}, ",
}
# Latest changes of knobs that are listed one by one.
MAX_CHANGES = 20
UNMEASURED = "nothing was measured: no step of a tuned loop was finished."
# A run tuned for less time than this may have had too little.
SHORT_S = 60.0

# Between two looks.
SECONDS = 1.0
# Between two states that are written to a file.
WRITTEN_S = 10.0
# Latest lines of the log that are shown.
LINES = 5
# Of a verdict.
STYLES = {"input-bound": "red", "balanced": "yellow", "not input-bound": "green"}


def report_on(recording: Recording) -> str:
    """Return what happened to some pipelines, as text."""
    lines = [line for group in groups(recording.pipelines) for line in told(group)]
    if recording.damaged:
        lines.append(f"left out: {recording.damaged} damaged lines of the log.")
    return "\n".join(lines or [UNMEASURED])


def told(group: Group) -> Iterator[str]:
    """Yield the report on one pipeline, line by line: its slowest rank, and others."""
    pipeline, ranks = group.worst, len(group.ranks)
    rank = f" ({ranks} ranks; the one that waits most is rank {pipeline.rank})"
    yield group.name + (rank if ranks > 1 else "")
    if whole := course_of(pipeline):
        yield f"  {whole}."
    for row in pipeline.torchs[-1:]:
        yield from (f"  torch: {_figures(row)}", f"         {row['cause']}")
    if pipeline.verdicts:
        yield from (f"  {line}" for line in _tuned(pipeline))
    if not pipeline.told:
        remark = "nothing was measured yet where the log breaks off."
        yield from (
            f"  {line}"
            for line in (
                changed(pipeline) if whole else [UNMEASURED if pipeline.end else remark]
            )
        )
        return
    yield from (f"  try: {step}" for step in pipeline.told[-1]["advice"])
    if none := why_none(pipeline):
        yield f"  next: {none}"
    for other in group.ranks:
        if other is not pipeline and other.told:
            yield f"  rank {other.rank}: {_figures(other.told[-1])}"


def _tuned(pipeline: Recorded) -> Iterator[str]:
    first, last = pipeline.verdicts[0], pipeline.verdicts[-1]
    yield f"began: {_figures(first)}"
    if first["bottleneck"] is not None:
        yield f"       bottleneck {first['bottleneck']}; {first['cause']}"
    if len(pipeline.verdicts) > 1:
        yield from (f"ended: {_figures(last)}", f"       {last['cause']}")
    if pipeline.end is None:
        yield "       the log breaks off here: the run goes on, or was killed"
    yield from picture(pipeline)
    yield from last["caching"]
    yield from changed(pipeline)
    for line in settings(pipeline):
        yield f"set by hand: {line}"


def why_none(pipeline: Recorded) -> str:
    """Return why nothing is to be done next, or nothing yet; empty if something is."""
    if pipeline.told[-1]["advice"]:
        return ""
    if count := len(pipeline.unjudged):
        changes = "one change was" if count == 1 else f"{count} changes were"
        if pipeline.end is None:
            return f"{changes} not judged; let it train on."
        return (
            f"{changes} not judged when training ended; train for longer, or begin the"
            " next run with the last values: load_autotune(...)."
        )
    if pipeline.told[-1]["verdict"] == "not input-bound":
        return "nothing here: loading keeps up with the trainer."
    if pipeline.verdicts and pipeline.points and pipeline.points[-1].whole_s < SHORT_S:
        tuned_s = pipeline.points[-1].whole_s
        return f"train for longer: autotune had only {tuned_s:.0f} s to try things."
    return "nothing is known that would help; the cause above says what binds."


def _figures(row: Row) -> str:
    """Return a verdict's line, and the rate."""
    return f"{row['line']} {Spent(0.0).more(row['trainer'], 0.0).rate}."


# Characters of a bar.
BAR = 10


def bar(share: float) -> str:
    """Return a share, 0 to 1, as a bar of `BAR` characters."""
    marks = round(min(1.0, max(0.0, share)) * BAR)
    return "#" * marks + "." * (BAR - marks)


def stages_of(pipeline: Recorded) -> list[Row]:
    """Return the stages of the last verdict, with what is known of them since then.

    They have the workers that are there now. `now` has how the stage's workers spent
    their time in the last window, and how full its output was, or is None; `blamed`
    says whether the stage is the bottleneck.
    """
    verdict, values = pipeline.told[-1], pipeline.values
    now = {
        row["name"]: {
            "cpu": ratio(row["cpu_s"], row["worker_s"]),
            "blocked": max(0.0, ratio(row["run_s"] - row["cpu_s"], row["worker_s"])),
            "output": min(
                1.0, ratio(row["output"]["occupancy"], row["output"]["capacity"])
            ),
        }
        for row in pipeline.segments
    }
    stages: list[Row] = []
    for stage in verdict["stages"]:
        name, parts = stage["name"], [part for part, _ in stage["parts"]]
        blamed = verdict["bottleneck"] in (name, *parts)
        present = {knob: value for (op, knob), value in values.items() if op == name}
        stages.append({**stage, **present, "now": now.get(name), "blamed": blamed})
    return stages


def picture(pipeline: Recorded) -> Iterator[str]:
    """Draw the pipeline: one line for each stage, and the connectors after them."""
    stages = stages_of(pipeline)
    width = max((len(stage["name"]) for stage in stages), default=0)
    for stage in stages:
        yield (
            f"{'>' if stage['blamed'] else ' '} {stage['name']:<{width}}"
            f"  {stage['num_parallel_workers']:>3} {stage['executor']:<7}"
            f"  on a CPU [{bar(stage['cpu'])}]  blocked [{bar(stage['blocked'])}]"
        )
        if stage["now"]:
            yield f"  {'':<{width}}  v connector [{bar(stage['now']['output'])}]"
    yield f"  trainer waits [{bar(pipeline.told[-1]['wait_share'])}]"


class Moment(NamedTuple):
    """A decision or a move, or the beginning of another regime.

    Its time is on the clock of the log's rows. `kind` is `kept`, `taken back`, `open`
    or `batches`.
    """

    time_s: float
    text: str
    why: str
    kind: str


def moments(pipeline: Recorded) -> list[Moment]:
    """Return what was changed, in order of time."""
    changes = [
        Moment(r["time_s"], _change(r), r["reason"], "kept") for r in pipeline.moves
    ]
    for decision, row in pipeline.judged:
        before, after = row["before"], row["after"]
        text = (
            f"{_change(row)},"
            f" {per_s(before['rows_per_s'])} -> {per_s(after['rows_per_s'])} samples/s,"
            f" wait {before['wait_share']:.0%} -> {after['wait_share']:.0%}"
        )
        kind = "kept" if row["kept"] else "taken back"
        changes.append(Moment(decision["time_s"], text, decision["reason"], kind))
    for row in pipeline.unjudged.values():
        text = f"{_change(row)}, not judged yet"
        changes.append(Moment(row["time_s"], text, row["reason"], "open"))
    for time_s, regime in pipeline.regimes[1:]:
        changes.append(Moment(time_s, f"from here on {regime}", "", "batches"))
    return sorted(changes)


def changed(pipeline: Recorded) -> Iterator[str]:
    """Yield what was changed, and with which effect, a line each."""
    stays = [
        moment.text for moment in moments(pipeline) if moment.kind in ("kept", "open")
    ]
    if not stays:
        yield "changed: nothing; it was as good as could be found, or had no time"
    if len(stays) > MAX_CHANGES:
        yield f"changed: {len(stays) - MAX_CHANGES} times before; the log has them all"
    yield from (f"changed: {text}" for text in stays[-MAX_CHANGES:])
    if rollbacks := sum(not row["kept"] for _, row in pipeline.judged):
        yield f"tried and taken back: {rollbacks}"


def _change(row: Row) -> str:
    return f"{row['op']}: {row['knob']} {row['old']} -> {row['new']}"


def settings(pipeline: Recorded) -> Iterator[str]:
    """Yield the lines of code that set by hand what was judged, not what is tried."""
    values = pipeline.values | {k: row["old"] for k, row in pipeline.unjudged.items()}
    stages = stages_of(replace(pipeline, values=values))
    sizes = [int(size) for (_, knob), size in values.items() if knob == "prefetch_size"]
    if pipeline.told[-1].get("face") == "DataLoader":
        workers, ahead = stages[0]["num_parallel_workers"], stages[0]["prefetch_size"]
        factor = ceil(max(sizes, default=ahead) / workers)
        arguments = f"num_workers={workers}, prefetch_factor={factor}"
        if stages[0]["executor"] == "inline":
            arguments = "num_workers=0"
        yield f"DataLoader(..., {arguments})"
        return
    for stage in stages:
        yield _call(stage, tuned=(stage["name"], "num_parallel_workers") in values)
    if sizes:
        yield f"ps.set_prefetch_size({max(sizes)})"


def _call(stage: Row, *, tuned: bool) -> str:
    """Return the call that creates a stage, with its workers as they are now."""
    arguments = f'executor="{stage["executor"]}"'
    if tuned:
        workers = stage["num_parallel_workers"]
        arguments = f"num_parallel_workers={workers}, {arguments}"
    name = STAGE.fullmatch(stage["name"])
    if name is None or name["kind"] not in METHODS:
        return f"{stage['name']}: {arguments}"
    return METHODS[name["kind"]].format(name["label"] or "...") + arguments + ")"


# While it runs


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
            pipelines = recording.pipelines
            ended = pipelines and all(
                pipeline.end is not None for pipeline in pipelines
            )
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
        paths = [
            os.path.realpath(link) for link in Path(f"/proc/{target}/fd").iterdir()
        ]
    except OSError as error:
        raise SpecError(
            f"cannot see the files of process {target} ({error.strerror}); give the"
            " path of the log that it writes"
        ) from error
    for path in paths:
        with suppress(SpecError):  # the program may have rows of its own open
            if path.endswith(".jsonl") and read_recording(path).names:
                return path
    raise SpecError(
        f"process {target} writes no autotune log; start it by `penstock run --log"
        " PREFIX train.py`, or with set_enable_autotune(True, PREFIX)"
    )


def shown(recording: Recording) -> RenderableType:
    """Return what is known now."""
    parts = [part for pipeline in recording.pipelines for part in _parts(pipeline)]
    return Stacked(*parts) if parts else Text("nothing was measured yet", style="dim")


def _parts(pipeline: Recorded) -> Iterator[RenderableType]:
    line = course_of(pipeline)
    if not pipeline.told:
        yield Text(
            f"{pipeline.name}: {line or 'nothing was measured yet'}", style="dim"
        )
        return
    verdict = pipeline.told[-1]
    wait = verdict["wait_share"] if line is None else line.last.wait_share
    yield Text.assemble(
        (f"{pipeline.name}: ", "bold"),
        (str(verdict["verdict"]), STYLES.get(verdict["verdict"], "")),
        f"  waits {wait:.0%} [{bar(wait)}]",
        "" if line is None else f"  {line.last.rate}",
        "" if pipeline.end is None else "  (over)",
    )
    if line is not None:
        yield Text(str(line))
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "workers", "executor", "on a CPU", "blocked", "connector"):
        table.add_column(title, justify="left")
    for stage in stages_of(pipeline):
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
    for row in pipeline.said[-LINES:]:
        yield Text(f"  {row['text']}", style="dim", overflow="ellipsis", no_wrap=True)
