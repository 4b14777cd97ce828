"""What is sent to worker processes that are not forked from the trainer, as bytes.

It is sent by cloudpickle: functions and classes of the program's own file, lambdas and
closures travel by value. If something cannot be sent, the error names it as user code
would.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch

from ...errors import SpecError
from ...system.printing import name_of
from ..program.program import Filter, Map, Read, ReadOn
from ..witness.reach import parts_of, walk

MAX_TRIES = 200
"""Parts that are tried one by one to find the one that cannot be sent."""
FORKED = 'options(multiprocessing_context="fork")'
SPAWNED_MAIN = "__mp_main__"
"""What `__main__` is called in a process that multiprocessing did not fork."""
OWN_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__")
"""Methods with which a class controls what is sent of its objects."""


def pack(thing: Any, name: str, elsewhere: str = FORKED) -> bytes:
    """Return `thing`, which errors call `name`, as bytes.

    Args:
        thing: what to pack.
        name: its name in errors.
        elsewhere: the setting with which it need not be sent.

    Raises:
        SpecError: it holds something that cannot be sent; names the innermost part.
    """
    body = io.BytesIO()
    try:
        _dump(thing, body)
    except Exception as error:
        found = _innermost(thing, name, error)
        raise SpecError(_explain(found, elsewhere)) from error
    return body.getvalue()


def unpack(body: bytes | mmap.mmap | memoryview) -> Any:
    """Return what was packed; `body` comes from the trainer's own process."""
    return pickle.loads(body)  # noqa: S301


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something that cannot be sent, and why."""

    path: str
    thing: Any
    error: Exception


class OnGpu(pickle.PicklingError):
    """A tensor is on a GPU, which a copy of it would open in every worker."""


@cache
def pickler() -> Any:
    """Return the pickler class: cloudpickle's, but refusing tensors on a GPU."""
    import cloudpickle

    if SPAWNED_MAIN in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[SPAWNED_MAIN])

    def reducer_override(self: Any, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor) and thing.is_cuda:
            raise OnGpu(f"it is on {thing.device}")
        return cloudpickle.Pickler.reducer_override(self, thing)

    ways = {"reducer_override": reducer_override}
    return type("Pickler", (cloudpickle.Pickler,), ways)


def _dump(thing: Any, file: Any) -> None:
    pickler()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)


def _explain(obstacle: Obstacle, elsewhere: str) -> str:
    kind = type(obstacle.thing)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if isinstance(obstacle.error, OnGpu):
        cure = (
            "keep it on the CPU (.cpu()) and let .to_device() copy the batches, or use "
            'executor="thread"'
        )
    else:
        cure = (
            "create it when it is first used (drop it in __getstate__), or use "
            f'{elsewhere}, or executor="thread"'
        )
    return (
        f"`{obstacle.path}` (a {name}) cannot be sent to worker processes that are "
        f"not forked from the trainer: {obstacle.error}; {cure}"
    )


# Finding what cannot be sent


def _innermost(thing: Any, name: str, error: Exception) -> Obstacle:
    """Descend from `thing`, at each step into a part that cannot be sent by itself."""
    tried = {id(thing): thing}
    found = _first(_given(thing), tried) or Obstacle(name, thing, error)
    while inner := _first(_sent(found), tried):
        found = inner
    return found


def _first(named: Iterable[tuple[str, Any]], tried: dict[int, Any]) -> Obstacle | None:
    """Return the first of these that cannot be sent; each is tried only once."""
    for path, thing in named:
        if len(tried) >= MAX_TRIES:
            return None
        if id(thing) in tried:
            continue
        tried[id(thing)] = thing
        try:
            with open(os.devnull, "wb") as nowhere:
                _dump(thing, nowhere)
        except Exception as error:  # noqa: BLE001 whatever user objects raise
            return Obstacle(path, thing, error)
    return None


def _given(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the user's objects in operations within `thing`, under the user's names."""
    for part in walk(thing, ""):
        match part.thing:
            case Read(get=get):
                yield "dataset", getattr(get, "__self__", get)
            case ReadOn(dataset=dataset):
                yield "dataset", dataset
            case Map(function=function) | Filter(predicate=function):
                yield name_of(function), function


def _sent(whole: Obstacle) -> Iterator[tuple[str, Any]]:
    """Yield the parts that are sent with it: those it holds back are not to blame."""
    parts = parts_of(whole.thing)
    if any(_is_own(whole.thing, way) for way in OWN_WAYS):
        with suppress(Exception):  # otherwise it is to blame itself
            parts = _reduced(whole.thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
    return ((whole.path + step, part) for step, part in parts)


def _is_own(thing: Any, method: str) -> bool:
    """Whether a method is written in Python: built-in types send all their parts."""
    owners = (owner.__dict__ for owner in type(thing).__mro__)
    return any(type(each.get(method)) is FunctionType for each in owners)


def _reduced(reduced: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a result of `__reduce_ex__`."""
    if type(reduced) is str:  # the name of a global
        return
    args, state = [*reduced[1:], None][:2]
    for at, arg in enumerate(args):
        yield f".__reduce__()[1][{at}]", arg
    states = state if type(state) is tuple else (state,)
    for each in states:
        if type(each) is dict:
            yield from ((f".{name}", value) for name, value in each.items())
        elif each is not None:
            yield ".__getstate__()", each
