"""Where a segment's work goes, judged by what its first batches took."""

from __future__ import annotations

from penstock.engine.recipe import SOON_NS, WORTH_START_NS, resolve

MS = 1_000_000


def test_cheap_batches_stay_and_costly_ones_move() -> None:
    cheap = resolve(80, 5 * MS, 0, 8, thread_safe=True)
    costly = resolve(80, 50 * MS, 0, 8, thread_safe=True)
    alone = resolve(80, 50 * MS, 0, 8, thread_safe=False)
    assert [choice and choice.executor for choice in (cheap, costly, alone)] == [
        "inline",
        "thread",
        "process",
    ]


def test_a_batch_that_is_nearly_done_is_waited_for() -> None:
    assert resolve(4, 40 * MS, 4, 8, thread_safe=True) is None
    long_ns = 2 * SOON_NS
    assert resolve(4, long_ns, 4, 8, thread_safe=True) is not None


def test_workers_that_end_with_their_epoch_must_be_worth_their_start() -> None:
    """A cheap batch stays at once; a costly one moves if the epoch turns out long."""

    def found(run_ns: int, epoch_ns: int) -> str | None:
        resolved = resolve(80, run_ns, 0, 8, thread_safe=False, epoch_ns=epoch_ns)
        return resolved and resolved.executor

    assert found(5 * MS, 0) == "inline"
    assert found(80 * MS, 80 * MS) is None
    assert found(80 * MS, WORTH_START_NS) == "process"
