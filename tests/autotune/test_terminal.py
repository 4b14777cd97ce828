"""What `penstock watch` shows of a log."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from penstock.autotune.report.recording import Recording, Spent
from penstock.autotune.report.terminal import shown
from support.recordings import record


def text_of(recording: Recording) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(shown(recording))
    return output.getvalue()


def test_the_latest_window_and_the_latest_verdict_are_shown(tmp_path: Path) -> None:
    recording = Recording([str(record(tmp_path / "run"))])
    recording.read()
    (pipeline,) = recording.pipelines
    last = pipeline.points[-1]
    pipeline.points.append(
        Spent(
            last.time_s + 10, last.wait_s + 6.7, last.own_s + 3.3, last.rows + 123_450
        )
    )
    assert "waits 67% " in text_of(recording)
    assert "12,345 samples/s" in text_of(recording)
    pipeline.verdicts.append({**pipeline.verdicts[-1], "cause": "the last cause"})
    assert "cause: the last cause\n" in text_of(recording)


def test_a_pipeline_that_measured_nothing_says_so(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    first = log.read_text().splitlines(keepends=True)[0]
    log.write_text(first)
    recording = Recording([str(log)])
    recording.read()
    assert "nothing was measured yet" in text_of(recording)


def test_only_the_bottleneck_is_marked_and_red(tmp_path: Path) -> None:
    recording = Recording([str(record(tmp_path / "run"))])
    recording.read()
    (pipeline,) = recording.pipelines
    stages = [stage["name"] for stage in pipeline.verdicts[-1]["stages"]]
    pipeline.verdicts.append({**pipeline.verdicts[-1], "bottleneck": stages[0]})
    output = io.StringIO()
    Console(file=output, width=200, force_terminal=True).print(shown(recording))
    red = [line for line in output.getvalue().splitlines() if "\x1b[1;31m" in line]
    assert [f"> {stages[0]}" in line for line in red] == [True]
    marked = [line for line in text_of(recording).splitlines() if line[:2] == "> "]
    assert len(marked) == 1 < len(stages)


def test_each_column_has_its_title(tmp_path: Path) -> None:
    recording = Recording([str(record(tmp_path / "run"))])
    recording.read()
    titles = "stage workers executor on a CPU blocked connector"
    said = [" ".join(line.split()) for line in text_of(recording).splitlines()]
    assert titles in said
