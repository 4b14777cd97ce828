"""A segment's work: rows that fail are set aside, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.in_flight import Chunk, Failure, Outcome
from penstock.engine.plan import Context
from penstock.engine.program.program import (
    Filter,
    Map,
    Operation,
    Program,
    Read,
    ReadOn,
)
from penstock.engine.program.randomness import SampleRandom
from penstock.errors import SampleError


def chunk(indices: Sequence[int], first_row: int = 0, epoch: int = 0) -> Chunk:
    array = np.array(indices, np.int64)
    return Chunk(2, first_row, array, array * 0 + epoch, Context(epoch, 2, 64))


def run(*operations: Operation, indices: Sequence[int] = range(4)) -> Outcome:
    """Run operations on a chunk that begins at row 10 of its batch."""
    program = Program(operations)
    return program.run(chunk(indices, 10), None, None, SampleRandom(7))


def read(get: Callable[[int], Any] = int) -> Read:
    return Read("Dataset(ID:0) data", get)


def mapped(function: Callable[..., Any], **wants: bool) -> Map:
    return Map("Map(ID:1) f", 1, function, **wants)


def failing_at(bad: set[int], error: type[BaseException]) -> Callable[[int], int]:
    def function(sample: int) -> int:
        if sample in bad:
            raise error(sample)
        return sample * 2

    return function


@dataclass(slots=True)
class Shelf:
    """Takes rows as a batch's buffer does."""

    rows: dict[int, Any] = field(default_factory=dict)

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        self.rows.update(zip(rows, samples, strict=True))
        return 100 * len(rows)


def test_samples_go_through_the_operations_in_order() -> None:
    outcome = run(read(), mapped(lambda n: n + 1), mapped(lambda n: n * 10))
    assert outcome.outputs == [10, 20, 30, 40]
    assert outcome.offsets is None
    assert (outcome.done, outcome.failures, outcome.dropped) == (4, [], 0)


def test_the_last_segment_puts_its_results_into_the_batch() -> None:
    shelf = Shelf()
    program = Program((read(),), places="Batch(ID:3)")
    outcome = program.run(chunk([5, 6], 10), None, shelf, SampleRandom(0))
    assert shelf.rows == {10: 5, 11: 6}
    assert outcome.outputs is None
    assert outcome.nbytes == 200


@pytest.fixture
def take_ns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Return what turns the program's clocks, which stand still by themselves."""
    now_ns = [0]
    clock = SimpleNamespace(
        perf_counter_ns=lambda: now_ns[0], thread_time_ns=lambda: now_ns[0] // 2
    )
    for module in ("program.program", "core.connector"):
        monkeypatch.setattr(f"penstock.engine.{module}.time", clock)

    def take(nanoseconds: int) -> int:
        now_ns[0] += nanoseconds
        return nanoseconds

    return take


@pytest.mark.parametrize(
    "expected",
    [[(500, 0), (10_000, 5250)], [(500, 250), (200, 100), (10_000, 5350)]],
    ids=["read", "read and mapped"],
)
def test_placing_is_timed_apart_from_making(
    expected: list[tuple[int, int]], take_ns: Callable[[int], int]
) -> None:
    """All CPU time that may be the placing's counts as such: copies do not wait."""

    class SlowShelf(Shelf):
        def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
            take_ns(2000 * len(rows))
            return super().place(rows, samples)

    operations = read(lambda _: take_ns(100)), mapped(lambda _: take_ns(40))
    program = Program(operations[: len(expected) - 1], places="Batch(ID:3)")
    stages = ("Dataset(ID:0) data", "Map(ID:1) f")[: len(expected) - 1]
    assert program.stages == (*stages, "Batch(ID:3)")
    outcome = program.run(chunk(range(5)), None, SlowShelf(), SampleRandom(0))
    assert [part[:2] for part in outcome.parts] == expected
    assert outcome.run_ns == sum(part[0] for part in outcome.parts)


