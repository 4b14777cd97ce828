"""The examples, run in their small settings under torchrun with gloo ranks."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import psutil
import pytest

from support.json_lines import rows_in
from support.torchrun import TESTS, completed, torchrun

EXAMPLES = TESTS.parent / "examples"
SAMPLES = 4000
LIMIT_S = 600.0
"""The limit of what runs for as long as the machine takes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def steps_in(folder: Path) -> list[list[int]]:
    """Return the ids of each step that was written completely, in order."""
    rows = rows_in(folder / "steps.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["ids"] for row in rows]


def wait_for(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + LIMIT_S
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
            psutil.wait_procs(ranks_left, timeout=LIMIT_S)


def test_each_sample_is_done_once_despite_a_killed_rank_and_other_ranks(
    tmp_path: Path,
) -> None:
    with training(tmp_path, 4) as launcher:
        wait_for(tmp_path, 17)
        ranks = launcher.children()
        ranks[2].kill()
        psutil.wait_procs(ranks, timeout=LIMIT_S)
        wait_for(tmp_path, 40)  # torchrun has restarted the ranks
    before = steps_in(tmp_path)
    assert 40 <= len(before) < SAMPLES // 24
    process = torchrun(
        2,
        EXAMPLES / "elastic_resume.py",
        "--folder",
        tmp_path,
        "--samples",
        SAMPLES,
        "--step-s",
        0.01,
        timeout_s=LIMIT_S,
    )
    assert process.returncode == 0, process.stderr
    assert "from step" in process.stdout
    after = steps_in(tmp_path)
    assert after[:35] == before[:35]  # committed steps are not repeated
    assert sorted(chain.from_iterable(after)) == list(range(SAMPLES))


def test_resnet_follows_its_policy(tmp_path: Path) -> None:
    ranks = 2
    log = tmp_path / "log.jsonl"
    script = EXAMPLES / "resnet_ddp.py"
    process = torchrun(ranks, script, "--small", "--rows", log, timeout_s=LIMIT_S)
    assert process.returncode == 0, process.stderr
    rows = rows_in(log)
    for row in rows:
        stage = row["epoch"] // 4
        assert row["image_size"] == (32, 64)[stage]
        assert row["batch"] == min((16, 8)[stage] * ranks, row["left"])
        table = 0.1 if row["epoch"] == 5 else 1
        assert row["lr"] == pytest.approx(row["base_lr"] * (1, 0.5)[stage] * table)
        assert row["momentum"] == (0.85, 0.9)[stage]
    assert {row["epoch"] for row in rows} == {*range(6)}
    losses = [[r["loss"] for r in rows if r["epoch"] == e] for e in (0, 5)]
    assert statistics.mean(losses[1]) < 0.95 * statistics.mean(losses[0])


def learnt(process: subprocess.CompletedProcess[str], words: str) -> None:
    """Assert that a script ended well, said what it had checked, and learnt."""
    assert process.returncode == 0, process.stderr
    assert words in process.stdout
    first, last = re.findall(
        r"^loss ([\d.]+) -> ([\d.]+)$", process.stdout, re.MULTILINE
    )[0]
    assert float(last) < 0.9 * float(first)


CHECKED = {
    "bert_pretraining": (2, "none twice the same way"),
    "mask_rcnn": (2, "each image once an epoch"),
    "hybrid_parallel": (4, "the same bytes along tp in each"),
    "pipeline_parallel": (4, "the same bytes along pp in each"),
    "parameter_server": (5, "3 epochs by 3 workers, each sample once in each"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_an_example_gets_the_right_data_and_learns(name: str) -> None:
    ranks, words = CHECKED[name]
    process = torchrun(ranks, EXAMPLES / f"{name}.py", timeout_s=LIMIT_S)
    learnt(process, words)
    if name == "parameter_server":
        (apart,) = re.findall(r"at most (\d+) apart", process.stdout)
        assert int(apart) > 1  # no rank waited for the others


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_a_framework_on_two_ranks_sees_each_sample_once(name: str) -> None:
    pytest.importorskip(name)
    process = torchrun(2, EXAMPLES / "frameworks.py", name, timeout_s=LIMIT_S)
    learnt(process, "3 epochs on 2 ranks, each sample once in each")


def test_ray_train_on_two_workers_sees_each_sample_once() -> None:
    pytest.importorskip("ray")
    script = str(EXAMPLES / "frameworks.py")
    command = [sys.executable, "-P", "-W", "ignore", script, "ray"]
    # Ray starts some ten processes. At its niceness of 15 they would hardly run beside
    # the other tests.
    process = completed(command, LIMIT_S, RAY_worker_niceness="0")
    learnt(process, "each sample once in each")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_batch_is_a_step_of_deepspeed(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    script = EXAMPLES / "deepspeed_zero.py"
    # The first run on a machine compiles an operator, for a minute.
    process = torchrun(2, script, "--stage", stage, timeout_s=LIMIT_S)
    learnt(process, f"ZeRO {stage}: 48 steps on 2 ranks")
