"""`penstock run` and `penstock report` with a user's script, unchanged."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.autotune.report.recording import read_recording
from penstock.autotune.report.terminal import report_on
from penstock.errors import SpecError
from support import warm

EXAMPLE = Path(__file__).parent.parent / "examples" / "plain_training.py"


def penstock(
    *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "penstock", *arguments]
    return warm.run(command, cwd=folder, brief=True)


def test_an_unchanged_script_is_tuned_and_the_findings_are_reported(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    options = ("--epochs", "2", "--samples", "1600")
    process = penstock("run", "--log", str(log), str(EXAMPLE), *options)
    assert process.returncode == 0, process.stderr
    assert "epoch 1: loss" in process.stdout
    report = process.stderr.partition("--- penstock: results ---")[2]
    assert "began: input-bound: waiting" in report
    assert "Dataset(ID:0) Photos: executor inline -> process" in report
    assert "set by hand: DataLoader(..., num_workers=" in report
    again = penstock("report", f"{log}_0.jsonl")
    assert again.stdout.strip() == report.strip()


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
    process = warm.run(command, cwd=tmp_path, brief=True)
    assert (
        process.stdout.strip() == "__main__ ['--lr', '1'] penstock.pipeline.dataloader"
    )
    assert process.returncode == 3
    assert "the script did not iterate a DataLoader" in process.stderr


def test_all_arguments_after_the_script_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    own = ["--log", "out", "-m", "resnet50", "--help", "--", "--log=in"]
    process = penstock("run", str(script), *own, folder=tmp_path)
    assert process.stdout.strip() == str(own), process.stderr
    assert [*tmp_path.iterdir()] == [script]


def test_a_missing_script_is_an_error_that_names_it() -> None:
    process = penstock("run", "nowhere.py")
    assert process.returncode == 1
    assert "there is no script 'nowhere.py'" in process.stderr


def row(event: str, **more: object) -> str:
    return json.dumps({"pipeline": "train", "event": event, "time_s": 1.0, **more})


TOLD = """\
train
  waited 30 of 120 s (25%): 20 s before the first decision, 10 s after; most recently 812 samples/s.
  began: input-bound: waiting 40% of each step. 812 samples/s.
         bottleneck Map(ID:1) decode; CPU.
  ended: balanced. 812 samples/s.
         CPU.
         the log breaks off here: the run goes on, or was killed
  > Map(ID:1) decode    5 thread   on a CPU [#########.]  blocked [#.........]
    trainer waits [####......]
  changed: Map(ID:1) decode: num_parallel_workers 2 -> 4, 812 -> 1450 samples/s, wait 41% -> 6%
  changed: Map(ID:1) decode: num_parallel_workers 4 -> 5, not judged yet
  tried and taken back: 1
  set by hand: .map(decode, num_parallel_workers=4, executor="thread")
  try: ps.image
"""  # noqa: E501 as it is printed


def test_a_report_shows_changes_and_their_effects(tmp_path: Path) -> None:
    verdict = {
        "verdict": "input-bound",
        "line": "input-bound: waiting 40% of each step.",
        "bottleneck": "Map(ID:1) decode",
        "cause": "CPU.",
        "wait_share": 0.4,
        "rows_per_s": 812.0,
        "trainer": {"wait_s": 4.0, "gap_s": 6.0, "rows": 8_120},
        "stages": [
            {
                "name": "Map(ID:1) decode",
                "num_parallel_workers": 2,
                "prefetch_size": 2,
                "executor": "thread",
                "cpu": 0.9,
                "blocked": 0.1,
                "parts": [],
            }
        ],
        "advice": ["ps.image"],
        "caching": [],
    }
    before = {"rows_per_s": 812, "wait_share": 0.41}
    after = {"rows_per_s": 1450, "wait_share": 0.06}
    change = {"op": "Map(ID:1) decode", "knob": "num_parallel_workers"}
    change["reason"] = "It is slow."
    outcome = {**change, "before": before, "after": after}
    log = tmp_path / "run_0.jsonl"
    rows = [
        row("spent", wait_s=9.0, gap_s=10.0, rows=99, before="verdict"),
        row("verdict", **verdict),
        row("spent", wait_s=20.0, gap_s=30.0, rows=99, before="decision"),
        row("decision", **change, old=2, new=4),
        row("outcome", **outcome, old=2, new=4, kept=True),
        row("decision", **change, old=4, new=8),
        row("outcome", **outcome, old=4, new=8, kept=False),
        row("decision", **change, old=4, new=5),
        row("spent", wait_s=30.0, gap_s=90.0, rows=9_999, before="verdict"),
        row("verdict", **{**verdict, "line": "balanced."}),
    ]
    log.write_text("\n".join(rows) + "\n")
    assert f"{report_on(read_recording(log))}\n" == TOLD


def test_a_report_includes_loaders_with_torchs_own_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time\n"
        "from torch.utils.data import DataLoader, IterableDataset\n"
        "class Stream(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        for number in range(8):\n"
        "            time.sleep(0.01)\n"
        "            yield number\n"
        "stream_loader = DataLoader(Stream(), 4)\n"
        "list(stream_loader)\n"
    )
    process = penstock("run", "train.py", folder=tmp_path)
    assert process.returncode == 0, process.stderr
    report = process.stderr.partition("--- penstock: results ---")[2]
    assert "stream\n  waited " in report
    assert "\n  torch: input-bound" in report
    assert "the trainer itself loads, as in torch" in report


OWN = """
import penstock as ps
ps.set_enable_autotune({asked})
for _ in ps.DataLoader(list(range(400)), 4, name="train"):
    pass
"""


@pytest.mark.parametrize("asked", ["True", "True, 'own/run'"])
def test_a_script_that_turns_autotune_on_itself_is_reported_from_its_log(
    tmp_path: Path, asked: str
) -> None:
    (tmp_path / "train.py").write_text(OWN.format(asked=asked))
    process = penstock("run", "--log", "log/run", "train.py", folder=tmp_path)
    report = process.stderr.partition("--- penstock: results ---\n")[2]
    own = "own" in asked
    assert (tmp_path / ("own" if own else "log") / "run_0.jsonl").exists()
    told = f"the script writes its log to '{tmp_path}/own/run_0.jsonl'.\n"
    assert (told in report) == own
    assert "train\n  waited 0" in report
    assert "\n  began: " in report


ENDED = """
import os, sys, torch, penstock as ps
ps.set_enable_autotune(True, sys.argv[1] or None)
os.mkdir("elsewhere")
os.chdir("elsewhere")  # where no file belongs
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(800)
loaders = [
    ps.DataLoader(data, 4, name=type(data).__name__)
    for data in (list(range(400)), Stream())
]
loops = [iter(loader) for loader in loaders]
for loop in loops:
    list(loop)
ps.set_enable_autotune(False)
"""


@pytest.mark.parametrize("own", ["", "own/run"])
def test_a_script_that_moves_and_turns_autotune_off_is_reported_all_the_same(
    tmp_path: Path, own: str
) -> None:
    (tmp_path / "train.py").write_text(ENDED)
    process = penstock("run", "--log", "log/run", "train.py", own, folder=tmp_path)
    report = process.stderr.partition("--- penstock: results ---\n")[2]
    assert (tmp_path / f"{own or 'log/run'}_0.jsonl").exists()
    assert "list\n  waited " in report
    assert "Stream\n  waited " in report
    assert [*(tmp_path / "elsewhere").iterdir()] == []


OF_RANK = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
for _ in DataLoader(list(range(400)), 4):
    pass
dist.destroy_process_group()
"""


def test_a_rank_whose_group_is_gone_does_not_report_as_rank_0(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_RANK)
    process = penstock("run", "--log", "run", "train.py", folder=tmp_path)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "run_3.jsonl").exists()
    assert "penstock: results" not in process.stderr


FORKS = """
import os, sys
from torch.utils.data import DataLoader
child = os.fork()
if not child:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for _ in DataLoader(list(range(400)), 4):
    pass
"""


def test_a_child_that_the_script_forks_and_that_exits_reports_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(FORKS)
    process = penstock("run", "train.py", folder=tmp_path)
    assert (process.returncode, process.stdout) == (0, "3\n"), process.stderr
    assert process.stderr.count("penstock: results") == 1
    assert "\n  waited " in process.stderr


INTERRUPTED = """
import os, signal
for _ in range(2):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        print("went on")
    except KeyboardInterrupt:
        print("caught")
"""


@pytest.mark.long
@pytest.mark.parametrize(("trap", "said"), [("-", "caught"), ("''", "went on")])
def test_ctrl_c_is_the_scripts_and_stays_ignored_where_it_was(
    tmp_path: Path, trap: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(INTERRUPTED)
    python = shlex.quote(sys.executable)
    start = f"trap {trap} INT; exec {python} -P -m penstock run train.py"
    process = subprocess.run(
        ["/bin/sh", "-c", start],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert process.stdout == f"{said}\n{said}\n", process.stderr


SPEC_ERROR = """
import penstock
error = penstock.SpecError("wrong")
error.add_note("noted by the script")
raise error
"""
CODES = [
    "def f():\n    1 / 0\nf()",
    "1 1",
    "raise EOFError",
    "raise BrokenPipeError(32, 'Broken pipe')",
    SPEC_ERROR,
    "import typer\nraise typer.Abort",
    "raise KeyboardInterrupt",
    "import sys\nsys.exit(130)",
]


@pytest.mark.parametrize("code", CODES)
def test_an_error_of_the_script_is_shown_as_python_shows_it(
    tmp_path: Path, code: str
) -> None:
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-P", "train.py"]
    plain = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    process = penstock("run", "train.py", folder=tmp_path)
    assert process.returncode == plain.returncode != 0
    folder = f"{tmp_path}/"
    error, expected = (run.stderr.replace(folder, "") for run in (process, plain))
    assert error.endswith(f"\n{expected}")
    assert "cli.py" not in error
    assert "penstock: stopped" not in error


def test_an_impossible_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "train.py").write_text("print('trained')")
    bad = str(tmp_path / "file" / "run")
    process = penstock("run", "--log", bad, "train.py", folder=tmp_path)
    assert process.returncode == 1
    assert (
        f"cannot write the autotune log to {str(tmp_path / 'file')!r}" in process.stderr
    )
    assert "trained" not in process.stdout


@pytest.mark.parametrize("text", ["{", '{"event": "verdict"}', "[]"])
def test_a_file_that_is_not_a_log_is_an_error_that_says_so(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "run_0.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match="is not the log of a tuned run"):
        read_recording(path)
    with pytest.raises(SpecError, match="no log can be read"):
        read_recording(tmp_path / "none.jsonl")


def test_the_log_of_another_version_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run_0.jsonl"
    path.write_text('{"pipeline": "train", "event": "begin", "version": 2}\n')
    with pytest.raises(SpecError, match="has format version 2, and this penstock"):
        read_recording(path)
