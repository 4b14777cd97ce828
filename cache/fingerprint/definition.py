"""Functions and classes: whose they are, what their code does, and what it names.

What stands in site-packages or came with Python is a library's, and its version tells
it from others. All else is the user's own (an editable install, too: its code changes
and its version does not), and its code must be looked at.
"""

from __future__ import annotations

import dis
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import chain, zip_longest
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from xxhash import xxh3_128_hexdigest

__all__ = [
    "PYTHON",
    "address",
    "attributes",
    "binary",
    "defaults",
    "has_c_state",
    "is_static",
    "loaded",
    "module_name",
    "named_by",
    "own_attributes",
    "release",
    "steps",
]

PYTHON = "python {}.{}".format(*sys.version_info)
"""Whose byte code it is: that of each minor version is its own."""

INSTALLED = ("/site-packages/", "/dist-packages/")
GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
KIND_OF_CODE = 0x3FF
"""Flags of a code's kind: varargs, generator, coroutine; above them stand futures."""

OF_A_MODULE = frozenset(("__builtins__", "__file__", *vars(ModuleType("any"))))
"""Globals that say where a module is, and not what it does."""

HEAP_TYPE = 1 << 9
"""The flag of a class made at run time (Py_TPFLAGS_HEAPTYPE), as all in Python are."""

NO_PART = frozenset(
    (
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__classdictcell__",
        "__dataclass_fields__",  # what they do stands in the methods made of them
        "__dataclass_params__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__penstock_fingerprint__",  # what they return counts
        "__qualname__",
        "__static_attributes__",  # in the order of a set
        "sample_fingerprints",
    )
)
"""Attributes of a class that say nothing of what it does, or nothing stable."""


def module_name(value: Any) -> str:
    """Return the module that a function or class says it is of, or ""."""
    name = getattr(value, "__module__", None)
    if not isinstance(name, str):
        name = getattr(getattr(value, "__self__", None), "__module__", None)
    # a spawned process runs the main script under a name of its own
    return "__main__" if name == "__mp_main__" else str(name or "")


def loaded(name: str) -> ModuleType | None:
    """Return a module, if it is loaded."""
    return sys.modules.get(name)


