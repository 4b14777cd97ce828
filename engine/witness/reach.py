"""What an object consists of, found without running any of the user's code.

A property may open a file, and a `__getattr__` may raise. So attributes are read from
where the interpreter keeps them, and containers by the built-in types' own methods. The
search is bounded, however large the object is.
"""

from __future__ import annotations

import dis
import enum
import logging
import os
import pathlib
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch

MEMBERS = 32
"""Members examined of a container, from its start: the others are probably alike."""
ATTRIBUTES = 256
"""Attributes examined of an instance."""
DEPTH = 10
"""Levels examined: a file in a list of readers, in a dataset in a dataset, is at 5."""
MAX_PARTS = 500
"""Objects examined in one walk: a few milliseconds."""

PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice)
)
VALUES = PLAIN - {bytes, bytearray}
WHOLE: frozenset[type] = PLAIN | {
    type,
    types.ModuleType,
    np.ndarray,
    np.generic,
    np.dtype,
    torch.Tensor,
    torch.dtype,
    threading.local,  # every thread has its own
    logging.Logger,  # leads to the streams of the whole process, each behind a lock
    logging.LoggerAdapter,
    logging.Handler,
    # Values, although they cache results about themselves:
    pathlib.PurePath,
    enum.Enum,
}
ITERABLE = (list, tuple, deque, set, frozenset)
BARE = frozenset((*ITERABLE, dict))
"""Types whose objects have no attributes."""
LRU_CACHE: type = type(lru_cache(int))
ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward")
"""Methods through which a worker enters a user's object."""

Named = tuple[str, Any]


class ObjectPart(NamedTuple):
    """An object that a walk reached."""

    path: str
    """`dataset.readers[0].file`"""
    thing: Any


def walk(thing: Any, name: str) -> Iterator[ObjectPart]:
    """Yield `thing`, here called `name`, and everything it consists of, nearest first.

    Every object comes once, so cycles end.
    """
    seen = {id(thing): thing}  # keeps them alive: a new object could reuse an id
    level = [ObjectPart(name, thing)]
    for _ in range(DEPTH):
        yield from level
        level = [
            ObjectPart(part.path + step, inner)
            for part in level
            for step, inner in _unseen(part.thing, seen)
        ]


def _unseen(thing: Any, seen: dict[int, Any]) -> Iterator[Named]:
    """Yield and record the parts that are new, while there is room for more."""
    for step, part in parts_of(thing):
        if len(seen) >= MAX_PARTS:
            return
        if id(part) not in seen:
            seen[id(part)] = part
            yield step, part


def parts_of(thing: Any) -> Iterator[Named]:
    """Yield what `thing` directly holds: `(".transform", ...)`, `("[3]", ...)`.

    What a function uses from around it appears as `.<closure>.x`, `.<globals>.x` and
    `.<defaults>.x`. Numbers and text are left out. Arrays, tensors, classes and modules
    have no parts, but what code uses of the user's classes and modules is a part of it:
    `.<globals>.Config.size`.
    """
    if WHOLE.isdisjoint(type(thing).__mro__):
        yield from (
            named for named in direct_parts(thing) if type(named[1]) not in PLAIN
        )


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Act like `isinstance`, without reading `__class__`, which may be a property."""
    return issubclass(type(thing), kinds)


def direct_parts(thing: Any) -> Iterable[Named]:
    """Return what a thing directly holds, numbers and text as well."""
    if type(thing) in BARE:
        return _members(thing)
    if is_a(thing, types.FunctionType):
        return chain(_around(thing), _attributes(thing))
    if is_a(thing, types.MethodType):
        return (".__self__", thing.__self__), (".__func__", thing.__func__)
    if is_a(thing, (types.BuiltinMethodType, types.MethodWrapperType)):
        return ((".__self__", thing.__self__),)
    return chain(_members(thing), _attributes(thing), _entries(thing))


def _members(thing: Any) -> Iterable[Named]:
    """Return what a container or a partial function holds."""
    if is_a(thing, dict):
        return ((f"[{_key(key)}]", value) for key, value in _items(thing, MEMBERS))
    if is_a(thing, (set, frozenset)):
        return (("<member>", each) for each in _first(thing))
    if is_a(thing, ITERABLE):
        return ((f"[{at}]", each) for at, each in enumerate(_first(thing)))
    if is_a(thing, partial):
        names = "func", "args", "keywords"
        return ((f".{name}", vars(partial)[name].__get__(thing)) for name in names)
    return ()


def _first(thing: Any) -> list[Any]:
    """Return the first members, bypassing any `__iter__` of a subclass."""
    kind = next(each for each in type(thing).__mro__ if each in ITERABLE)
    with suppress(RuntimeError):  # another thread changed it meanwhile
        return list(islice(kind.__iter__(thing), MEMBERS))
    return []


def _items(mapping: dict[Any, Any], most: int) -> list[tuple[Any, Any]]:
    with suppress(RuntimeError):  # another thread changed it meanwhile
        return list(islice(dict.items(mapping), most))
    return []


def _key(key: Any) -> str:
    """Print a key; of the user's types only the name, as `__repr__` is user code."""
    return f"{key!r:.60}" if type(key) in PLAIN else f"<{type(key).__name__}>"


