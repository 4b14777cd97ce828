"""What holds a trainer up: one of a few causes, and what would help, as code to paste.

Pure. All rules look at the same window; the first one that applies gives the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from ..engine.observe.observation import (
    KnobName,
    Observation,
    PartObservation,
    Restriction,
    SegmentObservation,
    is_chosen,
    ratio,
)
from ..system.printing import figures
from ..system.resources import Budget
from ..system.run_queue import APART_NS
from . import phrases
from .window import (
    BUSY,
    HELD_BACK,
    MOSTLY,
    QUEUED,
    TRUSTED_S,
    always_ready,
    busy,
    busy_cores,
    collate_s,
    computes,
    cores_used,
    fitting,
    held_back,
    in_line,
    needed_prefetch,
    needed_workers,
    no_core_free,
    outbox,
    outlasts,
    queued,
    rows_in,
    take_turns,
    trainer_queued,
)

ENOUGH = 1.2
"""This many times the present workers may be needed, given the uncertainty."""
QUEUE_TOLD_S = 2 * APART_NS / 1e9
"""A window this long contains two measurements of the run queue, so waits are known."""
SHORT_READ_S = 0.000_05
"""Seconds per sample: a disk takes longer; reading cached file data is computing."""
COLLATE = "Batch("
"""Prefix of the names of parts and segments that collate."""
DEVICE = "to_device"
STEP_UP = 3
"""How many times the present workers are advised at once: nobody knows what many more
cost one another, in a store that is crowded or at a lock."""
WORKERS: KnobName = "num_parallel_workers"
MIN_SHARE = 0.2
"""Share of the busy cores above which the trainer's own are worth a word."""
COUNTLESS = 1000
"""Workers above which a need only says that the trainer does next to nothing."""
TUNE = "ps.set_enable_autotune(True)"
ROOM, RECORD_BYTES = 1.1, 256
"""Bytes of a cache per byte of its samples, and per sample: the overhead of records."""
OWN_THREADS = 1.5
"""CPU time of worker processes beside that of their workers, above which their
functions start threads: what else a process does takes some hundredths."""


class Restricted(NamedTuple):
    """A setting that would help, and may not be changed."""

    knob: KnobName
    why: str


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of the trainer's wait."""

    text: str
    """In one sentence."""
    advice: tuple[str, ...] = ()
    """What to do next, as code; empty if nothing is justified."""
    stage: str | None = None
    """The operator responsible, if not the longest of the busiest segment."""
    restricted: Restricted | None = None
    """What keeps its cure from the tuner, as the text says."""


class Cure(NamedTuple):
    """What would remove a cause."""

    advice: tuple[str, ...] = ()
    restricted: Restricted | None = None

    def of(self, text: str, stage: str | None = None) -> Cause:
        """Return the cause, described in a sentence without its end."""
        held = "" if self.restricted is None else f"; {self.restricted.why}"
        return Cause(f"{text}{held}.", self.advice, stage, self.restricted)


