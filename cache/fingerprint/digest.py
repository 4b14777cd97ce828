"""A digest of what a value is: the same in every process and on every machine.

Two values have one digest if they are of the same type and hold the same; two functions
if their source and code are the same, and all that these reach by name or are bound to.
Whatever has no rule here is digested by what it is copied by (`__reduce_ex__`).
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from xxhash import xxh3_128_digest

from .definition import OF_A_MODULE, PYTHON, Source, library_name, reached, release

SAID = "__penstock_fingerprint__"
NO_PART = {SAID, "sample_fingerprints", "__dict__", "__weakref__", "__module__"} | {
    "__annotations_cache__",  # there once they were asked for
    "__firstlineno__",
    "__slotnames__",  # what copying looked up
    "__static_attributes__",  # in the order of a set
    "_abc_impl",  # what `isinstance` was asked
}
"""Attributes of a class that say nothing of what it does, or nothing stable."""
ATOMS = frozenset(
    (bool, bytes, complex, float, int, str, type(None), type(...), type(NotImplemented))
)
ROUNDS = 1000
"""Steps to look around in circles: they cost as many digests as there are values."""

Parts = tuple[str, bytes | str, list[tuple[str, Any]]]
"""A value taken apart: a tag, what holds no others, and others with their labels."""


class Undigestible(Exception):
    """A value that no other run can be known to have.

    Attributes:
        path: where it was found, as in "dataset.handle".
        what: the name of its type.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} is a {what}, which no other run can find again")
        self.path = path
        self.what = what


def digest(value: Any, name: str) -> bytes:
    """Return 16 bytes that tell a value, called `name` in errors, from others.

    Raises:
        Undigestible: it holds what has no meaning in another run: an open file, a lock,
            a generator, what code in C keeps to itself.
    """
    return atom(value) if type(value) in ATOMS else Walk(value, name).digest()


def said_fingerprint(value: Any) -> bytes | None:
    """Return what an object itself says it is to be told by, or None.

    That is `__penstock_fingerprint__`, or the `_fingerprint` of a data set of Hugging
    Face's `datasets`. An object that hands on attributes of another does not say so.

    Raises:
        TypeError: it says so by neither a str nor bytes.
    """
    if isinstance(value, type):
        return None
    if inspect.getattr_static(value, SAID, None) is not None:
        said = getattr(value, SAID)
        said = said() if callable(said) else said
    elif type(value).__module__.partition(".")[0] == "datasets":
        said = getattr(value, "_fingerprint", None)
        said = said if isinstance(said, str) else None
    else:
        return None
    if not isinstance(said, str | bytes | None):
        raise TypeError(
            f"`{SAID}` of {type(value).__qualname__} must be a str or bytes, or return"
            f" one, got {said!r}"
        )
    return said.encode() if isinstance(said, str) else said


def leaf(tag: str, content: bytes | str) -> bytes:
    """Return the digest of what holds no other values."""
    data = content.encode() if isinstance(content, str) else content
    return xxh3_128_digest(b"%b\0%b" % (tag.encode(), data))


def atom(value: Any) -> bytes:
    """Return the digest of a value of one of the `ATOMS`."""
    kind = type(value)
    shown = hex(value) if kind is int else repr(value)  # `repr` refuses large ones
    return leaf(kind.__name__, value if kind is bytes else shown)


