"""A decision and its trial: what a change of knobs did, and whether it stays. Pure.

The objective is the cost of a sample to the trainer (`window.cost_s`), and after that
the fewest resources. So a change that spends something must gain, and one that releases
something must cost nothing. Costs are compared window by window against their own
noise, which also determines how many windows are evidence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil, isfinite, sqrt

from ..engine.observe.observation import KnobName, Observation, Value, ratio
from .window import WORTH, cost_s, sustained_rows, wait_share, whole

# Kinds of workers, by the resources they take.
CHEAPER: tuple[Value, ...] = ("inline", "thread", "process")
# Relative cost increase above which a change counts as harmful.
WORSE = 0.05
# In standard errors: how much above the old cost is surely harmful, and how far below
# what is needed a gain is given up early, as it would have to grow much.
STANDARD_ERRORS, SURELY = 2.0, 3.0
# A change that spends must gain this share of what it promised, or `WORTH`.
GAIN_SHARE = 0.3
# If much was promised, this share of it must come: four times the workers for a few
# percent are not worth it.
MIN_SHARE = 0.1
# Relative noise of one window before any were measured, and how many it counts as.
PRIOR_SD, PRIOR_WINDOWS = 0.02, 2
# Part of a counted row, and of its time, that may fall into the window before or after.
COUNTING = 0.3
# Fewest windows after a change: a single bad one may be a hiccup, and full connectors
# hide for a moment that something was released.
MIN_FOR_WORSE, MIN_FOR_RELEASE = 2, 3
# Most windows that are compared, before a change or after it, unless noise requires
# more; and while connectors fill: what goes into them does not come out yet.
MAX_WINDOWS, MAX_FILLING = 4, 12
# Seconds of windows after which two are as good as four short ones.
LONG_S = 3.0
# Share of the rows of one segment that another one does not see.
FILLING = 0.05
# Largest share of a step that a wait may take, so that something is left of it.
ALL = 0.99
# The rule of a release that must pay for itself: by a shorter own part of a step.
RELIEF = "relief"
# Targeted relative standard error of the numbers that decisions rest on, and the most
# windows that are joined for it.
AIM, MAX_NOISE_WINDOWS = 0.1, 12
# Difference between two windows that may mean a change of load: relative, and in
# standard errors.
JUMP, JUMP_ERRORS = 0.15, 3.0
# Differences that are remembered, and those of zero that are assumed before there are
# many.
REMEMBERED, PRIOR = 16, 2


@dataclass(frozen=True, slots=True)
class Decision:
    """One change of one knob, with the evidence for it."""

    operator: str
    """Its name in the log: `Map(ID:2) decode`."""
    knob: KnobName
    old: Value
    new: Value
    rule: str
    """The rule of the policy that requested it, in one word."""
    reason: str
    """The observation behind it, as a sentence of the log."""
    expected: float
    """Expected samples per second, as a multiple of the present; 1 if something is
    released."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The numbers behind the reason, as measured."""
    forced: bool = False
    """True if a budget demands it: measured, but never rolled back."""

    @property
    def key(self) -> tuple[str, KnobName]:
        """The knob that it sets."""
        return (self.operator, self.knob)

    @property
    def added(self) -> int:
        """How much it raises a number; 0 for a kind."""
        return (
            self.new - self.old
            if isinstance(self.old, int) and isinstance(self.new, int)
            else 0
        )

    @property
    def frees(self) -> bool:
        """Whether it releases something: fewer of something, or a cheaper kind."""
        if self.old in CHEAPER and self.new in CHEAPER:
            return CHEAPER.index(self.new) < CHEAPER.index(self.old)
        return self.added < 0 or self.new == "trainer"


@dataclass(frozen=True, slots=True)
class Measure:
    """How training went over some windows."""

    rows_per_s: float
    """Samples per second, loaded and trained on."""
    wait_share: float
    """Exposed wait as a share of the step, 0 to 1."""
    step_s: float
    """Seconds of a step, including the wait; 0 if none was finished."""


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """What a decision did, and whether it stays."""

    decision: Decision
    kept: bool
    """False: rolled back."""
    before: Measure
    after: Measure
    in_step: bool = False
    """Whether the trainer may have waited for others, so that its rate says little."""


def measured(windows: tuple[Observation, ...]) -> Measure:
    """Return the speed of training over these windows, at least one."""
    window = whole(windows)
    return Measure(
        ratio(1.0, cost_s(window)), wait_share(window), window.trainer.step_s
    )


def arrived(window: Observation, decisions: tuple[Decision, ...]) -> bool:
    """Whether the decided kinds of workers are in force, and the old ones have left."""
    kinds = {d.operator: d.new for d in decisions if d.knob == "executor"}
    segments = [segment for segment in window.segments if segment.name in kinds]
    there = all(s.rows > 0 and s.executor == kinds[s.name] for s in segments)
    none_moving = not any(segment.moving for segment in window.segments)
    hosts = (d.new for d in decisions if d.knob == "host")
    return there and none_moving and all(host == window.host for host in hosts)


class Verdict(Enum):
    """The conclusion of a trial."""

    MORE = "more"
    """Not yet distinguishable from noise."""
    KEEP = "keep"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True)
