"""Settings of the process: set once, they apply to pipelines without their own."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from support.datasets import Numbers
from support.functions import digest


def segment(pipe: ps.Pipeline) -> Any:
    """Return the reading of the first segment within a loop."""
    with pipe.batch(4) as batched:
        loop = iter(batched)
        next(loop)
        stats = batched.stats()
    assert stats is not None
    return stats.segments[0]


def threaded(**settings: Any) -> ps.Pipeline:
    return ps.Pipeline.from_dataset(Numbers(400), executor="thread", **settings)


def test_autotune_is_off_by_default_and_without_a_fixed_interval() -> None:
    assert ps.get_enable_autotune() is False
    assert ps.get_autotune_interval() == 0
    assert ps.get_seed() == 0
    assert ps.get_prefetch_size() == 2
    assert ps.get_num_parallel_workers() >= 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_autotune", True),
        ("autotune_interval", 7),
        ("num_parallel_workers", 5),
        ("prefetch_size", 9),
        ("seed", 11),
    ],
)
def test_a_setting_can_be_read_back(name: str, value: Any) -> None:
    getattr(ps, f"set_{name}")(value)
    assert getattr(ps, f"get_{name}")() == value
    assert getattr(ps.config, f"get_{name}")() == value


def test_stages_without_settings_use_those_of_the_process() -> None:
    ps.set_num_parallel_workers(3)
    ps.set_prefetch_size(5)
    reading = segment(threaded())
    assert (reading.num_parallel_workers, reading.prefetch_size) == (3, 5)


def test_a_stages_own_setting_wins() -> None:
    ps.set_num_parallel_workers(3)
    assert segment(threaded(num_parallel_workers=4)).num_parallel_workers == 4


def test_a_stage_with_bounds_starts_at_the_lower_one() -> None:
    assert segment(threaded(num_parallel_workers=(2, 9))).num_parallel_workers == 2


def test_an_inline_segment_reports_one_worker() -> None:
    ps.set_num_parallel_workers(3)
    reading = segment(ps.Pipeline.from_dataset(Numbers(400), executor="inline"))
    assert (reading.num_parallel_workers, reading.executor) == (1, "inline")


def test_settings_apply_to_pipelines_that_first_run_after_them() -> None:
    pipe = threaded()
    ps.set_num_parallel_workers(6)
    assert segment(pipe).num_parallel_workers == 6


def test_shuffles_and_draws_without_a_seed_use_the_setting() -> None:
    def epoch(seed: int | None) -> str:
        with ps.Pipeline.from_dataset(Numbers(40)).shuffle(seed=seed).batch(8) as pipe:
            return digest(pipe)

    ps.set_seed(5)
    assert epoch(None) == epoch(5)
    assert epoch(None) != epoch(0)


def test_the_seed_determines_draws_without_a_shuffle() -> None:
    def draws() -> str:
        pipe = ps.Pipeline.from_dataset(Numbers(40))
        with pipe.map(lambda sample, rng: rng.random()).batch(8) as batched:
            return digest(batched)

    first = draws()
    assert draws() == first
    ps.set_seed(5)
    assert draws() != first


def test_the_cpu_budget_is_the_default_worker_count() -> None:
    ps.set_cpu_budget(1)
    assert ps.get_num_parallel_workers() == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (lambda: ps.set_num_parallel_workers(0), "must be an int >= 1, got 0"),
        (lambda: ps.set_prefetch_size(0), "must be an int >= 1, got 0"),
        (lambda: ps.set_autotune_interval(-1), "must be an int >= 0, got -1"),
        (lambda: ps.set_seed(-1), "`seed` must be an int >= 0, got -1"),
        (lambda: ps.set_seed(1.5), "`seed` must be an int >= 0, got 1.5"),  # type: ignore[arg-type]
        (lambda: ps.set_cpu_budget(0), "`cores` must be a finite number > 0, got 0"),
        (lambda: ps.set_memory_budget("lots"), "got 'lots'; units are KB"),
        (lambda: ps.set_memory_budget(0), "must be a number of bytes >= 1"),
    ],
)
def test_a_setting_out_of_range_is_refused_and_shown(
    setting: Any, message: str
) -> None:
    with pytest.raises(ps.SpecError) as caught:
        setting()
    assert message in str(caught.value)


def test_a_seed_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ps.SpecError, match="got 18446744073709551616"):
        ps.set_seed(2**64)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4GB", 4 * 10**9), ("512MiB", 2**29), (10**6, 10**6)]
)
def test_the_memory_budget_is_a_number_of_bytes_or_a_text(
    text: str | int, nbytes: int
) -> None:
    ps.set_memory_budget(text)
    assert ps.config.budget().memory_bytes == nbytes


def test_an_empty_prefix_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ps.SpecError, match="got ''; leave it out to write no files"):
        ps.set_enable_autotune(True, "")
    assert ps.get_enable_autotune() is False
