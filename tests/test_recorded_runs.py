"""Report and page name the known causes of twelve runs on the first screen."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.autotune.report.page import write_page
from penstock.autotune.report.recording import read_recording
from penstock.autotune.report.terminal import report_on
from support import known_causes, warm
from support.chromium import looked_at
from support.json_lines import rows_in
from support.recordings import LONG, record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 5
CAUSES = {
    "slow reads": "waiting reads",
    "slow decoding": "CPU",
    "slow collating": "collate",
    "the GIL": "the GIL",
    "a slow trainer": "the trainer",
    "an iterable": "torch's own workers load",
    "a slow map of batches": "waiting reads",
    "uneven samples": "uneven samples",
    "the memory budget": "the memory budget",
    "a crash": "waiting reads",
    "a kill": "waiting reads",
}
COLUMNS, LINES = 120, 24
"""The size of a terminal."""
SCREENS = ((1440, 900), (360, 740))
FIRST = """<script>
window.addEventListener("load", () => {
  const inSight = (each) => each.getBoundingClientRect().top < window.innerHeight;
  const seen = [...document.querySelectorAll("header div")].filter((each) =>
    !each.querySelector("div") && inSight(each));
  parent.put("seen", seen.map((each) => each.textContent));
});
</script>"""


def said(log: Path) -> list[dict[str, Any]]:
    """Return the verdicts in a log as far as it can be read."""
    events = ("verdict", "torch")
    rows = (row for row in rows_in(log) if row["event"] in events)
    return [row for row in rows if row["stages"] is not None]


def check(path: Path, page: Path, truth: str, rows: list[dict[str, Any]]) -> None:
    """Assert that report and page show what the log says, and the cause at once."""
    report = report_on(read_recording(path))
    wrapped = (textwrap.wrap(line, COLUMNS) for line in report.splitlines())
    lines = [part for line in wrapped for part in line]
    assert truth in "\n".join(lines[:LINES]), report
    assert "\n  try: " in report or "\n  next: " in report, report
    latest = {row["pipeline"]: row["line"] for row in rows}
    for line in latest.values():
        assert line in report
    write_page(read_recording(path), page)
    for width, height in SCREENS:
        values, complaints = looked_at(page, FIRST, width, height)
        assert complaints == ""
        assert any(truth in text for text in values["seen"]), values
        if width > 1000:
            assert set(latest.values()) <= set(values["seen"])


def recorded(folder: Path, cause: str) -> tuple[Path, int]:
    """Run the script, and return its log and how it ended."""
    script, prefix = Path(known_causes.__file__), folder / "run"
    arguments = ["run", "--log", str(prefix), str(script), cause, str(SECONDS)]
    command = [sys.executable, "-P", "-m", "penstock", *arguments]
    process = warm.run(command, cwd=folder, brief=True)
    return Path(f"{prefix}_0.jsonl"), process.returncode


@pytest.mark.serial  # cores taken by other tests would be a cause, too
@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named_on_the_first_screen(tmp_path: Path, cause: str) -> None:
    log, exit_code = recorded(tmp_path, cause)
    assert exit_code == {"a crash": 1, "a kill": -9}.get(cause, 0)
    rows = said(log)
    names = {row["pipeline"] for row in rows}
    assert "train" in names
    two = cause not in known_causes.ALONE and cause != "a kill"
    assert ("val" in names) == two  # the short loop's verdict comes at the end
    check(log, tmp_path / "run.html", CAUSES[cause], rows)
    if cause != "a kill":
        return
    whole, rng = log.read_bytes(), random.Random(0)
    first = whole.index(b'"event": "verdict"')
    for _ in range(3):
        log.write_bytes(whole[: rng.randrange(first + 4000, len(whole))])
        check(log, tmp_path / "cut.html", CAUSES[cause], said(log))


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Return the prefix of the logs of eight ranks that each trained for a day."""
    prefix = tmp_path / "day"
    log = record(prefix, "train", 0, 86_400.0, workload=LONG)
    for rank in range(1, 8):
        shutil.copy(log, f"{prefix}_{rank}.jsonl")
    return prefix


REPORT_AND_COST = """
import re, sys, time
from penstock.cli import main
try:
    main()
finally:
    with open("/proc/self/status") as status:
        peak = re.search(r"VmHWM:\\s+(\\d+)", status.read())[1]
    print(time.process_time(), peak)
"""
"""Prints its CPU seconds and peak memory, in KiB, since Python began: the memory of the
fork before that does not count."""


def cost(*arguments: str) -> tuple[float, float]:
    """Return the CPU seconds of `penstock report`, and its peak memory in bytes."""
    command = [sys.executable, "-P", "-c", REPORT_AND_COST, "report", *arguments]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    cpu_s, peak_kib = map(float, process.stdout.split()[-2:])
    return cpu_s, 1024 * peak_kib


def parsing_s(paths: list[Path]) -> float:
    """Return the CPU seconds of parsing every line, and of nothing else."""
    begun_s = time.process_time()
    for path in paths:
        for line in path.read_bytes().splitlines():
            json.loads(line)
    return time.process_time() - begun_s


def test_a_day_of_eight_ranks_is_reported_in_little_time_and_memory(
    days: Path, tmp_path: Path
) -> None:
    logs = [Path(f"{days}_{rank}.jsonl") for rank in range(8)]
    assert all(log.stat().st_size < 15e6 for log in logs)
    page, short = tmp_path / "day.html", record(tmp_path / "short", workload=LONG)
    begins_s, _ = cost(str(short))
    for arguments in ((), ("--html", str(page))):
        cpu_s, peak_bytes = cost(str(days), *arguments)
        assert cpu_s - begins_s < 2 * parsing_s(logs)
        assert peak_bytes < 500e6
    assert page.stat().st_size < 1.5e6
    report, text = report_on(read_recording(days)), page.read_text()
    truth = "the trainer: loading keeps up"  # after the first minutes
    assert truth in "\n".join(report.splitlines()[:LINES])
    assert truth in text[text.index("<header>") : text.index("</header>")]
    for rank in range(8):
        latest = said(Path(f"{days}_{rank}.jsonl"))[-1]
        assert latest["line"] in report
