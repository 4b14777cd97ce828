"""Scripts that run in other processes: in one, or in several under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def torchrun(
    ranks: int, script: Path, *args: object, timeout_s: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script on a number of ranks; return its output."""
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in options.items()]
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    flags += ["--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, *flags, str(script), *map(str, args)]
    return completed(command, timeout_s, PYTHONPATH=str(TESTS), OMP_NUM_THREADS="1")


def completed(
    command: list[str], timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with more variables; show what it printed if it takes too long."""
    try:
        return subprocess.run(
            command,
            env={**os.environ, **variables},
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        for printed in (late.stdout, late.stderr):
            late.add_note((printed or b"").decode(errors="replace"))
        raise
