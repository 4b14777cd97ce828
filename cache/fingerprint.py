"""What a record is stored under: the data and the code that made it, and the sample.

    key, 16 bytes = namespace, 8 bytes        of fingerprint and image size
                  + xxh3_64 of the sample     its index, or its own fingerprint

All records of one fingerprint and size begin with the same bytes, so that they can be
deleted together. With 64 bits for the sample, the chance that any two of ten million
share a key is 3 in a million (n^2 / 2^65); indices never do.

A fingerprint is made of digests, the same in every process and on every machine. Two
values have one digest if they have the same type and content; two functions, if their
code is the same, and everything that it reaches by name or is bound to. A value without
a rule here is digested by what a copy of it is made of (`__reduce_ex__`). Code in
site-packages, or that came with Python, belongs to a library, and is identified by name
and versions. All other code is the user's own, including an editable install.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import stat
import struct
import sys
import sysconfig
import time
import types
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from multiprocessing.pool import ThreadPool
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

# Increased whenever the digest changes in content or method: old keys then miss.
FORMAT = "penstock cache 4"
SAMPLE = struct.Struct("<q")
STAT_THREADS = 16
CHUNK = 256
# A `stat` takes 2 us on a local disk (6 us by threads), but 300 us over a network.
SLOW_STAT_S = 50e-6
# Modification times up to 1 January 1980, where DOS time begins, mean nothing: archives
# set them.
BOGUS_NS = (315_532_800 + 86_400) * 10**9
# A modification time that this share of a dataset's files have was assigned.
COMMON = 0.1
# Names of functions that draw random values, or tell the time.
DRAWS = re.compile(r"(?i)rand|shuffle|bernoulli|multinomial|uuid|secret|\b(time|now)\b")
SAID = "__penstock_fingerprint__"
# Only the minor version counts: a patch release changes no byte code.
PYTHON = "python {}.{}".format(*sys.version_info)
OWN = __name__.removesuffix(".cache.fingerprint")
# Returns the names of the distributions that provide each top-level package.
packages = functools.cache(importlib.metadata.packages_distributions)
# Globals that say where a module is, not what it does.
OF_A_MODULE = {"__builtins__", "__cached__", "__file__", "__path__"} | {
    *vars(types.ModuleType("any"))
}
# Attributes that say nothing about what a class does, or that change with its use.
OF_A_CLASS = {SAID, "sample_fingerprints", "__dict__", "__weakref__", "__module__"} | {
    *("__annotations_cache__", "__firstlineno__", "__slotnames__", "_abc_impl"),
    "__static_attributes__",  # in the order of a set
}
# Built-in functions that reach a module's globals without naming them.
DYNAMIC = {"eval", "exec", "globals"}
GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
# Instructions that some versions of Python insert between the others.
FILLERS = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"}
ATOMS = {bool, bytes, complex, float, int, str, *map(type, (None, ..., NotImplemented))}
# Maximum number of rounds for values in circles; each round digests all of them.
ROUNDS = 1000
Names = dict[str, Any]
Labelled = list[tuple[str, Any]]
# A value taken apart: a text, and the labelled values it holds.
Parts = tuple[str, Labelled]


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """Distinguishes the samples of a cache from those of other data and code."""

    digest: bytes
    """16 bytes; random if the cache is private to this run."""
    private_because: str | None = None
    """The reason why it is private, such as "dataset.handle (TextIOWrapper)"; None if
    later runs can find it."""
    samples: NDArray[np.uint64] | None = field(default=None, repr=False)
    """Identity of each sample, `uint64 [n, 2]`, if the dataset provides it; None: its
    index counts."""
    draws: bool = False
    """Whether code names something that may be random, such as `numpy.random.rand`."""

    def namespace(self, image_size: int | None) -> bytes:
        """Return the first 8 bytes of all keys for one image size."""
        size = b"" if image_size is None else SAMPLE.pack(image_size)
        return xxh3_64_digest(self.digest + size)

    def key(self, index: int, image_size: int | None) -> bytes:
        """Return the 16 bytes that a sample is stored under.

        Raises:
            IndexError: the dataset has no such sample.
        """
        rows = self.samples
        if rows is not None and not 0 <= index < len(rows):
            raise IndexError(f"there are {len(rows)} samples, none has number {index}")
        own = SAMPLE.pack(index) if rows is None else rows[index]
        return self.namespace(image_size) + xxh3_64_digest(own)


def fingerprint(
    dataset: Any,
    functions: Sequence[tuple[str, Callable[..., Any]]],
    version: str | int | None = None,
) -> Fingerprint:
    """Return the fingerprint of a dataset and of the functions applied to it.

    A dataset with a method `sample_fingerprints() -> uint64 [n, 2]` is identified by
    its class and that array, so changing one sample leaves the others in the cache.

    Args:
        dataset: the source of the samples.
        functions: the functions before the cache, in order, with names for errors.
        version: the user's own version; changing it starts a new cache.

    Raises:
        ValueError: `sample_fingerprints()` does not return two numbers per sample.
        TypeError: an identity that one of them declares is neither a str nor bytes.
    """
    try:
        samples = per_sample(dataset)
        # The rest of a dataset that identifies its samples may change between runs.
        source = dataset if samples is None else type(dataset)
        walks = [Walk(value, name) for name, value in (("dataset", source), *functions)]
        parts = [walk.digest() for walk in walks]
    except Undigestible as error:
        return Fingerprint(os.urandom(16), f"{error.path} ({error.what})")
    draws = any(DRAWS.search(text) for walk in walks for text in walk.code)
    return Fingerprint(digest([FORMAT, version, *parts], "cache"), None, samples, draws)


def per_sample(dataset: Any) -> NDArray[np.uint64] | None:
    """Return the validated fingerprints that a dataset provides, or None.

    Raises:
        ValueError: they are not two numbers per sample.
        TypeError: the identity that the dataset declares is neither a str nor bytes.
    """
    method = getattr(type(dataset), "sample_fingerprints", None)
    if method is None or said_fingerprint(dataset) is not None:
        return None
    rows = np.ascontiguousarray(method(dataset))
    if rows.dtype != np.uint64 or rows.shape != (len(dataset), 2):
        raise ValueError(
            f"`sample_fingerprints()` of {type(dataset).__name__} must be uint64"
            f" [{len(dataset)}, 2], a row per sample, got {rows.dtype} {[*rows.shape]}"
        )
    return rows


def file_fingerprints(
    paths: Sequence[str], *, labels: Sequence[Any] | None = None, store: Any = None
) -> NDArray[np.uint64]:
    """Return the identity of each file and its content: `uint64 [n, 2]`.

    This is xxh3_128 of its real path, size, modification time and label. Archives,
    container images and checkouts assign modification times, and another file of the
    same size could then take its place unnoticed. So the content of such a file counts,
    too. Of a file in a store, only store, path and label count: a change to it goes
    unnoticed.

    Args:
        paths: the files' paths.
        labels: what else each sample is made of. The number of a class changes when a
            class is added before it, although no file does.
        store: what identifies the store of the files; None for local files.

    Raises:
        Undigestible: a label, or a value in `store`, has no digest.
    """
    place = None if store is None else digest(store, "storage")
    files = looks(paths) if place is None else [(place, path) for path in paths]
    ends = [None] * len(paths) if labels is None else labels
    prints = (
        xxh3_128_digest(repr(file).encode() + digest(end, "label"))
        for file, end in zip(files, ends, strict=True)
    )
    return np.frombuffer(bytearray().join(prints), np.uint64).reshape(-1, 2)


def looks(paths: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return each file's real path, size (bytes), modification time (ns), and content.

    The content is a digest, or None if the time was not assigned.
    """
    # Each folder is resolved once, for this call alone: links may change.
    real = functools.cache(os.path.realpath)
    files = by_threads(functools.partial(looked_at, real), paths)
    times = Counter(changed_ns for *_, changed_ns in files)
    common = max(2, COMMON * len(paths))
    stamps = {ns for ns in times if times[ns] >= common or -1 < ns <= BOGUS_NS}
    pairs = [*zip(paths, files, strict=True)]
    suspects = [path for path, file in pairs if file[-1] in stamps]
    contents = dict(zip(suspects, by_threads(content_of, suspects), strict=True))
    return [(*file, contents.get(path)) for path, file in pairs]


