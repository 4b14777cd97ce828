"""What can run: a pipeline compiled into segments, with its plan, buffers and options.

Pipelines and loaders compile to a `Recipe` (pipeline/compile); the engine runs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import StateError, check
from ..system.printing import call, figures
from .batch.buffer import Buffers
from .batch.device import DeviceStage
from .plan import AssignedPlan, Cursor, DrawnPlan, Plan, read_state
from .program.program import Program, ReadOn

if TYPE_CHECKING:
    from ..cache.cache import Cache

Executor = Literal["auto", "inline", "thread", "process", "async", "ray"]
Host = Literal["auto", "trainer", "process"]
StartMethod = Literal["fork", "forkserver", "spawn"]

# Work in a batch that justifies workers: threads, although they may hold the GIL, or
# processes, although each lease costs some 300 us of CPU.
WORTH_WORKERS_NS = 2_000_000
# A batch that will be done within this time is finished inline: workers would hardly be
# ready sooner, and the trainer is waiting for the very first batch.
SOON_NS = 300_000_000
# Work after which a segment can be judged before it has finished a batch.
SURE_NS = 10_000_000
# Loading within one epoch that justifies worker processes which end with the epoch and
# are started again for the next one.
WORTH_START_NS = 500_000_000


@dataclass(frozen=True, slots=True, repr=False)
class Options:
    """Options of the whole pipeline; none changes a byte of any batch.

    Raises:
        SpecError: an option has an invalid value.
    """

    host: Host = "auto"
    """Where work is done: where each stage's workers are (`trainer`), or all of it in
    worker processes."""
    persistent_workers: bool = True
    """Whether worker processes, and prefetched batches, outlive an epoch."""
    multiprocessing_context: StartMethod | None = None
    """How worker processes start; None: by fork, or by forkserver if the dataset or
    functions hold tensors on a CUDA device, which is then an error."""
    name: str = ""
    """Name of the pipeline in the log; empty: the variable that it is stored in."""
    ray_options: Mapping[str, Any] | None = None
    """What each Ray actor claims, and where it may be placed."""

    def __post_init__(self) -> None:
        check(
            self.host in ("auto", "trainer", "process"),
            f"`host` must be 'auto', 'trainer' or 'process', got {self.host!r}"
            "; 'trainer' runs the engine beside the trainer",
        )
        check(
            type(self.persistent_workers) is bool,
            f"`persistent_workers` must be a bool, got {self.persistent_workers!r}"
            "; True keeps the workers between epochs",
        )
        check(
            self.multiprocessing_context in (None, "fork", "forkserver", "spawn"),
            "`multiprocessing_context` must be 'fork', 'forkserver' or 'spawn', got "
            f"{self.multiprocessing_context!r}"
            "; leave it out to let penstock choose",
        )
        check_name(self.name)
        if self.ray_options is not None:  # Ray itself checks their values
            check(
                isinstance(self.ray_options, Mapping)
                and set(self.ray_options) <= set(RAY_OPTIONS),
                f"`ray_options` are the options of a Ray actor that place it,"
                f" {', '.join(RAY_OPTIONS)}, got {self.ray_options!r}; pass, for"
                ' example, ray_options={"num_cpus": 0.5}',
            )
            amounts = [self.ray_options.get(name, 0) for name in RAY_OPTIONS[:3]]
            amounts += dict(self.ray_options.get("resources") or {}).values()
            check(
                all(
                    isinstance(amount, (int, float)) and amount >= 0
                    for amount in amounts
                ),
                "`ray_options` claim amounts >= 0 of num_cpus, num_gpus, memory and"
                f" resources, got {self.ray_options!r}; leave out what an actor need"
                " not have",
            )

    def __repr__(self) -> str:
        return "" if self == AS_SHIPPED else call(".options", self)


def check_name(name: Any) -> None:
    """Check a name for a pipeline in the log.

    Raises:
        SpecError: it is not printable text.
    """
    check(
        isinstance(name, str) and name.isprintable(),
        f"`name` must be a str of printable characters, got {name!r}"
        "; leave it out to name the pipeline after its variable",
    )


# Options of a Ray actor that say where it may run, and with what.
RAY_OPTIONS = (
    "num_cpus",
    "num_gpus",
    "memory",
    "resources",
    "accelerator_type",
    "label_selector",
    "scheduling_strategy",
    "runtime_env",
)


AS_SHIPPED = Options()
# Most batches that a worker process has at once.
ASSIGNED = 4


@dataclass(frozen=True, slots=True)
class SegmentRecipe:
    """One segment, ready to be built."""

    name: str
    """`Map(ID:2) decode`: the operator that its worker count is logged under."""
    queue_name: str
    """The operator that its prefetch size is logged under: it fills the queue."""
    program: Program
    executor: Executor
    """`auto`: inline until it proves to be worth workers, as `resolve` says."""
    num_parallel_workers: int
    bounds: tuple[int, int]
    """Smallest and largest number of workers."""
    prefetch_size: int
    """Batches it may work ahead of its consumer."""
    tunable: bool
    """Whether the tuner may change its settings."""
    thread_safe: bool = True
    """Whether several threads of one process may work on it."""
    timeout_s: float | None = None
    """Limit for one sample, in seconds; None means no limit."""
    stays: str = "its executor is fixed"
    """Why it may not move to another executor than it starts with; empty if it may."""
    subjects: tuple[Any, ...] = ()
    """The dataset and functions it works with: if they change while being used, the
    segment stays where it is."""
    storable: tuple[int | None, ...] = ()
    """For each operation, the samples that a cache after it would hold; None if they
    differ between epochs."""
    per_batch: bool = False
    """Whether it works on whole batches, after the segments that work on samples."""
    in_order: bool = False
    """Whether it must work on one batch after another, in the trainer's thread."""
    unsplit: bool = False
    """Whether one worker makes all rows of a batch: its dataset reads them at once."""
    fixed: str = ""
    """What the program says that leaves the work to the trainer: `num_workers=0`."""
    inner: tuple[SegmentRecipe, ...] = ()
    """What runs in each of its worker processes, if that is several segments."""
    wide: bool = False
    """Whether, in worker processes, it has its own number of threads in all: more than
    there are workers."""
    children: int | None = None
    """Processes that its workers share; None: one for each core."""
    alone_s_per_row: float = 0.0
    """Seconds that a row took the trainer, before workers took over; 0: unknown."""

    @property
    def within(self) -> SegmentRecipe:
        """The same in a worker process, where the main thread is its first worker."""
        return replace(
            self,
            program=replace(self.program, doubtful=(), watched=()),
            executor="async" if self.executor == "async" else "inline",
            prefetch_size=ASSIGNED,
            stays="it is in a worker process",
            subjects=(),
            per_batch=False,
            timeout_s=self.timeout_s if self.executor == "async" else None,
        )

    @property
    def within_all(self) -> tuple[SegmentRecipe, ...]:
        """What runs in each of its worker processes."""
        return self.inner or (self.within,)

    @property
    def more_within(self) -> tuple[bool, ...]:
        """For each of `within_all`, whether a process has more workers than its share.

        These are coroutines, or the threads of a stage that has more than processes.
        """
        return tuple(s.executor == "async" or s.wide for s in self.inner or (self,))

    @property
    def stages(self) -> tuple[str, ...]:
        """The names, as in the log, of all that its workers do."""
        return (
            *self.program.stages,
            *chain.from_iterable(s.program.stages for s in self.inner if s.per_batch),
        )

    @property
    def iterable(self) -> bool:
        """Whether one worker reads it from start to end: an iterable."""
        return isinstance(self.program.operations[0], ReadOn)


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
    """Return what suits a segment of `auto`; None while too little was done to judge.

    This is asked once for each segment, for its first batches, in the trainer's thread.
    Everything later is the tuner's decision.

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
    cost = f"a batch takes {figures(batch_ns / 1e6)} ms"
    line = f"{WORTH_WORKERS_NS / 1e6:g} ms from which handing it over pays"
    if batch_ns <= WORTH_WORKERS_NS:
        return ResolvedExecutor("inline", f"{cost}, less than the {line}")
    resolution = ResolvedExecutor(
        "thread" if thread_safe else "process", f"{cost}, more than the {line}"
    )
    return None if epoch_ns < WORTH_START_NS else resolution


@dataclass(frozen=True, slots=True)
class Recipe:
    """A pipeline that can run."""

    plan: Plan | DrawnPlan | AssignedPlan
    segments: tuple[SegmentRecipe, ...]
    buffers: Buffers
    batch_size: int | None
    """Samples in a batch, if the plan does not deal them; None: a schedule decides."""
    drop_last: bool
    error_budget: float
    """Share of an epoch's samples that may be substituted, 0 to 1."""
    microbatches: int | None
    """Parts that each batch is split into; None leaves it whole."""
    seed: int
    repack: bool
    """Whether batches are formed at run time, from what a filter or iterable leaves."""
    iterable: bool
    device: DeviceStage | None
    options: Options
    cpu_cores: float
    """Cores that its workers may keep busy together."""
    caches: tuple[Cache, ...] = ()
    data: str | None = None
    """Identity of the dataset, if known."""
    batch_work: tuple[SegmentRecipe, ...] = ()
    """Work on whole batches: the last of `segments`. If batches are formed at run time,
    no segment does this work: the feed does it when it has formed a batch."""

    @property
    def direct(self) -> bool:
        """Whether the trainer alone makes the batches at first."""
        first, *others = self.segments
        alone = first.executor in ("auto", "inline") and not others
        # A thread takes over the place in an iterable; another process could not.
        follows = first.thread_safe or not self.iterable
        return alone and follows and self.options.host != "process"

    def elsewhere(self, at: int) -> Recipe:
        """Return what worker processes of segment `at` work by."""
        *before, last = self.segments[at].within_all
        program = last.program
        if not (program.places or last.per_batch):  # there, nothing follows
            last = replace(last, program=replace(program, places=self.buffers.stage))
        return replace(
            self,
            plan=AssignedPlan(),
            segments=(*before, last),
            buffers=self.buffers.elsewhere,
            device=None,
            caches=(),
            batch_work=(),
        )

    @property
    def late_work(self) -> bool:
        """Whether no segment does the work on whole batches, but worker processes do.

        For batches that these do not make as a whole, the trainer does it.
        """
        return bool(self.batch_work) and not (
            self.repack or any(segment.per_batch for segment in self.segments)
        )

    @property
    def collate_seed(self) -> int:
        """Seed of a `collate_fn`'s draws now, together with epoch and batch."""
        return self.seed if isinstance(self.plan, Plan) else self.plan.seed

    @property
    def drawn(self) -> DrawnPlan | None:
        """The plan, if torch's samplers draw the batches; None if it knows them."""
        return self.plan if isinstance(self.plan, DrawnPlan) else None

    def facts(self) -> dict[str, int | str]:
        """Return what must be the same on all ranks."""
        data_facts = {} if self.data is None else {"dataset": self.data}
        return {**self.planned.facts(), **data_facts}

    @property
    def planned(self) -> Plan:
        """The plan of a pipeline, which knows all its batches."""
        assert isinstance(self.plan, Plan)
        return self.plan

    def state(self, cursor: Cursor) -> dict[str, object]:
        """Return `cursor` as O(1) JSON."""
        state = self.planned.state(cursor)
        return state if self.data is None else {**state, "data": self.data}

    def restore(self, state: Mapping[str, object], *, override: bool = False) -> Cursor:
        """Return the cursor in `state`.

        Raises:
            StateError: the state belongs to another plan or dataset, or is damaged.
        """
        plan = self.planned
        data = state.get("data") if isinstance(state, Mapping) else None
        if None not in (data, self.data) and data != self.data and not override:
            raise StateError(
                "the state belongs to another dataset (its files, or its fingerprint,"
                " differ from this one's); build the pipeline on the data it was saved"
                " with, or continue this one from the same position of the epoch with"
                " load_state_dict(state, override=True)"
            )
        if self.repack:  # its batches are not the plan's, so the plan cannot check them
            return read_state(state, plan.hash, plan.facts(), override=override)
        return plan.restore(state, override=override)
