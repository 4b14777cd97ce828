"""What one window says about training: who waits for whom, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from heapq import nlargest
from math import inf
from operator import itemgetter
from typing import Literal

from ..cache.statistics import found_s, room_for
from ..engine.observe.observation import (
    Face,
    Observation,
    SegmentObservation,
    TrainerObservation,
    ratio,
)
from ..system.printing import Printed
from ..system.resources import Budget
from . import phrases
from .causes import (
    DEVICE,
    RULES,
    TUNE,
    WORTHWHILE,
    Cause,
    Restricted,
    Suspect,
    found_gain,
    of_slowdown,
    promised,
)
from .trial import Decision
from .window import (
    MOSTLY,
    STARVED,
    WORTH,
    busiest,
    computes,
    demand_rows_per_s,
    headspace_of,
    idle_s,
    lost_share,
    needed_workers,
    outbox,
    seconds_of,
    slowed_share,
    wait_share,
)

Verdict = Literal["input-bound", "balanced", "not input-bound"]

# MindSpore's thresholds: the difference between an operator's input and output, and its
# workers' share of time on a CPU.
DIFFERENCE, CPU_HIGH, CPU_LOW = 0.35, 0.75, 0.35
# Operations named in the verdict line.
MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class StageReport:
    """One segment's line. Shares are of its workers' time, 0 to 1."""

    name: str
    num_parallel_workers: int
    prefetch_size: int
    executor: str
    items_per_s: float
    cpu: float = 0.0
    blocked: float = 0.0
    """Inside the functions, but not on a CPU: I/O, the GIL, locks, the run queue."""
    queued: float = 0.0
    """The part of that in the run queue: no core was free."""
    waiting_for_input: float = 0.0
    held_back: float = 0.0
    """By the bound of its reader, or by the memory budget."""
    input_utilization: float = 0.0
    output_utilization: float = 0.0
    wait_share: float = 0.0
    """The part of the exposed wait that it accounts for, as a share of the step."""
    parts: tuple[tuple[str, float], ...] = ()
    """Its operations, if there are several, and how each contributes to that part."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Printed):
    """The verdict on one window. `print` it for the whole table."""

    verdict: Verdict
    """`input-bound` if loading costs more than 10 % of a step, `not input-bound` below
    3 %. It costs the exposed wait, and what it adds to the trainer's own part."""
    bottleneck: str | None
    """The operator that holds training up; None if it is the trainer itself."""
    cause: str
    """What binds, in one sentence."""
    headspace: float
    """Training would be at most this many times faster if loading were free: a step
    with its wait, over the trainer's part of one alone. At most 1000; 1 at first."""
    wait_share: float
    """Exposed wait as a share of the step, 0 to 1."""
    trainer: TrainerObservation
    rows_per_s: float
    stages: tuple[StageReport, ...]
    """In the order of the data, source first."""
    advice: tuple[str, ...]
    """What to do next, as code that says what it brings at most; empty if nothing is
    justified."""
    caching: tuple[str, ...] = ()
    """What caches do, and what others would gain and need."""
    restricted: Restricted | None = None
    """The setting that would remove the cause, and why it may not be changed."""
    slowdown: float = 1.0
    """How many times as long the trainer's own part of a step takes beside loading."""
    copy_share: float = 0.0
    """Share of the step spent copying batches to the device."""
    face: Face = "Pipeline"
    """The API whose words the advice uses."""

    @property
    def line(self) -> str:
        """The verdict in one line, as the log shows it."""
        if self.trainer.steps == 0:
            return "no verdict yet: no step has finished."
        digits = 1 if self.verdict == "not input-bound" else 0
        shares = [(DEVICE, self.copy_share)]
        for stage in self.stages:
            shares += stage.parts or [(stage.name, stage.wait_share)]
        parts = [
            f"{phrases.short_name(name)} {100 * share:.0f}%"
            for name, share in nlargest(MAX_NAMED, shares, key=itemgetter(1))
            if round(100 * share) >= 1
        ]
        operations = f" ({', '.join(parts)})" if parts else ""
        if self.slowdown > 1.0:
            operations += f", its own part {self.slowdown - 1.0:+.0%} beside loading"
        return (
            f"{self.verdict}: waiting {100 * self.wait_share:.{digits}f}% of each step"
            f"{operations}; {phrases.speedup(self.headspace)} if loading were free."
        )

    def scalars(self) -> dict[str, float]:
        """Its figures by name, in the form that metric loggers take."""
        figures = {
            "wait_share": self.wait_share,
            "headspace": self.headspace,
            "slowdown": self.slowdown,
            "rows_per_s": self.rows_per_s,
            "step_s": self.trainer.step_s,
        }
        for stage in self.stages:
            figures[f"{stage.name}/num_parallel_workers"] = stage.num_parallel_workers
            figures[f"{stage.name}/prefetch_size"] = stage.prefetch_size
        return figures

    def to_dict(self) -> dict[str, object]:
        """All of it as JSON values."""
        return asdict(self)

    def __repr__(self) -> str:
        width = max([len("stage"), *(len(stage.name) for stage in self.stages)])
        head = (
            f"  {'stage':<{width}}  workers  prefetch  executor  items/s"
            "   cpu  blocked  no input  held back"
        )
        rate, step_ms = phrases.per_s(self.rows_per_s), 1000 * self.trainer.step_s
        return "\n".join(
            [
                head,
                *(self._row(stage, width) for stage in self.stages),
                f"  trainer: {rate} samples/s, {step_ms:.1f} ms a step",
                self.line,
                f"cause: {self.cause}",
                *(f"try: {step}" for step in self.advice),
                *self.caching,
            ]
        )

    def _row(self, stage: StageReport, width: int) -> str:
        mark = ">" if self.bottleneck in (stage.name, *dict(stage.parts)) else " "
        return (
            f"{mark} {stage.name:<{width}}  {stage.num_parallel_workers:>7}"
            f"  {stage.prefetch_size:>8}  {stage.executor:<8}"
            f"  {stage.items_per_s:>7.0f}  {stage.cpu:>4.0%}  {stage.blocked:>7.0%}"
            f"  {stage.waiting_for_input:>8.0%}  {stage.held_back:>9.0%}"
        )


