"""A fork beside a thread that imports: the child can import, too."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.workers.process.fork_server import ends_within
from penstock.system.forking import fork

SLOW = "import slow_import_gate as gate\ngate.entered.set()\ngate.leave.wait(30)\n"


@pytest.fixture
def engine_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    """What a module called `slow_import` waits for while it is imported."""
    made = types.ModuleType("slow_import_gate")
    made.entered, made.leave = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    (tmp_path / "slow_import.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "slow_import_gate", made)
    yield made
    sys.modules.pop("slow_import", None)


def test_the_child_of_a_fork_can_import_what_another_thread_was_importing(
    engine_lock: types.ModuleType,
) -> None:
    importing = threading.Thread(target=importlib.import_module, args=["slow_import"])
    importing.start()
    assert engine_lock.entered.wait(30)
    late = threading.Timer(0.05, engine_lock.leave.set)  # while the fork waits for it
    late.start()
    pid = fork()
    if pid == 0:
        importlib.import_module("slow_import")
        os._exit(7)
    late.join()
    importing.join()
    if not ends_within(pid, 20):
        os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_module_that_this_very_thread_imports_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import os\nfrom penstock.system.forking import fork\n"
        "pid = fork()\nif pid == 0:\n    os._exit(0)\n"
        "status = os.waitpid(pid, 0)[1]\n"
    )
    (tmp_path / "forks_itself.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("forks_itself").status == 0
    del sys.modules["forks_itself"]
