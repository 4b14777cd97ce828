"""A digest of a value: the same in every process and on every machine.

Two values have one digest if they have the same type and content; two functions, if
their code is the same, and everything that it reaches by name or is bound to. A value
without a rule here is digested by what a copy of it is made of (`__reduce_ex__`).

Code in site-packages, or that came with Python, belongs to a library, and is identified
by name and versions. All other code is the user's own, including an editable install,
as its code changes. penstock itself is a library there, too, and all its files count:
some of its operators import C code, which has no parts to look at.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import sysconfig
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from xxhash import xxh3_128, xxh3_128_digest

SAID = "__penstock_fingerprint__"
PYTHON = "python {}.{}".format(*sys.version_info)
"""Only the minor version counts: a patch release changes no byte code."""
OWN = __name__.removesuffix(".cache.digest")
packages = functools.cache(importlib.metadata.packages_distributions)
"""Returns the names of the distributions that provide each top-level package."""
OF_A_MODULE = {"__builtins__", "__cached__", "__file__", "__path__"} | {
    *vars(types.ModuleType("any"))
}
"""Globals that say where a module is, not what it does."""
OF_A_CLASS = {SAID, "sample_fingerprints", "__dict__", "__weakref__", "__module__"} | {
    *("__annotations_cache__", "__firstlineno__", "__slotnames__", "_abc_impl"),
    "__static_attributes__",  # in the order of a set
}
"""Attributes that say nothing about what a class does, or that change with its use."""
DYNAMIC = {"eval", "exec", "globals"}
"""Built-in functions that reach a module's globals without naming them."""
GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
FILLERS = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"}
"""Instructions that some versions of Python insert between the others."""
ATOMS = {bool, bytes, complex, float, int, str, *map(type, (None, ..., NotImplemented))}
ROUNDS = 1000
"""Maximum number of rounds for values in circles; each round digests all of them."""

Names = dict[str, Any]
Labelled = list[tuple[str, Any]]
Parts = tuple[str, Labelled]
"""A value taken apart: a text, and the labelled values it holds."""


