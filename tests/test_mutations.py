"""Breakages are where the list says, or drawn at random; tests notice those listed."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from support.mutants import Mutant, changes, draw, near_tests, product


def script() -> Any:
    """Import the script, which is not a module of the package."""
    path = Path(__file__).with_name("mutations.py")
    spec = importlib.util.spec_from_file_location("mutations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations = script()

EXCLUDED = '''
"""1 < 2 is no place."""
__all__ = ["a"]
WINDOW_S: float = 60 * 5
ENDS = {True: 1}
if TYPE_CHECKING:
    from x import y
    z = 1
if sys.platform == "darwin":
    z = 2
Row = tuple[Literal[1], int | None]

@dataclass(frozen=True)
class Shape(Protocol):
    """Of 1."""

    side: Annotated[int, 1]

    def area(self, times: int = 1) -> float: ...

    def __repr__(self) -> str:
        return "1" if self.side == 1 else "2"

def quick(side: Literal[1]) -> Literal[2]:
    """Return 2 > 1."""
    assert side == 1, f"{side + 1}"
    if never():  # pragma: no cover
        return 1
    text = f"{side + 1} is {side > 1}"
    waited = time.monotonic() > side
    size = cast(Literal[1], "size: %d" % side)
'''


def test_every_breakage_can_still_be_made(root: Path) -> None:
    for file, old, new in mutations.MUTATIONS:
        assert (root / file).read_text().count(old) == 1, old
        assert new != old
    assert set(mutations.EQUIVALENT) <= set(mutations.MUTATIONS)


def test_a_breakage_that_cannot_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.py").write_text("a = 1\na = 1\n")
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    copy = mutations.Copy(tmp_path / "copy")
    mutation = mutations.Mutation("file.py", "a = 1", "a = 2")
    with pytest.raises(SystemExit, match="has 2 times 'a = 1'"):
        mutations.is_noticed(mutation, copy)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        (
            "if a < 1: pass",
            {"if a <= 1: pass", "if a < 2: pass", "if not (a < 1): pass"},
        ),
        ("x = a is not b in c", {"x = a is b in c", "x = a is not b not in c"}),
        ("x = (a) and (b) or c", {"x = (a) or (b) or c", "x = (a) and (b) and c"}),
        ("x = not (a and b)", {"x = (a and b)", "x = not (a or b)"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if not (a)]"}),
        ("x = -a * b", {"x = -a / b"}),
        ("x += y", {"x -= y"}),
        ("x.y += z", {"x.y -= z", "pass"}),
        ("x['é'] = True", {"x['é'] = False", "pass"}),
        ("f('é', a - b)", {"f('é', a + b)", "pass"}),
        ("raise Error(f'{a + 1}')", {"pass"}),
        ("for a in b: continue", {"for a in b: pass"}),
        ("def f(a=1): return a", {"def f(a=2): return a", "def f(a=1): return None"}),
        ("def f(*, a='b'): return", {'def f(*, a=""): return'}),
    ],
)
def test_each_slip_of_the_hand_is_one_breakage(text: str, broken: set[str]) -> None:
    assert {Mutant("", *change).applied(text) for change in changes(text)} == broken


def test_what_is_no_behaviour_is_never_broken() -> None:
    assert changes(EXCLUDED) == []


def test_drawn_breakages_parse_and_change_one_place(root: Path) -> None:
    mutants = draw(root, 40, 10, seed=1)
    for mutant in mutants:
        text = (root / mutant.file).read_text()
        broken = mutant.applied(text)
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))
        assert broken.startswith(text[: mutant.start])
        assert broken.endswith(text[mutant.end :])
        before, after = mutant.lines(text)
        assert before != after
    assert len(set(mutants)) == 40
    assert {mutant.file for mutant in mutants} <= set(product(root))


def test_the_same_seed_draws_the_same_breakages(root: Path) -> None:
    first = draw(root, 10, 5, seed=3)
    assert draw(root, 10, 5, seed=3) == first
    assert draw(root, 10, 5, seed=4) != first
    assert len({mutant.file for mutant in first}) == 5


def test_the_tests_that_mirror_a_module_come_first(root: Path) -> None:
    near = near_tests(root, "engine/core/core.py")
    assert near[:2] == [
        "tests/engine/core/test_core.py",
        "tests/engine/core/test_core_machine.py",
    ]
    assert "tests/engine/core/test_connector.py" in near  # it imports it
    assert "tests/autotune/test_log.py" not in near


def test_a_module_without_a_mirror_has_the_tests_of_its_folder(root: Path) -> None:
    assert "tests/autotune/test_kinds.py" in near_tests(
        root, "autotune/policies/policy.py"
    )
    assert near_tests(root, "pipeline/compile/caches.py") == [
        "tests/pipeline/compile/test_lone_workers.py",
        "tests/pipeline/compile/test_recipes.py",
        "tests/pipeline/compile/test_segments.py",
    ]


RIGHT = "tests/test_one.py::test_right"
WRONG = "tests/test_one.py::test_wrong"
"""A test that fails in any case."""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a copy of a tree of one file, and let its tests be no processes."""

    def run(command: list[str], folder: Path, *_: object) -> tuple[int, str]:
        failing = [WRONG, RIGHT] if "2" in (folder / "one.py").read_text() else [WRONG]
        left_out = " ".join(command)
        failing = [test for test in failing if f"--deselect {test}" not in left_out]
        tests = failing[:1] if "-x" in command else failing
        return bool(tests), "\n".join(f"FAILED {test} - assert 0" for test in tests)

    (tmp_path / "one.py").write_text("x = 1\n")
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "run", run)
    return mutations.Copy(tmp_path / "copy")


def test_only_a_test_that_passes_without_a_breakage_notices_it(copy: Any) -> None:
    noticed, unseen = Mutant("one.py", 4, 5, "2"), Mutant("one.py", 4, 5, "0")
    tests = ["tests/test_one.py"]
    assert mutations.noticed_by(noticed, copy, tests, [], 60) == RIGHT
    assert mutations.noticed_by(unseen, copy, tests, [], 60) == ""
    assert (copy.root / "one.py").read_text() == "x = 1\n"


def test_nothing_is_noticed_where_no_test_can_run_in_any_case(
    copy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "run", lambda *_: (4, "no such file"))
    monkeypatch.setattr(
        mutations.subprocess, "check_output", lambda *_, **__: f"{copy.root}/a.py"
    )
    mutant = Mutant("one.py", 4, 5, "2")
    with pytest.raises(SystemExit, match="fail without any breakage"):
        mutations.noticed_by(mutant, copy, ["tests/test_one.py"], [], 60)
