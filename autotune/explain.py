"""What one window says about training: who waits for whom, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Literal

from ..engine.observe.observation import (
    Observation,
    PartObservation,
    SegmentObservation,
    TrainerObservation,
    ratio,
)
from ..system.resources import Budget
from ..system.run_queue import APART_NS
from . import phrases
from .policies.case import CPU_HIGH, CPU_LOW, CPU_USED, DIFFERENCE, QUEUED
from .situation import Decision
from .window import demand_rows_per_s, outbox, wait_share

Verdict = Literal["input-bound", "balanced", "not input-bound"]

INPUT_BOUND = 0.10
"""Exposed wait above this share of the step: the trainer is starved."""
NOT_INPUT_BOUND = 0.03
"""Below this share there is nothing to gain worth the trouble."""
MAX_HEADSPACE = 1000.0
"""Stands for all that is more, as of a trainer that does nothing."""
COMPUTES = 0.75
"""CPU as a share of the run time above which a segment computes."""
HELD_BACK = 0.5
"""Share of its workers' time above which a segment is held back."""
GIL_HELD = 0.6
"""Share of moments with the GIL held from which it is the cause named: the tuner turns
to it later, where it is certain."""
QUEUE_TOLD_S = 2 * APART_NS / 1e9
"""Within such a window the run queue was looked at twice, so its waits are known."""
COLLATE = "Batch("
"""What the names of parts and segments that collate begin with."""
FUSED_DECODE = "decode_random_resized_crop"
MANY_WORKERS = 64
"""No more are advised at once, whatever a trainer that takes no time could use."""
COUNTLESS = 1000
"""Workers, from which on a need says only that the trainer does next to nothing."""
CACHE_WORTH = 0.1
"""Share of the work on a sample that a cache must spare to be worth a word."""
MAX_NAMED = 3
"""Segments named in the verdict line, and next things to do."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """One segment's line: shares are of its workers' time, 0 to 1."""

    name: str
    num_parallel_workers: int
    prefetch_size: int
    executor: str
    items_per_s: float
    cpu: float
    blocked: float
    """Inside the functions, but on no CPU: I/O, the GIL, locks, the run queue."""
    queued: float
    """The part of that in the run queue: no core was free."""
    waiting_for_input: float
    held_back: float
    """By the bound of what reads it, or by the memory budget."""
    input_utilization: float
    output_utilization: float
    wait_share: float
    """The part of the exposed wait it accounts for, as a share of the step."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The verdict over one window. `print` it for the whole picture."""

    verdict: Verdict
    """`input-bound` above 10 % exposed wait, `not input-bound` below 3 %."""
    bottleneck: str | None
    """The operator that holds training up; None where the trainer does itself."""
    cause: str
    """What binds, in one sentence."""
    headspace: float
    """Training is at most so many times faster if loading were free: `step / (step -
    wait)`, at most 1000; 1 before the first step."""
    wait_share: float
    """Exposed wait as a share of the step, 0 to 1."""
    trainer: TrainerObservation
    rows_per_s: float
    stages: tuple[StageReport, ...]
    """In the order of the data, source first."""
    advice: tuple[str, ...]
    """Next things to do, as code; empty where nothing is justified."""
    caching: tuple[str, ...] = ()
    """What caches do, and what others would gain and need."""

    @property
    def line(self) -> str:
        """The verdict in one line, as the log shows it."""
        if self.trainer.steps == 0:
            return "no verdict yet: no step was finished."
        waiting = f"waiting {100 * self.wait_share:.0f}% of each step"
        if self.verdict == "not input-bound":
            waiting = f"waiting {100 * self.wait_share:.1f}% of each step"
        blamed = sorted(self.stages, key=lambda s: s.wait_share, reverse=True)
        parts = [
            f"{phrases.short_name(stage.name)} {100 * stage.wait_share:.0f}%"
            for stage in blamed[:MAX_NAMED]
            if round(100 * stage.wait_share) >= 1
        ]
        named = f" ({', '.join(parts)})" if parts else ""
        speedup = phrases.speedup(self.headspace)
        return f"{self.verdict}: {waiting}{named}; {speedup} if loading were free."

    def to_dict(self) -> dict[str, object]:
        """All of it as JSON can hold it."""
        return asdict(self)

    def __str__(self) -> str:
        width = max([len("stage"), *(len(stage.name) for stage in self.stages)])
        head = (
            f"  {'stage':<{width}}  workers  prefetch  executor  items/s"
            "   cpu  blocked  no input  held back"
        )
        lines = [head, *(self._row(stage, width) for stage in self.stages)]
        step_ms = 1000 * self.trainer.step_s
        lines += [
            f"  trainer: {self.rows_per_s:.0f} samples/s, {step_ms:.1f} ms a step",
            self.line,
            f"cause: {self.cause}",
            *(f"try: {step}" for step in self.advice),
            *self.caching,
        ]
        return "\n".join(lines)

    def _row(self, stage: StageReport, width: int) -> str:
        mark = ">" if stage.name == self.bottleneck else " "
        return (
            f"{mark} {stage.name:<{width}}  {stage.num_parallel_workers:>7}"
            f"  {stage.prefetch_size:>8}  {stage.executor:<8}"
            f"  {stage.items_per_s:>7.0f}  {stage.cpu:>4.0%}  {stage.blocked:>7.0%}"
            f"  {stage.waiting_for_input:>8.0%}  {stage.held_back:>9.0%}"
        )


