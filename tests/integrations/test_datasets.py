"""Hugging Face datasets, arrays and memory maps train, resume and are recognised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.cache.fingerprint import fingerprint
from penstock.pipeline.sources.source import identity_of

datasets = pytest.importorskip("datasets")

N, WIDTH = 96, 4
STEPS = 2 * N // 8
Make = Callable[[Path, float], Any]
"""Writes data into a folder, with all numbers scaled, and opens it."""


def numbers(scale: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    rng = np.random.default_rng(0)
    return (scale * rng.normal(size=(N, WIDTH))).astype(np.float32)


def an_array(folder: Path, scale: float) -> Any:
    del folder
    return numbers(scale)


def a_memory_map(folder: Path, scale: float) -> Any:
    path = folder / "numbers.bin"
    if not path.exists():
        numbers(scale).tofile(path)
    return np.memmap(path, np.float32, "r", shape=(N, WIDTH))


def a_map_style_data_set(folder: Path, scale: float) -> Any:
    if not (folder / "saved").exists():
        rows = {"numbers": numbers(scale).tolist()}
        datasets.Dataset.from_dict(rows).save_to_disk(folder / "saved", num_shards=3)
    return datasets.load_from_disk(str(folder / "saved")).with_format("torch")


def a_stream(folder: Path, scale: float) -> Any:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for shard, part in enumerate(np.split(numbers(scale), 3)):
        path = folder / f"{shard}.parquet"
        if not path.exists():
            pq.write_table(pa.table({"numbers": part.tolist()}), path)
    return datasets.load_dataset(
        "parquet",
        data_files=sorted(map(str, folder.glob("*.parquet"))),
        split="train",
        streaming=True,
        cache_dir=str(folder / "hub"),
    )


MAP_STYLE: list[Make] = [an_array, a_memory_map, a_map_style_data_set]
EACH: list[Make] = [*MAP_STYLE, a_stream]


@pytest.fixture(scope="module", autouse=True)
def what_a_process_makes_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the locks of datasets and tqdm now, without a thread that watches bars."""
    pytest.importorskip("tqdm.std").tqdm.monitor_interval = 0
    a_map_style_data_set(tmp_path_factory.mktemp("first"), 1.0)


def row_of(sample: Any) -> torch.Tensor:
    values = sample["numbers"] if isinstance(sample, dict) else sample
    if isinstance(values, torch.Tensor):
        return values
    return torch.tensor(values, dtype=torch.float32)


def pipe_of(make: Make, folder: Path) -> ps.Pipeline:
    pipe = ps.Pipeline.from_dataset(make(folder, 1.0)).map(row_of)
    return (pipe if make is a_stream else pipe.shuffle(seed=1)).batch(8)


def trained(batches: Callable[[], Any]) -> list[float]:
    """Return the losses of two epochs of least squares."""
    weights = torch.zeros(WIDTH)
    losses = []
    for _ in range(2):
        for batch in batches():
            rest = batch @ weights - batch.sum(1)
            weights -= 0.1 * (batch.T @ rest) / len(batch)
            losses.append(float(rest.square().mean()))
    return losses


@pytest.mark.parametrize("make", EACH)
def test_a_model_trains_as_in_a_plain_loop(make: Make, tmp_path: Path) -> None:
    with pipe_of(make, tmp_path) as pipe:
        losses = trained(lambda: pipe)
    assert len(losses) == STEPS
    assert losses[-1] < 0.01 * losses[0]
    if make is a_stream:
        rows = torch.from_numpy(numbers())
        assert losses == pytest.approx(trained(lambda: rows.split(8)))


@pytest.mark.parametrize("make", EACH)
def test_a_loop_that_is_left_resumes_exactly(make: Make, tmp_path: Path) -> None:
    ps.testing.assert_exact_resume(lambda: pipe_of(make, tmp_path), every=5)


@pytest.mark.parametrize("make", MAP_STYLE)
def test_a_cache_recognises_data_and_notices_changes(
    make: Make, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first, again = (fingerprint(make(here, 1.0), []) for _ in range(2))
    changed = fingerprint(make(there, 2.0), [])
    assert first.private_because is None
    assert first.digest == again.digest != changed.digest


def test_a_state_of_other_data_is_refused_where_data_has_a_fingerprint(
    tmp_path: Path,
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    make = a_map_style_data_set
    first, again = (identity_of(make(tmp_path / "here", 1.0)) for _ in range(2))
    assert first == again is not None
    assert first != identity_of(make(tmp_path / "there", 2.0))
