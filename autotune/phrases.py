"""The sentences of the autotune log, each a function of measured numbers.

Users of MindSpore find its log's phrases here unchanged. They are evidence: a caller
uses one only if its numbers support it.
"""

from __future__ import annotations

import re

from ..engine.observe.observation import SegmentObservation
from ..system.printing import figures
from .trial import Decision, DecisionOutcome

# Number of workers from which a tenth of one is not worth mentioning.
TENS_FROM = 20
ROUND_FROM = 100
MIB = 1 << 20
GIB = 1 << 30


def slow(operator: str, feeding: float, output: float, threshold: float) -> str:
    """Its input is full and its output is empty: utilisations, 0 to 1."""
    return (
        f"Op ({operator}) is slow, input connector utilization={feeding:.6f}, output"
        f" connector utilization={output:.6f}, diff={feeding - output:.6f}"
        f" > {threshold:g} threshold."
    )


def cpu(operator: str, share: float, threshold: float) -> str:
    """Its workers are nearly always on a CPU, or seldom: shares, 0 to 1."""
    level, than = ("high", ">") if share > threshold else ("low", "<")
    return (
        f"Op ({operator}) getting {level} average worker cpu utilization"
        f" {100 * share:.2f}% {than} {100 * threshold:g}% threshold."
    )


def bottleneck(segment: SegmentObservation, needed: float, *, computes: bool) -> str:
    """It has too few workers for the trainer.

    If it does not compute, it waits for a disk, a network or a lock.
    """
    run_s, cpu_s = segment.run_s_per_row, segment.cpu_s_per_row
    cost = f"CPU {ms(cpu_s)}"
    if not computes:
        cost = f"blocked {ms(run_s - cpu_s)} of {ms(run_s)}"
    return (
        f"Op ({segment.name}) is the bottleneck: {cost} ms a sample, needs"
        f" {count(needed)} workers for this trainer, has"
        f" {segment.num_parallel_workers}."
    )


def law(operator: str, run_s: float, busy: float, rate: float, workers: int) -> str:
    """A rate that is possible keeps more workers busy than it has (Little's law)."""
    return (
        f"Op ({operator}) takes {ms(run_s)} ms a sample: {per_s(rate)} samples/s"
        f" keep {busy:.1f} workers busy, and it has {workers}."
    )


def idle(operator: str, busy: float, workers: int, *, waiting: bool) -> str:
    """Some of its workers are idle, although the trainer may wait for other stages."""
    why = "other things hold up the trainer" if waiting else "the trainer does not wait"
    return f"Op ({operator}) keeps {busy:.1f} of {workers} workers busy, and {why}."


def queue_idle(operator: str, utilization: float) -> str:
    """More is prefetched than the trainer needs."""
    return (
        f"Op ({operator}) prefetches more than is used: connector utilization"
        f" {utilization:.6f}, and the trainer does not wait."
    )


def cpu_over_budget(operator: str, cores: float, budget: float) -> str:
    """All segments together use more CPU than they may; this one uses most."""
    return (
        f"Op ({operator}) uses most of {cores:.2f} busy cores, more than the budget of"
        f" {figures(budget)}."
    )


def request(decision: Decision) -> str:
    """A knob is set."""
    return (
        f'Added request to change "{decision.knob}" of Operator: {decision.operator}'
        f" From old value: [{decision.old}] to new value: [{decision.new}]."
    )


def outcome(result: DecisionOutcome) -> str:
    """A change was kept or rolled back."""
    decision, before, after = result.decision, result.before, result.after
    verb = "kept" if result.kept else "rolled back"
    return (
        f"{decision.operator}: {decision.knob} {decision.old} -> {decision.new} {verb}:"
        f" {per_s(before.rows_per_s)} -> {per_s(after.rows_per_s)} samples/s,"
        f" trainer wait {100 * before.wait_share:.0f}% ->"
        f" {100 * after.wait_share:.0f}% of the step."
    )


def released(wait: float, workers: int, nbytes: int) -> str:
    """Resources were released since the trainer stopped waiting."""
    them = f"{workers} worker{'s' if workers > 1 else ''}" if workers else ""
    things = filter(None, (them, size(nbytes) if nbytes >= MIB else ""))
    return f"not input-bound (wait {100 * wait:.1f}%): released {' and '.join(things)}."


def speedup(headspace: float) -> str:
    """Return how much faster training would be if loading were free."""
    if headspace > ROUND_FROM:
        return f"more than {ROUND_FROM}x faster"
    digits = 1 if headspace < TENS_FROM else 0
    return f"at most {headspace:.{digits}f}x faster"


def count(number: float) -> str:
    """Return a number as people say it: 3.6, about 50, about 1,200."""
    if number < TENS_FROM:
        return f"{number:.1f}"
    magnitude = 10 ** (len(str(int(number))) - 2)
    return f"about {round(number / magnitude) * magnitude:,}"