class Undigestible(Exception):
    """A value that no other run can recognise as the same.

    Attributes:
        path: where it was found, as in "dataset.handle".
        what: the name of its type.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} is a {what}, which other runs cannot recognise")
        self.path = path
        self.what = what


def digest(value: Any, name: str) -> bytes:
    """Return 16 bytes that identify a value, which errors call `name`.

    Raises:
        Undigestible: it holds something without meaning in another run: an open file,
            a lock, a generator, or state private to C code.
        TypeError: an identity that it declares is neither a str nor bytes.
    """
    return atom(value) if type(value) in ATOMS else Walk(value, name).digest()


def atom(value: Any) -> bytes:
    """Return the digest of a value of one of the `ATOMS`."""
    kind = type(value)
    shown = hex(value) if kind is int else repr(value)  # `repr` refuses large ones
    return xxh3_128_digest(f"{kind.__name__} {shown}".encode())


def said_fingerprint(value: Any) -> bytes | None:
    """Return the identity that an object declares for itself, or None.

    It declares one by `__penstock_fingerprint__`, or as a dataset of Hugging Face's
    `datasets` by `_fingerprint`. Attributes forwarded from another object do not count.

    Raises:
        TypeError: the declared identity is neither a str nor bytes.
    """
    if isinstance(value, type):
        return None
    said = None
    if inspect.getattr_static(value, SAID, None) is not None:
        said = getattr(value, SAID)
        said = said() if callable(said) else said
    elif type(value).__module__.partition(".")[0] == "datasets":
        said = getattr(value, "_fingerprint", None)
        said = said if isinstance(said, str) else None
    if not isinstance(said, str | bytes | None):
        kind = type(value).__qualname__
        raise TypeError(f"`{SAID}` of {kind} must be a str or bytes, got {said!r}")
    return said.encode() if isinstance(said, str) else said


class Walk:
    """Everything that a value holds and its code reaches; errors call it `name`.

    Raises:
        Undigestible: see `digest`.
        TypeError: see `digest`.
    """

    def __init__(self, value: Any, name: str) -> None:
        self.code: list[str] = []
        """Code, and names of libraries."""
        self._met: list[tuple[Any, str]] = []  # with paths; kept alive: ids stay unique
        self._numbers: dict[int, int] = {}
        self._parts: list[list[bytes | int]] = []  # digests, or numbers of other values
        self._number(value, name)
        for each, path in self._met:  # grows while values are taken apart
            text, parts = apart(each, path)
            own = xxh3_128_digest(f"{text}\0{[label for label, _ in parts]}".encode())
            numbers = [self._number(part, path + label) for label, part in parts]
            self._parts.append([own, *numbers])
            if text.startswith(("code", "library")):
                self.code.append(text)

    def digest(self) -> bytes:
        """Return 16 bytes that do not depend on sharing or on the order of discovery.

        Values that lead to no circle are digested from the leaves up. Values in circles
        are distinguished by their surroundings, one step further each round, until a
        round distinguishes no more of them. The digest covers every value distinguished
        in this way: two roots with the same digest then look alike however far one
        follows them.

        Raises:
            Undigestible: more than `ROUNDS` rounds would be needed.
        """
        done: dict[int, bytes] = {}
        numbers = [[p for p in parts if type(p) is int] for parts in self._parts]
        order = TopologicalSorter(dict(enumerate(numbers)))
        with suppress(CycleError):  # it still yields the values that lead to none
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
                return xxh3_128_digest(root + b"".join(sorted({*further.values()})))
            circles = further
        raise Undigestible(self._met[0][1], "circle of very many values")

    def _combined(self, at: int, known: Mapping[int, bytes]) -> bytes:
        own, *parts = (p if isinstance(p, bytes) else known[p] for p in self._parts[at])
        is_set = isinstance(self._met[at][0], set | frozenset)
        return xxh3_128_digest(own + b"".join(sorted(parts) if is_set else parts))

    def _number(self, value: Any, path: str) -> bytes | int:
        if type(value) in ATOMS:
            return atom(value)
        number = self._numbers.setdefault(id(value), len(self._met))
        if number == len(self._met):
            self._met.append((value, path[-1000:]))  # deep paths would take much memory
        return number


def apart(value: Any, path: str) -> Parts:
    """Take a value apart by its declared identity, its name or its type.

    Raises:
        Undigestible: there is no way to.
        TypeError: the identity that it declares is neither a str nor bytes.
    """
    if (said := said_fingerprint(value)) is not None:
        return "said", [("", said)]
    try:
        if (name := library_name(value)) is not None:
            return library(name)
        rule = class_ if isinstance(value, type) else RULES.get(type(value), object_)
        return rule(value)
    except Exception as error:
        what = str(error) if type(error) is LookupError else type(value).__name__
        raise Undigestible(path, what) from error


def object_(value: Any) -> Parts:
    """Take an object apart into what a copy of it would be made of.

    Raises:
        LookupError: a copy of it would be made in no stable order.
        Exception: whatever refuses to copy it raises.
    """
    kind = type(value)
    if kind in MADE_OF:
        return kind.__name__, [(f".{n}", getattr(value, n)) for n in MADE_OF[kind]]
    if isinstance(value, set | frozenset | torch.Tensor):
        raise LookupError(f"{kind.__name__}, copied in no stable order")  # noqa: TRY004
    reduce = copyreg.dispatch_table.get(kind)
    copied = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(copied, str):  # the name of a global
        module = getattr(value, "__module__", None) or kind.__module__
        return library(f"{module}.{copied}")
    maker, given, state, listed, paired = (*copied, None, None, None)[:5]
    parts = [("", each) for each in (maker, *given)]
    parts += members(state) if type(state) is dict else [(".<state>", state)]
    parts += [("", [*each]) for each in (listed, paired) if each is not None]
    return f"object {len(given)}", parts


def members(values: Mapping[str, Any], without: Collection[str] = ()) -> Labelled:
    """Return attributes in the order of their names, leaving some out."""
    names = sorted(values.keys() - without, key=str)
    return [(f".{name}", values[name]) for name in names]


def items(value: Collection[Any]) -> Parts:
    """Take a collection apart into its items; those of a set have no order."""
    kind = type(value).__name__
    if isinstance(value, set | frozenset):
        return kind, [("[...]", each) for each in value]
    if is_plain(value):
        return f"{kind} {value}", []
    return kind, [(f"[{at}]", each) for at, each in enumerate(value)]


def dict_(value: Mapping[Any, Any]) -> Parts:
    """Take a dict apart into keys and values, in order: code may iterate over them."""
    if is_plain(value) and is_plain(value.values()):
        return f"dict {dict(value)}", []
    shown = (repr(key) if type(key) in ATOMS else type(key).__name__ for key in value)
    labels = [f"[{each:.60}]" for each in shown]
    return "dict", [*zip(labels * 2, chain(value, value.values()), strict=True)]


def is_plain(values: Collection[Any]) -> bool:
    """Whether `repr` shows items completely: atoms, or rows of atoms."""
    kinds = set(map(type, values))
    if kinds and kinds <= {tuple, list}:
        kinds = set(map(type, chain.from_iterable(values)))
    return kinds <= ATOMS


def ndarray(value: Any) -> Parts:
    """Take an array apart: type, shape and elements, whatever its memory layout."""
    array: Any = np.asarray(value, order="C")
    kind = f"array {array.dtype!r} {array.shape}"
    if array.dtype.hasobject:
        return kind, [("", array.ravel().tolist())]
    return kind, [("", xxh3_128_digest(array))]


def tensor(value: torch.Tensor) -> Parts:
    """Take a tensor apart: type, shape, elements and attributes, on whatever device.

    Raises:
        LookupError: it is of a special kind: sparse, nested and quantized tensors hold
            more than that, and "meta" tensors less.
    """
    is_strided = value.layout == torch.strided and value.device.type != "meta"
    if not is_strided or value.is_nested or value.is_quantized:
        raise LookupError(f"Tensor of a special kind ({value.layout})")
    here = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw: Any = here.reshape(-1).view(torch.uint8).numpy()
    kind = f"{type(value).__name__} {here.dtype} {[*here.shape]} {value.requires_grad}"
    return kind, [("", xxh3_128_digest(raw)), *members(vars(value))]


def function(value: types.FunctionType) -> Parts:
    """Take a function apart: its code, what the code reaches, and what is bound to it.

    The code of a closure that a library made is the library's; only the values it
    closes over are the user's.

    Raises:
        LookupError: as `reached`.
    """
    code, space = value.__code__, value.__globals__
    if space is vars(functools) and "registry" in vars(value):
        # singledispatch: its other parts cache the types it was called with
        return "by type", [(".registry", vars(value)["registry"])]
    cells = [each.cell_contents for each in value.__closure__ or ()]
    hints = getattr(getattr(value, "__annotate__", None), "__code__", None)  # of 3.14
    hints = hints or re.sub(r" at 0x\w+", "", str(value.__annotations__))
    bound = [
        (".__annotations__", hints),
        (".__closure__", dict(zip(code.co_freevars, cells, strict=True))),
        (".__defaults__", value.__defaults__),
        (".__dict__", vars(value)),
        (".__kwdefaults__", value.__kwdefaults__),
    ]
    made_in = str(space.get("__name__"))
    if release(made_in) is not None:
        return library(f"{made_in}.{code.co_qualname}")[0], bound
    return "function", [("", code), (".__globals__", reached(value)), *bound]


def code_(value: types.CodeType) -> Parts:
    """Take code apart: bytes, names and constants, but not its place in a file."""
    constants: Any = value.co_consts
    if not value.co_flags & inspect.CO_OPTIMIZED:
        # The code of a class body: its constants include its line, and tuples of names
        # in the order of a set.
        constants = {frozenset(c) if isinstance(c, tuple) else c for c in constants}
        constants.discard(value.co_firstlineno)
    shape = (
        (PYTHON, value.co_name),
        (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount),
        (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars),
        (value.co_flags, value.co_code, value.co_exceptiontable),
    )
    return f"code {shape}", [("", constants)]


def class_(value: type) -> Parts:
    """Take a class apart: its name, its bases and its own attributes."""
    without = OF_A_CLASS
    if is_dataclass(value) and str(value.__doc__).startswith(f"{value.__name__}("):
        without = without | {"__doc__"}  # generated: prints sets in any order
    above = [(".__bases__", value.__bases__), (".__class__", type(value))]
    return f"class {value.__qualname__}", above + members(vars(value), without)


RULES: Mapping[type, Callable[[Any], Parts]] = {
    **dict.fromkeys((frozenset, list, set, tuple), items),
    **dict.fromkeys((dict, types.MappingProxyType), dict_),
    **dict.fromkeys((memoryview, np.memmap, np.ndarray), ndarray),
    **dict.fromkeys((torch.Tensor, torch.nn.Parameter), tensor),
    types.CodeType: code_,
    types.FunctionType: function,
    types.ModuleType: lambda value: ("module", members(vars(value), OF_A_MODULE)),
}
MADE_OF: Mapping[type, tuple[str, ...]] = {
    classmethod: ("__func__",),
    functools._lru_cache_wrapper: ("__wrapped__",),  # noqa: SLF001 no other name
    functools.cached_property: ("func",),  # has a lock besides
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    types.MethodType: ("__func__", "__self__"),
}
"""Attributes that fully describe the values of some types."""


def library(name: str) -> Parts:
    """Identify a value of a library by its full name and versions.

    Raises:
        LookupError: it is the user's own.
    """
    if (behind := release(name)) is None:
        raise LookupError(f"{name}, copied by its name alone")
    return f"library {name} of {behind}", []


def library_name(value: Any) -> str | None:
    """Return the full name of a library's module, class or function, or None."""
    if isinstance(value, types.ModuleType):
        return value.__name__ if release(value.__name__) is not None else None
    of = getattr(value, "__self__", None)
    module = getattr(value, "__module__", None) or getattr(of, "__module__", None)
    if not isinstance(module, str) or release(module) is None:
        return None
    for name in (getattr(value, each, None) for each in ("__qualname__", "__name__")):
        with suppress(AttributeError, KeyError):
            if name and attrgetter(name)(sys.modules[module]) is value:
                return f"{module}.{name}"
    return None


