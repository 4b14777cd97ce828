"""The command line: `penstock demo`, `run`, `report`, `watch`, `plan`, and more."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import typer

from . import __version__, config
from .autotune.report import terminal
from .autotune.report.recording import read_recording
from .errors import PenstockError, check
from .system.forking import FORKS
from .system.resources import Budget, effective_cpus, parse_bytes
from .system.shared_memory import SHARED_MEMORY

MIB, GIB = 1 << 20, 1 << 30
# What the doctor asks for. Docker gives a container 64 MB of shared memory, and a batch
# of 64 photographs has 10 MB at 224 px: torch's workers send their batches there.
SHARED_MEMORY_WANTED = GIB // 2
PACKAGES = ("numpy", "pillow", "simplejpeg", "lmdb", "lz4", "xxhash")

app = typer.Typer(
    name="penstock",
    help="An input pipeline for PyTorch that tunes itself while the model trains.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
caches = typer.Typer(help="What .cache(disk=...) left.", no_args_is_help=True)
app.add_typer(caches, name="cache")


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 misused, 130 stopped.

    A script that is run ends as Python would end it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not by nohup
        signal.signal(signal.SIGINT, interrupt)
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        sys.exit(f"penstock: {error}")
    except OfScript as carrier:
        raised = carrier.args[0]
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:  # after Ctrl-C, as shells count
            print("penstock: stopped", file=sys.stderr)
        raise
    raise raised


class OfScript(BaseException):
    """Carries what a script raises past typer, which answers some exceptions itself."""


def interrupt(*_: object) -> None:
    """Stop at the first Ctrl-C; another one would only interrupt the cleanup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def show_version(version: bool) -> None:  # noqa: FBT001 typer calls it so
    """Print the version and exit, if asked to."""
    if version:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # noqa: FBT002 typer reads it so
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Tune how a PyTorch program loads its data, while its model trains."""


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(help="Images in class sub-folders; default: drawn photos."),
    ] = None,
    latency_ms: Annotated[
        float,
        typer.Option(min=0, help="How long each read waits, as in an object store."),
    ] = 15.0,
    seconds: Annotated[
        float,
        typer.Option(min=5, help="How long to train, not counting the time to draw."),
    ] = 30.0,
) -> None:
    """Train on photos that are slow to read, then let autotune fix that."""
    with busy("loading torch"):
        from .demo import tell

    tell(data, latency_s=latency_ms / 1000, seconds=seconds)


LOG = typer.Argument(help="Log of a tuned run: PREFIX_<rank>.jsonl, or PREFIX for all.")
NAME = typer.Option(help="Only this pipeline, by its name in the log; default: all.")
NODES = typer.Option(min=1, help="Machines that train in step; may be repeated.")
STORE = typer.Option(help="Bytes per second of the store, for all nodes: 10GB.")
DATA = typer.Option(
    help="Size of the whole dataset as read; needed if there are caches."
)
RAM = typer.Option(help="Size of each node's cache in RAM, such as 32GB.")
DISK = typer.Option(help="Size of each node's cache on disk, which is read at 1 GB/s.")
SPREAD = typer.Option(
    min=0, max=1, help="Relative standard deviation of steps: how much stragglers lag."
)


def busy(status: str) -> AbstractContextManager[object]:
    """Show what is running on a terminal, until the `with` ends."""
    from rich.console import Console

    return Console(stderr=True).status(status)


@app.command()
def plan(  # noqa: PLR0913, PLR0917 typer makes an option of each
    log: Annotated[str, LOG],
    name: Annotated[str | None, NAME] = None,
    cores: Annotated[
        list[float] | None,
        typer.Option(min=0.1, help="Cores of the other machine; may be repeated."),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Trainer's own part of a step; default: as measured."),
    ] = None,
    nodes: Annotated[list[int] | None, NODES] = None,
    store_bandwidth: Annotated[str, STORE] = "",
    data_size: Annotated[str, DATA] = "",
    ram: Annotated[str, RAM] = "",
    disk: Annotated[str, DISK] = "",
    spread: Annotated[float, SPREAD] = 0.02,
) -> None:
    """Predict the workers and the speed of a tuned run on other machines.

    With --nodes, also predict the speed of several machines that train in step.
    """
    from .autotune import planner

    with busy("reading the log"):
        workloads = planner.measured_workloads(log, name)
    around = {
        "store_bytes_per_s": _bytes_of(store_bandwidth, inf),
        "data_bytes": _bytes_of(data_size, inf),
        "ram_bytes": _bytes_of(ram, 0.0),
        "disk_bytes": _bytes_of(disk, 0.0),
        "spread": spread,
    }
    for pipeline, workload in workloads.items():
        if len(workloads) > 1:
            print(f"{pipeline}:")
        asked_workload = replace(
            workload, gap_s=workload.gap_s if step_ms is None else step_ms / 1000
        )
        for count in cores or [effective_cpus()]:
            print(planner.Projection(asked_workload, count))
            if nodes:
                speeds = planner.plan_nodes(asked_workload, count, nodes, **around)
                print(planner.table_of(count, speeds))


def _bytes_of(size: str, otherwise: float) -> float:
    return parse_bytes(size) if size else otherwise


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    module: Annotated[  # noqa: FBT002 typer reads it so
        bool, typer.Option("-m", help="Run TARGET as a module, like python -m.")
    ] = False,
    log: Annotated[
        str, typer.Option(help="Keep the autotune log, as LOG_<rank>.jsonl and .json.")
    ] = "",
) -> None:
    """Run an unchanged training script, and tune its DataLoaders.

    Everything after TARGET is passed to the script.
    """
    # It runs as Python would run it, but finds penstock's DataLoader in place of
    # torch's. A report follows at its end.
    check(
        module or Path(target).is_file(),
        f"there is no script {target!r}; to run a module, pass -m",
    )
    folder = tempfile.mkdtemp(prefix="penstock-run-")
    process = os.getpid()
    try:
        _replace_torchs_loader()
        config.enable_autotune_of_run(log or f"{folder}/run")
        _as_main(target, context.args, module=module)
    finally:
        if os.getpid() == process:  # and not a child that the script forked
            _end_run(folder)


def _end_run(folder: str) -> None:
    """Tune no longer, and report; remove the run's own folder in any case."""
    from .autotune.log import begun_ranks
    from .pipeline.session import end_tuning, rank_of_process

    try:
        end_tuning()
        # Its process group may be gone, and with it what `rank_of_process` says.
        ranks = {path: rank for path, rank in begun_ranks.items() if path.exists()}
        if 0 in ranks.values() or not (ranks or rank_of_process()):
            sys.stderr.write(_told([path for path in ranks if ranks[path] == 0]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace_torchs_loader() -> None:
    """Let programs that import torch's DataLoader from now on find penstock's."""
    from torch.utils import data

    from .pipeline.dataloader import DataLoader

    data.DataLoader = data.dataloader.DataLoader = DataLoader  # type: ignore[misc]


def _as_main(target: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run the script as `python target` would; an `OfScript` carries what it raises."""
    if signal.getsignal(signal.SIGINT) is interrupt:  # Ctrl-C is the script's now
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [target, *arguments]
    try:
        if module:
            sys.path.insert(0, "")
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt):
            # Another one would only interrupt the cleanup.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        frames = raised.__traceback__ and raised.__traceback__.tb_next
        while frames and frames.tb_frame.f_globals.get("__name__") == "runpy":
            frames = frames.tb_next
        sys.excepthook = partial(_show_its_frames, sys.excepthook, raised, frames)
        raise OfScript(raised) from raised


def _show_its_frames(
    show: Callable[..., object],
    raised: BaseException,
    frames: TracebackType | None,
    kind: type[BaseException],
    error: BaseException,
    others: TracebackType | None,
) -> None:
    """Show what the script raised from its own first frame, as Python would."""
    own = frames if error is raised else others
    show(kind, error.with_traceback(own), own)


def _told(logs: Sequence[Path]) -> str:
    """Return the report on a script's logs, with the paths that it chose itself."""
    ours = Path(f"{config.current.prefix_of_run}_0.jsonl")
    reports = [
        f"the script writes its log to {str(log)!r}.\n" * (log != ours)
        + terminal.report_on(read_recording(log))
        for log in logs
    ]
    nothing = (
        "nothing: while autotune was on, the script did not iterate a DataLoader that"
        " penstock can tune."
    )
    return "\n--- penstock: results ---\n" + "\n".join(reports or [nothing]) + "\n"


@app.command()
def report(
    log: Annotated[str, LOG],
    name: Annotated[str | None, NAME] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a web page, in one file.")
    ] = None,
) -> None:
    """Report what a tuned run found, what was changed, and what it gained."""
    with busy("reading the log"):
        recording = read_recording(log, name)
    print(terminal.report_on(recording))
    if html is not None:
        from .autotune.report.page import write_page

        with busy("writing the page"):
            write_page(recording, html)
        print(f"written: {html}")


@app.command()
def watch(
    target: Annotated[
        str, typer.Argument(help="PREFIX_<rank>.jsonl, or the id of the process.")
    ],
    once: Annotated[  # noqa: FBT002 typer reads it so
        bool, typer.Option("--once", help="Show the present state, and exit.")
    ] = False,
) -> None:
    """Show a tuned run while it runs."""
    from rich.console import Console

    terminal.watch(target, Console(), once=once)


@app.command()
def bench(
    target: Annotated[
        str, typer.Argument(help="Images in class sub-folders, or MODULE:FUNCTION.")
    ],
    seconds: Annotated[float, typer.Option(min=4, help="How long to measure.")] = 30.0,
    step_ms: Annotated[
        float,
        typer.Option(min=0, help="How long a training step takes; it only sleeps."),
    ] = 0.0,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Batch size for a folder.")
    ] = 64,
) -> None:
    """Measure how fast your own data loads, as set and tuned.

    FUNCTION takes no arguments and returns a DataLoader or a Pipeline. If its module
    imports torch's DataLoader, it finds penstock's there.
    """
    from rich.console import Console

    from .bench import bench as measure

    _replace_torchs_loader()
    measure(
        target,
        seconds=seconds,
        step_s=step_ms / 1000,
        batch_size=batch_size,
        console=Console(),
    )


Folder = Annotated[Path, typer.Argument(help="The folder given to .cache(disk=...).")]


@caches.command("ls")
def list_cache(folder: Folder) -> None:
    """List what is stored: one line for each dataset, code and image size."""
    from .cache.housekeeping import entries

    with busy("counting what is stored"):
        namespaces = entries(folder)
    for name, entry in namespaces:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s))
        print(
            f"{name}  {entry.records:>9,}  {entry.nbytes / MIB:>9,.1f} MiB  {used}"
            f"  {entry.about}"
        )
    print(
        f"{len(namespaces)} in all,"
        f" {sum(entry.nbytes for _, entry in namespaces) / MIB:,.1f} MiB"
    )