def verdict_of(share: float) -> Verdict:
    """Return the verdict if loading costs this share of the step, 0 to 1."""
    if share > STARVED:
        return "input-bound"
    return "not input-bound" if share < WORTH else "balanced"


def of_trainer(share: float) -> Cause:
    """Return the cause if loading keeps up, and the trainer waits this share."""
    return Cause(f"the trainer: loading keeps up with it (wait {100 * share:.1f}%).")


def explain(
    observation: Observation, budget: Budget, *, tuned: bool = False
) -> Explanation:
    """Explain what holds training up in this window.

    A segment with `n` workers that each need `E` seconds per sample produces one every
    `E / n` seconds. If the trainer waits, the segment with the busiest workers is the
    bottleneck, and the wait is distributed over the segments by how much their `E / n`
    exceeds the trainer's own seconds per sample.

    Args:
        observation: the window.
        budget: what the pipeline may use.
        tuned: whether the autotuner is already running.
    """
    share, cost = wait_share(observation), lost_share(observation)
    trainer = observation.trainer
    copy_share = share * min(1.0, ratio(trainer.copy_s, trainer.wait_s))
    silent = observation.trainer.steps == 0 and outbox(observation).empty < MOSTLY
    verdict: Verdict = "balanced" if silent else verdict_of(cost)
    suspect = Suspect(observation, busiest(observation), budget, tuned)
    bottleneck = None
    if silent:
        cause = Cause("nothing is known yet: no batch was delivered in this window.")
    elif verdict == "not input-bound":
        cause = of_trainer(share)
    else:
        causes = (cause for rule in RULES for cause in rule(suspect))
        slowed = slowed_share(observation) > share
        cause = of_slowdown(suspect) if slowed else next(causes)
        bottleneck = cause.stage or suspect.part.name
    return Explanation(
        verdict=verdict,
        bottleneck=bottleneck,
        cause=cause.text,
        headspace=headspace_of(cost) if observation.trainer.steps else 1.0,
        wait_share=share,
        slowdown=observation.slowdown,
        trainer=observation.trainer,
        rows_per_s=observation.rows_per_s,
        stages=_stages(observation, share - copy_share),
        advice=cause.advice,
        restricted=cause.restricted,
        caching=tuple(cache.line for cache in observation.caches),
        copy_share=copy_share,
        face=observation.face,
    )


def cache_advice(observation: Observation) -> Iterator[str]:
    """Yield what a cache with room for all samples would save and need, by its place.

    A sample that is found needs none of the worker-seconds spent before the cache. A
    place where that would not make training faster is left out.
    """
    parts = [part for segment in observation.segments for part in segment.parts]
    whole_s = sum(part.run_s_per_row for part in parts)
    spared_s = 0.0
    for part in parts:
        spared_s += part.run_s_per_row
        if part.storable is None or not part.bytes_per_row:
            return
        number, sample_bytes = phrases.number_of(part.name), part.bytes_per_row
        times = found_gain(observation, number, sample_bytes)
        if times >= WORTHWHILE:
            saved_s = spared_s - found_s(sample_bytes)
            yield (
                f"a cache after {part.name} would save {phrases.ms(saved_s)} of"
                f" {phrases.ms(whole_s)} ms of work a sample, and need"
                f" {phrases.size(room_for(part.storable, sample_bytes))}"
                f" ({part.storable:,} samples of {phrases.size(sample_bytes)}):"
                f" {phrases.speedup(times)}"
            )


