"""Budgets: sizes in words, and limits read from made /proc and /sys trees."""

import os
from pathlib import Path

import pytest

from penstock.errors import SpecError
from penstock.system.resources import (
    Budget,
    effective_cpus,
    effective_memory_bytes,
    memory_limit_bytes,
    parse_bytes,
)

GIB = 1 << 30


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(6), 8, 10})


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Write a machine's files under `root`: by default 16 GiB are free."""
    machine = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {16 * GIB // 1024} kB\n",
        **files,
    }
    for name, text in machine.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "sys"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4_000_000, 4_000_000),
        ("4GB", 4 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        ("512mib", 512 << 20),
        (" 10KB ", 10_000),
        ("7", 7),
    ],
)
def test_a_size_may_be_a_number_or_have_a_unit(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "4XB", "GB", "-1GB", "0", 0, -5, True, "4 5GB"])
def test_a_value_that_is_not_a_size_is_refused_with_the_cure(size: int | str) -> None:
    with pytest.raises(
        SpecError, match=r"number of bytes >= 1 .* got .*; units are KB"
    ):
        parse_bytes(size)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match=r"above 0 cores, got 0.0; leave it out"):
        Budget(0.0, 1)
    with pytest.raises(SpecError, match=r">= 1 byte, got 0; leave it out"):
        Budget(1.0, 0)


def test_cores_are_counted_by_affinity_where_no_quota_is_set(tmp_path: Path) -> None:
    proc, sys = tree(tmp_path, {"proc/self/cgroup": "0::/job\n"})
    assert effective_cpus(proc, sys) == 8.0


def test_the_smallest_quota_between_the_process_and_the_root_binds(
    tmp_path: Path,
) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/pod/job/cpu.max": "max 100000\n",
        "sys/pod/cpu.max": "250000 100000\n",
        "sys/cpu.max": "700000 100000\n",
    }
    assert effective_cpus(*tree(tmp_path, files)) == 2.5


def test_the_quota_of_cgroup_version_1_binds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
        "sys/cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
        "sys/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "sys/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert effective_cpus(*tree(tmp_path, files)) == 1.5


def test_a_namespace_that_hides_its_own_group_still_shows_the_parents(
    tmp_path: Path,
) -> None:
    files = {"proc/self/cgroup": "0::/../../job\n", "sys/cpu.max": "300000 100000\n"}
    assert effective_cpus(*tree(tmp_path, files)) == 3.0


def test_the_memory_budget_is_the_free_memory_where_no_limit_is_set(
    tmp_path: Path,
) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n5:memory:/job\n",
        "sys/job/memory.max": "max\n",
        "sys/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/memory/job/memory.usage_in_bytes": "1000\n",
    }
    assert effective_memory_bytes(*tree(tmp_path, files)) == 16 * GIB


def test_the_most_a_process_may_ever_have_is_the_smallest_limit_above_it(
    tmp_path: Path,
) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {32 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/pod/job\n5:memory:/job\n",
        "sys/pod/job/memory.max": "max\n",
        "sys/pod/memory.max": f"{4 * GIB}\n",
        "sys/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert memory_limit_bytes(*tree(tmp_path, files)) == 4 * GIB
    (tmp_path / "sys/pod/memory.max").write_text("max\n")
    assert memory_limit_bytes(tmp_path / "proc", tmp_path / "sys") == 32 * GIB


def test_memory_in_use_but_not_cache_is_deducted_from_a_limit(
    tmp_path: Path,
) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/pod/memory.max": f"{4 * GIB}\n",
        "sys/pod/memory.high": f"{3 * GIB}\n",
        "sys/pod/memory.current": f"{2 * GIB}\n",
        "sys/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert effective_memory_bytes(*tree(tmp_path, files)) == 2 * GIB


def test_the_memory_limit_of_cgroup_version_1_binds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/job\n",
        "sys/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/memory/job/memory.usage_in_bytes": f"{GIB}\n",
        "sys/memory/job/memory.stat": "total_inactive_file 4096\n",
    }
    assert effective_memory_bytes(*tree(tmp_path, files)) == GIB + 4096


def test_this_machine_has_a_budget() -> None:
    budget = Budget.of_machine()
    assert budget.cpu_cores == effective_cpus()
    assert budget.whole_machine
    assert budget.memory_bytes > 0


def test_a_requested_budget_is_what_it_says() -> None:
    least = Budget.of_machine(cpu_cores=0.5, memory_bytes=7)
    assert (least.cpu_cores, least.memory_bytes) == (0.5, 7)
    assert not least.whole_machine
    many = Budget.of_machine(cpu_cores=10_000.0)
    assert (many.cpu_cores, many.whole_machine) == (10_000.0, True)
