"""A digest of what a value is: the same in every process and on every machine.

Two values have one digest if they are of the same type and hold the same; two functions
if their code is the same, and all that it reaches by name or is bound to. Whatever has
no rule here is digested by what it is copied by (`__reduce_ex__`).
"""

from __future__ import annotations

import ast
import copyreg
import functools
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_digest

from . import definition
from .definition import PYTHON, Library, Reader, address, module_name, release
from .walk import (
    Rule,
    Undigestible,
    Walk,
    in_code,
    leaf,
    mapping,
    node,
    pairs,
    sequence,
    unordered,
)

__all__ = [
    "Undigestible",
    "begun",
    "digest",
    "rule_of",
    "said_fingerprint",
]

SAID = "__penstock_fingerprint__"
NO_PART = frozenset(
    (
        "__annotate__",
        "__annotate_func__",
        "__annotations__",  # they stand in the source
        "__annotations_cache__",
        "__classdictcell__",
        "__dataclass_fields__",  # what they do stands in the methods made of them
        "__dataclass_params__",
        "__firstlineno__",
        "__module__",
        SAID,  # what it returns counts
        "__qualname__",
        "__slotnames__",  # what copying looked up
        "__static_attributes__",  # in the order of a set
        "sample_fingerprints",
    )
)
"""Attributes of a class that say nothing of what it does, or nothing stable."""


def digest(value: Any, name: str) -> bytes:
    """Return 16 bytes that tell a value from others.

    Arrays and tensors are read whole, memory-mapped ones too.

    Args:
        value: whatever it is.
        name: what it is called in errors.

    Raises:
        Undigestible: it holds what has no meaning in another run: an open file, a lock,
            a generator, what code in C keeps to itself; or it is nested too deeply.
    """
    return begun(value, Walk(name, rule_of))


def begun(value: Any, walk: Walk) -> bytes:
    """Return the digest of a value; the walk says afterwards what it came by."""
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
    try:  # not by `getattr`: an object may hand on attributes of another
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = ()
    if SAID not in own and not says(kind):
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


# Libraries


def library(walk: Walk, name: str) -> bytes:
    """By its full name and the versions behind it."""
    walk.libraries.add(name)
    return leaf("library", f"{name} of {release(name)}")


def in_library(walk: Walk, value: Any) -> bytes | None:
    """Return the digest of what a library has by a name, or None if none has."""
    where = address(value)
    if where is None or release(where[0]) is None:
        return None
    return library(walk, ".".join(where))


# Code


def function(walk: Walk, value: types.FunctionType) -> bytes:
    """By its place in a library, else by what it does."""
    where = address(value)
    if where is None:
        return function_body(walk, value)
    return in_library(walk, value) or walk.later(":".join(where), value, function_body)


@in_code
def function_body(walk: Walk, value: types.FunctionType) -> bytes:
    """By its code, what this reaches, and what is bound to it."""
    said = said_fingerprint(value)
    if said is not None:
        return leaf("said", said)
    bound: dict[str, dict[Any, Any]] = {
        "default": dict(enumerate(value.__defaults__ or ())),
        "default ": value.__kwdefaults__ or {},
        "attribute": vars(value),
        "closure cell": dict(
            zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        ),
    }
    if value.__globals__ is vars(functools) and "registry" in vars(value):
        # singledispatch: its other parts remember the types that it has met
        bound = {"registry": dict(vars(value)["registry"])}
    parts = [walk.members(each, f".<{name}> ") for name, each in bound.items()]
    return node("function", does(walk, value), *parts)


def does(walk: Walk, value: types.FunctionType) -> bytes:
    """Return the digest of a function's source and code, and all that these reach.

    A closure that a library made is the library's: the user's is what it closes over.
    The code counts beside its source: lambdas of a line differ by it alone, and a file
    may have been edited since it was imported.
    """
    made_in, code = str(value.__globals__.get("__name__", "")), value.__code__
    if release(made_in) is not None:
        return library(walk, f"{made_in}.{code.co_qualname}")
    source = definition.source_of(code, value.__globals__)
    reader = Reader(source)
    if reader.imports_unknown:
        raise walk.undigestible("function that imports by a name made as it runs")
    walk.words |= reader.words | set(definition.names_of(code))
    walk.ctx.update("".join(tail[:1]) for tail in reader.tails.get("ctx", ()))
    if not source and "ctx" in code.co_varnames:
        walk.ctx.add("")
    reached = definition.reached(value, reader)
    names = [(name, walk.visit(each, f".<global> {name}")) for name, each in reached]
    return node(
        "does",
        leaf("source", repr([ast.unparse(each) for each in source])),
        code_(walk, code),
        *(part for name, found in names for part in (leaf("name", name), found)),
    )