def size(nbytes: float) -> str:
    """Return a number of bytes with a suitable unit."""
    for unit, name in (GIB, "GiB"), (MIB, "MiB"), (1024, "KiB"):
        if nbytes >= unit:
            digits = 0 if unit == MIB and nbytes >= 10 * MIB else 1
            return f"{nbytes / unit:.{digits}f} {name}"
    return f"{nbytes:.0f} bytes"


def ms(seconds: float) -> str:
    """Return milliseconds without the unit; very few get more digits."""
    value = 1000 * seconds
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}".rstrip("0").rstrip(".")


def per_s(rate: float, thousands: str = "") -> str:
    """Return samples a second without the unit; below ten, a tenth matters."""
    return f"{rate:{thousands}.0f}" if rate >= 10 else f"{rate:.2g}"


def number_of(operator: str) -> int:
    """Return 2 for `Map(ID:2) decode`; -1 for an operator without a number."""
    match = re.search(r"\(ID:(\d+)\)", operator)
    return int(match[1]) if match else -1


def short_name(operator: str) -> str:
    """Return `decode` for `Map(ID:2) decode`, or all of an operator without a name."""
    return operator.partition(") ")[2] or operator


def peak(operator: str, run_s: float, old: int, new: int) -> str:
    """More workers did not bring the expected gain: other numbers are tried."""
    return (
        f"Op ({operator}) takes {ms(run_s)} ms a sample with {old} workers,"
        f" which may get in each other's way: trying {new}."
    )


def held_back(operator: str, share: float) -> str:
    """Workers may not work ahead, although the trainer waits."""
    return (
        f"Op ({operator}) is held back {100 * share:.0f}% of the time by what may be"
        " prefetched, and the trainer waits."
    )


def executor(operator: str, kind: str, why: str) -> str:
    """Workers of this kind may do better."""
    workers = "processes" if kind == "process" else "threads"
    return f"Op ({operator}) is tried on {workers}: {why}."


def alone(operator: str, step_s: float, alone_s: float) -> str:
    """The trainer was faster when it loaded the batches itself."""
    return (
        f"Op ({operator}) goes back to the trainer: a step takes"
        f" {figures(1000 * step_s)} ms, and took {figures(1000 * alone_s)} ms without"
        " workers."
    )


def contention(beside_s: float, alone_s: float) -> str:
    """Loading lengthens the trainer's own part of a step."""
    return (
        "Pipeline: the trainer's own part of a step takes"
        f" {figures(1000 * beside_s)} ms while batches are loaded beside it,"
        f" {figures(1000 * alone_s)} ms while none are"
        f" ({beside_s / alone_s - 1.0:+.0%})."
    )


def relief(operator: str, slowdown: float, workers: int) -> str:
    """Workers take more from the trainer than they bring."""
    return (
        f"Op ({operator}): loading with {workers} workers lengthens the trainer's own"
        f" part of a step by {slowdown - 1.0:.0%}, and fewer may make the whole step"
        " shorter."
    )


def held(segment: SegmentObservation, knob: str, why: str) -> str:
    """A setting would help, and something keeps the tuner from changing it."""
    if knob == "executor":
        where = "workers" if segment.executor == "inline" else "worker processes"
        return (
            f"Op ({segment.name}) may do better in {where}, and stays where it is:"
            f" {why}."
        )
    what, now, name = "workers", segment.num_parallel_workers, segment.name
    if knob == "prefetch_size":
        what, now, name = "batches ahead", segment.prefetch_size, segment.queue_name
    return f"Op ({name}) needs more {what}, and stays at {now}: {why}."


def off_threads(cores: float) -> str:
    """Threads load where there are many cores."""
    return (
        f"Pipeline: threads take the GIL from the trainer; with {figures(cores)} cores,"
        " worker processes are tried instead."
    )


def regime(name: str) -> str:
    """The next batches belong to a regime for which values are known."""
    return f"The plan goes over to {name}: what served them best before is restored."


def few_ahead(operator: str, prefetch: int, workers: int) -> str:
    """With more batches ahead, workers that mostly wait could take several samples."""
    return (
        f"Op ({operator}) prefetches {prefetch} batches, too few for {workers} workers"
        " that mostly wait to be given several samples at once."
    )


def outlasted(operator: str) -> str:
    """Workers may be at their samples for longer than the batches ahead last."""
    return (
        f"Op ({operator}) prefetches too few batches: a worker may be at its samples"
        " for longer than the trainer is at all of them."
    )


def crowded(operator: str, workers: int, cores: float) -> str:
    """More workers compute than there are cores."""
    return (
        f"Op ({operator}) has {workers} busy workers on {figures(cores)} cores: fewer"
        " may do as much."
    )