@functools.cache
def release(name: str) -> str | None:
    """Return the versions behind a library's name; None if it is the user's own."""
    top = name.partition(".")[0]
    spec = None
    with suppress(ImportError, ValueError):  # a module made by hand
        spec = importlib.util.find_spec(top)
    if spec is None or top in ("__main__", "__mp_main__"):
        return None
    place = spec.origin or str(spec.submodule_search_locations)
    if "/site-packages/" in place or "/dist-packages/" in place:
        return versions(*packages().get(top, ()))  # None if it was copied there by hand
    if top == OWN:
        return own_release()
    python = tuple(f"{sysconfig.get_path(each)}/" for each in ("stdlib", "platstdlib"))
    is_python = place in ("built-in", "frozen") or place.startswith(python)
    return PYTHON if is_python else None


@functools.cache
def own_release() -> str | None:
    """Return the versions behind a checkout of penstock, as if it were a release.

    None if it is no installed one, or its files have changed since this process began:
    then the code that runs is not theirs.
    """
    root, behind = Path(__file__).parents[1], versions(OWN)
    packages = [each.parent for each in root.glob("*/__init__.py")]
    kinds = [each.rglob(f"[!.]*.{k}") for each in packages for k in ("py", "so")]
    files = {f"{p.relative_to(root)}": p for p in chain(root.glob("*.py"), *kinds)}
    newest_s = max((path.stat().st_mtime for path in files.values()), default=0.0)
    begun_s = psutil.Process().create_time() + 1.0  # known to a second
    if behind is None or not files or newest_s > begun_s:
        return None
    whole = xxh3_128(repr(sorted(files)).encode())
    for name in sorted(files):
        whole.update(xxh3_128_digest(files[name].read_bytes()))
    return f"{PYTHON} {whole.hexdigest()} {behind}"