def of_torchs(
    trainer: TrainerObservation,
    name: str,
    workers: int,
    executor: str,
    why: str,
    *,
    tunable: bool,
) -> Explanation:
    """Explain a loop that torch's own workers load: only the trainer's wait is known.

    Args:
        trainer: what was measured since the loop began.
        name: name of the dataset, as a stage.
        workers: number of torch's workers.
        executor: their kind.
        why: the reason why torch loads, and not penstock.
        tunable: whether penstock would load if autotune were on.
    """
    share = trainer.wait_share
    verdict = verdict_of(share) if trainer.steps else "balanced"
    waits = trainer.steps > 0 and verdict != "not input-bound"
    rate = ratio(trainer.rows, trainer.wait_s + trainer.gap_s)
    who = "torch's own workers load" if workers else "the trainer itself loads"
    return Explanation(
        verdict=verdict,
        bottleneck=name if waits else None,
        cause=of_trainer(share).text
        if trainer.steps and not waits
        else f"{who}, as in torch, and penstock cannot measure what it does: {why}.",
        headspace=headspace_of(share) if trainer.steps else 1.0,
        wait_share=share,
        trainer=trainer,
        rows_per_s=rate,
        stages=(
            StageReport(
                name, max(1, workers), 0, executor, items_per_s=rate, wait_share=share
            ),
        ),
        advice=promised(headspace_of(share), TUNE) if waits and tunable else (),
        face="DataLoader",
    )


def evidence(observation: Observation, decision: Decision) -> Iterator[str]:
    """Yield what speaks for a decision, besides its reason.

    Its operator may be the bottleneck, whose workers are too few; nobody needs to know
    how many, if the trainer does so little itself that no number would be enough.
    MindSpore's rules may be true of it. For more workers: its input is full and its
    output empty, or its workers are nearly always on a CPU. For a longer queue: its
    workers are seldom on one.
    """
    name, worst = decision.operator, busiest(observation)
    workers = needed_workers(observation, worst)
    few = worst.num_parallel_workers < workers < inf
    if few and name == worst.name and decision.expected > 1.0:
        yield phrases.bottleneck(
            worst, workers, computes=computes(worst.cpu_s, worst.run_s)
        )
    key = decision.key if decision.added > 0 else None
    for segment in observation.segments:
        feeding, output = segment.input_utilization, segment.output.utilization
        share = segment.cpu_utilization
        more = key == (segment.name, "num_parallel_workers")
        if more and feeding - output > DIFFERENCE:
            yield phrases.slow(name, feeding, output, DIFFERENCE)
        if more and share > CPU_HIGH:
            yield phrases.cpu(name, share, CPU_HIGH)
        if key == (segment.queue_name, "prefetch_size") and share < CPU_LOW:
            yield phrases.cpu(name, share, CPU_LOW)


def _stages(observation: Observation, share: float) -> tuple[StageReport, ...]:
    gap_s = ratio(1.0, demand_rows_per_s(observation))
    spent_s = [
        ratio(s.run_s_per_row, s.num_parallel_workers) for s in observation.segments
    ]
    late = [max(0.0, seconds - gap_s) for seconds in spent_s]
    # If no segment alone is slower than the trainer, unevenness of all is the cause.
    weights = late if sum(late) > 0 else spent_s
    return tuple(
        StageReport(
            name=segment.name,
            num_parallel_workers=segment.num_parallel_workers,
            prefetch_size=segment.prefetch_size,
            executor=segment.executor,
            items_per_s=ratio(segment.rows, observation.window_s),
            cpu=segment.cpu_utilization,
            blocked=_share(segment.run_s - segment.cpu_s, segment.worker_s),
            queued=ratio(segment.queued_s, segment.worker_s),
            waiting_for_input=ratio(segment.wait_input_s, segment.worker_s),
            held_back=_share(idle_s(observation, segment), segment.worker_s),
            input_utilization=segment.input_utilization,
            output_utilization=segment.output.utilization,
            wait_share=share * ratio(weight, sum(weights)),
            parts=_parts(observation, segment, share * ratio(weight, sum(weights))),
        )
        for segment, weight in zip(observation.segments, weights, strict=True)
    )


def _share(part_s: float, whole_s: float) -> float:
    """Return a share, 0 to 1: a call may have begun before the window it counts in."""
    return min(1.0, max(0.0, ratio(part_s, whole_s)))


def _parts(
    observation: Observation, segment: SegmentObservation, share: float
) -> tuple[tuple[str, float], ...]:
    """Distribute a segment's share of the wait over its operations, if several."""
    if len(segment.parts) < 2:
        return ()
    taken_s = seconds_of(observation, segment)
    whole_s = sum(map(taken_s, segment.parts))
    return tuple(
        (part.name, share * ratio(taken_s(part), whole_s)) for part in segment.parts
    )
