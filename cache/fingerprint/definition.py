"""Whose a definition is, where it stands, and what its source reaches by name.

What stands in site-packages or came with Python is a library's, and versions tell it
from others. All else is the user's own (an editable install, too: its code changes and
its version does not).
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import linecache
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from xxhash import xxh3_128_hexdigest

__all__ = [
    "PYTHON",
    "Library",
    "Reader",
    "address",
    "module_name",
    "names_of",
    "reached",
    "release",
    "source_of",
]

PYTHON = "python {}.{}".format(*sys.version_info)
"""Of the minor version: a patch release changes no byte code."""

INSTALLED = ("/site-packages/", "/dist-packages/")
OF_A_MODULE = frozenset(("__builtins__", "__file__", *vars(ModuleType("any"))))
"""Globals that say where a module is, and not what it does."""
DYNAMIC = frozenset(("eval", "exec", "globals"))
"""Built-in functions that reach a module's globals without naming them."""
DECODERS = ("numpy", "pillow", "simplejpeg", "torch")
"""What our own operators give other results with, when it is another version."""
Tail = tuple[str, ...]


def module_name(value: Any) -> str:
    """Return the module that a function or class says it is of, or ""."""
    name = getattr(value, "__module__", None)
    if not isinstance(name, str):
        name = getattr(getattr(value, "__self__", None), "__module__", None)
    # a spawned process runs the main script under a name of its own
    return "__main__" if name == "__mp_main__" else str(name or "")


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


@cache
def release(module: str) -> str | None:
    """Return the versions behind a library's module; None: it is the user's own."""
    top = module.partition(".")[0]
    place = location(top)
    if any(folder in place for folder in INSTALLED):
        names = packages().get(top, ())
        return versions([*names]) if names else digest_of_file(module, place)
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    own = tuple(path.replace("\\", "/") + "/" for path in paths)
    is_python = place in ("built-in", "frozen") or place.startswith(own)
    return PYTHON if is_python else None


def location(top: str) -> str:
    """Return where a top-level module was found: a path, "built-in", or ""."""
    if top in ("", "__main__", "__mp_main__"):
        return ""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # it was made by hand
        return ""
    folders = list(spec.submodule_search_locations or ()) if spec else []
    place = (spec and spec.origin) or f"{folders[0] if folders else ''}/"
    return place.replace("\\", "/")


@cache
def packages() -> dict[str, list[str]]:
    """Return the distributions by the packages that they hold."""
    return dict(importlib.metadata.packages_distributions())


def versions(names: list[str]) -> str:
    """Return the versions of distributions and of all that they require."""
    found: dict[str, str] = {}
    waiting = names
    while waiting:
        name = re.sub("[-_.]+", "-", waiting.pop()).lower()
        try:
            one = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # where it came from: one version of a repository may be many commits
        found[name] = f"{one.version} {one.read_text('direct_url.json') or ''}"
        required = [each for each in one.requires or () if "extra ==" not in each]
        required = [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in required]
        wanted = DECODERS if name == "penstock" else required
        waiting = [*waiting, *(each for each in wanted if each not in found)]
    return repr(sorted(found.items()))


def digest_of_file(module: str, place: str) -> str:
    """Return the digest of a module that belongs to no distribution."""
    try:
        file = getattr(sys.modules.get(module), "__file__", None) or place
        with open(file, "rb") as opened:
            return xxh3_128_hexdigest(opened.read())
    except OSError:
        return ""


