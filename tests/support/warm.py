"""`subprocess.Popen` for our own scripts, from an interpreter that has torch loaded.

Importing torch takes two seconds of CPU, and dozens of tests need a process of their
own. So one interpreter imports it once, and forks for each process that is started. As
with `subprocess`, the new process is a child of this one: it is forked twice, and
adopted by the nearest subreaper, which this process is for that moment.

Commands that are not of the form `python [-P] (-c CODE | -m MODULE | SCRIPT) ARGUMENTS`
are started by `subprocess` itself. `spawnv_passfds` does the same for
`multiprocessing`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import util
from typing import Any, NoReturn

__all__ = ["Popen", "run", "spawnv_passfds", "warm_descriptor", "warm_pid"]

PR_SET_CHILD_SUBREAPER = 36
LINE = 1 << 20
MAX_FILES = 64
POLL_S = 0.0005
BOOT = "import sys; sys.path[:] = {path}; from support.warm import serve; serve({end})"
FLAGS = {"-B", "-P"}
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
_owner = os.getpid()
"""Its forks have no line of their own to the interpreter."""
_asking = threading.Lock()
_cold = util.spawnv_passfds


def warm_pid() -> int | None:
    """Return the interpreter that forks; None if it has not been started."""
    return _server[0].pid if _server else None


def warm_descriptor() -> int | None:
    """Return the descriptor of the line to it."""
    return None if _server is None else _server[1].fileno()


class Popen(subprocess.Popen[str]):
    """Starts one of our scripts; everything else is `subprocess.Popen`'s.

    With `brief`, the script ends as soon as it has joined its threads and run what
    `atexit` was given. A test of how a program ends does without: Python then clears
    all modules, torch's too, which takes 0.3 s of CPU.
    """

    def __init__(self, args: Any, *, brief: bool = False, **options: Any) -> None:
        self._brief = brief
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (_, preexec_fn, _, pass_fds, cwd, env, _, _, shell) = rest[:9]
        read_in, _, _, write_out, _, write_err = rest[9:15]
        new_session = rest[-2]
        plan = None if shell or preexec_fn or pass_fds else planned(args, env)
        if plan is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        ends = (read_in, write_out, write_err)
        files = [at if fd == -1 else fd for at, fd in enumerate(ends)]
        order = {
            **plan,
            "cwd": os.fspath(cwd or os.getcwd()),
            "session": new_session,
            "brief": self._brief,
        }
        self.pid = start(order, files)
        self._child_created = True
        for end in {*ends} - {-1}:
            os.close(end)


def run(
    args: Sequence[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Act like `subprocess.run(capture_output=True, text=True)`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Popen(args, **{**pipes, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Replace `multiprocessing.util.spawnv_passfds`."""
    command = [os.fsdecode(argument) for argument in args]
    plan = planned(command, None) if os.getpid() == _owner else None
    if plan is None:
        return _cold(path, args, passfds)
    order = {
        **plan,
        "cwd": os.getcwd(),
        "session": False,
        "brief": True,
        "masked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "kept": list(passfds),
    }
    return start(order, [0, 1, 2, *passfds])


def planned(args: Any, env: Any) -> dict[str, Any] | None:
    """Return a command as JSON values; None if it has another form."""
    if isinstance(args, str) or args[0] != sys.executable:
        return None
    rest = list(map(os.fspath, args[1:]))
    while rest and rest[0] in FLAGS:
        rest.pop(0)
    variables = dict(os.environ if env is None else env)
    names = "PYTHONDEVMODE", "PYTHONHASHSEED", "PYTHONWARNINGS"
    same = all(variables.get(name) == os.environ.get(name) for name in names)
    if not same or not rest or (rest[0][0] == "-" and rest[0] not in ("-c", "-m")):
        return None
    return {"args": rest, "env": variables}