def _attributes(thing: Any) -> Iterator[Named]:
    """Yield what is in `__dict__` and in slots."""
    for name, value in _items(_dict_of(thing), ATTRIBUTES):
        yield f".{name}", value
    for owner in type(thing).__mro__:
        if "__slots__" in owner.__dict__:
            yield from _slots(thing, owner)


def _dict_of(thing: Any) -> dict[Any, Any]:
    """Return its `__dict__`, bypassing a property of that name."""
    for owner in type(thing).__mro__:
        descriptor = owner.__dict__.get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType:
            found: dict[Any, Any] = descriptor.__get__(thing)
            return found
    return {}


def _slots(thing: Any, owner: type) -> Iterator[Named]:
    for name, slot in owner.__dict__.items():
        if type(slot) is types.MemberDescriptorType:
            with suppress(AttributeError):  # not set
                yield f".{name}", slot.__get__(thing)


def _entries(thing: Any) -> Iterator[Named]:
    """Yield the methods that workers call, and the methods that those name in turn.

    All of them may use globals of their module.
    """
    owners = [owner.__dict__ for owner in type(thing).__mro__]
    names = _names_used(type(thing))
    for name in names:
        method = next((each[name] for each in owners if name in each), None)
        if type(method) in (types.FunctionType, LRU_CACHE):
            yield f".{name}", method
    own = _dict_of(thing)
    for holder, name in _data_of(type(thing), names):
        if name not in own:
            yield f".{name}", holder.get(name)


def _names_used(kind: type) -> tuple[str, ...]:
    """Return the names that the methods use which workers call, theirs included."""
    owners = [owner.__dict__ for owner in kind.__mro__]
    names = list(ENTRIES)
    for name in names:
        method = next((each[name] for each in owners if name in each), None)
        if type(method) not in (types.FunctionType, LRU_CACHE):
            continue
        function = vars(method)["__wrapped__"] if type(method) is LRU_CACHE else method
        # Methods of torch's modules name many others.
        if type(function) is types.FunctionType and not (
            str(function.__module__).startswith("torch.")
        ):
            further = set(names_in(function.__code__)).difference(names)
            names += sorted(further)
    return tuple(names)


def _around(function: types.FunctionType) -> Iterator[Named]:
    """Yield what a function's code uses that is neither an argument nor local."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell: not assigned yet
            yield f".<closure>.{name}", cell.cell_contents
    for at, value in enumerate(function.__defaults__ or ()):
        yield f".<defaults>[{at}]", value
    for name, value in _items(function.__kwdefaults__ or {}, MEMBERS):
        yield f".<defaults>.{name}", value
    for name in globals_in(function.__code__):
        value = function.__globals__.get(name)
        # A function of another module is left out, as that module itself is.
        around = function.__globals__
        if not (type(value) is types.FunctionType and value.__globals__ is not around):
            yield f".<globals>.{name}", value
    for step, (holder, name) in _qualified(function):
        yield step, holder.get(name)


Place = tuple[Mapping[str, Any], str]
"""Where an attribute of a class or a module is looked up."""


def _qualified(function: types.FunctionType) -> Iterator[tuple[str, Place]]:
    """Yield what code uses of the user's classes and modules, with the path there."""
    names = tuple(names_in(function.__code__))
    around, closure = function.__globals__, function.__closure__ or ()
    used: list[Named] = [
        (f".<globals>.{name}", around.get(name))
        for name in globals_in(function.__code__)
    ]
    for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
        used += [(f".<closure>.{name}", value) for value in _contents([cell])]
    for step, value in used:
        for place in _data_of(value, names):
            yield f"{step}.{place[1]}", place