@functools.cache
def versions(*names: str) -> str | None:
    """Return the versions of distributions and all they require; None if unknown."""
    found: dict[str, str] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        with suppress(importlib.metadata.PackageNotFoundError):
            one = importlib.metadata.distribution(name)
            # Its origin counts, too: one version of a repository may be many commits.
            found[name] = f"{one.version} {one.read_text('direct_url.json') or ''}"
            required = [each for each in one.requires or () if "extra ==" not in each]
            further = {re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in required}
            waiting += further - found.keys()
    return repr(sorted(found.items())) if found else None


def reached(function: types.FunctionType) -> Names:
    """Return what a function finds in modules by name, such as `c.SIZE`, sorted.

    Of a user's module, this is what the code reads of it, or all of it if the module is
    used as a value, as in `f(x, c)`. Names that do not exist (yet) are left out.

    Raises:
        LookupError: it imports a module by a name that is built at run time.
    """
    space = function.__globals__
    found: Names = {}
    steps = steps_of(function.__code__)
    for at, (kind, name) in enumerate(steps):
        if kind in GLOBALS:
            found |= looked_up(name, steps[at + 1 :], space)
        if kind == "IMPORT_NAME":
            (_, level), (_, names) = steps[at - 2 : at]
            found |= imported(name, names or (), level, space)
        elif name in ("__import__", "import_module"):
            (given, module), (call, _) = steps[at + 1 : at + 3]
            if (given, call) != ("LOAD_CONST", "CALL"):
                raise LookupError("function that imports by a name made later")
            found |= imported(module, (), 0, space)
    return dict(sorted(found.items()))


