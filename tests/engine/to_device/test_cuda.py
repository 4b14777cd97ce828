"""What is asked of CUDA, on any machine: the calls are noted, not made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.to_device.cuda import PORTABLE, Bus

Calls = list[tuple[Any, ...]]


class Noted:
    """Notes each call of a method, and answers as told."""

    def __init__(self, calls: Calls, name: str, **answers: Any) -> None:
        self._calls = calls
        self._name = name
        self._answers = answers

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any, **options: Any) -> Any:
            self._calls.append((self._name, method, *arguments, *options.items()))
            answer = self._answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def answers() -> dict[str, Any]:
    """Return what the driver answers; a test may change it."""
    return {"cudaHostRegister": 0}


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch, calls: Calls, answers: Any) -> Bus:
    @contextlib.contextmanager
    def stream(on: object) -> Iterator[None]:
        calls.append(("enter", on))
        yield

    def ones(count: int, device: torch.device) -> None:
        calls.append(("kernel", device))

    side = Noted(calls, "side")
    fake = SimpleNamespace(
        current_device=lambda: 3,
        Stream=lambda device: calls.append(("stream", device)) or side,
        Event=lambda: Noted(calls, "event"),
        cudart=lambda: Noted(calls, "driver", **answers),
        current_stream=lambda device: Noted(calls, f"trainer's of {device}"),
        stream=stream,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch, "ones", ones)
    return Bus(torch.device("cuda"))


def test_without_a_number_the_device_is_the_current_one(bus: Bus) -> None:
    assert bus.device == torch.device("cuda", 3)
    assert Bus(torch.device("cuda", 1)).device == torch.device("cuda", 1)
    assert Bus(torch.device("cuda", 0)).device == torch.device("cuda", 0)


def test_a_copy_goes_to_the_device_and_is_not_waited_for(
    bus: Bus, calls: Calls
) -> None:
    tensor: Any = Noted(calls, "tensor", to="the copy")
    assert bus.copy(tensor) == "the copy"
    assert calls[-1] == ("tensor", "to", bus.device, ("non_blocking", True))


def test_marks_are_set_on_the_bus_or_in_the_trainers_stream(
    bus: Bus, calls: Calls
) -> None:
    with bus.side():
        pass
    side = calls[-1][1]
    bus.mark()
    assert calls[-1] == ("event", "record", side)
    bus.mark(here=True)
    assert calls[-1][:2] == ("event", "record")
    assert calls[-1][2] is not side


def test_the_trainer_waits_for_a_mark_and_keeps_the_memory(
    bus: Bus, calls: Calls
) -> None:
    mark: Any = bus.mark()
    tensors: list[Any] = [Noted(calls, "one"), Noted(calls, "two")]
    bus.hand_over(tensors, mark)
    waits, *records = calls[-3:]
    assert waits == ("trainer's of cuda:3", "wait_event", mark)
    assert [call[:2] for call in records] == [
        ("one", "record_stream"),
        ("two", "record_stream"),
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_of_a_sparse_tensor_the_memory_of_all_parts_is_kept(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, ...]] = []

    def record_stream(tensor: torch.Tensor, _: object) -> None:
        assert tensor.layout is torch.strided  # CUDA has no record of others
        kept.append(tuple(tensor.shape))

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    mark: Any = bus.mark()
    bus.hand_over([torch.eye(3).to_sparse(), torch.eye(2).to_sparse_csr()], mark)
    assert kept == [(2, 3), (3,), (3,), (2,), (2,)]


def test_memory_is_pinned_for_all_devices(bus: Bus, calls: Calls) -> None:
    assert bus.register(4096, 64) is True
    assert calls[-1] == ("driver", "cudaHostRegister", 4096, 64, PORTABLE)


def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_trainer(
    bus: Bus, calls: Calls, answers: dict[str, Any]
) -> None:
    answers["cudaHostRegister"] = 1
    refused = Bus(torch.device("cuda", 2))
    assert refused.register(4096, 64) is False
    assert calls[-2][0] == "enter"
    assert calls[-1] == ("kernel", refused.device)  # its report takes the error away


def test_memory_is_unpinned_once_nothing_reads_it(bus: Bus, calls: Calls) -> None:
    bus.unregister(4096)
    assert calls[-2:] == [
        ("side", "synchronize"),
        ("driver", "cudaHostUnregister", 4096),
    ]


def test_a_fork_unpins_nothing(
    bus: Bus, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(calls)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    bus.unregister(4096)
    assert len(calls) == before
