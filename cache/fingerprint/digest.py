"""A digest of what a value is: the same in every process and on every machine.

Two values have one digest if they are of the same type and hold the same; two functions
if their code does the same with the same constants, defaults, closures and globals.
"""

from __future__ import annotations

import functools
import types
from enum import Enum
from typing import Any

from . import definition
from .definition import address, module_name, release
from .values import NAMED, VALUES, content, described, parts, shown
from .walk import Rule, Undigestible, Walk, leaf, node

__all__ = [
    "Undigestible",
    "digest",
    "said_fingerprint",
]

SAID = "__penstock_fingerprint__"


def digest(value: Any, name: str) -> bytes:
    """Return 16 bytes that tell a value from others.

    Arrays and tensors are read whole, memory-mapped ones too.

    Args:
        value: whatever it is.
        name: what it is called in errors.

    Raises:
        Undigestible: it holds what has no meaning in another run: an open file, a lock,
            a generator, what code in C keeps to itself.
    """
    walk = Walk(name, rule_of)
    try:
        return walk.root(value)
    except RecursionError:
        raise walk.undigestible("value nested too deeply") from None


def said_fingerprint(value: Any) -> bytes | None:
    """Return what an object itself says it is to be told by, or None.

    That is `__penstock_fingerprint__`, or the `_fingerprint` of a data set of Hugging
    Face's `datasets`. An object that hands on attributes of another does not say so.

    Raises:
        TypeError: it says so by neither a str nor bytes.
    """
    kind: type = type(value)
    if isinstance(value, type):
        return None
    if not (says(kind) or SAID in getattr(value, "__dict__", {})):
        is_face = module_name(kind).partition(".")[0] == "datasets"
        said = getattr(value, "_fingerprint", None) if is_face else None
        return said.encode() if isinstance(said, str) else None
    said = getattr(value, SAID)
    said = said() if callable(said) else said
    if not isinstance(said, str | bytes):
        raise TypeError(
            f"`{SAID}` of {kind.__qualname__} must be a str or bytes, or return one,"
            f" got {said!r}"
        )
    return said.encode() if isinstance(said, str) else said


@functools.lru_cache(1024)
def says(kind: type) -> bool:
    """Whether objects of a class have a fingerprint by it."""
    return any(SAID in vars(owner) for owner in kind.__mro__)


def place(module: str, name: str) -> bytes:
    """Return the digest of what a library has by a name."""
    version = release(module) or definition.binary(module)
    return leaf("library", f"{module}:{name} of {version}")


def in_library(value: Any) -> bytes | None:
    """Return the digest of what a library has by a name, or None if none has."""
    where = address(value)
    return place(*where) if where and release(where[0]) is not None else None


def function(walk: Walk, value: types.FunctionType) -> bytes:
    """By its place in a library, else by what it does."""
    where = address(value)
    if where is None:
        return function_body(walk, value)
    library = in_library(value)
    return library or walk.later(":".join(where), value, function_body)


def function_body(walk: Walk, value: types.FunctionType) -> bytes:
    """By its code and all that this finds: globals, defaults, closure, attributes."""
    said = said_fingerprint(value)
    if said is not None:
        return leaf("said", said)
    made_in = str(value.__globals__.get("__name__", ""))
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    if release(made_in) is None:
        does = code(walk, value.__code__)
        named = definition.named_by(value)
    else:  # a closure that a library made: of the user's own is what it closes over
        does = place(made_in, value.__code__.co_qualname)
        named = {}
    return node(
        "function",
        does,
        walk.members(named, ".<global> "),
        walk.members(definition.defaults(value), ".<default> "),
        walk.members(cells, ".<closure cell> "),
        walk.members(vars(value)),
    )


def cell(walk: Walk, value: types.CellType) -> bytes:
    """By what is in it, if there is something by now."""
    try:
        content = value.cell_contents
    except ValueError:
        return leaf("empty cell")
    return walk.visit(content, "")


def code(walk: Walk, value: types.CodeType) -> bytes:
    """By what it does and the constants that it uses."""
    text, constants = definition.steps(value)
    return node("code", leaf("steps", text), walk.each(constants))


