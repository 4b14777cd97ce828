"""A program whose functions are coroutine functions, run in an event loop.

The rows of a chunk are awaited one after another. Rows that wait long are leased one by
one (core.py sizes leases by time), and many leases wait at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..batch.layout import size_of
from ..core.chunk import Chunk, Outcome, Parts
from .program import FAILED, Calling, Calls, Program, Sink, Work
from .randomness import SampleRandom


@dataclass(frozen=True, slots=True)
class Awaiting:
    """Runs a program in the running loop.

    Args:
        program: all its functions are coroutine functions.
        timeout_s: limit for one sample in seconds; None means no limit.
        ending: whether the loop's tasks are being cancelled. A cancellation at any
            other time comes from the function, and is a failure like any exception.
    """

    program: Program
    timeout_s: float | None
    ending: Callable[[], bool]

    async def run(
        self,
        chunk: Chunk,
        inputs: list[Any] | None,
        sink: Sink | None,
        random: SampleRandom,
    ) -> Outcome:
        """Work on a chunk as `Program.run` does; the CPU time is not known.

        `random` must belong to this lease alone until it is done: others run meanwhile.
        """
        start_ns = time.perf_counter_ns()
        work = Work(chunk, random, inputs or [])
        parts: Parts = ()
        made_ns = 0
        for operation in self.program.operations:
            assert isinstance(operation, Calling)
            calls = operation.begin(work)
            await self._make(calls, operation.stage)
            operation.finish(work, calls.results)
            before_ns, made_ns = made_ns, time.perf_counter_ns() - start_ns
            nbytes = size_of(work.samples[0]) if work.samples else 0
            parts += ((made_ns - before_ns, 0, nbytes),)
        outcome = self.program.finish(work, sink)
        outcome.run_ns = time.perf_counter_ns() - start_ns
        outcome.parts = self.program.parted(parts, outcome, made_ns)
        return outcome

    async def _make(self, calls: Calls, stage: str) -> None:
        """Make the calls and await each, setting failures aside."""
        samples: list[Any] = []
        failed: set[int] = set()
        for at in range(calls.number):
            try:
                samples.append(await self._limited(calls, stage))
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and self.ending():
                    raise
                failed.add(at)
                calls.results.fail(at, error, stage)
                samples.append(FAILED)
        calls.results.take(samples, failed)

    async def _limited(self, calls: Calls, stage: str) -> Any:
        if self.timeout_s is None:
            return await next(calls.each)
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await next(calls.each)
        except TimeoutError as error:
            if not limit.expired():
                raise  # a TimeoutError of the function's own
            raise TimeoutError(
                f"{stage} was still waiting for this sample after its `timeout` of "
                f"{self.timeout_s:g} s, and was cancelled; raise `timeout`, or let the "
                "function retry with a shorter time limit of its own"
            ) from error
