"""What `executor="auto"` begins with: inline, until a batch shows what it costs.

Resolved once for each segment, by its first batches, in the trainer's thread. What
happens later is the tuner's to decide.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

WORTH_WORKERS_NS = 2_000_000
"""Work in a batch from which handing it to workers pays: to a thread where it holds the
GIL, as it may, or to a process, of which some 300 us of CPU are spent on each lease."""
SOON_NS = 300_000_000
"""A batch that is done inline within this is done so: no worker would be there much
sooner, and the first batch of all is waited for."""
SURE_NS = 10_000_000
"""Work from which a segment need not finish a whole batch to be judged."""


class ResolvedExecutor(NamedTuple):
    """The workers that a segment gets, and why."""

    executor: Literal["inline", "thread", "process"]
    reason: str


def resolve(
    rows: int, run_ns: int, left: int, batch_rows: int, *, thread_safe: bool
) -> ResolvedExecutor | None:
    """Return what suits a segment; None while too little was done to tell.

    Args:
        rows: worked on inline so far.
        run_ns: nanoseconds that took.
        left: rows still to be done of the batch that was begun.
        batch_rows: rows of a batch.
        thread_safe: whether several threads may work on it.
    """
    if rows == 0 or (rows < batch_rows and run_ns < SURE_NS):
        return None
    batch_ns = run_ns / rows * batch_rows
    if 0 < left / batch_rows * batch_ns < SOON_NS:
        return None
    executor: Literal["thread", "process"] = "thread" if thread_safe else "process"
    cost = f"a batch takes {batch_ns / 1e6:.3g} ms"
    line = f"{WORTH_WORKERS_NS / 1e6:g} ms from which handing it over pays"
    if batch_ns <= WORTH_WORKERS_NS:
        return ResolvedExecutor("inline", f"{cost}, less than the {line}")
    return ResolvedExecutor(executor, f"{cost}, more than the {line}")
