"""Several real ranks, predicted from one; `penstock plan --nodes` on a real log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import cli
from penstock.autotune import tuner

STEPS = 24
MAX_ERROR = 0.10


@pytest.mark.slow
@pytest.mark.serial
def test_two_four_and_eight_ranks_are_as_fast_as_predicted_from_one(root: Path) -> None:
    script = root / "benchmarks" / "scale.py"
    command = [sys.executable, str(script), "--check", "--json", "--steps", str(STEPS)]
    process = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=600
    )
    points = json.loads(process.stdout or "[]")
    # In a warm epoch eight ranks compute at once, whatever the number of cores.
    cold = {point["ranks"]: point for point in points if point["epoch"] == "cold"}
    assert sorted(cold) == [1, 2, 4, 8], process.stderr
    for point in cold.values():
        predicted = pytest.approx(point["predicted"], rel=MAX_ERROR)
        assert point["measured"] == predicted, points


def test_a_plan_for_nodes_is_made_from_the_log_of_a_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "CONTROL_S", 0.05)
    files = [tmp_path / f"{at}.bin" for at in range(64)]
    for file in files:
        file.write_bytes(bytes(10_000))
    ps.set_enable_autotune(True, filepath_prefix=str(tmp_path / "run"))
    source = ps.Pipeline.from_files([str(file) for file in files])
    log = tmp_path / "run_0.jsonl"
    with source.map(len).repeat(1 << 20).batch(8) as pipe:
        for _ in pipe:
            time.sleep(0.005)
            if '"observation"' in log.read_text():
                break
    command = ["plan", str(tmp_path / "run"), "--nodes", "1", "--nodes", "64"]
    command += ["--store-bandwidth", "1MB", "--step-ms", "100", "--spread", "0"]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    *_, one, many = result.stdout.splitlines()
    assert one.split()[:3] == ["1", "80", "1.00"]
    assert many.split()[:2] == ["64", "100"]
    assert many.endswith("the store's bandwidth")