def verdict_of(share: float) -> Verdict:
    """The verdict on an exposed wait of this share of the step, 0 to 1."""
    if share > INPUT_BOUND:
        return "input-bound"
    return "not input-bound" if share < NOT_INPUT_BOUND else "balanced"


def explain(
    observation: Observation, budget: Budget | None = None, *, tuned: bool = False
) -> Explanation:
    """Say what holds training up in this window.

    A segment with `n` workers that each need `E` seconds for a sample puts out one
    every `E / n` seconds. Where the trainer waits, the segment with the busiest workers
    is the bottleneck, and the wait is laid on the segments by how much their `E / n`
    exceeds the trainer's own seconds a sample.

    Args:
        observation: the window.
        budget: what the pipeline may use; where given, used-up cores are named.
        tuned: whether the autotuner is at work already.
    """
    share = wait_share(observation)
    headspace = min(MAX_HEADSPACE, ratio(1.0, 1.0 - share) or MAX_HEADSPACE)
    silent = observation.trainer.steps == 0 and outbox(observation).empty < HELD_BACK
    verdict: Verdict = "balanced" if silent else verdict_of(share)
    worst = None if silent or verdict == "not input-bound" else _busiest(observation)
    return Explanation(
        verdict=verdict,
        bottleneck=worst.name if worst else None,
        cause=_cause(observation, worst, budget, silent=silent),
        headspace=headspace if observation.trainer.steps else 1.0,
        wait_share=share,
        trainer=observation.trainer,
        rows_per_s=observation.rows_per_s,
        stages=_stages(observation, share),
        advice=_advice(observation, worst, budget, tuned=tuned) if worst else (),
    )


def bottleneck_phrase(observation: Observation) -> str | None:
    """The log's sentence on the bottleneck, if it has too few workers.

    None, too, where the trainer does so little itself that no number would do.
    """
    worst = _busiest(observation)
    needed = _needed(worst, observation)
    if not worst.num_parallel_workers < needed < COUNTLESS:
        return None
    if ratio(worst.cpu_s, worst.run_s) >= COMPUTES:
        return phrases.bottleneck(
            worst.name, worst.cpu_s_per_row, needed, worst.num_parallel_workers
        )
    return phrases.blocked_bottleneck(
        worst.name,
        worst.run_s_per_row - worst.cpu_s_per_row,
        worst.run_s_per_row,
        needed,
        worst.num_parallel_workers,
    )


def evidence(observation: Observation, decision: Decision) -> Iterator[str]:
    """Yield what MindSpore's rules say of a decision's operator, where it is true.

    For more workers: its input is full and its output empty, or its workers are nearly
    always on a CPU. For a longer queue: its workers are seldom on one.
    """
    if decision.added <= 0:
        return
    for segment in observation.segments:
        feeding, output = segment.input_utilization, segment.output.utilization
        cpu, name = segment.cpu_utilization, decision.operator
        if decision.key == (segment.name, "num_parallel_workers"):
            if feeding - output > DIFFERENCE:
                yield phrases.slow(name, feeding, output, DIFFERENCE)
            if cpu > CPU_HIGH:
                yield phrases.cpu_high(name, cpu, CPU_HIGH)
        elif decision.key == (segment.queue_name, "prefetch_size") and cpu < CPU_LOW:
            yield phrases.cpu_low(name, cpu, CPU_LOW)


