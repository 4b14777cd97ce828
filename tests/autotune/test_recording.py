"""Logs read back: whole, of several pipelines and ranks, cut anywhere."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from markupsafe import escape

from penstock.autotune import log as autotune_log
from penstock.autotune.explain import of_torchs
from penstock.autotune.log import AutotuneLog
from penstock.autotune.report.page import MAX_RANKS, page
from penstock.autotune.report.recording import Recording, read_recording
from penstock.autotune.report.terminal import _call, report_on, settings
from penstock.engine.observe.observation import TrainerObservation
from penstock.errors import SpecError
from support.pages import ranks_in
from support.recordings import LONG, READS, record
from support.simulator.workload import SimulatedStage, Trainer, Workload


def test_a_reading_of_a_log_shows_what_was_tuned(tmp_path: Path) -> None:
    (pipeline,) = read_recording(record(tmp_path / "run")).pipelines
    assert (pipeline.name, pipeline.rank) == ("train", 0)
    assert pipeline.points
    assert pipeline.end is not None
    assert pipeline.values[pipeline.end["knobs"][0]["op"], "num_parallel_workers"] > 5
    assert pipeline.unjudged == {}


def test_two_pipelines_and_ranks_stay_apart(tmp_path: Path) -> None:
    prefix = tmp_path / "run"
    for rank in range(2):
        record(prefix, "train", rank)
        record(prefix, "val", rank, seconds=5.0)
    pipelines = read_recording(prefix).pipelines
    names = [(run.name, run.rank) for run in pipelines]
    assert names == [("train", 0), ("val", 0), ("train", 1), ("val", 1)]
    assert [run.rank for run in read_recording(prefix, "val").pipelines] == [0, 1]
    with pytest.raises(SpecError, match="no pipeline 'test'; it has train, val"):
        read_recording(prefix, "test")
    text = report_on(read_recording(prefix, "val"))
    assert "val (2 ranks; the one that waits most is rank " in text
    assert "train (" not in text


def test_ranks_that_an_earlier_run_had_in_addition_are_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        log = record(tmp_path / "run", "train", rank)
    begin, *rows = log.read_text().splitlines(keepends=True)
    early = json.loads(begin)
    early["wall_s"] -= 3600.0
    log.write_text("".join([json.dumps(early) + "\n", *rows]))
    pipelines = read_recording(tmp_path / "run").pipelines
    assert [pipeline.rank for pipeline in pipelines] == [0, 1]
    assert [pipeline.rank for pipeline in read_recording(log).pipelines] == [2]


def test_the_rank_that_waits_most_is_drawn_however_many_there_are(
    tmp_path: Path,
) -> None:
    begin, *rows = record(tmp_path / "run", seconds=5.0).read_text().splitlines()
    for rank in range(MAX_RANKS + 2):
        first = json.dumps(json.loads(begin) | {"rank": rank})
        (tmp_path / f"all_{rank}.jsonl").write_text("\n".join([first, *rows, ""]))
    worst = json.loads(rows[-1]) | {"event": "spent", "before": "end"}
    worst |= {"wait_s": 1e3, "gap_s": 1.0, "rows": 1.0}
    with (tmp_path / f"all_{rank}.jsonl").open("a") as file:
        file.write(json.dumps(worst) + "\n")
    text = page(read_recording(tmp_path / "all"), "run")
    drawn = [each["rank"] for each in ranks_in(text)]
    assert drawn == [*range(MAX_RANKS), rank]
    assert "Decisions</h3>" in text


def test_the_page_has_no_settings_where_torch_loads(tmp_path: Path) -> None:
    trainer = TrainerObservation(steps=10, rows=40, wait_s=9.0, gap_s=1.0)
    name, why = "Dataset(ID:0) Stream", "an iterable dataset says what is read"
    with AutotuneLog(str(tmp_path / "run"), name="stream") as log:
        log.torchs(of_torchs(trainer, name, 2, "process", why, tunable=False))
    recording = read_recording(tmp_path / "run")
    report, text = report_on(recording), page(recording, "run")
    assert ("torch: input-bound" in report, "set by hand" in report) == (True, False)
    assert why in text
    assert "set by hand" not in text
    assert "DataLoader(" not in text
    assert "Decisions</h3>" not in text


def test_the_log_of_a_killed_run_is_readable_up_to_any_byte(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    whole = log.read_bytes()
    rows = whole.splitlines(keepends=True)
    cut = tmp_path / "cut_0.jsonl"
    for at in random.Random(0).sample(range(len(rows[0]), len(whole)), 25):
        cut.write_bytes(whole[:at])
        recording = read_recording(cut)
        (pipeline,) = recording.pipelines
        assert recording.damaged <= 1
        assert (pipeline.end is None) == (at < len(whole) - 1)
        report = read_recording(cut)
        text = report_on(report)
        assert text
        if pipeline.told:  # it says what to do next, or why there is nothing to do
            assert ("\n  try: " in text) != ("\n  next: " in text)
        assert page(report, "run")


def test_a_change_that_is_not_judged_yet_is_reported_as_such(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    rows = list(map(json.loads, log.read_text().splitlines()))
    at = next(n for n, row in enumerate(rows) if row["event"] == "outcome")
    log.write_text("".join(json.dumps(row) + "\n" for row in rows[:at]))
    (pipeline,) = read_recording(log).pipelines
    decided = pipeline.unjudged.values()
    assert decided
    for row in decided:
        assert pipeline.values[row["op"], row["knob"]] == row["new"]
        line = (
            f"{row['op']}: {row['knob']} {row['old']} -> {row['new']}, not judged yet"
        )
        assert line in report_on(read_recording(log))
    assert "not judged; let it train on." in report_on(read_recording(log))
    assert "not judged; let it train on." in page(read_recording(log), "run")
    (rank,) = ranks_in(page(read_recording(log), "run"))
    ends = {
        (operator, chart["title"]): values[-1]
        for chart in rank["charts"][2:]
        for operator, values in chart["curves"].items()
    }
    assert ends == {(row["op"], row["knob"]): row["new"] for row in decided}
    assert [mark["kind"] for mark in rank["marks"]] == ["open"] * len(ends)


def test_a_log_that_grows_is_followed_row_by_row(tmp_path: Path) -> None:
    whole = record(tmp_path / "run").read_bytes()
    growing = tmp_path / "growing_0.jsonl"
    growing.write_bytes(b"")
    following, rng = Recording([str(growing)]), random.Random(1)
    at = 0
    while at < len(whole):
        to = min(len(whole), at + rng.randint(1, 20_000))
        with growing.open("ab") as file:
            file.write(whole[at:to])
        at = to
        following.read()
    (pipeline,) = following.pipelines
    (once,) = read_recording(tmp_path / "run_0.jsonl").pipelines
    assert pipeline == once
    assert following.damaged == 0


def test_every_text_from_the_user_is_escaped_on_the_page(tmp_path: Path) -> None:
    log = record(tmp_path / "run", "</script><script>alert(2)</script>")
    text = page(read_recording(log), "<b>run</b>")
    assert "alert(1)</script>" not in text
    assert "alert(2)</script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<b>run" not in text
    assert text.count("<script") == 3


def test_nothing_is_set_by_hand_that_was_not_judged(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    rows = list(map(json.loads, log.read_text().splitlines()))
    changes = [n for n, row in enumerate(rows) if row["event"] == "decision"]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows[: changes[0] + 1]))
    (pipeline,) = read_recording(log).pipelines
    assert pipeline.unjudged
    lines = [*settings(pipeline)]
    for (operator, knob), row in pipeline.unjudged.items():
        line = f"{knob}={row['old']}" if "workers" in knob else f"({row['old']})"
        assert any(line in setting for setting in lines), operator
    text = report_on(read_recording(log))
    assert f"set by hand: {lines[0]}" in text
    assert "by hand yet" not in text


def test_the_page_repeats_the_log_to_the_digit(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    (pipeline,) = read_recording(log).pipelines
    lines = [row["text"] for row in pipeline.said if "of each step" in row["text"]]
    assert pipeline.verdicts[-1]["line"] == lines[-1]
    assert lines[-1] in page(read_recording(log), "run")
    assert lines[-1] in report_on(read_recording(log))


BOUND = Workload(
    (
        SimulatedStage("Folder(ID:0)"),
        SimulatedStage("Map(ID:1) decode", cpu_s=0.008, gil=1.0),
    ),
    Trainer(gap_s=0.001),
    batch_rows=8,
)
"""Functions that no number of threads can run faster, so there is something to do."""


@pytest.mark.parametrize(
    ("workload", "kind"), [(READS, "next"), (BOUND, "try")], ids=["reads", "bound"]
)
def test_the_page_says_what_the_terminal_says(
    workload: Workload, kind: str, tmp_path: Path
) -> None:
    report = read_recording(record(tmp_path / "run", workload=workload))
    page_text = re.sub(r"<(?!/?script)[^>]*>", "", page(report, "run"))
    advice = re.findall("(try|next|set by hand|changed): (.*)", report_on(report))
    assert {kind, "set by hand"} <= {label for label, _ in advice}
    for _, text in advice:
        assert str(escape(text)) in page_text


def test_a_long_run_leaves_out_quiet_windows_and_keeps_those_with_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = record(tmp_path / "whole", seconds=150.0)
    monkeypatch.setattr(autotune_log, "FREE_BYTES", 10_000)
    monkeypatch.setattr(autotune_log, "BYTES_PER_S", 450)
    thinned = record(tmp_path / "thinned", seconds=150.0)
    rows = list(map(json.loads, thinned.read_text().splitlines()))
    windows = {row["time_s"] for row in rows if row["event"] == "observation"}
    for row in rows:
        assert row["event"] != "decision" or row["time_s"] in windows
    size = sum(len(json.dumps(row)) for row in rows if row["event"] == "observation")
    assert size < 10_000 + 150 * autotune_log.BYTES_PER_S
    (pipeline,), (full,) = (read_recording(log).pipelines for log in (thinned, whole))
    assert pipeline.judged == full.judged
    assert pipeline.values == full.values
    assert pipeline.points == full.points
    whole_rows = list(map(json.loads, whole.read_text().splitlines()))
    every = [row for row in whole_rows if row["event"] == "observation"]
    assert len(windows) < len(every) / 2
    assert pipeline.latest == full.latest


def test_a_damaged_line_costs_that_line_alone(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    rows = log.read_bytes().splitlines(keepends=True)
    (whole,) = read_recording(log).pipelines
    for damage in (b"{", b"[" * 100_000, b"1", b'{"event": "said"}, {}', b""):
        damaged = [*rows[:3], damage + b"\n", *rows[3:]]
        log.write_bytes(b"".join(damaged))
        recording = read_recording(log)
        assert recording.pipelines == (whole,)
        assert recording.damaged == 1


def test_the_page_says_how_a_run_began_if_it_ended_otherwise(tmp_path: Path) -> None:
    for seconds, times in ((30.0, 1), (1.0, 0)):
        report = read_recording(record(tmp_path / f"run{seconds}", seconds=seconds))
        (pipeline,) = report.pipelines
        first, last = pipeline.verdicts[0]["line"], pipeline.verdicts[-1]["line"]
        assert (first != last) == times
        assert page(report, "run").count(f"It began: {escape(first)}") == times


def test_a_long_run_has_a_point_for_each_column_and_hardly_more(tmp_path: Path) -> None:
    recording = read_recording(record(tmp_path / "run", "train", 0, 20_000.0, LONG))
    (pipeline,), (rank,) = recording.pipelines, ranks_in(page(recording, "run"))
    assert 100 < len(rank["charts"][0]["xs"]) < 250
    assert len(pipeline.points) < 3_000


def test_no_label_of_the_log_is_printed_as_an_argument() -> None:
    """`read` is what the log calls the files of a folder: nobody wrote it."""
    stage = {"num_parallel_workers": 1, "executor": "thread"}
    row = {"name": "Folder(ID:0) read", "blamed": True, "now": None, **stage}
    line = _call(row, tuned=True)
    arguments = 'num_parallel_workers=1, executor="thread"'
    assert line == f"Pipeline.from_folder(..., {arguments})"
    assert _call({**row, "name": "Map(ID:1) f"}, tuned=True) == f".map(f, {arguments})"
