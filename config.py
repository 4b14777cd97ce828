"""Process-wide settings, under the names that MindSpore users know.

A setting of a single stage (`map(..., num_parallel_workers=4)`) takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .errors import check, checked_seed, whole_number
from .system.resources import Budget, effective_cpus, parse_bytes

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

# Default number of batches that a stage works ahead of its consumer.
PREFETCH_SIZE = 2
# Upper bound of a segment's workers if the user gives none.
MAX_WORKERS = 128
# The same for coroutines: stores dislike more reads in flight.
MAX_COROUTINES = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """The current settings. `autotune_interval` is in steps, `cpu_budget` in cores."""

    autotune: bool = False
    filepath_prefix: str | None = None
    # Where `penstock run` writes the files of a script that names no prefix.
    prefix_of_run: str | None = None
    autotune_interval: int = 0
    num_parallel_workers: int | None = None
    prefetch_size: int = PREFETCH_SIZE
    seed: int = 0
    cpu_budget: float | None = None
    memory_bytes: int | None = None

    @property
    def cpu_cores(self) -> float:
        """Cores that all workers may keep busy together."""
        return self.cpu_budget or effective_cpus()

    @property
    def workers(self) -> int:
        """The number of workers that a stage starts with unless it sets its own."""
        return self.num_parallel_workers or min(
            max(1, round(self.cpu_cores)), MAX_WORKERS
        )


# The settings in force. It is replaced as a whole, so readers need no lock, and who
# keeps it can tell by its identity that a setting has changed.
current = Settings()
# Called with the memory budget in bytes whenever it is set.
memory_watchers: list[Callable[[int], object]] = []


def set_enable_autotune(enable: bool, filepath_prefix: str | None = None) -> None:  # noqa: FBT001 MindSpore's name and form
    """Turn the autotuner on or off, for running pipelines and for later ones.

    Args:
        enable: whether to tune.
        filepath_prefix: where to write `<prefix>_<rank>.json` (the final settings) and
            `<prefix>_<rank>.jsonl` (every decision). The folder is created if it does
            not exist. None writes no files, except for `penstock run`.

    Raises:
        SpecError: the prefix is empty; or the folder cannot be created, or is not
            writable.
    """
    if not enable:  # a loop that torch loads may have yet to write its row
        filepath_prefix = current.filepath_prefix
    elif filepath_prefix is None:
        filepath_prefix = current.prefix_of_run
    else:
        check(
            filepath_prefix,
            "`filepath_prefix` must be what the files' names begin with, as 'out/run',"
            f" got {filepath_prefix!r}; leave it out to write no files",
        )
        folder, name = os.path.split(filepath_prefix)
        # The script may change its working directory before the files are written.
        filepath_prefix = os.path.join(_made(Path(folder).absolute()), name)
    _set(autotune=enable, filepath_prefix=filepath_prefix)


def enable_autotune_of_run(filepath_prefix: str) -> None:
    """Turn the autotuner on, and write files there where a script names no others.

    Raises:
        SpecError: as `set_enable_autotune`.
    """
    set_enable_autotune(enable=True, filepath_prefix=filepath_prefix)
    _set(prefix_of_run=current.filepath_prefix)


def _made(folder: Path) -> Path:
    """Return a folder that exists by now, and is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        why = error.strerror or str(error)
    check(
        not why,
        f"cannot write the autotune log to {str(folder)!r}: {why}; name another folder",
    )
    return folder


def get_enable_autotune() -> bool:
    """Return whether the autotuner is on."""
    return current.autotune


def set_autotune_interval(steps: int) -> None:
    """Let the autotuner decide at most once every `steps` steps; 0 means no limit.

    Raises:
        SpecError: `steps` is not an int >= 0.
    """
    _set(autotune_interval=whole_number("interval", steps, 0, "pass 0 or more"))


def get_autotune_interval() -> int:
    """Return the minimum number of steps between two decisions."""
    return current.autotune_interval


def set_num_parallel_workers(num: int) -> None:
    """Set the workers of stages without their own (default: one per usable CPU).

    Raises:
        SpecError: `num` is not an int >= 1.
    """
    _set(
        num_parallel_workers=whole_number(
            "num_parallel_workers", num, 1, "pass 1 or more"
        )
    )


def get_num_parallel_workers() -> int:
    """Return the number of workers that a stage starts with unless it sets its own."""
    return current.workers


def set_prefetch_size(size: int) -> None:
    """Set how many batches a stage works ahead of its consumer (default 2).

    Raises:
        SpecError: `size` is not an int >= 1.
    """
    _set(prefetch_size=whole_number("prefetch_size", size, 1, "pass 1 or more"))


def get_prefetch_size() -> int:
    """Return how many batches a stage works ahead of its consumer."""
    return current.prefetch_size


def set_seed(seed: int) -> None:
    """Set the seed of shuffles and random functions without their own (default 0).

    Raises:
        SpecError: `seed` is not an int in [0, 2**64).
    """
    _set(seed=checked_seed(whole_number("seed", seed, 0, "pass 0 or more")))


def get_seed() -> int:
    """Return the seed of shuffles and random functions that have none of their own."""
    return current.seed


def set_cpu_budget(cores: float) -> None:
    """Let all pipelines of this process use this many cores (default: all it may use).

    More than there are is meant for work that does not compute: worker processes are
    started for so many.

    Raises:
        SpecError: `cores` is not a finite number > 0.
    """
    check(
        isinstance(cores, (int, float)) and 0 < cores < float("inf"),
        f"`cores` must be a finite number > 0, got {cores!r}"
        "; leave it out to use all that affinity and cgroup allow",
    )
    _set(cpu_budget=float(cores))


def set_memory_budget(size: int | str) -> None:
    """Limit the bytes that in-flight batches hold, over all pipelines of this process.

    Args:
        size: bytes, or a text like "4GB" or "512MiB".

    Raises:
        SpecError: `size` is not a size, or is below one byte.
    """
    nbytes = parse_bytes(size)
    _set(memory_bytes=nbytes)
    for watcher in memory_watchers:
        watcher(nbytes)


def memory_bytes() -> int:
    """Return the memory budget in bytes: as set, or a quarter of the free memory.

    Free memory is measured once, at the first call.
    """
    return current.memory_bytes or _measured_bytes()


@cache
def _measured_bytes() -> int:
    return Budget.of_machine().memory_bytes


def budget() -> Budget:
    """Return what this process may use: as set, or what affinity and cgroup allow."""
    return Budget.of_machine(cpu_cores=current.cpu_budget, memory_bytes=memory_bytes())


def _set(**changes: object) -> None:
    global current  # noqa: PLW0603 one a process
    current = replace(current, **changes)  # type: ignore[arg-type]  # checked above
