"""Data that caches what it has computed counts as unchanged."""

from __future__ import annotations

import enum
import functools
import os
from pathlib import Path

import penstock as ps
from penstock.engine.witness.witness import Witness
from support.moves import workers_pay
from support.short_epochs import LENGTH, work


class Split(enum.Enum):
    """A part of the data."""

    TRAIN = "train"


class Photographs:
    """Keeps paths, which cache their text, and an index made at first use."""

    def __init__(self, folder: Path) -> None:
        self.files = [folder / f"{index}.npy" for index in range(4)]
        self.split, self.notes = Split.TRAIN, {"first": folder / "notes"}

    def __len__(self) -> int:
        return LENGTH

    @functools.cached_property
    def index(self) -> dict[str, list[int]]:
        return {"rows": [*range(4)]}

    def __getitem__(self, index: int) -> int:
        work()
        names = str(self.files[index % 4]), os.fspath(self.notes["first"])
        hash(self.files[index % 4])
        return index + len(self.index["rows"]) + len(names) + len(self.split.name)


def test_a_value_computed_once_is_not_a_change() -> None:
    data = Photographs(Path("folder"))
    witness = Witness([data])
    first = data[3]
    assert witness.changed() is None
    assert data[3] == first
    data.index["rows"].append(5)
    assert str(witness.changed()).startswith(".index")
    del data.index
    assert str(witness.changed()).startswith(".index")


def test_a_value_that_replaces_another_is_a_change() -> None:
    data = Photographs(Path("folder"))
    witness = Witness([data])
    data.files[2] = Path("another")
    assert witness.changed() == ".files[2]"


def test_data_that_keeps_paths_moves_to_workers(tmp_path: Path) -> None:
    ps.set_enable_autotune(True)
    loader = ps.DataLoader(Photographs(tmp_path), 8)  # type: ignore[arg-type]
    expected = [[index + 11 for index in range(at, at + 8)] for at in range(0, 40, 8)]
    with workers_pay():
        for _ in range(2):
            assert [batch.tolist() for batch in loader][:5] == expected
    assert loader.explain().stages[0].executor == "process"
