"""Accelerate, with penstock's loader inside its wrapper."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from penstock.pipeline.dataloader import KNOWN_BYPASS
from support.framework_data import STEPS, loader, verdict, whole

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def prepared(data_loader: Any) -> tuple[Any, Any, Any]:
    from penstock.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model, batches = prepare(accelerator, torch.nn.Linear(4, 1), data_loader)
    return accelerator, model, batches


def seen(batches: Any, step_s: float = 0.0) -> list[list[int]]:
    rows = []
    for _, indices in batches:
        time.sleep(step_s)
        rows.append(indices.tolist())
    return rows


def test_a_loader_works_in_accelerates_wrapper_and_its_verdict_is_true() -> None:
    _, _, batches = prepared(loader(load_s=0.005))
    assert type(batches).__name__ == "DataLoaderShard"
    assert len(batches) == STEPS
    assert all(whole(seen(batches)) for _ in range(3))
    assert type(batches.base_dataloader) is DataLoader
    verdict(batches, loading=True)
    _, _, batches = prepared(loader())
    assert all(whole(seen(batches, step_s=0.05)) for _ in range(3))
    verdict(batches, loading=False)


def test_a_state_that_accelerate_saves_resumes_within_the_epoch(tmp_path: Path) -> None:
    accelerator, _, batches = prepared(loader())
    rows: list[list[int]] = []
    for number, (_, indices) in enumerate(batches):
        if number == 7:
            accelerator.save_state(str(tmp_path))
        rows.append(indices.tolist())
    torch.manual_seed(99)
    accelerator, _, batches = prepared(loader())
    accelerator.load_state(str(tmp_path))
    assert seen(batches) == rows[8:]
    assert whole(seen(batches))


def test_skipped_batches_are_not_loaded() -> None:
    from penstock.integrations.accelerate import skip_first_batches

    torch.manual_seed(1)
    _, _, batches = prepared(loader())
    batches.set_epoch(0)
    rest = skip_first_batches(batches, 15)
    assert type(rest.base_dataloader) is DataLoader
    assert len(seen(rest)) == STEPS - 15
    assert rest.base_dataloader.stats().segments[0].rows == 8 * (STEPS - 15)


def test_a_loader_that_is_bypassed_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    KNOWN_BYPASS.set(False)
    caplog.set_level(logging.INFO, logger="penstock.autotune")
    accelerator = accelerate.Accelerator(cpu=True)
    plain = [accelerator.prepare(loader()) for _ in range(2)]
    assert type(plain[0].base_dataloader) is torch.utils.data.DataLoader
    (line,) = [m for m in caplog.messages if "Accelerate builds a plain" in m]
    assert "penstock.integrations.accelerate.prepare" in line
