"""`options(cache="auto")`: a cache between two epochs, where it pays and is right."""

from __future__ import annotations

import logging
import random
import select
from typing import Any

import numpy as np
import pytest

import penstock as ps
from support.cached_data import TurnedClock

# ruff: noqa: SLF001

SAMPLES = 48
calls: list[int] = []


def costly(index: int) -> Any:
    """Wait a millisecond, as for storage: it costs workers time, and tests no CPU."""
    calls.append(index)
    select.select((), (), (), 0.001)  # what asks `time` may differ each time
    return np.arange(32, dtype=np.float32) + index


def jittered(sample: Any, rng: np.random.Generator) -> Any:
    return sample + rng.random(sample.shape, np.float32)


def costly_and_random(index: int) -> Any:
    return costly(index) * random.random()


def costly_and_counting(index: int) -> Any:
    return costly(index) * len(calls)


def epochs(pipe: Any, count: int = 4) -> list[list[bytes]]:
    return [[batch.numpy().tobytes() for batch in pipe] for _ in range(count)]


def pipe_of(function: Any, **options: Any) -> Any:
    pipe = ps.Pipeline.from_dataset(range(SAMPLES)).shuffle(seed=3)
    return pipe.map(function).map(jittered).batch(8).options(**options)


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    calls.clear()


@pytest.mark.parametrize("executor", ["auto", "thread", "process"])
def test_batches_are_those_without_a_cache(executor: Any) -> None:
    def described(**options: Any) -> Any:
        pipe = ps.Pipeline.from_dataset(range(SAMPLES)).shuffle(seed=3)
        pipe = pipe.map(costly, executor=executor, num_parallel_workers=2)
        return pipe.map(jittered, executor="inline").batch(8).options(**options)

    def plain(**options: Any) -> Any:
        return pipe_of(costly, **options)

    make = plain if executor == "auto" else described
    with make(cache="auto") as cached, make() as computed:
        assert epochs(cached) == epochs(computed)


def test_a_cache_is_placed_behind_the_costly_stage_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock.autotune")
    with pipe_of(costly, cache="auto", name="digits") as pipe:
        epochs(pipe, 2)
        after_two = len(calls)
        epochs(pipe, 2)
        assert pipe.explain().caching[0].startswith("Cache(ID:2)")
    # One epoch measures, one fills the cache, and the first samples are compared.
    assert after_two <= 2 * SAMPLES + 3
    assert len(calls) == after_two
    told = [line for line in caplog.messages if "placed a cache" in line]
    assert len(told) == 1
    assert told[0].startswith("digits: placed a cache of")
    assert "after Map(ID:2) costly" in told[0]


def test_a_cache_is_a_row_in_the_log_of_a_tuned_run(tmp_path: Any) -> None:
    ps.set_enable_autotune(True, str(tmp_path / "run"))
    with pipe_of(costly, cache="auto") as pipe:
        epochs(pipe, 2)
    ps.set_enable_autotune(False)
    rows = (tmp_path / "run_0.jsonl").read_text()
    assert rows.count("placed a cache of") == 1


def test_samples_with_random_draws_are_not_cached() -> None:
    with pipe_of(costly_and_random, cache="auto") as pipe:
        found = epochs(pipe, 3)
        assert not pipe._recipe.caches
    assert found[0] != found[1] != found[2]


def test_samples_that_turn_out_to_differ_are_made_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pipe_of(costly_and_counting, cache="auto") as pipe:
        epochs(pipe, 2)
        after_two = len(calls)
        epochs(pipe, 1)
    assert len(calls) >= after_two + SAMPLES
    (told,) = [line for line in caplog.messages if "given up" in line]
    assert "computed twice" in told


def test_a_cache_that_saves_nothing_is_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.autotune import caching
    from penstock.cache import cache

    # Reading an item of a list seems costly to the one who places a cache, and takes no
    # time by the clock of the cache.
    monkeypatch.setattr(caching, "FINDING_S", -1.0)
    monkeypatch.setattr(cache, "time", TurnedClock())
    caplog.set_level(logging.INFO, "penstock.autotune")
    dataset = [bytes(9)] * SAMPLES
    pipe = ps.Pipeline.from_dataset(dataset).batch(8).options(cache="auto")
    with pipe:
        for _ in range(5):
            assert sum(len(batch) for batch in pipe) == SAMPLES
        assert not pipe._recipe.caches
    told = [line for line in caplog.messages if "cache" in line]
    assert [line.split()[1] for line in told] == ["placed", "removed"]


def test_a_users_own_cache_is_left_alone() -> None:
    pipe = ps.Pipeline.from_dataset(range(SAMPLES)).map(costly).cache(ram="1MB")
    with pipe.batch(8).options(cache="auto") as loop:
        epochs(loop, 3)
        (cache,) = loop._recipe.caches
        assert not cache.opening.optional


def test_another_value_is_refused() -> None:
    with pytest.raises(ps.SpecError, match="must be 'auto' or None, got 'ram'"):
        pipe_of(costly, cache="ram")