class Trial:
    """Decisions applied together, and the windows before and after."""

    decisions: tuple[Decision, ...]
    before: tuple[Observation, ...]
    """At least one window under the old values."""
    after: tuple[Observation, ...] = ()
    in_step: bool = False
    """Whether the trainer may wait for others: its own part of a step includes that."""

    def seen(self, window: Observation) -> Trial:
        """Return the trial with one more window under the new values."""
        return replace(self, after=(*self.after, window))

    def outcomes(self, *, kept: bool) -> tuple[DecisionOutcome, ...]:
        """Return the outcome of each decision; needs a window on both sides."""
        before, after = measured(self.before), measured(self.after)
        return tuple(
            DecisionOutcome(decision, kept, before, after, in_step=self.in_step)
            for decision in self.decisions
        )

    def verdict(self, least: int = 1) -> Verdict:
        """Judge by the windows seen so far.

        Args:
            least: how many are evidence; only harm may be clear earlier.
        """
        if any(decision.forced for decision in self.decisions):
            return Verdict.KEEP
        change, error = self._cost_change()
        harmful = change > max(WORSE, STANDARD_ERRORS * error)
        if harmful and len(self.after) >= MIN_FOR_WORSE:
            return Verdict.ROLL_BACK
        if len(self.after) < least:
            return Verdict.MORE
        if all(decision.frees for decision in self.decisions):
            return self._of_release()
        most = max(MAX_FILLING if self._filling() else MAX_WINDOWS, least)
        gain = 1.0 / (1.0 + change) - 1.0
        return self._of_growth(max(gain, self._own_gain()), error, most)

    def _of_release(self) -> Verdict:
        if len(self.after) < MIN_FOR_RELEASE:
            return Verdict.MORE
        change, error = self._cost_change()
        if any(decision.rule == RELIEF for decision in self.decisions):
            good = -change >= max(WORTH, error)
        elif wait_share(whole(self.before)) > WORTH:  # it waits for another one
            good = max(change, -self._own_gain()) <= max(WORTH, min(error, WORSE))
        else:
            waiting = wait_share(whole(self.after))
            # Both are required: the mean may hide that the stock ran out in the end.
            good = max(waiting, wait_share(self.after[-1])) <= WORTH
        return Verdict.KEEP if good else Verdict.ROLL_BACK

    def _of_growth(self, gain: float, error: float, most: int) -> Verdict:
        promise = max(decision.expected for decision in self.decisions) - 1.0
        threshold = max(min(WORTH, GAIN_SHARE * promise), MIN_SHARE * promise)
        if gain >= threshold:
            return Verdict.KEEP
        far, count = gain < threshold - SURELY * error, len(self.after)
        long = sum(window.window_s for window in self.after) >= LONG_S
        over = (far or long) and not self._filling() and count >= MIN_FOR_WORSE
        return Verdict.ROLL_BACK if over or count >= most else Verdict.MORE

    def _own_gain(self) -> float:
        """Return what the step would gain if it were not for others.

        Ranks that step together wait for the slowest. If all are equally short of data,
        none gains by growing before all have: the wait of each moves to its own part of
        the step, and counts as gained.
        """
        if not self.in_step:
            return 0.0
        spared_share = wait_share(whole(self.before)) - wait_share(whole(self.after))
        return 1.0 / (1.0 - min(spared_share, ALL)) - 1.0

    def _filling(self) -> bool:
        """Whether segments ran at different speeds in the last window."""
        rows = [segment.rows for segment in self.after[-1].segments]
        return max(rows) > (1.0 + FILLING) * min(rows)

    def _cost_change(self) -> tuple[float, float]:
        """Return the relative increase of a sample's cost, and its standard error."""
        before = [cost_s(window) for window in self.before]
        after = [cost_s(window) for window in self.after]
        # Taken as a whole, as a single window may cut a step in two.
        base = cost_s(whole(self.before))
        change = cost_s(whole(self.after)) / base - 1.0
        rows = sustained_rows(whole(self.after)) / len(after)
        prior_sd = max(PRIOR_SD, COUNTING / sqrt(max(rows, 1.0))) * base
        spread = PRIOR_WINDOWS * prior_sd**2 + _scatter(before) + _scatter(after)
        freedom = PRIOR_WINDOWS + len(before) + len(after) - 2
        error = sqrt(spread / freedom * (1 / len(before) + 1 / len(after))) / base
        return change, error


def _scatter(values: list[float]) -> float:
    """Return the sum of squared distances from the mean."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


class Noise:
    """Estimates the noise of a window's cost from windows as they come.

    One sample in a hundred that takes fifty times as long makes one half second twice
    as slow as the next. The difference of two successive windows shows their noise
    without a trend (J. von Neumann, 1941: the mean square successive difference), and
    the mean of `n` windows has a noise smaller by a factor of the square root of `n`.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._squares: deque[float] = deque(maxlen=REMEMBERED)

    def see(self, window: Observation) -> bool:
        """Add one more window under the same values.

        Returns:
            whether it differs from the previous one by more than noise: the load has
            changed, and this window may show some of both.
        """
        cost = cost_s(window)
        if not isfinite(cost):
            return False
        last, self._last = self._last, cost
        if last is None:
            return False
        difference = (cost - last) / (0.5 * (cost + last))
        variance = JUMP_ERRORS**2 * 2.0 * self._variance
        self._squares.append(difference**2)
        return difference**2 > max(JUMP**2, variance)

    def cut(self) -> None:
        """Note a change: the next window has no predecessor."""
        self._last = None

    @property
    def windows(self) -> int:
        """Number of windows that are evidence, at least one."""
        return max(1, min(MAX_NOISE_WINDOWS, ceil(self._variance / AIM**2)))

    @property
    def _variance(self) -> float:
        """Relative variance of one window."""
        return sum(self._squares) / 2.0 / (PRIOR + len(self._squares))
