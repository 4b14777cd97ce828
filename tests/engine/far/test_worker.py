"""A worker process, whose trainer the test is."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from penstock.engine.far.child import Pipe, StatusPage, fork_child
from penstock.engine.far.fork_server import run_worker
from penstock.engine.far.handover import dumps
from penstock.engine.far.worker import Assignment
from penstock.engine.plan import BatchPlan, PlannedBatch, Rows
from penstock.engine.program.program import Read
from penstock.pipeline.stages import BatchStage, SourceStage
from support.recipes import compiled

PLAN = BatchPlan(0, 0, 0, 1, False, 1, 1, 1, 1.0, None, 1.0, None)  # noqa: FBT003


@dataclass(frozen=True)
class Keeping(Read):
    """Has something to write when its process ends, as a cache has."""

    left: Path = Path()

    def leave(self) -> None:
        """Write it."""
        self.left.touch()


def test_a_worker_that_is_sending_when_the_trainer_leaves_writes_what_it_keeps(
    tmp_path: Path,
) -> None:
    large = [bytes(4 << 20)]  # more than a pipe takes before somebody reads
    recipe = compiled(
        SourceStage(large, name="data", executor="process"), BatchStage(1)
    )
    segment, here = recipe.segments[0], recipe.elsewhere(0)
    program = segment.program
    read = Keeping("data", large.__getitem__, left=tmp_path / "left")
    segment = replace(segment, program=replace(program, operations=(read,)))
    inner = replace(here.segments[0], program=replace(program, operations=(read,)))
    work = {0: (replace(here, segments=(inner,)), segment)}

    ours, theirs = Pipe.pair()
    page = StatusPage.make()
    theirs.descriptors.append(os.dup(page.descriptor))
    body = partial(run_worker, lambda: work, (0, 0, (1,)), theirs)
    pid = fork_child(body, theirs)
    theirs.close()
    assert ours.receive_all() == [pid]
    rows = Rows(np.arange(1), np.arange(1))
    batch = PlannedBatch(PLAN, rows, 0, True)  # noqa: FBT003
    ours.send((((), ()), dumps(Assignment(batch, 0))))
    readable = select.poll()
    readable.register(ours, select.POLLIN)
    assert readable.poll(30_000)  # the beginning of what it sends
    ours.close()
    assert os.waitpid(pid, 0) == (pid, 0)
    page.close()
    assert read.left.exists()
