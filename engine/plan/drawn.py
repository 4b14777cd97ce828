"""A plan that is drawn, not computed: the batches that torch's samplers yield.

As in torch, the trainer's thread draws them, a bounded number of batches ahead of what
is consumed; workers look up what was drawn. The plan covers a single epoch: a sampler
may yield anything in the next one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import SpecError, StateError
from .order import GOLDEN, BatchPlan, PlannedBatch, Planning, Rows, objects
from .plan import CURE, Cursor, count

VERSION = 1


@dataclass(slots=True)
class Drawing:
    """One epoch: the origin of its order, and how much of it is consumed.

    torch's samplers draw from its global generator, or from one of their own. With the
    states of these before the epoch, the same order can be drawn again. The trainer's
    thread counts the batches it receives.
    """

    epoch: int = 0
    batch: int = 0
    """Batches consumed."""
    torchs: bytes | None = None
    """State of torch's global generator before anything was drawn; None: not begun."""
    own: bytes | None = None
    """State of the loader's own generator, if it has one."""
    base: int | None = None
    """Base seed of workers kept from an earlier epoch, as torch draws none then; None:
    this epoch draws one, before its order."""
    seed: int | None = None
    """Seed of the epoch, if the program drew after it and before the order; then the
    states above are those at the order."""
    now: str | None = None
    """Digest of the global generator when a loaded state was taken; None if the loop
    began in this process."""
    workers: int | None = None
    """Workers that load an iterable: the order of its samples depends on them."""
    data: Any = None
    """State of the object that keeps an iterable's place, not loaded yet."""
    dataset: Any = None
    """State of an iterable dataset itself, before this epoch began."""
    later: Any = None
    """State of an iterable dataset itself when the state was taken, not loaded yet."""
    whole: bool = False
    """Whether the epoch's last batch was delivered, and its loop has not ended yet."""
    keeper: Any = None
    """Keeps the place of an iterable while it is read."""
    owner: Any = None
    """The dataset, if it has a state besides its keeper's."""
    undrawn: weakref.ref[LateOrder] | None = None
    """The order, if it may have to be drawn still; weak, as the order holds this."""

    def on(self, workers: int | None) -> None:
        """Continue with this many workers; None means any number.

        Raises:
            StateError: it began with another number, and that matters.
        """
        before = self.workers
        if self.batch and before != workers and None not in (before, workers):
            raise StateError(
                "the state of an iterable dataset was taken with"
                f" num_workers={before}, but this loader has {workers}, which changes"
                f" the order of its samples; load it with num_workers={before}, or"
                " start the epoch over"
            )
        self.workers = workers

    def restore(self, generator: torch.Generator | None) -> bool:
        """Restore the generators to the epoch's start; False if it has not begun."""
        self.now = None
        if self.torchs is None:
            return False
        torch.default_generator.set_state(_tensor(self.torchs))
        if generator is not None and self.own is not None:
            generator.set_state(_tensor(self.own))
        return True

    @contextlib.contextmanager
    def drawn_again(self, generator: torch.Generator | None) -> Iterator[None]:
        """Draw inside as when this epoch began; if it begins only now, note the states.

        The global generator is left as the order leaves it, so that the next epoch's
        order differs. If the program's generator already is where it was in this epoch,
        it stays there: this process drew the order before, or the program restored it.
        """
        before = torch.default_generator.get_state()
        there = self.now in (None, _digest(before))
        if not self.restore(generator):
            self.note(generator)
            yield
            return
        try:
            yield
        finally:
            if there:
                torch.default_generator.set_state(before)

    def note(self, generator: torch.Generator | None) -> None:
        """Begin the epoch: note the states of the generators."""
        self.torchs = _bytes(torch.default_generator)
        self.own = None if generator is None else _bytes(generator)

    def end(self) -> None:
        """End the epoch: the next one has not begun."""
        self.epoch, self.batch, self.torchs, self.own = self.epoch + 1, 0, None, None
        self.seed = self.data = self.dataset = self.later = None
        self.whole, self.keeper, self.owner = False, None, None

    def to_state(self) -> dict[str, object]:
        """Return it as JSON values.

        States of generators are in base64: some 7 kB in all, or 14 with a generator of
        the loader's own, however long the epoch is. An iterable's may be of any size.
        An order that is not drawn yet is drawn now, as the program may seed its
        generators before the first batch.
        """
        if self.undrawn is not None and (order := self.undrawn()) is not None:
            order.begin()
        return {
            "version": VERSION,
            "kind": "drawn",
            "epoch": self.epoch,
            "batch": self.batch,
            "torch": _text(self.torchs),
            "generator": _text(self.own),
            "base": self.base,
            "seed": self.seed,
            "now": _digest(torch.default_generator.get_state())
            if self.now is None
            else self.now,
            "workers": self.workers,
            "data": self.data if self.keeper is None else self.keeper.state_dict(),
            "dataset": self.dataset,
            "later": self.later if self.owner is None else self.owner.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> Drawing:
        """Read what `to_state` wrote.

        Raises:
            StateError: it is not such a state, damaged, or of another version.
        """
        if not isinstance(state, Mapping) or state.get("kind") != "drawn":
            raise StateError(f"this is not a DataLoader's state: {state!r:.80}; {CURE}")
        if state.get("version") != VERSION:
            raise StateError(
                f"state `version` must be {VERSION}, got {state.get('version')!r};"
                " load it with the release of penstock that wrote it"
            )
        return cls(
            epoch=count("epoch", state.get("epoch")),
            batch=count("batch", state.get("batch")),
            torchs=_read("torch", state.get("torch")),
            own=_read("generator", state.get("generator")),
            base=None if (n := state.get("base")) is None else count("base", n),
            seed=None if (n := state.get("seed")) is None else count("seed", n),
            now=str(state.get("now") or ""),
            workers=None
            if (n := state.get("workers")) is None
            else count("workers", n),
            data=state.get("data"),
            dataset=state.get("dataset"),
            later=state.get("later"),
        )


class LateOrder(Iterator[Any]):
    """A new epoch's batches, of which none is drawn before the first `next`.

    Without workers, torch's loader draws no order before the first batch. Two loops in
    step, or a model that is made in between, draw in the meantime.

    Args:
        batches: the batches of a sampler.
        drawing: the epoch; what its order is drawn from is noted there.
        seed: the epoch's seed, drawn already.
        generator: the loader's own, if it has one.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        drawing: Drawing,
        seed: int,
        generator: torch.Generator | None,
    ) -> None:
        self._batches = batches
        self._drawing, self._seed, self._generator = drawing, seed, generator
        # The generators' states after the seed; None once the order has begun.
        self._before: object = _states(generator)
        self._first: list[Any] = []
        # The first batch, or what the sampler raised instead, if drawn early.
        self._error: Exception | None = None
        drawing.undrawn = weakref.ref(self)

    def begin(self) -> None:
        """Draw the first batch now, as somebody takes a state that tells the order.

        What the sampler raises comes with that batch.
        """
        if self._before is None:
            return
        # Not by itertools: a sampler's `iter` might draw another order.
        try:
            self._first = [next(self)]
        except Exception as error:  # noqa: BLE001 whatever the user's sampler raises
            self._error = error

    def __next__(self) -> Any:
        if self._before is not None:
            if _states(self._generator) != self._before:
                self._drawing.note(self._generator)
                self._drawing.seed = self._seed
            self._before = None
        if (error := self._error) is not None:
            self._error = None
            raise error
        return self._first.pop() if self._first else next(self._batches)


def _states(generator: torch.Generator | None) -> list[bytes]:
    return [_bytes(rng) for rng in (torch.default_generator, generator) if rng]


def _bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _digest(state: torch.Tensor) -> str:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).hexdigest()


def _text(state: bytes | None) -> str | None:
    return None if state is None else base64.b64encode(state).decode()


def _read(name: str, text: object) -> bytes | None:
    """Return the state of a generator.

    Raises:
        StateError: it is not one.
    """
    if text is None:
        return None
    with contextlib.suppress(binascii.Error, ValueError, TypeError, RuntimeError):
        state = base64.b64decode(text, validate=True)  # type: ignore[arg-type]
        torch.Generator().set_state(_tensor(state))  # raises if it is not one
        return state
    raise StateError(f"state `{name}` is not a torch generator's state; {CURE}")


# Batches drawn for workers ahead of the one that the trainer takes next, if the order
# cannot depend on what the trainer does.
AHEAD = 128


class DrawnPlan(Planning):
    """The batches of the current epoch.

    `begin`, `draw` and `draw_batch` belong to the trainer's thread; any thread may call
    `batch` and `rows`. Steps continue over all epochs, as workers do.

    Args:
        ahead: batches drawn in advance; 0 if the trainer loads them itself, one at a
            time, and must not get ahead of a sampler that watches it.
        whole: whether the dataset reads a batch at once, by what the sampler yields.
    """

    def __init__(self, ahead: int = 0, *, whole: bool = False) -> None:
        self.ahead, self._whole = ahead, whole
        # By step; an entry is made once, and removed when nobody needs it any more.
        self._drawn_batches: dict[int, tuple[BatchPlan, Rows]] = {}
        # The first step that is in `_drawn_batches`, if any is.
        self._oldest_step = 0
        self._batches: Iterator[Iterable[Any]] = iter(())
        self._epoch = self._first = self._position = 0
        # Seed of the epoch, drawn when torch draws the base seed of its workers.
        self.seed = 0
        # Whether the samplers have no more for this epoch.
        self.exhausted = True
        # The first step that is not drawn yet.
        self.stop = 0
        # Batches that may be drawn in advance.
        self.most = AHEAD
        self._length: int | None = None
        self._first_batch: Iterable[Any] | None = None

    def begin(
        self,
        epoch: int,
        batches: Iterator[Iterable[Any]],
        seed: int,
        skip: int = 0,
        length: int | None = None,
        most: int = AHEAD,
        *,
        late: bool = False,
    ) -> Cursor:
        """Draw another epoch from here on; return where its first batch starts.

        Args:
            epoch: its number.
            batches: for each batch, its indices into the dataset.
            seed: the epoch's seed, for the random streams of its samples.
            skip: batches that are consumed already.
            length: number of batches in the epoch, if known.
            most: batches that may be drawn in advance.
            late: whether to draw nothing before the first batch is asked for.

        Raises:
            SpecError: as `draw`.
            Exception: whatever a sampler raises.
        """
        self._drawn_batches.clear()
        self._length, self.most = length, most
        self.ahead = min(self.ahead, max(1, most))  # workers need the one that is due
        self._batches, self._epoch, self.seed = batches, epoch, seed
        self._position = 0
        for _ in range(skip):  # not by islice: its `iter` might draw another order
            self._position += len(list(next(batches, ())))
        self._first, self._oldest_step = self.stop - skip, self.stop
        self.exhausted = False
        cursor = Cursor(epoch, skip, self.stop, self._position)
        self._first_batch = None
        if not late:  # at once: the generators may have been set for this
            self._first_batch = next(batches, None)
            self.exhausted = self._first_batch is None
            self.draw(self.stop)
        return cursor

    def draw(self, head: int) -> bool:
        """Draw what is needed while the trainer is at step `head`; True if any was.

        Raises:
            SpecError: a batch is empty.
            Exception: whatever a sampler raises.
        """
        before = self.stop
        while not self.exhausted and self.stop < head + self.ahead:
            indices = self._next()
            if indices is not None:
                rows = _indices(indices, whole=self._whole)
                if len(rows) == 0:
                    raise SpecError(
                        f"batch {self.stop - self._first} of the batch sampler is empty"
                        "; it must contain at least one index, unless the trainer"
                        " itself loads it: with num_workers=0"
                    )
                plan = self._planned(len(rows))
                self._drawn_batches[plan.step] = plan, Rows(rows, self.seeds(plan))
        while self._oldest_step < head - 1:
            self._drawn_batches.pop(self._oldest_step, None)
            self._oldest_step += 1
        return self.stop > before

    def draw_batch(self, step: int) -> tuple[BatchPlan, Any] | None:
        """Return the batch of this step, with indices as the sampler yielded them.

        An iterator becomes a list; at the end there is None. For a trainer that loads
        the batch itself: nothing is kept.

        Raises:
            Exception: whatever a sampler raises.
        """
        entry = self._drawn_batches.pop(step, None)
        if entry is not None:  # drawn for an engine that the trainer has left
            last = self.exhausted and step + 1 == self.stop
            return entry[0]._replace(last=last), as_yielded(entry[1].indices)
        indices = None if self.exhausted else self._next()
        if indices is None:
            return None
        if not isinstance(indices, Sized):
            indices = list(indices)
        plan = self._planned(len(indices))
        self._oldest_step = self.stop
        return plan, indices

    def seeds(self, plan: BatchPlan) -> NDArray[np.int64]:
        """Return the seeds of a batch's samples, each >= 0, `int64 [n_rows]`.

        The mixer of SplitMix64 (G. Steele, D. Lea, C. Flood: "Fast splittable
        pseudorandom number generators", OOPSLA 2014): adjacent seeds have nothing in
        common.
        """
        places = np.arange(plan.start, plan.start + plan.n_rows).astype(np.uint64)
        words = np.uint64(self.seed & 2**64 - 1) + (places + np.uint64(1)) * GOLDEN
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words ^= words >> np.uint64(31)
        return (words >> np.uint64(1)).astype(np.int64)

    def _next(self) -> Iterable[Any] | None:
        first, self._first_batch = self._first_batch, None
        indices = next(self._batches, None) if first is None else first
        self.exhausted = indices is None
        return indices

    def _planned(self, count: int) -> BatchPlan:
        """Return the stamp of the next batch, of `count` samples."""
        step, batch = self.stop, self.stop - self._first
        last = batch + 1 == self._length and self.ahead == 0
        start = self._position
        self._position += count
        self.stop += 1
        return BatchPlan(
            self._epoch,
            step,
            batch,
            start,
            last,
            *(count,) * 3,
            loss_weight=1.0,
            image_size=None,
            lr_mult=1.0,
            momentum=None,
        )

    # What an engine needs of any plan

    def planned(self, number: int) -> PlannedBatch:
        """Return the batch of a step that was drawn, with its samples.

        Their `rounds` are the seeds of their random streams.
        """
        return PlannedBatch(*self._drawn_batches[number])

    def first_step(self, epoch: int) -> int:
        """Return the end of the current epoch, as far as it is known."""
        assert epoch == self._epoch + 1
        return self.stop

    def cursor_after(self, plan: BatchPlan) -> Cursor:
        """Return the cursor after this batch."""
        return Cursor(
            plan.epoch, plan.batch + 1, plan.step + 1, plan.start + plan.n_rows
        )


class Yielded(NamedTuple):
    """What a sampler yielded for a batch, in place of the batch's first index."""

    keys: Any

    def __repr__(self) -> str:
        return f"{self.keys!r:.80}"


def as_yielded(indices: NDArray[Any]) -> Any:
    """Return what a dataset's `__getitems__` gets: what the sampler yielded."""
    items = indices.tolist()
    first = items[0] if items else None
    return first.keys if type(first) is Yielded else items


def _indices(keys: Iterable[Any], *, whole: bool) -> NDArray[Any]:
    """Return the indices of a batch, `[N]`: the sampler's own objects, if not ints."""
    indices = list(keys)
    if whole and indices and type(keys) is not list and isinstance(keys, Sized):
        return objects([Yielded(keys), *indices[1:]])
    if {*map(type, indices)} <= {int}:
        with contextlib.suppress(OverflowError):
            return np.array(indices, np.int64)
    return objects(indices)
