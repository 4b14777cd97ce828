"""The situation: all that a policy is told, frozen, and its form in the JSON log.

A policy decides on nothing else, so a log's situations put to the same policy again
give the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..pipeline.knob import Knob, KnobName
from ..pipeline.observation import (
    ConnectorObservation,
    Move,
    Observation,
    PartObservation,
    SegmentObservation,
    TrainerObservation,
)
from .budget import Budget
from .decision import Decision, Measure, Outcome, Row

__all__ = ["KnobKey", "KnobView", "Situation"]

KnobKey = tuple[str, KnobName]
"""Operator and name of a knob."""


@dataclass(frozen=True, slots=True)
class KnobView:
    """What a policy may know of a knob: nothing that could turn it."""

    value: int
    lower: int
    upper: int
    tunable: bool

    @classmethod
    def of(cls, knob: Knob) -> KnobView:
        """The knob as it stands now."""
        return cls(knob.value, knob.lower, knob.upper, knob.tunable)


@dataclass(frozen=True, slots=True)
class Situation:
    """One window, the knobs and limits, and what came of earlier decisions."""

    observation: Observation
    knobs: Mapping[KnobKey, KnobView]
    budget: Budget
    outcomes: tuple[Outcome, ...] = ()
    """Of the decisions verified since the policy was last asked."""

    def to_row(self) -> Row:
        """The situation as a row of the JSON log."""
        return {
            "time_s": self.observation.time_s,
            "event": "observation",
            "observation": asdict(self.observation),
            "knobs": [
                {"op": operator, "knob": name, **asdict(view)}
                for (operator, name), view in self.knobs.items()
            ],
            "budget": asdict(self.budget),
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Situation:
        """The situation that `to_row` wrote down."""
        return cls(
            observation=_observation(row["observation"]),
            knobs={
                (knob["op"], knob["knob"]): KnobView(
                    knob["value"], knob["lower"], knob["upper"], knob["tunable"]
                )
                for knob in row["knobs"]
            },
            budget=Budget(**row["budget"]),
            outcomes=tuple(_outcome(outcome) for outcome in row["outcomes"]),
        )


def _observation(row: Mapping[str, Any]) -> Observation:
    trainer = TrainerObservation(**row["trainer"])
    segments = tuple(_segment(segment) for segment in row["segments"])
    return Observation(**{**row, "trainer": trainer, "segments": segments})


def _segment(row: Mapping[str, Any]) -> SegmentObservation:
    feeding = row["input"] and ConnectorObservation(**row["input"])
    output = ConnectorObservation(**row["output"])
    moves = tuple(Move(**move) for move in row["moves"])
    parts = tuple(PartObservation(**part) for part in row.get("parts", ()))
    inner = {"input": feeding, "output": output, "moves": moves, "parts": parts}
    return SegmentObservation(**{**row, **inner})


def _outcome(row: Mapping[str, Any]) -> Outcome:
    return Outcome(
        decision=Decision(**row["decision"]),
        kept=row["kept"],
        before=Measure(**row["before"]),
        after=Measure(**row["after"]),
    )