def _busiest(observation: Observation) -> SegmentObservation:
    def busy(segment: SegmentObservation) -> tuple[float, float]:
        edge = segment.input_utilization - segment.output.utilization
        return round(ratio(segment.run_s, segment.worker_s), 2), edge

    return max(observation.segments, key=busy)


def _needed(segment: SegmentObservation, observation: Observation) -> float:
    """Workers that would keep up with the trainer: demand times seconds a sample."""
    return demand_rows_per_s(observation) * segment.run_s_per_row


def _cause(
    observation: Observation,
    worst: SegmentObservation | None,
    budget: Budget | None,
    *,
    silent: bool,
) -> str:
    if silent:
        return "nothing is known yet: no batch was handed over in this window."
    if worst is None:
        share = wait_share(observation)
        return f"the trainer: loading keeps up with it (wait {100 * share:.1f}%)."
    if _held_by_memory(observation):
        return (
            "the memory budget: workers are held back although no batch is ready"
            f" ({observation.held_bytes / phrases.MIB:.0f} MiB held)."
        )
    cores = observation.cpu_cores
    if budget is not None and _cores_used(observation, budget):
        return f"CPU: {cores:.1f} of {budget.cpu_cores:g} cores are busy loading."
    return _cause_within(observation, worst)


def _cause_within(observation: Observation, worst: SegmentObservation) -> str:
    name, run_s = phrases.short_name(worst.name), worst.run_s_per_row
    if run_s == 0.0:
        return f"{name} has not finished a sample yet."
    if _held_by_gil(observation, worst):
        return (
            f"the GIL: held {100 * (observation.gil_held or 0.0):.0f}% of the time, so"
            f" the {worst.num_parallel_workers} threads of {name} take turns."
        )
    if _queued(worst):
        queued_s = ratio(worst.queued_s, worst.rows)
        return (
            f"CPU: {name} waits for a core for {1000 * queued_s:.2f} of"
            f" {1000 * run_s:.2f} ms a sample, while others use them."
        )
    if (collate_s := _collate_s_per_row(worst)) is not None:
        spent = (
            "collate: putting samples together takes"
            f" {1000 * collate_s:.2f} of {1000 * run_s:.2f} ms a sample"
        )
    elif ratio(worst.cpu_s, worst.run_s) >= COMPUTES:
        spent = f"CPU: {name} computes {1000 * worst.cpu_s_per_row:.2f} ms a sample"
    else:
        blocked_s = run_s - worst.cpu_s_per_row
        told = observation.window_s >= QUEUE_TOLD_S
        what = "reads (I/O or locks)" if told else "(a longer run tells for what)"
        spent = (
            f"waiting {what}: {name} is blocked for"
            f" {1000 * blocked_s:.2f} of {1000 * run_s:.2f} ms a sample"
        )
    needed, workers = _needed(worst, observation), worst.num_parallel_workers
    if needed >= COUNTLESS:
        return f"{spent}; {workers} workers, and this trainer takes what it can get."
    if needed > workers:
        wanted = phrases.count(needed)
        return f"{spent}; too few workers: {workers}, this trainer needs {wanted}."
    return f"{spent}, on {workers} worker{'s' if workers > 1 else ''}."


def _collate_s_per_row(segment: SegmentObservation) -> float | None:
    """Return what collating takes, where no other part of the segment takes longer."""
    if segment.name.startswith(COLLATE):
        return segment.run_s_per_row
    longest = max(segment.parts, key=lambda part: part.run_s_per_row, default=None)
    if longest is None or not longest.name.startswith(COLLATE):
        return None
    return longest.run_s_per_row


def _held_by_gil(observation: Observation, worst: SegmentObservation) -> bool:
    """Whether threads compute, and only one at a time can."""
    held = observation.gil_held
    threads = worst.executor == "thread" and worst.num_parallel_workers > 1
    return threads and held is not None and held >= GIL_HELD


def _queued(segment: SegmentObservation) -> bool:
    """Whether its workers wait for a core much of the time."""
    return ratio(segment.queued_s, segment.run_s) >= QUEUED


