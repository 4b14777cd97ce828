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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch

# Members examined of a container, from its start: the others are probably alike.
MEMBERS = 32
# Attributes examined of an instance.
ATTRIBUTES = 256
# Levels examined: a file in a list of readers, in a dataset in a dataset, is at 5.
DEPTH = 10
# Objects examined in one walk: a few milliseconds.
MAX_PARTS = 500

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
# The built-in containers, whose objects have no attributes.
BARE = frozenset((dict, list, tuple, deque, set, frozenset))
LRU_CACHE: type = type(lru_cache(int))
# Methods through which a worker enters a user's object.
ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward")


class ObjectPart(NamedTuple):
    """An object that a walk reached."""

    path: str
    """`dataset.readers[0].file`"""
    thing: Any


def walk(thing: Any, name: str) -> Iterator[ObjectPart]:
    """Yield `thing`, here called `name`, and everything it consists of, nearest first.

    Every object comes once. Numbers and text are left out.
    """
    yield ObjectPart(name, thing)
    parts = (part for _, _, part, is_new in edges([ObjectPart(name, thing)]) if is_new)
    yield from islice(parts, MAX_PARTS - 1)


def edges(
    things: Sequence[ObjectPart],
) -> Iterator[tuple[Any, str, ObjectPart, bool]]:
    """Yield everything that things consist of, nearest first. Cycles end.

    Each time this is an object, the step from there to one that it holds, this one, and
    whether it is new: nothing nearer holds it, and it is no number and no text.
    """
    # Keeps them alive: a new object could reuse an id.
    objects = {id(part.thing): part.thing for part in things}
    level = list(things)
    for _ in range(DEPTH):
        below = []
        parts = (
            (thing, step, ObjectPart(path + step, inner))
            for path, thing in level
            for step, inner in direct_parts(thing)
        )
        for thing, step, part in parts:
            inner = part.thing
            is_new = type(inner) not in PLAIN and id(inner) not in objects
            if is_new:
                objects[id(inner)] = inner
                below.append(part)
            yield thing, step, part, is_new
        level = below


def direct_parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `thing` directly holds: `(".transform", ...)`, `("[3]", ...)`.

    What a function uses from around it appears as `.<closure>.x`, `.<globals>.x` and
    `.<defaults>.x`. Arrays, tensors, classes and modules have no parts, but what code
    uses of the user's classes and modules is a part of it: `.<globals>.Config.size`.
    """
    for step, names, read, most, around in views_of(thing):
        with suppress(RuntimeError):  # another thread changed it meanwhile
            # At once: Python code in between would let other threads run.
            pairs = list(zip(islice(names(), most), read(), strict=False))
            yield from (
                (step(name), value)
                for name, value in pairs
                if around is None
                or type(value) is not types.FunctionType
                or value.__globals__ is around
            )


class View(NamedTuple):
    """One way in which an object holds others, to be looked at now or later."""

    step: Callable[[Any], str]
    """Writes a name as a path has it."""
    names: Callable[[], Iterable[Any]]
    """Returns the present names, or positions."""
    read: Callable[[], Iterable[Any]]
    """Returns, as quickly as possible, what the object holds under these names."""
    most: int = ATTRIBUTES
    """How many count."""
    around: dict[str, Any] | None = None
    """The globals of a module: functions of others are no parts of what uses them, as
    their modules are none."""


def views_of(thing: Any) -> Iterator[View]:
    """Yield the ways in which a thing holds others."""
    kind = type(thing)
    if not WHOLE.isdisjoint(kind.__mro__):
        return
    base = container_of(kind)
    if base is dict:
        values = partial(dict.values, thing)
        yield View(_in_brackets, partial(dict.keys, thing), values, MEMBERS)
    elif base is not None:  # bypassing any `__iter__` of a subclass
        step = ("<member>" if base in (set, frozenset) else "[{}]").format
        yield View(step, count, partial(base.__iter__, thing), MEMBERS)
    if kind in BARE:
        return
    for fixed_kind, names in FIXED.items():
        if is_a(thing, fixed_kind):
            contents = [vars(fixed_kind)[name].__get__(thing) for name in names]
            yield View(".{}".format, partial(iter, names), partial(iter, contents))
    code = is_a(thing, types.FunctionType)
    if code:
        yield from _around(thing)
    own = _dict_of(thing)
    yield View(".{}".format, partial(dict.keys, own), partial(dict.values, own))
    owners = (owner for owner in kind.__mro__ if "__slots__" in vars(owner))
    for slots in filter(None, map(_slots, owners)):
        yield View(".{}".format, partial(iter, slots), partial(_in_slots, thing, slots))
    if not code:
        methods, used_names = _methods(kind)
        places = methods + [at for at in _data_of(kind, used_names) if at[1] not in own]
        called_names = [name for _, name in places]
        yield View(
            ".{}".format, partial(iter, called_names), partial(_looked_up, places)
        )


def container_of(kind: type) -> Any:
    """Return the built-in container that a class is or extends, or None."""
    return next((owner for owner in kind.__mro__ if owner in BARE), None)


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Act like `isinstance`, without reading `__class__`, which may be a property."""
    return issubclass(type(thing), kinds)


# Attributes that objects of some built-in types keep for as long as they live.
FIXED: Mapping[type, tuple[str, ...]] = {
    partial: ("func", "args", "keywords"),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
}


def _in_brackets(key: Any) -> str:
    """Print a key; of the user's types only the name, as `__repr__` is user code."""
    return f"[{key!r:.60}]" if type(key) in PLAIN else f"[<{type(key).__name__}>]"


