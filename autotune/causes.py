"""What holds a trainer up: one of a few causes, and what would help, as code to paste.

Pure. All rules look at the same window; the first one that applies gives the cause.
Each line of code says what it brings at most, by the law that the tuner follows
(`policies/bottleneck_law.py`). A line that would bring next to nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from ..cache.statistics import MANY, CacheStatistics, found_s, room_for
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
    batch_rows,
    busiest,
    busy,
    busy_cores,
    collate_s,
    computes,
    cores_used,
    fitting,
    headspace_of,
    held_back,
    in_line,
    lost_share,
    needed_prefetch,
    needed_workers,
    no_core_free,
    outbox,
    outlasts,
    queued,
    rows_in,
    seconds_of,
    take_turns,
)

# This many times the present workers may be needed, given the uncertainty.
ENOUGH = 1.2
# A window this long contains two measurements of the run queue, so waits are known.
QUEUE_TOLD_S = 2 * APART_NS / 1e9
# Seconds per sample: a disk takes longer; reading cached file data is computing.
SHORT_READ_S = 0.000_05
# A worker is found at work that takes this many times the mean, if some samples take
# far longer than others. Of even ones, it is 1.0 to 1.2.
UNEVEN = 1.5
# How the name of what collates begins, and the name of the way to the device.
COLLATE, DEVICE = "Batch(", "to_device"
# Times the present workers that are advised at once: many more may be in the way.
STEP_UP = 3
# Share of the busy cores above which the trainer's own are worth a word.
MIN_SHARE = 0.2
TUNE = "ps.set_enable_autotune(True)"
# Times as fast, from which on code is worth pasting: less would read `1.0x`.
WORTHWHILE = 1.05
# Milliseconds to decode 500x375 pixels and crop them to 224, and to do so at once.
FUSED = 1.87 / 1.01
# CPU time of worker processes beside that of their workers, above which their functions
# start threads: what else a process does takes some hundredths.
OWN_THREADS = 1.5


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
    """What to do next, as code that says what it brings; empty if nothing does."""
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
        restriction = "" if self.restricted is None else f"; {self.restricted.why}"
        return Cause(f"{text}{restriction}.", self.advice, stage, self.restricted)


@dataclass(frozen=True, slots=True)
class Suspect:
    """One window of a waiting trainer, and the segment whose workers are busiest."""

    window: Observation
    segment: SegmentObservation
    budget: Budget
    tuned: bool
    """Whether the autotuner is running: what it does by itself is not advised."""

    @property
    def part(self) -> PartObservation:
        """The operation of the segment that takes longest."""
        segment = self.segment
        sole = PartObservation(
            segment.name,
            segment.run_s_per_row,
            bytes_per_row=0.0,
            storable=None,
            cpu_s_per_row=segment.cpu_s_per_row,
        )
        longest = max(segment.parts, key=seconds_of(self.window, segment), default=sole)
        return longest if longest.run_s_per_row else sole

    @property
    def name(self) -> str:
        """Short name of that operation."""
        return phrases.short_name(self.part.name)

    @property
    def needed(self) -> float:
        """Workers that keep up with the trainer."""
        return needed_workers(self.window, self.segment)

    @property
    def headspace(self) -> float:
        """Times as fast as now if loading were free."""
        return headspace_of(lost_share(self.window))

    @property
    def possible(self) -> float:
        """Times as fast as now, as far as the trainer and the cores allow."""
        cores = ratio(self.budget.cpu_cores, busy_cores(self.window)) or inf
        return min(self.headspace, cores)

    @property
    def computes(self) -> bool:
        """Whether the operation is mostly on a CPU, or in a process waits for one."""
        cpu_s, run_s = self.part.cpu_s_per_row, self.part.run_s_per_row
        short = run_s - cpu_s < SHORT_READ_S and cpu_s >= MOSTLY * run_s
        return computes(cpu_s, run_s) or (self.segment.executor == "process" and short)

    @property
    def pinned(self) -> str:
        """Why the tuner may change none of its settings; empty if it may."""
        restriction = self.segment.held
        return restriction if self.tuned and restriction == Restriction.PINNED else ""

    @property
    def why_here(self) -> str:
        """Why its work may not go to processes; empty if it may."""
        segment, since_s = self.segment, self.window.time_s - TRUSTED_S
        tried = any(
            move.time_s > since_s and "process" in (move.old, move.new)
            for move in (*segment.moves, *self.window.moves)
            if move.outcome == "moved"
        )
        restriction = Restriction.TRIED if self.tuned and tried else ""
        return self.pinned or segment.stays or restriction

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
        _, ending = Restriction.SHARED.split("{}")
        if segment.max_workers == 1 and segment.stays.endswith(ending):
            return segment.stays  # which is why the bound is one
        bound = Restriction.BOUNDED.format(self.them)
        bounded = segment.num_parallel_workers == segment.max_workers
        return self.pinned or (bound if bounded else "")

    @property
    def them(self) -> str:
        """Its workers, counted."""
        workers = self.segment.num_parallel_workers
        return f"{workers} worker{'s' if workers > 1 else ''}"

    def in_words(self, pipeline: str, loader: str) -> str:
        """Return the code in the words of the API that the user calls."""
        return loader if self.window.face == "DataLoader" else pipeline


def promised(times: float, *lines: str) -> tuple[str, ...]:
    """Return code to paste, each line with what it brings at most; none for little."""
    gain = phrases.speedup(min(times, phrases.ROUND_FROM))
    more = (f"{line}{': ' if '  # ' in line else '  # '}{gain}" for line in lines)
    return tuple(more) if times >= WORTHWHILE else ()


def of_slowdown(suspect: Suspect) -> Cause:
    """Return the cause if loading costs more of the trainer's own part than a wait."""
    window, contention = suspect.window, suspect.window.contention
    assert contention is not None
    text = (
        "loading slows the trainer: its own part of a step takes"
        f" {figures(1000 * contention.beside_s)} ms while batches are loaded beside it,"
        f" {figures(1000 * contention.alone_s)} ms while none are"
    )
    segments = [s for s in window.segments if s.is_here and s.executor != "inline"]
    workers = sum(segment.num_parallel_workers for segment in segments)
    tune = () if suspect.tuned else promised(suspect.headspace, TUNE)
    cores = figures(suspect.budget.cpu_cores)
    if no_core_free(window, suspect.budget):
        return Cause(
            f"{text}. They share the cores: {window.used_cores:.1f} of {cores} are busy"
            f", with {workers} workers beside {window.torch_threads} threads of torch.",
            (*tune, *_of_torch(suspect)),
        )
    queue = min(1.0, ratio(window.trainer.queued_s, window.trainer.gap_s))
    if queue >= QUEUED:
        return Cause(
            f"{text}. It waits for a core for {queue:.0%} of that, as its process, with"
            f" {workers} workers, has {window.used_cores:.1f} of {cores}, with others"
            " beside it.",
            tune,
        )
    threads = [segment for segment in segments if segment.executor == "thread"]
    if not threads:
        return Cause(f"{text}. They share the memory and the caches of the cores.")
    busiest_one = max(threads, key=attrgetter("run_s"))
    held = window.gil_held
    return _of_processes(replace(suspect, segment=busiest_one), window.slowdown).of(
        f"{text}. The {workers} workers are threads, which take the GIL"
        + ("" if held is None else f" (held {held:.0%} of the time)")
    )


