"""A program may end in any way without closing anything: nothing is said or left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import psutil
import pytest

from support import warm

PROLOGUE = """
import os, sys, threading, signal, warnings
warnings.filterwarnings("ignore", "This DataLoader will create") # by torch, on one core
import numpy as np, torch
import penstock as ps
ps.set_enable_autotune({tuned})
class Rows:
    def __len__(self): return 400
    def __getitem__(self, index): return np.full(1000, index, np.float32)
def double(row): return row * 2
"""
LOADERS = {
    "a list": "ps.Pipeline.from_dataset(list(range(1000))).batch(10)",
    "a cache": "ps.Pipeline.from_dataset(Rows()).cache(ram='4MB').batch(10)",
    "a disk cache": "ps.Pipeline.from_dataset(Rows()).cache(disk='kept').batch(10)",
    "threads": "ps.Pipeline.from_dataset(Rows(), executor='thread',"
    " num_parallel_workers=3).map(double).batch(10)",
    "processes": "ps.Pipeline.from_dataset(Rows(), executor='process',"
    " num_parallel_workers=2).cache(ram='4MB').batch(10)",
    "a host": "ps.Pipeline.from_dataset(Rows()).map(double).batch(10)"
    ".options(host='process')",
    "a loader": "ps.DataLoader(Rows(), batch_size=10)",
    "a loader's workers": "ps.DataLoader(Rows(), batch_size=10, num_workers=2)",
}
LOOPS = {
    "whole": "for batch in loader: pass",
    "half": "loop = iter(loader)\nkept = [next(loop), next(loop)]",
    "of a daemon": """
begun = threading.Event()
def train():
    while True:
        for batch in loader:
            begun.set()
threading.Thread(target=train, daemon=True).start()
begun.wait(60)
""",
}
ENDINGS = {
    "its end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise ValueError('of the program')", 1),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
}
CASES = list(product(LOADERS, LOOPS, ENDINGS, (False, True)))
PAIRED = CASES[::19]
"""In 11 programs, each loader has its turn, and each way to loop and to end."""


def script_of(loader: str, loop: str, ending: str, *, tuned: bool) -> str:
    line = f"loader = {LOADERS[loader]}"
    parts = (PROLOGUE.format(tuned=tuned), line, LOOPS[loop], ENDINGS[ending][0])
    return "\n".join(parts)


def check(process: subprocess.CompletedProcess[str], ending: str) -> None:
    """Require that nothing but the program's own words came, and its own exit code."""
    lines = process.stderr.splitlines()
    rest = [line for line in lines if not line.startswith("[autotune]")]
    if ending == "an exception":
        assert rest.pop() == "ValueError: of the program"
    elif ending == "Ctrl-C":
        assert rest.pop() == "KeyboardInterrupt"
    if ending in ("an exception", "Ctrl-C"):
        assert rest[0] == "Traceback (most recent call last):"
        assert "During handling" not in process.stderr
        assert len([line for line in rest if line.startswith("Traceback")]) == 1
    else:
        assert rest == []
    assert process.stdout == ""
    assert process.returncode == ENDINGS[ending][1]


@pytest.mark.parametrize(
    ("loader", "loop", "ending", "tuned"),
    [
        pytest.param(*case, marks=() if case in PAIRED else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_program_that_closes_nothing_ends_as_it_would_without_us(
    loader: str,
    loop: str,
    ending: str,
    tuned: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    script = script_of(loader, loop, ending, tuned=tuned)
    command = [sys.executable, "-P", "-c", script]
    check(warm.run(command, cwd=tmp_path, timeout=60), ending)
    assert of_this_folder(tmp_path) == []


def of_this_folder(folder: Path) -> list[int]:
    """Return the processes that work in a folder and still run."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != "zombie":
                processes.append(process)
        except psutil.Error:
            continue
    return [survivor.pid for survivor in psutil.wait_procs(processes, timeout=20)[1]]


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "flags", [("-X", "dev"), ("-W", "error"), ("-X", "dev", "-W", "error")]
)
def test_a_strict_interpreter_has_nothing_to_say_either(
    loader: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    script = script_of(loader, "half", "its end", tuned=True)
    command = [sys.executable, "-P", *flags, "-c", script]
    process = subprocess.run(
        command,
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    check(process, "its end")


FORKED = """
import os, penstock as ps
from penstock.pipeline.session import looping_threads
for batch in ps.Pipeline.from_dataset(list(range(8))).batch(4): pass
looping_threads._lock.acquire()  # as another thread may, at any moment
child = os.fork()
if not child:
    raise SystemExit(5)
looping_threads._lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_ends_though_a_thread_was_about_to_loop(tmp_path: Path) -> None:
    process = warm.run([sys.executable, "-P", "-c", FORKED], cwd=tmp_path, timeout=60)
    assert (process.stdout, process.stderr) == ("5\n", "")