@dataclass(frozen=True, slots=True)
class Window:
    """One window of a waiting trainer, and the segment whose workers are busiest."""

    seen: Observation
    segment: SegmentObservation
    budget: Budget
    tuned: bool
    """Whether the autotuner is running: what it does by itself is not advised."""

    @property
    def part(self) -> PartObservation:
        """The operation of the segment that takes longest."""
        segment = self.segment
        whole = PartObservation(
            segment.name, segment.run_s_per_row, 0.0, None, segment.cpu_s_per_row
        )
        taken_s = seconds_of(self.seen, segment)
        longest = max(segment.parts, key=taken_s, default=whole)
        return longest if longest.run_s_per_row else whole

    @property
    def name(self) -> str:
        """Short name of that operation."""
        return phrases.short_name(self.part.name)

    @property
    def needed(self) -> float:
        """Workers that keep up with the trainer."""
        return needed_workers(self.seen, self.segment)

    @property
    def computes(self) -> bool:
        """Whether the operation is mostly on a CPU.

        Of processes, it is if the rest is shorter than a read: they wait for a core.
        """
        cpu_s, run_s = self.part.cpu_s_per_row, self.part.run_s_per_row
        short = run_s - cpu_s < SHORT_READ_S and cpu_s >= MOSTLY * run_s
        apart = self.segment.executor == "process"
        return computes(cpu_s, run_s) or (apart and short)

    @property
    def pinned(self) -> str:
        """Why the tuner may change none of its settings; empty if it may."""
        held = self.segment.held
        return held if self.tuned and held == Restriction.PINNED else ""

    @property
    def why_here(self) -> str:
        """Why its work may not go to processes; empty if it may."""
        segment, since_s = self.segment, self.seen.time_s - TRUSTED_S
        tried = any(
            move.time_s > since_s and "process" in (move.old, move.new)
            for move in (*segment.moves, *self.seen.moves)
            if move.outcome == "moved"
        )
        lost = Restriction.TRIED if self.tuned and tried else ""
        return self.pinned or segment.stays or lost

    @property
    def why_no_more(self) -> str:
        """Why it may not have more workers; empty if it may."""
        segment = self.segment
        if segment.iterable:
            return Restriction.ITERABLE
        if segment.executor == "inline":
            return self.pinned or segment.stays
        if segment.held and segment.held != Restriction.PINNED:
            return segment.held
        if segment.num_parallel_workers == segment.max_workers:
            _, shared = Restriction.SHARED.split("{}")
            if segment.max_workers == 1 and segment.stays.endswith(shared):
                return segment.stays  # which is why the bound is one
            return self.pinned or Restriction.BOUNDED.format(self.them)
        return self.pinned

    @property
    def them(self) -> str:
        """Its workers, counted."""
        workers = self.segment.num_parallel_workers
        return f"{workers} worker{'s' if workers > 1 else ''}"

    @property
    def torchs(self) -> bool:
        """Whether to use the words of torch's loader."""
        return self.seen.face == "DataLoader"


def seconds_of(
    observation: Observation, segment: SegmentObservation
) -> Callable[[PartObservation], float]:
    """Return a function that tells how long an operation takes per sample.

    An operation that gets the GIL back from computing threads waits for milliseconds,
    however little it does. In that case its time on a CPU is used.
    """
    turns = segment.num_parallel_workers > 1 and take_turns(observation, segment)
    return attrgetter("cpu_s_per_row" if turns else "run_s_per_row")


def busiest(observation: Observation) -> SegmentObservation:
    """Return the segment whose workers are busiest.

    The trainer waits for all of the work it does itself, however long it is away.
    """

    def burden(segment: SegmentObservation) -> tuple[float, float]:
        alive_s, edge = segment.worker_s, segment.output.utilization
        if segment.executor == "inline" and observation.trainer.wait_s > 0:
            alive_s = max(segment.run_s, observation.trainer.wait_s)
        share = round(ratio(segment.run_s, alive_s), 2)
        return share, segment.input_utilization - edge

    return max(observation.segments, key=burden)


def of_trainer(share: float) -> Cause:
    """Return the cause if loading keeps up, and the trainer waits this share."""
    return Cause(f"the trainer: loading keeps up with it (wait {100 * share:.1f}%).")


def of_slowdown(window: Window) -> Cause:
    """Return the cause if loading costs more of the trainer's own part than a wait."""
    seen, found = window.seen, window.seen.contention
    assert found is not None
    text = (
        "loading slows the trainer: its own part of a step takes"
        f" {figures(1000 * found.beside_s)} ms while batches are loaded beside it,"
        f" {figures(1000 * found.alone_s)} ms while none are"
    )
    here = (s for s in seen.segments if s.is_here and s.executor != "inline")
    workers = sum(segment.num_parallel_workers for segment in here)
    tune, cores = () if window.tuned else (TUNE,), figures(window.budget.cpu_cores)
    if no_core_free(seen, window.budget):
        return Cause(
            f"{text}. They share the cores: {seen.used_cores:.1f} of {cores} are busy,"
            f" with {workers} workers beside {seen.torch_threads} threads of torch.",
            (*tune, *_of_torch(window)),
        )
    if (queue := trainer_queued(seen)) >= QUEUED:
        return Cause(
            f"{text}. It waits for a core for {queue:.0%} of that, as its process, with"
            f" {workers} workers, has {seen.used_cores:.1f} of {cores}, with others"
            " beside it.",
            tune,
        )
    threads = [segment for segment in seen.segments if segment.executor == "thread"]
    if threads:
        busiest_one = max(threads, key=attrgetter("run_s"))
        held = (
            "" if seen.gil_held is None else f" (held {seen.gil_held:.0%} of the time)"
        )
        return _of_processes(replace(window, segment=busiest_one)).of(
            f"{text}. The {workers} workers are threads, which take the GIL{held}"
        )
    return Cause(f"{text}. They share the memory and the caches of the cores.")


