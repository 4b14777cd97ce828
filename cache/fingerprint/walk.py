"""A walk through all that a value holds, digesting as it goes.

What a value is made of is digested first, so that a digest stands for all below it. A
value met again on the way down is digested by how far up it stands; a definition with a
place in a module by that place, and its body once, after the rest, so that any number
of definitions may name each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from xxhash import xxh3_128_digest

__all__ = [
    "ATOMS",
    "Rule",
    "Undigestible",
    "Walk",
    "in_code",
    "leaf",
    "mapping",
    "node",
    "pairs",
    "sequence",
]

DEPTH = 100
"""Values inside values; each takes some four of Python's frames, of about 1000."""

ATOMS = frozenset(
    (bool, bytes, complex, float, int, str, type(None), type(...), type(NotImplemented))
)


class Undigestible(Exception):
    """A value that no other run can be known to have.

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
    data = content.encode() if isinstance(content, str) else content
    return xxh3_128_digest(b"%b\0%b" % (tag.encode(), data))


def node(tag: str, *parts: bytes) -> bytes:
    """Return the digest of what is made of parts, each given by its digest."""
    return xxh3_128_digest(b"%b\0%b" % (tag.encode(), b"".join(parts)))


def atom(value: Any) -> bytes:
    """Return the digest of a value of one of the `ATOMS`."""
    kind = type(value)
    if kind is int:
        return leaf("int", b"%x" % value)
    return leaf(kind.__name__, value if kind is bytes else repr(value))


Rule = Callable[["Walk", Any], bytes]
"""How values of a type are digested."""


class Walk:
    """One walk through all that a value holds and its code reaches.

    Args:
        name: what the value is called in errors.
        rule_of: finds the rule for a type.
    """

    def __init__(self, name: str, rule_of: Callable[[type], Rule]) -> None:
        self.in_code = False
        """Whether code reads the values by name: then the order of a dict counts."""
        self.libraries: set[str] = set()
        """What is reached of libraries, by full names."""
        self.ctx: set[str] = set()
        """Attributes of a `ctx` that code reads; "" where it is passed on."""
        self.words: set[str] = set()
        """All attributes and texts in code."""
        self._path = [name]
        self._rule_of = rule_of
        self._open: dict[tuple[int, bool], int] = {}  # depths of what is being visited
        self._lowest = DEPTH  # the depth that a reference back went to
        self._known: dict[tuple[int, bool], tuple[Any, bytes]] = {}  # held: ids stay
        self._bodies: dict[str, tuple[Any, Rule, list[str]]] = {}

    def root(self, value: Any) -> bytes:
        """Return the digest of a value and all definitions that it leads to."""
        found = self.visit(value, "")
        done: dict[str, bytes] = {}
        while waiting := self._bodies.keys() - done.keys():
            for name in sorted(waiting):
                each, body, self._path = self._bodies[name]
                done[name] = body(self, each)
        parts = (leaf("name", name) + done[name] for name in sorted(done))
        return node("root", found, *parts) if done else found

    def undigestible(self, what: str) -> Undigestible:
        """Return the error for the value that is being visited."""
        return Undigestible("".join(self._path), what)

    def visit(self, value: Any, label: str) -> bytes:
        """Return the digest of a value, which its holder calls `label`."""
        if type(value) in ATOMS:
            return atom(value)
        key, depth = (id(value), self.in_code), len(self._open)
        if key in self._known:
            return self._known[key][1]
        if key in self._open:
            self._lowest = min(self._lowest, self._open[key])
            return leaf("back", str(depth - self._open[key]))
        self._path.append(label)
        if depth >= DEPTH:
            raise self.undigestible(f"value inside {DEPTH} others")
        outer, self._lowest, self._open[key] = self._lowest, depth, depth
        found = again = self._rule_of(type(value))(self, value)
        del self._open[key]
        self._path.pop()
        if self._lowest < depth:  # it depends on the way to it
            again, outer = (
                leaf("again", str(len(self._known))),
                min(outer, self._lowest),
            )
        self._known[key], self._lowest = (value, again), outer
        return found

    def each(self, values: Iterable[Any], names: Sequence[Any] | None = None) -> bytes:
        """Return the digests of items, called by their numbers or `names`."""
        parts = []
        for number, value in enumerate(values):
            if type(value) in ATOMS:
                parts.append(atom(value))
                continue
            name = number if names is None else names[number]
            shown = repr(name) if type(name) in ATOMS else type(name).__name__
            parts.append(self.visit(value, f"[{shown:.60}]"))
        return b"".join(parts)

    def members(self, values: Mapping[Any, Any], prefix: str = ".") -> bytes:
        """Return the digest of named parts, in the order of their names."""
        names = sorted(values, key=str)
        found = (self.visit(values[name], f"{prefix}{name}") for name in names)
        return node("members", leaf("names", repr(names)), *found)

    def later(self, name: str, value: Any, body: Rule) -> bytes:
        """Return the digest of a definition's place; what stands there comes later."""
        self._bodies.setdefault(name, (value, body, [*self._path]))
        return leaf("definition", name)


def is_plain(values: Collection[Any]) -> bool:
    """Whether `repr` tells all of items: atoms, or rows of atoms."""
    kinds = set(map(type, values))
    if kinds and kinds <= {tuple, list}:
        kinds = set(map(type, chain.from_iterable(values)))
    return kinds <= ATOMS


def in_code(rule: Rule) -> Rule:
    """Return the rule for what code reads by name."""

    def inner(walk: Walk, value: Any) -> bytes:
        outer, walk.in_code = walk.in_code, True
        found = rule(walk, value)
        walk.in_code = outer
        return found

    return inner


def sequence(
    walk: Walk, tag: str, values: Sequence[Any], names: Sequence[Any] | None = None
) -> bytes:
    """Return the digest of items in their order."""
    if is_plain(values):
        try:
            return leaf(tag, repr(values))
        except ValueError:  # ints of more digits than Python prints
            pass
    return node(tag, walk.each(values, names))


def unordered(walk: Walk, values: Iterable[Any]) -> list[bytes]:
    """Return the digests of items whatever their order."""
    return sorted(walk.visit(value, "[...]") for value in values)


def mapping(walk: Walk, values: Mapping[Any, Any]) -> bytes:
    """Return the digest of keys and values; whatever their order, unless code reads it.

    Code may list a dict that it names, and so depend on the order that was written.
    """
    names = list(values)
    if walk.in_code:
        pass
    elif set(map(type, names)) in ({str}, {int}):
        names.sort()
    else:
        found = [(walk.visit(key, "[...]"), key) for key in names]
        names = [key for _, key in sorted(found, key=itemgetter(0))]
    return pairs(walk, names, [values[name] for name in names])


def pairs(walk: Walk, names: list[Any], values: list[Any]) -> bytes:
    """Return the digest of keys and values in their order."""
    keys = sequence(walk, "keys", names)
    return node("dict", keys, sequence(walk, "values", values, names))