@caches.command("verify")
def verify_cache(folder: Folder) -> None:
    """Read every record and drop the damaged ones; exit code 1 if there are any."""
    from .cache.housekeeping import verify

    whole, damaged = verify(
        folder, lambda records: print(f"{records:,} records read", file=sys.stderr)
    )
    print(f"{whole:,} records are intact, {damaged:,} were damaged")
    raise typer.Exit(int(damaged > 0))


@caches.command("clear")
def clear_cache(
    folder: Folder,
    name: Annotated[
        str, typer.Option(help="Only this entry, by its name in `ls`.")
    ] = "",
) -> None:
    """Delete what is stored."""
    from .cache.housekeeping import clear

    with busy("deleting"):
        count = clear(folder, name or None)
    print(f"{count:,} records deleted")


@app.command()
def doctor() -> None:
    """Report what penstock finds on this machine, and what would improve it."""
    import torch

    from .pipeline.image.codec import crop_extension

    gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    print(
        Diagnosis("penstock", __version__),
        Diagnosis("Python", f"{platform.python_version()}, {platform.system()}"),
        Diagnosis(
            "torch", f"{torch.__version__}, {', '.join(gpus) or 'no CUDA device'}"
        ),
        *of_machine(config.budget(), torch.get_num_threads()),
        *map(of_package, PACKAGES),
        of_crop_decoding(*crop_extension()),
        sep="\n",
    )


