"""Runs are watched from outside, both while they go on and afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.autotune.report.terminal import log_of
from penstock.errors import SpecError
from support import warm
from support.recordings import record

TRAINING = """\
import sys, time
import penstock as ps
data = open(sys.argv[2])  # rows of its own, opened first
ps.set_enable_autotune(True, sys.argv[1])
train_loader = ps.DataLoader(list(range(100_000)), 8)
for _ in train_loader:
    time.sleep(0.01)
"""


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "penstock", *arguments]
    return warm.run(command, brief=True)


def test_a_running_process_can_be_watched(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    data = tmp_path / "captions.jsonl"
    data.write_text('{"image": "1.jpg", "text": "a dog"}\n')
    command = [sys.executable, "-P", str(script), str(tmp_path / "run"), str(data)]
    with warm.Popen(command, stderr=subprocess.DEVNULL) as training:
        try:
            log = tmp_path / "run_0.jsonl"
            while not (log.exists() and '"event": "verdict"' in log.read_text()):
                assert training.poll() is None
                time.sleep(0.05)
            assert log_of(str(training.pid)) == str(log)
            done = penstock("watch", "--once", str(training.pid))
        finally:
            training.kill()
    assert done.returncode == 0, done.stderr
    assert "train: " in done.stdout
    assert "Dataset(ID:0) list" in done.stdout


def test_what_is_watched_into_a_file_is_written_while_it_runs(tmp_path: Path) -> None:
    log = record(tmp_path / "run")
    *rows, end = log.read_text().splitlines(keepends=True)
    assert '"event": "end"' in end
    log.write_text("".join(rows))
    command = [sys.executable, "-P", "-m", "penstock", "watch", str(log)]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert "train: " in watching.stdout.readline()
        with log.open("a") as file:
            file.write(end)
        assert "(over)" in watching.stdout.read()


def test_a_finished_run_is_shown_once(tmp_path: Path) -> None:
    done = penstock("watch", str(record(tmp_path / "run")))
    assert done.returncode == 0, done.stderr
    assert "(over)" in done.stdout


def test_a_process_without_a_log_is_an_error_that_says_how_to_write_one() -> None:
    with pytest.raises(SpecError, match="no log can be read from 'nowhere'"):
        log_of("nowhere")
    with pytest.raises(SpecError, match="penstock run --log"):
        log_of(str(os.getpid()))


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    log, page = record(tmp_path / "run"), tmp_path / "run.html"
    done = penstock("report", "--html", str(page), str(log))
    assert done.stdout.startswith("train\n")
    assert done.stdout.endswith(f"\nwritten: {page}\n")
    assert page.read_text().startswith("<!doctype html>")


FACTORY = """\
import time
import penstock as ps

class Slow:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return index

def loader():
    return ps.DataLoader(Slow(), 4)
"""


def test_a_users_own_loader_is_measured_as_set_and_as_tuned(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    command = [sys.executable, "-P", "-m", "penstock", "bench", "mine:loader"]
    done = warm.run([*command, "--seconds", "4"], cwd=tmp_path, brief=True)
    assert done.returncode == 0, done.stderr
    rates = re.search(r"as set: (\d+) samples/s; tuned: ([\d,]+)", done.stdout)
    assert rates, done.stdout
    assert 0 < int(rates[1]) <= 100  # each sample sleeps for 10 ms
    assert int(rates[2].replace(",", "")) > 0
    assert "Dataset(ID:0) Slow" in done.stdout
    done = warm.run([*command[:-1], "mine:nothing"], cwd=tmp_path, brief=True)
    assert done.returncode == 1
    assert "neither a folder of images nor MODULE:FUNCTION" in done.stderr


OF_TORCH = """
import time
from torch.utils.data import DataLoader

class Slow:
    def __len__(self):
        return 6400
    def __getitem__(self, index):
        time.sleep(0.005)
        return index

def loader():
    return DataLoader(Slow(), 8)

def by_the_trainer():
    return DataLoader(Slow(), 8, num_workers=0)

def other():
    return [[1, 2]]
"""


def shown(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the first line that a command printed."""
    return (done.stdout or done.stderr).splitlines()[:1]


def test_a_loader_of_torchs_is_tuned_as_well_or_said_not_to_be(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OF_TORCH)
    command = [sys.executable, "-P", "-m", "penstock", "bench", "--seconds", "4"]
    done = warm.run([*command, "mine:loader"], cwd=tmp_path, brief=True)
    assert re.match(r"as set: \d+ samples/s; tuned: [\d,]+ samples/s$", *shown(done))
    assert "[autotune] bench: " in done.stderr
    assert "Dataset(ID:0) Slow" in done.stdout
    done = warm.run([*command, "mine:by_the_trainer"], cwd=tmp_path, brief=True)
    (first,) = shown(done)
    assert "with autotune, which changed nothing: " in first
    assert "the program says `num_workers=0`" in done.stdout
    done = warm.run([*command, "mine:other"], cwd=tmp_path, brief=True)
    assert done.returncode == 1
    assert "'mine:other' returns a list, which penstock cannot tune" in done.stderr
