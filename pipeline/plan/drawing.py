"""What an epoch's order was drawn from, and how much of it is consumed.

    {"version": 1, "kind": "drawn", "epoch": int, "batch": int,
     "torch": BASE64 | None, "generator": BASE64 | None,
     "workers": int | None, "data": whatever the data set's own state is | None}

torch's samplers draw from its global generator, or from one of their own: with the
state that these had before, the same order is drawn again. A state is some 7 kB, 14
with a generator of the loader's own, however long the epoch.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import StateError
from .cursor import CURE, count

__all__ = ["Drawing"]

VERSION = 1


@dataclass(slots=True)
class Drawing:
    """One epoch. The trainer's thread counts what it is given."""

    epoch: int = 0
    batch: int = 0
    """Batches consumed."""
    torchs: bytes | None = None
    """State of torch's global generator before anything was drawn; None: not begun."""
    own: bytes | None = None
    """That of the loader's own generator, if it has one."""
    workers: int | None = None
    """How many an iterable is loaded by: what order it comes in depends on them."""
    data: Any = None
    """The state of an iterable that keeps its own place, not loaded yet."""
    whole: bool = False
    """Whether that was all, and nobody has asked further."""
    keeper: Any = None
    """What keeps that place, while it is read."""

    def on(self, workers: int | None) -> None:
        """It goes on with so many workers, or with any number.

        Raises:
            StateError: it was begun with another number, and that matters.
        """
        if self.workers is not None and workers is not None and self.batch:
            check_workers(self.workers, workers)
        self.workers = workers

    def restore(self, generator: torch.Generator | None) -> bool:
        """Set the generators to where this epoch began; False where it has not."""
        if self.torchs is None:
            return False
        torch.default_generator.set_state(_tensor(self.torchs))
        if generator is not None and self.own is not None:
            generator.set_state(_tensor(self.own))
        return True

    @contextlib.contextmanager
    def drawn_again(self, generator: torch.Generator | None) -> Iterator[None]:
        """Draw within as when this epoch began; if it begins only now, take note.

        The global generator is the trainer's: it goes on as it was.
        """
        before = torch.default_generator.get_state()
        if not self.restore(generator):
            self.note(generator)
            yield
            return
        try:
            yield
        finally:
            torch.default_generator.set_state(before)

    def note(self, generator: torch.Generator | None) -> None:
        """The epoch begins: note the states of the generators."""
        self.torchs = _bytes(torch.default_generator)
        self.own = None if generator is None else _bytes(generator)

    def noted(self, generator: torch.Generator | None) -> Drawing:
        """Return it as if it began now."""
        self.note(generator)
        return self

    def end(self) -> None:
        """The epoch is over: the next one has not begun."""
        self.epoch, self.batch, self.torchs, self.own = self.epoch + 1, 0, None, None
        self.whole, self.data, self.keeper = False, None, None

    def to_state(self) -> dict[str, object]:
        """Return it as JSON can hold it."""
        return {
            "version": VERSION,
            "kind": "drawn",
            "epoch": self.epoch,
            "batch": self.batch,
            "torch": _text(self.torchs),
            "generator": _text(self.own),
            "workers": self.workers,
            "data": self.data if self.keeper is None else self.keeper.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Drawing:
        """Read what `to_state` wrote.

        Raises:
            StateError: it is no such state, damaged, or of another version.
        """
        if not isinstance(state, Mapping) or state.get("kind") != "drawn":
            text = f"this is no state of a DataLoader: {state!r:.80}; {CURE}"
            raise StateError(text)
        if state.get("version") != VERSION:
            text = (
                f"state `version` must be {VERSION}, got {state.get('version')!r};"
                " load it with the release of penstock that wrote it"
            )
            raise StateError(text)
        return cls(
            count("epoch", state.get("epoch")),
            count("batch", state.get("batch")),
            _read("torch", state.get("torch")),
            _read("generator", state.get("generator")),
            None if (n := state.get("workers")) is None else count("workers", n),
            state.get("data"),
        )


def check_workers(before: int, now: int) -> None:
    """Raise `StateError` where an iterable's order is another one now."""
    if before != now:
        raise StateError(
            f"the state of an iterable data set was taken with num_workers={before},"
            f" this loader has {now}, with which its samples come in another order;"
            f" load it with num_workers={before}, or begin the epoch anew"
        )


def _bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _text(state: bytes | None) -> str | None:
    return None if state is None else base64.b64encode(state).decode()


def _read(name: str, text: object) -> bytes | None:
    """Return the state of a generator, or raise `StateError`."""
    if text is None:
        return None
    with contextlib.suppress(binascii.Error, ValueError, TypeError, RuntimeError):
        state = base64.b64decode(text, validate=True)  # type: ignore[arg-type]
        torch.Generator().set_state(_tensor(state))  # it says if it is none
        return state
    message = f"state `{name}` is no state of a torch generator; {CURE}"
    raise StateError(message)
