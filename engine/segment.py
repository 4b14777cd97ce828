"""A segment at run time: its connector, the workers it has now, and its two knobs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from ..system.run_queue import RunQueue
from .core.connector import Connector
from .core.core import FAR_LEASE_NS, LEASE_NS
from .observe.knob import Knob
from .observe.observation import Move
from .recipe import SegmentRecipe
from .workers.coroutines import Coroutines
from .workers.inline import Inline
from .workers.pool import Crew
from .workers.threads import Threads

__all__ = [
    "Hire",
    "Kind",
    "Segment",
    "hire",
]

# Which crew works for a segment: one for each kind of workers.

Kind = Literal["inline", "thread", "process", "async"]


def hire(
    connector: Connector,
    recipe: SegmentRecipe,
    seed: int,
    children: Callable[[], Crew],
    kind: Kind,
) -> Crew:
    """Make the crew of one kind; it has no workers yet.

    Args:
        connector: where they take their leases.
        recipe: of the segment.
        seed: of the samples' random streams.
        children: makes a crew of processes, which share what the engine owns.
        kind: of the workers.
    """
    program = recipe.program
    match kind:
        case "inline":
            return Inline(connector, program, seed)
        case "thread":
            return Threads(connector, program, seed, recipe.name)
        case "async":
            return Coroutines(connector, program, seed, recipe.name, recipe.timeout_s)
        case "process":
            return children()


Hire = Callable[[Kind], Crew]
"""Makes the crew of one kind for this segment."""

MOST_MOVES = 16
"""That are remembered."""
MOST_PREFETCH = 128
"""Upper bound of a prefetch size, in batches; the memory budget binds long before."""


class Segment:
    """One segment of a running engine.

    Its workers may be exchanged for others of another kind while it runs: the new ones
    take leases from the same connector, the old ones leave after those they have. Only
    the trainer's thread does that; knobs may be turned by another.
    """

    def __init__(self, recipe: SegmentRecipe, connector: Connector, hire: Hire) -> None:
        self.recipe = recipe
        self.connector = connector
        self.undecided = recipe.executor == "auto"
        """Whether it runs inline until it has shown what a batch costs."""
        self.weighed_at = 0
        """Workers it had when the mover last made up its mind about their kind."""
        self._hire = hire
        self._lock = threading.Lock()
        """Guards `_crew` and `_asked`: a crew that leaves must not be resized."""
        self._asked = recipe.num_parallel_workers
        self._prefetch = recipe.prefetch_size
        start: Kind = "inline" if recipe.executor == "auto" else recipe.executor
        self._crew = hire(start)
        self._leaving: list[Crew] = []
        self.run_queue = RunQueue(self._threads)
        self.moves: deque[Move] = deque(maxlen=MOST_MOVES)
        """The latest from one kind of workers to another, and why."""
        self._tell_flow()

    @property
    def executor(self) -> str:
        """The kind of workers it has now."""
        return self._crew.executor

    @property
    def movable(self) -> bool:
        """Whether it may be moved between threads and processes."""
        recipe = self.recipe
        return recipe.movable and recipe.thread_safe and recipe.timeout_s is None

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
        with self._lock:
            self._asked = count
            self._crew.resize(count)
        self._tell_flow()

    def set_prefetch(self, batches: int) -> None:
        """Let it work so many batches ahead."""
        self._prefetch = batches
        self._tell_flow()

    def move(self, kind: Kind, workers: int | None = None) -> None:
        """Give the work to workers of another kind; returns at once, nothing drains.

        Args:
            kind: of the new workers.
            workers: how many; None: as many as were asked for.
        """
        with self._lock:
            before, self._crew = self._crew, self._hire(kind)
            self._leaving.append(before)
            if workers is not None:
                self._asked = workers
            self._crew.resize(self._asked)
            before.retire()
        self._tell_flow()

    def settled(self) -> bool:
        """Whether all workers of the kind before have left; forgets those that did."""
        for crew in [crew for crew in self._leaving if not crew.statistics().alive]:
            crew.close()
            self._leaving.remove(crew)
        return not self._leaving

    def close(self) -> None:
        """Stop the workers and wait for them. The gate is closed already."""
        for crew in (self._crew, *self._leaving):
            crew.close()

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

    def _threads(self) -> list[str]:
        return self._crew.threads()

    def _tell_flow(self) -> None:
        gate, at = self.connector.gate, self.connector.segment
        with gate.lock:
            far = self.executor == "process"
            workers = self.num_parallel_workers
            if far:  # as many leases again, or half as many, wait at their children
                workers += -(-workers // 2)
            gate.flow.set_workers(at, workers, FAR_LEASE_NS if far else LEASE_NS)
            # The trainer works on demand: one batch, the one it asks for.
            gate.flow.set_prefetch(at, 1 if self.inline else self._prefetch)
            gate.ring()

    def __repr__(self) -> str:
        return (
            f"<Segment {self.recipe.name}: {self.num_parallel_workers} {self.executor} "
            f"workers, prefetch {self.prefetch_size}>"
        )