def address(value: Any) -> tuple[str, str] | None:
    """Return the module and qualified name where `value` is found; None: nowhere."""
    module = module_name(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # noqa: BLE001 - a module's `__getattr__` may raise anything
        return None
    return (module, name) if found is value else None


def release(module: str) -> str | None:
    """Return the version of the library a module is of; None: it is the user's own."""
    return top_release(module.partition(".")[0])


@cache
def top_release(top: str) -> str | None:
    """Return the version of a top-level package, found without importing it."""
    place = location(top)
    if place in ("built-in", "frozen"):
        return PYTHON
    if any(folder in place for folder in INSTALLED):
        return version(top)
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    own = tuple(folder.replace("\\", "/") + "/" for folder in folders)
    return PYTHON if place.startswith(own) else None


def location(top: str) -> str:
    """Return where a top-level module was found: a path, "built-in", or ""."""
    module = sys.modules.get(top)
    try:
        spec = getattr(module, "__spec__", None) or importlib.util.find_spec(top)
    except (ImportError, ValueError):  # it has none: the main script, or made by hand
        return ""
    if spec is None or top in ("", "__main__", "__mp_main__"):
        return ""
    folders = list(spec.submodule_search_locations or ())
    place = spec.origin or f"{folders[0] if folders else ''}/"
    return place.replace("\\", "/")


def version(top: str) -> str | None:
    """Return the version that the distribution of an installed package has."""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        names = distributions().get(top, ())
    if names:
        return importlib.metadata.version(names[0])
    said = getattr(sys.modules.get(top), "__version__", None)
    return None if said is None else str(said)


@cache
def binary(module: str) -> str:
    """Return the digest of a module's file, for one that has no version; or ""."""
    file = getattr(loaded(module), "__file__", None)
    if not file:
        return ""
    with open(file, "rb") as opened:
        return xxh3_128_hexdigest(opened.read())


@cache
def distributions() -> Mapping[str, list[str]]:
    """Return the distributions by the packages they hold."""
    return importlib.metadata.packages_distributions()


def steps(code: CodeType) -> tuple[str, list[Any]]:
    """Return what a code does, as text, and the constants it does it with.

    Constants stand in the order of their use, so that docstrings, which nothing
    uses, are not among them and shift none. Names of files, of the code, and line
    numbers are left out.
    """
    found = [e for e in dis.get_instructions(code) if e.opname != "EXTENDED_ARG"]
    lines, constants = [], []
    for each, after in zip_longest(found, found[1:]):
        if after and after.opname == "STORE_NAME" and after.argval in NO_PART:
            continue  # the docstring or line of a class in a function
        if each.opcode in dis.hasconst:
            constants.append(each.argval)
        lines.append((each.opname, None if each.opcode in dis.hasconst else each.arg))
    shape = (
        PYTHON,
        lines,
        code.co_flags & KIND_OF_CODE,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        code.co_exceptiontable,
    )
    return repr(shape), constants


def named_by(function: FunctionType) -> dict[str, Any]:
    """Return what a function's code, and code in it, takes from its module by name.

    `tools.resize` of a module `tools` of the user's own is `resize` in it: what it
    leads to counts, not the whole module. What is not there (yet) is left out.
    """
    codes = nested(function.__code__)
    return dict(chain.from_iterable(map(CodeReader(function.__globals__).read, codes)))


def defaults(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's parameters, by their names."""
    code, values = function.__code__, function.__defaults__ or ()
    last = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
    return {**dict(zip(last, values, strict=True)), **(function.__kwdefaults__ or {})}


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


class CodeReader:
    """Reads a code for what it names: a global, the attribute of a module, an import.

    A name is followed by loads of its attributes, one instruction each.
    """

    def __init__(self, space: Mapping[str, Any]) -> None:
        self._space = space
        self._imported: ModuleType | None = None

    def read(self, code: CodeType) -> Iterator[tuple[str, Any]]:
        """Yield names and what they are now."""
        followed: tuple[str, Any] | None = None
        before: list[Any] = [0, None]  # of an import: its level, and names after `from`
        for each in dis.get_instructions(code):
            if each.opname in ATTRIBUTE and followed and is_own(followed[1]):
                name, module = followed
                followed = self._attribute(name, module, each.argval)
                continue
            if followed:
                yield followed
            followed = self._start(each, before)
            before = [before[-1], each.argval]

    def _start(
        self, each: dis.Instruction, before: list[Any]
    ) -> tuple[str, Any] | None:
        if each.opname in GLOBAL and each.argval in self._space:
            is_place = each.argval in OF_A_MODULE
            return None if is_place else (each.argval, self._space[each.argval])
        if each.opname == "IMPORT_NAME":
            self._imported = self._module(each.argval, before[0] or 0)
            bare = self._imported is not None and not before[1]
            return (f"import {each.argval}", self._imported) if bare else None
        if each.opname == "IMPORT_FROM" and self._imported is not None:
            name = self._imported.__name__
            return self._attribute(name, self._imported, each.argval)
        return None

    def _attribute(
        self, path: str, module: ModuleType, name: str
    ) -> tuple[str, Any] | None:
        value = getattr(module, name, self)
        return None if value is self else (f"{path}.{name}", value)

    def _module(self, name: str, level: int) -> ModuleType | None:
        """Return a module of the user's own, imported as the code would."""
        package = str(self._space.get("__package__") or "")
        try:
            full = importlib.util.resolve_name("." * level + name, package)
            own = release(full) is None
            return importlib.import_module(full) if own else None
        except Exception:  # noqa: BLE001 - it fails when it runs, or is caught there
            return None


def is_own(value: Any) -> bool:
    """Whether it is a module of the user's own."""
    return isinstance(value, ModuleType) and release(value.__name__) is None


def own_attributes(owner: type | ModuleType) -> dict[str, Any]:
    """Return what makes a class or module: functions, classes, of a class values too.

    Of a module those that are defined in it.
    """
    if isinstance(owner, ModuleType):
        kinds, name = (FunctionType, type), owner.__name__
        found = vars(owner).items()
        return {k: v for k, v in found if isinstance(v, kinds) and v.__module__ == name}
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in NO_PART
        and not name.startswith("_abc_")
        and not isinstance(value, MemberDescriptorType | GetSetDescriptorType)
        and type(value).__name__ != "_tuplegetter"  # a namedtuple's, for `_fields`
    }


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds in its `__dict__` and slots."""
    found = dict(getattr(value, "__dict__", ()))
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            is_private = name.startswith("__") and not name.endswith("__")
            full = f"_{owner.__name__.lstrip('_')}{name}" if is_private else name
            if full not in ("__dict__", "__weakref__") and hasattr(value, full):
                found[full] = getattr(value, full)
    return {k: v for k, v in found.items() if not str(k).startswith("_abc_")}


@lru_cache(1024)
def has_c_state(kind: type) -> bool:
    """Whether objects of a class hold what neither `__dict__` nor slots show.

    A class written in Python that adds to none but `object` has one or the other; of a
    class written in C, and of all that build on it, no more is known.
    """
    first = kind
    while first.__base__ not in (None, object):
        first = first.__base__
    if first in (object, SimpleNamespace):
        return False
    return is_static(first) or not {"__dict__", "__slots__"} & set(vars(first))


def is_static(kind: type) -> bool:
    """Whether a class was compiled as a whole: none in Python is."""
    return not kind.__flags__ & HEAP_TYPE
