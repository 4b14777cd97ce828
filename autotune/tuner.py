"""The loop: observe, decide, apply, verify, keep or roll back, and log it.

`Tuner.step` is one iteration, without a thread or a clock: a live pipeline's thread
calls it, or a simulator, as often as it returns. `TunerThread` is that thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

from .. import errors
from ..engine.observe.observation import (
    Knob,
    Observation,
    Restriction,
    TrainerObservation,
)
from ..system.resources import Budget
from . import phrases
from .explain import evidence, explain, verdict_of
from .host_peers import HostPeers
from .log import LOGGER, AutotuneLog, Saved, Spoken
from .policies.policy import KnobKey, KnobView, PerRegime, Policy, Situation, Values
from .trial import (
    MAX_NOISE_WINDOWS,
    MAX_WINDOWS,
    Decision,
    DecisionOutcome,
    Noise,
    Trial,
    Verdict,
    arrived,
)
from .window import (
    TRUSTED_S,
    busiest,
    enough,
    joined,
    lacking_s,
    latest,
    report_s,
    staff,
    wait_share,
    whole,
)

# Between two looks, while there may be something to do.
CONTROL_S = 0.5
# A look is due earlier if all that is waited for is known to be there by then, but not
# by less than this.
MIN_CONTROL_S = 0.05
# Between two looks, after so many windows without a decision.
CALM_CONTROL_S, CALM_WINDOWS = 2.0, 20
# Steps and seconds that a verdict covers, if that many passed since the last change:
# short epochs begin with a wait, and end without one.
SPOKEN = 10, 5.0
# Reports of a worker after which what it was doing before a change is over.
REPORTS = 2
# Longest time to settle after a change; usually one window, or a row's duration.
MAX_SETTLE_S = 10.0
# A worker that has done nothing for this long is not waited for.
MAX_BEGIN_S = 60.0


class Plant(Protocol):
    """The thing to tune: a live pipeline, or a simulated one."""

    calm: bool
    """Set by the tuner: whether no trial is being judged, so that instruments which
    disturb the pipeline may be used."""
    tried: Mapping[str, str]
    """Set by the tuner: the operators for which more workers brought nothing, and that
    sentence, for observations to say."""

    @property
    def trained(self) -> TrainerObservation:
        """What the trainer has done since the start."""

    def observe(self) -> Observation | None:
        """Return the window since the last call; None if nothing moved or it is paused.

        It has at least one segment. The trainer's wait and own time should be those of
        the steps it counts: a step cut in two makes short windows of slow steps uneven.
        """

    def knobs(self) -> tuple[Knob, ...]:
        """Return all knobs, including those of pinned stages."""


class Tuner:
    """Runs one policy. It alone sets knobs, and no two trials overlap.

    Not thread-safe: one thread calls `step`, then `finish`.
    """

    def __init__(
        self,
        plant: Plant,
        policy: Policy[Any],
        budget: Budget,
        log: AutotuneLog,
        *,
        interval_steps: int = 0,
        host_peers: HostPeers | None = None,
        found: Mapping[str, Values] | None = None,
    ) -> None:
        """Start with no knowledge except what was found before.

        Args:
            plant: what to tune.
            policy: what decides.
            budget: what the plant may use.
            log: where it logs; the caller closes it.
            interval_steps: minimum training steps between two decisions; 0 decides as
                soon as there is evidence.
            host_peers: tuners to share the budget's cores with; None: nobody.
            found: values that served other regimes best in an earlier run.
        """
        self._plant = plant
        self._policy = PerRegime(policy, found)
        self._budget = budget
        self.log = log
        self._interval_steps = interval_steps
        self._memory = self._policy.start()
        self._regime = ""  # that of the window before
        self._short_window: Observation | None = None  # not yet enough to be evidence
        self._base: tuple[Observation, ...] = ()  # under the values now in force
        self._noise = Noise()
        self._trial: Trial | None = None
        self._settling = True  # the next window still shows how it was before
        self._settled_s = 0.0
        self._begins_s = float("inf")  # until when workers may begin
        self._host_peers = host_peers
        self._share = budget  # of it, that is not the host peers'
        # The policy does not know them yet.
        self._outcomes: tuple[DecisionOutcome, ...] = ()
        self._rollback: tuple[Decision, ...] = ()  # of the last trial rolled back
        self._before = plant.trained  # what was done untuned
        self._decided_at = self._before.steps
        self._quiet = 0  # windows since the last decision
        self._staff: tuple[tuple[str, str], ...] = ()  # kinds of workers
        self._host = "trainer"  # where they are
        self._moved_s = float("-inf")  # when the last move told was made
        # Workers released since they were last logged, and the bytes held before.
        self._release = 0, 0
        self._tried_s = float("-inf")  # when a trial ended last
        self._restrictions: set[tuple[str, ...]] = set()  # in the log
        self._verdict = Spoken()
        self._window: Observation | None = None  # the latest that was no trial

    def step(self) -> float:
        """Take one look, and do what follows from it.

        Returns:
            Seconds until the next look is due.
        """
        observation = self._plant.observe()
        if observation is None:
            if self._host_peers is not None:
                self._host_peers.rest()
            return self._due_s(float("inf"))
        if self._host_peers is not None:
            self._host_peers.stay()
        self._tell_spent(observation.time_s)
        if observation.trainer.away_s:  # before and after cannot be compared
            self._tell_moves(observation)
            self._short_window, self._settling = None, True
            self._settled_s = max(self._settled_s, observation.time_s)
            return CONTROL_S
        if observation.window_s > 0:
            self._tell_moves(observation)
            start = self._short_window
            window = observation if start is None else joined(start, observation)
            dropped = self._settling and window.regime == self._regime
            self._short_window = None if dropped or enough(window) else window
            if self._short_window is None:
                self._on_window(window)
                # While a change settles, nothing is compared that could be disturbed.
                self._plant.calm = self._trial is None or self._settling
        return self._due_s(observation.time_s)

    def _due_s(self, now_s: float) -> float:
        """Return the seconds until there may be something to do."""
        if self._quiet > CALM_WINDOWS:
            return CALM_CONTROL_S
        left_s = self._settled_s - now_s if self._settling else 0.0
        if self._short_window is not None:
            left_s = lacking_s(self._short_window)
        return min(left_s, CONTROL_S) if left_s > MIN_CONTROL_S else CONTROL_S

    def finish(self, recent: Callable[[], Observation] | None = None) -> None:
        """Log and write how it ended, and the final values.

        Args:
            recent: returns the last window, even of loops too short for a regular one.
        """
        window, last = self._window, None if recent is None else recent()
        if last is not None:  # the engine may have moved after the last look
            self._tell_moves(last)
            self._staff = staff(last)
            window = last if last.trainer.steps else window
        if window and window.trainer.steps and window.time_s > self._verdict.time_s:
            self._tell_verdict(window)
        elif window is not None:
            self._tell_spent(window.time_s, "end")
        trial, self._plant.tried = self._trial, {}
        self.log.result(self.found(), () if trial is None else trial.decisions)

    def found(self) -> Saved:
        """Return the values for an equal pipeline to start with."""
        values = {
            key: view.value for key, view in self._views().items() if not view.kind
        }
        regimes = dict(self._memory.values)
        if self._regime:
            regimes[self._regime] = values
        return Saved(values, dict(self._staff), regimes, self._budget.cpu_cores)

    def _on_window(self, window: Observation) -> None:
        """Handle one window of evidence: settle, verify, or decide."""
        if window.time_s > self._tried_s + TRUSTED_S or window.regime != self._regime:
            self._plant.tried = {}
        if self._host_peers is not None:
            self._share = self._host_peers.share(
                self._budget, wait_share(window), window.cpu_cores
            )
        if self._replaced(window) or self._entered(window):
            return
        if self._settling:
            decisions = () if self._trial is None else self._trial.decisions
            beginning = any(segment.beginning for segment in window.segments)
            settled_s = self._begins_s if beginning else self._settled_s
            self._settling = not arrived(window, decisions) or window.time_s < settled_s
            return
        jumped = self._noise.see(window)
        if self._trial is not None and not self._verify(self._trial.seen(window)):
            return
        # Nothing changed here, so it changed elsewhere; host peers do all the time.
        if jumped and self._base and not self._shared:
            self._quiet, self._base = 0, ()
            self._noise.cut()
            return
        self._base = (*self._base, window)[-MAX_NOISE_WINDOWS:]
        self._window = latest(self._base, *SPOKEN)
        if self._verdict.due(self._window):
            self._tell_verdict(self._window)
        due = self._plant.trained.steps - self._decided_at >= self._interval_steps
        if due and len(self._base) >= self._noise.windows:
            self._decide(whole(self._base[-self._noise.windows :]))

    @property
    def _shared(self) -> bool:
        """Whether others work on these cores, perhaps in step with this one."""
        return self._share.cpu_cores < self._budget.cpu_cores

    def _replaced(self, window: Observation) -> bool:
        """Whether workers of another kind appeared that nobody here requested.

        The engine resolves `auto` by itself, and it gives up what cannot be moved. The
        effects cannot be separated then, so the values stay, except those of a trial
        that failed.
        """
        before, self._staff = dict(self._staff), staff(window)
        decisions = () if self._trial is None else self._trial.decisions
        kinds = {d.operator: d.new for d in decisions if d.knob == "executor"}
        kinds |= {d.operator: d.old for d in self._rollback if d.knob == "executor"}
        rehoused, self._host = window.host != self._host, window.host
        moved = not rehoused and any(
            before.get(name, kind) != kind and kinds.get(name) != kind
            for name, kind in self._staff
        )
        failed = any(d.key not in self._knobs() for d in decisions)
        if failed and self._trial is not None:
            self._restore(self._trial)
        new = rehoused and not any(
            decision.knob == "host" for decision in (*decisions, *self._rollback)
        )
        if new or moved or failed:
            self._trial = None
            self._settle(window, reports=1 if new else REPORTS)
        return new or moved or failed

    def _entered(self, window: Observation) -> bool:
        """Whether the plan has entered another regime: its known values apply now."""
        before, self._regime = self._regime, window.regime
        if before in ("", window.regime):
            return False
        # If the regime was shorter than a decision takes, the policy never met it.
        self._memory = replace(self._memory, now=before)
        if self._trial is not None:
            self._restore(self._trial)
        self._trial = None
        self._settle(window)
        self._base = (window,)  # what is restored is compared with it
        self._decide(window)
        if self._trial is None:
            self._base = ()
        return True

    def _verify(self, trial: Trial) -> bool:
        """Judge the trial; True if it is over and the new values stay."""
        verdict = trial.verdict(self._noise.windows)
        self._trial = trial if verdict is Verdict.MORE else None
        if verdict is Verdict.MORE:
            return False
        kept = verdict is Verdict.KEEP
        outcomes = trial.outcomes(kept=kept)
        self._outcomes += outcomes
        self._plant.tried = tried(self._plant.tried, outcomes)
        self._tried_s = trial.after[-1].time_s
        for outcome in outcomes:
            self.log.outcome(outcome, trial.after[-1].time_s)
        if kept:
            numbers = (d for d in trial.decisions if d.knob == "num_parallel_workers")
            fewer, (workers, held_bytes) = (
                -sum(d.added for d in numbers),
                self._release,
            )
            if fewer > 0 and workers == 0:
                held_bytes = trial.before[-1].held_bytes
            self._release = max(0, workers + fewer), held_bytes
            self._base = trial.after[:-1]
        else:
            self._restore(trial)
            self._settle(trial.after[-1])
        return kept

    def _restore(self, trial: Trial) -> None:
        knobs = self._knobs()
        for decision in trial.decisions:
            if decision.key in knobs:
                knobs[decision.key].set(decision.old)
        self._rollback = trial.decisions

    def _decide(self, window: Observation) -> None:
        situation = Situation(window, self._views(), self._share, self._outcomes)
        self.log.situation(situation)
        decisions, self._memory = self._policy.decide(situation, self._memory)
        self._outcomes = ()
        self._decided_at = self._plant.trained.steps
        self._quiet = 0 if decisions else self._quiet + 1
        if decisions:
            self._apply(decisions, window)
        else:
            self._tell_released(window)
            self._tell_held(window)

    def _apply(self, decisions: tuple[Decision, ...], window: Observation) -> None:
        knobs = self._knobs()
        self._tell_spent(window.time_s, "decision")
        for decision in decisions:
            for line in evidence(window, decision):
                if line != decision.reason:
                    self.log.say(line)
            self.log.decision(decision, window.time_s)
            if decision.key in knobs:  # the engine may have moved since it was chosen
                knobs[decision.key].set(decision.new)
        windows = max(MAX_WINDOWS, self._noise.windows)
        self._trial = Trial(decisions, self._base[-windows:], in_step=self._shared)
        self._settle(window)

    def _settle(self, window: Observation, reports: int = REPORTS) -> None:
        """Wait for the next window, and until rows in progress have gone through."""
        self._settling = True
        longest_s = max(
            max(segment.run_s_per_row, reports * report_s(segment))
            for segment in window.segments
        )
        self._settled_s = window.time_s + min(longest_s, MAX_SETTLE_S)
        self._begins_s = window.time_s + MAX_BEGIN_S
        self._base = ()
        self._noise.cut()

    def _tell_verdict(self, window: Observation) -> None:
        self._tell_spent(window.time_s, "verdict")
        self.log.verdict(explain(window, self._share, tuned=True), window.time_s)

    def _tell_spent(self, time_s: float, event: str = "") -> None:
        self.log.spent(self._plant.trained - self._before, time_s, event)

    def _tell_moves(self, window: Observation) -> None:
        """Log the segments' moves that are new."""
        moves = [move for segment in window.segments for move in segment.moves]
        moves += window.moves
        for move in sorted(moves, key=lambda move: move.time_s):
            if move.time_s > self._moved_s:
                self._moved_s = move.time_s
                self.log.moved(move)

    def _tell_held(self, window: Observation) -> None:
        """Log what keeps the cause of a long wait from being removed, once."""
        explanation, worst = explain(window, self._share, tuned=True), busiest(window)
        restriction = explanation.restricted
        if restriction is None or restriction.why in (
            Restriction.TRIED,
            Restriction.TRIED_MORE,
        ):
            return  # the log has the trial
        worst = next(
            (s for s in window.segments if restriction.why in (s.held, s.stays)), worst
        )
        if (worst.name, *restriction) not in self._restrictions and (
            explanation.verdict == "input-bound"
        ):
            self._restrictions.add((worst.name, *restriction))
            self.log.say(phrases.held(worst, *restriction))

    def _tell_released(self, window: Observation) -> None:
        share, (workers, held_bytes) = wait_share(window), self._release
        if workers and verdict_of(share) == "not input-bound":
            nbytes = max(0, held_bytes - window.held_bytes)
            self.log.say(phrases.released(share, workers, nbytes))
        self._release = 0, 0

    def _views(self) -> dict[KnobKey, KnobView]:
        return {key: KnobView.of(knob) for key, knob in self._knobs().items()}

    def _knobs(self) -> dict[KnobKey, Knob]:
        return {(knob.operator, knob.name): knob for knob in self._plant.knobs()}


