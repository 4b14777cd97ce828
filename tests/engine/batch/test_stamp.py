"""A batch is what collate returns, and says which batch it is."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.engine.batch.device import DeviceStage, ToDevice
from penstock.engine.batch.stamp import map_tensors, stamped
from support.core_script import Script

PLAN = Script((4,)).batch(7)


class Labelled(NamedTuple):
    """A sample with names."""

    image: Any
    label: Any


class Holder:
    """What a user's collate_fn may return."""

    plan = "mine"


class KeysAsAttributes(dict[str, Any]):
    """A mapping such as those of EasyDict, Munch and ml_collections."""

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Strict:
    """An object like pydantic's models: it takes no attribute that is not a field."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(name)


class Planned(NamedTuple):
    """A sample with a `plan` of its own."""

    plan: Any


class Boxes(torch.Tensor):
    """A tensor with a `plan` of its own."""

    plan = "mine"


@pytest.mark.parametrize(
    "data", [[1, 2], (1, 2), {"a": 1}, Labelled(1, 2), [], ()], ids=repr
)
def test_containers_keep_their_kind_and_get_a_plan(data: Any) -> None:
    batch = stamped(data, PLAN)
    assert isinstance(batch, type(data))
    assert batch == data
    assert batch.plan is PLAN


def test_a_tensor_gets_an_attribute_and_is_not_copied() -> None:
    tensor = torch.zeros(3)
    batch = stamped(tensor, PLAN)
    assert batch is tensor
    assert batch.plan is PLAN
    assert not hasattr(batch.to(torch.float64), "plan")


@pytest.mark.parametrize(
    "data",
    [Holder(), KeysAsAttributes(a=1), OrderedDict(a=1), Strict()],
    ids=lambda data: type(data).__name__,
)
def test_nothing_is_written_into_an_object_from_the_user(data: Any) -> None:
    before = dict(vars(data)), dict(data) if isinstance(data, dict) else None
    assert stamped(data, PLAN) is data
    assert (dict(vars(data)), dict(data) if before[1] else None) == before


@pytest.mark.parametrize(
    "data", [Planned("mine"), torch.zeros(1).as_subclass(Boxes)], ids=["field", "class"]
)
def test_a_plan_that_belongs_to_the_user_is_left_alone(data: Any) -> None:
    assert stamped(data, PLAN).plan == "mine"


def test_a_namedtuple_is_made_without_calling_its_constructor() -> None:
    class Checked(Labelled):
        def __new__(cls, image: Any) -> Any:
            return super().__new__(cls, image, 0)

    assert stamped(Checked(1), PLAN) == (1, 0)


@pytest.mark.parametrize("data", [5, "text", np.zeros(2), None], ids=repr)
def test_a_batch_that_cannot_hold_a_plan_comes_without_one(data: Any) -> None:
    assert stamped(data, PLAN) is data


def test_a_namedtuple_keeps_its_names() -> None:
    batch = stamped(Labelled(image=1, label=2), PLAN)
    assert (batch.image, batch.label) == (1, 2)
    image, label = batch
    assert (image, label) == (1, 2)
    assert type(batch).__name__ == "Labelled"


@pytest.mark.parametrize("data", [[1, 2], (1, 2), {"a": 1}], ids=repr)
def test_batches_are_pickled_and_copied_with_their_plan(data: Any) -> None:
    batch = stamped(data, PLAN)
    for twin in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):  # noqa: S301
        assert twin == data
        assert twin.plan == PLAN


def test_a_batch_of_named_parts_can_be_pickled_too() -> None:
    batch = stamped(Labelled(1, 2), PLAN)
    assert pickle.loads(pickle.dumps(batch)) == batch  # noqa: S301


def test_every_tensor_of_a_batch_is_moved() -> None:
    data = {
        "a": [torch.zeros(1), (torch.ones(2), "text")],
        "b": Labelled(1, torch.ones(1)),
    }
    moved = ToDevice(DeviceStage.of("meta"))(data)
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1][0].device.type == "meta"
    assert moved["a"][1][1] == "text"
    assert moved["b"].label.device.type == "meta"
    assert type(moved["b"]) is Labelled
    assert data["a"][0].device.type == "cpu"


def test_a_batch_without_tensors_stays_as_it_is() -> None:
    data = ({"a": 1}, [2, "x"], Labelled(3, None))
    assert map_tensors(data, torch.neg) == data


def test_a_mapping_keeps_its_type_when_moved() -> None:
    moved = map_tensors(OrderedDict(a=torch.zeros(1)), torch.neg)
    assert type(moved) is OrderedDict