def _of_torch(window: Window) -> tuple[str, ...]:
    """Advise fewer threads of torch, if those of the trainer take loading's cores."""
    seen, cores = window.seen, window.budget.cpu_cores
    share = 1.0 - ratio(seen.cpu_cores, seen.used_cores)
    wanted = max(1, round(cores * share))
    fewer = wanted < seen.torch_threads and share >= MIN_SHARE
    return (f"torch.set_num_threads({wanted})",) if fewer else ()


def of_wait(window: Window) -> Cause:
    """Return the cause of a trainer's wait."""
    causes = (rule(window) for rule in RULES)
    return next((each for each in causes if each), None) or _of_work(window)


# Rules, in order


def _of_device(window: Window) -> Cause | None:
    trainer = window.seen.trainer
    if ratio(trainer.copy_s, trainer.wait_s) < MOSTLY:
        return None
    copy_ms = 1000 * ratio(trainer.copy_s, trainer.steps)
    wait_ms = 1000 * ratio(trainer.wait_s, trainer.steps)
    return Cause(
        f"the transfer to the device: it takes {copy_ms:.2f} of the {wait_ms:.2f} ms"
        " that each step waits; the batch itself was ready before.",
        stage=DEVICE,
    )


def _of_collate(window: Window) -> Cause | None:
    """Collating in the trainer's thread; in workers it is a part like any other.

    Workers may do it if they do the rest, too, which the trainer makes itself so far.
    """
    trainer, last = window.seen.trainer, window.seen.segments[-1]
    alone = window.segment is last and last.executor == "inline"
    spent_s = collate_s(window.seen, last)
    if not spent_s:
        return None
    wait_ms = 1000 * ratio(trainer.wait_s, trainer.steps)
    cure = _of_workers(window) if alone else Cure()
    return cure.of(
        f"collate: putting samples together takes the trainer {1000 * spent_s:.2f} of"
        f" the {wait_ms:.2f} ms that each step waits",
        last.queue_name,
    )


def _of_memory(window: Window) -> Cause | None:
    seen, budget, source = window.seen, window.budget, window.seen.segments[0]
    short = ratio(source.wait_memory_s, source.worker_s) >= HELD_BACK
    workers, rows = window.segment.num_parallel_workers, rows_in(seen, budget)
    full = 0 < rows < ENOUGH * workers < window.needed
    if not (short or full) or outbox(seen).empty <= MOSTLY:
        return None
    limit = phrases.size(budget.memory_bytes)
    held = f"({phrases.size(seen.held_bytes)} held of {limit})"
    text = (
        f"the memory budget: workers are held back although no batch is ready {held}."
    )
    if not short:
        fits = budget.memory_bytes // seen.batch_bytes
        text = (
            f"the memory budget: it has room for {fits} batches {held}, whose samples"
            f" are no work for more than {rows} workers."
        )
    if 2 * seen.batch_bytes > budget.memory_bytes:
        text = (
            "the memory budget: it has room for only one batch"
            f" ({phrases.size(seen.batch_bytes)} of {limit}), so the next one is not"
            " made before the trainer has taken it."
        )
    return Cause(text, _of_more(budget.memory_bytes, budget.free_bytes))