def test_a_later_segment_starts_from_its_inputs() -> None:
    program = Program((mapped(str.upper),))
    outcome = program.run(chunk([5, 6]), ["a", "b"], None, SampleRandom(0))
    assert outcome.outputs == ["A", "B"]
    assert outcome.nbytes == 2


@given(st.sets(st.integers(0, 7)), st.integers(1, 8))
def test_rows_that_raise_are_set_aside_wherever_they_are(
    bad: set[int], rows: int
) -> None:
    calls: list[int] = []

    def function(sample: int) -> int:
        calls.append(sample)
        return failing_at(bad, ValueError)(sample)

    outcome = run(read(), mapped(function), indices=range(rows))
    good = [n for n in range(rows) if n not in bad]
    assert calls == list(range(rows))  # once each
    assert outcome.outputs == [2 * n for n in good]
    assert (outcome.offsets or list(range(rows))) == good or not good
    assert [
        (failure.row, failure.index, failure.stage, failure.error.args)
        for failure in outcome.failures
    ] == [(10 + n, n, "Map(ID:1) f", (n,)) for n in sorted(bad) if n < rows]
    assert outcome.done == rows


@given(
    st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))
)
def test_an_operation_works_on_what_the_one_before_it_leaves(
    unread: set[int], bad: set[int], unwanted: set[int]
) -> None:
    shelf = Shelf()
    program = Program(
        (
            read(lambda n: failing_at(unread, KeyError)(n) // 2),
            Filter("Filter(ID:1) f", lambda n: n not in unwanted),
            mapped(failing_at(bad, ValueError)),
        ),
        places="Batch(ID:3)",
    )
    outcome = program.run(chunk(range(6), 10), None, shelf, SampleRandom(0))
    dropped = unwanted - unread
    failed = unread | (bad - dropped)
    assert shelf.rows == {10 + n: 2 * n for n in set(range(6)) - failed - dropped}
    assert outcome.dropped == len(dropped)
    assert sorted(f.row - 10 for f in outcome.failures) == sorted(failed)
    assert all(f.index == f.row - 10 for f in outcome.failures)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_exceptions_that_end_a_program_are_kept_for_the_trainer(
    error: type[BaseException],
) -> None:
    outcome = run(read(), mapped(failing_at({1}, error)))
    assert outcome.outputs == [0, 4, 6]
    assert type(outcome.failures[0].error) is error


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_stop_iteration_is_an_error_and_ends_nothing(at: int) -> None:
    outcome = run(read(), mapped(failing_at({at}, StopIteration)))
    assert len(outcome.outputs or ()) == 3
    (failure,) = outcome.failures
    assert isinstance(failure.error, SampleError)
    assert failure.row == 10 + at
    assert "Map(ID:1) f raised StopIteration" in str(failure.error)
    assert "must return a sample" in str(failure.error)


def test_none_is_not_a_sample() -> None:
    outcome = run(read(), mapped(lambda n: None if n == 2 else n))
    assert outcome.outputs == [0, 1, 3]
    (failure,) = outcome.failures
    assert (failure.row, failure.index) == (12, 2)
    assert isinstance(failure.error, SampleError)
    assert "returned None, which is not a sample" in str(failure.error)
    assert "is a `return` missing?" in str(failure.error)
    assert "filter()" in str(failure.error)


def test_none_is_found_where_other_rows_have_failed() -> None:
    def function(n: int) -> int | None:
        return None if n == 2 else failing_at({0}, ValueError)(n)

    outcome = run(read(), mapped(function))
    assert outcome.outputs == [2, 6]
    assert [failure.row for failure in outcome.failures] == [10, 12]


def test_samples_whose_comparison_is_not_a_truth_value_pass() -> None:
    outcome = run(read(lambda n: np.full(3, n)), mapped(lambda array: array + 1))
    assert outcome.failures == []
    assert outcome.nbytes == 4 * 3 * 8


def test_a_function_that_asks_for_rng_gets_its_samples_own() -> None:
    def draw(sample: int, *, rng: np.random.Generator) -> tuple[int, int]:
        return sample, int(rng.integers(1 << 62))

    draws = run(read(), mapped(draw, wants_rng=True)).outputs
    assert draws is not None
    own = SampleRandom(7)
    assert draws == [
        (index, int(own.at(0, index, 1).integers(1 << 62))) for index in range(4)
    ]
    later = run(read(), mapped(draw, wants_rng=True), indices=[3, 1]).outputs
    assert later == [draws[3], draws[1]]


def test_randomness_follows_the_sample_when_others_have_failed() -> None:
    def draw(sample: int, *, rng: np.random.Generator) -> float:
        return float(rng.random())

    whole = run(read(), mapped(draw, wants_rng=True)).outputs
    part = run(
        read(failing_at({0, 2}, ValueError)), mapped(draw, wants_rng=True)
    ).outputs
    assert whole is not None
    assert part == [whole[1], whole[3]]


def test_a_function_that_asks_for_ctx_gets_the_context() -> None:
    def look(sample: int, *, ctx: Context) -> tuple[int, int, int | None]:
        return ctx.epoch, ctx.step, ctx.image_size

    outcome = run(read(), mapped(look, wants_ctx=True), indices=[0])
    assert outcome.outputs == [(0, 2, 64)]


def test_a_dataset_that_reads_many_at_once_is_asked_once() -> None:
    requests: list[list[int]] = []

    def get_many(indices: list[int]) -> list[int]:
        requests.append(indices)
        return [-index for index in indices]

    outcome = run(Read("Dataset(ID:0) d", failing_at({9}, ValueError), get_many))
    assert requests == [[0, 1, 2, 3]]
    assert all(type(index) is int for index in requests[0])
    assert outcome.outputs == [0, -1, -2, -3]


@pytest.mark.parametrize("answer", [ValueError("all or nothing"), [1, 2]], ids=repr)
def test_where_reading_many_fails_each_sample_is_read_by_itself(
    answer: Exception | list[int],
) -> None:
    def get_many(indices: list[int]) -> list[int]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    outcome = run(Read("Dataset(ID:0) d", failing_at({2}, KeyError), get_many))
    assert outcome.outputs == [0, 2, 6]
    (failure,) = outcome.failures
    assert (failure.index, type(failure.error)) == (2, KeyError)


def test_time_is_measured_in_cpu_and_on_the_wall(take_ns: Callable[[int], int]) -> None:
    outcome = run(read(), mapped(lambda n: take_ns(100)))
    assert (outcome.cpu_ns, outcome.run_ns) == (200, 400)


class Stream:
    """An iterable that counts how often it is opened, and may raise in the middle."""

    def __init__(self, length: int, breaks_at: int | None = None) -> None:
        self.length = length
        self.breaks_at = breaks_at
        self.opened = 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        for n in range(self.length):
            if n == self.breaks_at:
                raise OSError(n)
            yield n


def reader(stream: Iterable[int]) -> Callable[..., Outcome]:
    """Return a function that reads `rows` more of an epoch."""
    operation = ReadOn("Dataset(ID:0) stream", stream)
    program = Program((operation,))

    def more(rows: int, epoch: int = 0) -> Outcome:
        part = chunk([0] * rows, epoch=epoch)
        return program.run(part, None, None, SampleRandom(0))

    more.__dict__["operation"] = operation
    return more


def test_an_iterable_is_read_until_it_ends() -> None:
    more = reader(Stream(5))
    first, last, after = more(3), more(3), more(3)
    assert (first.outputs, first.ended, first.dropped) == ([0, 1, 2], False, 0)
    assert (last.outputs, last.ended, last.dropped) == ([3, 4], True, 1)
    assert last.offsets == [0, 1]
    assert (after.outputs, after.ended, after.dropped) == ([], True, 3)


def test_an_iterable_is_opened_once_for_each_epoch() -> None:
    stream = Stream(2)
    more = reader(stream)
    assert [more(3, epoch).outputs for epoch in (0, 1, 1, 2)] == [
        [0, 1],
        [0, 1],
        [],
        [0, 1],
    ]
    assert stream.opened == 3


def test_a_generator_that_raises_ends_its_epoch_with_that_error() -> None:
    more = reader(Stream(9, breaks_at=2))
    outcome = more(5)
    assert outcome.outputs == [0, 1]
    first, last = outcome.failures
    assert (first.row, type(first.error), first.cut_short) == (2, OSError, False)
    assert (last.row, last.error, last.cut_short) == (3, first.error, True)
    assert "yielded nothing more after this error" in last.error.__notes__[-1]
    assert (outcome.ended, outcome.dropped) == (True, 1)


def test_an_epoch_cut_at_the_end_of_a_lease_says_so_in_the_next_lease() -> None:
    more = reader(Stream(9, breaks_at=2))
    (failure,) = more(3).failures
    later = more(3)
    assert [other.error for other in later.failures] == [failure.error]
    assert (later.failures[0].cut_short, later.ended) == (True, True)


class GoingOn:
    """Raises for some samples and goes on, as a connection may; `iter` restarts it."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[int]:
        self.at = -1
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 9:
            raise StopIteration
        if self.at in self.bad:
            raise OSError(self.at)
        return self.at


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("bad", [{0}, {4}, {3, 4, 7}], ids=repr)
def test_an_iterator_that_raised_is_asked_for_the_next_row(
    rows: int, bad: set[int]
) -> None:
    more = reader(GoingOn(bad))
    outputs: list[int] = []
    failed: list[Failure] = []
    while not (outcome := more(rows)).ended:
        assert outcome.dropped == 0
        outputs += outcome.outputs or []
        failed += outcome.failures
    outputs += outcome.outputs or []
    failed += outcome.failures
    assert outputs == [n for n in range(9) if n not in bad]
    assert [failure.error.args for failure in failed] == [(n,) for n in sorted(bad)]
    assert not any(failure.cut_short for failure in failed)


def test_the_samples_around_one_that_raised_keep_their_rows() -> None:
    outcome = reader(GoingOn({1}))(4)
    assert (outcome.outputs, outcome.offsets) == ([0, 2, 3], [0, 2, 3])


def test_a_place_counts_all_rows_including_those_that_raised() -> None:
    more = reader(GoingOn({1}))
    more.__dict__["operation"].restart(4)
    assert more(2).outputs == [4, 5]


class Closed:
    def __iter__(self) -> Iterator[int]:
        raise PermissionError


def test_an_iterable_that_cannot_be_opened_fails_with_its_error() -> None:
    first, last = reader(Closed())(3).failures
    assert (first.row, type(first.error), first.cut_short) == (
        0,
        PermissionError,
        False,
    )
    assert last.cut_short


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_an_answer_without_a_truth_value_fails_only_its_row(bad: int) -> None:
    def predicate(n: int) -> Any:
        return np.zeros(2) if n == bad else n % 2 == 0

    outcome = run(read(), Filter("Filter(ID:1) f", predicate))
    (failure,) = outcome.failures
    assert (failure.index, type(failure.error)) == (bad, ValueError)
    assert outcome.outputs == [n for n in (0, 2) if n != bad]
    assert outcome.dropped == 4 - 1 - len(outcome.outputs)


def test_an_iterable_resumes_by_skipping_what_was_delivered() -> None:
    more = reader(Stream(5))
    more(4)
    more.__dict__["operation"].restart(3)
    assert more(9).outputs == [3, 4]
    assert more(9, epoch=1).outputs == [0, 1, 2, 3, 4]