def _cores_used(observation: Observation, budget: Budget | None) -> bool:
    """Whether all cores there are keep busy with loading."""
    cores = observation.cpu_cores
    return budget is not None and cores >= CPU_USED * budget.cpu_cores


def _held_by_memory(observation: Observation) -> bool:
    """Whether workers are held back for lack of credit while the trainer starves."""
    return (
        outbox(observation).empty > HELD_BACK
        and all(
            ratio(segment.wait_credit_s, segment.worker_s) > HELD_BACK
            or ratio(segment.wait_input_s, segment.worker_s) > HELD_BACK
            for segment in observation.segments
        )
        and observation.segments[0].wait_credit_s > 0.0
    )


def _advice(
    observation: Observation,
    worst: SegmentObservation,
    budget: Budget | None,
    *,
    tuned: bool,
) -> tuple[str, ...]:
    if _held_by_memory(observation):
        gib = max(1, ceil(2 * observation.held_bytes / phrases.GIB))
        return (f'ps.set_memory_budget("{gib}GiB")',)
    steps = []
    if _held_by_gil(observation, worst):
        return (f'executor="process"  # for {worst.name}, or "auto"',)
    needed = min(ceil(_needed(worst, observation)), MANY_WORKERS)
    short = _cores_used(observation, budget) or _queued(worst)
    fixed = tuned or short or worst.executor == "inline"
    if not fixed and needed > worst.num_parallel_workers:
        steps += [
            "ps.set_enable_autotune(True)",
            f"num_parallel_workers={needed}  # for {worst.name}",
        ]
    computes = ratio(worst.cpu_s, worst.run_s) >= COMPUTES
    if computes and "decode" in worst.name and FUSED_DECODE not in worst.name:
        steps.append(f".map(ps.image.{FUSED_DECODE}(224))  # one pass over each image")
    return tuple(steps[:MAX_NAMED])


def _stages(observation: Observation, share: float) -> tuple[StageReport, ...]:
    demand = demand_rows_per_s(observation)
    gap_s = 1.0 / demand if demand > 0 else 0.0
    spent = [
        ratio(s.run_s_per_row, s.num_parallel_workers) for s in observation.segments
    ]
    late = [max(0.0, seconds - gap_s) for seconds in spent]
    # Where no segment alone is slower than the trainer, unevenness is to blame: of all.
    weights = late if sum(late) > 0 else spent
    return tuple(
        StageReport(
            name=segment.name,
            num_parallel_workers=segment.num_parallel_workers,
            prefetch_size=segment.prefetch_size,
            executor=segment.executor,
            items_per_s=ratio(segment.rows, observation.window_s),
            cpu=segment.cpu_utilization,
            blocked=max(0.0, ratio(segment.run_s - segment.cpu_s, segment.worker_s)),
            queued=ratio(segment.queued_s, segment.worker_s),
            waiting_for_input=ratio(segment.wait_input_s, segment.worker_s),
            held_back=ratio(segment.wait_credit_s, segment.worker_s),
            input_utilization=segment.input_utilization,
            output_utilization=segment.output.utilization,
            wait_share=share * ratio(weight, sum(weights)),
        )
        for segment, weight in zip(observation.segments, weights, strict=True)
    )


def cache_points(observation: Observation) -> tuple[str, ...]:
    """Return one line for each place where a cache is worth a thought.

    A sample that is found needs none of the worker-seconds spent up to there; where
    there is room for a share of the samples only, that share is found (see
    `penstock.cache.memory`), so the gain is in proportion.
    """
    parts = [part for segment in observation.segments for part in segment.parts]
    whole_s = sum(part.run_s_per_row for part in parts)
    lines = []
    spared_s = 0.0
    for part in parts:
        spared_s += part.run_s_per_row
        if part.storable is None or not part.bytes_per_row:
            break
        if spared_s >= CACHE_WORTH * whole_s:
            lines.append(point(part, spared_s, whole_s, part.storable))
    return tuple(lines)


def point(part: PartObservation, spared_s: float, whole_s: float, count: int) -> str:
    """Say what a cache behind an operation would spare, and take."""
    return (
        f"a cache behind {part.name} would spare {1000 * spared_s:.2f} of"
        f" {1000 * whole_s:.2f} ms of work a sample, and need"
        f" {phrases.size(part.bytes_per_row * count)} ({count:,} samples of"
        f" {phrases.size(part.bytes_per_row)})"
    )
