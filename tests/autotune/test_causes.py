"""Each cause, from one window, and advice in the words of the user's interface."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.autotune.explain import Explanation, explain
from penstock.cache.statistics import CacheStatistics
from penstock.engine.observe.observation import (
    ContentionObservation,
    Move,
    Observation,
    PartObservation,
    TrainerObservation,
)
from penstock.system.resources import Budget
from support.windows import (
    DECODE,
    READ,
    ROOMY,
    at_ease,
    computing,
    connector,
    starved,
)

GIB = 1 << 30
FOUR = Budget(4.0, 10**9)


def with_last(window: Observation, **changes: Any) -> Observation:
    """Return the window with its last segment replaced."""
    *before, last = window.segments
    return replace(window, segments=(*before, replace(last, **changes)))


def parts(*, read_s: float, decode_s: float) -> tuple[PartObservation, ...]:
    """Return a read that waits and a decoder that computes, fused into one segment."""
    return (
        PartObservation(READ, read_s, 0.0, None),
        PartObservation(DECODE, decode_s, 0.0, None, decode_s),
    )


def test_the_longest_of_fused_operations_is_blamed() -> None:
    reads = with_last(computing(), parts=parts(read_s=0.003, decode_s=0.002))
    explanation = explain(reads, ROOMY)
    assert explanation.bottleneck == READ
    assert explanation.cause.startswith(
        "waiting reads (I/O or locks): Folder(ID:0) is blocked for 3.00 of 3.00 ms"
    )
    decodes = with_last(computing(), parts=parts(read_s=0.002, decode_s=0.003))
    assert explain(decodes, ROOMY).bottleneck == DECODE
    assert explain(decodes, ROOMY).cause.startswith(
        "CPU: decode computes 3.00 ms a sample"
    )
    assert "(decode 54%, Folder(ID:0) 36%)" in explain(decodes, ROOMY).line


@pytest.mark.parametrize(
    ("run_us", "cpu_us", "cause"),
    [
        (50.0, 30.0, "the GIL: decode computes 0.03 of 0.05 ms a sample"),
        (50.0, 5.0, "waiting reads"),  # little of it is computing
        (500.0, 300.0, "waiting reads"),  # for longer than anybody holds the GIL
    ],
)
def test_threads_that_are_blocked_for_microseconds_wait_for_the_gil(
    run_us: float, cpu_us: float, cause: str
) -> None:
    part = PartObservation(DECODE, run_us / 1e6, 0.0, None, cpu_us / 1e6)
    explanation = explain(with_last(computing(), parts=(part,)), ROOMY)
    assert explanation.bottleneck == DECODE
    assert explanation.cause.startswith(cause)
    more_workers = any("num_parallel_workers" in line for line in explanation.advice)
    assert more_workers == ("GIL" not in cause)  # no number of threads gets more of it


def test_processes_that_are_blocked_for_microseconds_wait_for_a_core() -> None:
    for run_us, cpu_us, cause in (
        (23, 17, "CPU"),
        (23, 5, "waiting"),
        (300, 200, "wa"),
    ):
        part = PartObservation(DECODE, run_us / 1e6, 0.0, None, cpu_us / 1e6)
        window = with_last(computing(), parts=(part,), executor="process")
        assert explain(window, ROOMY).cause.startswith(cause)


SLOWS = (
    "loading slows the trainer: its own part of a step takes 25 ms while batches are"
    " loaded beside it, 10 ms while none are"
)


def slowed() -> Observation:
    """Return a window of a trainer that never waits, and is slowed down."""
    contention = ContentionObservation(0.025, 0.010, certain=True)
    trainer = TrainerObservation(100, 6400, 0.0, 2.5)
    return replace(at_ease(), contention=contention, trainer=trainer)


def test_loading_that_slows_the_trainer_costs_as_much_as_a_wait() -> None:
    explanation = explain(slowed(), FOUR)
    assert (explanation.verdict, explanation.slowdown) == ("input-bound", 2.5)
    assert explanation.headspace == pytest.approx(2.5)
    assert (
        ", its own part +150% beside loading; at most 2.5x faster" in explanation.line
    )
    assert (
        explanation.cause == f"{SLOWS}. The 16 workers are threads, which take the GIL."
    )
    assert explanation.advice
    waits = replace(slowed(), trainer=TrainerObservation(100, 6400, 0.5, 2.5))
    assert explain(waits, FOUR).headspace == pytest.approx(3.0)
    assert explain(waits, FOUR).cause.startswith(SLOWS)


def test_what_is_not_certain_is_not_said() -> None:
    window = slowed()
    assert window.contention is not None
    doubtful = replace(window, contention=replace(window.contention, certain=False))
    explanation = explain(doubtful, FOUR)
    assert (explanation.verdict, explanation.slowdown) == ("not input-bound", 1.0)
    assert explanation.cause.startswith("the trainer: loading keeps up")


def test_the_cause_of_a_slow_trainer_is_named() -> None:
    window = replace(slowed(), process_cpu_s=4.0 * slowed().window_s, torch_threads=2)
    assert explain(window, FOUR, tuned=True).cause == (
        f"{SLOWS}. They share the cores: 4.0 of 4 are busy, with 16 workers beside 2"
        " threads of torch."
    )
    own = replace(slowed().trainer, queued_s=1.1)
    assert explain(replace(slowed(), trainer=own), FOUR).cause == (
        f"{SLOWS}. It waits for a core for 44% of that, as its process, with 16"
        " workers, has 0.0 of 4, with others beside it."
    )
    away = tuple(replace(s, executor="process") for s in slowed().segments)
    explanation = explain(replace(slowed(), segments=away), FOUR)
    assert (
        explanation.cause
        == f"{SLOWS}. They share the memory and the caches of the cores."
    )
    assert explanation.advice == ()


def test_a_wait_with_batches_ready_is_contention() -> None:
    trainer = TrainerObservation(steps=10, rows=640, wait_s=0.2, gap_s=0.8)
    window = replace(at_ease(), trainer=trainer, gil_held=0.9)
    explanation = explain(window, ROOMY)
    assert explanation.cause == (
        "contention: a batch is ready 100% of the time, and the trainer waits 20 ms all"
        " the same, for the GIL, which the loading threads hold."
    )
    assert explanation.advice == (
        (
            f'executor="process"  # for {explanation.bottleneck}, or "auto":'
            " at most 1.2x faster"
        ),
    )
    free = explain(replace(window, gil_held=0.1), ROOMY)
    assert free.cause.endswith("for the hand-over.")
    assert free.advice == ()


def test_most_of_a_wait_that_goes_to_the_device_is_reported_for_the_transfer() -> None:
    trainer = TrainerObservation(10, 640, 0.8, 0.2, copy_s=0.6)
    explanation = explain(replace(computing(), trainer=trainer), ROOMY)
    assert (explanation.bottleneck, explanation.advice) == ("to_device", ())
    assert explanation.cause == (
        "the transfer to the device: it takes 60.00 of the 80.00 ms that each step"
        " waits; the batch itself was ready before."
    )
    little = replace(computing(), trainer=replace(trainer, copy_s=0.3))
    assert explain(little, ROOMY).bottleneck != "to_device"


def test_collating_in_the_trainer_is_reported_for_the_batch_stage() -> None:
    trainer = TrainerObservation(10, 640, 0.9, 0.1, collate_s=0.7)
    window = with_last(replace(computing(), trainer=trainer), queue_name="Batch(ID:2)")
    explanation = explain(window, ROOMY)
    assert (explanation.bottleneck, explanation.advice) == ("Batch(ID:2)", ())
    assert explanation.cause.startswith(
        "collate: putting samples together takes the trainer"
    )


def test_collating_beside_all_other_work_of_the_trainer_may_go_to_workers() -> None:
    read = PartObservation(READ, 0.0002, 0.0, None)
    collate = PartObservation("Batch(ID:2)", 0.0016, 0.0, None, 0.0016)
    changes: Any = {"executor": "inline", "queue_name": "Batch(ID:2)"}
    window = with_last(computing(), parts=(read, collate), **changes)
    explanation = explain(window, ROOMY)
    assert (explanation.bottleneck, explanation.advice) == (
        "Batch(ID:2)",
        ("ps.set_enable_autotune(True)  # at most 10.0x faster",),
    )
    assert explain(window, ROOMY, tuned=True).advice == ()


def test_busy_threads_do_not_hide_what_the_trainer_does_itself() -> None:
    window = starved()
    inline = replace(
        window.segments[0], executor="inline", run_s=0.8, wait_credit_s=0.0
    )
    decode = replace(window.segments[1], run_s=0.85, cpu_s=0.8)
    explanation = explain(replace(window, segments=(inline, decode)), ROOMY)
    assert explanation.bottleneck == READ
    assert "in the trainer's own time" in explanation.cause


# Stragglers are told apart from a lack of bytes


def waiting_for_slow_samples(*, workers: int = 4) -> Observation:
    """Return four workers, most of them at the bound while one sample is late."""
    trainer = TrainerObservation(steps=10, rows=64, wait_s=0.5, gap_s=0.5)
    window = replace(starved(), trainer=trainer)
    last = replace(
        window.segments[1],
        num_parallel_workers=workers,
        worker_s=workers,
        run_s=0.3 * workers,
        wait_input_s=0.0,
        wait_credit_s=0.7 * workers,
        cpu_s=0.0,
        output=connector(0.0),
    )
    return replace(window, segments=(replace(window.segments[0], run_s=0.1), last))


def test_workers_that_wait_at_the_bound_for_slow_samples_are_not_short_of_bytes() -> (
    None
):
    explanation = explain(waiting_for_slow_samples(), ROOMY)
    assert explanation.cause == (
        "uneven samples: the workers of decode are held back 70% of the time, as the 2"
        " batches that may be prefetched wait for their slowest samples."
    )
    assert explanation.advice == (
        "ps.set_enable_autotune(True)  # at most 2.0x faster",
        "ps.set_prefetch_size(4)  # at most 2.0x faster",
    )
    assert explain(waiting_for_slow_samples(), ROOMY, tuned=True).advice == ()


def test_prefetching_stays_within_the_memory_budget() -> None:
    window = replace(waiting_for_slow_samples(), batch_bytes=GIB, held_bytes=2 * GIB)
    tight, roomy = Budget(4.0, 2 * GIB), Budget(4.0, 5 * GIB)
    twice = ('ps.set_memory_budget("4GiB")  # at most 2.0x faster',)
    assert explain(window, tight).advice == twice
    assert explain(window, replace(tight, free_bytes=GIB)).advice == ()
    assert "ps.set_prefetch_size(4)" in str(explain(window, roomy))


def test_as_many_batches_are_prefetched_as_bridge_the_longest_samples() -> None:
    window = waiting_for_slow_samples()
    for lease_s, prefetch in ((0.01, 4), (0.2, 5), (0.5, 11), (9.0, 16)):
        slow = with_last(window, settled_s=0.3, settled_s2=0.3 * lease_s)
        assert f"ps.set_prefetch_size({prefetch})" in explain(slow, ROOMY).advice[1]
    slow = replace(slow, batch_bytes=GIB, held_bytes=2 * GIB)
    # Where there is no room for as many, it is as many as fit, nearly.
    assert "ps.set_prefetch_size(5)" in explain(slow, Budget(4.0, 5 * GIB)).advice[1]


def test_leases_that_outlast_the_queue_need_a_longer_one_beside_workers() -> None:
    window, prefetch = with_last(computing(), cpu_s=0.0), "ps.set_prefetch_size"
    short = with_last(window, settled_s=1.0, settled_s2=0.02)
    assert not any(prefetch in line for line in explain(short, ROOMY).advice)
    long = with_last(window, settled_s=1.0, settled_s2=0.4)
    assert any(prefetch in line for line in explain(long, ROOMY).advice)


def test_threads_that_wait_for_one_lock_take_turns() -> None:
    changes: Any = {"num_parallel_workers": 8, "run_s": 8.0, "cpu_s": 0.1}
    window = with_last(computing(), worker_s=8.0, looked=80, lined=70, **changes)
    explanation = explain(window, ROOMY)
    assert explanation.cause == (
        "a lock: the 8 threads of decode wait for one lock 88% of their time, so they"
        " take turns."
    )
    assert explanation.advice == (
        'executor="process"  # for Map(ID:1) decode, or "auto": at most 8.0x faster',
    )
    assert not explain(window, ROOMY, tuned=True).advice  # the tuner tries that
    for few in ({"lined": 30}, {"looked": 8, "lined": 7}, {"executor": "process"}):
        assert explain(with_last(window, **few), ROOMY).cause.startswith("waiting")
    short = with_last(window, rows=100_000)  # they meet at the engine's own lock
    assert "a lock" not in explain(short, ROOMY).cause


def test_the_memory_budget_may_have_no_work_for_more_workers() -> None:
    changes: Any = {"num_parallel_workers": 60, "worker_s": 60.0, "run_s": 60.0}
    window = with_last(computing(), cpu_s=0.1, **changes)
    window = replace(window, batch_bytes=GIB, held_bytes=GIB)
    explanation = explain(window, Budget(100.0, GIB, free_bytes=64 * GIB))
    assert explanation.cause == (
        "the memory budget: it has room for only one batch (1.0 GiB of 1.0 GiB), so the"
        " next one is not made before the trainer has taken it."
    )
    trainer = replace(window.trainer, rows=240)  # batches of 30
    explanation = explain(
        replace(window, trainer=trainer, held_bytes=2 * GIB),
        Budget(100.0, 2 * GIB, free_bytes=64 * GIB),
    )
    assert explanation.cause == (
        "the memory budget: it has room for 2 batches (2.0 GiB held of 2.0 GiB), whose"
        " samples are no work for more than 60 workers."
    )
    assert explanation.advice == (
        'ps.set_memory_budget("4GiB")  # at most 2.0x faster',
    )


def short_of_bytes(**changes: Any) -> Observation:
    window = starved()
    read = replace(window.segments[0], run_s=0.1, wait_credit_s=0.9, wait_memory_s=0.8)
    return replace(window, segments=(read, window.segments[1]), **changes)


def test_batches_too_large_for_the_memory_budget_are_reported_as_such() -> None:
    window = short_of_bytes(held_bytes=3 * GIB // 2, batch_bytes=3 * GIB // 2)
    explanation = explain(window, Budget(4.0, 2 * GIB, free_bytes=64 * GIB))
    assert explanation.cause == (
        "the memory budget: it has room for only one batch (1.5 GiB of 2.0 GiB), so the"
        " next one is not made before the trainer has taken it."
    )
    assert explanation.advice == (
        'ps.set_memory_budget("4GiB")  # at most 2.0x faster',
    )


@pytest.mark.parametrize("free", [GIB, 3 * GIB, 5 * GIB, 64 * GIB])
def test_advice_on_bytes_never_lowers_the_budget_or_exceeds_memory(
    free: int,
) -> None:
    window = short_of_bytes(held_bytes=2 * GIB)
    advice = explain(window, Budget(4.0, 2 * GIB, free_bytes=free)).advice
    lines = {
        5 * GIB: ('ps.set_memory_budget("2560MiB")  # at most 1.3x faster',),
        64 * GIB: ('ps.set_memory_budget("4GiB")  # at most 2.0x faster',),
    }
    assert advice == lines.get(free, ())


# Advice


def as_code(line: str) -> str:
    """Append a method to a pipeline, or put an argument into a call."""
    if line.startswith("."):
        return f"pipe{line}"
    alone = ("ps.", "torch.", "DataLoader(")
    return line if line.startswith(alone) else f"stage({line}\n)"


GAIN = re.compile(r"(?:# |: )at most (?!1\.0)[0-9.]+x faster$")


def told(window: Observation, face: Any) -> Explanation:
    return explain(replace(window, face=face), ROOMY)


@pytest.mark.parametrize("face", ["Pipeline", "DataLoader"])
@pytest.mark.parametrize(
    "seen",
    [
        starved(),
        computing(),
        replace(computing(), gil_held=0.9),
        waiting_for_slow_samples(),
        short_of_bytes(),
    ],
    ids=["read", "decode", "GIL", "stragglers", "memory"],
)
def test_advice_can_be_pasted_and_uses_the_words_of_its_interface(
    face: Any, seen: Observation
) -> None:
    advice = told(with_last(seen, num_parallel_workers=2), face).advice
    for line in advice:
        ast.parse(as_code(line))
        assert GAIN.search(line)
    words = ("num_parallel_workers", "executor=", ".map(", "set_prefetch_size")
    if face == "DataLoader":
        assert not any(word in line for word in words for line in advice)


def test_a_loader_is_advised_on_its_own_arguments() -> None:
    more = told(starved(), "DataLoader").advice[1]
    assert more == "DataLoader(num_workers=3)  # at most 3.0x faster"
    slow = told(waiting_for_slow_samples(), "DataLoader").advice
    assert slow[1] == "DataLoader(prefetch_factor=2)  # at most 2.0x faster"
    turns = with_last(replace(computing(), gil_held=0.9), num_parallel_workers=4)
    (apart,) = told(turns, "DataLoader").advice
    assert apart == "DataLoader(thread_safe=False)  # at most 4.0x faster"


def test_a_computing_stage_is_not_advised_more_workers_than_cores() -> None:
    window = with_last(computing(), num_parallel_workers=2)
    line = "num_parallel_workers={}  # for {}: at most {}x faster"
    assert line.format(4, DECODE, "2.0") in explain(window, FOUR).advice
    few = explain(computing(), FOUR).advice
    assert line.format(3, DECODE, "3.0") in few  # three times as many
    assert line.format(3, READ, "3.0") in explain(starved(), FOUR).advice


def test_advice_never_breaks_a_bound_and_always_suits_the_data() -> None:
    window = starved()
    iterable = replace(window.segments[0], iterable=True)
    explanation = explain(
        replace(window, segments=(iterable, window.segments[1])), ROOMY
    )
    assert "one worker reads an iterable, in order (keep it cheap" in explanation.cause
    assert explanation.advice == ()
    bounded = replace(window.segments[0], max_workers=1)
    explanation = explain(
        replace(window, segments=(bounded, window.segments[1])), ROOMY
    )
    assert "it is limited to 1 worker, and this trainer needs 10.0" in explanation.cause
    assert explanation.advice == ()


def test_processes_are_not_advised_where_they_were_tried_or_no_core_is_free() -> None:
    turns = with_last(replace(computing(), gil_held=0.9), num_parallel_workers=4)
    assert explain(turns, ROOMY).advice
    assert not explain(turns, ROOMY, tuned=True).advice  # the tuner tries them
    back = Move(DECODE, "process", "thread", "moved", "slower", time_s=0.5)
    assert explain(with_last(turns, moves=(back,)), ROOMY, tuned=True).advice == ()
    assert explain(turns, Budget(1.0, 10**9)).advice == ()


def test_one_pass_over_images_is_advised_for_folders_of_images_alone() -> None:
    assert any("ps.image" in line for line in explain(computing(), ROOMY).advice)
    sounds = replace(computing().segments[0], name="Dataset(ID:0) Sounds")
    window = replace(computing(), segments=(sounds, computing().segments[1]))
    assert not any("ps.image" in line for line in explain(window, ROOMY).advice)


@pytest.mark.parametrize("placing_cpu_s", [0.000_01, 0.005])
def test_threads_at_the_gil_are_told_apart_by_what_they_compute(
    placing_cpu_s: float,
) -> None:
    operations = (
        PartObservation(READ, 0.010, 0.0, None, 0.004),
        PartObservation("Batch(ID:2)", 0.015, 0.0, None, placing_cpu_s),
    )
    turns = with_last(computing(), parts=operations, num_parallel_workers=4)
    explanation = explain(replace(turns, gil_held=0.95), ROOMY)
    assert explanation.bottleneck == READ
    assert explanation.cause.startswith("the GIL: held 95% of the time")
    assert explain(turns, ROOMY).bottleneck == "Batch(ID:2)"


def test_a_wait_for_first_batches_is_not_blamed_on_uneven_samples() -> None:
    window = waiting_for_slow_samples()
    short = replace(window, trainer=replace(window.trainer, first_s=0.4))
    assert explain(short, ROOMY).cause.startswith(
        "the beginning of epochs: 80% of the wait"
    )
    alone = replace(window, trainer=replace(window.trainer, first_s=0.2))
    assert explain(alone, ROOMY).cause.startswith("uneven samples")


def test_workers_held_back_while_others_begin_are_not_blamed_on_uneven_samples() -> (
    None
):
    window = waiting_for_slow_samples()
    workers = window.segments[-1].num_parallel_workers
    half = with_last(window, wait_credit_s=0.35 * workers)
    assert explain(half, ROOMY).cause.startswith("uneven samples")
    beginning = replace(half, trainer=replace(half.trainer, first_s=0.2))
    assert "uneven" not in explain(beginning, ROOMY).cause


def test_nothing_is_promised_for_the_first_batches_of_short_epochs() -> None:
    """Workers that stay make them no sooner: a loader draws its order as it begins."""
    window = waiting_for_slow_samples()
    trainer = replace(window.trainer, first_s=0.4, loops=4)
    short = explain(replace(window, trainer=trainer, face="DataLoader"), ROOMY)
    assert short.cause.startswith("the beginning of epochs")
    assert short.advice == ()


# What advice promises


def gain(window: Observation, start: str, budget: Budget = ROOMY) -> float:
    """Return the gain that is promised for the line with this start; 1.0 if none is."""
    lines = [line for line in explain(window, budget).advice if line.startswith(start)]
    return float(lines[0].split()[-2][:-1]) if lines else 1.0


def test_no_more_is_promised_than_the_trainer_can_take() -> None:
    """Three times the workers would do three times as much; it cannot take that."""
    for wait_s, times in ((0.9, 3.0), (0.5, 2.0), (0.3, 1.4)):
        trainer = replace(starved().trainer, wait_s=wait_s, gap_s=1.0 - wait_s)
        window = replace(starved(), trainer=trainer)
        assert gain(window, "num_parallel_workers") == times


def test_no_more_is_promised_than_the_cores_can_do() -> None:
    for cores, times in ((16.0, 3.0), (2.5, 2.5), (1.5, 1.5)):
        assert (
            gain(computing(), "num_parallel_workers", Budget(cores, 1 << 40)) == times
        )


def test_no_more_is_promised_than_the_other_segments_can_do() -> None:
    """They keep their workers, unless the tuner is asked to look after all."""
    read, decode = starved().segments
    for busy, times in ((0.04, 3.0), (0.5, 2.0), (0.99, 1.0)):
        window = replace(starved(), segments=(read, replace(decode, run_s=busy)))
        assert gain(window, "num_parallel_workers") == times
        assert gain(window, "ps.set_enable_autotune") == 10.0


def test_no_more_threads_are_advised_where_one_has_the_gil() -> None:
    for gil_held, times in ((0.3, 3.0), (0.6, 1.7), (0.97, 1.0)):
        window = replace(computing(), gil_held=gil_held)
        assert gain(window, "num_parallel_workers") == times


def test_nothing_is_advised_that_brings_next_to_nothing() -> None:
    trainer = replace(starved().trainer, wait_s=0.04, gap_s=0.96)
    explanation = explain(replace(starved(), trainer=trainer), ROOMY)
    assert (explanation.verdict, explanation.advice) == ("balanced", ())


def test_a_loop_that_does_nothing_needs_no_number_of_workers() -> None:
    """It would be a large one, and say nothing: no trainer waits there."""
    trainer = replace(starved().trainer, gap_s=0.002, steps=8, rows=64)
    explanation = explain(replace(starved(), trainer=trainer), ROOMY)
    assert "; 1 worker, and this trainer takes all it can get" in explanation.cause
    assert "num_parallel_workers=3  # for Folder(ID:0): at most 3.0x" in str(
        explanation
    )
    trains = replace(starved(), trainer=replace(trainer, gap_s=0.01))
    assert "this trainer needs about 100" in explain(trains, ROOMY).cause


# What a cache takes


def test_a_cache_that_takes_longer_than_what_it_keeps_is_the_cause() -> None:
    """A sample takes its stage 15.6 ms, though it is made in 2 of these."""
    part = PartObservation(READ, 0.0156, 16384.0, 4000)
    read = replace(starved().segments[0], parts=(part,))
    window = replace(starved(), segments=(read, starved().segments[1]))
    cache = CacheStatistics(misses=1000, compute_ns=2 * 10**9, name="Cache(ID:1)")
    explanation = explain(replace(window, caches=(cache,)), ROOMY)
    assert (explanation.bottleneck, explanation.advice) == ("Cache(ID:1)", ())
    assert explanation.cause == (
        "a cache: Cache(ID:1) takes 13.60 ms a sample to find or keep what is made in"
        " 2.00 ms; without this cache, the pipeline is faster."
    )
    few, slow = replace(cache, misses=99), replace(cache, compute_ns=10**10)
    elsewhere = replace(cache, name="Cache(ID:0)")
    for statistics in (few, slow, elsewhere):
        assert (
            "a cache" not in explain(replace(window, caches=(statistics,)), ROOMY).cause
        )


@pytest.mark.parametrize(("executor", "rows"), [("thread", 1), ("process", 64)])
def test_even_samples_are_not_called_uneven(executor: str, rows: int) -> None:
    """A worker is found at work as long as any takes; a process, at a whole batch."""
    window = with_last(waiting_for_slow_samples(), executor=executor, settled_s=0.3)
    mean_s = rows * 0.3 / 64
    for times, uneven in ((1.1, False), (3.0, True)):
        explanation = explain(with_last(window, settled_s2=0.3 * times * mean_s), ROOMY)
        assert explanation.cause.startswith("uneven samples") == uneven
