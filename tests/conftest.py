"""Fixtures around every test: nothing stays behind, and nothing is left to chance."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from multiprocessing import util
from pathlib import Path

import hypothesis
import pytest

from support.leaks import Footprint, leaks_since
from support.other_programs import CoresOfOthers
from support.warm import spawnv_passfds

hypothesis.settings.register_profile(
    "penstock",
    database=None,
    deadline=None,  # the machine is shared
    max_examples=50,  # each run draws others
    derandomize="CI" in os.environ,  # new examples are sought by hand
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # for the reason above
)
hypothesis.settings.load_profile("penstock")

ROOT = Path(__file__).parents[1]
BESIDE_THE_PACKAGE = {"benchmarks", "build", "dist", "examples", "tests"}

# A shell makes what it starts in the background, and all its children, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# What a script prints is buffered, as it is for a user whose output goes to a file.
os.environ.pop("PYTHONUNBUFFERED", None)

broke_off = pytest.StashKey[bool]()
cores_of_others = pytest.StashKey[CoresOfOthers]()
BUSY_CORES = 0.3
"""Cores used by other programs above which a test marked `serial` cannot judge."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU if there is none; else wake it before the guard looks.

    For a test marked `serial`, begin to measure what other programs use.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the first call opens files that stay open
    elif item.get_closest_marker("gpu") is not None:
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("serial") is not None:
        item.stash[cores_of_others] = CoresOfOthers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that may take longest, so that others run beside them."""

    def limit_s(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return 0.0 if marker is None else float(marker.args[0])

    items.sort(key=limit_s, reverse=True)


def pytest_collection_finish() -> None:
    """Prepare a process that tests. One that only distributes them never does this."""
    import torch  # late, as it takes seconds

    torch.set_num_threads(1)  # the cores belong to the workers under test
    exempt_from_collections()


def exempt_from_collections() -> None:
    """Spare the guard's collections all that is here now: mostly modules."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether the test raised: its traceback then keeps its variables alive.

    A test that reads what the whole machine does says nothing about the code if it
    fails while other programs use the cores: it is reported as skipped.
    """
    item.stash[broke_off] = call.excinfo is not None
    report = yield
    failed = report.failed and call.when == "call" and call.excinfo is not None
    if failed and cores_of_others in item.stash:
        used = item.stash[cores_of_others]()
        if used > BUSY_CORES:
            path, line, _ = report.location
            why = f"other programs used {used:.1f} cores: {call.excinfo.exconly()}"
            report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, why)
    return report


@pytest.fixture(autouse=True, scope="session")
def tuners_of_others_are_not_met(
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[None]:
    """Have the tuners under test share the host's cores with nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture
def two_cores() -> None:
    """Have work that moves go to threads: from four cores on, processes get it."""
    import penstock as ps

    ps.set_cpu_budget(2)


@pytest.fixture
def own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide from the test any arena in RAM that another has left."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Generator[None]:
    """Fail a test that leaves a thread, process, file or shared memory behind."""
    before, modules = Footprint.now(), len(sys.modules)
    yield
    if len(sys.modules) > modules + 100:  # what collections would look through
        exempt_from_collections()
    if request.node.stash.get(broke_off, False):
        return
    if leaks := leaks_since(before):
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def warm_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the interpreters that `spawn` and `forkserver` start from one with torch.

    They inherit nothing from the test's process. A test of what a new interpreter
    cannot import, or of how it is started, does without this fixture.
    """
    monkeypatch.setattr(util, "spawnv_passfds", spawnv_passfds)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository, which is the package."""
    return ROOT


@pytest.fixture(scope="session")
def packages() -> dict[str, Path]:
    """Return the dotted names and folders of the package and its subpackages."""
    folders = {"penstock": ROOT}
    for path in sorted(ROOT.glob("[!.]*/**/*.py")):
        parts = path.relative_to(ROOT).parts[:-1]
        if parts[0] not in BESIDE_THE_PACKAGE:
            folders[".".join(("penstock", *parts))] = path.parent
    return folders


@pytest.fixture(scope="session")
def modules(packages: dict[str, Path]) -> dict[str, Path]:
    """Return the dotted name and file of every module, `__init__.py` for a package."""
    return {
        package if path.stem == "__init__" else f"{package}.{path.stem}": path
        for package, folder in packages.items()
        for path in sorted(folder.glob("*.py"))
    }


@pytest.fixture(autouse=True)
def settings_as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide from the test what another has set for the whole process."""
    import penstock  # late, so that a test of the import can be first
    from penstock.engine.core import in_flight

    monkeypatch.setattr(penstock.config, "current", penstock.config.Settings())
    penstock.config._measured_bytes.cache_clear()  # noqa: SLF001
    monkeypatch.setattr(in_flight, "_byte_budget", None)
