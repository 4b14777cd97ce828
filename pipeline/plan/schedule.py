"""What a batch is like, as a pure function of where it stands: never of a clock.

A schedule answers two questions. `at`: what is in force for the batch that starts here?
`next_change`: until where, at least, does its global size hold? The second makes
lengths and random access exact without walking over the steps (see `timeline`).
Everything that does not change how many batches there are (image size, learning rate,
momentum) may differ at every step and needs no change announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, Protocol

from ..errors import SpecError

__all__ = ["Change", "Constant", "Place", "Schedule", "Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is in force for one global batch."""

    global_size: int
    """Samples over all ranks, >= 1."""
    image_size: int | None = None
    """Pixels a side, >= 1; None where the pipeline's own operators say."""
    lr_mult: float = 1.0
    """Factor on the learning rate, >= 0."""
    momentum: float | None = None
    """0 to 1; None leaves the optimiser's own."""
    strength: float | None = None
    """Of augmentation, >= 0; None where nothing sets it."""

    def __post_init__(self) -> None:
        if self.global_size < 1:
            rule = f"`global_size` must be >= 1, got {self.global_size}"
        elif self.image_size is not None and self.image_size < 1:
            rule = f"`image_size` must be >= 1 pixel or None, got {self.image_size}"
        elif not self.lr_mult >= 0:
            rule = f"`lr_mult` must be >= 0, got {self.lr_mult}"
        elif self.momentum is not None and not 0 <= self.momentum <= 1:
            rule = f"`momentum` must be 0 to 1 or None, got {self.momentum}"
        elif self.strength is not None and not self.strength >= 0:
            rule = f"`strength` must be >= 0 or None, got {self.strength}"
        else:
            return
        message = f"{rule}; mend the batch size or the schedule"
        raise SpecError(message)


class Place(NamedTuple):
    """Where a batch starts: all that a schedule may look at."""

    epoch: int
    position: int
    """Positions of the epoch before it."""
    step: int
    """Batches before it, over all epochs."""
    epoch_length: int
    """Positions in every epoch."""

    @property
    def samples(self) -> int:
        """Positions before it, over all epochs, those of dropped tails included."""
        return self.epoch * self.epoch_length + self.position


@dataclass(frozen=True, slots=True)
class Change:
    """From where on, at the earliest, another global size may be in force."""

    unit: Literal["samples", "steps"]
    """As `Place.samples` or `Place.step` counts. Epoch e is sample e * epoch_length."""
    value: int


class Schedule(Protocol):
    """Pure, the same on every rank, with finitely many changes of the global size."""

    def at(self, place: Place) -> Setting:
        """Return what is in force for the batch that starts at `place`."""

    def next_change(self, place: Place) -> Change | None:
        """Return up to where, beyond `place`, the global size stays; None: for ever.

        The first batch at or after the change has the size that `at` gives there, be
        it the same; then the next change is asked for from there.
        """

    def describe(self) -> Mapping[str, object]:
        """Return what tells it from others: small, JSON, global sizes only."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The same setting for every batch."""

    setting: Setting

    def at(self, place: Place) -> Setting:  # noqa: ARG002 - the same everywhere
        """Return the one setting."""
        return self.setting

    def next_change(self, place: Place) -> Change | None:  # noqa: ARG002 - there is none
        """Return None: it never changes."""
        return None

    def describe(self) -> Mapping[str, object]:
        """Return its setting."""
        setting = asdict(self.setting)
        if self.setting.strength is None:  # as before there was any
            del setting["strength"]
        return {"kind": "constant", **setting}
