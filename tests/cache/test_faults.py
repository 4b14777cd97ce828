"""Despite kills, cuts and bit flips a record is returned right, or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support import warm

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]
KILLS = TESTS / "support" / "cache_faults.py"
DAMAGE = TESTS / "support" / "cache_damage.py"
SHARES = [(97, first) for first in (5, 40, 70)]
"""Cases that each flip a bit of one in 97 bytes of a database, from the first on."""
FILES = ["lock.mdb", "users", "claims"]


def happens(script: Path, *arguments: object, timeout_s: float = 100) -> None:
    """Have a script do something; fail the test if it fails or crashes."""
    done = warm.run(
        [sys.executable, "-P", str(script), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        },
        timeout=timeout_s,
        brief=True,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    print(done.stdout)


def slow(*values: object) -> Any:
    """Return a case like the others, for `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("tiers", ["ram+disk"])
def test_kills_leave_right_records_and_lose_none_that_was_synced(
    tiers: str, tmp_path: Path
) -> None:
    happens(KILLS, "kills", 6, tmp_path, tiers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tiers", ["disk", "ram", "ram+disk"])
def test_this_holds_after_hundreds_of_kills(tiers: str, tmp_path: Path) -> None:
    happens(KILLS, "kills", 300, tmp_path, tiers, timeout_s=550)


@pytest.mark.parametrize("kind", ["writer", slow("reader")])
def test_a_process_killed_in_a_transaction_blocks_nobody_and_leaves_nothing(
    kind: str, tmp_path: Path
) -> None:
    happens(KILLS, "transactions", 10, tmp_path, kind)


def test_processes_that_come_and_go_at_the_same_time_lose_nothing(
    tmp_path: Path,
) -> None:
    happens(KILLS, "churn", tmp_path)


@pytest.mark.parametrize(
    ("step", "first"), [(2999, 865), *(slow(*share) for share in SHARES)]
)
def test_a_flip_or_cut_of_the_database_crashes_nothing_and_shows_nowhere(
    step: int, first: int, tmp_path: Path
) -> None:
    happens(DAMAGE, "harm", tmp_path, "data.mdb", step, first, timeout_s=1100)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("state.json", 9),
        slow("state.json", 1),
        *(slow(name, 4999 if name == "lock.mdb" else 1) for name in FILES),
    ],
)
def test_flips_in_the_files_beside_the_database_do_no_harm_either(
    name: str, step: int, tmp_path: Path
) -> None:
    happens(DAMAGE, "harm", tmp_path, name, step, step // 2)


@pytest.mark.parametrize("step", [8192, slow(1024)])  # two pages of the database
def test_each_write_that_fails_turns_the_disk_off_with_one_warning(
    step: int, tmp_path: Path
) -> None:
    happens(DAMAGE, "limited", tmp_path, step)
