"""Each planted cause is named, and the advice helps (benchmarks/planted_causes.py)."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = [
    pytest.mark.serial,  # it measures rates
    pytest.mark.slow,
    pytest.mark.skipif(ps.config.budget().cpu_cores < 2, reason="only one core"),
]

ALONE = (
    "slow reads",
    "slow store",
    "gil",
    "collate",
    "cpu",
    "torch threads",
    "uneven",
    "straggler",
    "budget",
    "prefetch",
    "lock",
    "crowded",
    "cache",
    "loader",
    "gil of a loader",
    "photographs",
    "trainer",
    "gil of the trainer",
    "cores of the trainer",
)
APART = ("slow reads", "cpu", "uneven", "straggler")
"""Those whose workers may be processes, too."""


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("planted_causes")


def test_all_of_them_are_tested(planted: Any) -> None:
    assert tuple(planted.PLANTS) == ALONE
    assert planted.APART == APART


@pytest.mark.parametrize("name", ALONE)
def test_the_cause_is_named_and_its_advice_helps(planted: Any, name: str) -> None:
    assert planted.followed(name) == ""


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_two_ranks_name_the_cores_that_they_share(planted: Any, kind: str) -> None:
    for cause in planted.two_ranks(f'executor="{kind}"'):
        assert re.search("waits for a core|share the cores|cores are busy", cause)


@pytest.mark.parametrize("name", APART)
def test_so_it_is_where_the_workers_are_processes(planted: Any, name: str) -> None:
    assert planted.followed(name, planted.IN_PROCESSES) == ""
