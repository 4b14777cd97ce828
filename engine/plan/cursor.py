"""The position of a run through the data, and its saved state.

    {"version": 1, "plan": HASH, "facts": {NAME: int | str},
     "epoch": int, "batch": int, "step": int, "position": int}

A state is O(1), plain JSON and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ...errors import StateError

STATE_VERSION = 1
"""Increased when states can no longer be read as before."""

Facts = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch starts; after an epoch's last one, that epoch's end."""

    epoch: int
    batch: int
    """Batches of the epoch that are consumed."""
    step: int
    """Batches consumed over all epochs."""
    position: int
    """Positions of the epoch that are consumed."""


def read_state(
    state: Mapping[str, object], plan_hash: str, facts: Facts, *, override: bool = False
) -> Cursor:
    """Return the cursor in `state`; with `override`, whatever plan it belongs to.

    Raises:
        StateError: it is not a state, is damaged, or is of another version or plan.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be a dict, got {type(state).__name__}; {CURE}")
    version = state.get("version")
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"state `version` must be {STATE_VERSION}, got {version!r}; "
            "load it with the release of penstock that wrote it"
        )
    if state.get("plan") != plan_hash and not override:
        raise StateError(difference(state.get("facts"), facts))
    return Cursor(*(count(each.name, state.get(each.name)) for each in fields(Cursor)))


CURE = "pass what state_dict() returned, whole"


def count(name: str, value: object) -> int:
    """Return `value` if it is an int >= 0.

    Raises:
        StateError: it is not.
    """
    if type(value) is not int or value < 0:
        raise StateError(f"state `{name}` must be an int >= 0, got {value!r}; {CURE}")
    return value


def difference(saved: object, facts: Facts) -> str:
    """Describe how the plan of a state differs from this one."""
    differing = (
        [
            f"{name}: saved {saved.get(name)!r}, now {value!r}"
            for name, value in facts.items()
            if saved.get(name) != value
        ]
        if isinstance(saved, Mapping)
        else []
    )
    if not differing:
        return f"the state is damaged: its `plan` and `facts` do not agree; {CURE}"
    return (
        f"the state belongs to another plan ({'; '.join(differing)}); "
        "build the pipeline as it was when the state was saved, or continue this one "
        "from the same sample of the epoch with load_state_dict(state, override=True)"
    )
