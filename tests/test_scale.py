"""Several real ranks, predicted from one; `penstock plan --nodes` on a real log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import cli

STEPS = 24
MAX_ERROR = 0.10


@pytest.mark.slow
@pytest.mark.serial
def test_two_four_and_eight_ranks_are_as_fast_as_predicted_from_one(root: Path) -> None:
    script = root / "benchmarks" / "scale.py"
    command = [sys.executable, str(script), "--check", "--json", "--steps", str(STEPS)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=600
    )
    points = json.loads(done.stdout or "[]")
    # In a warm epoch eight ranks compute at once, whatever the number of cores.
    cold = {each["ranks"]: each for each in points if each["epoch"] == "cold"}
    assert sorted(cold) == [1, 2, 4, 8], done.stderr
    for each in cold.values():
        predicted = pytest.approx(each["predicted"], rel=MAX_ERROR)
        assert each["measured"] == predicted, points


def test_a_plan_for_nodes_is_made_from_the_log_of_a_real_run(tmp_path: Path) -> None:
    files = [tmp_path / f"{at}.bin" for at in range(64)]
    for file in files:
        file.write_bytes(bytes(10_000))
    ps.set_enable_autotune(True, filepath_prefix=str(tmp_path / "run"))
    pipe = ps.Pipeline.from_files([str(file) for file in files]).map(len).batch(8)
    log = tmp_path / "run_0.jsonl"
    while not log.exists() or '"observation"' not in log.read_text():
        for _ in pipe:
            pass
    pipe.close()
    command = ["plan", str(tmp_path / "run"), "--nodes", "1", "--nodes", "1024"]
    command += ["--store-bandwidth", "1MB", "--step-ms", "100", "--spread", "0"]
    said = CliRunner().invoke(cli.app, command)
    assert said.exit_code == 0, said.output
    *_, one, many = said.stdout.splitlines()
    assert one.split()[:3] == ["1", "80", "1.00"]
    assert many.split()[:2] == ["1,024", "100"]
    assert many.endswith("the store's bandwidth")
