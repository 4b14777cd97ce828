"""On a system that lacks what worker processes need, the rest works or says why not."""

from __future__ import annotations

import subprocess
import sys

from support import warm

ON_WINDOWS = """
import os, sys
for name in ("fork", "register_at_fork", "sched_getaffinity", "statvfs", "sysconf"):
    delattr(os, name)
for name in ("fcntl", "resource"):
    sys.modules[name] = None  # importing it fails
import penstock
print(penstock.SpecError.__name__)
"""


def test_on_windows_the_package_can_be_imported() -> None:
    command = [sys.executable, "-P", "-c", ON_WINDOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("SpecError\n", "")


ON_MACOS = """
import asyncio, fcntl, multiprocessing, os, pytest, signal, socket, sys, torch
LACKED = {
    os: ["eventfd", "memfd_create", "pidfd_open", "posix_fallocate",
         "sched_getaffinity"],
    socket: ["MSG_CMSG_CLOEXEC"],
    signal: ["pidfd_send_signal"],
    fcntl: ["F_OFD_SETLK"],
}
for module, names in LACKED.items():
    for name in names:
        delattr(module, name)
for name in [*sys.modules]:
    if name.split(".")[0] == "penstock":
        del sys.modules[name]  # it is imported on the other system
import penstock as ps

def of(host="auto", **settings):
    pipe = ps.Pipeline.from_dataset(range(8), **settings).batch(4)
    with pipe.options(host=host) as pipe:
        return [batch.tolist() for batch in pipe]

async def awaited(sample):
    return sample

from penstock.system import file_locks
file_locks.call = None  # what is known of the system call is Linux's
with open(sys.executable, "rb") as file:
    assert file_locks.change(file.fileno(), fcntl.F_RDLCK, 7)
    file_locks.release(file.fileno(), 7)

ps.set_enable_autotune(True)
expected = [[0, 1, 2, 3], [4, 5, 6, 7]]
assert of() == of(executor="inline") == expected
assert of(executor="thread", num_parallel_workers=2) == expected
for settings in ({}, {"num_workers": 2}, {"num_workers": 2, "thread_safe": True}):
    loader = ps.DataLoader(range(8), batch_size=4, **settings)
    assert [batch.tolist() for batch in loader] == expected
    loader.close()
with pytest.raises(ps.SpecError, match="worker processes need fork and pidfd_open"):
    of(executor="process")
with pytest.raises(ps.SpecError, match='"async" and executor="ray" need eventfd'):
    list(ps.Pipeline.from_dataset(range(8)).map(awaited).batch(4))
with pytest.raises(ps.SpecError, match='need fork and pidfd_open.*and host="trainer"'):
    of(host="process")
"""


def test_on_macos_threads_and_the_trainer_load_and_processes_say_why_not() -> None:
    done = warm.run([sys.executable, "-P", "-c", ON_MACOS], brief=True)
    assert done.returncode == 0, done.stderr


WITHOUT_MEMFD = """
import os, sys
del os.memfd_create
for name in [*sys.modules]:
    if name.split(".")[0] == "penstock":
        del sys.modules[name]
import penstock as ps
with ps.Pipeline.from_dataset(range(8), executor="process").batch(4) as pipe:
    print([batch.tolist() for batch in pipe])
"""


def test_processes_load_where_python_was_built_without_memfd() -> None:
    done = warm.run([sys.executable, "-P", "-c", WITHOUT_MEMFD], brief=True)
    assert (done.stdout, done.stderr) == ("[[0, 1, 2, 3], [4, 5, 6, 7]]\n", "")
