"""`penstock cache`: what is on disk, whether it is whole, and how to be rid of it."""

from __future__ import annotations

import re
from pathlib import Path

import lmdb
import numpy as np
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock import cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the cache of 30 samples."""
    source = ps.Pipeline.from_dataset(np.arange(30)).map(float)
    with source.cache(disk=tmp_path, codec="raw").batch(10) as pipe:
        assert sum(batch.sum().item() for batch in pipe) == sum(range(30))
    return tmp_path


def said(*arguments: object) -> tuple[int, list[str]]:
    """What a command prints, and its exit code."""
    done = CliRunner().invoke(cli.app, ["cache", *map(str, arguments)])
    assert not isinstance(done.exception, Exception) or done.exit_code
    return done.exit_code, done.stdout.splitlines()


def test_ls_tells_what_is_stored_and_what_made_it(folder: Path) -> None:
    code, (line, total) = said("ls", folder)
    assert code == 0
    assert re.match(r"[0-9a-f]{16} +30 +0\.0 MiB  .*  ndarray\(30\) > float$", line)
    assert total == "1 in all, 0.0 MiB"


def test_verify_reads_all_and_drops_what_is_damaged(folder: Path) -> None:
    assert said("verify", folder) == (0, ["30 records are whole, 0 were damaged"])
    damage(folder / "penstock-cache")
    assert said("verify", folder) == (1, ["29 records are whole, 1 were damaged"])
    assert said("verify", folder) == (0, ["29 records are whole, 0 were damaged"])


def test_clear_empties_it_whole_or_in_part(folder: Path) -> None:
    name = said("ls", folder)[1][0].split()[0]
    assert said("clear", folder, "--name", name) == (0, ["30 records deleted"])
    assert said("clear", folder) == (0, ["0 records deleted"])
    assert said("ls", folder) == (0, ["0 in all, 0.0 MiB"])


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_where_no_cache_is_none_is_made(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(cli.app, ["cache", command, str(tmp_path)])
    assert str(done.exception).startswith(f"there is no cache in {tmp_path}; give")
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_not_there_is_answered_with_those_that_are(folder: Path) -> None:
    done = CliRunner().invoke(cli.app, ["cache", "clear", str(folder), "--name", "x"])
    assert re.search(r"holds no 'x'; it holds [0-9a-f]{16}", str(done.exception))


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
