"""Batches formed at run time: filters, and datasets without an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import penstock as ps
from support.datasets import KINDS, Counting, Numbers, Sample
from support.functions import BadSample, augment, digest, fails_on, indices

Kind = Mapping[str, Any]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def uneven(sample: Sample) -> bool:
    """Keep few samples of the first half and most of the second."""
    return sample[1] % 5 == 0 if sample[1] < 40 else sample[1] % 7 > 0


KEPT = [index for index in range(80) if uneven((None, index))]  # type: ignore[arg-type]


def batched(samples: list[int], size: int) -> list[list[int]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def test_filtered_batches_are_full_in_order_and_planned(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(80), **kind).filter(uneven, **kind)
    with pipe.batch(8) as batch_pipe:
        for _ in range(2):
            pairs = [(batch, batch_pipe.plan) for batch in batch_pipe]
            assert list(indices(batch for batch, _ in pairs)) == batched(KEPT, 8)
            plans = [plan for _, plan in pairs if plan is not None]
            assert [plan.batch for plan in plans] == [*range(len(pairs))]
            sizes = [len(rows) for rows in batched(KEPT, 8)]
            assert [plan.n_rows for plan in plans] == sizes
            assert all(p.n_rows == p.n_local == p.n_global for p in plans)


def test_filtered_batches_are_byte_identical(kind: Kind) -> None:
    def digests(kind: Kind) -> list[str]:
        pipe = ps.Pipeline.from_dataset(Numbers(80), **kind).shuffle(seed=4)
        pipe = pipe.map(augment, **kind).filter(uneven, **kind).map(augment, **kind)
        with pipe.batch(8) as pipe:
            return [digest(pipe), digest(pipe)]

    assert digests(kind) == digests(KINDS["inline"])


@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_an_error_after_a_filter_says_where_in_the_epoch_its_sample_is(
    kind: Kind, on_error: Any
) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(80), **kind).filter(uneven, **kind)
    pipe = pipe.map(fails_on(45), **kind)
    pipe = pipe.batch(8, on_error=on_error, error_budget=0.0)
    with pipe, pytest.raises(BadSample) as caught:
        list(pipe)
    (note,) = [n for n in caught.value.__notes__ if "sample index" in n]
    assert note.endswith("sample index 45 (epoch 0, position 45)")


class Flaky:
    """An iterable whose tenth sample of 40 fails."""

    def __init__(self, *, goes_on: bool) -> None:
        self.goes_on = goes_on

    def __iter__(self) -> Iterator[int]:
        def get(n: int) -> int:
            if n == 10:
                raise OSError("connection reset")
            return n

        numbers = map(get, range(40))
        return numbers if self.goes_on else (n for n in numbers)


def test_a_substituted_error_in_an_iterable_does_not_end_the_epoch() -> None:
    pipe = ps.Pipeline.from_dataset(Flaky(goes_on=True))
    with pipe.batch(4, on_error="substitute", error_budget=0.1) as pipe:
        for _ in range(2):
            numbers = [int(n) for batch in pipe for n in batch]
            assert numbers == [n for n in range(40) if n != 10]


def test_an_epoch_cut_short_by_an_error_says_so() -> None:
    pipe = ps.Pipeline.from_dataset(Flaky(goes_on=False))
    pipe = pipe.batch(4, on_error="substitute", error_budget=0.1)
    with pipe, pytest.raises(OSError, match="connection reset") as caught:
        list(pipe)
    assert "the rest of its epoch would be missing" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_in_an_iterable_is_raised_once_then_it_goes_on_as_in_torch(
    *, goes_on: bool
) -> None:
    with ps.Pipeline.from_dataset(Flaky(goes_on=goes_on)).batch(4) as pipe:
        batches = iter(pipe)
        assert [next(batches).tolist() for _ in range(2)] == batched(list(range(8)), 4)
        with pytest.raises(OSError, match="connection reset"):
            next(batches)
        rest = [int(n) for batch in batches for n in batch]
    assert rest[-1:] == ([39] if goes_on else [])


def test_a_filter_changes_no_draws_of_the_stages_after_it() -> None:
    def noise(pipe: ps.Pipeline) -> dict[int, list[float]]:
        with pipe.map(augment).batch(1) as single:
            return {int(b[1]): b[0].tolist() for b in single}

    every = noise(ps.Pipeline.from_dataset(Numbers(80)).filter(lambda _: True))
    some = noise(ps.Pipeline.from_dataset(Numbers(80)).filter(uneven))
    assert some == {index: every[index] for index in KEPT}


def test_the_tail_after_a_filter_may_be_dropped(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(80), **kind).filter(uneven, **kind)
    whole, rest = divmod(len(KEPT), 8)
    assert rest
    with pipe.batch(8, drop_last=True) as dropped:
        assert [len(b[1]) for b in dropped] == [8] * whole
        assert [len(b[1]) for b in dropped] == [8] * whole


@pytest.mark.parametrize("data", [Numbers(80), Counting(80)])
def test_batches_of_what_is_left_may_come_in_parts(data: Any) -> None:
    source = ps.Pipeline.from_dataset(data).filter(uneven)
    with pytest.raises(ps.SpecError, match="drop_last=True"):
        iter(source.batch(8, microbatches=2))
    with source.batch(8, drop_last=True, microbatches=2) as pipe:
        parts = [list(indices(batch)) for batch in pipe]
    assert parts == [batched(KEPT[at : at + 8], 4) for at in range(0, len(KEPT) - 7, 8)]


def test_a_filter_that_keeps_nothing_gives_an_empty_epoch(kind: Kind) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(80), **kind)
    with pipe.filter(lambda _: False, **kind).batch(8) as pipe:
        assert [list(pipe), list(pipe)] == [[], []]


def test_a_filtered_pipeline_has_no_length() -> None:
    with pytest.raises(TypeError, match="has no length"):
        len(ps.Pipeline.from_dataset(Numbers(80)).filter(uneven).batch(8))


def test_a_filter_over_ranks_is_refused_with_advice_to_use_select() -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(80), shard=ps.Shard(0, 2)).filter(uneven)
    with pytest.raises(ps.SpecError, match=r"got 2 ranks.*use select\(\)"):
        iter(pipe.batch(8))


# Iterables


def test_an_iterable_is_read_in_its_order_once_an_epoch() -> None:
    pipe = ps.Pipeline.from_dataset(Counting(30)).map(augment, **KINDS["2 threads"])
    with pipe.batch(8) as pipe:
        expected = batched([*range(30)], 8)
        assert [list(indices(pipe)) for _ in range(3)] == [expected] * 3


def test_an_iterable_that_ends_with_a_full_batch_has_no_empty_batch() -> None:
    with ps.Pipeline.from_dataset(Counting(32)).batch(8) as pipe:
        assert [len(list(pipe)) for _ in range(2)] == [4, 4]


def test_batches_after_an_iterable_are_the_same_under_all_workers(
    kind: Kind,
) -> None:
    def digests(kind: Kind) -> list[str]:
        pipe = ps.Pipeline.from_dataset(Counting(50)).map(augment, **kind)
        with pipe.filter(uneven, **kind).batch(4) as pipe:
            return [digest(pipe), digest(pipe)]

    assert digests(kind) == digests(KINDS["inline"])


def test_take_ends_an_iterable_early() -> None:
    with ps.Pipeline.from_dataset(Counting(10**9)).take(20).batch(8) as pipe:
        assert [list(indices(pipe)) for _ in range(2)] == [batched([*range(20)], 8)] * 2


def test_a_loop_over_an_iterable_may_be_left_and_restarted() -> None:
    with ps.Pipeline.from_dataset(Counting(30)).batch(8) as pipe:
        for _ in pipe:
            break
        assert list(indices(pipe)) == batched([*range(30)], 8)


def test_an_iterable_is_closed_when_its_loop_is_left() -> None:
    events: list[str] = []

    class Watched:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(10**6)
            finally:
                events.append("closed")

    pipe = ps.Pipeline.from_dataset(Watched()).batch(8)
    for _ in pipe:
        break
    pipe.close()
    assert events == ["closed"]


def test_an_empty_iterable_gives_empty_epochs() -> None:
    with ps.Pipeline.from_dataset(Counting(0)).batch(8) as pipe:
        assert [list(pipe), list(pipe)] == [[], []]


@pytest.mark.parametrize("stage", ["shuffle", "repeat", "select"])
def test_a_stage_that_needs_an_index_is_refused_after_an_iterable(stage: str) -> None:
    pipe = ps.Pipeline.from_dataset(Counting(10))
    arguments: dict[str, tuple[Any, ...]] = {"repeat": (2,), "select": ([1],)}
    with pytest.raises(ps.SpecError, match=f"{stage}.*needs samples with an index"):
        getattr(pipe, stage)(*arguments.get(stage, ()))
