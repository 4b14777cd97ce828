"""`penstock demo`, through the real command line: what it prints, and how it stops."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.demo.lesson import Lesson, Remote, cached_photos, pipeline
from penstock.demo.story import DemoWindow, Screen, last_line
from penstock.errors import SpecError
from penstock.pipeline.sources.folder import Folder
from penstock.pipeline.testing import draw_photos
from support import warm

LAST_LINE = re.compile(
    r"demo: gain (?P<gain>\d+\.\d)x \((?P<old>\d+) -> (?P<new>\d+) samples/s\), "
    r"trainer wait \d+% -> \d+%"
)
TRAINED = """
import sys, torch
from penstock.demo.lesson import Lesson
Lesson(classes=4).step(torch.zeros(2, 48, 48, 3), torch.zeros(2, dtype=torch.int64))
print("torch._dynamo" in sys.modules)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_photos(tmp_path_factory.mktemp("photos"), 48, size=(96, 72))


@contextmanager
def demo(cache: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command with nothing drawn yet, in a process group of its own."""
    command = [sys.executable, "-P", "-m", "penstock", "demo", *options]
    with warm.Popen(
        command,
        cwd=cache,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_demo_trains_without_and_with_autotune_and_ends_with_figures(
    photos: Path, tmp_path: Path
) -> None:
    with demo(tmp_path, "--data", str(photos), "--seconds", "5") as process:
        output, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    assert "\x1b" not in output  # a pipe is not a terminal

    on = output.index("autotune: on\n")
    assert re.search(r"^one worker a stage: .* samples/s", output[:on], re.MULTILINE)
    assert re.search(r"^autotune: .* s, \d+ samples/s", output[on:], re.MULTILINE)
    assert "[autotune]" not in output[:on]
    assert "[autotune] demo: Dataset(ID:0) read (num_parallel_workers: " in output[on:]
    assert re.search(r"^cause: ", output[on:], re.MULTILINE)  # of explain()
    assert re.search(r"^trained \d+ steps: loss \d", output[on:], re.MULTILINE)

    gain, old, new = figures(output)
    assert gain == pytest.approx(new / old, rel=0.05)


@pytest.mark.slow
@pytest.mark.serial  # the tuner adds workers only while the trainer has a core left
def test_the_demo_shows_its_decisions_and_a_gain(photos: Path, tmp_path: Path) -> None:
    options = ("--data", str(photos), "--latency-ms", "40", "--seconds", "15")
    with demo(tmp_path, *options) as process:
        output, _ = process.communicate(timeout=100)
    assert (
        '[autotune] demo: Added request to change "num_parallel_workers" of Operator: '
        "Dataset(ID:0) read From old value: [1]" in output
    )
    _, old, new = figures(output)
    assert new > 2 * old


def figures(output: str) -> tuple[float, int, int]:
    """Return the gain that the last line states, and the speeds before and after."""
    match = LAST_LINE.fullmatch(output.splitlines()[-1])
    assert match is not None
    return float(match["gain"]), int(match["old"]), int(match["new"])


def test_the_last_line_compares_speeds_and_waits() -> None:
    before = SimpleNamespace(samples_per_s=64.4, wait_share=0.886)
    after = SimpleNamespace(samples_per_s=340.2, wait_share=0.002)
    line = last_line(cast("DemoWindow", before), cast("DemoWindow", after))
    assert line == "demo: gain 5.3x (64 -> 340 samples/s), trainer wait 89% -> 0%"


@pytest.mark.parametrize(
    "stretch",
    [
        "drawing photos",
        pytest.param("one worker a stage", marks=pytest.mark.slow),
        "autotune: on",
    ],
)
def test_ctrl_c_ends_the_demo_with_one_line(
    stretch: str, photos: Path, tmp_path: Path
) -> None:
    data = () if stretch == "drawing photos" else ("--data", str(photos))
    with demo(tmp_path, *data, "--latency-ms", "5", "--seconds", "12") as process:
        assert process.stdout is not None
        assert any(line.startswith(stretch) for line in process.stdout)
        with suppress(subprocess.TimeoutExpired):
            process.wait(random.random())  # any moment will do
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "penstock: stopped\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no process of its group is left
    assert list(tmp_path.rglob("*.part")) == []


def test_reading_and_decoding_are_segments_that_start_with_one_worker(
    photos: Path,
) -> None:
    pipe = pipeline(Remote(Folder.scan(photos), latency_s=0.0))
    stages = [(s.name, s.num_parallel_workers) for s in pipe.explain().stages]
    assert stages == [("Dataset(ID:0) read", 1), ("Map(ID:2) decode", 1)]


def test_the_network_learns(photos: Path) -> None:
    lesson = Lesson(classes=4)
    with pipeline(Remote(Folder.scan(photos), latency_s=0.0)) as pipe:
        losses = [fmean(lesson.step(*batch) for batch in pipe) for _ in range(14)]
    assert fmean(losses[-5:]) < 0.7 * fmean(losses[:5])


@pytest.mark.slow  # a whole interpreter, cold
def test_training_does_not_load_the_compiler_of_torch() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", TRAINED], capture_output=True, check=True
    )
    assert run.stdout == b"False\n"  # it takes seconds, and first decisions come soon


def test_photos_that_cannot_be_drawn_are_an_error_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SpecError, match="set XDG_CACHE_HOME .* or pass --data DIR"):
        cached_photos(lambda _there, _all: None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_lines_appear_above_a_bar_that_vanishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    screen = Screen()
    with screen.progress("training") as show:
        show(0.5, "half way")
        screen.say("a [decision]")
    output = terminal.getvalue()
    assert "a [decision]\n" in output
    assert "half way" in output
    assert output.endswith("\x1b[2K")  # the bar's line is cleared
