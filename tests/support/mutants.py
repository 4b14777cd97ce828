"""Small breakages of the product, drawn at random from its source text.

Each changes one place as a slip of the hand might: a comparison, an operator, a
condition, a constant, a default, or a statement that is no longer there. What changes
no behaviour is never drawn: annotations, docstrings and messages, assertions (that of
`zip`, too), blocks for type checkers or other platforms, and the values of constants in
capitals, which were chosen and might have been others. A mutant may still mean the same
as the original; only a reader can tell.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mutant", "changes", "draw", "near_tests", "product"]

PACKAGES = ("autotune", "cache", "engine", "pipeline", "system")
MIN_STATEMENTS = 30
MIN_CHANGES = 10
"""Smaller modules are not drawn: they hold hardly anything to change."""

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}
"""What is sought between the operands, and what replaces it."""
ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
"""Functions that tell the time: two readings are not the same."""
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: (r"\*\*", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
ELSEWHERE = {"TYPE_CHECKING", "platform", "version_info"}
"""An `if` on one of these is about type checkers, other systems or other Pythons."""
FOR_TYPES = {"cast", "TypeVar", "ParamSpec", "NewType", "Literal", "Annotated"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Change(NamedTuple):
    """Another text for one place of a file, in characters from its start."""

    start: int
    end: int
    new: str


class Mutant(NamedTuple):
    """One breakage of one file."""

    file: str
    start: int
    end: int
    new: str

    def applied(self, text: str) -> str:
        """Return the file's text with the breakage."""
        return text[: self.start] + self.new + text[self.end :]

    def line(self, text: str) -> int:
        """Return the number of the line that it starts in."""
        return text.count("\n", 0, self.start) + 1

    def lines(self, text: str) -> tuple[str, str]:
        """Return the line it stands in, before and after; several become one."""
        first = text.rfind("\n", 0, self.start) + 1
        last = text.find("\n", self.end)
        broken = text[first : self.start] + self.new + text[self.end : last]
        return " ".join(text[first:last].split()), " ".join(broken.split())


ON_A_DEVICE = "engine/to_device/cuda.py"
"""The module that runs on a CUDA device alone: without one, no test can break."""


@cache
def product(root: Path) -> list[str]:
    """Name the modules that mutants are drawn from."""
    files = [*root.glob("*.py")]
    for package in PACKAGES:
        files += (root / package).rglob("*.py")
    return sorted(
        str(path.relative_to(root))
        for path in files
        if path != root / ON_A_DEVICE
        and statements(text := path.read_text()) > MIN_STATEMENTS
        and len(changes(text)) >= MIN_CHANGES
    )


def statements(text: str) -> int:
    """Count the statements of a module, nested ones too."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def draw(root: Path, count: int, modules: int, seed: int) -> list[Mutant]:
    """Draw modules evenly, then mutants evenly from each, in the order of the files."""
    rng = random.Random(seed)
    files = sorted(rng.sample(product(root), modules))
    mutants = []
    for number, file in enumerate(files):
        share = count * (number + 1) // modules - count * number // modules
        places = changes((root / file).read_text())
        picks = rng.sample(places, min(share, len(places)))
        mutants += [Mutant(file, *change) for change in sorted(picks)]
    return mutants


def changes(text: str) -> list[Change]:
    """Return all that may be changed in a module's text, each once."""
    finder = Finder(text)
    finder.visit(ast.parse(text))
    return sorted(set(finder.found))


