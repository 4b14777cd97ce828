"""The budgets of the house style that no linter counts."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

FILE_LINES = 700
FUNCTION_LINES = 40
FUNCTION_LINES_P90 = 20
NESTING = 3
PUBLIC_METHODS = 12

REFERENCE = {"pipeline/pipeline.py": 22}
"""Lines by which a file may be longer, because its docstrings are the reference."""

FACES = {"DataLoader", "Dataset", "Pipeline"}
"""Their methods are the public interface, whose number no budget bounds."""

BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)

# Written so that this file does not match itself.
UNWANTED = {
    "an open end": r"TOD[O]|FIXM[E]|XX[X]\b",
    "a registry's host": r"py[p]i\.org|pythonhoste[d]|download\.pytorc[h]\.org",
    "a path of one machine": r"(?<![\w.])/(?:wor[k]|far[m]|hom[e]|roo[t])/\w",
}


@pytest.fixture(scope="module")
def trees(root: Path, modules: dict[str, Path]) -> dict[str, ast.Module]:
    """Return every module of the package, parsed, by its path from the root."""
    return {
        str(path.relative_to(root)): ast.parse(path.read_text())
        for path in modules.values()
    }


def test_files_are_short(root: Path, trees: dict[str, ast.Module]) -> None:
    lines = {
        name: len((root / name).read_text().splitlines()) - REFERENCE.get(name, 0)
        for name in trees
    }
    assert over(lines, FILE_LINES) == {}


def test_functions_are_short(root: Path, trees: dict[str, ast.Module]) -> None:
    lines = {
        f"{name}:{function.lineno} {function.name}": code_lines(function, source)
        for name, tree in trees.items()
        for source in [(root / name).read_text().splitlines()]
        for function in functions(tree)
    }
    assert over(lines, FUNCTION_LINES) == {}
    assert statistics.quantiles(lines.values(), n=10)[-1] <= FUNCTION_LINES_P90


def test_functions_are_flat(trees: dict[str, ast.Module]) -> None:
    depths = {
        f"{name}:{function.lineno} {function.name}": nesting(function.body)
        for name, tree in trees.items()
        for function in functions(tree)
    }
    assert over(depths, NESTING) == {}


def test_classes_are_small(trees: dict[str, ast.Module]) -> None:
    methods = {
        f"{name}:{node.lineno} {node.name}": sum(is_public(item) for item in node.body)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name not in FACES
    }
    assert over(methods, PUBLIC_METHODS) == {}


def test_public_names_are_documented(trees: dict[str, ast.Module]) -> None:
    promised = set(chain.from_iterable(map(promised_methods, trees.values())))
    bare = [
        f"{name}:{getattr(node, 'lineno', 1)}"
        for name, tree in trees.items()
        for node in [tree, *public_definitions(tree)]
        if not ast.get_docstring(node) and getattr(node, "name", "") not in promised
    ]
    assert bare == []


@pytest.mark.parametrize("what", UNWANTED)
def test_no_text_mentions_what_means_nothing_to_a_reader(what: str, root: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("only git knows which files are ours, and this is not a checkout")
    mentions = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in tracked_texts(root)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(UNWANTED[what], line)
    ]
    assert mentions == []


def over(counts: dict[str, int], budget: int) -> dict[str, int]:
    """Return those that exceed `budget`."""
    return {name: count for name, count in counts.items() if count > budget}


def functions(tree: ast.Module) -> Iterator[Function]:
    """Return all functions and methods, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def code_lines(function: Function, source: list[str]) -> int:
    """Return the lines of `function` that are neither docstring, comment nor blank."""
    skipped: set[int] = set()
    if ast.get_docstring(function) is not None:
        text = function.body[0]
        skipped = set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    return sum(
        bool(line := source[number - 1].strip()) and not line.startswith("#")
        for number in lines
        if number not in skipped
    )


def nesting(body: list[ast.stmt]) -> int:
    """Return the depth of blocks in `body`; an `elif` is as deep as its `if`."""
    return max((depth(statement) for statement in body), default=0)


def depth(statement: ast.stmt) -> int:
    """Return the depth of blocks in one statement, itself counted."""
    if not isinstance(statement, BLOCKS):
        return 0
    otherwise = getattr(statement, "orelse", [])
    is_elif = isinstance(statement, ast.If) and [*map(type, otherwise)] == [ast.If]
    bodies = [statement.body, getattr(statement, "finalbody", [])]
    bodies += [handler.body for handler in getattr(statement, "handlers", [])]
    inner = max(nesting(body) for body in (bodies if is_elif else [*bodies, otherwise]))
    return max(1 + inner, nesting(otherwise) if is_elif else 0)


def is_public(node: ast.stmt) -> bool:
    """Return whether it defines a name without a leading underscore."""
    return isinstance(node, Definition) and node.name[0] != "_"


def public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Yield public classes and functions, and public members of public classes."""
    for member in node.body:
        if isinstance(member, Definition) and is_public(member):
            yield member
            if isinstance(member, ast.ClassDef):
                yield from public_definitions(member)


def promised_methods(tree: ast.Module) -> Iterator[str]:
    """Return methods that protocols document for all that implement them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(map(is_protocol, node.bases)):
            methods = (method for method in node.body if isinstance(method, Function))
            yield from (method.name for method in methods if ast.get_docstring(method))


def is_protocol(base: ast.expr) -> bool:
    """Return whether it says `Protocol`, `Protocol[...]` or `ABC`."""
    return ast.unparse(base).partition("[")[0] in ("ABC", "Protocol")


def tracked_texts(root: Path) -> Iterator[Path]:
    """Return the text files that git tracks, or would track once added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        path = root / name
        if path.is_file() and b"\0" not in path.read_bytes():
            yield path
