"""Late reads are requested again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.pipeline.sources import files, patience
from penstock.pipeline.sources.patience import (
    FIRST_FEW,
    KNOWN,
    MAX_SHARE,
    HedgedReads,
)
from support.http_store import served


async def at_once(path: str) -> bytes:
    return path.encode()


async def known() -> HedgedReads:
    """Return hedged reads that have seen many reads take no time."""
    reads = HedgedReads()
    for number in range(KNOWN):
        assert await reads.read(at_once, str(number)) == str(number).encode()
    return reads


class Calls:
    """A file whose calls end as the test says."""

    def __init__(self, *ends: Callable[[], Awaitable[bytes]]) -> None:
        self.ends = iter(ends)
        self.cancelled = self.asked = 0
        self.asked_twice = asyncio.Event()

    async def __call__(self, path: str) -> bytes:
        assert path == "file"
        self.asked += 1
        if self.asked == 2:
            self.asked_twice.set()
        try:
            return await next(self.ends)()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def never() -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def right() -> bytes:
    return b"right"


async def broken() -> bytes:
    raise OSError("broken")


async def broken_later() -> bytes:
    for _ in range(100):
        await asyncio.sleep(0)
    raise OSError("broken later")


def test_a_late_read_is_requested_again_and_the_first_request_cancelled() -> None:
    async def run() -> None:
        reads, calls = await known(), Calls(never, right)
        assert await reads.read(calls, "file") == b"right"
        assert (reads.hedged, calls.cancelled) == (1, 1)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_request_that_fails_leaves_the_other_its_chance() -> None:
    async def run() -> None:
        reads = await known()
        assert await reads.read(Calls(right), "file") == b"right"
        reads._sorted = [0.0] * KNOWN  # noqa: SLF001 so that all is late
        assert await reads.read(Calls(broken_later, right), "file") == b"right"
        with pytest.raises(OSError, match="broken"):
            await reads.read(Calls(broken_later, broken), "file")

    asyncio.run(run())


def test_a_second_request_that_stalls_is_followed_by_a_third() -> None:
    async def run() -> None:
        reads, calls = await known(), Calls(never, never, right)
        assert await reads.read(calls, "file") == b"right"
        assert (reads.hedged, calls.cancelled) == (2, 2)

    asyncio.run(run())


def test_a_stall_beyond_the_allowed_share_is_repeated_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The share stays as it is, because nothing else is read meanwhile."""
    looks = count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) / 1000)
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "LOOK_S", 0.001)

    async def run() -> None:
        reads = await known()
        reads.hedged = FIRST_FEW + reads.asked
        reads._rested_s = rested_s = clock.monotonic() + 0.1  # noqa: SLF001
        assert not reads.may_hedge()

        async def right_once_rested() -> bytes:
            assert clock.monotonic() >= rested_s
            return b"right"

        calls = Calls(never, right_once_rested)
        assert await reads.read(calls, "file") == b"right"
        assert (calls.asked, calls.cancelled) == (2, 1)

    asyncio.run(run())


def test_a_cancelled_read_leaves_no_request_behind() -> None:
    async def run() -> None:
        reads, calls = await known(), Calls(never, never)
        task = asyncio.ensure_future(reads.read(calls, "file"))
        await calls.asked_twice.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls.cancelled == 2
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_only_a_limited_share_is_requested_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as no second has passed, after which one more may be."""
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: 0.0))

    async def run() -> int:
        reads = await known()
        for _ in range(10 * KNOWN):
            reads._sorted = [0.0] * KNOWN  # noqa: SLF001 so that all is late
            reads._latest.clear()  # noqa: SLF001
            late = reads.may_hedge()
            calls = Calls(broken_later, right) if late else Calls(right)
            await reads.read(calls, "file")
        return reads.hedged

    hedged = asyncio.run(run())
    assert 0 < hedged <= FIRST_FEW + MAX_SHARE * 11 * KNOWN + 1


def test_a_default_limit_applies_until_enough_reads_are_known() -> None:
    reads = HedgedReads()
    for number in range(KNOWN - 1):
        reads._note(float(number))  # noqa: SLF001
    assert reads.late_s() == patience.UNKNOWN_LATE_S
    reads._note(1000.0)  # noqa: SLF001
    assert reads.late_s() == pytest.approx(2.0 * 17)
    for _ in range(patience.REMEMBERED):
        reads._note(2.0)  # noqa: SLF001
    assert reads.late_s() == 4.0


def test_a_stall_among_the_first_reads_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "UNKNOWN_LATE_S", 0.01)

    async def run() -> None:
        reads, calls = HedgedReads(), Calls(never, right)
        assert await reads.read(calls, "file") == b"right"
        assert (reads.hedged, calls.cancelled) == (1, 1)

    asyncio.run(run())


NUMBERS = {f"{n:04d}.bin": n.to_bytes(2, "big") * 300 for n in range(600)}

LATTER = frozenset([*NUMBERS][300:])


@pytest.mark.long
@pytest.mark.parametrize("hedge", [True, False])
def test_a_store_that_fails_and_stalls_delivers_every_file_once(
    hedge: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stall lasts until the server ends, or for a second without hedging."""
    monkeypatch.setattr(files, "STALLED_S", 3600.0 if hedge else 1.0)
    faults: dict[str, list[Any]] = {f"{n:04d}.bin": [503] for n in range(50, 600, 97)}
    stalls = {f"{n:04d}.bin": ["stall"] for n in (130, 402, 405, 407)}
    with served(NUMBERS, latency_s=0.002, faults=faults | stalls) as store:
        urls = [f"{store.url}/{name}" for name in NUMBERS]
        pipe = ps.Pipeline.from_files(
            urls, backoff=0.01, num_parallel_workers=8, hedge=hedge
        )
        with pipe.batch(50, collate_fn=list) as batches:
            contents = [content for batch in batches for content in batch]
        # The first files are also read ahead for the next epoch, as far as time allows.
        requests = sum(store.asked[name] for name in LATTER)
    assert contents == [*NUMBERS.values()]
    wrong = sum(name in LATTER for name in faults | stalls)
    assert len(LATTER) + wrong <= requests <= 1.5 * (len(LATTER) + wrong)
