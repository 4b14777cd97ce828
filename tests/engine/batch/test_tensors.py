"""The tensors of a batch are found wherever they are in it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from penstock.engine.batch.device import DeviceStage, ToDevice, map_tensors


class Labelled(NamedTuple):
    """A sample with names."""

    image: Any
    label: Any


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
