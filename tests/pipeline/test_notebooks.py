"""What a cell of a notebook shows, as its last line."""

from __future__ import annotations

import code
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import penstock as ps
from support.datasets import KINDS


def test_figures_are_tables_and_names_are_escaped() -> None:
    source = ps.Pipeline.from_dataset(list(range(64)), name="<b>digits</b>")
    with source.batch(8) as pipe:
        list(pipe)
        said, stats = pipe.explain(), pipe.stats()
    assert repr(said) == str(said)
    assert "Dataset(ID:0) <b>digits</b>" in repr(said)
    assert "in functions" in repr(stats)
    for shown in (pipe, said, stats):
        html = shown._repr_html_()  # type: ignore[union-attr]
        assert html.startswith("<pre>")
        assert "<b>" not in html
        assert "&lt;b&gt;digits" in html


class Shell(code.InteractiveInterpreter):
    """Runs cells as a notebook does: what they raise is shown, and kept."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names)
        self.shown = ""

    def write(self, data: str) -> None:
        self.shown += data

    def run(self, cell: str) -> None:
        self.runcode(compile(cell, "<cell>", "exec"))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a shell keeps of the last exception holds its frames."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_that_was_interrupted_runs_again_from_its_first_batch(kind: str) -> None:
    names: dict[str, Any] = {"os": os, "signal": signal, "interrupted": True}
    with ps.Pipeline.from_dataset(list(range(80)), **KINDS[kind]).batch(8) as pipe:
        names["loader"] = pipe
        shell = Shell(names)
        counts = []
        for _ in range(4):
            shell.run(CELL)
            assert "KeyboardInterrupt" in shell.shown
            assert [len(names["seen"]), int(names["seen"][0][0])] == [3, 0]
            counts.append(begun())
        assert len(set(counts)) == 1  # nothing piles up
        names["interrupted"] = False
        shell.run(CELL)
        assert len(names["seen"]) == 10


LOADERS: dict[str, Callable[[Any], Any]] = {
    "a DataLoader": lambda data: ps.DataLoader(data, batch_size=8),
    "one with workers": lambda data: ps.DataLoader(data, batch_size=8, num_workers=2),
}


@pytest.mark.parametrize("face", LOADERS)
def test_a_cell_that_makes_its_loader_anew_leaves_none_behind(face: str) -> None:
    ps.set_enable_autotune(True)
    names = {"make": lambda: LOADERS[face](list(range(80))), "interrupted": True}
    shell = Shell({**names, "os": os, "signal": signal})
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            shell.run("loader = make()" + CELL)
            counts.append(begun())
    assert counts[-1] <= counts[0]
