"""In full, foreign, torn or forbidden places training goes on after one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.cache.folder import FOLDER, LOCAL, kind_of_place
from support import warm
from support.cache_training import SAMPLES, WIDTH, train

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS / "support" / "cache_training.py"
THREAD = pytest.param("thread", marks=pytest.mark.slow)
"""Processes do all that threads do, and more of them could warn."""
KINDS = [THREAD, "process"]


def begun(**settings: Any) -> subprocess.Popen[str]:
    """Start a training in a process of its own."""
    return warm.Popen(
        [sys.executable, "-P", str(SCRIPT), json.dumps(settings)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        brief=True,
    )


def ended(training: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a training; return what it said, and all warnings of its processes."""
    with training:
        out, err = training.communicate(timeout=60)
    assert training.returncode == 0, (training.returncode, err[-2000:])
    report: dict[str, Any] = json.loads(out)
    report["told"] += [line for line in err.splitlines() if "Cache(ID:" in line]
    return report


def in_a_file_system(
    options: str, place: Path, then: str = "true", **settings: Any
) -> dict[str, Any]:
    """Train with a tmpfs of its own, which ends with the process."""
    user = [] if os.getuid() == 0 else ["--map-root-user"]
    attempt = ["unshare", "--mount", *user, "true"]
    if subprocess.run(attempt, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    place.mkdir(exist_ok=True)
    first = f'mount -t tmpfs -o {options} none "$0" && {then}'
    return ended(begun(first=first, disk=str(place), **settings))


@pytest.mark.parametrize("executor", KINDS)
def test_a_disk_with_hardly_any_room_stores_nothing_and_warns_once(
    executor: str, tmp_path: Path
) -> None:
    report = in_a_file_system("size=2m", tmp_path / "full", executor=executor)
    assert len(report["told"]) == 1
    assert str(tmp_path / "full") in report["told"][0]
    assert "free some" in report["told"][0]
    assert report["records"]["disk"] == 0


@pytest.mark.parametrize(
    ("size", "executor"),
    [
        ("400k", "process"),
        *(
            pytest.param(size, executor, marks=pytest.mark.slow)
            for size in ("256k", "400k", "1m")
            for executor in ("thread", "process")
        ),
    ],
)
def test_a_disk_that_fills_up_under_the_cache_is_given_up_with_one_warning(
    size: str, executor: str, tmp_path: Path
) -> None:
    cache = {"executor": executor, "to_the_last_byte": True, "disk_limit": 1 << 30}
    report = in_a_file_system(f"size={size}", tmp_path / "full", **cache)
    assert len(report["told"]) == 1
    assert "it goes on without its disk" in report["told"][0]
    assert str(tmp_path / "full") in report["told"][0]


def test_a_read_only_file_system_is_reported_once(tmp_path: Path) -> None:
    place = tmp_path / "only read"
    report = in_a_file_system("size=2m", place, then='mount -o remount,ro "$0"')
    assert len(report["told"]) == 1
    assert str(place) in report["told"][0]


@pytest.mark.parametrize(
    "file_bytes",
    [40_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (10, 300_000))],
)
def test_a_limit_on_file_sizes_ends_each_tier_with_one_warning(
    file_bytes: int, tmp_path: Path
) -> None:
    cache = {"disk": str(tmp_path), "ram": "2MB"}
    report = ended(begun(file_bytes=file_bytes, **cache))
    for tier in ("RAM", "its disk"):
        assert sum(f"goes on without {tier}" in line for line in report["told"]) == 1
    assert len(report["told"]) == 2


