"""How values are digested that are no code: containers, numbers, arrays, tensors."""

from __future__ import annotations

import io
import logging
import random
import re
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_digest

from . import definition
from .walk import ATOMS, Rule, Walk, leaf, mapping, node, ordered, sequence, unordered

__all__ = [
    "NAMED",
    "VALUES",
    "content",
    "described",
    "parts",
    "shown",
]


def described(walk: Walk, value: Any) -> tuple[bytes, bytes]:
    """Return the digests of an object's class and of its attributes."""
    kind = walk.visit(type(value), ".<class>")
    return kind, walk.members(definition.attributes(value))


def refuse(walk: Walk, value: Any) -> bytes:
    """Of no use in another run."""
    raise walk.undigestible(type(value).__name__)


def contents(rules: Mapping[type, Rule]) -> dict[type, Rule]:
    """Return rules for types that others build on: with these, and what they add."""
    return {kind: content(kind, rule) for kind, rule in rules.items()}


def content(kind: type, of: Rule) -> Rule:
    """Return the rule for a type and all that build on it."""

    def rule(walk: Walk, value: Any) -> bytes:
        found = of(walk, value)
        if type(value) is kind:
            return found
        return node("subclass", found, *described(walk, value))

    return rule


def digest_of(values: np.ndarray[Any, Any]) -> bytes:
    """Return the digest of an array's bytes, copied only where they lie apart."""
    flat = np.ascontiguousarray(values).reshape(-1)
    has_bytes = flat.size and flat.itemsize
    return xxh3_128_digest(flat.view(np.uint8).data if has_bytes else b"")


def ndarray(walk: Walk, value: np.ndarray[Any, Any]) -> bytes:
    """By its type, shape and elements, however they lie in memory."""
    kind = leaf("array", repr((value.dtype, value.shape)))
    if value.dtype.hasobject:
        return node("array", kind, sequence(walk, "objects", value.ravel().tolist()))
    return node("array", kind, digest_of(value))


def tensor(walk: Walk, value: torch.Tensor) -> bytes:
    """By its type, shape and elements, wherever it is.

    Those of other kinds (sparse, nested, quantized) hold more, and "meta" ones less.
    """
    is_plain = value.layout == torch.strided and value.device.type != "meta"
    if not is_plain or value.is_nested or value.is_quantized:
        raise walk.undigestible(f"Tensor of a special kind ({value.layout})")
    here = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    kind = leaf("tensor", repr((here.dtype, tuple(here.shape))))
    raw = here.reshape(-1).view(torch.uint8).numpy()
    return node("tensor", kind, digest_of(raw))


def enum(walk: Walk, value: Enum) -> bytes:
    """By its class, name and value."""
    kind = walk.visit(type(value), ".<class>")
    return node("enum", kind, leaf("name", str(value.name)), walk.each([value.value]))


def exception(walk: Walk, value: BaseException) -> bytes:
    """By its class, arguments and attributes."""
    parts = described(walk, value)
    return node("exception", walk.visit(value.args, ".args"), *parts)


def image(walk: Walk, value: Any) -> bytes:
    """A picture of Pillow's: by its pixels."""
    palette = value.getpalette() if value.mode == "P" else None
    parts = [value.mode, value.size, palette, value.info, value.tobytes()]
    return node("image", walk.each(parts))


def shown(walk: Walk, value: Any) -> bytes:
    """By what it is printed as: that says all, or where it lies in memory."""
    if " at 0x" in repr(value):
        raise walk.undigestible(type(value).__name__)
    return leaf(type(value).__qualname__, repr(value))


def parts(*names: str) -> Rule:
    """Return the rule for what is made of some attributes."""

    def rule(walk: Walk, value: Any) -> bytes:
        found = {name: getattr(value, name) for name in names}
        return node(type(value).__qualname__, walk.members(found))

    return rule


def made_of(*of: Callable[[Any], Any]) -> Rule:
    """Return the rule for what some functions say all of."""

    def rule(walk: Walk, value: Any) -> bytes:
        found = walk.each(each(value) for each in of)
        return node(type(value).__qualname__, found)

    return rule


def atom(kind: type, plain: Callable[[Any], Any]) -> Rule:
    """Return the rule for what builds on a simple type."""
    return lambda _, value: ATOMS[kind](plain(value))


VALUES: dict[type, Rule] = {
    **contents(
        {
            bytes: atom(bytes, bytes.__bytes__),
            complex: atom(complex, complex.__complex__),
            float: atom(float, float.__float__),
            int: atom(int, int.__int__),
            str: atom(str, str.__str__),
            OrderedDict: lambda w, v: ordered(w, "ordered", [*v], [*v.values()]),
            deque: lambda w, v: sequence(w, "deque", [*v]),
            dict: lambda w, v: mapping(w, dict(dict.items(v))),
            frozenset: lambda w, v: unordered(w, "frozenset", v),
            list: lambda w, v: sequence(w, "list", [*list.__iter__(v)]),
            set: lambda w, v: unordered(w, "set", v),
            tuple: lambda w, v: sequence(w, "tuple", [*tuple.__iter__(v)]),
            Decimal: shown,
            date: shown,
            datetime: shown,
            time: shown,
            timedelta: shown,
            timezone: shown,
            tzinfo: shown,
            np.ndarray: ndarray,
            torch.Tensor: tensor,
        }
    ),
    defaultdict: made_of(dict, attrgetter("default_factory")),
    MappingProxyType: made_of(dict),
    Enum: enum,
    PurePath: lambda _, value: leaf("path", str(value)),
    attrgetter: shown,
    itemgetter: shown,
    methodcaller: shown,
    array: made_of(attrgetter("typecode"), bytes),
    bytearray: made_of(bytes),
    memoryview: made_of(bytes),
    random.Random: made_of(random.Random.getstate),
    range: parts("start", "stop", "step"),
    re.Pattern: parts("pattern", "flags"),
    slice: parts("start", "stop", "step"),
    np.dtype: lambda _, value: leaf("dtype", repr(value)),
    np.generic: lambda w, value: node("scalar", ndarray(w, np.asarray(value))),
    np.memmap: lambda w, value: ndarray(w, np.asarray(value)),
    np.random.BitGenerator: parts("state"),
    np.random.Generator: parts("bit_generator"),
    np.random.RandomState: made_of(lambda value: value.get_state(legacy=False)),
    torch.Generator: made_of(torch.Generator.get_state, lambda g: g.device),
    torch.Size: made_of(tuple),
    torch.device: shown,
    torch.dtype: shown,
    torch.layout: shown,
    torch.memory_format: shown,
    BaseException: exception,
    io.IOBase: refuse,
    io.TextIOWrapper.__mro__[-2]: refuse,  # what those made in C build on
    threading.Thread: refuse,
    logging.Logger: lambda _, _logger: leaf("logger"),  # says what happens, does none
}
"""How values are digested, by type."""

NAMED: dict[str, Rule] = {"PIL.Image.Image": image}
"""Rules for types of libraries that need not be there."""
