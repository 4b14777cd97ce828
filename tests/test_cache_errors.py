"""A pipeline that cannot be cached is refused with where, why and what helps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cache.cache import RandomUpstreamError
from penstock.cache.record import UnstorableError
from penstock.errors import SpecError
from support.cached_data import EXECUTORS, Drawing, Noted, doubled, statistics
from support.datasets import Counting, Numbers
from support.functions import BadSample, augment, fails_on, indices

pytestmark = pytest.mark.usefixtures("own_runtime_folder")

Kind = Mapping[str, Any]
KINDS = {name: EXECUTORS[name] for name in ("inline", "4 thread", "1 process")}
LENGTH = 40


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def first_error(pipe: ps.Pipeline, error: type[BaseException]) -> BaseException:
    with pipe, pytest.raises(error) as caught:
        list(pipe)
    return caught.value


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


# Wrong descriptions


def plain() -> ps.Pipeline:
    return ps.Pipeline.from_dataset(Numbers(LENGTH))


REFUSED: Mapping[str, tuple[Callable[[], Any], str]] = {
    "random map": (
        lambda: plain().map(augment).cache(ram="1MB"),
        (
            "cache(ram=1000000) would store one draw of a random function forever: a"
            " map() before it takes `rng`; put the cache before that"
        ),
    ),
    "filter": (
        lambda: plain().filter(bool).cache(ram=9),
        (
            "cache(ram=9) cannot come after filter(); put it before that, or use"
            " select() with the indices to keep"
        ),
    ),
    "iterable": (
        lambda: ps.Pipeline.from_dataset(Counting(4)).cache(ram=9),
        (
            "cache(ram=9) needs samples with an index to be found by, which an iterable"
            " dataset does not have; use a map-style one"
        ),
    ),
    "batched": (
        lambda: plain().batch(2).cache(ram=9),
        "cache(ram=9) cannot come after .batch()",
    ),
    "no tier": (
        lambda: plain().cache(),
        (
            'Pipeline.cache() needs a tier: cache(ram="2GB"), '
            'cache(disk="/nvme/cache"), or both, got neither'
        ),
    ),
    "codec": (
        lambda: plain().cache(ram=9, codec="gzip"),  # type: ignore[arg-type]
        "`codec` must be one of auto, raw, lz4, zstd, filter, got 'gzip'",
    ),
    "two numbers of workers": (
        lambda: [
            *ps.Pipeline.from_dataset([1, 2], num_parallel_workers=2)
            .map(float, num_parallel_workers=3)
            .cache(ram=9)
            .batch(1)
        ],
        (
            "all stages before Cache(ID:2) run together, so they share one"
            " `num_parallel_workers`, got 2 and 3; give it to one stage"
        ),
    ),
    "two executors": (
        lambda: [
            *ps.Pipeline.from_dataset([1, 2], executor="thread")
            .map(float, executor="process")
            .cache(ram=9)
            .batch(1)
        ],
        "all stages before Cache(ID:2) run together, so they share one `executor`",
    ),
    "two limits of time": (
        lambda: [
            *ps.Pipeline.from_dataset([1, 2], timeout=2)
            .map(float, timeout=3)
            .cache(ram=9)
            .batch(1)
        ],
        "all stages before Cache(ID:2) run together, so they share one `timeout`",
    ),
    "more than there is": (
        lambda: plain().cache(ram=1 << 50),
        "`ram` must be at most the memory that this process may have, ",
    ),
    "no folder": (
        lambda: plain().cache(disk=3),  # type: ignore[arg-type]
        "`disk` must be the path of a folder, got 3",
    ),
    "limit of no disk": (
        lambda: plain().cache(ram=9, disk_limit="1GB"),
        "`disk_limit` limits the folder `disk`, which is not given, got 1000000000",
    ),
    "version": (
        lambda: plain().cache(ram=9, version=1.5),  # type: ignore[arg-type]
        "`version` must be an int or a str, got 1.5",
    ),
    "size": (lambda: plain().cache(ram="lots"), "got 'lots'; units are KB"),
    "negative size": (lambda: plain().cache(ram=-3), "must be a number of bytes >= 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_cache_is_refused_where_it_is_written(name: str) -> None:
    describe, text = REFUSED[name]
    with pytest.raises(ps.SpecError, match=re.escape(text)):
        describe()


# Random samples


@pytest.mark.parametrize(
    ("source", "on_error", "executor"),
    [
        ("random", "raise", "inline"),
        ("numpy", "raise", "inline"),
        ("torch", "raise", "4 thread"),
        ("numpy", "substitute", "4 thread"),
        ("torch", "substitute", "1 process"),
        ("random", "raise", "1 process"),
    ],
)
def test_the_error_for_a_dataset_that_draws_says_to_draw_after_the_cache(
    source: str, on_error: Any, executor: str
) -> None:
    data = Drawing(source, 4000)
    pipe = ps.Pipeline.from_dataset(data, **KINDS[executor]).cache(ram="1MB")
    # the first few that differ would pass within the error budget
    error = first_error(pipe.batch(8, on_error=on_error), RandomUpstreamError)
    assert "A stage before the cache is random" in str(error)
    assert "into a map() that takes `rng`, after .cache()" in str(error)
    assert "in Cache(ID:1), sample index" in notes(error)


def by_epoch(sample: Any, ctx: Any) -> Any:
    return sample[0] + ctx.epoch, sample[1]


def by_strength(sample: Any, ctx: Any) -> Any:
    return sample[0] * ctx.strength, sample[1]


@pytest.mark.parametrize(
    ("function", "executor"),
    [(by_epoch, "inline"), (by_strength, "4 thread"), (by_epoch, "1 process")],
)
def test_a_function_of_more_context_than_the_size_is_refused(
    function: Callable[..., Any], executor: str
) -> None:
    kind = KINDS[executor]
    source = ps.Pipeline.from_dataset(
        Numbers(LENGTH),
        schedule=ps.schedule.of(global_batch_size=8, strength=lambda epoch: 0.5),
        **kind,
    )
    pipe = source.map(function, **kind).cache(ram="1MB").batch()
    with pytest.raises(SpecError, match=r"reads ctx\.(epoch|strength), which"):
        next(iter(pipe))


# Samples that cannot be stored


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda sample: (sample[0], {"a": {sample[1]}}), r'sample[1]["a"] is a set'),
        (lambda sample: (sample[0], object()), "sample[1] is a object"),
        (lambda _: [1, (2, lambda: 3)], "sample[1][1] is a function"),
    ],
    ids=["set", "object", "function"],
)
@pytest.mark.parametrize("executor", ["inline", "4 thread"])
def test_a_value_that_cannot_be_stored_is_named_by_its_place(
    make: Callable[[Any], Any], place: str, executor: str
) -> None:
    kind = EXECUTORS[executor]
    source = ps.Pipeline.from_dataset(Numbers(LENGTH), **kind)
    error = first_error(
        source.map(make, **kind).cache(ram="1MB").batch(8), UnstorableError
    )
    assert place in str(error)
    assert "convert it in a stage before the cache, or put the cache before" in str(
        error
    )
    assert "in Cache(ID:2), sample index 0 (" in notes(error)


# Failures before a cache


@pytest.mark.parametrize(
    ("tier", "executor"),
    [("disk", "inline"), ("ram", "4 thread"), ("disk", "1 process")],
)
def test_an_exception_before_a_cache_names_the_stage_that_raised_it(
    tier: str, executor: str, tmp_path: Path
) -> None:
    kind = KINDS[executor]
    source = ps.Pipeline.from_dataset(Numbers(LENGTH), **kind)
    place: dict[str, Any] = {"ram": "1MB"} if tier == "ram" else {"disk": tmp_path}
    pipe = (
        source.map(doubled, **kind, name="first")
        .map(fails_on(21), **kind, name="decode")
        .map(doubled, **kind, name="last")
        .cache(**place)
    )
    error = first_error(pipe.batch(8), BadSample)
    assert error.args == (21,)
    assert "Map(ID:2) decode, sample index 21 (epoch 0, step 2, row 5" in notes(error)


def test_the_traceback_leads_to_the_line_that_raised() -> None:
    error = first_error(
        plain().map(fails_on(21), executor="inline").cache(ram="1MB").batch(8),
        BadSample,
    )
    names, trace = [], error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[-1] == "_fail"


class Torn(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 21:
            raise OSError(5, "cannot read", "disk")
        return super().__getitem__(index)


async def awaited(sample: Any) -> Any:
    return sample


async def fails_in_loop(sample: Any) -> Any:
    return fails_on(21)(sample)


class Awaited(Numbers):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return super().__getitem__(index)


def test_an_exception_in_the_dataset_names_the_reading_stage(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Torn(LENGTH), **kind).map(doubled, **kind)
    error = first_error(pipe.cache(ram="1MB").batch(8), OSError)
    assert "Dataset(ID:0) Torn, sample index 21 (" in notes(error)


def test_an_exception_in_a_coroutine_function_names_its_stage() -> None:
    pipe = ps.Pipeline.from_dataset(Awaited(LENGTH)).map(awaited).map(fails_in_loop)
    error = first_error(pipe.cache(ram="1MB").batch(8), BadSample)
    assert "Map(ID:2) fails_in_loop, sample index 21 (" in notes(error)


def test_an_exception_after_a_cache_names_the_stage_after_it(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(LENGTH), **kind).cache(ram="1MB")
    error = first_error(pipe.map(fails_on(21), **kind).batch(8), BadSample)
    assert "Map(ID:2) " in notes(error)


def nothing(sample: Any) -> Any:
    return None if sample[1] == 21 else sample


def test_none_from_a_map_before_a_cache_is_not_a_sample(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(LENGTH), **kind).map(nothing, **kind)
    error = first_error(pipe.cache(ram="1MB").batch(8), ps.SampleError)
    assert str(error).startswith("Map(ID:1) nothing returned None")
    assert "sample index 21 (" in notes(error)


def test_a_sample_that_fails_is_substituted_and_not_stored(
    kind: Kind, tmp_path: Path
) -> None:
    data = Noted(LENGTH, tmp_path / "log")
    source = ps.Pipeline.from_dataset(data, **kind).map(fails_on(21), **kind)
    pipe = source.cache(ram="1MB").batch(8, on_error="substitute", error_budget=0.1)
    with pipe:
        for epoch in range(2):
            rows = [index for batch in indices(pipe) for index in batch]
            assert sorted(set(range(LENGTH)) - set(rows)) == [21]
            assert data.reads()[21] >= epoch + 1
        assert statistics(pipe).tiers[0].records == LENGTH - 1
    extra = kind["executor"] == "process"  # two samples, to find what cannot be shared
    most = max(count for index, count in data.reads().items() if index != 21)
    assert most <= 2 + extra


# Two kinds of functions


def test_plain_and_coroutine_functions_before_one_cache_are_refused() -> None:
    pipe = plain().map(awaited).cache(ram="1MB").batch(8)
    with pytest.raises(ps.SpecError, match="before Cache\\(ID:2\\) some functions are"):
        len(pipe)