def _of_more(present: int, free: int) -> tuple[str, ...]:
    """Advise twice the bytes, if the machine has them to spare."""
    wanted = 2 * present if not free else min(2 * present, free // 2)
    if wanted <= present:
        return ()
    unit, name = (
        (phrases.GIB, "GiB") if wanted >= 4 * phrases.GIB else (phrases.MIB, "MiB")
    )
    return (f'ps.set_memory_budget("{ceil(wanted / unit)}{name}")',)


def _of_contention(window: Window) -> Cause | None:
    seen, trainer = window.seen, window.seen.trainer
    inline = window.segment.executor == "inline"
    if inline or not always_ready(seen) or not trainer.steps:
        return None
    wait_ms = 1000 * ratio(trainer.wait_s, trainer.steps)
    what = "for the hand-over"
    turns = take_turns(seen, window.segment)
    if turns:
        what = "for the GIL, which the loading threads hold"
    elif seen.contention is not None and seen.contention.certain:
        what = "because loading takes the GIL and cores"
    cure = _of_processes(window) if turns else Cure()
    return cure.of(
        f"contention: a batch is ready {100 * (1.0 - outbox(seen).empty):.0f}% of the"
        f" time, and the trainer waits {figures(wait_ms)} ms all the same, {what}"
    )


def _of_gil(window: Window) -> Cause | None:
    segment = window.segment
    if segment.num_parallel_workers == 1 or not take_turns(window.seen, segment):
        return None
    held = 100 * (window.seen.gil_held or 0.0)
    # In the batch, threads only copy rows. They wait for the GIL there, but hold it
    # while they read and compute.
    holders = [part for part in segment.parts if not part.name.startswith(COLLATE)]
    holder = max(holders, key=attrgetter("cpu_s_per_row"), default=window.part).name
    text = (
        f"the GIL: held {held:.0f}% of the time, so the {segment.num_parallel_workers}"
        f" threads of {phrases.short_name(holder)} take turns"
    )
    return _of_processes(window).of(text, holder)


def _of_processes(window: Window) -> Cure:
    """Advise worker processes if cores are free, unless the tuner moves work itself."""
    segment, why = window.segment, window.why_here
    if queued([segment]) >= QUEUED or cores_used(window.seen, window.budget):
        return Cure()
    held = Restricted("executor", why) if why else None
    if not is_chosen(why) and (why or window.tuned):
        return Cure((), held)
    if window.torchs:
        return Cure(("DataLoader(thread_safe=False)",), held)
    return Cure((f'executor="process"  # for {segment.name}, or "auto"',), held)


def _of_lock(window: Window) -> Cause | None:
    """Return the cause if threads take turns at a lock that is not the GIL."""
    segment, share = window.segment, in_line(window.segment)
    if share < MOSTLY:
        return None
    return _of_processes(window).of(
        f"a lock: the {segment.num_parallel_workers} threads of {window.name} wait for"
        f" one lock {share:.0%} of their time, so they take turns"
    )


def _of_cores(window: Window) -> Cause | None:
    if not cores_used(window.seen, window.budget):
        return None
    used, allowed = busy_cores(window.seen), figures(window.budget.cpu_cores)
    text = (
        f"CPU: {used:.1f} of {allowed} cores are busy loading, most of it {window.name}"
    )
    if not window.budget.whole_machine:
        text += "; other pipelines have the rest, or ps.set_cpu_budget leaves it out"
    return Cause(f"{text}.", _of_fused(window))


def _of_others(window: Window) -> Cause | None:
    seen, segment, run_s = window.seen, window.segment, window.part.run_s_per_row
    share = queued([segment])
    if share < QUEUED:
        return None
    waits = (
        f"CPU: {window.name} waits for a core for {phrases.ms(share * run_s)} of"
        f" {phrases.ms(run_s)} ms a sample, while"
    )
    settled = ratio(segment.settled_s, segment.run_s) or 1.0  # only that has CPU time
    times = ratio(settled * segment.threads_cpu_s, segment.cpu_s)
    if segment.executor == "process" and times >= OWN_THREADS:
        return Cause(
            f"{waits} threads that it starts itself use them, {times:.1f} times as much"
            " as the workers; let it start fewer, as torch.set_num_threads(1) does."
        )
    own = seen.used_cores - seen.cpu_cores
    if own >= MIN_SHARE * seen.used_cores and no_core_free(seen, window.budget):
        return Cause(
            f"{waits} the trainer itself keeps {own:.1f} of"
            f" {figures(window.budget.cpu_cores)} busy, with {seen.torch_threads}"
            " threads of torch.",
            (*_of_torch(window), *_of_fused(window)),
        )
    return Cause(f"{waits} others use them.", _of_fused(window))


def _of_first_batches(window: Window) -> Cause | None:
    """Return the cause if loops are so short that first batches make up the wait."""
    trainer = window.seen.trainer
    if window.segment.executor == "inline" or not trainer.wait_s:
        return None
    share = trainer.first_s / trainer.wait_s
    if share < MOSTLY:
        return None
    return Cause(
        f"the beginning of epochs: {100 * share:.0f}% of the wait is for first batches,"
        " which are not made before a loop begins."
    )


def _of_unevenness(window: Window) -> Cause | None:
    """Return the cause if there are enough workers, but they wait for slow rows."""
    segment, seen = window.segment, window.seen
    held = held_back(seen, segment)
    few = segment.executor == "inline" or segment.num_parallel_workers == 1
    few = few or window.part.name.startswith(COLLATE)
    few = few or window.needed > ENOUGH * segment.num_parallel_workers
    late = held >= HELD_BACK or outlasts(seen, segment)
    if few or not late or always_ready(seen) or busy(segment) >= BUSY:
        return None
    back = f"are held back {held:.0%} of the time" if held >= HELD_BACK else "wait"
    prefetch = segment.prefetch_size
    ahead = "batch" if prefetch == 1 else f"{prefetch} batches"
    return _of_prefetch(window).of(
        f"uneven samples: the workers of {window.name} {back}, as the {ahead} that may"
        f" be prefetched wait{'s' * (prefetch == 1)} for"
        f" {'its' if prefetch == 1 else 'their'} slowest samples",
    )


def _of_prefetch(window: Window, workers: int = 0) -> Cure:
    """Advise more batches ahead, if the budget has room for them.

    Args:
        window: that shows the need.
        workers: as many as are advised, too; 0: the present ones stay.
    """
    segment, seen = window.segment, window.seen
    present, wanted = segment.prefetch_size, needed_prefetch(seen, segment)
    wanted = fitting(seen, window.budget, present, wanted)
    if wanted == present:
        more = _of_more(window.budget.memory_bytes, window.budget.free_bytes)
        return Cure(more, Restricted("prefetch_size", Restriction.MEMORY))
    if window.tuned:
        return Cure(
            (), Restricted("prefetch_size", window.pinned) if window.pinned else None
        )
    if not window.torchs:
        return Cure((TUNE, f"ps.set_prefetch_size({wanted})"))
    each = ceil(wanted / (workers or segment.num_parallel_workers))
    return Cure((TUNE, f"DataLoader(prefetch_factor={max(2, each)})"))


RULES: tuple[Callable[[Window], Cause | None], ...] = (
    _of_device,
    _of_collate,
    _of_memory,
    _of_contention,
    _of_gil,
    _of_lock,
    _of_cores,
    _of_others,
    _of_first_batches,
    _of_unevenness,
)


# What a segment does with its time


def _of_work(window: Window) -> Cause:
    if window.part.run_s_per_row == 0.0:
        return Cause(f"{window.name} has not finished a sample yet.")
    full, more = _of_cache(window)
    text = f"{_spent(window)}{_on_whom(window)}{_starved(window)}{full}."
    cure = _of_workers(window)
    advice = more or (*cure.advice, *_of_fused(window))
    return Cause(text, advice, restricted=cure.restricted)


def _spent(window: Window) -> str:
    part, segment, name = window.part, window.segment, window.name
    run_ms, cpu_ms = phrases.ms(part.run_s_per_row), phrases.ms(part.cpu_s_per_row)
    if part.name.startswith(COLLATE):
        whole_ms = phrases.ms(segment.run_s_per_row)
        return (
            f"collate: putting samples together takes {run_ms} of {whole_ms} ms a"
            " sample"
        )
    if window.computes:
        return f"CPU: {name} computes {cpu_ms} ms a sample"
    if _takes_turns(window):
        return (
            f"the GIL: {name} computes {cpu_ms} of {run_ms} ms a sample, in short calls"
            " that release the GIL and then wait to get it back"
        )
    inline = segment.executor == "inline"
    told = inline or window.seen.window_s >= QUEUE_TOLD_S
    what = "reads (I/O or locks)" if told else "(a longer run shows for what)"
    blocked_ms = phrases.ms(part.run_s_per_row - part.cpu_s_per_row)
    return f"waiting {what}: {name} is blocked for {blocked_ms} of {run_ms} ms a sample"


def _takes_turns(window: Window) -> bool:
    """Whether threads are blocked by the GIL: a read would block for longer."""
    part = window.part
    blocked_s = part.run_s_per_row - part.cpu_s_per_row
    threads = window.segment.executor == "thread"
    return threads and blocked_s < SHORT_READ_S and blocked_s < 3 * part.cpu_s_per_row


def _on_whom(window: Window) -> str:
    """Describe who does the work, and how many the trainer needs."""
    segment, needed, why = window.segment, window.needed, window.why_no_more
    workers, countless = segment.num_parallel_workers, needed >= COUNTLESS
    if segment.iterable:
        return f"; {why}"
    if segment.executor == "inline":
        return f", in the trainer's own time{'; ' * bool(why)}{why}"
    if needed <= workers:
        return f", on {window.them}"
    wanted = phrases.count(needed)
    if why or countless:
        needs = "takes all it can get" if countless else f"needs {wanted}"
        return f"; {why or window.them}, and this trainer {needs}"
    return f"; too few workers: {workers}, this trainer needs {wanted}"


def _starved(window: Window) -> str:
    """Name the segment that this one leaves without input."""
    segments = window.seen.segments
    for before, after in pairwise(segments):
        idle = ratio(after.wait_input_s, after.worker_s)
        if before is window.segment and idle >= MOSTLY:
            name = phrases.short_name(after.name)
            return f", so {name} has no input {100 * idle:.0f}% of the time"
    return ""


def _of_workers(window: Window) -> Cure:
    """Advise the tuner, or as many workers as cores and bounds allow."""
    segment, why = window.segment, window.why_no_more
    knob: KnobName = "executor" if segment.executor == "inline" else WORKERS
    enough = knob == WORKERS and window.needed <= segment.num_parallel_workers
    held = Restricted(knob, why) if why and not enough else None
    if window.tuned and segment.fixed and segment.fixed in why:
        without = f"DataLoader(...)  # without {segment.fixed}, to let workers load"
        return Cure((without,), held)
    if window.tuned or why:
        return Cure((), held)
    workers, advice = _of_number(window)
    if advice and outlasts(window.seen, segment):  # more workers alone are no help
        ahead = _of_prefetch(window, workers)
        more = tuple(line for line in ahead.advice if line not in advice)
        return Cure((*advice, *more), ahead.restricted)
    return Cure(advice)


def _of_number(window: Window) -> tuple[int, tuple[str, ...]]:
    """Return a number of workers, where one follows from what is known, as advice."""
    segment, tune = window.segment, (TUNE,)
    unsure = window.part.run_s_per_row < SHORT_READ_S or _takes_turns(window)
    if segment.executor == "inline" or (unsure and not window.computes):
        return 0, tune  # how many would help must be tried
    most = STEP_UP * segment.num_parallel_workers
    if window.computes:
        most = min(most, ceil(window.budget.cpu_cores))
    room = rows_in(window.seen, window.budget)
    needed = min(
        ceil(window.needed / BUSY), *filter(None, (most, segment.max_workers, room))
    )
    if needed <= segment.num_parallel_workers:
        return 0, ()
    if window.torchs:
        return needed, (*tune, f"DataLoader(num_workers={needed})")
    return needed, (*tune, f"num_parallel_workers={needed}  # for {segment.name}")


def _of_cache(window: Window) -> tuple[str, tuple[str, ...]]:
    """Say that a cache after the operation is too small, and advise room for all.

    Its misses are then what the operation is busy with, in every epoch.
    """
    for each in window.seen.caches:
        after = phrases.number_of(each.name) > phrases.number_of(window.part.name)
        if not after or each.refused < MOSTLY * each.misses or not each.stored:
            continue
        room = room_for(window.part.storable or 0, each.stored_bytes / each.stored)
        text = (
            f"; {each.name} finds {each.hit_share:.0%} of the samples, and has no room"
            " for the others"
        )
        fits = 0 < 2 * room <= window.budget.free_bytes
        if not fits or all(tier.name != "RAM" for tier in each.tiers):
            return text, ()
        return text, (f'ram="{ceil(room / phrases.MIB)}MiB"  # for {each.name}',)
    return "", ()


def room_for(samples: int, sample_bytes: float) -> int:
    """Return the bytes that a cache needs for so many samples of this size."""
    return int((ROOM * sample_bytes + RECORD_BYTES) * samples)


def _of_fused(window: Window) -> tuple[str, ...]:
    """Advise one pass over each image, if images are decoded and then cropped."""
    folder = window.seen.segments[0].name.startswith("Folder(")
    if not folder or window.torchs or window.name != "decode" or not window.computes:
        return ()
    fused = ".map(ps.image.decode_random_resized_crop(224))  # one pass over each image"
    return (fused,)