class Finder(ast.NodeVisitor):
    """Walks a module's tree and notes what may be changed in its text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.encode().splitlines(keepends=True)
        self.starts = [0, *accumulate(len(line.decode()) for line in self.lines)]
        self.found: list[Change] = []

    def visit(self, node: ast.AST) -> None:
        if not (isinstance(node, ast.stmt) and self.is_left_out(node)):
            super().visit(node)

    def is_left_out(self, node: ast.stmt) -> bool:
        """Whether nothing in this statement is behaviour on this platform."""
        if "# pragma: no cover" in self.lines[node.lineno - 1].decode():
            return True
        if isinstance(node, ast.If):
            return not ELSEWHERE.isdisjoint(names(node.test))
        if isinstance(node, ast.Assign | ast.AnnAssign):
            return is_for_readers(node)
        if isinstance(node, Function):
            return node.name == "__repr__" or is_declared_only(node)
        return isinstance(node, ast.Assert | ast.Import | ast.ImportFrom)

    # What is visited only in part

    def visit_FunctionDef(self, node: Function) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 ast's name

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in filter(None, [*node.defaults, *node.kw_defaults]):
            if isinstance(default, ast.Constant) and isinstance(default.value, str):
                self.replace(default, '""' if default.value else '"other"')
            self.visit(default)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave it: it is a message, and Python 3.11 knows no places within."""

    def visit_Call(self, node: ast.Call) -> None:
        if FOR_TYPES.isdisjoint(names(node.func)):
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if FOR_TYPES.isdisjoint(names(node.value)):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("stacklevel", "strict"):
            self.visit(node.value)

    # Statements that are gone

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        called = value.value if isinstance(value, ast.Await) else value
        if isinstance(called, ast.Call):
            self.replace(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace(node, "pass")  # and no change of what it says

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(map(is_part, node.targets)):
            self.replace(node, "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        if any(map(is_part, node.targets)):
            self.replace(node, "pass")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not is_none(node.value):
            self.replace(node, "return None")
        self.generic_visit(node)

    # Conditions

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815 ast's names

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def negate(self, test: ast.expr) -> None:
        """Put `not` before it, unless another change means the same."""
        simple = isinstance(test, ast.Compare) and len(test.ops) == 1
        if simple and not isinstance(test.ops[0], ORDERINGS):
            return
        if not (isinstance(test, ast.Constant) or is_not(test)):
            start, end = self.span(test)
            self.replace(test, f"not ({self.text[start:end]})")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if is_not(node):
            start, end = self.span(node)
            self.replace(node, self.text[start + len("not") : end].lstrip())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        swap = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap(left, right, *swap)
        self.generic_visit(node)

    # Operators and constants

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        reads_clock = not CLOCKS.isdisjoint(names(node))
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            if not (reads_clock and isinstance(op, ORDERINGS)):  # it is never equal
                self.swap(left, right, *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not (is_text(node.left) or is_text(node.right)):
            self.calculate(node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if is_part(node.target):
            self.replace(node, "pass")
        self.calculate(node.op, node.target, node.value)
        self.generic_visit(node)

    def calculate(self, op: ast.operator, left: ast.expr, right: ast.expr) -> None:
        """Change an operation, but not `|`, which mostly joins types."""
        if type(op) in ARITHMETIC:
            self.swap(left, right, *ARITHMETIC[type(op)])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace(node, str(node.value + 1))

    # Places

    def swap(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Change the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        match = re.search(old, self.text[start:end])
        if match is not None and "#" not in self.text[start:end]:
            self.found.append(Change(start + match.start(), start + match.end(), new))

    def replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        """Change all of a node."""
        self.found.append(Change(*self.span(node), new))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node starts and ends."""
        last, column = node.end_lineno or 0, node.end_col_offset or 0
        return self.place(node.lineno, node.col_offset), self.place(last, column)

    def place(self, line: int, column: int) -> int:
        """Return the place of a line's byte, in characters from the start."""
        return self.starts[line - 1] + len(self.lines[line - 1][:column].decode())


def names(node: ast.expr) -> Iterator[str]:
    """Yield all names and attributes that stand in an expression."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr


def is_for_readers(node: ast.Assign | ast.AnnAssign) -> bool:
    """Whether it sets a constant in capitals, or a name such as `__all__`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    identifiers = [target.id for target in targets if isinstance(target, ast.Name)]
    return any(name.isupper() or name.startswith("__") for name in identifiers)


def is_declared_only(node: Function) -> bool:
    """Whether it has no body, as an overload or a method of a protocol."""
    last = node.body[-1]
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Constant)
        and (last.value.value is ... or isinstance(last.value.value, str))
    )


def is_part(target: ast.expr) -> bool:
    """Whether it is an attribute or an item: without it, names are still bound."""
    return isinstance(target, ast.Attribute | ast.Subscript)


def is_not(node: ast.expr) -> bool:
    """Whether it is `not ...`."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def is_none(node: ast.expr) -> bool:
    """Whether it is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def is_text(node: ast.expr) -> bool:
    """Whether it is a string, so that no operator but its own makes sense."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr)


def near_tests(root: Path, file: str) -> list[str]:
    """Name the test files that mirror a module, then those that import or name it.

    A helper of the tests that imports it counts as much as the tests that import that.
    Without a mirror, those beside the place of one come first.
    """
    path = Path(file)
    mirrors = sorted(root.glob(f"tests/{path.parent}/test_{path.stem.strip('_')}*.py"))
    naming = users(root, importing(path))
    for helper in (root / "tests" / "support").glob("*.py"):
        if importing(path).search(helper.read_text()):
            naming += users(root, re.compile(rf"\bsupport\.{helper.stem}\b"))
    beside = [] if mirrors else nearest(root, path)
    tests = dict.fromkeys([*mirrors, *beside, *sorted(naming)])
    return [str(test.relative_to(root)) for test in tests]


def nearest(root: Path, path: Path) -> list[Path]:
    """Return the test files that mirror the folder of a module, or one above it."""
    for folder in path.parents[:-1]:
        if tests := sorted(root.glob(f"tests/{folder}/test_*.py")):
            return tests
    return []


def importing(path: Path) -> re.Pattern[str]:
    """Return what finds a module's name, or its import from its package."""
    parts = ["penstock", *path.with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    package, _, stem = ".".join(parts).rpartition(".")
    if not package:
        return re.compile(r"^import penstock\b", re.MULTILINE)
    return re.compile(
        rf"\b{re.escape(package)}\.{stem}\b"
        rf"|\bfrom {re.escape(package)} import \(?[\w\s,]*\b{stem}\b"
    )


def users(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the test files whose text has the pattern."""
    files = (root / "tests").rglob("test_*.py")
    return [path for path in files if pattern.search(path.read_text())]
