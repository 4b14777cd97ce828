"""Knobs: the only way to change a running pipeline from outside, and why some stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

KnobName = Literal["num_parallel_workers", "prefetch_size", "executor", "host"]
Value = int | str
"""A number, or one of a few kinds."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting of one operator that may change while the pipeline runs.

    Reading `value` and calling `set` are safe from any thread, and never wait for work
    in progress. A kind changes in the trainer's thread, at its next batch. If that
    fails, a `Move` says so and the knob disappears.
    """

    operator: str
    """Its name in the log: `Map(ID:2) decode`."""
    name: KnobName
    lower: int
    """Smallest number the user allows, >= 1; 0 for a kind."""
    upper: int
    """Largest number the user allows; 0 for a kind."""
    tunable: bool
    """False if the user pinned the stage with `tune=False`."""
    read: Callable[[], Value] = field(repr=False)
    write: Callable[[Any], object] = field(repr=False)
    choices: tuple[str, ...] = ()
    """Possible kinds; empty for a number."""
    held: str = ""
    """What keeps it from being raised, and what would let it; empty if nothing does."""

    @property
    def value(self) -> Value:
        """The requested value (workers may still be starting or finishing)."""
        return self.read()

    def set(self, value: Value) -> Value:
        """Request `value`; a number is clipped to its bounds.

        Returns:
            the requested value.

        Raises:
            ValueError: there is no such kind.
        """
        if isinstance(value, str):
            if value not in self.choices:
                text = f"{self.name} of {self.operator} must be one of {self.choices}"
                raise ValueError(f"{text}, got {value!r}")
        else:
            value = min(max(value, self.lower), self.upper)
        if value != self.read():
            self.write(value)
        return value


class Restriction(StrEnum):
    """Why a setting stays as it is, in the words of `explain()` and of the log.

    Each says what would allow the change, if anything does. Most have one field, for
    `format`. Beside these, an error that a move met is such a reason.
    """

    # What the program says
    PINNED = "the stage has tune=False"
    GIVEN = 'executor="{}" was given, and "auto" allows others'
    BOUNDED = "it is limited to {}"
    ALONE = (
        "one worker was requested and stays alone, because {};"
        " num_parallel_workers=2 allows more"
    )
    HOSTED = 'options(host="{}") was given, and "auto" allows another'
    ZERO = "{}, but the program says `{}`; leave that out to let workers load"
    SHORT = (
        "{}, but epochs are so short that workers, which end with each, would hardly"
        " help; num_workers=2, persistent_workers=True keeps them"
    )
    SAMPLER = (
        "the sampler is the program's own, and with workers it would be asked ahead of"
        " time, before it can see what the loop does meanwhile; set num_workers"
        " yourself if that is acceptable"
    )
    # What samples are made of
    ITERABLE = (
        "one worker reads an iterable, in order (keep it cheap, and do the rest of the"
        " work in .map())"
    )
    SHARED = (
        "{}, so several workers would get wrong samples or the same draws; create it on"
        " first use, so that every worker has its own, and set num_parallel_workers, or"
        " pass from_dataset(thread_safe=True) if threads may share it"
    )
    CHANGES_THERE = (
        "`{}` changes there while samples are made, and each other worker would change"
        " its own copy"
    )
    CHANGES = (
        "`{}` changes while samples are made, and each worker would change its own"
        " copy; set the number of workers yourself if that is acceptable"
    )
    BELONGS = (
        "{} does not work in workers that share it, or have copies; create it on first"
        " use, so that each worker has its own, and set the number of workers yourself"
    )
    DREW = (
        "it draws from a global random generator, and each worker would draw from its"
        " own; draw from `rng`, or set the number of workers yourself if that is"
        " acceptable"
    )
    GRADIENTS = (
        "its samples carry gradients, which would end in the workers; set the number of"
        " workers yourself if that is acceptable"
    )
    # What this machine allows
    FORKLESS = "worker processes cannot be forked here"
    TRIED = "worker processes were tried lately, and were no faster"
    TRIED_MORE = "more workers were tried lately, and were no faster"
    MEMORY = "the memory budget has no room for more batches"


def is_chosen(why: str) -> bool:
    """Whether the program chose it, and may choose otherwise without harm."""
    return why.startswith(("executor=", "options("))
