"""`penstock run` and `penstock report`: somebody's script, unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.autotune.report import read_report
from penstock.errors import SpecError
from support import warm

EXAMPLE = Path(__file__).parent.parent / "examples" / "plain_training.py"


def penstock(
    *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "penstock", *arguments]
    return warm.run(command, cwd=folder)


@pytest.mark.timeout(120)
def test_a_script_is_tuned_without_a_change_and_told_what_was_found(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    asked = ("--epochs", "2", "--samples", "3000")
    done = penstock("run", "--log", str(log), str(EXAMPLE), *asked)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss" in done.stdout
    told = done.stderr.partition("--- penstock: what was found ---")[2]
    assert "began:  input-bound: waiting" in told
    assert "Dataset(ID:0) Photos: executor inline -> process" in told
    assert "set by hand:  DataLoader(num_workers=" in told
    again = penstock("report", f"{log}_0.jsonl")
    assert again.stdout.strip() == told.strip()


def test_a_module_is_run_as_python_would_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "from torch.utils.data import DataLoader\n"
        "print(__name__, sys.argv[1:], DataLoader.__module__)\n"
        "sys.exit(3)\n"
    )
    command = [
        sys.executable,
        "-P",
        "-m",
        "penstock",
        "run",
        "-m",
        "train",
        "--lr",
        "1",
    ]
    done = warm.run(command, cwd=tmp_path)
    assert done.stdout.strip() == "__main__ ['--lr', '1'] penstock.pipeline.dataloader"
    assert done.returncode == 3
    assert "nothing: no DataLoader was iterated" in done.stderr


def test_all_that_stands_behind_the_script_is_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    own = ["--log", "out", "-m", "resnet50", "--help", "--", "--log=in"]
    done = penstock("run", str(script), *own, folder=tmp_path)
    assert done.stdout.strip() == str(own), done.stderr
    assert [*tmp_path.iterdir()] == [script]


def test_no_script_is_an_error_that_names_it() -> None:
    done = penstock("run", "nowhere.py")
    assert done.returncode == 1
    assert "there is no script 'nowhere.py'" in done.stderr


def row(event: str, **more: object) -> str:
    return json.dumps({"event": event, **more})


TOLD = """\
began:  input-bound: waiting 40% of each step, 812 samples/s; at most 1.7x faster
        bottleneck Map(ID:1) decode; CPU.
ended:  balanced: waiting 40% of each step, 812 samples/s; at most 1.7x faster
        CPU.
changed: Map(ID:1) decode: num_parallel_workers 2 -> 4, 812 -> 812/s, wait 41% -> 41%
tried and taken back: 1
set by hand:  Map(ID:1) decode: num_parallel_workers=4, prefetch_size=2, executor=thread
try:  ps.image
"""


def test_a_report_tells_changes_and_what_they_brought(tmp_path: Path) -> None:
    verdict = {
        "verdict": "input-bound",
        "bottleneck": "Map(ID:1) decode",
        "cause": "CPU.",
        "wait_share": 0.4,
        "rows_per_s": 812.0,
        "headspace": 1.7,
        "stages": [
            {
                "name": "Map(ID:1) decode",
                "num_parallel_workers": 4,
                "prefetch_size": 2,
                "executor": "thread",
            }
        ],
        "advice": ["ps.image"],
    }
    measure = {"rows_per_s": 812, "wait_share": 0.41}
    change = {"op": "Map(ID:1) decode", "knob": "num_parallel_workers"}
    values = {"old": 2, "new": 4, "before": measure, "after": measure}
    log = tmp_path / "run_0.jsonl"
    rows = [
        row("verdict", **verdict),
        row("outcome", **change, **values, kept=True),
        row("outcome", **change, **values, kept=False),
        row("verdict", **{**verdict, "verdict": "balanced"}),
    ]
    log.write_text("\n".join(rows))
    assert f"{read_report(log)}\n" == TOLD


@pytest.mark.parametrize("text", ["{", '{"event": "verdict"}', "[]"])
def test_what_is_no_log_is_an_error_that_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run_0.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match="is not the log of a tuned run"):
        read_report(path)
    with pytest.raises(SpecError, match="no log can be read"):
        read_report(tmp_path / "none.jsonl")
