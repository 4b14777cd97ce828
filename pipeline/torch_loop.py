"""A loop that torch's own workers load: counted, and resumed.

What torch's loaders know of their place is how many batches they gave, so a loop goes
on by loading those once more, and dropping them. An iterable that keeps its own place,
with `state_dict` and `load_state_dict` on itself or on its iterator, is asked for it
where it is in the trainer's process: with 0 workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from .errors import StateError
from .plan import Drawing

__all__ = ["TorchLoop", "resumed"]


class TorchLoop(Iterator[Any]):
    """An iterator of torch's, counted; all else is asked of it."""

    def __init__(self, torchs: Any, drawing: Drawing) -> None:
        self._torchs = torchs
        self._drawing = drawing

    def __next__(self) -> Any:
        try:
            data = next(self._torchs)
        except StopIteration:
            self._drawing.end()
            raise
        self._drawing.batch += 1
        return data

    def __len__(self) -> int:
        return len(self._torchs)

    def __getattr__(self, name: str) -> Any:
        if name == "_torchs":  # while it is copied, or if it could not be made
            raise AttributeError(name)
        return getattr(self._torchs, name)


def resumed(begin: Callable[[], Any], drawing: Drawing, iterable: Any) -> TorchLoop:
    """Begin a loop where `drawing` stands.

    Args:
        begin: makes torch's iterator.
        drawing: the epoch; the generators are set to where it began.
        iterable: the data set, where it is an iterable and loaded by the trainer.
    """
    consumed, drawing.batch = drawing.batch, 0
    known, drawing.data = drawing.data, None
    if known is None:
        loop = TorchLoop(begin(), drawing)
        drawing.keeper = keeper_of(loop, iterable)
        deque(islice(loop, consumed), maxlen=0)
        return loop
    if is_keeper(iterable):  # its iterators begin where it stands
        iterable.load_state_dict(known)
    loop = TorchLoop(begin(), drawing)
    drawing.batch, drawing.keeper = consumed, keeper_of(loop, iterable)
    if drawing.keeper is None:
        raise StateError(
            f"the state is of an iterable that keeps its own place, and"
            f" {type(iterable).__name__} has no `load_state_dict` with num_workers=0;"
            " load it with the data set and the num_workers it was taken with"
        )
    if drawing.keeper is iterator_of(loop):  # also where that is the data set itself
        drawing.keeper.load_state_dict(known)  # as what began it may have drawn
    return loop


def keeper_of(loop: TorchLoop, iterable: Any) -> Any:
    """Return what knows how far an iterable is read, if anything does."""
    if iterable is None:
        return None
    return next(filter(is_keeper, (iterator_of(loop), iterable)), None)


def iterator_of(loop: TorchLoop) -> Any:
    """Return the data set's iterator that torch reads from in this process."""
    return getattr(getattr(loop, "_dataset_fetcher", None), "dataset_iter", None)


def is_keeper(each: Any) -> bool:
    """Whether it has torch's protocol `Stateful`."""
    return hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
