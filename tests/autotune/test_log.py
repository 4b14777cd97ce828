"""The log: its sentences word for word, its rows, and the file of results."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console
from rich.progress import Progress

from penstock.autotune import phrases
from penstock.autotune.explain import explain
from penstock.autotune.log import (
    EXECUTORS,
    AutotuneLog,
    Saved,
    on_verdict,
    read_saved,
    show_by_default,
)
from penstock.autotune.policies.policy import KnobKey, Situation
from penstock.autotune.trial import Decision, DecisionOutcome, Measure
from penstock.engine.observe.observation import SegmentObservation
from penstock.engine.recipe import Executor
from support.windows import DECODE, READ, ROOMY, situation, starved

DECISION = Decision(
    DECODE, "num_parallel_workers", 2, 4, "slow", "seen", 2.0, {"diff": 0.5}
)
OUTCOME = DecisionOutcome(
    DECISION, kept=True, before=Measure(812, 0.41, 0.2), after=Measure(1450, 0.06, 0.1)
)
LOGGER = logging.getLogger("penstock.autotune")


@contextmanager
def bare_logging() -> Iterator[logging.Logger]:
    """Reset logging to that of a fresh process, where nobody has configured it."""
    root, settings = logging.getLogger(), (LOGGER.handlers[:], LOGGER.level)
    root_handlers = root.handlers[:]
    root.handlers.clear()
    LOGGER.handlers.clear()
    try:
        yield LOGGER
    finally:
        root.handlers[:] = root_handlers
        LOGGER.handlers[:], LOGGER.level = settings


def rows(path: Path, *events: str) -> list[dict[str, object]]:
    entries = map(json.loads, path.read_text().splitlines())
    return [row for row in entries if row["event"] in events]


def test_sentences_are_logged_word_for_word() -> None:
    assert phrases.slow("Map(ID:2) decode", 0.975806, 0.298387, 0.35) == (
        "Op (Map(ID:2) decode) is slow, input connector utilization=0.975806, output"
        " connector utilization=0.298387, diff=0.677419 > 0.35 threshold."
    )
    assert phrases.cpu("Batch(ID:3)", 0.0164, 0.35) == (
        "Op (Batch(ID:3)) getting low average worker cpu utilization 1.64% < 35%"
        " threshold."
    )
    measures: Any = {"rows": 100, "run_s": 0.187, "cpu_s": 0.187}
    decode = SegmentObservation("Map(ID:2) decode", "", "thread", 1, 2, **measures)
    assert phrases.bottleneck(decode, 3.6, computes=True) == (
        "Op (Map(ID:2) decode) is the bottleneck: CPU 1.87 ms a sample, needs 3.6"
        " workers for this trainer, has 1."
    )
    assert phrases.request(DECISION) == (
        f'Added request to change "num_parallel_workers" of Operator: {DECODE}'
        " From old value: [2] to new value: [4]."
    )
    assert phrases.outcome(OUTCOME) == (
        f"{DECODE}: num_parallel_workers 2 -> 4 kept: 812 -> 1450 samples/s, trainer"
        " wait 41% -> 6% of the step."
    )
    assert phrases.released(0.004, 3, 1181116006) == (
        "not input-bound (wait 0.4%): released 3 workers and 1.1 GiB."
    )
    assert phrases.released(0.0, 1, 5) == (
        "not input-bound (wait 0.0%): released 1 worker."
    )


def test_rows_are_written_as_they_come(tmp_path: Path) -> None:
    with AutotuneLog(str(tmp_path / "run"), rank=3) as log:
        log.decision(DECISION, 1.5)
        log.outcome(OUTCOME, 2.5)
        path = tmp_path / "run_3.jsonl"
        decision, outcome = rows(path, "decision", "outcome")
        begin, *sentences = rows(path, "begin", "said")
    assert (begin["rank"], begin["version"]) == (3, 1)
    assert [row["text"] for row in sentences] == [
        "seen",
        phrases.request(DECISION),
        phrases.outcome(OUTCOME),
    ]
    assert (
        decision.items()
        >= {
            "time_s": 1.5,
            "event": "decision",
            "op": DECODE,
            "knob": "num_parallel_workers",
            "old": 2,
            "new": 4,
            "reason": "seen",
            "expected": 2.0,
        }.items()
    )
    assert outcome["event"] == "outcome"
    assert outcome["kept"] is True
    assert outcome["after"] == {"rows_per_s": 1450, "wait_share": 0.06, "step_s": 0.1}


def test_a_situation_survives_its_row() -> None:
    case = Situation(
        starved(), situation(starved()).knobs, situation(starved()).budget, (OUTCOME,)
    )
    assert Situation.from_row(json.loads(json.dumps(case.to_row()))) == case


def test_the_result_lists_each_operators_values(tmp_path: Path) -> None:
    knobs: dict[KnobKey, int] = {
        (READ, "num_parallel_workers"): 5,
        (READ, "prefetch_size"): 2,
    }
    with AutotuneLog(str(tmp_path / "run"), name="train") as log:
        log.outcome(OUTCOME, 1.0)
        log.result(Saved(knobs, {"Folder(ID:0)": "thread"}))
    whole = json.loads((tmp_path / "run_0.json").read_text())
    result = whole["pipelines"]["train"]
    assert result["summary"] == [f"{READ} (num_parallel_workers: 5, prefetch_size: 2)"]
    assert result["knobs"][0] == {
        "op": READ,
        "knob": "num_parallel_workers",
        "value": 5,
    }
    assert "nothing was changed" not in whole["remark"]
    assert whole["version"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run_0.json",
        "run_0.jsonl",
    ]


def test_each_pipeline_is_in_the_files_under_its_own_name(tmp_path: Path) -> None:
    result = Saved({(READ, "prefetch_size"): 2}, {})
    prefix = str(tmp_path / "run")
    with AutotuneLog(prefix, name="train") as train:
        with AutotuneLog(prefix, name="val") as val, AutotuneLog(name="val") as other:
            assert other.name == "val-2"
            val.decision(DECISION, 1.0)
            val.result(result)
        train.result(Saved({(READ, "prefetch_size"): 3}, {}))
    results = read_saved(tmp_path / "run_0.json")
    assert {name: [*result.knobs.values()] for name, result in results.items()} == {
        "val": [2],
        "train": [3],
    }
    (decision,) = rows(tmp_path / "run_0.jsonl", "decision")
    assert decision["pipeline"] == "val"


def test_each_line_names_its_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.autotune")
    with AutotuneLog(name="100% train") as log:
        log.say("seen")
    assert caplog.messages == ["100% train: seen"]


def test_the_result_says_so_where_nothing_was_changed(tmp_path: Path) -> None:
    with AutotuneLog(str(tmp_path / "run")) as log:
        log.result(Saved({}, {}))
    remark = json.loads((tmp_path / "run_0.json").read_text())["remark"]
    assert remark.endswith("nothing was changed.")


def test_a_full_disk_ends_the_files_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with AutotuneLog(str(tmp_path / "missing" / "run")) as log:
        log.decision(DECISION, 1.0)
        log.result(Saved({}, {}))
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    assert not (tmp_path / "missing").exists()


def test_a_listener_that_ends_itself_and_fails_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> None:
        end()
        raise ValueError("of the user")

    end = on_verdict(fails)
    with AutotuneLog(name="train") as log:
        for _ in range(2):
            log.verdict(explain(starved(), ROOMY), 1.0)
        assert not log.in_listener
    assert caplog.text.count("a listener of verdicts failed") == 1


def test_without_a_prefix_there_are_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with AutotuneLog() as log:
        log.decision(DECISION, 1.0)
        log.result(Saved({}, {}))
    assert list(tmp_path.iterdir()) == []


def test_the_log_is_shown_once_where_nobody_configured_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bare_logging() as logger:
        show_by_default(rank=0)
        show_by_default(rank=0)
        AutotuneLog().say("seen")
        assert len(logger.handlers) == 1
    assert capsys.readouterr().err == "[autotune] seen\n"


def test_a_line_appears_above_a_tqdm_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    tqdm.monitor_interval = (
        0  # tqdm's monitor would leave a thread and a semaphore behind
    )
    tqdm.set_lock(threading.RLock())
    with bare_logging():
        show_by_default(rank=0)
        with tqdm(total=10, desc="train", file=sys.stderr) as bar:
            bar.update(5)
            with AutotuneLog(name="train") as log:
                log.say("seen")
            bar.update(5)
    output = capsys.readouterr().err
    cleared, _, behind = output.partition("[autotune] train: seen\n")
    assert cleared.endswith("\r")
    assert "100%" in behind


def test_a_line_appears_above_a_rich_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bare_logging():
        show_by_default(rank=0)
        console = Console(stderr=True, force_terminal=True, width=100)
        with Progress(console=console, auto_refresh=False) as bars:
            task = bars.add_task("train", total=10)
            bars.refresh()
            with AutotuneLog(name="train") as log:
                log.say("seen")
            bars.advance(task, 10)
    output = capsys.readouterr().err
    above, _, behind = output.partition("[autotune] train: seen\n")
    erase_line = "\x1b[2K"
    assert above.endswith(erase_line)
    assert "100%" in behind


def test_logging_is_left_alone_on_other_ranks_and_where_it_is_configured() -> None:
    with bare_logging() as logger:
        show_by_default(rank=1)
        assert logger.handlers == []
        logging.getLogger().addHandler(logging.NullHandler())
        show_by_default(rank=0)
        assert logger.handlers == []


@pytest.mark.parametrize("name", ["penstock", "penstock.autotune"])
def test_a_level_that_the_user_set_stays(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with bare_logging() as logger:
        logger.setLevel(logging.NOTSET)
        logging.getLogger(name).setLevel(logging.WARNING)
        try:
            show_by_default(rank=0)
            AutotuneLog().say("seen")
        finally:
            logging.getLogger(name).setLevel(logging.NOTSET)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(3.57, "3.6"), (19.9, "19.9"), (52.4, "about 52"), (1234.0, "about 1,200")],
)
def test_numbers_are_written_as_a_person_would_say_them(
    number: float, text: str
) -> None:
    assert phrases.count(number) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, "0"), (0.4492, "0.45"), (1.26, "1.3"), (9.96, "10"), (716.4, "716")],
)
def test_a_rate_of_a_few_samples_a_second_keeps_a_tenth(rate: float, text: str) -> None:
    assert phrases.per_s(rate) == text


def test_a_speedup_that_cannot_be_judged_is_not_given_as_a_number() -> None:
    assert phrases.speedup(1.7) == "at most 1.7x faster"
    assert phrases.speedup(1000.0) == "more than 100x faster"


def test_a_result_may_name_every_kind_of_worker_that_a_run_ends_with() -> None:
    assert {*get_args(Executor)} - {"auto"} == EXECUTORS