def one_warning(place: Path, *words: str, stored: bool = False, **cache: Any) -> None:
    """Train; assert that one warning names the place and says these words."""
    report = train(disk=str(place), **cache)
    assert len(report["told"]) == 1, report["told"]
    for word in (str(place), *words):
        assert word in report["told"][0]
    assert ("disk" in report["records"]) == stored


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Return the folder of a cache that a run has left."""
    assert train(disk=str(tmp_path))["told"] == []
    return tmp_path


def test_a_folder_of_another_user_is_not_used(filled: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(filled / FOLDER, 65534, 65534)
    one_warning(filled, "belongs to user 65534", "give a folder of your own")


def test_a_folder_that_others_may_write_to_is_not_used(filled: Path) -> None:
    (filled / FOLDER).chmod(0o777)
    one_warning(filled, "chmod 700")


def test_a_folder_that_this_user_may_not_write_to_is_not_used(filled: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("permission bits do not bind root")
    (filled / FOLDER).chmod(0o500)
    one_warning(filled, "chmod 700")


def test_a_file_where_the_folder_should_be_is_not_used(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    one_warning(place, "is not a folder", "give another path")
    assert place.read_text() == "mine"


def test_a_link_where_the_folder_should_be_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    one_warning(tmp_path, "is a link")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"version": 0}, "state.json is damaged"),
        ({"clean": False, "boot": "of yesterday"}, "before a power cut"),
    ],
)
def test_a_cache_after_damage_or_a_power_cut_is_emptied_and_refilled(
    filled: Path, state: dict[str, Any], words: str
) -> None:
    path = filled / FOLDER / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | state))
    one_warning(filled, words, "filled again", stored=True)
    again = train(disk=str(filled), epochs=1)
    assert again["told"] == []
    assert again["records"]["disk"] == SAMPLES


def test_a_cache_of_another_version_is_refused_by_name_and_stays(filled: Path) -> None:
    path = filled / FOLDER / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    before = contents(filled)
    one_warning(filled, "format is 2, this one reads 1", "penstock cache clear")
    assert contents(filled) == before


def test_a_database_of_another_program_is_refused_and_stays(tmp_path: Path) -> None:
    place = tmp_path / FOLDER
    place.mkdir(mode=0o700)
    (place / "data.mdb").write_bytes(b"precious")
    one_warning(tmp_path, "did not write", "give another folder")
    assert contents(tmp_path) == {f"{FOLDER}/data.mdb": b"precious"}


def contents(folder: Path) -> dict[str, bytes]:
    """Return what is in the files of a folder."""
    files = (path for path in folder.rglob("*") if path.stat().st_size)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.is_file()
    }


def test_a_torn_database_is_emptied_and_refilled(filled: Path) -> None:
    path = filled / FOLDER / "data.mdb"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    one_warning(filled, "filled again", stored=True)


def mount(monkeypatch: pytest.MonkeyPatch, **mounts: str) -> None:
    """Mount file systems of these kinds at these places."""
    partitions = [SimpleNamespace(fstype=k, mountpoint=m) for m, k in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)  # noqa: A006


def test_network_file_systems_are_recognised_whatever_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "of all" / "jobs"
    inner.mkdir(parents=True)
    mount(monkeypatch, **{"/": "ext4", str(tmp_path / "of all"): "nfs4"})
    assert kind_of_place(inner / "not yet made") == "nfs4"
    assert kind_of_place(inner) not in LOCAL
    assert kind_of_place(tmp_path / "of all others") == "ext4"
    (tmp_path / "link").symlink_to(inner)
    assert kind_of_place(tmp_path / "link") == "nfs4"


def test_the_file_systems_of_this_machine_are_found() -> None:
    assert kind_of_place(Path("/proc/self")) == "proc"
    assert kind_of_place(Path("/dev/shm/any")) == "tmpfs"  # noqa: S108 only asked about


@pytest.mark.parametrize(
    "kind", ["fuse.ceph-fuse", "panfs", "fuse.anything-new", "davfs", "pvfs2", "smb3"]
)
def test_only_file_systems_known_to_be_local_count_as_local(kind: str) -> None:
    assert kind not in LOCAL


def test_a_folder_on_a_network_file_system_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(monkeypatch, **{str(tmp_path): "nfs4"})
    one_warning(tmp_path / "cache", "nfs4", "give a folder on a disk of this machine")


@pytest.mark.long
def test_the_stricter_of_two_jobs_on_one_folder_stops_at_its_limit(
    tmp_path: Path,
) -> None:
    few = 10 * WIDTH
    strict = begun(disk=str(tmp_path), disk_limit=few)
    loose = begun(disk=str(tmp_path), disk_limit=1 << 30)
    for training in (strict, loose):
        assert ended(training)["told"] == []
    alone = tmp_path / "alone"
    for _ in range(2):  # the second job sees all that the first has written
        report = train(disk=str(alone), disk_limit=few, epochs=1)
        assert report["told"] == []
    assert 0 < report["nbytes"]["disk"] <= few


def test_without_shared_memory_training_goes_on_after_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    report = train(ram="2MB")
    assert len(report["told"]) == 1
    assert "it goes on without RAM" in report["told"][0]


@pytest.mark.long
@pytest.mark.parametrize("executor", KINDS)
def test_a_killed_trainer_leaves_no_process_and_no_memory(
    executor: str, tmp_path: Path
) -> None:
    cache: dict[str, Any] = {"ram": "4MB", "disk": str(tmp_path), "executor": executor}
    with begun(until_killed=True, **cache) as training:
        assert training.stdout is not None
        assert training.stdout.readline()
        trainer = psutil.Process(training.pid)
        family = [trainer, *trainer.children(recursive=True)]
        memory = arenas(family)
        assert memory
        trainer.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert not memory & arenas(psutil.process_iter())
    report = train(**cache)
    assert report["told"] == []
    assert report["records"]["RAM"] == SAMPLES


def arenas(processes: Any) -> set[tuple[int, int]]:
    """Return the shared memory of caches that these processes have open."""
    files = set()
    for process in processes:
        for link in Path(f"/proc/{process.pid}/fd").glob("*"):
            try:
                if "memfd:penstock" in os.readlink(link):
                    files.add((link.stat().st_dev, link.stat().st_ino))
            except OSError:
                continue  # closed meanwhile
    return files
