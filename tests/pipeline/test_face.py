"""A pipeline or loader is named as its user names it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import penstock as ps

DATA = list(range(8))


def made() -> ps.Pipeline:
    return ps.Pipeline.from_dataset(DATA).batch(4)


def made_by_another() -> ps.Pipeline:
    return made()


def two() -> Any:
    return made(), made()


class Module:
    def __init__(self) -> None:
        self.val_dataloader = ps.DataLoader(DATA)
        self.all = {"train": ps.DataLoader(DATA)}


def test_the_name_is_that_of_the_variable_without_words_for_loader() -> None:
    train_loader = ps.DataLoader(DATA)
    test_dl = made_by_another()
    pipe = ps.Pipeline.from_dataset(DATA).shuffle(seed=0).batch(2)
    names = [train_loader.name, test_dl.name, pipe.name]
    assert names == ["train", "test", "pipe"]


def test_the_name_may_come_from_an_attribute_or_an_outer_variable() -> None:
    inner = made()

    def named() -> str:
        return inner.name

    assert (Module().val_dataloader.name, named()) == ("val", "inner")


def test_the_name_is_file_and_line_where_there_is_no_variable() -> None:
    names = [Module().all["train"].name, two()[0].name]
    assert all(name.startswith("test_face.py:") for name in names)
    assert ps.DataLoader(DATA).name.startswith("test_face.py:")


def test_a_given_name_is_kept() -> None:
    train = ps.DataLoader(DATA, name="digits")
    val = made().options(name="letters")
    assert (train.name, val.name) == ("digits", "letters")
    again = copy.copy(train), copy.deepcopy(val)
    assert [face.name for face in again] == ["digits", "letters"]


def test_finding_a_name_leaves_local_variables_alone() -> None:
    variables = locals()
    train = made()
    assert train.name == "train"
    assert "train" not in variables


@pytest.mark.parametrize("name", [7, "two\nlines", "\x1b[31m"])
def test_a_name_that_cannot_be_printed_is_refused(name: Any) -> None:
    with pytest.raises(ps.errors.SpecError, match="`name` must be a str"):
        made().options(name=name)
    with pytest.raises(ps.errors.SpecError, match="`name` must be a str"):
        ps.DataLoader(DATA, name=name)


def test_a_copy_of_a_loader_has_its_present_name() -> None:
    loader = ps.DataLoader([0, 1])
    loader.name = "mine"
    assert copy.deepcopy(loader)._slot.name == "mine"  # noqa: SLF001
