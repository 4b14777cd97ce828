"""What a notebook shows for the last line of a cell."""

from __future__ import annotations

import code
import gc
import html
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

import penstock as ps
from penstock.engine.far.fork_server import ForkServer
from support.datasets import KINDS


def test_figures_are_shown_as_tables_and_names_are_escaped() -> None:
    source = ps.Pipeline.from_dataset(list(range(64)), name="<b>digits</b>")
    with source.batch(8) as pipe:
        list(pipe)
        said, stats = pipe.explain(), pipe.stats()
    assert repr(said) == str(said)
    assert "Dataset(ID:0) <b>digits</b>" in repr(said)
    assert "in functions" in repr(stats)
    for shown in (pipe, said, stats):
        text = shown._repr_html_()  # type: ignore[union-attr]
        assert text.startswith("<pre>")
        assert "<b>" not in text
        assert "&lt;b&gt;digits" in text


def test_a_loader_prints_as_the_call_that_makes_it() -> None:
    settings: Any = {"batch_size": 8, "shuffle": True, "num_workers": 2}
    loader = ps.DataLoader(list(range(64)), **settings, name="<b>train")
    settings = "batch_size=8, shuffle=True, num_workers=2"
    assert repr(loader) == f"DataLoader(<list>, {settings}, name='<b>train')"
    assert "&lt;b&gt;train" in loader._repr_html_()
    copy = pickle.loads(pickle.dumps(loader))  # noqa: S301 our own
    assert repr(copy) == repr(loader)
    assert isinstance(loader, torch.utils.data.DataLoader)
    batches = torch.utils.data.BatchSampler(range(64), 4, drop_last=False)
    loader = ps.DataLoader(range(64), batch_sampler=batches, name="val")
    assert (
        repr(loader) == "DataLoader(<range>, batch_sampler=<BatchSampler>, name='val')"
    )


def test_a_schedule_prints_as_the_code_that_makes_it() -> None:
    ramp = ps.schedule.linear(128, 224, end=38, begin=2.5, multiple_of=32)
    sizes = ps.schedule.steps({0: 64, 30: 128}, "steps")
    momentum = ps.schedule.cosine(0.9, 0.95, end=9, unit="samples")
    stepwise = ps.schedule.of(
        sizes, image_size=ramp, momentum=momentum, lr_mult=2, coupling="linear"
    )
    policy = ps.schedule.policy("20:128-224,38:224-224", momentum=0.9)
    for schedule in (stepwise, policy, ps.schedule.of(global_batch_size=64)):
        again = eval(repr(schedule), {"schedule": ps.schedule})  # noqa: S307 our own
        assert again == schedule
        assert html.unescape(schedule._repr_html_()) == f"<pre>{schedule!r}</pre>"
    assert "batch_size=schedule.steps({0: 64, 30: 128}, unit='steps')" in repr(stepwise)


class Shell(code.InteractiveInterpreter):
    """Runs cells as a notebook does: it shows what they raise, and keeps it."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names)
        self.shown = ""

    def write(self, data: str) -> None:
        self.shown += data

    def run(self, cell: str) -> None:
        self.runcode(compile(cell, "<cell>", "exec"))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drop the last exception that a shell keeps, as it holds frames.

    A shell shows exceptions itself only where no package, such as Ray, does.
    """
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    yield
    sys.last_value = sys.last_traceback = None
    gc.collect()


CELL = """
seen = []
for number, batch in enumerate(loader):
    seen.append(batch)
    if number == 2 and interrupted:
        os.kill(os.getpid(), signal.SIGINT)
"""


def begun() -> int:
    """Return how many threads and processes there are."""
    return threading.active_count() + len(psutil.Process().children(recursive=True))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_that_was_interrupted_runs_again_from_its_first_batch(kind: str) -> None:
    names: dict[str, Any] = {"os": os, "signal": signal, "interrupted": True}
    with ps.Pipeline.from_dataset(list(range(80)), **KINDS[kind]).batch(8) as pipe:
        names["loader"] = pipe
        shell = Shell(names)
        counts = []
        for _ in range(2):
            shell.run(CELL)
            assert "KeyboardInterrupt" in shell.shown
            assert [len(names["seen"]), int(names["seen"][0][0])] == [3, 0]
            counts.append(begun())
        assert len(set(counts)) == 1  # nothing accumulates
        names["interrupted"] = False
        shell.run(CELL)
        assert len(names["seen"]) == 10


LOADERS: dict[str, Callable[[Any], Any]] = {
    "a DataLoader": lambda data: ps.DataLoader(data, batch_size=8),
    "one with workers": lambda data: ps.DataLoader(data, batch_size=8, num_workers=2),
}


@pytest.mark.long
def test_ctrl_c_while_a_loop_begins_ends_only_that_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ps.set_enable_autotune(True)
    others = psutil.Process().children(
        recursive=True
    )  # children that other tests started
    loader = ps.DataLoader(list(range(80)), batch_size=8, num_workers=2)
    assert len(list(loader)) == 10
    start = ForkServer._start  # noqa: SLF001 where Ctrl-C comes

    def interrupted(server: ForkServer) -> Any:
        psutil.wait_procs(old, timeout=60)  # so replacements are needed
        signal.raise_signal(signal.SIGINT)
        return start(server)

    here = psutil.Process().children(recursive=True)
    old = [child for child in here if child not in others]
    with monkeypatch.context() as patch:
        patch.setattr(ForkServer, "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(loader)
    assert [int(batch[0]) for batch in loader] == list(range(0, 80, 8))
    loader.close()
    assert psutil.Process().children(recursive=True) == others


@pytest.mark.long
@pytest.mark.parametrize("face", LOADERS)
def test_a_cell_that_remakes_its_loader_leaves_none_behind(face: str) -> None:
    ps.set_enable_autotune(True)
    names = {"make": lambda: LOADERS[face](list(range(80))), "interrupted": True}
    shell = Shell({**names, "os": os, "signal": signal})
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            shell.run("loader = make()" + CELL)
            counts.append(begun())
    assert counts[-1] <= counts[0]