def _dict_of(thing: Any) -> dict[Any, Any]:
    """Return its `__dict__`, bypassing a property of that name."""
    for owner in type(thing).__mro__:
        descriptor = owner.__dict__.get("__dict__")
        if descriptor is not None and type(descriptor) in DICTIONARIES:
            attributes: dict[Any, Any] = descriptor.__get__(thing)
            return attributes
    return {}


# How a class shows the `__dict__` of its objects.
DICTIONARIES = types.GetSetDescriptorType, types.MemberDescriptorType


def _slots(owner: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots that a class adds, by name."""
    return {
        name: slot
        for name, slot in vars(owner).items()
        if type(slot) is types.MemberDescriptorType
    }


def _in_slots(
    thing: Any, slots: Mapping[str, types.MemberDescriptorType]
) -> Iterator[Any]:
    """Yield what is in some slots; None for one that is not set."""
    for slot in slots.values():
        try:
            yield slot.__get__(thing)
        except AttributeError:
            yield None


# Where an attribute of a class or a module is looked up.
Place = tuple[Mapping[str, Any], str]


def _looked_up(places: Iterable[Place]) -> Iterator[Any]:
    return (holder.get(name) for holder, name in places)


def _methods(kind: type) -> tuple[list[Place], list[str]]:
    """Return the methods that workers call, and those that these name in turn.

    All of them may use globals of their module.

    Returns:
        The methods; and the names that they use.
    """
    owners = [vars(owner) for owner in kind.__mro__]
    names, methods = list(ENTRIES), list[Place]()
    for name in names:
        holder: Mapping[str, Any] = next((o for o in owners if name in o), {})
        method = holder.get(name)
        if type(method) not in (types.FunctionType, LRU_CACHE):
            continue
        methods.append((holder, name))
        function = vars(method)["__wrapped__"] if type(method) is LRU_CACHE else method
        # Methods of torch's modules name many others.
        if type(function) is types.FunctionType and not (
            str(function.__module__).startswith("torch.")
        ):
            further = set(names_in(function.__code__)).difference(names)
            names += sorted(further)
    return methods, names


def _around(function: types.FunctionType) -> Iterator[View]:
    """Yield what a function's code uses that is neither an argument nor local."""
    code, around = function.__code__, function.__globals__
    closure, names = code.co_freevars, globals_in(code)
    contents = partial(map, _content, function.__closure__ or ())
    yield View(".<closure>.{}".format, partial(iter, closure), contents)
    if defaults := function.__defaults__:
        yield View(".<defaults>[{}]".format, count, partial(iter, defaults))
    if keywords := function.__kwdefaults__:
        keyword_values = partial(dict.values, keywords)
        yield View(
            ".<defaults>.{}".format, partial(iter, keywords), keyword_values, MEMBERS
        )
    values = partial(map, around.get, names)
    yield View(".<globals>.{}".format, partial(iter, names), values, ATTRIBUTES, around)
    # What code uses of the user's classes and modules:
    uses = [(f".<globals>.{name}", around.get(name)) for name in names]
    cells = zip(closure, contents(), strict=True)
    uses += [(f".<closure>.{name}", value) for name, value in cells]
    all_names = tuple(names_in(code))
    data = [(step, at) for step, value in uses for at in _data_of(value, all_names)]
    steps = tuple(f"{step}.{at[1]}" for step, at in data)
    yield View(str, partial(iter, steps), partial(_looked_up, [at for _, at in data]))


def _content(cell: types.CellType) -> Any:
    """Return what a variable around a function holds; None if not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _data_of(thing: Any, names: Iterable[str]) -> Iterator[Place]:
    """Yield the attributes of a class or a module that are among these names.

    Code does not count, nor do libraries, but for the environment's variables.
    """
    holders: list[Mapping[str, Any]] = []
    if is_a(thing, type):
        holders = [
            vars(owner)
            for owner in thing.__mro__
            if not is_of_library(str(owner.__module__))
        ]
    elif thing is os:
        holders = [{"environ": os.environ, "getenv": os.environ}]
    elif is_a(thing, types.ModuleType) and not is_of_library(thing.__name__):
        holders = [vars(thing)]
    for holder in holders:
        yield from (
            (holder, name) for name in names if not is_a(holder.get(name), CODE)
        )


CODE = (
    type(None),  # or missing
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
def is_of_library(module: str) -> bool:
    """Whether a module belongs to Python, torch or numpy, or to us."""
    root = module.partition(".")[0]
    return root in sys.stdlib_module_names or root in LIBRARIES


LIBRARIES = frozenset(("numpy", "torch", __name__.partition(".")[0]))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code may look up, including those of inner functions."""
    return (name for part in _codes(code) for name in part.co_names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of those within it."""
    yield code
    for inner in code.co_consts:
        if type(inner) is types.CodeType:
            yield from _codes(inner)


@lru_cache
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code looks up among globals, inner functions included."""
    names = (
        str(step.argval)
        for part in _codes(code)
        for step in dis.get_instructions(part)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return tuple(dict.fromkeys(names))


def rebinds(code: types.CodeType) -> bool:
    """Whether a function, or one within it, assigns to a variable around the function.

    That is a global, or a variable of a function around it.
    """
    outer = set(code.co_freevars)
    return any(
        step.opname == "STORE_GLOBAL"
        or (step.opname == "STORE_DEREF" and step.argval in outer & {*part.co_freevars})
        for part in _codes(code)
        for step in dis.get_instructions(part)
    )
