"""What `executor="auto"` starts with: inline, until a batch shows what it costs.

This is resolved once for each segment, by its first batches, in the trainer's thread.
Everything later is the tuner's decision.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..system.printing import figures

WORTH_WORKERS_NS = 2_000_000
"""Work in a batch that justifies workers: threads, although they may hold the GIL, or
processes, although each lease costs some 300 us of CPU."""
SOON_NS = 300_000_000
"""A batch that will be done within this time is finished inline: workers would hardly
be ready sooner, and the trainer is waiting for the very first batch."""
SURE_NS = 10_000_000
"""Work after which a segment can be judged before it has finished a batch."""


WORTH_START_NS = 500_000_000
"""Loading within one epoch that justifies worker processes which end with the epoch and
are started again for the next one."""


class ResolvedExecutor(NamedTuple):
    """The kind of workers that a segment gets, and why."""

    executor: Literal["inline", "thread", "process"]
    reason: str


def resolve(
    rows: int,
    run_ns: int,
    left: int,
    batch_rows: int,
    *,
    thread_safe: bool,
    epoch_ns: int = WORTH_START_NS,
) -> ResolvedExecutor | None:
    """Return what suits a segment; None while too little was done to judge.

    Args:
        rows: rows worked on inline so far.
        run_ns: time that they took, in nanoseconds.
        left: rows of the current batch that are still to be done.
        batch_rows: rows of a batch.
        thread_safe: whether several threads may work on it.
        epoch_ns: what this epoch took so far, in nanoseconds, if workers end with it.
    """
    if rows == 0 or (rows < batch_rows and run_ns < SURE_NS):
        return None
    batch_ns = run_ns / rows * batch_rows
    if 0 < left / batch_rows * batch_ns < SOON_NS:
        return None
    executor: Literal["thread", "process"] = "thread" if thread_safe else "process"
    cost = f"a batch takes {figures(batch_ns / 1e6)} ms"
    line = f"{WORTH_WORKERS_NS / 1e6:g} ms from which handing it over pays"
    if batch_ns <= WORTH_WORKERS_NS:
        return ResolvedExecutor("inline", f"{cost}, less than the {line}")
    if epoch_ns < WORTH_START_NS:
        return None
    return ResolvedExecutor(executor, f"{cost}, more than the {line}")