def steps_of(code: types.CodeType) -> Labelled:
    """Return the instructions of code and its inner code, with what they name."""
    steps = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    inner = [steps_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return [each for each in chain(steps, *inner) if each[0] not in FILLERS]


def looked_up(name: str, then: Labelled, space: Names) -> Names:
    """Return a global by name; of a user's module, the attribute that is read."""
    if name in DYNAMIC - space.keys():
        return {each: space[each] for each in space.keys() - OF_A_MODULE}
    if name in OF_A_MODULE or name not in space:
        return {}
    value = space[name]
    for kind, attribute in then:
        is_module = type(value) is types.ModuleType and release(value.__name__) is None
        if not is_module or kind not in ATTRIBUTES:
            break
        name = f"{name}.{attribute}"
        value = vars(value).get(attribute, vars(value).get("__getattr__"))
    return {name: value}


def imported(module: str, names: Sequence[str], level: int, space: Names) -> Names:
    """Return what an import yields, by name; of a library, only its versions."""
    label = f"import {'.' * level}{module}"
    if not level and release(module) is not None:
        return {label: release(module)}
    try:
        found = importlib.__import__(module, space, None, names, level)
        parts = {f"{label} {name}": getattr(found, name) for name in names}
    except Exception:  # noqa: BLE001 - it fails, or is caught, when the code runs, too
        return {label: "cannot be imported"}
    return parts or {label: found}
