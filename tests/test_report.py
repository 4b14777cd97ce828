"""Header, text, charts and `watch` tell the same of a run, whatever its length."""

from __future__ import annotations

import html
import io
import json
import random
import re
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import penstock as ps
from penstock.autotune.report.page import page
from penstock.autotune.report.recording import Recording, course_of, read_recording
from penstock.autotune.report.terminal import report_on, shown
from support.datasets import Numbers
from support.functions import waits
from support.json_lines import rows_in
from support.pages import ranks_in
from support.recordings import READS, record
from support.simulator.workload import SimulatedStage, Trainer, Workload

SENTENCE = re.compile(
    r"waited ([\d.,]+) of ([\d.,]+) s \((\d+)%\)"
    r"(?:: ([\d.,]+) s before the first decision, ([\d.,]+) s after)?;"
    r" (?:at the end|most recently) ([\d.,]+) samples/s"
)
STARVES = Workload(
    (
        SimulatedStage("Folder(ID:0)"),
        SimulatedStage("Map(ID:1) decode", cpu_s=0.008, gil=1.0),
    ),
    Trainer(gap_s=0.001),
    batch_rows=8,
)


def watched(recording: Recording) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400).print(shown(recording))
    return stream.getvalue()


def agree(log: Path) -> dict[str, Any]:
    """Assert that all views of a log have the same figures; return what is drawn."""
    recording = read_recording(log)
    (pipeline,), text = recording.pipelines, page(recording, "run")
    sentence = SENTENCE.search(report_on(recording))
    assert sentence
    header = html.unescape(text[text.index("<header>") : text.index("</header>")])
    assert f"W{sentence[0][1:]}." in header
    assert sentence[0] in watched(recording)
    wait_s, whole_s, share, before_s, after_s, rate = (
        float(part.replace(",", "")) if part else None for part in sentence.groups()
    )
    assert wait_s is not None
    assert whole_s is not None
    assert rate is not None
    if before_s is not None and after_s is not None:
        assert before_s + after_s == pytest.approx(wait_s, rel=0.02, abs=0.02)
    (rank,) = ranks_in(text)
    waits, rates = rank["charts"][:2]
    shares, speeds = waits["curves"]["wait"], rates["curves"]["rate"]
    assert speeds[-1] == pytest.approx(rate, rel=0.06, abs=0.51)
    # The chart has tenths of a percent, so what is rounded again may differ by one.
    near = {f"{round(shares[-1] + more)}%" for more in (-0.05, 0.05)}
    assert any(percent in waits["said"][0] for percent in near)
    if pipeline.told:
        assert any(f"waits {percent} [" in watched(recording) for percent in near)
        assert any(f"waits {percent} of each step" in text for percent in near)
    assert rank["seconds"] == waits["xs"][-1] == pytest.approx(whole_s, rel=0.01)
    spans = [end - begin for begin, end in pairwise(waits["xs"])]
    assert waits["xs"] == rates["xs"] == sorted(waits["xs"])
    whole_share = sum(map(float.__mul__, spans, shares[1:])) / sum(spans)
    assert whole_share == pytest.approx(share, abs=0.6)
    assert whole_share == pytest.approx(100 * wait_s / whole_s, abs=0.6)
    return rank


def trained(prefix: Path, wait_s: float, rows: int, steps: int) -> Path:
    """Train a tuned pipeline for some steps, and return its log."""
    ps.set_enable_autotune(True, str(prefix))
    slow = partial(waits, wait_s=wait_s)
    pipe = (
        ps.Pipeline.from_dataset(Numbers(5_000), executor="inline")
        .map(slow, executor="thread")
        .batch(rows)
    )
    with pipe:
        for step, _ in enumerate(pipe, 1):
            time.sleep(0.01)  # its own work
            if step == steps:
                break
    return Path(f"{prefix}_0.jsonl")