class Diagnosis(NamedTuple):
    """One thing the doctor looked at."""

    what: str
    value: str
    bad: bool = False
    # What to do about it, if it is bad.
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.what:17}{self.value}"
        return f"{line}\n{'':17}cure: {self.cure}" if self.bad else line


def of_machine(budget: Budget, torch_threads: int) -> list[Diagnosis]:
    """Check whether cores and memory suffice, and processes can share memory."""
    cores, nbytes = budget.cpu_cores, budget.memory_bytes
    most = max(1, int(cores))
    return [
        Diagnosis(
            "CPUs",
            f"{os.cpu_count()} in the machine, {effective_cpus():g} by affinity and"
            f" quota, budget {cores:g}",
            cores < 2,
            "training and loading take turns: allow this process more cores",
        ),
        Diagnosis(
            "torch threads",
            str(torch_threads),
            torch_threads > most,
            f"more threads than cores hinder each other: torch.set_num_threads({most})",
        ),
        Diagnosis(
            "memory",
            f"budget {nbytes / GIB:.1f} GiB for batches in flight",
            nbytes < GIB // 4,
            'that is few batches: free some memory, or ps.set_memory_budget("512MB")',
        ),
        of_shared_memory(SHARED_MEMORY),
        Diagnosis(
            "start methods",
            ", ".join(multiprocessing.get_all_start_methods()),
            not FORKS,
            'worker processes need Linux: use executor="thread"',
        ),
    ]


def of_shared_memory(folder: str) -> Diagnosis:
    """Check shared memory, of which containers often have too little."""
    try:
        total = shutil.disk_usage(folder).total
    except OSError:
        return Diagnosis(folder, "not on this system; penstock does not need it")
    return Diagnosis(
        folder,
        f"{total / GIB:.1f} GiB",
        total < SHARED_MEMORY_WANTED,
        "torch's own DataLoader needs more, penstock does not: docker --shm-size=1g",
    )


def of_package(name: str) -> Diagnosis:
    """Check which version of a package is installed."""
    try:
        return Diagnosis(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Diagnosis(name, "not installed", bad=True, cure=f"pip install {name}")


def of_crop_decoding(extension: Any, why_not: str) -> Diagnosis:
    """Check whether JPEGs can be decoded only where they are cropped."""
    return Diagnosis(
        "crop decoding",
        f"version {extension.VERSION}" if extension else f"none: {why_not}",
        extension is None,
        "to decode only the crops of photographs: a C compiler and the headers of"
        " libjpeg-turbo >= 2.1 and of Python, then install penstock again from source",
    )
