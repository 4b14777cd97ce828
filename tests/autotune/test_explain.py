"""Verdict, bottleneck, cause and advice, from one window."""

import json
from dataclasses import replace

from penstock.autotune.explain import Explanation, evidence, explain
from penstock.autotune.trial import Decision
from penstock.cache.statistics import CacheStatistics, TierStatistics
from penstock.engine.observe.observation import (
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


def waiting(share: float) -> Observation:
    trainer = TrainerObservation(steps=10, rows=640, wait_s=share, gap_s=1 - share)
    return replace(starved(), trainer=trainer)


def test_the_verdict_follows_the_exposed_wait() -> None:
    verdicts = [
        explain(waiting(share), ROOMY).verdict for share in (0.11, 0.09, 0.04, 0.02)
    ]
    assert verdicts == ["input-bound", "balanced", "balanced", "not input-bound"]


def test_a_reader_that_blocks_is_the_bottleneck_with_the_workers_it_needs() -> None:
    explanation = explain(starved(), ROOMY)
    assert explanation.bottleneck == READ
    assert explanation.cause == (
        "waiting reads (I/O or locks): Folder(ID:0) is blocked for 15.31 of 15.62 ms a"
        " sample; too few workers: 1, this trainer needs 10.0, so decode has no input"
        " 96% of the time."
    )
    more = "num_parallel_workers=3  # for Folder(ID:0): at most 3.0x faster"
    assert more in explanation.advice


def test_nothing_is_blamed_in_a_window_too_short_to_see_the_run_queue() -> None:
    explanation = explain(replace(starved(), window_s=0.3), ROOMY)
    assert explanation.cause.startswith(
        "waiting (a longer run shows for what): Folder(ID:0) is blocked for 15.31 of"
    )


def test_a_decoder_that_computes_is_the_bottleneck_because_of_its_cpu() -> None:
    explanation = explain(computing(), ROOMY)
    assert explanation.bottleneck == DECODE
    assert explanation.cause.startswith(
        "CPU: decode computes 1.96 ms a sample; too few"
    )
    assert any("decode_random_resized_crop" in step for step in explanation.advice)


def test_used_up_cores_are_named_where_the_budget_is_known() -> None:
    explanation = explain(computing(), Budget(1.0, 10**9, whole_machine=True))
    assert (
        explanation.cause == "CPU: 1.0 of 1 cores are busy loading, most of it decode."
    )
    explanation = explain(computing(), Budget(1.0, 10**9))
    assert "; other pipelines have the rest, or ps.set_cpu_budget" in explanation.cause


def test_a_memory_budget_that_holds_the_reader_back_is_the_cause() -> None:
    window = starved()
    short = replace(window.segments[0], run_s=0.1, wait_credit_s=0.9, wait_memory_s=0.9)
    window = replace(window, segments=(short, window.segments[1]), held_bytes=60 << 20)
    explanation = explain(window, Budget(100.0, 60 << 20))
    assert explanation.cause == (
        "the memory budget: workers are held back although no batch is ready (60 MiB"
        " held of 60 MiB)."
    )
    assert explanation.advice == (
        'ps.set_memory_budget("120MiB")  # at most 2.0x faster',
    )


def test_a_trainer_that_does_not_wait_is_its_own_bottleneck() -> None:
    explanation = explain(at_ease(), ROOMY)
    assert explanation.verdict == "not input-bound"
    assert explanation.bottleneck is None
    assert explanation.cause.startswith("the trainer: loading keeps up")
    assert explanation.advice == ()


def test_headspace_is_the_step_divided_by_the_step_without_its_wait() -> None:
    assert round(explain(waiting(0.75), ROOMY).headspace, 6) == 4.0
    assert explain(waiting(1.0), ROOMY).headspace == 1000.0


def test_the_line_blames_the_wait_on_the_segments_that_cause_it() -> None:
    assert explain(starved(), ROOMY).line == (
        "input-bound: waiting 90% of each step (Folder(ID:0) 90%); at most 10.0x faster"
        " if loading were free."
    )


def test_without_a_step_there_is_no_verdict_yet() -> None:
    window = at_ease()
    nothing = replace(window, trainer=TrainerObservation(0, 0, 0.0, 0.0))
    explanation = explain(nothing, ROOMY)
    assert explanation.cause.startswith("nothing is known yet")
    assert "no verdict yet" in str(explanation)


def test_a_trainer_that_has_waited_for_its_first_batch_is_input_bound() -> None:
    nothing = replace(starved(), trainer=TrainerObservation(0, 0, 0.0, 0.0))
    explanation = explain(nothing, ROOMY)
    assert (explanation.verdict, explanation.bottleneck) == ("input-bound", READ)
    assert explanation.line == "no verdict yet: no step has finished."


def test_the_picture_marks_the_bottleneck_and_ends_with_what_to_do() -> None:
    lines = str(explain(starved(), ROOMY)).splitlines()
    assert [line[0] for line in lines[1:3]] == [">", " "]
    assert lines[3].strip() == "trainer: 64 samples/s, 1000.0 ms a step"
    assert lines[-1].startswith("try: ")


def test_the_dict_is_json_with_one_entry_a_segment() -> None:
    row = json.loads(json.dumps(explain(starved(), ROOMY).to_dict()))
    assert row["verdict"] == "input-bound"
    assert [stage["name"] for stage in row["stages"]] == [READ, DECODE]
    assert row["stages"][0]["items_per_s"] == 64
    assert row["stages"][0]["num_parallel_workers"] == 1
    assert row["stages"][0]["prefetch_size"] == 2
    assert row["stages"][0]["executor"] == "thread"
    assert row["trainer"]["wait_s"] == 0.9


def test_the_memory_budget_is_not_blamed_while_the_outbox_is_full() -> None:
    window = starved()
    last = replace(window.segments[1], output=connector(0.6))
    reader = replace(window.segments[0], run_s=0.1, wait_credit_s=0.9)
    explanation = explain(replace(window, segments=(reader, last)), ROOMY)
    assert not explanation.cause.startswith("the memory budget")


def test_collating_is_the_cause_where_no_other_part_takes_longer() -> None:
    parts = [PartObservation(name, 0.0, 0.0, None) for name in (DECODE, "Batch(ID:2)")]

    def cause(read_s: float, collate_s: float) -> str:
        decode, collate = parts
        timed_parts = (
            replace(decode, run_s_per_row=read_s, cpu_s_per_row=read_s),
            replace(collate, run_s_per_row=collate_s),
        )
        last = replace(computing().segments[1], parts=timed_parts)
        window = replace(computing(), segments=(computing().segments[0], last))
        return explain(window, ROOMY).cause

    assert cause(0.0006, 0.0014).startswith(
        "collate: putting samples together takes 1.40 of 2.00 ms a sample; too few"
    )
    assert cause(0.0014, 0.0006).startswith("CPU: decode computes")


def test_turns_at_the_gil_are_reported_with_what_helps() -> None:
    decode = replace(computing().segments[1], num_parallel_workers=4, cpu_s=0.3)
    window = replace(computing(), segments=(computing().segments[0], decode))
    explanation = explain(replace(window, gil_held=0.93), ROOMY)
    assert explanation.cause == (
        "the GIL: held 93% of the time, so the 4 threads of decode take turns."
    )
    assert explanation.advice == (
        f'executor="process"  # for {DECODE}, or "auto": at most 4.0x faster',
    )
    assert "the GIL" not in explain(replace(window, gil_held=0.3), ROOMY).cause
    one = replace(decode, num_parallel_workers=1)
    alone = replace(window, segments=(window.segments[0], one), gil_held=0.93)
    assert "the GIL" not in explain(alone, ROOMY).cause


def test_waiting_for_cores_that_others_use_is_no_reason_for_more_workers() -> None:
    decode = replace(computing().segments[1], cpu_s=0.5, run_queue_s=0.45)
    window = replace(computing(), segments=(computing().segments[0], decode))
    explanation = explain(window, Budget(2.0, 10**9))
    assert explanation.cause == (
        "CPU: decode waits for a core for 0.90 of 2.00 ms a sample, while others use"
        " them."
    )
    assert not any("num_parallel_workers" in step for step in explanation.advice)
    assert explanation.stages[1].queued == 0.45


def test_threads_that_a_function_starts_are_told_from_those_of_others() -> None:
    decode = replace(
        computing().segments[1],
        executor="process",
        cpu_s=0.5,
        run_queue_s=0.45,
        threads_cpu_s=1.9,
    )
    window = replace(computing(), segments=(computing().segments[0], decode))
    explanation = explain(window, Budget(2.0, 10**9))
    assert explanation.cause == (
        "CPU: decode waits for a core for 0.90 of 2.00 ms a sample, while threads that"
        " it starts itself use them, 3.8 times as much as the workers;"
        " let it start fewer, as torch.set_num_threads(1) does."
    )
    assert explanation.advice == ()
    alone = replace(decode, threads_cpu_s=0.52)
    asleep = replace(decode, cpu_s=0.01, threads_cpu_s=0.02)
    for segment in (alone, asleep):
        window = replace(window, segments=(window.segments[0], segment))
        assert "while others use" in explain(window, Budget(2.0, 10**9)).cause


def test_a_cache_without_room_is_named_with_the_room_that_it_needs() -> None:
    def told(name: str, free: int, refused: int = 900) -> Explanation:
        tier = TierStatistics("RAM", 0, 100, 1 << 20, 1 << 20, 0, 0.0)
        cache = CacheStatistics(
            misses=1000,
            refused=refused,
            stored=100,
            stored_bytes=100 << 14,
            name=name,
            tiers=(tier,),
        )
        part = PartObservation(READ, 0.0156, 16384.0, 4000)
        reader = replace(starved().segments[0], parts=(part,))
        window = replace(
            starved(), segments=(reader, starved().segments[1]), caches=(cache,)
        )
        return explain(window, Budget(8.0, 10**9, free_bytes=free))

    explanation = told("Cache(ID:1)", 10**9)
    assert explanation.cause.endswith(
        "; Cache(ID:1) finds 0% of the samples, and has no room for the others."
    )
    assert explanation.advice == (
        'ram="70MiB"  # for Cache(ID:1), once full: at most 10.0x faster',
    )
    little = told("Cache(ID:1)", 10**8)
    assert "no room" in little.cause
    assert not any("ram=" in step for step in little.advice)
    assert "no room" not in told("Cache(ID:1)", 10**9, refused=20).cause


def test_no_more_workers_are_advised_where_all_cores_are_busy() -> None:
    advice = explain(computing(), Budget(1.0, 10**9)).advice
    assert advice
    assert not any("num_parallel_workers" in step for step in advice)


def grown(operator: str, knob: str) -> Decision:
    return Decision(operator, knob, 1, 2, "law", "as seen", 2.0)  # type: ignore[arg-type]


def test_the_evidence_for_a_decision_is_given_in_the_words_of_mindspore() -> None:
    window = starved()
    reader = window.segments[0]
    short, slow = evidence(window, grown(reader.name, "num_parallel_workers"))
    assert short == (
        f"Op ({reader.name}) is the bottleneck: blocked 15.31 of 15.62 ms a sample,"
        " needs 10.0 workers for this trainer, has 1."
    )
    assert slow == (
        f"Op ({reader.name}) is slow, input connector utilization=1.000000, output"
        " connector utilization=0.000000, diff=1.000000 > 0.35 threshold."
    )
    _, low = evidence(window, grown(reader.queue_name, "prefetch_size"))
    assert low == (
        f"Op ({reader.queue_name}) getting low average worker cpu utilization"
        " 2.00% < 35% threshold."
    )


def test_nothing_is_said_that_is_not_true_of_the_window() -> None:
    decode = starved().segments[1]  # nothing waits before or behind it
    assert list(evidence(starved(), grown(decode.name, "num_parallel_workers"))) == []
    decision = Decision(decode.name, "num_parallel_workers", 2, 1, "release", "", 1.0)
    assert list(evidence(starved(), decision)) == []