@pytest.mark.long
@pytest.mark.parametrize(
    ("wait_s", "rows", "steps"), [(0.1, 32, 3), (0.2, 16, 1), (0.01, 8, 150)]
)
def test_header_text_and_charts_of_a_real_run_agree(
    tmp_path: Path, wait_s: float, rows: int, steps: int
) -> None:
    log = trained(tmp_path / "run", wait_s, rows, steps)
    agree(log)
    (pipeline,) = read_recording(log).pipelines
    assert pipeline.points[-1].rows == steps * rows
    course, verdict = course_of(pipeline), pipeline.told[-1]
    assert course is not None  # the last verdict is about the end of the run
    assert course.last.wait_share == pytest.approx(verdict["wait_share"], abs=0.01)
    assert "nothing was measured" not in report_on(read_recording(log))


@pytest.mark.parametrize("workload", [READS, STARVES], ids=["reads", "starves"])
def test_header_text_and_charts_of_a_simulated_run_agree(
    tmp_path: Path, workload: Workload
) -> None:
    agree(record(tmp_path / "run", seconds=60.0, workload=workload))


def test_they_agree_wherever_a_log_breaks_off(tmp_path: Path) -> None:
    log = record(tmp_path / "run", seconds=40.0)
    content, cut = log.read_bytes(), tmp_path / "cut_0.jsonl"
    first = next(n for n, row in enumerate(rows_in(log)) if row.get("rows"))
    start = sum(map(len, content.splitlines(keepends=True)[: first + 1]))
    for at in random.Random(2).sample(range(start, len(content)), 30):
        cut.write_bytes(content[:at])
        agree(cut)


def test_loops_that_follow_each_other_add_up(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    once, (pipeline,) = agree(log), read_recording(log).pipelines
    again = [{**row, "time_s": row["time_s"] + 100.0} for row in rows_in(log)]
    with log.open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in again)
    both, (after,) = agree(log), read_recording(log).pipelines
    assert after.points[-1].whole_s == pytest.approx(2 * pipeline.points[-1].whole_s)
    assert after.waited_s == pytest.approx(2 * pipeline.waited_s)
    assert after.undecided == pipeline.undecided
    assert both["seconds"] == pytest.approx(2 * once["seconds"], abs=0.02)


def test_each_change_of_a_knob_is_a_step_of_its_curve_and_no_other_is_drawn(
    tmp_path: Path,
) -> None:
    log = record(tmp_path / "run", seconds=60.0)
    (pipeline,) = read_recording(log).pipelines
    course, rank = course_of(pipeline), agree(log)
    assert course is not None
    charts = {chart["title"]: chart for chart in rank["charts"]}
    changes = set()
    for row in rows_in(log):
        if row["event"] == "decision":
            changes.add((row["op"], row["knob"]))
        elif row["event"] != "outcome" or row["kept"]:
            continue
        value = row["new"] if row["event"] == "decision" else row["old"]
        chart = charts[row["knob"]]
        at = chart["xs"].index(course.at(row["time_s"]))
        assert chart["curves"][row["op"]][at] == value
    assert any(row["event"] == "outcome" and not row["kept"] for row in rows_in(log))
    assert changes == {
        (operator, title)
        for title, chart in charts.items()
        if chart["steps"] > 0
        for operator in chart["curves"]
    }
    for mark in rank["marks"]:
        assert mark["why"]
        assert 0 <= mark["at_s"] <= rank["seconds"]


def test_a_decision_before_the_first_verdict_is_reported(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    rows = rows_in(log)
    at = next(n for n, row in enumerate(rows) if row["event"] == "decision")
    early = [row for row in rows[: at + 1] if row["event"] != "verdict"]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in early))
    agree(log)
    report = report_on(read_recording(log))
    assert "nothing was measured" not in report
    assert "not judged yet" in report


def test_names_that_are_no_text_do_not_stop_a_report(tmp_path: Path) -> None:
    log, strange = record(tmp_path / "run", seconds=20.0), tmp_path / "strange_0.jsonl"
    (name,) = read_recording(log).names
    strange.write_text(
        log.read_text().replace(json.dumps(name), json.dumps("d\udce9j"))
    )
    recording = read_recording(strange)
    assert "d\\udce9j" in page(recording, "run").encode().decode()
    assert "waited" in report_on(recording)