def class_(walk: Walk, value: type) -> bytes:
    """By its place in a library, else by what makes it."""
    module, where = module_name(value), address(value)
    if release(module) is not None and (where or definition.is_static(value)):
        return place(module, value.__qualname__)
    if where is None:
        return class_body(walk, value)
    return walk.later(":".join(where), value, class_body)


def class_body(walk: Walk, value: type) -> bytes:
    """By its name, its bases and its own attributes."""
    name = leaf("class", f"{module_name(value)}:{value.__qualname__}")
    above = (walk.visit(base, ".<base>") for base in (type(value), *value.__bases__))
    return node("class", name, *above, walk.members(definition.own_attributes(value)))


def module(walk: Walk, value: types.ModuleType) -> bytes:
    """By its place, and one of the user's own by the functions and classes in it."""
    if release(value.__name__) is not None:
        return place(value.__name__, "")
    return node(
        "module",
        leaf("name", value.__name__),
        walk.members(definition.own_attributes(value)),
    )


def builtin(walk: Walk, value: Any) -> bytes:
    """A function or descriptor made in C: by its name; a bound one by its object."""
    owner = getattr(value, "__self__", None)
    name = str(getattr(value, "__qualname__", value.__name__))
    if owner is None or isinstance(owner, types.ModuleType | type):
        return place(module_name(value), name)
    return bound(walk, value)


def bound(walk: Walk, value: Any) -> bytes:
    """A method of an object: by both; one that a library offers as a function: by name.

    Such are those of `random`: the state of its generator is no part of the code.
    """
    owner, name = value.__self__, value.__name__
    home = module_name(type(owner))
    offered = getattr(definition.loaded(home), name, None)
    if type(offered) is type(value) and offered == value and release(home):
        return place(home, name)
    method = getattr(value, "__func__", None)
    does = leaf("name", name) if method is None else walk.visit(method, f".{name}")
    return node("method", walk.visit(owner, ".__self__"), does)


def object_(walk: Walk, value: Any) -> bytes:
    """By its class and its attributes, if that is all that it holds."""
    kind: type = type(value)
    library = in_library(value) if callable(value) else None
    if library is not None:
        return library
    if kind.__module__ == "typing":
        return leaf("typing", repr(value))
    if kind is not object and definition.has_c_state(kind):
        raise walk.undigestible(kind.__name__)
    return node("object", *described(walk, value))


def cached(walk: Walk, value: Any) -> bytes:
    """By the function that `functools.cache` or its kin remembers the results of."""
    return in_library(value) or node("cached", walk.visit(value.__wrapped__, ""))


RULES: dict[type, Rule] = {
    **VALUES,
    # code
    functools._lru_cache_wrapper: cached,  # noqa: SLF001 - it has no other name
    functools.cached_property: parts("func"),  # has a lock besides
    functools.partial: content(functools.partial, parts("func", "args", "keywords")),
    classmethod: parts("__func__"),
    property: parts("fget", "fset", "fdel"),
    staticmethod: parts("__func__"),
    type: class_,
    types.BuiltinFunctionType: builtin,
    types.CellType: cell,
    types.ClassMethodDescriptorType: builtin,
    types.CodeType: code,
    types.FunctionType: function,
    types.GenericAlias: shown,
    types.GetSetDescriptorType: builtin,
    types.MemberDescriptorType: builtin,
    types.MethodDescriptorType: builtin,
    types.MethodType: bound,
    types.MethodWrapperType: builtin,
    types.ModuleType: module,
    types.UnionType: shown,
    types.WrapperDescriptorType: builtin,
    object: object_,
}


@functools.lru_cache(1024)
def rule_of(kind: type) -> Rule:
    """Return how values of a type are digested."""
    if kind in RULES:
        return RULES[kind]
    # an enumeration of ints is one first
    order = (Enum, *kind.__mro__) if issubclass(kind, Enum) else kind.__mro__
    names = (f"{each.__module__}.{each.__qualname__}" for each in order)
    found = (
        RULES.get(each, NAMED.get(name))
        for each, name in zip(order, names, strict=True)
    )
    own = next(rule for rule in found if rule is not None)

    def rule(walk: Walk, value: Any) -> bytes:
        said = said_fingerprint(value)
        return own(walk, value) if said is None else leaf("said", said)

    return rule
