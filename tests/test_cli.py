"""The command line: what it offers, how it fails, what the doctor says."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import penstock
from penstock import cli
from penstock.system.resources import Budget
from support import warm


def test_help_lists_the_commands_that_work() -> None:
    commands = [command.callback for command in cli.app.registered_commands]
    looking = [cli.report, cli.watch, cli.bench, cli.doctor]
    assert commands == [cli.demo, cli.plan, cli.run, *looking]


def test_the_version_is_that_of_the_distribution() -> None:
    reply = CliRunner().invoke(cli.app, ["--version"])
    assert (reply.exit_code, reply.stdout) == (0, f"penstock {penstock.__version__}\n")
    assert importlib.metadata.version("penstock") == penstock.__version__


def test_a_failure_is_one_line_with_a_cure_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "penstock", "demo", "--data", "missing"]
    process = warm.run(command, cwd=tmp_path, brief=True)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("penstock: `from_folder` needs a folder, got ")
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["demo", "--seconds", "1"], ["dmeo"]])
def test_misuse_ends_with_exit_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(cli.app, arguments).exit_code == 2


def test_a_plan_of_a_file_that_is_not_a_log_fails_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "penstock", "plan", "nothing.jsonl"]
    process = warm.run(command, cwd=tmp_path, brief=True)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith(
        "penstock: no log can be read from 'nothing.jsonl'"
    )


def test_the_doctor_checks_everything_that_loading_depends_on() -> None:
    reply = CliRunner().invoke(cli.app, ["doctor"])
    assert reply.exit_code == 0
    heads = [
        line.split("  ")[0] for line in reply.stdout.splitlines() if line[0] != " "
    ]
    assert heads == [
        "penstock",
        "Python",
        "torch",
        "CPUs",
        "torch threads",
        "memory",
        "/dev/shm",  # noqa: S108
        "start methods",
        "numpy",
        "pillow",
        "simplejpeg",
        "lmdb",
        "lz4",
        "xxhash",
        "crop decoding",
    ]


def machine(cores: float, nbytes: int, threads: int) -> dict[str, cli.Diagnosis]:
    findings = cli.of_machine(Budget(cores, nbytes), threads)
    return {finding.what: finding for finding in findings}


def test_a_small_machine_is_told_what_to_do_and_a_large_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(cli, "SHARED_MEMORY_WANTED", 1)
    good = machine(2.5, 4 << 30, 2)
    assert [finding for finding in good.values() if finding.bad] == []
    monkeypatch.setattr(cli, "FORKS", False)
    monkeypatch.setattr(cli, "SHARED_MEMORY_WANTED", 1 << 60)
    bad = machine(1.5, 100 << 20, 8)
    cures = {
        "CPUs": "allow this process more cores",
        "torch threads": "torch.set_num_threads(1)",
        "memory": 'ps.set_memory_budget("512MB")',
        str(tmp_path): "docker --shm-size=1g",
        "start methods": 'executor="thread"',
    }
    assert bad.keys() == cures.keys()
    for what, cure in cures.items():
        assert cure in shown_cure(bad[what])


@pytest.mark.parametrize(
    ("bad", "cure", "good"),
    [
        (
            cli.of_package("no-such-package"),
            "pip install no-such-package",
            cli.of_package("numpy"),
        ),
        (
            cli.of_crop_decoding(None, "it was not built"),
            "headers of libjpeg-turbo",
            cli.of_crop_decoding(SimpleNamespace(VERSION="1"), ""),
        ),
    ],
)
def test_a_bad_finding_has_a_cure_and_a_good_one_has_none(
    bad: cli.Diagnosis, cure: str, good: cli.Diagnosis
) -> None:
    assert cure in shown_cure(bad)
    assert "cure" not in str(good)


def shown_cure(finding: cli.Diagnosis) -> str:
    """Return the line on what to do."""
    _, cure = str(finding).split(f"\n{'':17}cure: ")
    return cure


def test_a_system_without_shared_memory_is_not_a_problem(tmp_path: Path) -> None:
    assert not cli.of_shared_memory(str(tmp_path / "missing")).bad