def by_threads(look: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
    """Return what `look` returns for each path, using threads if each look is slow."""
    start_s = time.perf_counter()
    first = [look(path) for path in paths[:CHUNK]]
    rest = paths[CHUNK:]
    if time.perf_counter() - start_s < SLOW_STAT_S * len(first) or not rest:
        return [*first, *map(look, rest)]
    with ThreadPool(STAT_THREADS) as pool:
        return [*first, *pool.map(look, rest)]


def looked_at(real: Callable[[str], str], path: str) -> tuple[str, int, int]:
    """Return a file's real path, size and modification time (ns); -1 if it is gone."""
    folder, name = os.path.split(path)
    where = os.path.join(real(folder), name)
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            where, status = os.path.realpath(where), os.stat(path)
        return where, status.st_size, status.st_mtime_ns
    return where, -1, -1


def content_of(path: str) -> bytes | None:
    """Return the digest of a file's content; None if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, xxh3_128).digest()
    return None


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
    text = hex(value) if type(value) is int else repr(value)  # refuses large ones
    return xxh3_128_digest(f"{type(value).__name__} {text}".encode())


def said_fingerprint(value: Any) -> bytes | None:
    """Return the identity that an object declares for itself, or None.

    It declares one by `__penstock_fingerprint__`, or as a dataset of Hugging Face's
    `datasets` by `_fingerprint`. Attributes forwarded from another object do not count.

    Raises:
        TypeError: the declared identity is neither a str nor bytes.
    """
    if isinstance(value, type):
        return None
    identity = None
    if inspect.getattr_static(value, SAID, None) is not None:
        identity = getattr(value, SAID)
        identity = identity() if callable(identity) else identity
    elif type(value).__module__.partition(".")[0] == "datasets":
        identity = getattr(value, "_fingerprint", None)
        identity = identity if isinstance(identity, str) else None
    if not isinstance(identity, str | bytes | None):
        kind = type(value).__qualname__
        raise TypeError(f"`{SAID}` of {kind} must be a str or bytes, got {identity!r}")
    return identity.encode() if isinstance(identity, str) else identity


class Walk:
    """Everything that a value holds and its code reaches; errors call it `name`.

    Raises:
        Undigestible: see `digest`.
        TypeError: see `digest`.
    """

    def __init__(self, value: Any, name: str) -> None:
        # Code, and names of libraries.
        self.code: list[str] = []
        self._values: list[tuple[Any, str]] = []  # with paths; kept, so ids stay unique
        self._numbers: dict[int, int] = {}
        self._parts: list[list[bytes | int]] = []  # digests, or numbers of other values
        self._number(value, name)
        for item, path in self._values:  # grows while values are taken apart
            text, parts = apart(item, path)
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
        digests: dict[int, bytes] = {}
        numbers = [[p for p in parts if type(p) is int] for parts in self._parts]
        order = TopologicalSorter(dict(enumerate(numbers)))
        with suppress(CycleError):  # it still yields the values that lead to none
            order.prepare()
        while ready := order.get_ready():
            digests.update({at: self._combined(at, digests) for at in ready})
            order.done(*ready)
        circles = dict.fromkeys(set(range(len(numbers))) - digests.keys(), b"")
        for _ in range(ROUNDS):
            all_digests = ChainMap(circles, digests)
            further = {at: self._combined(at, all_digests) for at in circles}
            if len({*further.values()}) == len({*circles.values()}):
                root = digests[0] if 0 in digests else further[0]
                return xxh3_128_digest(root + b"".join(sorted({*further.values()})))
            circles = further
        raise Undigestible(self._values[0][1], "circle of very many values")

    def _combined(self, at: int, digests: Mapping[int, bytes]) -> bytes:
        own, *parts = (
            p if isinstance(p, bytes) else digests[p] for p in self._parts[at]
        )
        is_set = isinstance(self._values[at][0], set | frozenset)
        return xxh3_128_digest(own + b"".join(sorted(parts) if is_set else parts))

    def _number(self, value: Any, path: str) -> bytes | int:
        if type(value) in ATOMS:
            return atom(value)
        number = self._numbers.setdefault(id(value), len(self._values))
        if number == len(self._values):
            self._values.append((value, path[-1000:]))  # deep paths take much memory
        return number


def apart(value: Any, path: str) -> Parts:
    """Take a value apart by its declared identity, its name or its type.

    Raises:
        Undigestible: there is no way to.
        TypeError: the identity that it declares is neither a str nor bytes.
    """
    if (identity := said_fingerprint(value)) is not None:
        return "said", [("", identity)]
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
    reduction = value.__reduce_ex__(4) if reduce is None else reduce(value)
    if isinstance(reduction, str):  # the name of a global
        module = getattr(value, "__module__", None) or kind.__module__
        return library(f"{module}.{reduction}")
    maker, arguments, state, entries, pairs = (*reduction, None, None, None)[:5]
    parts = [("", part) for part in (maker, *arguments)]
    parts += members(state) if type(state) is dict else [(".<state>", state)]
    parts += [("", [*values]) for values in (entries, pairs) if values is not None]
    return f"object {len(arguments)}", parts


def members(values: Mapping[str, Any], without: Collection[str] = ()) -> Labelled:
    """Return attributes in the order of their names, leaving some out."""
    names = sorted(values.keys() - without, key=str)
    return [(f".{name}", values[name]) for name in names]


def items(value: Collection[Any]) -> Parts:
    """Take a collection apart into its items; those of a set have no order."""
    kind = type(value).__name__
    if isinstance(value, set | frozenset):
        return kind, [("[...]", item) for item in value]
    if is_plain(value):
        return f"{kind} {value}", []
    return kind, [(f"[{at}]", item) for at, item in enumerate(value)]


def dict_(value: Mapping[Any, Any]) -> Parts:
    """Take a dict apart into keys and values, in order: code may iterate over them."""
    if is_plain(value) and is_plain(value.values()):
        return f"dict {dict(value)}", []
    texts = (repr(key) if type(key) in ATOMS else type(key).__name__ for key in value)
    labels = [f"[{text:.60}]" for text in texts]
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
    is_raw = not array.dtype.hasobject
    content = xxh3_128_digest(array) if is_raw else array.ravel().tolist()
    return f"array {array.dtype!r} {array.shape}", [("", content)]


def tensor(value: torch.Tensor) -> Parts:
    """Take a tensor apart: type, shape, elements and attributes, on whatever device.

    Raises:
        LookupError: it is of a special kind: sparse, nested and quantized tensors hold
            more than that, and "meta" tensors less.
    """
    is_special = value.layout != torch.strided or value.device.type == "meta"
    if is_special or value.is_nested or value.is_quantized:
        raise LookupError(f"Tensor of a special kind ({value.layout})")
    data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw: Any = data.reshape(-1).view(torch.uint8).numpy()
    kind = f"{type(value).__name__} {data.dtype} {[*data.shape]} {value.requires_grad}"
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
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
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
# Attributes that fully describe the values of some types.
MADE_OF: Mapping[type, tuple[str, ...]] = {
    classmethod: ("__func__",),
    functools._lru_cache_wrapper: ("__wrapped__",),  # noqa: SLF001 no other name
    functools.cached_property: ("func",),  # has a lock besides
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    types.MethodType: ("__func__", "__self__"),
}


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
    for name in (getattr(value, key, None) for key in ("__qualname__", "__name__")):
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
    python = tuple(f"{sysconfig.get_path(key)}/" for key in ("stdlib", "platstdlib"))
    is_python = place in ("built-in", "frozen") or place.startswith(python)
    return PYTHON if is_python else None


@functools.cache
def own_release() -> str | None:
    """Return the versions behind a checkout of penstock, as if it were a release.

    All its files count: some operators import C code, which has no parts to look at.
    None if it is no installed one, or its files have changed since this process began:
    then the code that runs is not theirs.
    """
    root, behind = Path(__file__).parents[1], versions(OWN)
    folders = [path.parent for path in root.glob("*/__init__.py")]
    kinds = [folder.rglob(f"[!.]*.{k}") for folder in folders for k in ("py", "so")]
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
    releases: dict[str, str] = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        with suppress(importlib.metadata.PackageNotFoundError):
            one = importlib.metadata.distribution(name)
            # Its origin counts, too: one version of a repository may be many commits.
            releases[name] = f"{one.version} {one.read_text('direct_url.json') or ''}"
            lines = [line for line in one.requires or () if "extra ==" not in line]
            further = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines}
            waiting += further - releases.keys()
    return repr(sorted(releases.items())) if releases else None


def reached(function: types.FunctionType) -> Names:
    """Return what a function finds in modules by name, such as `c.SIZE`, sorted.

    Of a user's module, this is what the code reads of it, or all of it if the module is
    used as a value, as in `f(x, c)`. Names that do not exist (yet) are left out.

    Raises:
        LookupError: it imports a module by a name that is built at run time.
    """
    space = function.__globals__
    names: Names = {}
    steps = steps_of(function.__code__)
    for at, (kind, name) in enumerate(steps):
        if kind in GLOBALS:
            names |= looked_up(name, steps[at + 1 :], space)
        if kind == "IMPORT_NAME":
            (_, level), (_, parts) = steps[at - 2 : at]
            names |= imported(name, parts or (), level, space)
        elif name in ("__import__", "import_module"):
            (argument, module), (call, _) = steps[at + 1 : at + 3]
            if (argument, call) != ("LOAD_CONST", "CALL"):
                raise LookupError("function that imports by a name made later")
            names |= imported(module, (), 0, space)
    return dict(sorted(names.items()))


def steps_of(code: types.CodeType) -> Labelled:
    """Return the instructions of code and its inner code, with what they name."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    inner = [steps_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return [step for step in chain(steps, *inner) if step[0] not in FILLERS]


def looked_up(name: str, then: Labelled, space: Names) -> Names:
    """Return a global by name; of a user's module, the attribute that is read."""
    if name in DYNAMIC - space.keys():
        return {key: space[key] for key in space.keys() - OF_A_MODULE}
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
        whole = importlib.__import__(module, space, None, names, level)
        parts = {f"{label} {name}": getattr(whole, name) for name in names}
    except Exception:  # noqa: BLE001 - it fails, or is caught, when the code runs, too
        return {label: "cannot be imported"}
    return parts or {label: whole}