class Walk:
    """All that a value holds and its code reaches, each value with those it leads to.

    Args:
        value: whatever it is.
        name: what it is called in errors.

    Raises:
        Undigestible: no other run can be known to have it.
    """

    def __init__(self, value: Any, name: str) -> None:
        self.code: list[str] = []
        """Source, and names of libraries."""
        self._numbers: dict[int, int] = {}
        self._values: list[Any] = []  # held, so that ids stay theirs
        self._met: list[tuple[int, str]] = []  # in which value, and by which label
        self._own: list[bytes] = []
        self._parts: list[list[bytes | int]] = []  # digests of atoms, numbers of others
        self._number(value, 0, name)
        for at, each in enumerate(self._values):  # which grow as they are taken apart
            tag, own, parts = self._apart(at, each)
            labels = repr([label for label, _ in parts])
            self._own.append(leaf(f"{tag} {labels}", own))
            self._parts.append([self._number(part, at, label) for label, part in parts])
            if tag in ("function", "library"):
                self.code.append(str(own))

    def digest(self) -> bytes:
        """Return 16 bytes, the same however values are shared or in which order found.

        Values that lead to no circle are digested from the ends up. Those in circles
        are told apart by what is around them, by one step more each round, until no
        round tells more of them apart. All that are told apart count: then two roots
        with one digest look the same however far one follows them.
        """
        done: dict[int, bytes] = {}
        numbers = [[p for p in parts if type(p) is int] for parts in self._parts]
        order = TopologicalSorter(dict(enumerate(numbers)))
        with suppress(CycleError):  # it gives those that lead to none all the same
            order.prepare()
        while ready := order.get_ready():
            done.update({at: self._combined(at, done) for at in ready})
            order.done(*ready)
        circles = dict.fromkeys(set(range(len(numbers))) - done.keys(), b"")
        for _ in range(ROUNDS):
            known = ChainMap(circles, done)
            further = {at: self._combined(at, known) for at in circles}
            if len({*further.values()}) == len({*circles.values()}):
                root = done[0] if 0 in done else further[0]
                return leaf("root", root + b"".join(sorted({*further.values()})))
            circles = further
        raise Undigestible(self._met[0][1], "circle of very many values")

    def _combined(self, at: int, known: Mapping[int, bytes]) -> bytes:
        parts = [p if isinstance(p, bytes) else known[p] for p in self._parts[at]]
        if isinstance(self._values[at], set | frozenset):
            parts.sort()
        return leaf("node", self._own[at] + b"".join(parts))

    def _number(self, value: Any, met_in: int, label: str) -> bytes | int:
        if type(value) in ATOMS:
            return atom(value)
        number = self._numbers.setdefault(id(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)
            self._met.append((met_in, label))
        return number

    def _apart(self, at: int, value: Any) -> Parts:
        said = said_fingerprint(value)
        if said is not None:
            return "said", said, []
        try:
            name = library_name(value)
            if name is not None:
                return library(name)
            if isinstance(value, type):
                return class_(value)
            return RULES.get(type(value), object_)(value)
        except Exception as error:
            labels = [self._met[at][1]]
            while at:
                at, _ = self._met[at]
                labels.insert(0, self._met[at][1])
            what = str(error) if type(error) is LookupError else type(value).__name__
            raise Undigestible("".join(labels), what) from error


# Code


def library(name: str) -> Parts:
    """By its full name and the versions behind it."""
    return "library", f"{name} of {release(name)}", []


def function(value: types.FunctionType) -> Parts:
    """By its source and code, what these reach, and what is bound to it.

    A closure that a library made is the library's: the user's is what it closes over.
    The code counts beside its source: lambdas of a line differ by it alone, and a file
    may have been edited since it was imported.
    """
    code, space = value.__code__, value.__globals__
    if space is vars(functools) and "registry" in vars(value):
        # singledispatch: its other parts remember the types that it has met
        return "by type", "", [(".<registry>", vars(value)["registry"])]
    cells = [each.cell_contents for each in value.__closure__ or ()]
    bound = [
        *members(dict(enumerate(value.__defaults__ or ())), ".<default> "),
        *members(value.__kwdefaults__ or {}, ".<default> "),
        *members(vars(value), ".<attribute> "),
        *members(dict(zip(code.co_freevars, cells, strict=True)), ".<closure cell> "),
    ]
    made_in = str(space.get("__name__", ""))
    if release(made_in) is not None:
        tag, own, _ = library(f"{made_in}.{code.co_qualname}")
        return tag, own, bound
    source = Source(code, space)
    found = [(f".<global> {name}", each) for name, each in reached(value, source)]
    own = source.text or repr(sorted(source.names))
    return "function", own, [("", code), *bound, *found]


def code_(value: types.CodeType) -> Parts:
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
    return "code", repr(shape), [("", constants)]


def class_(value: type) -> Parts:
    """By its name, its bases and its own attributes."""
    above = [(".<base>", base) for base in (type(value), *value.__bases__)]
    own = {name: each for name, each in vars(value).items() if name not in NO_PART}
    if is_dataclass(value) and str(value.__doc__).startswith(f"{value.__name__}("):
        own.pop("__doc__", None)  # made of its fields: a set prints in another order
    return "class", value.__qualname__, above + members(own)


def module(value: types.ModuleType) -> Parts:
    """By its globals, but for those that say where it is."""
    own = {name: vars(value)[name] for name in vars(value).keys() - OF_A_MODULE}
    return "module", "", members(own)


# Values


def members(values: Mapping[Any, Any], prefix: str = ".") -> list[tuple[str, Any]]:
    """Return named parts in the order of their names."""
    return [(f"{prefix}{name}", values[name]) for name in sorted(values, key=str)]


def is_plain(values: Collection[Any]) -> bool:
    """Whether `repr` tells all of items: atoms, or rows of atoms."""
    kinds = set(map(type, values))
    if kinds and kinds <= {tuple, list}:
        kinds = set(map(type, chain.from_iterable(values)))
    return kinds <= ATOMS


def sequence(value: list[Any] | tuple[Any, ...]) -> Parts:
    """By its items in their order."""
    kind = type(value).__name__
    if is_plain(value):
        return kind, repr(value), []
    return kind, "", [(f"[{at}]", each) for at, each in enumerate(value)]


def dict_(value: Mapping[Any, Any]) -> Parts:
    """By its keys and values in their order: code may list them."""
    if is_plain(value) and is_plain(value.values()):
        return "dict", repr(dict(value)), []
    shown = (repr(key) if type(key) in ATOMS else type(key).__name__ for key in value)
    labels = [f"[{each:.60}]" for each in shown]
    parts = zip(labels * 2, chain(value, value.values()), strict=True)
    return "dict", "", [*parts]


def set_(value: set[Any] | frozenset[Any]) -> Parts:
    """By its items, in any order."""
    return type(value).__name__, "", [("[...]", each) for each in value]


def ndarray(value: Any) -> Parts:
    """By its type, shape and elements, however they lie in memory."""
    array = np.asarray(value)
    kind = f"array {array.dtype!r} {array.shape}"
    if array.dtype.hasobject:
        return kind, "", [("", array.ravel().tolist())]
    flat = np.ascontiguousarray(array).reshape(-1)
    has_bytes = flat.size and flat.itemsize
    return kind, xxh3_128_digest(flat.view(np.uint8).data if has_bytes else b""), []


def tensor(value: torch.Tensor) -> Parts:
    """By its type, shape and elements, wherever it is.

    Those of other kinds (sparse, nested, quantized) hold more, and "meta" ones less.
    """
    is_strided = value.layout == torch.strided and value.device.type != "meta"
    if not is_strided or value.is_nested or value.is_quantized:
        raise LookupError(f"Tensor of a special kind ({value.layout})")
    here = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = here.reshape(-1).view(torch.uint8).numpy()
    kind = f"tensor {here.dtype} {[*here.shape]} {value.requires_grad}"
    return kind, xxh3_128_digest(np.ascontiguousarray(raw).data), []


def object_(value: Any) -> Parts:
    """By what a copy of it is made of."""
    kind: type = type(value)
    if isinstance(value, set | frozenset | torch.Tensor) and kind is not Parameter:
        raise LookupError(f"{kind.__name__}, copied in no stable order")
    reduce = copyreg.dispatch_table.get(kind)
    copied = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(copied, str):  # the name of a global
        module = getattr(value, "__module__", None) or kind.__module__
        if release(module) is None:
            raise LookupError(f"{kind.__name__}, copied by its name alone")
        return library(f"{module}.{copied}")
    maker, given, state, listed, paired = (*copied, None, None, None)[:5]
    if maker is copyreg.__newobj__:  # type: ignore[attr-defined]
        maker, *given = given
    parts = [(".<class>", maker), *((f"[{at}]", each) for at, each in enumerate(given))]
    if listed is not None:
        parts.append(("", [*listed]))
    if paired is not None:
        parts.append(("", dict(paired)))
    return "object", "", parts + state_of(state)


def state_of(state: Any) -> list[tuple[str, Any]]:
    """Return what an object is given when it is copied: its attributes, most often."""
    match state:
        case (None | dict(), dict()):  # of `__dict__`, of slots
            return members({**(state[0] or {}), **state[1]})
        case dict():
            return members(state)
    return [(".<state>", state)]


def attributes(*names: str) -> Rule:
    """Return the rule for what is made of some attributes."""
    return lambda value: (
        type(value).__name__,
        "",
        members({name: getattr(value, name) for name in names}),
    )


Rule = Callable[[Any], Parts]
RULES: Mapping[type, Rule] = {
    dict: dict_,
    frozenset: set_,
    list: sequence,
    set: set_,
    tuple: sequence,
    memoryview: ndarray,
    np.memmap: ndarray,
    np.ndarray: ndarray,
    torch.Tensor: tensor,
    # code
    classmethod: attributes("__func__"),
    functools._lru_cache_wrapper: attributes("__wrapped__"),  # noqa: SLF001 no other name
    functools.cached_property: attributes("func"),  # has a lock besides
    functools.partial: attributes("func", "args", "keywords"),
    property: attributes("fget", "fset", "fdel"),
    staticmethod: attributes("__func__"),
    types.CodeType: code_,
    types.FunctionType: function,
    types.MappingProxyType: dict_,
    types.MethodType: attributes("__func__", "__self__"),
    types.ModuleType: module,
}
