"""No test's outcome depends on how busy the machine is: the tests are read for it.

What a clock of the machine has measured may be compared with another such measurement,
and a wait for an event may have a limit, if it is generous. It may not be compared with
a number, which would say how fast this machine is just now.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

import pytest

TESTS = Path(__file__).parent
TURNED = {
    "autotune/test_kinds.py": "a simulated plant's clock",
    "autotune/test_recording.py": "a simulated plant's clock",
    "autotune/test_scale.py": "what the law says of a plan",
    "autotune/test_simulated.py": "a simulated plant's clock",
    "autotune/test_tuner.py": "a simulated plant's clock",
    "engine/core/test_metrics.py": "times that the test gives the meter",
    "engine/observe/test_monitor.py": "times that the test gives the monitor",
    "engine/test_trainer_cost.py": "a clock that the test turns",
    "system/test_file_locks.py": "a clock that the test turns",
    "test_time_limit.py": "a clock that the test turns",
}
"""Files whose seconds are no machine's, and whose they are."""
EXCEPTED = {
    "integrations/test_s3_server.py": "a server's stalls of five seconds are avoided",
}
"""Slow tests of a time so long that a busy machine adds little to it."""
MIN_LIMIT_S = 20
"""Nobody's event takes that long, even on one core beside others."""

UNITS = ("_s", "_ms", "_us", "_ns")
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "cpu_times"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS} | {"getrusage", "time_ns"}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
Look = Callable[[ast.AST], Iterator[ast.expr]]
Trees = dict[str, ast.Module]

WAITS = {"wait", "join", "acquire", "communicate", "wait_procs", "run", "get", "result"}


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Return each file of tests, parsed, by its path."""
    paths = sorted({*TESTS.rglob("*.py")} - {Path(__file__)})
    return {str(p.relative_to(TESTS)): ast.parse(p.read_text()) for p in paths}


def test_no_measured_time_is_compared_with_a_number(trees: Trees) -> None:
    assert list(everywhere(trees, compared, but=TURNED | EXCEPTED)) == []


def test_events_are_waited_for_with_generous_limits(trees: Trees) -> None:
    assert list(everywhere(trees, hurried)) == []


@pytest.mark.parametrize(
    "code",
    [
        "assert time.monotonic() - begun < 2",
        "took = time.perf_counter() - begun\nassert took < 1.5",
        "took = time.perf_counter() - begun\nassert 1 < took",
        "assert spent_ns <= 0.005 * 60e9",
        "assert told.waited_s < LIMIT",
        "def f():\n    a, b = time.process_time(), 1\n    assert max(a, b) < 4",
        "script = '''\nimport time\nprint(time.monotonic() - begun < 3)\n'''",
    ],
)
def test_a_time_that_is_compared_with_a_number_is_found(code: str) -> None:
    assert len(list(compared(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "assert time.monotonic() < deadline_s",
        "assert ours_s < 2 * theirs_s",
        "while time.monotonic() < begun + 20: pass",
        "assert outcome.cpu_ns > 0",
        "assert rows < 20",
        "script = 'while time.monotonic() < end: pass'",
    ],
)
def test_times_compared_with_each_other_and_limits_are_left_alone(code: str) -> None:
    assert list(compared(ast.parse(code))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("event.wait(5)", 1),
        ("assert event.wait(timeout=19.5)", 1),
        ("assert psutil.wait_procs(family, timeout=5)[1] == []", 1),
        ("assert event.wait(60)", 0),
        ("assert not event.wait(0.2)", 0),
        ("with pytest.raises(queue.Empty):\n    box.get(timeout=0.1)", 0),
        ("while not over.wait(1.0): pass", 0),
        ("table.get(5)", 0),
    ],
)
def test_a_wait_that_gives_up_soon_is_found_unless_it_should(
    code: str, found: int
) -> None:
    assert len(list(hurried(ast.parse(code)))) == found


def everywhere(trees: Trees, look: Look, *, but: Collection[str] = ()) -> Iterator[str]:
    """Yield what is found in each file, with its place."""
    for name, tree in trees.items():
        if name not in but:
            for node in look(tree):
                yield f"{name}:{node.lineno}: {ast.unparse(node)}"


def compared(tree: ast.AST) -> Iterator[ast.Compare]:
    """Yield comparisons of a time that was measured with what was not."""
    nodes = list(ast.walk(tree))
    parts = [part for node in judged(nodes) for part in ast.walk(node)]
    orders = [part for part in parts if is_order(part)]
    times = measured(nodes) if orders else set()
    yield from (order for order in orders if is_unequal(order, times))
    for script in scripts(nodes):
        yield from compared(script)


def judged(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield what decides about the outcome: what is asserted, or a script prints."""
    for node in nodes:
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.Call) and name_of(node.func) == "print":
            yield node


