"""Settings of the whole process, named as MindSpore's users know them.

Those of a single stage stand in the stage (`map(..., num_parallel_workers=4)`) and win.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import check, checked_seed
from .system.resources import Budget, parse_bytes

__all__ = [
    "get_autotune_interval",
    "get_enable_autotune",
    "get_num_parallel_workers",
    "get_prefetch_size",
    "get_seed",
    "set_autotune_interval",
    "set_cpu_budget",
    "set_enable_autotune",
    "set_memory_budget",
    "set_num_parallel_workers",
    "set_prefetch_size",
    "set_seed",
]

PREFETCH_SIZE = 2
"""Batches a stage works ahead of its reader, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is set now."""

    autotune: bool = False
    filepath_prefix: str | None = None
    autotune_interval: int = 0
    num_parallel_workers: int | None = None
    prefetch_size: int = PREFETCH_SIZE
    seed: int = 0
    cpu_budget: float | None = None


_settings = Settings()
# The memory budget: as set, or as found when it was first asked for.
_memory_bytes: int | None = None
_watchers: list[Callable[[int], object]] = []


def settings() -> Settings:
    """Return what is set now."""
    return _settings


def set_enable_autotune(enable: bool, filepath_prefix: str | None = None) -> None:  # noqa: FBT001 MindSpore's name and form
    """Turn the autotuner on or off, for pipelines now running and those to come.

    Args:
        enable: whether to tune.
        filepath_prefix: where to write `<prefix>_<rank>.json` (the settings arrived at)
            and `<prefix>_<rank>.jsonl` (every decision); None writes no files. The
            folder that it names is made.

    Raises:
        SpecError: that folder cannot be made, or may not be written to.
    """
    if enable and filepath_prefix is not None:
        _make_folder(Path(filepath_prefix).absolute().parent)
    _set(autotune=enable, filepath_prefix=filepath_prefix)


def _make_folder(folder: Path) -> None:
    why = "it may not be written to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        why, writable = error.strerror or str(error), False
    check(
        writable,
        f"no autotune log can be kept in {str(folder)!r}: {why}; name another folder",
    )


def get_enable_autotune() -> bool:
    """Return whether the autotuner is on."""
    return _settings.autotune


def set_autotune_interval(steps: int) -> None:
    """Let the autotuner decide at most every so many steps; 0: at any time."""
    _set(autotune_interval=_count("interval", steps, 0))


def get_autotune_interval() -> int:
    """Return the steps between two decisions at least."""
    return _settings.autotune_interval


def set_num_parallel_workers(num: int) -> None:
    """Set the workers of stages that do not say (default: one a usable CPU)."""
    _set(num_parallel_workers=_count("num_parallel_workers", num, 1))


def get_num_parallel_workers() -> int:
    """Return the workers a stage has, or starts with, where it does not say."""
    chosen = _settings.num_parallel_workers
    return chosen if chosen is not None else max(1, round(budget().cpu_cores))


def set_prefetch_size(size: int) -> None:
    """Set how many batches a stage works ahead of its reader (default 2)."""
    _set(prefetch_size=_count("prefetch_size", size, 1))


def get_prefetch_size() -> int:
    """Return how many batches a stage works ahead of its reader."""
    return _settings.prefetch_size


def set_seed(seed: int) -> None:
    """Set the seed of shuffles and random functions that are given none (default 0)."""
    _set(seed=checked_seed(_count("seed", seed, 0)))


def get_seed() -> int:
    """Return that seed."""
    return _settings.seed


def set_cpu_budget(cores: float) -> None:
    """Let all pipelines of this process use so many cores (default: all it may)."""
    check(
        isinstance(cores, (int, float)) and cores > 0,
        f"`cores` must be > 0, got {cores!r}",
    )
    _set(cpu_budget=float(cores))


def set_memory_budget(size: int | str) -> None:
    """Let the batches in flight hold so many bytes, over all pipelines of this process.

    Args:
        size: bytes, or a text like "4GB" or "512MiB".
    """
    global _memory_bytes  # noqa: PLW0603 one a process
    _memory_bytes = parse_bytes(size)
    for watcher in _watchers:
        watcher(_memory_bytes)


def memory_bytes() -> int:
    """Return the memory budget: as set, else a quarter of what was free at first."""
    global _memory_bytes  # noqa: PLW0603 one a process
    if _memory_bytes is None:
        _memory_bytes = Budget.of_machine().memory_bytes
    return _memory_bytes


def watch_memory(watcher: Callable[[int], object]) -> None:
    """Have `watcher(nbytes)` called whenever the memory budget is set."""
    _watchers.append(watcher)


def budget() -> Budget:
    """Return what the process may use: as set, or as affinity and cgroup allow."""
    return Budget.of_machine(
        cpu_cores=_settings.cpu_budget, memory_bytes=memory_bytes()
    )


def _set(**changes: object) -> None:
    global _settings  # noqa: PLW0603 replaced whole, so readers need no lock
    _settings = replace(_settings, **changes)  # type: ignore[arg-type]  # checked above


def _count(name: str, value: int, least: int) -> int:
    check(
        isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"`{name}` must be an int >= {least}, got {value!r}",
    )
    return value
