"""Tuners that share a host's cores through a folder of small files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.autotune.host_peers import SUSPENDED_S, HostPeers
from penstock.system.resources import Budget
from penstock.system.shared_memory import runtime_folder
from support import warm

ALL = Budget(8.0, 1 << 30, whole_machine=True)
CORES = frozenset(range(8))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return this user's folder, at a place of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert folder is not None
    return folder


@pytest.fixture
def one(place: Path) -> Iterator[HostPeers]:
    """Return a tuner on eight cores."""
    with HostPeers(place, CORES) as peers:
        yield peers


def test_a_tuner_alone_on_the_host_has_all_cores(one: HostPeers) -> None:
    assert one.share(ALL, 0.5, 8.0) == ALL


def test_two_tuners_share_equally_and_one_that_leaves_gives_its_cores_back(
    place: Path, one: HostPeers
) -> None:
    with HostPeers(place, CORES):
        half = one.share(ALL, 0.0, 8.0)
        assert half.cpu_cores == pytest.approx(4.0)
        assert not half.whole_machine
    assert one.share(ALL, 0.0, 8.0) == ALL


def test_the_tuner_that_waits_most_gets_most_and_none_gets_nothing(
    place: Path, one: HostPeers
) -> None:
    with HostPeers(place, CORES) as other:
        other.share(ALL, 1.0, 8.0)
        mine, theirs = one.share(ALL, 0.0, 8.0), other.share(ALL, 1.0, 8.0)
    assert mine.cpu_cores == pytest.approx(8.0 / 5)
    assert mine.cpu_cores + theirs.cpu_cores == pytest.approx(8.0)


def test_a_tuner_outside_its_loop_has_no_claim(place: Path, one: HostPeers) -> None:
    with HostPeers(place, CORES) as val:
        val.rest()
        assert one.share(ALL, 0.0, 8.0) == ALL
        val.share(ALL, 0.0, 8.0)
        assert one.share(ALL, 0.0, 8.0).cpu_cores == pytest.approx(4.0)


def test_cores_that_others_leave_idle_may_be_used(place: Path, one: HostPeers) -> None:
    with HostPeers(place, CORES) as other:
        other.share(ALL, 0.0, 1.0)
        assert one.share(ALL, 0.0, 7.0).cpu_cores == pytest.approx(7.0)
        assert other.share(ALL, 0.0, 1.0).cpu_cores == pytest.approx(4.0)


def test_ranks_on_cores_of_their_own_do_not_share(place: Path) -> None:
    with (
        HostPeers(place, frozenset({0, 1})) as low,
        HostPeers(place, frozenset({1, 2})) as high,
    ):
        share = low.share(Budget(2.0, 1), 0.0, 2.0)
        assert share.cpu_cores == pytest.approx(1.5)  # core 0, and half of core 1
        assert high.share(Budget(2.0, 1), 0.0, 2.0).cpu_cores == pytest.approx(1.5)


@pytest.mark.long
def test_the_files_of_the_dead_are_swept(place: Path, one: HostPeers) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from penstock.autotune.host_peers import HostPeers\n"
        "HostPeers(Path(sys.argv[1]), frozenset(range(8))).__enter__()\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with warm.Popen(
        [sys.executable, "-P", "-c", script, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        assert one.share(ALL, 0.0, 8.0).cpu_cores == pytest.approx(4.0)
        rank.kill()
    assert one.share(ALL, 0.0, 8.0) == ALL
    assert len(list(place.iterdir())) == 1


def test_a_pid_that_is_used_again_is_another_process(
    place: Path, one: HostPeers
) -> None:
    row = {"pid": os.getpid(), "process": 1, "cores": [0], "wait_share": 0.0}
    (place / "1-0.json").write_text(json.dumps(row))
    assert one.share(ALL, 0.0, 8.0) == ALL


def test_a_process_that_is_not_training_takes_nothing(
    place: Path, one: HostPeers
) -> None:
    with HostPeers(place, CORES):
        (other,) = (path for path in place.iterdir() if path != one._file)  # noqa: SLF001
        long_ago = time.time() - 2 * SUSPENDED_S
        os.utime(other, (long_ago, long_ago))
        assert one.share(ALL, 0.0, 8.0) == ALL
        assert other.exists()


def test_a_clock_that_is_set_ends_no_tuner(
    place: Path, one: HostPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostPeers(place, CORES):
        pslinux = sys.modules["psutil._pslinux"]
        later_s = pslinux.boot_time() + 3600.0  # computed from the time of day
        monkeypatch.setattr(pslinux, "boot_time", lambda: later_s)
        assert one.share(ALL, 0.0, 8.0).cpu_cores == pytest.approx(4.0)


def test_what_was_half_written_is_swept_once_it_is_old(
    place: Path, one: HostPeers
) -> None:
    old, new = place / "1-0.partial", place / "1-1.partial"
    old.write_text("")
    new.write_text("{")
    long_ago_s = time.time() - 2 * SUSPENDED_S
    os.utime(old, (long_ago_s, long_ago_s))
    assert one.share(ALL, 0.0, 8.0) == ALL
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_a_file_that_says_nothing_counts_for_nobody(
    place: Path, one: HostPeers, text: str
) -> None:
    (place / "1-0.json").write_text(text)
    assert one.share(ALL, 0.0, 8.0) == ALL


def test_a_folder_that_others_may_write_to_is_not_trusted(place: Path) -> None:
    place.chmod(0o777)
    assert runtime_folder() is None


def test_a_tuner_whose_folder_is_gone_counts_as_alone(
    place: Path, one: HostPeers
) -> None:
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    assert one.share(ALL, 0.0, 8.0) == ALL
