"""A walk through all that a value holds, digesting as it goes.

What a value is made of is digested first, so that a digest stands for all below it. A
value met again on the way down is digested by how far up it stands; a function or class
with a place in a module by that place, and what stands there once, after the rest, so
that any number of them may name each other.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from xxhash import xxh3_128_digest

__all__ = [
    "ATOMS",
    "Rule",
    "Undigestible",
    "Walk",
    "leaf",
    "mapping",
    "node",
    "ordered",
    "sequence",
    "unordered",
]

DEPTH = 100
"""Values inside values; each takes some four of Python's frames, of about 1000."""

TANGLED = 100_000
"""Visits of values that lead back to where they were come from, over and over."""

UTF_8 = ("utf-8", "surrogatepass")


class Undigestible(Exception):
    """A value that no other run could be told to have the same of.

    Attributes:
        path: where it was found, as in "dataset.handle".
        what: the name of its type.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.path} is a {self.what}, which no other run can find the same again;"
            " make it when it is used, or give what holds it an attribute"
            " `__penstock_fingerprint__`"
        )


def leaf(tag: str, content: bytes | str = b"") -> bytes:
    """Return the digest of a value that holds no others."""
    data = content.encode(*UTF_8) if isinstance(content, str) else content
    return xxh3_128_digest(b"%b\0%b" % (tag.encode(), data))


def node(tag: str, *parts: bytes) -> bytes:
    """Return the digest of what is made of parts, of each the digest."""
    return xxh3_128_digest(b"%b\0%b" % (tag.encode(), b"".join(parts)))


ATOMS: Mapping[type, Callable[[Any], bytes]] = {
    bool: lambda value: leaf("bool", b"%d" % value),
    bytes: lambda value: leaf("bytes", value),
    complex: lambda value: leaf("complex", repr(value)),
    float: lambda value: leaf("float", repr(value)),
    int: lambda value: leaf("int", b"%x" % value),
    str: lambda value: leaf("str", value),
    type(None): lambda _: leaf("none"),
    type(...): lambda _: leaf("ellipsis"),
    type(NotImplemented): lambda _: leaf("not implemented"),
}

COLUMNS: Mapping[type, Callable[[Sequence[Any]], bytes]] = {
    bool: bytes,
    bytes: lambda column: lengths(column) + b"".join(column),
    float: lambda column: array("d", column).tobytes(),
    int: lambda column: ",".join(map(hex, column)).encode(),
    str: lambda column: lengths(column) + "".join(column).encode(*UTF_8),
    type(None): lambda column: b"%d" % len(column),
}
"""Values of one type, a million in some 0.1 s."""


def lengths(column: Sequence[str | bytes]) -> bytes:
    """Return how many values there are and how long each is: what joining forgets."""
    return struct.pack("<q", len(column)) + array("q", map(len, column)).tobytes()


Rule = Callable[["Walk", Any], bytes]
"""How values of a type are digested."""


class Walk:
    """One walk through all that a value holds and its code names."""

    def __init__(self, name: str, rule_of: Callable[[type], Rule]) -> None:
        self._path = [name]
        self._rule_of = rule_of
        self._open: dict[int, int] = {}  # depths of what is being visited
        self._lowest = DEPTH  # the depth that a reference back went to
        self._known: dict[int, tuple[Any, bytes]] = {}  # held, so that ids stay theirs
        self._tangled: dict[int, Any] = {}
        self._revisits = 0
        self._entered = 0
        self._found: dict[str, tuple[Any, Rule, list[str]]] = {}

    def root(self, value: Any) -> bytes:
        """Return the digest of a value and all definitions that it leads to."""
        found = self.visit(value, None)
        bodies: dict[str, bytes] = {}
        while waiting := [name for name in self._found if name not in bodies]:
            for name in waiting:
                each, body, self._path = self._found[name]
                bodies[name] = body(self, each)
        parts = (leaf("name", name) + bodies[name] for name in sorted(bodies))
        return node("root", found, *parts) if bodies else found

    def undigestible(self, what: str) -> Undigestible:
        """Return the error for the value that is being visited."""
        return Undigestible("".join(self._path), what)

    def visit(self, value: Any, label: str | None) -> bytes:
        """Return the digest of a value, which its holder calls `label`."""
        atom = ATOMS.get(type(value))
        if atom is not None:
            return atom(value)
        key, depth = id(value), len(self._open)
        if key in self._known:
            return self._known[key][1]
        if key in self._open:
            self._lowest = min(self._lowest, self._open[key])
            return leaf("back", str(depth - self._open[key]))
        self._path.append(label or "")
        outer, self._lowest, entered = self._lowest, depth, self._entered
        self._check(key, depth)
        self._open[key] = depth
        found = self._rule_of(type(value))(self, value)
        del self._open[key]
        self._path.pop()
        self._keep(value, found, is_small=entered + 1 == self._entered)
        self._lowest = min(outer, self._lowest) if self._lowest < depth else outer
        return found

    def _check(self, key: int, depth: int) -> None:
        self._entered += 1
        self._revisits += key in self._tangled
        if depth >= DEPTH:
            raise self.undigestible(f"value inside {DEPTH} others")
        if self._revisits > TANGLED:
            raise self.undigestible("web of references, too tangled to follow")

    def _keep(self, value: Any, found: bytes, *, is_small: bool) -> None:
        """Keep what does not depend on the way to it and took more than a look."""
        if self._lowest < len(self._open):
            self._tangled[id(value)] = value
        elif not (is_small and isinstance(value, tuple | list | dict)):
            self._known[id(value)] = (value, found)

    def each(self, values: Iterable[Any], names: Sequence[Any] | None = None) -> bytes:
        """Return the digests of items, called by their numbers or `names`."""
        parts = []
        for number, value in enumerate(values):
            atom = ATOMS.get(type(value))
            if atom is None:
                name = number if names is None else names[number]
                shown = repr(name) if type(name) in ATOMS else type(name).__name__
                parts.append(self.visit(value, f"[{shown:.60}]"))
            else:
                parts.append(atom(value))
        return b"".join(parts)

    def members(self, values: Mapping[str, Any], prefix: str = ".") -> bytes:
        """Return the digest of named parts, in the order of their names."""
        names = sorted(values)
        found = (self.visit(values[name], prefix + name) for name in names)
        return node("members", leaf("names", COLUMNS[str](names)), *found)

    def later(self, name: str, value: Any, body: Rule) -> bytes:
        """Return the digest of a definition's place; what stands there comes later."""
        self._found.setdefault(name, (value, body, [*self._path]))
        return leaf("definition", name)


