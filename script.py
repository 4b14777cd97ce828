"""`penstock run`: somebody's script, unchanged, with torch's DataLoader replaced."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.utils.data
import torch.utils.data.dataloader

from . import config
from .dataloader import DataLoader, rank_of_process
from .pipeline.errors import SpecError

__all__ = ["run"]


def run(target: str, arguments: Sequence[str], *, module: bool, prefix: str) -> None:
    """Run a script as Python would, tuned, and tell at its end what was found.

    Args:
        target: its path, or the module's name.
        arguments: what it finds in `sys.argv` behind its own name.
        module: whether `target` is a module.
        prefix: of the autotune files; empty: they are temporary.

    Raises:
        SpecError: there is no such script.
    """
    if not module and not Path(target).is_file():
        raise SpecError(f"there is no script {target!r}; `-m` runs a module")
    with tempfile.TemporaryDirectory(prefix="penstock-run-") as folder:
        files = prefix or str(Path(folder) / "run")
        torch.utils.data.DataLoader = DataLoader  # type: ignore[misc]
        torch.utils.data.dataloader.DataLoader = DataLoader  # type: ignore[misc]
        config.set_enable_autotune(enable=True, filepath_prefix=files)
        try:
            _as_main(target, arguments, module=module)
        finally:
            config.set_enable_autotune(enable=False)
            if (rank := rank_of_process()) == 0:
                sys.stderr.write(_told(Path(f"{files}_{rank}.jsonl")))


def _as_main(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run it as `python target` would; how it ends is passed on."""
    if module:
        sys.argv = [target, *arguments]
        sys.path.insert(0, "")
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [target, *arguments]
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


def _told(log: Path) -> str:
    from .autotune.report import read_report

    found = "nothing: no DataLoader was iterated in a way that penstock can tune."
    if log.exists():
        found = str(read_report(log))
    return f"\n--- penstock: what was found ---\n{found}\n"