def code_(walk: Walk, value: types.CodeType) -> bytes:
    """By its bytes, names and constants; not by where it stands."""
    constants: Any = value.co_consts
    if not value.co_flags & inspect.CO_OPTIMIZED:
        # a class in a function: it holds its line, and names in the order of a set
        constants = {frozenset(c) if isinstance(c, tuple) else c for c in constants}
        constants.discard(value.co_firstlineno)
    shape = (
        PYTHON,
        (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount),
        (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars),
        (value.co_flags, value.co_code, value.co_exceptiontable),
    )
    return node("code", leaf("shape", repr(shape)), walk.visit(constants, ""))


def class_(walk: Walk, value: type) -> bytes:
    """By its place in a library, else by what makes it."""
    where = address(value)
    is_static = not value.__flags__ & (1 << 9)  # Py_TPFLAGS_HEAPTYPE: made at run time
    if release(module_name(value)) is not None and (where or is_static):
        return library(walk, f"{module_name(value)}.{value.__qualname__}")
    if where is None:
        return class_body(walk, value)
    return walk.later(":".join(where), value, class_body)


@in_code
def class_body(walk: Walk, value: type) -> bytes:
    """By its name, its bases and its own attributes."""
    name = leaf("class", f"{module_name(value)}:{value.__qualname__}")
    above = [walk.visit(base, ".<base>") for base in (type(value), *value.__bases__)]
    own = {
        name: each
        for name, each in vars(value).items()
        if name not in NO_PART
        and not name.startswith("_abc_")
        and not isinstance(
            each, types.MemberDescriptorType | types.GetSetDescriptorType
        )
        and type(each).__name__ != "_tuplegetter"  # a namedtuple's, for `_fields`
    }
    hints = {
        key: each if isinstance(each, str) else getattr(each, "__qualname__", "")
        for key, each in vars(value).get("__annotations__", {}).items()
    }
    return node("class", name, *above, walk.members(own), leaf("hints", repr(hints)))


def module(walk: Walk, value: types.ModuleType) -> bytes:
    """By its name, and one of the user's own by all that is in it."""
    name = value.__name__
    if release(name) is not None:
        return library(walk, name)
    return walk.later(name, value, module_body)


@in_code
def module_body(walk: Walk, value: types.ModuleType) -> bytes:
    """By its globals, but for those that say where it is."""
    names = vars(value).keys() - definition.OF_A_MODULE
    own = {name: vars(value)[name] for name in names if not name.startswith("__")}
    return walk.members(own)


def bound(walk: Walk, value: Any) -> bytes:
    """A method of an object: by both; one that a library offers as a function: by name.

    Such are those of `random`: the state of its generator is no part of the code.
    """
    owner, name = value.__self__, value.__name__
    home = module_name(type(owner))
    offered = getattr(sys.modules.get(home), name, None)
    if type(offered) is type(value) and offered == value and release(home):
        return library(walk, f"{home}.{name}")
    method = getattr(value, "__func__", None)
    if method is None:
        return object_(walk, value)
    what = walk.visit(method, f".{name}")
    return node("method", walk.visit(owner, ".__self__"), what)


def cached(walk: Walk, value: Any) -> bytes:
    """By the function that `functools.cache` or its kin remembers the results of."""
    return in_library(walk, value) or walk.visit(value.__wrapped__, "")


def cell(walk: Walk, value: types.CellType) -> bytes:
    """By what is in it, if there is something by now."""
    try:
        content = value.cell_contents
    except ValueError:
        return leaf("empty cell")
    return walk.visit(content, "")


# Values


def ndarray(walk: Walk, value: np.ndarray[Any, Any]) -> bytes:
    """By its type, shape and elements, however they lie in memory."""
    kind = leaf("array", repr((value.dtype, value.shape)))
    if value.dtype.hasobject:
        return node("array", kind, sequence(walk, "objects", value.ravel().tolist()))
    flat = np.ascontiguousarray(value).reshape(-1)
    has_bytes = flat.size and flat.itemsize
    raw = flat.view(np.uint8).data if has_bytes else b""
    return node("array", kind, xxh3_128_digest(raw))


