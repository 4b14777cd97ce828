"""Most scripts of MindSpore's model zoo find here what they use of its datasets."""

from __future__ import annotations

from pathlib import Path

import pytest
from mindspore_calls import OPERATORS, Here, extract, lacking, read_table

SHARE = 0.96
"""The share of files, rounded down, that find all they use."""
SHARE_OF_DATASETS = 0.97
"""The same, if image operators and transforms do not count."""


@pytest.fixture(scope="module")
def missing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what each file uses that is not here."""
    return lacking(Here(tmp_path_factory.mktemp("zoo")))


def test_most_files_find_all_they_use(missing: dict[str, list[str]]) -> None:
    assert len(missing) > 590
    assert sum(not calls for calls in missing.values()) / len(missing) >= SHARE


def test_nearly_all_files_find_their_datasets(missing: dict[str, list[str]]) -> None:
    here = [
        all(call.split(".")[0] in OPERATORS for call in calls)
        for calls in missing.values()
    ]
    assert sum(here) / len(here) >= SHARE_OF_DATASETS


def test_a_call_that_is_not_here_counts_as_missing(tmp_path: Path) -> None:
    here = Here(tmp_path)
    assert here(".batch(1,drop_remainder)")
    assert not here(".batch(1,no_such_option)")
    assert not here("NoSuchDataset(1)")
    assert not here(".save(1)")


SCRIPT = """\
import mindspore.dataset as ds
from mindspore.dataset import vision
import mindspore.dataset.vision.c_transforms as C
from mindspore import dataset as other

def make(path):
    ds.config.set_seed(1)
    data = ds.MnistDataset(path, shuffle=False)
    data = data.map([C.Resize(8, interpolation=vision.Inter.LINEAR)], "image")
    return data.batch(2, drop_remainder=True).repeat(3)

data = make("somewhere")
print(data.get_dataset_size(), data.user_attribute)
for row in data.create_dict_iterator():
    row.batch(3)
"""


def test_a_table_lists_the_calls_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text("import mindspore\n")
    assert dict(extract(tmp_path)) == {
        "train.py": [
            ".batch(1,drop_remainder)",
            ".create_dict_iterator()",
            ".get_dataset_size()",
            ".map(2)",
            ".repeat(1)",
            "MnistDataset(1,shuffle)",
            "config.set_seed(1)",
            "vision.Inter.LINEAR",
            "vision.Resize(1,interpolation)",
        ]
    }


def test_the_table_has_the_calls_of_most_files() -> None:
    table = read_table()
    used = [call for calls in table.values() for call in calls]
    assert used.count(".batch(1,drop_remainder)") > 300
    assert all(table.values())