def _of_torch(suspect: Suspect) -> tuple[str, ...]:
    """Advise fewer threads of torch, if those of the trainer take loading's cores."""
    window = suspect.window
    share = 1.0 - ratio(window.cpu_cores, window.used_cores)
    threads = max(1, round(suspect.budget.cpu_cores * share))
    fewer = threads < window.torch_threads and share >= MIN_SHARE
    return promised(
        suspect.headspace if fewer else 1.0, f"torch.set_num_threads({threads})"
    )


# Rules, in order: each yields its cause, if that applies


def _of_device(suspect: Suspect) -> Iterator[Cause]:
    trainer = suspect.window.trainer
    if ratio(trainer.copy_s, trainer.wait_s) >= MOSTLY:
        copy_ms = 1000 * ratio(trainer.copy_s, trainer.steps)
        wait_ms = 1000 * ratio(trainer.wait_s, trainer.steps)
        yield Cause(
            f"the transfer to the device: it takes {copy_ms:.2f} of the"
            f" {wait_ms:.2f} ms that each step waits; the batch itself was ready"
            " before.",
            stage=DEVICE,
        )


def _of_collate(suspect: Suspect) -> Iterator[Cause]:
    """Collating in the trainer's thread; in workers it is a part like any other.

    Workers may do it if they do the rest, too, which the trainer makes itself so far.
    """
    trainer, last = suspect.window.trainer, suspect.window.segments[-1]
    alone = suspect.segment is last and last.executor == "inline"
    if spent_s := collate_s(suspect.window, last):
        wait_ms = 1000 * ratio(trainer.wait_s, trainer.steps)
        cure = _of_workers(suspect) if alone else Cure()
        yield cure.of(
            "collate: putting samples together takes the trainer"
            f" {1000 * spent_s:.2f} of the {wait_ms:.2f} ms that each step waits",
            last.queue_name,
        )


