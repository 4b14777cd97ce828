"""What code is told by: its source, what that reaches by name, and versions.

What stands in site-packages or came with Python is a library's, and told by versions.
All else is the user's own, and told by source and values (an editable install, too: its
code changes and its version does not).
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
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

PYTHON = "python {}.{}".format(*sys.version_info)
"""Of the minor version: a patch release changes no byte code."""

INSTALLED = ("/site-packages/", "/dist-packages/")
OF_A_MODULE = frozenset(
    ("__builtins__", "__cached__", "__file__", "__path__", *vars(ModuleType("any")))
)
"""Globals that say where a module is, and not what it does."""
DYNAMIC = frozenset(("eval", "exec", "globals"))
"""Built-in functions that reach a module's globals without naming them."""
IMPORTS = frozenset(("__import__", "import_module"))
MAIN = ("__main__", "__mp_main__")


# Libraries


def library_name(value: Any) -> str | None:
    """Return the full name of a library's module, class or function; None: no such."""
    if isinstance(value, ModuleType):
        return value.__name__ if release(value.__name__) is not None else None
    module = getattr(value, "__module__", None)
    if module is None:
        module = getattr(getattr(value, "__self__", None), "__module__", None)
    if not isinstance(module, str) or release(module) is None:
        return None
    for kind in ("__qualname__", "__name__"):
        name = getattr(value, kind, None)
        try:
            if name and attrgetter(name)(sys.modules[module]) is value:
                return f"{module}.{name}"
        except (AttributeError, KeyError):
            continue
    return None


@cache
def release(module: str) -> str | None:
    """Return the versions behind a library's module; None: it is the user's own."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec("" if top in MAIN else top)
    except (ImportError, ValueError):  # it was made by hand
        return None
    if spec is None:
        return None
    place = spec.origin or str(spec.submodule_search_locations)
    if any(folder in place for folder in INSTALLED):
        names = packages().get(top)  # none has what was put there by hand
        return versions([*names]) if names else None
    python = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
    is_python = place in ("built-in", "frozen") or place.startswith(python)
    return PYTHON if is_python else None


packages = cache(importlib.metadata.packages_distributions)
"""Returns the distributions by the packages that they hold."""


def versions(waiting: list[str]) -> str:
    """Return the versions of distributions and of all that they require."""
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        try:
            one = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # where it came from: one version of a repository may be many commits
        found[name] = f"{one.version} {one.read_text('direct_url.json') or ''}"
        required = [each for each in one.requires or () if "extra ==" not in each]
        required = [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in required]
        waiting += [each for each in required if each not in found]
    return repr(sorted(found.items()))


# Source


@lru_cache(256)
def definitions(text: str) -> dict[tuple[str, int], list[ast.AST]]:
    """Return the functions in a module's source, by their names and first lines."""
    found: dict[tuple[str, int], list[ast.AST]] = defaultdict(list)
    try:
        nodes = ast.walk(ast.parse(text))
    except SyntaxError:  # another file lies there by now
        return {}
    for each in nodes:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            starts = [each, *getattr(each, "decorator_list", ())]
            line = min(part.lineno for part in starts)
            found[getattr(each, "name", "<lambda>"), line].append(each)
    return found


class Source:
    """The source of a function, and what it names.

    Cells of notebooks and the main script are found as tracebacks find them. Where
    there is none, the code says what it names, and modules are reached whole.
    """

    def __init__(self, code: CodeType, space: dict[str, Any]) -> None:
        lines = linecache.getlines(code.co_filename, space)
        key = code.co_name, code.co_firstlineno
        found = definitions("".join(lines)).get(key, [])
        nodes = [part for each in found for part in ast.walk(each)]
        self.text = "\n".join(map(ast.unparse, found))
        """Of several where lambdas share a line; "" if there is none."""
        self.names = {*names_of(code)}
        """Globals and attributes."""
        self.variables: set[str] = set() if found else self.names
        self.whole: set[str] = set() if found else self.names
        """Names used as they are, as in `f(x, config)`; others as in `config.size`."""
        self.imports: list[ast.Import | ast.ImportFrom] = []
        narrowed = {id(each.value) for each in nodes if isinstance(each, ast.Attribute)}
        for each in nodes:
            self._read(each, is_whole=id(each) not in narrowed)

    def _read(self, node: ast.AST, *, is_whole: bool) -> None:
        match node:
            case ast.Name(name) | ast.Attribute(_, name):
                self.whole |= {name} if is_whole else set()
                self.variables |= {name} if isinstance(node, ast.Name) else set()
            case ast.Import() | ast.ImportFrom():
                self.imports.append(node)
            case ast.Call(ast.Name(name) | ast.Attribute(_, name), args):
                if name not in IMPORTS:
                    return
                match args:
                    case [ast.Constant(str(module))] if module[:1] != ".":
                        self.imports.append(ast.Import([ast.alias(module, "imported")]))
                        self.whole.add("imported")
                    case _:
                        raise LookupError("function that imports by a name made later")


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a code and those in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def reached(function: FunctionType, source: Source) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function finds in modules, and what they are.

    What is not there (yet) is left out.
    """
    space = function.__globals__
    names = source.names & source.variables
    found = [(name, space[name]) for name in names & space.keys() - OF_A_MODULE]
    for each in source.imports:
        found += imported(each, space).items()
    for name, value in sorted(found, key=itemgetter(0)):
        yield from of_module(name, value, source, frozenset())
    if names & DYNAMIC - space.keys():
        yield "the module", sys.modules.get(str(space.get("__name__")))


def of_module(
    path: str, value: Any, source: Source, above: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    """Yield a value; of a user's module only what the source may name, as `c.SIZE`."""
    is_own = isinstance(value, ModuleType) and release(value.__name__) is None
    if not is_own or path.rpartition(".")[2] in source.whole:
        yield path, value
    elif value.__name__ not in above:
        space = vars(value)
        for name in sorted((source.names | {"__getattr__"}) & space.keys()):
            inner = above | {value.__name__}
            yield from of_module(f"{path}.{name}", space[name], source, inner)


def imported(
    node: ast.Import | ast.ImportFrom, space: dict[str, Any]
) -> dict[str, Any]:
    """Return what an import statement gives; of a library its versions alone."""
    text = ast.unparse(node)
    modules = [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = ["." * node.level + (node.module or "")]
    found = [release(each) for each in modules]
    if None not in found:
        return {text: repr(found)}
    try:
        return dict(bound_by(node, space.get("__package__")))
    except Exception:  # noqa: BLE001 - it fails when it runs, too, or is caught there
        return {text: "cannot be imported"}


def bound_by(
    node: ast.Import | ast.ImportFrom, package: str | None
) -> Iterator[tuple[str, Any]]:
    """Import as the statement does; yield the names it binds, and what to."""
    if isinstance(node, ast.Import):
        for each in node.names:
            module = importlib.import_module(each.name)
            root = each.name.partition(".")[0]
            yield each.asname or root, module if each.asname else sys.modules[root]
        return
    module = importlib.import_module("." * node.level + (node.module or ""), package)
    for each in node.names:
        if not hasattr(module, each.name):  # a submodule that nobody has loaded
            importlib.import_module(f"{module.__name__}.{each.name}")
        yield each.asname or each.name, getattr(module, each.name)
