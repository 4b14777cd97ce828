"""After a fork beside a thread that imports, the child can import too."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.system import forking
from penstock.system.forking import fork
from support import warm

SLOW = "import slow_import_latch as latch\nlatch.entered.set()\nlatch.leave.wait(30)\n"


@pytest.fixture
def latch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    """Return the event that a module called `slow_import` waits for on import."""
    module = types.ModuleType("slow_import_latch")
    module.entered, module.leave = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    (tmp_path / "slow_import.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "slow_import_latch", module)
    yield module
    sys.modules.pop("slow_import", None)


def test_the_child_of_a_fork_can_import_what_another_thread_was_importing(
    latch: types.ModuleType,
) -> None:
    importing = threading.Thread(target=importlib.import_module, args=["slow_import"])
    importing.start()
    assert latch.entered.wait(30)
    late = threading.Timer(0.05, latch.leave.set)  # while the fork waits for it
    late.start()
    pid = fork()
    if pid == 0:
        importlib.import_module("slow_import")
        os._exit(7)
    late.join()
    importing.join()
    assert exit_code_of(pid) == 7


def test_a_fork_does_not_wait_for_a_lock_left_by_a_thread_of_the_parent(
    latch: types.ModuleType,
) -> None:
    importing = threading.Thread(target=importlib.import_module, args=["slow_import"])
    importing.start()
    assert latch.entered.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()  # at once, as the thread that imports is not in the child
    if pid == 0:
        grandchild = fork()
        os._exit(exit_code_of(grandchild) if grandchild else 7)
    latch.leave.set()
    importing.join()
    assert exit_code_of(pid) == 7


FORKS_BESIDE_GARBAGE = """
import gc, os, threading
from penstock.system import forking
from penstock.system.forking import fork

class Local(threading.local):
    pass

class Holder:
    pass

def deep(left):
    deep(left - 1) if left else end.wait()

end = threading.Event()
for _ in range(20):
    threading.Thread(target=deep, args=(200,), daemon=True).start()
gc.set_threshold(1)
for _ in range(20):
    holder = Holder()
    holder.itself, holder.local = holder, Local()
    del holder
    pid = fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
end.set()
"""
"""A thread's local is garbage, in a circle, when the threads are looked at."""


def test_a_fork_is_not_stuck_if_garbage_is_collected_meanwhile() -> None:
    command = [sys.executable, "-P", "-W", "ignore", "-c", FORKS_BESIDE_GARBAGE]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = warm.run(command, env=variables, timeout=60)
    assert process.returncode == 0, process.stderr


def exit_code_of(pid: int) -> int:
    """Wait for the end of a child, and kill it if it is stuck."""
    try:
        code: int = psutil.Process(pid).wait(20)
    except psutil.TimeoutExpired:
        os.kill(pid, signal.SIGKILL)
        raise
    return code


def test_a_fork_does_not_wait_for_a_module_that_its_own_thread_imports(
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


def test_threads_fork_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filelock, which torch and many others import, refuses to fork beside a fork."""
    inside, most = threading.Semaphore(1), []

    def slow() -> int:
        most.append(inside.acquire(blocking=False))
        time.sleep(0.001)
        inside.release()
        return 1

    monkeypatch.setattr(os, "fork", slow)
    threads = [threading.Thread(target=fork) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [True] * 8


def test_a_child_forks_though_another_thread_was_about_to() -> None:
    with forking._forking:  # noqa: SLF001
        pid = os.fork()
        if pid == 0:
            inner = fork()
            if inner == 0:
                os._exit(3)
            os._exit(exit_code_of(inner))
    assert exit_code_of(pid) == 3