def column(values: Sequence[Any]) -> bytes | None:
    """Return the digest of items that are all simple, or None."""
    kinds = set(map(type, values))
    if not kinds <= ATOMS.keys():
        return None
    if len(kinds) == 1 and kinds <= COLUMNS.keys():
        kind = kinds.pop()
        return leaf(kind.__name__, COLUMNS[kind](values))
    return node("simple", *[ATOMS[type(value)](value) for value in values])


def rows(values: Sequence[Any]) -> bytes | None:
    """Return the digest of rows of the same length whose columns are simple."""
    kinds, sizes = set(map(type, values)), set()
    if kinds in ({tuple}, {list}):
        sizes = set(map(len, values))
    if len(sizes) != 1 or sizes == {0}:
        return None
    found = [column([row[n] for row in values]) for n in range(sizes.pop())]
    parts = [each for each in found if each is not None]
    tag = f"rows of {kinds.pop().__name__}"
    return node(tag, *parts) if len(parts) == len(found) else None


def sequence(
    walk: Walk, tag: str, values: Sequence[Any], names: Sequence[Any] | None = None
) -> bytes:
    """Return the digest of items in their order."""
    found = column(values) or rows(values) or walk.each(values, names)
    return node(tag, found)


def unordered(walk: Walk, tag: str, values: Collection[Any]) -> bytes:
    """Return the digest of items whatever their order."""
    kinds = set(map(type, values))
    if kinds in ({str}, {int}):
        return sequence(walk, tag, sorted(values))
    return node(tag, *sorted(walk.visit(value, "[...]") for value in values))


def mapping(walk: Walk, values: Mapping[Any, Any]) -> bytes:
    """Return the digest of keys and values, whatever their order."""
    if set(map(type, values)) in ({str}, {int}):
        names = sorted(values)
    else:
        found = [(walk.visit(key, "[...]"), key) for key in values]
        names = [key for _, key in sorted(found, key=itemgetter(0))]
    return ordered(walk, "dict", names, [values[name] for name in names])


def ordered(walk: Walk, tag: str, names: list[Any], values: list[Any]) -> bytes:
    """Return the digest of keys and values in their order."""
    keys = sequence(walk, "keys", names)
    return node(tag, keys, sequence(walk, "values", values, names))