def _of_memory(suspect: Suspect) -> Iterator[Cause]:
    window, budget, source = suspect.window, suspect.budget, suspect.window.segments[0]
    short = ratio(source.wait_memory_s, source.worker_s) >= HELD_BACK
    workers, rows = suspect.segment.num_parallel_workers, rows_in(window, budget)
    full = 0 < rows < ENOUGH * workers < suspect.needed
    if (short or full) and outbox(window).empty > MOSTLY:
        limit = phrases.size(budget.memory_bytes)
        usage = f"({phrases.size(window.held_bytes)} held of {limit})"
        text = f"workers are held back although no batch is ready {usage}"
        if 2 * window.batch_bytes > budget.memory_bytes:
            text = (
                f"it has room for only one batch ({phrases.size(window.batch_bytes)} of"
                f" {limit}), so the next one is not made before the trainer has taken"
                " it"
            )
        elif not short:
            fits = budget.memory_bytes // window.batch_bytes
            text = (
                f"it has room for {fits} batches {usage}, whose samples are no work for"
                f" more than {rows} workers"
            )
        yield Cause(f"the memory budget: {text}.", _of_more(suspect))


def _of_more(suspect: Suspect) -> tuple[str, ...]:
    """Advise twice the bytes, if the machine has them to spare for more batches."""
    present, batch = suspect.budget.memory_bytes, suspect.window.batch_bytes or 1
    nbytes = min(2 * present, suspect.budget.free_bytes // 2 or 2 * present)
    times = ratio(nbytes // batch, max(1, present // batch))
    large = nbytes >= 4 * phrases.GIB
    unit, name = (phrases.GIB, "GiB") if large else (phrases.MIB, "MiB")
    line = f'ps.set_memory_budget("{ceil(nbytes / unit)}{name}")'
    return promised(min(times, suspect.possible), line)


def _of_keeping(suspect: Suspect) -> Iterator[Cause]:
    """Yield the cause if a cache takes longer than making what it keeps."""
    # Other programs may have come since most samples were made.
    run_s = suspect.part.run_s_per_row * (1.0 - queued([suspect.segment]))
    for cache in _behind(suspect):
        made_s = ratio(cache.compute_ns, cache.misses) / 1e9
        if cache.misses >= MANY and 0.0 < 2.0 * made_s < run_s:
            yield Cause(
                f"a cache: {cache.name} takes {phrases.ms(run_s - made_s)} ms a sample"
                f" to find or keep what is made in {phrases.ms(made_s)} ms; without"
                " this cache, the pipeline is faster.",
                stage=cache.name,
            )


def _of_contention(suspect: Suspect) -> Iterator[Cause]:
    window, trainer = suspect.window, suspect.window.trainer
    if suspect.segment.executor != "inline" and always_ready(window) and trainer.steps:
        wait_ms = 1000 * ratio(trainer.wait_s, trainer.steps)
        what, cure = "for the hand-over", Cure()
        if take_turns(window, suspect.segment):
            what = "for the GIL, which the loading threads hold"
            cure = _of_processes(suspect, inf)
        elif window.contention is not None and window.contention.certain:
            what = "because loading takes the GIL and cores"
        yield cure.of(
            f"contention: a batch is ready {1.0 - outbox(window).empty:.0%} of the time"
            f", and the trainer waits {figures(wait_ms)} ms all the same, {what}"
        )


def _of_gil(suspect: Suspect) -> Iterator[Cause]:
    segment, workers = suspect.segment, suspect.segment.num_parallel_workers
    if workers > 1 and take_turns(suspect.window, segment):
        percent = 100 * (suspect.window.gil_held or 0.0)
        # In the batch, threads only copy rows. They wait for the GIL there, but hold it
        # while they read and compute.
        holders = [part for part in segment.parts if not part.name.startswith(COLLATE)]
        holder = max(holders, key=attrgetter("cpu_s_per_row"), default=suspect.part)
        yield _of_processes(suspect, workers).of(
            f"the GIL: held {percent:.0f}% of the time, so the {workers} threads of"
            f" {phrases.short_name(holder.name)} take turns",
            holder.name,
        )


def _of_processes(suspect: Suspect, times: float) -> Cure:
    """Advise worker processes if cores are free, unless the tuner moves work itself.

    Without waiting for one another, workers are at most `times` as fast.
    """
    segment, why = suspect.segment, suspect.why_here
    if queued([segment]) >= QUEUED or cores_used(suspect.window, suspect.budget):
        return Cure()
    line = suspect.in_words(
        f'executor="process"  # for {segment.name}, or "auto"',
        "DataLoader(thread_safe=False)",
    )
    advised = is_chosen(why) or not (why or suspect.tuned)
    advice = promised(min(times, suspect.possible), line) if advised else ()
    return Cure(advice, Restricted("executor", why) if why else None)


def _of_lock(suspect: Suspect) -> Iterator[Cause]:
    """Yield the cause if threads take turns at a lock that is not the GIL."""
    share, workers = in_line(suspect.segment), suspect.segment.num_parallel_workers
    if share >= MOSTLY:
        yield _of_processes(suspect, workers).of(
            f"a lock: the {workers} threads of {suspect.name} wait for one lock"
            f" {share:.0%} of their time, so they take turns"
        )


def _of_cores(suspect: Suspect) -> Iterator[Cause]:
    if cores_used(suspect.window, suspect.budget):
        used, allowed = busy_cores(suspect.window), figures(suspect.budget.cpu_cores)
        rest = "; other pipelines have the rest, or ps.set_cpu_budget leaves it out"
        yield Cause(
            f"CPU: {used:.1f} of {allowed} cores are busy loading, most of it"
            f" {suspect.name}{'' if suspect.budget.whole_machine else rest}.",
            _of_fused(suspect),
        )


def _of_others(suspect: Suspect) -> Iterator[Cause]:
    window, segment, run_s = suspect.window, suspect.segment, suspect.part.run_s_per_row
    share, own = queued([segment]), window.used_cores - window.cpu_cores
    fraction = ratio(segment.settled_s, segment.run_s) or 1.0  # only that has CPU time
    threads_s = fraction * segment.threads_cpu_s
    times = ratio(threads_s, segment.cpu_s)
    # Work that hardly computes has hardly more than what each process does besides.
    many = threads_s - segment.cpu_s >= MIN_SHARE * segment.queued_s
    who, advice = "others use them", _of_fused(suspect)
    if segment.executor == "process" and times >= OWN_THREADS and many:
        who = (
            f"threads that it starts itself use them, {times:.1f} times as much as the"
            " workers; let it start fewer, as torch.set_num_threads(1) does"
        )
    elif own >= MIN_SHARE * window.used_cores and no_core_free(window, suspect.budget):
        advice = (*_of_torch(suspect), *advice)
        who = (
            f"the trainer itself keeps {own:.1f} of"
            f" {figures(suspect.budget.cpu_cores)} busy, with {window.torch_threads}"
            " threads of torch"
        )
    if share >= QUEUED:
        yield Cause(
            f"CPU: {suspect.name} waits for a core for {phrases.ms(share * run_s)} of"
            f" {phrases.ms(run_s)} ms a sample, while {who}.",
            advice,
        )


def _of_first_batches(suspect: Suspect) -> Iterator[Cause]:
    """Yield the cause if loops are so short that first batches make up the wait."""
    trainer, segment = suspect.window.trainer, suspect.segment
    share = ratio(trainer.first_s, trainer.wait_s)
    if segment.executor != "inline" and share >= MOSTLY:
        yield Cause(
            f"the beginning of epochs: {share:.0%} of the wait is for first batches,"
            " which are not made before a loop begins."
        )


def _of_unevenness(suspect: Suspect) -> Iterator[Cause]:
    """Yield the cause if there are enough workers, but they wait for slow rows."""
    segment, window = suspect.segment, suspect.window
    share, workers = held_back(window, segment), segment.num_parallel_workers
    elsewhere = segment.executor == "inline" or suspect.part.name.startswith(COLLATE)
    few = workers == 1 or suspect.needed > ENOUGH * workers
    rows = batch_rows(segment) if segment.executor == "process" else 1.0
    even = 0.0 < segment.lease_s < UNEVEN * rows * segment.run_s_per_row
    ready = always_ready(window) or busy(segment) >= BUSY
    late = share >= HELD_BACK or outlasts(window, segment)
    if late and not (elsewhere or few or even or ready):
        back = (
            f"are held back {share:.0%} of the time" if share >= HELD_BACK else "wait"
        )
        ahead = "batch that may be prefetched waits for its"
        if segment.prefetch_size > 1:
            ahead = (
                f"{segment.prefetch_size} batches that may be prefetched wait for their"
            )
        yield _of_prefetch(suspect, workers, ratio(1.0, busy(segment))).of(
            f"uneven samples: the workers of {suspect.name} {back}, as the {ahead}"
            " slowest samples"
        )


def _of_prefetch(suspect: Suspect, workers: int, times: float) -> Cure:
    """Advise more batches ahead, if the budget has room for them.

    The workers that will be there are at most `times` as fast if none is held back.
    """
    segment, window = suspect.segment, suspect.window
    present, target = segment.prefetch_size, needed_prefetch(window, segment)
    target = fitting(window, suspect.budget, present, target)
    if target == present:
        return Cure(_of_more(suspect), Restricted("prefetch_size", Restriction.MEMORY))
    if suspect.tuned:
        why = suspect.pinned
        return Cure((), Restricted("prefetch_size", why) if why else None)
    line = suspect.in_words(
        f"ps.set_prefetch_size({target})",
        f"DataLoader(prefetch_factor={max(2, ceil(target / workers))})",
    )
    return Cure(promised(min(times, suspect.possible), TUNE, line))


# What a segment does with its time: the last rule always applies


def _of_work(suspect: Suspect) -> Iterator[Cause]:
    if suspect.part.run_s_per_row == 0.0:
        yield Cause(f"{suspect.name} has not finished a sample yet.")
    full, more = _of_cache(suspect)
    cure = _of_workers(suspect)
    yield Cause(
        f"{_spent(suspect)}{_on_whom(suspect)}{_starved(suspect)}{full}.",
        more or (*cure.advice, *_of_fused(suspect)),
        restricted=cure.restricted,
    )


def _spent(suspect: Suspect) -> str:
    part, segment, name = suspect.part, suspect.segment, suspect.name
    run_ms, cpu_ms = phrases.ms(part.run_s_per_row), phrases.ms(part.cpu_s_per_row)
    if part.name.startswith(COLLATE):
        return (
            f"collate: putting samples together takes {run_ms} of"
            f" {phrases.ms(segment.run_s_per_row)} ms a sample"
        )
    if suspect.computes:
        return f"CPU: {name} computes {cpu_ms} ms a sample"
    if _takes_turns(suspect):
        return (
            f"the GIL: {name} computes {cpu_ms} of {run_ms} ms a sample, in short calls"
            " that release the GIL and then wait to get it back"
        )
    queue_told = segment.executor == "inline" or suspect.window.window_s >= QUEUE_TOLD_S
    what = "reads (I/O or locks)" if queue_told else "(a longer run shows for what)"
    blocked_ms = phrases.ms(part.run_s_per_row - part.cpu_s_per_row)
    return f"waiting {what}: {name} is blocked for {blocked_ms} of {run_ms} ms a sample"


def _takes_turns(suspect: Suspect) -> bool:
    """Whether threads are blocked by the GIL: a read would block for longer."""
    part = suspect.part
    blocked_s = part.run_s_per_row - part.cpu_s_per_row
    threads = suspect.segment.executor == "thread"
    return threads and blocked_s < SHORT_READ_S and blocked_s < 3 * part.cpu_s_per_row


def _on_whom(suspect: Suspect) -> str:
    """Describe who does the work, and how many the trainer needs."""
    segment, why = suspect.segment, suspect.why_no_more
    if segment.iterable:
        return f"; {why}"
    if segment.executor == "inline":
        return f", in the trainer's own time{'; ' * bool(why)}{why}"
    if suspect.needed <= segment.num_parallel_workers:
        return f", on {suspect.them}"
    if suspect.needed == inf:
        return f"; {why or suspect.them}, and this trainer takes all it can get"
    needs = f"this trainer needs {phrases.count(suspect.needed)}"
    if why:
        return f"; {why}, and {needs}"
    return f"; too few workers: {segment.num_parallel_workers}, {needs}"


def _starved(suspect: Suspect) -> str:
    """Name the segment that this one leaves without input."""
    for before, after in pairwise(suspect.window.segments):
        idle = ratio(after.wait_input_s, after.worker_s)
        if before is suspect.segment and idle >= MOSTLY:
            name = phrases.short_name(after.name)
            return f", so {name} has no input {idle:.0%} of the time"
    return ""


def _of_workers(suspect: Suspect) -> Cure:
    """Advise the tuner, or as many workers as cores and bounds allow."""
    segment, why, window = suspect.segment, suspect.why_no_more, suspect.window
    present, inline = segment.num_parallel_workers, segment.executor == "inline"
    restriction = None
    if why and (inline or suspect.needed > present):
        restriction = Restricted("executor" if inline else "num_parallel_workers", why)
    if suspect.tuned and segment.fixed and segment.fixed in why:
        without = f"DataLoader(...)  # without {segment.fixed}, to let workers load"
        return Cure(promised(suspect.possible, without), restriction)
    if suspect.tuned or why:
        return Cure((), restriction)
    bound = ratio(0 if inline else segment.max_workers, present) or inf
    tune, workers = promised(min(suspect.possible, bound), TUNE), _number(suspect)
    if workers <= present:
        return Cure(tune if workers == 0 else ())
    line = suspect.in_words(
        f"num_parallel_workers={workers}  # for {segment.name}",
        f"DataLoader(num_workers={workers})",
    )
    # The other segments keep their workers, and threads the GIL.
    beside = [busy(other) for other in window.segments if other is not segment]
    most = max(*beside, (window.gil_held or 0.0) * take_turns(window, segment), 0.0)
    times = min(suspect.possible, workers / present, ratio(1.0, most) or inf)
    advice, ahead = (*tune, *promised(times, line)), Cure()
    if advice and outlasts(window, segment):  # more workers alone are no help
        ahead = _of_prefetch(suspect, workers, times)
    more = (code for code in ahead.advice if not code.startswith(TUNE))
    return Cure((*advice, *more), ahead.restricted)


def _number(suspect: Suspect) -> int:
    """Return how many workers are enough, or as many more as are advised; 0: unknown.

    How many threads help that take turns, and how many workers do what the trainer did
    itself, must be tried.
    """
    segment = suspect.segment
    unsure = suspect.part.run_s_per_row < SHORT_READ_S or _takes_turns(suspect)
    if segment.executor == "inline" or (unsure and not suspect.computes):
        return 0
    most = STEP_UP * segment.num_parallel_workers
    cores = ceil(suspect.budget.cpu_cores) if suspect.computes else 0
    bounds = cores, segment.max_workers, rows_in(suspect.window, suspect.budget)
    return max(1, ceil(min(suspect.needed / BUSY, most, *filter(None, bounds))))


def _of_cache(suspect: Suspect) -> tuple[str, tuple[str, ...]]:
    """Say that a cache after the operation is too small, and advise room for all.

    Its misses are then what the operation is busy with, in every epoch.
    """
    for cache in _behind(suspect):
        if cache.stored and cache.refused >= MOSTLY * cache.misses:
            row_bytes = cache.stored_bytes / cache.stored
            room = room_for(suspect.part.storable or 0, row_bytes)
            fits = 0 < 2 * room <= suspect.budget.free_bytes
            in_ram = fits and any(tier.name == "RAM" for tier in cache.tiers)
            times = found_gain(suspect.window, phrases.number_of(cache.name), row_bytes)
            line = f'ram="{ceil(room / phrases.MIB)}MiB"  # for {cache.name}, once full'
            return (
                f"; {cache.name} finds {cache.hit_share:.0%} of the samples, and has no"
                " room for the others"
            ), promised(times if in_ram else 1.0, line)
    return "", ()


def _behind(suspect: Suspect) -> list[CacheStatistics]:
    """Return the caches after the operation."""
    part = phrases.number_of(suspect.part.name)
    return [
        cache for cache in suspect.window.caches if phrases.number_of(cache.name) > part
    ]


def found_gain(observation: Observation, number: int, sample_bytes: float) -> float:
    """Return how many times as fast training is, at most, if each sample is found.

    `number` is that of the cache, or of the operation before it.
    """
    parts = busiest(observation).parts
    left_s = sum(
        (p.run_s_per_row for p in parts if phrases.number_of(p.name) > number),
        start=found_s(sample_bytes),
    )
    times = ratio(sum(part.run_s_per_row for part in parts), left_s)
    return min(times, headspace_of(lost_share(observation)))


def _of_fused(suspect: Suspect) -> tuple[str, ...]:
    """Advise one pass over each image, if images are decoded and then cropped."""
    images = (
        suspect.window.segments[0].name.startswith("Folder(")
        and suspect.window.face != "DataLoader"
        and suspect.name == "decode"
        and suspect.computes
    )
    return promised(
        min(FUSED, suspect.headspace) if images else 1.0,
        ".map(ps.image.decode_random_resized_crop(224))  # one pass over each image",
    )


# What makes a trainer wait: the first cause that these yield.
RULES: tuple[Callable[[Suspect], Iterator[Cause]], ...] = (
    _of_device,
    _of_collate,
    _of_memory,
    _of_keeping,
    _of_contention,
    _of_gil,
    _of_lock,
    _of_cores,
    _of_others,
    _of_first_batches,
    _of_unevenness,
    _of_work,
)
