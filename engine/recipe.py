"""What can run: a pipeline compiled into segments, with its plan, buffers and options.

Pipelines and loaders compile to a `Recipe` (pipeline/compile); the engine runs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..errors import StateError, check
from ..system.printing import call
from .batch.buffer import Buffers
from .batch.device import DeviceStage
from .plan import Cursor, DrawnPlan, Plan, read_state, write_state
from .program.program import Program, ReadOn

if TYPE_CHECKING:
    from ..cache.cache import Cache

Executor = Literal["auto", "inline", "thread", "process", "async"]
Host = Literal["auto", "trainer", "process"]
StartMethod = Literal["fork", "forkserver", "spawn"]


@dataclass(frozen=True, slots=True, repr=False)
class Options:
    """What holds for all stages of a pipeline; it changes no byte of any batch."""

    host: Host = "auto"
    """Where the engine and its threads run: beside the trainer, or in a child."""
    persistent_workers: bool = True
    """Whether worker processes, and what is prefetched, outlive an epoch."""
    multiprocessing_context: StartMethod | None = None
    """How worker processes start; None: by fork, or forkserver where the dataset or
    functions hold tensors on a CUDA device."""
    name: str = ""
    """Of the pipeline, in the log; empty: as the variable that it is stored in."""
    cache: Literal["auto"] | None = None
    """Whether a cache may be placed between two epochs, where it pays."""

    def __post_init__(self) -> None:
        check(
            self.host in ("auto", "trainer", "process"),
            f"`host` must be 'auto', 'trainer' or 'process', got {self.host!r}",
        )
        check(
            type(self.persistent_workers) is bool,
            f"`persistent_workers` must be a bool, got {self.persistent_workers!r}",
        )
        check(
            self.multiprocessing_context in (None, "fork", "forkserver", "spawn"),
            "`multiprocessing_context` must be 'fork', 'forkserver' or 'spawn', got "
            f"{self.multiprocessing_context!r}",
        )
        check_name(self.name)
        check(
            self.cache in (None, "auto"),
            f"`cache` must be 'auto' or None, got {self.cache!r}; for a cache of your"
            " own say .cache(...) where it is to be",
        )

    def __repr__(self) -> str:
        return "" if self == AS_SHIPPED else call(".options", self)


def check_name(name: Any) -> None:
    """Raise `SpecError` unless a pipeline may be called so in the log."""
    check(
        isinstance(name, str) and name.isprintable(),
        f"`name` must be a str that can be printed, got {name!r}",
    )


AS_SHIPPED = Options()


@dataclass(frozen=True, slots=True)
class SegmentRecipe:
    """One segment, ready to be built."""

    name: str
    """`Map(ID:2) decode`: what its worker count is logged under."""
    queue_name: str
    """What its prefetch size is logged under: the stage that fills the queue."""
    program: Program
    executor: Executor
    """`auto`: inline until it shows that it costs enough to be worth a thread."""
    num_parallel_workers: int
    bounds: tuple[int, int]
    prefetch_size: int
    tunable: bool
    thread_safe: bool = True
    """Whether several threads of one process may work on it."""
    timeout_s: float | None = None
    """How long one sample may take."""
    movable: bool = False
    """Whether it may be moved to another executor than it starts with: `auto`."""
    subjects: tuple[Any, ...] = ()
    """The dataset and functions it works with: where they change while they are read,
    the segment stays where it is."""
    storable: tuple[int | None, ...] = ()
    """Of each operation: the samples that a cache behind it would hold; None where each
    epoch has others."""
    per_batch: bool = False
    """Whether it works on whole batches, behind those that work on samples."""
    in_order: bool = False
    """Whether it has to work on one batch after the other, in the trainer's thread."""

    @property
    def iterable(self) -> bool:
        """Whether one worker reads it from its beginning to its end: an iterable."""
        return isinstance(self.program.operations[0], ReadOn)


@dataclass(frozen=True, slots=True)
class BatchRecipe:
    """How samples are dealt into batches where the plan does not say."""

    size: int | None
    """Samples a batch; None: a schedule says."""
    drop_last: bool
    error_budget: float
    """Share of an epoch's samples that may be substituted, 0 to 1."""
    microbatches: int | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A pipeline that can run."""

    plan: Plan | DrawnPlan
    segments: tuple[SegmentRecipe, ...]
    buffers: Buffers
    batch: BatchRecipe
    seed: int
    repack: bool
    """Batches are made from what a filter or an iterable leaves, at run time."""
    iterable: bool
    device: DeviceStage | None
    options: Options
    cpu_cores: float
    """Cores that its workers may keep busy together."""
    caches: tuple[Cache, ...] = ()
    data: str | None = None
    """Which data set it is, if that is known."""
    batch_work: tuple[SegmentRecipe, ...] = ()
    """What is done to whole batches: the last of `segments`, unless batches are made at
    run time. Then it is done by whoever makes them."""

    @property
    def direct(self) -> bool:
        """Whether the trainer alone makes the batches, to begin with."""
        first, *others = self.segments
        alone = first.executor in ("auto", "inline") and not others
        # What reads an iterable takes its place along, as another process could not.
        follows = first.thread_safe or not self.iterable
        return alone and follows and self.options.host != "process"

    def collating(self) -> Recipe:
        """Return the recipe with a `collate_fn` that worker processes call.

        Each makes whole batches then, as torch's do. So where one segment makes them.
        """
        segment, *others = self.segments
        alone = all(other.per_batch for other in others)
        if not alone or self.repack or self.buffers.collate is None:
            return self
        program = replace(segment.program, batches=self.buffers)
        return replace(self, segments=(replace(segment, program=program), *others))

    @property
    def collate_seed(self) -> int:
        """What keys the draws of a `collate_fn` now, beside epoch and batch."""
        return self.plan.seed if isinstance(self.plan, DrawnPlan) else self.seed

    def facts(self) -> dict[str, int | str]:
        """Return what must be the same on all ranks."""
        known = {} if self.data is None else {"data set": self.data}
        return {**self.planned.facts(), **known}

    @property
    def planned(self) -> Plan:
        """The plan of a pipeline, which knows all its batches."""
        assert isinstance(self.plan, Plan)
        return self.plan

    def state(self, cursor: Cursor) -> dict[str, object]:
        """Return `cursor` as O(1) JSON."""
        state = write_state(cursor, self.planned.hash, self.planned.facts())
        return state if self.data is None else {**state, "data": self.data}

    def restore(self, state: Mapping[str, object], *, override: bool = False) -> Cursor:
        """Return the cursor in `state`; StateError if it does not belong here."""
        plan = self.planned
        saved = state.get("data") if isinstance(state, Mapping) else None
        if None not in (saved, self.data) and saved != self.data and not override:
            raise StateError(OTHER_DATA)
        if self.repack:  # its batches are not the plan's, so the plan cannot check them
            return read_state(state, plan.hash, plan.facts(), override=override)
        return plan.restore(state, override=override)


OTHER_DATA = (
    "the state belongs to another data set (its files, or its fingerprint, are not"
    " those of this one); build the pipeline on the data it was saved with, or go on in"
    " this one from the same position of the epoch with load_state_dict(state,"
    " override=True)"
)
