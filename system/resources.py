"""What a pipeline may use: cores and bytes, read from the limits of this very process.

A container may use less than the machine has. The core count comes from the affinity
mask and the CPU quota, the byte count from `MemAvailable` and the memory limit. Any
control group between the process and the root may set a limit, and the smallest one
binds. Versions 1 and 2 of control groups are both read, even side by side.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import check

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
# By default a pipeline may hold one part in this many of the free memory.
MEMORY_SHARE = 4

UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", start=1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", start=1)},
}
QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a pipeline may use.

    Raises:
        SpecError: a budget is zero or negative.
    """

    cpu_cores: float
    """Cores that its workers may keep busy together. A waiting worker uses none."""
    memory_bytes: int
    """Bytes that rows and batches may hold together."""
    whole_machine: bool = False
    """True if `cpu_cores` is all there is, so that it cannot be exceeded."""
    free_bytes: int = 0
    """Free memory in bytes, within the limits; 0 if it was not measured."""

    def __post_init__(self) -> None:
        check(
            self.cpu_cores > 0,
            f"the CPU budget must be above 0 cores, got {self.cpu_cores};"
            " leave it out to use what affinity and cgroup allow",
        )
        check(
            self.memory_bytes >= 1,
            f"the memory budget must be >= 1 byte, got {self.memory_bytes};"
            " leave it out to use a quarter of the free memory",
        )

    @classmethod
    def of_machine(
        cls, *, cpu_cores: float | None = None, memory_bytes: int | None = None
    ) -> Budget:
        """Return the given budget, filled up with what this process may use now.

        Args:
            cpu_cores: None means all that affinity and cgroup allow.
            memory_bytes: None means a quarter of what is free within the limits.

        Raises:
            SpecError: a budget is zero or negative.
        """
        all_cores = effective_cpus()
        cores = all_cores if cpu_cores is None else cpu_cores
        free_bytes = effective_memory_bytes()
        if memory_bytes is None:
            memory_bytes = max(1, free_bytes // MEMORY_SHARE)
        return cls(cores, memory_bytes, cores >= all_cores, free_bytes)


def parse_bytes(size: int | str) -> int:
    """Return the number of bytes in `4000000`, `"4GB"` (10^9) or `"1.5 GiB"` (2^30).

    Raises:
        SpecError: it is not a size, or is below one byte.
    """
    match = QUANTITY.fullmatch(str(size)) if not isinstance(size, bool) else None
    number, unit = match.groups() if match else ("0", "")
    factor = UNITS.get(unit.upper(), 0)
    nbytes = int(number) * factor if number.isdigit() else int(float(number) * factor)
    check(
        nbytes >= 1,
        f"a size must be a number of bytes >= 1 or a string such as '4GB' or"
        f" '512MiB', got {size!r}; units are KB, MB, GB, TB, KiB, MiB, GiB and TiB",
    )
    return nbytes


def effective_cpus(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Return the cores this process may keep busy: the least of affinity and quotas.

    Args:
        proc: where the process file system is mounted.
        cgroup: where control groups are mounted.
    """
    return min([float(len(usable_cores())), *_quotas(proc, cgroup)])


def effective_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the bytes this process may still allocate.

    This is the smallest of the machine's free memory and what each limit leaves.
    Memory that only caches files counts as free: the kernel drops it on demand.

    Args:
        proc: where the process file system is mounted.
        cgroup: where control groups are mounted.
    """
    rests = (rest for _, rest in _limits(proc, cgroup))
    return max(0, min([_meminfo(proc, "MemAvailable"), *rests]))


def memory_limit_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the bytes this process may use in total, used ones included.

    This is the smallest of the machine's memory and the limits.

    Args:
        proc: where the process file system is mounted.
        cgroup: where control groups are mounted.
    """
    limits = (most for most, _ in _limits(proc, cgroup))
    return min([_meminfo(proc, "MemTotal"), *limits])


def _meminfo(proc: Path, name: str) -> int:
    """Return a line of `meminfo` in bytes; outside Linux, all the machine's memory."""
    kilobytes = _fields(proc / "meminfo").get(name)
    if kilobytes is not None:
        return int(kilobytes.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> frozenset[int]:
    """Return the cores that affinity allows; outside Linux, all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    for group in _groups(proc, cgroup, "cpu"):
        version_1 = (
            _text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")
        )
        for limit in (_text(group / "cpu.max").split(), [*version_1]):
            # "max" (version 2) and -1 (version 1) stand for no limit.
            if len(limit) == 2 and all(map(str.isdigit, limit)) and int(limit[1]):
                yield int(limit[0]) / int(limit[1])


def oom_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return how many processes of this control group the kernel ended for memory.

    Versions 1 and 2 of control groups keep this count in different files.
    """
    files = ("memory.events", "memory.oom_control")
    groups = _groups(proc, cgroup, "memory", up=False)
    counts = [
        _fields(group / name).get("oom_kill") for group in groups for name in files
    ]
    return max((int(count) for count in counts if count is not None), default=0)


# Files with a limit, with the bytes in use, and the field of `memory.stat` with those
# that only cache files. The last ones are of version 1.
MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield each limit of memory, and how much of it is left, in bytes."""
    for group in _groups(proc, cgroup, "memory"):
        counts = _fields(group / "memory.stat")
        for limit, usage, name in MEMORY:
            most = _text(group / limit)
            if most.isdigit():
                held_bytes = int(_text(group / usage) or 0) - int(counts.get(name, 0))
                yield int(most), int(most) - held_bytes


def _groups(
    proc: Path, cgroup: Path, controller: str, *, up: bool = True
) -> Iterator[Path]:
    """Yield the control groups that bind this process, its own first, up to the root.

    In a namespace, a path may not exist. Its files then read as empty, and the groups
    above it are still read.
    """
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [cgroup, cgroup / "unified"]
        elif controller in controllers.split(","):
            roots = [*{cgroup / controllers, cgroup / controller}]  # often one
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for root in filter(Path.is_dir, roots):
            for depth in range(len(parts), -1 if up else len(parts) - 1, -1):
                yield root.joinpath(*parts[:depth])


def _fields(path: Path) -> dict[str, str]:
    """Parse a file of lines `name: value` or `name value`."""
    pairs = (line.split(maxsplit=1) for line in _text(path).splitlines())
    return {pair[0].removesuffix(":"): pair[1] for pair in pairs if len(pair) > 1}


def _text(path: Path) -> str:
    """Return the text of a file; empty if it is missing or unreadable."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
