"""A segment at run time: its connector, the workers it has now, and its two knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from .compile import SegmentRecipe
from .connector import Connector
from .knob import Knob
from .segment_state import SegmentState
from .workers.crew import Crew
from .workers.inline import Inline

__all__ = ["Hire", "Segment"]

Kind = Literal["inline", "thread", "process", "async"]
Hire = Callable[[Kind], Crew]
"""Makes the crew of one kind for this segment."""

MOST_PREFETCH = 128
"""Upper bound of a prefetch size, in batches; the memory budget binds long before."""
WORTH_A_THREAD_NS = 500_000
"""Work in a batch from which handing it to a thread pays (a hand-over costs some 50 us
and as much again of the GIL)."""
SURE_NS = 3_000_000
"""Work from which a segment need not finish a whole batch to be judged."""


class Segment:
    """One segment of a running engine.

    A segment with executor `auto` begins inline and moves to threads once it has shown
    that a batch costs more than handing it over: nothing is known of a function before
    it runs.
    """

    def __init__(self, recipe: SegmentRecipe, connector: Connector, hire: Hire) -> None:
        self.recipe = recipe
        self.connector = connector
        self._hire = hire
        self._asked = recipe.num_parallel_workers
        self._prefetch = recipe.prefetch_size
        self._undecided = recipe.executor == "auto"
        start: Kind = "inline" if recipe.executor == "auto" else recipe.executor
        self._crew = hire(start)
        self._tell_flow()

    @property
    def executor(self) -> str:
        """The kind of workers it has now."""
        return self._crew.executor

    @property
    def num_parallel_workers(self) -> int:
        """Workers asked for; inline has one, the trainer."""
        return 1 if self._crew.executor == "inline" else self._asked

    @property
    def prefetch_size(self) -> int:
        """Batches it may work ahead of its reader."""
        return 1 if self.inline else self._prefetch

    @property
    def inline(self) -> Inline | None:
        """Its crew, if that is the trainer itself."""
        return self._crew if isinstance(self._crew, Inline) else None

    def start(self) -> None:
        """Let the workers begin."""
        self._crew.resize(self._asked)

    def set_workers(self, count: int) -> None:
        """Ask for `count` workers; takes hold while work goes on."""
        self._asked = count
        self._crew.resize(count)
        self._tell_flow()

    def set_prefetch(self, batches: int) -> None:
        """Let it work so many batches ahead."""
        self._prefetch = batches
        self._tell_flow()

    def decide(self) -> None:
        """Called between two leases of an inline segment: is it time to use threads?"""
        inline = self.inline
        if inline is None or not self._undecided:
            return
        rows, run_ns = inline.tally
        batch_rows = self.connector.gate.flow.batch_rows
        if rows < batch_rows and run_ns < SURE_NS:
            return
        self._undecided = False
        if run_ns / rows * batch_rows > WORTH_A_THREAD_NS:
            self._move_to("thread")

    def close(self) -> None:
        """Stop the workers and wait for them. The gate is closed already."""
        self._crew.close()

    def knobs(self) -> Iterable[Knob]:
        """Return what may be turned while it runs."""
        recipe = self.recipe
        low, high = recipe.bounds
        if self.inline is None:
            yield Knob(
                recipe.name,
                "num_parallel_workers",
                low,
                high,
                recipe.tunable and low < high,
                lambda: self.num_parallel_workers,
                self.set_workers,
            )
            yield Knob(
                recipe.queue_name,
                "prefetch_size",
                1,
                MOST_PREFETCH,
                recipe.tunable,
                lambda: self.prefetch_size,
                self.set_prefetch,
            )

    @property
    def _state(self) -> SegmentState:
        return self.connector.gate.flow.segments[self.connector.segment]

    def _move_to(self, kind: Kind) -> None:
        """Start workers of another kind on the same connector; the first ones leave."""
        before, self._crew = self._crew, self._hire(kind)
        self._crew.resize(self._asked)
        self._tell_flow()
        before.close()

    def _tell_flow(self) -> None:
        gate, at = self.connector.gate, self.connector.segment
        with gate.lock:
            gate.flow.set_workers(at, self.num_parallel_workers)
            # The trainer works on demand: one batch, the one it asks for.
            gate.flow.set_prefetch(at, 1 if self.inline else self._prefetch)
            gate.ring()

    def __repr__(self) -> str:
        return (
            f"<Segment {self.recipe.name}: {self.num_parallel_workers} {self.executor} "
            f"workers, prefetch {self.prefetch_size}>"
        )