def is_order(node: ast.AST) -> TypeGuard[ast.Compare]:
    """Whether it asks which is larger."""
    return isinstance(node, ast.Compare) and any(
        isinstance(operator, ORDERED) for operator in node.ops
    )


def is_unequal(order: ast.Compare, times: set[str]) -> bool:
    """Whether one side is a time and the other none, zero excepted."""
    sides = [order.left, *order.comparators]
    are_times = [is_time(side, times) for side in sides]
    zero = any(isinstance(side, ast.Constant) and side.value == 0 for side in sides)
    return not zero and any(are_times) and not all(are_times)


def is_time(node: ast.AST, times: set[str]) -> bool:
    """Whether it reads a clock, or something that was measured by one."""
    return any(
        name in CLOCKS or name in times or name.endswith(UNITS)
        for name in map(name_of, ast.walk(node))
    )


def measured(nodes: list[ast.AST]) -> set[str]:
    """Return names that are given a value by which a clock was read."""
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    times: set[str] = set()
    for _ in range(3):  # a name may be given another's value
        for node in assignments:
            if is_time(node.value, times):
                targets = (map(name_of, ast.walk(target)) for target in node.targets)
                times.update(name for names in targets for name in names if name)
    return times


def hurried(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield waits that give up soon, where that would fail the test."""
    nodes = list(ast.walk(tree))
    soon = [node for node in nodes if is_soon_over(node)]
    if soon:
        parts = (part for node in nodes for part in patient_parts(node))
        meant = set(map(id, parts))
        yield from (call for call in soon if id(call) not in meant)
    for script in scripts(nodes):
        yield from hurried(script)


def is_soon_over(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it waits with a limit that a busy machine may exceed."""
    if not isinstance(node, ast.Call) or name_of(node.func) not in WAITS:
        return False
    limit = limit_of(node)
    return limit is not None and limit < MIN_LIMIT_S


def patient_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what lies where the end of a wait without its event is expected."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from ast.walk(node.operand)
    elif isinstance(node, ast.With) and any(map(expects_an_error, node.items)):
        yield from ast.walk(node)


def expects_an_error(item: ast.withitem) -> bool:
    """Whether it is `pytest.raises` or `suppress`."""
    call = item.context_expr
    return isinstance(call, ast.Call) and name_of(call.func) in {"raises", "suppress"}


def limit_of(call: ast.Call) -> float | None:
    """Return the limit of a wait where it is a literal."""
    limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
    if not limits and name_of(call.func) in {"wait", "join"}:
        limits = call.args[:1]
    for limit in limits:
        if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float):
            return float(limit.value)
    return None


def scripts(nodes: list[ast.AST]) -> Iterator[ast.Module]:
    """Yield the programs that a test holds as text."""
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.search(r"\btime\.|\bwait", text):
            with suppress(SyntaxError):
                yield ast.parse(textwrap.dedent(text))


def name_of(node: ast.AST) -> str:
    """Return the last part of a name; nothing for what is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
