"""What `make` installs, and what it says meanwhile."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

SAID = """\
Processing /wheels/numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl (from penstock)
Collecting torch>=2.4 (from penstock==0.1.0)
  Downloading https://host/torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (200.1 MB)
Collecting rich>=13 (from penstock==0.1.0)
  Downloading rich-15.0.0-py3-none-any.whl (0.3 MB)
Installing collected packages: numpy, torch, penstock
Successfully installed numpy-2.4.6 penstock-0.1.0 torch-2.13.0
"""
"""What pip says."""
INSTALLS = re.compile(
    r"pip install .*?(?:--editable )?'?((?:\.|penstock)(?:\[\w+\])?)'? 2>"
)


@pytest.fixture
def looking(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded(root / ".ci" / "look_for_extension.py", monkeypatch)


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """Return a folder with what a set-up reads."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(root / ".ci", tmp_path / ".ci")
    (tmp_path / "pipeline" / "image").mkdir(parents=True)
    for name in ("_photos.c", "_reading.h", "_resizing.h"):
        (tmp_path / "pipeline" / "image" / name).touch()
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("make") or "make", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("goal", "installed"),
    [
        ("demo", ["."]),
        ("lint", [".[test]", "penstock[test]"]),
        ("check", [".[test]", "penstock[test]"]),
        ("test", [".[test]", "penstock[test]"]),
        ("docs", [".", "penstock[docs]"]),
    ],
)
def test_a_goal_installs_what_it_needs_and_no_more(
    root: Path, clone: Path, goal: str, installed: list[str]
) -> None:
    # The second line of a goal with two does nothing if the first has just run.
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert INSTALLS.findall(make(clone, "-n", goal).stdout) == installed
    extras = {name[len("penstock[") : -1] for name in installed[1:]}
    assert extras <= set(project["optional-dependencies"])


def test_an_installation_that_fails_says_why_and_is_tried_again(clone: Path) -> None:
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho Collecting torch\necho no room >&2\nexit 1\n")
    python.chmod(0o755)
    (clone / ".venv" / "installed-from").write_text(str(clone.resolve()))
    for _ in range(2):
        process = make(clone, ".venv/with-test")
        assert process.returncode != 0
        assert "no room" in process.stderr


def test_progress_is_a_line_for_what_takes_long(root: Path) -> None:
    lines = re.sub(r"\d+ s,", "_ s,", shown_of(root, SAID)).splitlines()
    assert lines == [
        "set-up: _ s, downloading torch-2.13.0 (200.1 MB)",
        "set-up: _ s, unpacking 3 packages",
    ]


def test_progress_is_a_line_every_ten_packages(root: Path) -> None:
    lines = re.sub(r"\d+ s,", "_ s,", shown_of(root, SAID * 10)).splitlines()
    package_lines = [line for line in lines if "found" in line]
    assert package_lines == [f"set-up: _ s, {n} packages found" for n in (10, 20, 30)]


def shown_of(root: Path, log: str) -> str:
    return subprocess.check_output([root / ".ci" / "progress"], input=log, text=True)


def test_progress_is_shown_while_pip_works(root: Path) -> None:
    with subprocess.Popen(
        [root / ".ci" / "progress"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Installing collected packages: numpy\n")
        process.stdin.flush()
        assert "unpacking 1 packages" in process.stdout.readline()
        assert process.poll() is None  # it waits for more


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        ("CC", "no-such-compiler", "a C compiler"),
        ("CC", "", "a libjpeg-turbo of 2.1 or later, with what links to it"),
        ("CFLAGS", "-nostdinc", "the headers of C"),
    ],
)
def test_an_extension_that_was_not_built_is_explained_in_one_sentence(
    looking: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    missing: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # where nothing was built
    monkeypatch.setenv(variable, value)
    if variable == "CFLAGS" and looking.missing() == "a C compiler":
        pytest.skip("there is none")
    if not value:
        monkeypatch.setattr(looking, "passes", lambda *_: True)
        monkeypatch.setenv("CC", shlex.quote(sys.executable))  # something that is there
    looking.main()
    line = capsys.readouterr().out
    assert line.startswith(f"set-up: without {missing}, ps.image decodes photographs ")
    assert line.count("\n") == 1
    assert "apt install gcc libc6-dev python3-dev libjpeg-dev" in line


def test_an_extension_that_was_built_is_not_mentioned(
    looking: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / "pipeline" / "image").mkdir(parents=True)
    (tmp_path / "pipeline" / "image" / f"_photos{suffix}").touch()
    looking.main()
    assert capsys.readouterr().out == ""


def test_each_header_that_is_missing_is_named(
    looking: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", shlex.quote(sys.executable))
    for text, name in looking.HEADERS.items():
        monkeypatch.setattr(looking, "passes", lambda _, source, no=text: source != no)
        assert looking.missing() == name