def start(order: dict[str, Any], files: list[int]) -> int:
    """Have it forked; return its pid."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    with _asking:
        _, line = server()
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            line.sendmsg([json.dumps(order).encode()], [rights])
            return int(line.recv(LINE))
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return the interpreter that forks, started when it is first asked for."""
    global _server  # noqa: PLW0603 one a process
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = BOOT.format(path=sys.path, end=theirs.fileno())
        fds = (theirs.fileno(),)
        process = subprocess.Popen([sys.executable, "-c", boot], pass_fds=fds)
        theirs.close()
        atexit.register(stop)
        _server = process, ours
    return _server


def stop() -> None:
    """End it."""
    if _server is not None:
        _server[1].close()
        _server[0].wait()


# In the interpreter that forks


def serve(end: int) -> None:
    """Fork for each request, until nobody can send one any more."""
    line = socket.socket(fileno=end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    load_what_scripts_load()
    gc.collect()
    gc.freeze()  # or each collection in a fork copies all memory, the last one too
    while answered(line):
        pass


def load_what_scripts_load() -> None:
    """Import torch and penstock with what they load when they are first used."""
    import PIL.JpegImagePlugin  # noqa: F401
    import torch.utils.data

    import penstock
    import penstock.autotune.tuner
    import penstock.cli
    import penstock.engine.run

    weights = torch.nn.Linear(1, 1).parameters()
    torch.optim.SGD(weights)  # loads torch's compiler: a second of CPU
    with penstock.Pipeline.from_dataset([0]).batch(1) as pipe:
        list(pipe)


def answered(line: socket.socket) -> bool:
    """Fork the requested process; return False if nobody can send requests any more."""
    body, rights, _, _ = line.recvmsg(LINE, socket.CMSG_SPACE(MAX_FILES * 4))
    if not body:
        return False
    files = array.array("i")
    files.frombytes(rights[0][2])
    order = json.loads(body)
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        above = os.getpid()
        pid = os.fork()
        if pid == 0:
            while os.getppid() == above:  # who asks for it must see its true parent
                time.sleep(POLL_S)
            line.close()
            for file in (read_end, write_end):
                os.close(file)
            if order["brief"]:
                briefly(partial(become, order, list(files)))
            become(order, list(files))
        os.write(write_end, str(pid).encode())
        os._exit(0)
    os.waitpid(middle, 0)  # only then has the one below another parent
    line.send(os.read(read_end, LINE))
    for file in (read_end, write_end, *files):
        os.close(file)
    return True


def become(order: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the interpreter that was asked for, to its end.

    What it spawns itself is no fork of the one that serves: that is none of its
    children, so it could not wait for what is forked there.
    """
    if order["session"]:
        os.setsid()
    place(files, [0, 1, 2, *order.get("kept", ())])
    signal.pthread_sigmask(signal.SIG_SETMASK, order.get("masked", ()))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(order["env"])
    path = os.environ.get("PYTHONPATH", "")
    if path != before:
        sys.path[:0] = path.split(os.pathsep)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    interrupted = False
    try:
        execute(order["args"], main)
    except KeyboardInterrupt as error:
        show(error)
        interrupted = True
    except Exception as error:  # noqa: BLE001 as an interpreter shows it
        show(error)
        raise SystemExit(1) from None
    if interrupted:
        run_exits()
        end_by_interrupt()
    raise SystemExit(0)


def briefly(work: Callable[[], NoReturn]) -> NoReturn:
    """Do it, and end as soon as threads and `atexit` are done."""
    try:
        work()
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    run_exits()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()
    os._exit(code or 0)


def run_exits() -> None:
    """Join threads and run what `atexit` was given, as Python does before it ends."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001


def place(files: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they had in the process that sent them."""
    highest = max(numbers)
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, highest + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def execute(args: list[str], main: types.ModuleType) -> None:
    """Run the code, module or script of the command line, as `__main__`."""
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        exec(compile(args[1], "<string>", "exec"), vars(main))  # noqa: S102
    elif args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")


def show(error: BaseException) -> None:
    """Print the traceback of the script alone."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)


def end_by_interrupt() -> None:
    """End as an interpreter does after a Ctrl-C that nothing caught."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
