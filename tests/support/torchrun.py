"""Scripts under torchrun, with gloo, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def torchrun(
    ranks: int, script: Path, *args: object, timeout_s: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script on a number of ranks; return its output."""
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in options.items()]
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    flags += ["--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, *flags, str(script), *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