def _data_of(thing: Any, names: Iterable[str]) -> Iterator[Place]:
    """Yield the attributes of a class or a module that are among these names.

    Code does not count, nor do libraries, but for the environment's variables.
    """
    holders: list[Mapping[str, Any]] = []
    if is_a(thing, type):
        owners = (o for o in thing.__mro__ if not _is_of_library(str(o.__module__)))
        holders = [vars(owner) for owner in owners]
    elif thing is os:
        holders = [{"environ": os.environ, "getenv": os.environ}]
    elif is_a(thing, types.ModuleType) and not _is_of_library(thing.__name__):
        holders = [vars(thing)]
    for holder in holders:
        yield from ((holder, name) for name in names if _is_data(holder.get(name)))


def _is_data(value: Any) -> bool:
    """Whether an attribute of a class or a module is neither code nor missing."""
    return value is not None and not is_a(value, CODE)


CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    LRU_CACHE,
    property,
    classmethod,
    staticmethod,
    cached_property,
)


@lru_cache
def _is_of_library(module: str) -> bool:
    """Whether a module belongs to Python, torch or numpy, or to us."""
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in LIBRARIES


LIBRARIES = frozenset(("numpy", "torch", __name__.partition(".")[0]))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code may look up, including those of inner functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if type(inner) is types.CodeType:
            yield from names_in(inner)


@lru_cache
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code looks up among globals, inner functions included."""
    names = {
        str(step.argval): None
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for inner in code.co_consts:
        if type(inner) is types.CodeType:
            names |= dict.fromkeys(globals_in(inner))
    return tuple(names)


def rebinds(function: types.FunctionType) -> bool:
    """Whether it assigns to a global, or to a variable of a function around it."""
    outer = function.__code__.co_freevars
    return any(
        step.opname == "STORE_GLOBAL"
        or (step.opname == "STORE_DEREF" and step.argval in outer)
        for step in dis.get_instructions(function.__code__)
    )


View = Callable[[], Iterable[Any]]
"""Reads again what an object holds."""


def views_of(thing: Any) -> Iterator[View]:
    """Yield quick ways to read what a thing holds at any later time.

    Together they give what `direct_parts` does, but for defaults, and for methods that
    workers do not enter by.
    """
    if type(thing) in (tuple, frozenset) or not WHOLE.isdisjoint(type(thing).__mro__):
        return
    if is_a(thing, dict):
        yield partial(dict.values, thing)
    elif is_a(thing, ITERABLE):
        kind = next(each for each in type(thing).__mro__ if each in ITERABLE)
        yield partial(kind.__iter__, thing)
    if is_a(thing, types.FunctionType):
        yield partial(map, thing.__globals__.get, globals_in(thing.__code__))
        qualified = [place for _, place in _qualified(thing)]
        if qualified:
            yield partial(_looked_up, qualified)
        yield partial(_contents, thing.__closure__ or ())
    elif type(thing) not in BARE:
        yield partial(dict.values, _dict_of(thing))
        named = list(_data_of(type(thing), _names_used(type(thing))))
        named += [
            (owner.__dict__, name)
            for owner in type(thing).__mro__
            for name in ENTRIES
            if type(owner.__dict__.get(name)) is types.FunctionType
        ]
        if named:
            yield partial(_looked_up, named)
        slotted = (each for each in type(thing).__mro__ if "__slots__" in vars(each))
        for owner in slotted:
            yield partial(_values, thing, owner)


def _contents(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for cell in cells:
        with suppress(ValueError):  # an empty cell: not assigned yet
            yield cell.cell_contents


def _looked_up(places: Iterable[Place]) -> Iterator[Any]:
    return (holder.get(name) for holder, name in places)


def _values(thing: Any, owner: type) -> Iterator[Any]:
    return (value for _, value in _slots(thing, owner))