def tried(
    before: Mapping[str, str], outcomes: tuple[DecisionOutcome, ...]
) -> Mapping[str, str]:
    """Return the operators for which more workers are known to bring nothing."""
    moves = [o.kept for o in outcomes if isinstance(o.decision.new, str)]
    if moves:  # nothing is known of the new kind, and nothing new of the old one
        return {} if any(moves) else before
    restrictions = dict(before)
    for outcome in outcomes:
        decision = outcome.decision
        if decision.knob == "num_parallel_workers":
            restrictions.pop(decision.operator, None)
            fewer = outcome.kept and decision.rule in ("peak", "crowded")
            if fewer if decision.added < 0 else not outcome.kept:
                restrictions[decision.operator] = Restriction.TRIED_MORE
    return restrictions


# How long a loop that ends waits for a function of the user's, and how often it looks.
LEAVE_S, JOIN_S = 0.5, 0.05
LEFT = (
    "a function given to on_verdict has not returned for %.1f s, so the thread that"
    " called it is left behind; end it, or let it only note what it gets"
)


class TunerThread:
    """Runs a tuner beside the training, as a `with`.

    It owns one daemon thread, which alone touches the tuner until it is joined. A
    failure of the tuner ends the tuning with one warning; training goes on.
    """

    def __init__(
        self,
        tuner: Tuner,
        recent: Callable[[], Observation] | None = None,
    ) -> None:
        self._tuner = tuner
        self._recent = recent
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="penstock-autotune", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop tuning and wait for the thread, unless it is what leaves.

        A thread that is stuck in a function of the user's is left behind.
        """
        self._closing.set()
        if self._thread is threading.current_thread():
            return
        due_s = time.monotonic() + LEAVE_S
        while self._thread.is_alive():
            self._thread.join(JOIN_S)
            if self._tuner.log.in_listener and time.monotonic() > due_s:
                errors.LOGGER.warning(LEFT, LEAVE_S)
                return

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._tuner.step()):
                pass
            self._tuner.finish(self._recent)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            LOGGER.warning(
                "autotune failed and is off from here on; training continues with the"
                " present settings",
                exc_info=error,
            )
