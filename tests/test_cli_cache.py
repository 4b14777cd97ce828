"""`penstock cache`: what is on disk, whether it is whole, and how to remove it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import lmdb
import numpy as np
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import cli
from penstock.cache.housekeeping import NoCacheError


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the cache of 30 samples."""
    place = tmp_path_factory.mktemp("filled")
    source = ps.Pipeline.from_dataset(np.arange(30)).map(float)
    with source.cache(disk=place, codec="raw").batch(10) as pipe:
        assert sum(batch.sum().item() for batch in pipe) == sum(range(30))
    return place


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return tmp_path


def said(*arguments: object) -> tuple[int, list[str]]:
    """Return what a command prints, and its exit code."""
    result = CliRunner().invoke(cli.app, ["cache", *map(str, arguments)])
    assert not isinstance(result.exception, Exception) or result.exit_code
    return result.exit_code, result.stdout.splitlines()


def test_ls_lists_what_is_stored_and_what_made_it(folder: Path) -> None:
    code, (line, total) = said("ls", folder)
    assert code == 0
    assert re.match(r"[0-9a-f]{16} +30 +0\.0 MiB  .*  ndarray\(30\) > float$", line)
    assert total == "1 in all, 0.0 MiB"


def test_verify_reads_everything_and_drops_damaged_records(folder: Path) -> None:
    assert said("verify", folder) == (0, ["30 records are intact, 0 were damaged"])
    damage(folder / "penstock-cache")
    assert said("verify", folder) == (1, ["29 records are intact, 1 were damaged"])
    assert said("verify", folder) == (0, ["29 records are intact, 0 were damaged"])


def test_clear_empties_a_cache_in_whole_or_in_part(folder: Path) -> None:
    name = said("ls", folder)[1][0].split()[0]
    assert said("clear", folder, "--name", name) == (0, ["30 records deleted"])
    assert said("clear", folder) == (0, ["0 records deleted"])
    assert said("ls", folder) == (0, ["0 in all, 0.0 MiB"])


def test_clear_gives_the_space_back(tmp_path: Path) -> None:
    place = tmp_path / "penstock-cache" / "data.mdb"
    for end in (40, 60):  # two namespaces, because the lengths differ
        data = np.random.default_rng(0).integers(0, 256, (end, 20_000), np.uint8)
        with (
            ps.Pipeline.from_dataset(data)
            .cache(disk=tmp_path, codec="raw")
            .batch(50) as pipe
        ):
            assert sum(len(batch) for batch in pipe) == end
    full = place.stat().st_size
    name = said("ls", tmp_path)[1][0].split()[0]
    assert said("clear", tmp_path, "--name", name) == (0, ["60 records deleted"])
    assert place.stat().st_size < 0.5 * full
    assert said("verify", tmp_path)[1] == ["40 records are intact, 0 were damaged"]
    assert said("clear", tmp_path) == (0, ["40 records deleted"])
    assert not place.exists()
    assert said("ls", tmp_path) == (0, ["0 in all, 0.0 MiB"])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"version": 2}, "its format is 2, this one reads 1"),
        ({"clean": False, "boot": "of yesterday"}, "before a power cut"),
        ({"version": None}, "no penstock cache, or its state.json is damaged"),
    ],
    ids=["of another version", "of before a power cut", "of another program"],
)
@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_cache_that_cannot_be_read_is_refused_by_name_and_left_alone(
    folder: Path, command: str, state: dict[str, object], words: str
) -> None:
    path = folder / "penstock-cache" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | state))
    before = contents(folder)
    result = CliRunner().invoke(cli.app, ["cache", command, str(folder)])
    assert isinstance(result.exception, NoCacheError)
    assert words in str(result.exception)
    assert str(folder) in str(result.exception)
    assert contents(folder) == before
    assert said("clear", folder)[0] == 0
    assert said("ls", folder) == (0, ["0 in all, 0.0 MiB"])


def test_ls_writes_nothing(folder: Path) -> None:
    before = contents(folder)
    assert said("ls", folder)[0] == 0
    assert contents(folder) == before


def contents(folder: Path) -> dict[Path, bytes]:
    """Return what is in the files of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_no_cache_is_made_where_there_is_none(tmp_path: Path, command: str) -> None:
    result = CliRunner().invoke(cli.app, ["cache", command, str(tmp_path)])
    assert str(result.exception).startswith(f"there is no cache in {tmp_path}; give")
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_is_answered_with_those_that_exist(folder: Path) -> None:
    result = CliRunner().invoke(cli.app, ["cache", "clear", str(folder), "--name", "x"])
    assert re.search(r"holds no 'x'; it holds [0-9a-f]{16}", str(result.exception))


def damage(place: Path) -> None:
    """Change one byte of the first record."""
    env = lmdb.open(str(place), max_dbs=1, map_size=1 << 30)
    with env.begin(write=True) as txn:
        cursor = txn.cursor()
        assert cursor.first()
        while len(cursor.key()) != 16:
            assert cursor.next()
        record = bytearray(cursor.value())
        record[-1] ^= 1
        txn.put(cursor.key(), bytes(record))
    env.close()