@lru_cache(256)
def definitions(text: str) -> dict[str, list[Any]]:
    """Return the definitions in a module's source, by their qualified names."""
    found: dict[str, list[Any]] = defaultdict(list)

    def look(parent: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(parent):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                name = prefix + getattr(child, "name", "<lambda>")
                found[name].append(child)
                inner = f"{name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inner = f"{prefix}{child.name}."
            look(child, inner)

    try:
        look(ast.parse(text), "")
    except SyntaxError:  # another file lies there by now
        return {}
    return found


def source_of(code: CodeType, space: dict[str, Any]) -> list[Any]:
    """Return what the source has by the name of a code; several where lambdas share it.

    Cells of notebooks and the main script are found as tracebacks find them.
    """
    text = "".join(linecache.getlines(code.co_filename, space))
    found = definitions(text).get(code.co_qualname, [])
    return [each for each in found if first_line(each) == code.co_firstlineno] or found


def first_line(definition: Any) -> int:
    """Return the line that a definition starts at, decorators included."""
    starts = [definition, *getattr(definition, "decorator_list", ())]
    return min(int(each.lineno) for each in starts)


class Reader:
    """Reads source for the names in it, and what is asked of each: `c.SIZE`."""

    def __init__(self, definitions: list[Any]) -> None:
        self.tails: defaultdict[str, set[Tail]] = defaultdict(set)
        """By name: attributes that are taken of it; () where it is used as it is."""
        self.imports: list[tuple[str, str, str | None]] = []
        """Of imports in functions: the name given, the module, and what of it."""
        self.words: set[str] = set()
        """Attributes and texts."""
        self.imports_unknown = False
        """Whether it imports by a name that is made as it runs."""
        self._within: set[int] = set()  # an attribute's inner parts, which come later
        for each in definitions:
            for part in ast.walk(each):
                self._read(part)

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Name() | ast.Attribute() if id(node) not in self._within:
                self._follow(node)
            case ast.Constant(str(text)):
                self.words.add(text)
            case ast.Import(names):
                for each in names:  # `import a.b` gives the name `a`
                    name = each.asname or each.name.partition(".")[0]
                    self.imports.append((name, each.name, None))
            case ast.ImportFrom(module, names, level):
                module = "." * (level or 0) + (module or "")
                for each in names:
                    given = each.asname or each.name
                    self.imports.append((given, module, each.name))
            case ast.Call(
                ast.Name("__import__" | "import_module")
                | ast.Attribute(_, "import_module"),
                [first, *_],
            ):
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    self.imports.append(("", first.value, None))
                else:
                    self.imports_unknown = True

    def _follow(self, node: ast.AST) -> None:
        tail: Tail = ()
        while isinstance(node, ast.Attribute):
            tail, node = (node.attr, *tail), node.value
            self._within.add(id(node))
        self.words.update(tail)
        if isinstance(node, ast.Name):
            self.tails[node.id].add(tail)


def reached(function: FunctionType, reader: Reader) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function's code finds in modules, and what they are.

    Of a user's module whose attributes are named, as in `c.SIZE`, that is these; else
    the module as a whole, as for all that its code names where there is no source.
    What is not there (yet) is left out.
    """
    space, names = function.__globals__, set(names_of(function.__code__))
    for name in sorted(names & space.keys() - OF_A_MODULE):
        if name in reader.tails or name not in reader.words:
            for tail in sorted(reader.tails.get(name, {()})):
                yield followed(name, space[name], tail)
    if names & DYNAMIC - space.keys():
        yield "the module", sys.modules.get(str(space.get("__name__")))
    for name, module, part in reader.imports:
        tails = reader.tails.get(name, {()})
        found = imported(module, part, str(space.get("__package__") or ""))
        if "." in module and part is None and name == module.partition(".")[0]:
            found = sys.modules.get(name, found)
        for tail in sorted(tails):
            yield followed(name, found, tail)


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a code and those in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


class Library(str):
    """The full name of what a library has, as in `numpy.random.rand`."""

    __slots__ = ()


def imported(module: str, part: str | None, package: str) -> Any:
    """Return a module, or what it has by a name."""
    try:
        full = importlib.util.resolve_name(module, package)
        if release(full) is not None:
            return Library(f"{full}.{part or ''}")
        found = importlib.import_module(full)
        if part is None or part == "*":
            return found
        if not hasattr(found, part):
            return importlib.import_module(f"{full}.{part}")
        return getattr(found, part)
    except Exception:  # noqa: BLE001 - it fails when it runs, or is caught there
        return f"{module} cannot be imported"


def followed(name: str, value: Any, tail: Tail) -> tuple[str, Any]:
    """Return what the attributes of a module lead to, and what it is called."""
    for at, part in enumerate(tail):
        if not isinstance(value, ModuleType):
            break
        if release(value.__name__) is not None:
            return name, Library(".".join((value.__name__, *tail[at:])))
        if not hasattr(value, part):
            break
        name, value = f"{name}.{part}", getattr(value, part)
    return name, value
