"""Programs for MindSpore's datasets have the outcomes of MindSpore 2.10 here.

`mindspore_peer.py` has the programs, and recorded what the real package made of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mindspore_files import unpack_mindrecords, write_files
from mindspore_peer import outcome, programs

import penstock.mindspore as ds

DIFFERENT = {"batch, none full": "raises"}
"""Where penstock differs: an epoch without a batch is an error."""
GOLDEN = Path(__file__).parent / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "mindspore.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    """Return all programs, with the files that they read."""
    folder = tmp_path_factory.mktemp("peer")
    write_files(folder)
    unpack_mindrecords(GOLDEN, folder)
    return programs(ds, folder)


def test_all_programs_were_recorded(made: dict[str, Callable[[], Any]]) -> None:
    assert list(made) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_has_the_outcome_of_mindspore(
    name: str, made: dict[str, Callable[[], Any]]
) -> None:
    assert outcome(made[name]) == DIFFERENT.get(name, EXPECTED[name])
