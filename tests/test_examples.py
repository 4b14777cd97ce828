"""The examples, run in their small settings under torchrun with gloo ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import psutil
import pytest

from support.torchrun import TESTS, torchrun

EXAMPLES = TESTS.parent / "examples"
SAMPLES = 2000

pytestmark = pytest.mark.slow


def steps_in(folder: Path) -> list[list[int]]:
    """Return the ids of each step that was written whole, one after the other."""
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["ids"] for row in rows]


def wait_for(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 60
    while len(steps_in(folder)) < steps:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def training(folder: Path, ranks: int) -> Iterator[psutil.Process]:
    script = EXAMPLES / "elastic_resume.py"
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    flags = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    of_its_own = ["--folder", str(folder), "--samples", str(SAMPLES)]
    with subprocess.Popen(
        [*launcher, *flags, str(script), *of_its_own],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as run:
        family = psutil.Process(run.pid)
        try:
            yield family
        finally:
            ranks_left = family.children(recursive=True)
            for process in (family, *ranks_left):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(ranks_left, timeout=10)


def test_a_killed_rank_and_then_other_ranks_do_each_sample_once(tmp_path: Path) -> None:
    with training(tmp_path, 4) as launcher:
        wait_for(tmp_path, 17)
        ranks = launcher.children()
        ranks[2].kill()
        psutil.wait_procs(ranks, timeout=30)
        wait_for(tmp_path, 40)  # torchrun has restarted them
    before = steps_in(tmp_path)
    assert 40 <= len(before) < SAMPLES // 24
    done = torchrun(
        2,
        EXAMPLES / "elastic_resume.py",
        "--folder",
        tmp_path,
        "--samples",
        SAMPLES,
        "--step-s",
        0.01,
    )
    assert done.returncode == 0, done.stderr
    assert "from step" in done.stdout
    after = steps_in(tmp_path)
    assert after[:35] == before[:35]  # what was committed is not done again
    assert sorted(chain.from_iterable(after)) == list(range(SAMPLES))


@pytest.mark.parametrize("ranks", [1, 2])
def test_resnet_follows_its_policy(tmp_path: Path, ranks: int) -> None:
    log = tmp_path / "log.jsonl"
    done = torchrun(ranks, EXAMPLES / "resnet_ddp.py", "--small", "--rows", log)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in rows:
        stage = 0 if row["epoch"] < 1 else 1
        assert row["image_size"] == (32, 64)[stage]
        assert row["batch"] == min((16, 8)[stage] * ranks, row["left"])
        assert row["lr"] == pytest.approx(row["base_lr"] * (1, 0.5)[stage])
        assert 0.85 <= row["momentum"] <= 0.95
    assert {row["epoch"] for row in rows} == {0, 1}
    assert rows[-1]["momentum"] > rows[0]["momentum"]
    assert all(math.isfinite(row["loss"]) for row in rows)
