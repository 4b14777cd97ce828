"""Problems of worker processes are reported before they occur."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from penstock import DataLoader
from penstock.engine.witness.hazards import find_on_device
from penstock.pipeline.torch_workers import tell_of_cuda
from penstock.system.descriptors import descriptors_left
from support import warm


class OnDevice:
    def __init__(self, device: str) -> None:
        self.tables = {"near": [torch.zeros(2), torch.zeros(2, device=device)]}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tables["near"][0]


def test_a_tensor_on_a_device_is_found_by_its_path() -> None:
    finding = find_on_device(OnDevice("meta"), "dataset", "meta")
    assert finding == ("dataset.tables['near'][1]", torch.device("meta"))
    assert find_on_device(OnDevice("cpu"), "dataset", "meta") is None
    tell_of_cuda(OnDevice("meta"))  # CUDA is not in use, so there is nothing to report


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_tensor_in_a_forked_dataset_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    list(DataLoader(OnDevice("cuda"), num_workers=1, sample_seeding=True))
    assert "`dataset.tables['near'][1]` is a tensor on cuda:0" in caplog.text


def test_without_a_limit_of_descriptors_there_is_room_for_any_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: none)
    assert descriptors_left() > 10**6


SHORT = """
import resource, warnings
from penstock import DataLoader

warnings.simplefilter("ignore")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for limit in 48, 64:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    loader = DataLoader(range(100), 4, num_workers=32, sample_seeding=True)
    batches = [batch.tolist() for batch in loader]
    assert sum(batches, []) == list(range(100))
    loader.close()
print("whole")
"""


@pytest.mark.long
def test_few_descriptors_mean_fewer_workers_and_a_line_in_the_log() -> None:
    process = warm.run([sys.executable, "-P", "-c", SHORT], timeout=60)
    assert process.stdout == "whole\n", process.stderr
    for limit in (48, 64):
        assert f"`ulimit -n` is {limit}, which leaves room for" in process.stderr