def tensor(walk: Walk, value: torch.Tensor) -> bytes:
    """By its type, shape and elements, wherever it is.

    Those of other kinds (sparse, nested, quantized) hold more, and "meta" ones less.
    """
    is_plain = value.layout == torch.strided and value.device.type != "meta"
    if not is_plain or value.is_nested or value.is_quantized:
        raise walk.undigestible(f"Tensor of a special kind ({value.layout})")
    here = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    kind = leaf("tensor", repr((here.dtype, tuple(here.shape), value.requires_grad)))
    raw = here.reshape(-1).view(torch.uint8).numpy()
    return node("tensor", kind, xxh3_128_digest(np.ascontiguousarray(raw).data))


def state_of(walk: Walk, state: Any) -> bytes:
    """What an object is given back when it is copied: its attributes, most often."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] or {}), **state[1]}  # of `__dict__`, of slots
    if isinstance(state, dict):
        return walk.members(state)
    return walk.visit(state, ".<state>")


def object_(walk: Walk, value: Any) -> bytes:
    """By its name in a library, or by what a copy of it is made of."""
    found = in_library(walk, value) if callable(value) else None
    if found is not None:
        return found
    kind: type = type(value)
    try:
        reduce = copyreg.dispatch_table.get(kind)
        parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001 - a user's `__getstate__` may raise anything
        raise walk.undigestible(kind.__name__) from None
    if isinstance(parts, str):
        return library(walk, f"{module_name(value) or module_name(kind)}.{parts}")
    maker, given, state, listed, paired = (*parts, None, None, None)[:5]
    if maker is copyreg.__newobj__:  # type: ignore[attr-defined]
        maker, *given = given
    items = list(paired or ())
    if issubclass(kind, OrderedDict):
        held = pairs(walk, [key for key, _ in items], [each for _, each in items])
    else:
        held = mapping(walk, dict(items))
    return node(
        "object",
        walk.visit(maker, ".<class>"),
        walk.each(given),
        state_of(walk, state),
        sequence(walk, "items", list(listed or ())),
        held,
    )


def set_(walk: Walk, value: set[Any] | frozenset[Any]) -> bytes:
    """By its items, in any order."""
    return node(
        "frozenset" if isinstance(value, frozenset) else "set", *unordered(walk, value)
    )


def parts(*names: str) -> Rule:
    """Return the rule for what is made of some attributes."""

    def rule(walk: Walk, value: Any) -> bytes:
        found = {name: getattr(value, name) for name in names}
        return node(type(value).__qualname__, walk.members(found))

    return rule


RULES: Mapping[type, Rule] = {
    # values
    dict: mapping,
    list: lambda walk, value: sequence(walk, "list", value),
    tuple: lambda walk, value: sequence(walk, "tuple", value),
    memoryview: lambda walk, value: ndarray(walk, np.asarray(value)),
    np.memmap: lambda walk, value: ndarray(walk, np.asarray(value)),
    np.ndarray: ndarray,
    type(Path()): lambda _, value: leaf("path", str(value)),
    # code
    Library: lambda walk, value: library(walk, str(value)),
    classmethod: parts("__func__"),
    functools._lru_cache_wrapper: cached,  # noqa: SLF001 - it has no other name
    functools.cached_property: parts("func"),  # has a lock besides
    property: parts("fget", "fset", "fdel"),
    staticmethod: parts("__func__"),
    types.BuiltinFunctionType: bound,
    types.CellType: cell,
    types.CodeType: code_,
    types.FunctionType: function,
    types.MappingProxyType: lambda walk, value: mapping(walk, dict(value)),
    types.MethodType: bound,
}
INHERITED: Mapping[type, Rule] = {
    frozenset: set_,
    functools.partial: parts("func", "args", "keywords"),
    set: set_,
    torch.Tensor: tensor,
}
"""Rules for types that others build on: with these, and what they add."""


@functools.lru_cache(1024)
def rule_of(kind: type) -> Rule:
    """Return how values of a type are digested."""
    if kind in RULES:
        return RULES[kind]
    if issubclass(kind, type):
        return class_
    if issubclass(kind, types.ModuleType):
        return module
    base = next((each for each in kind.__mro__ if each in INHERITED), object)
    own = INHERITED.get(base, object_)

    def rule(walk: Walk, value: Any) -> bytes:
        said = said_fingerprint(value)
        if said is not None:
            return leaf("said", said)
        found = own(walk, value)
        if own is object_ or kind is base:
            return found
        added = state_of(walk, object.__getstate__(value))  # in `__dict__` and slots
        return node("sub", walk.visit(kind, ".<class>"), found, added)

    return rule
