"""A digest of code depends on what the code does, not on its looks or its place."""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cache.fingerprint import (
    ATTRIBUTES,
    GLOBALS,
    Undigestible,
    digest,
)
from support.cache_things import (
    Compose,
    Scale,
    Squares,
    loaded,
)

TOOLS = """
SCALE = 2
def unused(x):
    return x
def helper(x):
    return x * SCALE
class Crop:
    size = 4
    def __init__(self):
        self.sides = [1, 2]
    def __call__(self, x, fill=0):
        return helper(x) + self.size
def decode(x, quality=90):
    small = lambda y: y - 1
    return small(Crop()(x)) if x else None
"""


def of(value: Any) -> bytes:
    return digest(value, "value")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    return functools.partial(loaded, monkeypatch)


CHANGES = {
    "a constant": ("y - 1", "y - 2"),
    "a default": ("quality=90", "quality=80"),
    "a default's name": ("quality=90", "level=90"),
    "an annotation": ("x, quality=90", "x: int, quality=90"),
    "an operation": ("y - 1", "y + 1"),
    "a helper's body": ("x * SCALE", "x + SCALE"),
    "a global value": ("SCALE = 2", "SCALE = 3"),
    "a global's type": ("SCALE = 2", "SCALE = 2.0"),
    "a class's attribute": ("size = 4", "size = 5"),
    "a class's method": ("+ self.size", "- self.size"),
    "a constructor": ("[1, 2]", "[1, 3]"),
    "a method's default": ("fill=0", "fill=1"),
    "what a method is": ("def __call__", "def call"),
    "a base class": ("class Crop:", "class Crop(Exception):"),
}
NO_CHANGES = {
    "comments and lines": ("def helper", "# why\n\n\ndef helper"),
    "what is not used": ("return x\n", "return x + 1\n"),
    "what is new": ("SCALE = 2", "SCALE = 2; OTHER = open"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_code_changes_the_digest(
    what: str, load: Callable[..., types.ModuleType]
) -> None:
    old, new = CHANGES[what]
    assert TOOLS.count(old) == 1
    before = of(load(TOOLS).decode)
    assert of(load(TOOLS).decode) == before
    assert of(load(TOOLS.replace(old, new)).decode) != before


@pytest.mark.parametrize("what", NO_CHANGES)
def test_code_that_does_nothing_does_not_count(
    what: str, load: Callable[..., types.ModuleType]
) -> None:
    old, new = NO_CHANGES[what]
    assert TOOLS.count(old) == 1
    before = of(load(TOOLS).decode)
    assert of(load(TOOLS.replace(old, new)).decode) == before


def test_an_attribute_of_a_class_counts_without_source() -> None:
    attributes = [kind(max) for kind in (classmethod, staticmethod, property)]
    assert len({of(attribute) for attribute in attributes}) == 3


@pytest.mark.parametrize(
    "use",
    ["t.SCALE", "getattr(t, 'SCALE')", "vars(t)['SCALE']", "(lambda m: m.SCALE)(t)"],
)
def test_what_is_read_from_a_module_counts_however_it_is_read(
    use: str, load: Callable[..., types.ModuleType]
) -> None:
    def found(tools: str) -> bytes:
        load(tools)
        script = f"import users_tools as t\ndef f(x): return {use} * x"
        return of(load(script, "users_script").f)

    before = found(TOOLS)
    assert found(TOOLS) == before
    assert found(TOOLS.replace("SCALE = 2", "SCALE = 3")) != before
    is_same = found(TOOLS.replace("size = 4", "size = 5")) == before
    assert is_same is (use == "t.SCALE")


def test_a_module_with_generated_attributes_counts_by_its_generator(
    load: Callable[..., types.ModuleType],
) -> None:
    def found(value: int) -> bytes:
        load(f"def __getattr__(name): return {value}")
        return of(load("import users_tools as t\ndef f(x): return t.A * x", "s").f)

    assert found(1) == found(1) != found(2)


@pytest.mark.parametrize(
    ("use", "is_narrow"),
    [
        ("from users_tools import SCALE as s; return s * x", True),
        ("import users_tools as t; return t.SCALE * x", False),
        ("return importlib.import_module('users_tools').SCALE * x", False),
        ("return [t.SCALE for _ in x] if x else (\n  t\n  .SCALE)", True),
        ("t.made = t.SCALE; return x", False),
    ],
)
def test_what_a_function_imports_or_reads_from_a_module_counts(
    use: str, *, is_narrow: bool, load: Callable[..., types.ModuleType]
) -> None:
    def found(tools: str) -> bytes:
        load(tools)
        script = f"import importlib, users_tools as t\ndef f(x): {use}"
        return of(load(script, "users_script").f)

    before = found(TOOLS)
    assert found(TOOLS) == before
    assert found(TOOLS.replace("SCALE = 2", "SCALE = 3")) != before
    assert (found(TOOLS.replace("size = 4", "size = 5")) == before) is is_narrow


def test_all_instructions_of_this_python_that_name_something_are_known() -> None:
    kinds = {dis.opname[code] for code in dis.hasname}
    others = {kind for kind in kinds if kind.startswith(("STORE", "DELETE", "IMPORT"))}
    of_a_base_class = {kind for kind in kinds if "SUPER" in kind}
    assert kinds <= GLOBALS | ATTRIBUTES | others | of_a_base_class


def test_an_import_by_a_computed_name_is_named(
    load: Callable[..., types.ModuleType],
) -> None:
    for call in ("import_module(x)", "import_module('a' + x)", "import_module('a', x)"):
        code = f"import importlib\ndef f(x): return importlib.{call}.VALUE"
        with pytest.raises(Undigestible, match="imports by a name made later"):
            of(load(code).f)
    with pytest.raises(Undigestible):
        of(load("import importlib\ndef f(x): return importlib.import_module").f)


def test_it_does_not_count_where_in_a_function_a_class_is_defined(
    load: Callable[..., types.ModuleType],
) -> None:
    code = (
        "def f(x):\n    class Local:\n        'Doc.'\n        y = 1\n    return Local"
    )
    before = of(load(code).f)
    assert of(load("\n\n" + code).f) == before
    assert of(load(code.replace("y = 1", "y = 2")).f) != before


@pytest.mark.parametrize(
    "code",
    [
        "import users_tools\ndef f(x): return users_tools.helper(x)",
        "import users_tools as t\nclass C:\n    f = lambda x: t.helper(x)\nf = C.f",
        "from users_tools import helper\ndef f(x): return [helper(y) for y in x]",
        "def f(x):\n    from users_tools import helper as h\n    return h(x)",
        "def f(x):\n    import users_tools\n    return users_tools.helper(x)",
        "import users_tools\ndef f(x, t=users_tools): return t.helper(x)",
        "import users_tools\nf = [[users_tools.helper]]",
        "import users_tools, functools\nf = functools.cache(users_tools.helper)",
        "import users_tools\nf = users_tools.Crop().__call__",
        "import users_tools\nclass f(users_tools.Crop): pass",
        "import users_tools, torch\nf = torch.no_grad()(users_tools.helper)",
        "import users_tools\nf = property(users_tools.helper)",
        "import users_tools as t\ndef g():\n    return lambda x: t.helper(x)\nf = g()",
    ],
)
def test_helpers_are_found_however_they_are_named(
    code: str, load: Callable[..., types.ModuleType]
) -> None:
    def found(tools: str) -> bytes:
        load(tools)
        return of(load(code, "users_script").f)

    before = found(TOOLS)
    assert found(TOOLS) == before
    assert found(TOOLS.replace("x * SCALE", "x + SCALE")) != before
    assert found(TOOLS.replace("SCALE = 2", "SCALE = 3")) != before


def test_what_a_closure_holds_counts() -> None:
    def add(offset: Any) -> Callable[[Any], Any]:
        return lambda value: value + offset

    assert of(add(1)) == of(add(1))
    assert len({of(add(offset)) for offset in (1, 2, 1.0, [1], add(1), add(2))}) == 6


def test_lambdas_of_one_name_are_told_apart() -> None:
    pair = [lambda x: x + 1, lambda x: x + 2]
    assert of(pair) != of(pair[::-1])
    assert of([pair[0], pair[0]]) != of(pair)


def test_functions_that_call_each_other_are_each_digested_once(
    load: Callable[..., types.ModuleType],
) -> None:
    names = [f"f{n}" for n in range(60)]
    calls = "+".join(f"{name}(x)" for name in names)
    code = "\n".join(f"def {name}(x): return {calls} + {name[1:]}" for name in names)
    before = of(load(code).f0)
    assert of(load(code.replace("+ 59", "+ 60")).f0) != before


def test_the_state_of_global_generators_does_not_count() -> None:
    import random

    draws = [random.random, random.choice, np.random.rand]
    before = of(draws)
    assert draws[0]() != draws[0]()
    assert draws[2]() != draws[2]()
    assert of(draws) == before


def test_a_dataset_with_a_transform_counts_by_both() -> None:
    def made(length: int = 4, by: float = 2.0, limit: int = 3) -> bytes:
        steps = Compose([Scale(by), functools.partial(max, limit), torch.relu])
        return of(functools.partial(Squares(length, steps).__getitem__, 0))

    assert made() == made()
    assert len({made(), made(length=5), made(by=2.5), made(limit=4)}) == 4


def test_classes_made_at_run_time_count_by_what_they_hold() -> None:
    pairs = [dataclasses.make_dataclass("Pair", ["a", name]) for name in "bcb"]
    assert of(pairs[0]) == of(pairs[2])
    assert of(pairs[0]) != of(pairs[1])
    tuples = [namedtuple("Two", ["a", name]) for name in "bcb"]  # noqa: PYI024
    assert of(tuples[0]) == of(tuples[2])
    assert of(tuples[0]) != of(tuples[1])


def test_local_classes_and_a_module_of_torch_are_digested() -> None:
    def made(size: int) -> Any:
        class Crop(Compose):
            def __call__(self, value: Any) -> Any:
                return super().__call__(value)[:size]

        return Crop([torch.nn.Identity()])

    assert of(made(1)) == of(made(1))
    assert of(made(1)) != of(made(2))


def test_a_lock_that_a_methods_helper_uses_is_named(
    load: Callable[..., types.ModuleType],
) -> None:
    source = TOOLS.replace("SCALE = 2", "import threading\nSCALE = threading.Lock()")
    with pytest.raises(Undigestible) as raised:
        digest(load(source).Crop(), "crop")
    path = "crop.__call__.__globals__['helper'].__globals__['SCALE']"
    assert raised.value.path == path
