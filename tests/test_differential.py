"""Penstock makes of ordinary datasets what torch's loader makes of them.

    python tests/test_differential.py --examples 5000 --resume progress.jsonl
    python tests/test_differential.py --case "Case(face='loader', trait='file')"

As a script it notes each seed in the file with the cases that differ, and resumes
after those that are noted.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import penstock as ps
from support import ordinary_programs
from support.ordinary_data import BOTH, ORDERLESS
from support.ordinary_programs import (
    RAISED,
    TRAINERS,
    Case,
    cases,
    draws_in,
    looped,
    muted,
    program_of,
    seen,
)
from support.samples import assert_same
from support.stuck import ended_when_stuck

OF_A_SEED = 25
"""Examples that a script runs for one seed."""
ALONE = 125
"""Further examples without workers that a test runs for one seed."""
STUCK_S = 20.0
"""The limit for an example; after it a script shows all stacks and ends."""
STUCK_TEST_S = 200.0
"""The limit for the examples of a test."""

pytestmark = [
    # The warning comes once in a process, from penstock or from torch.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    # So does this one. As an error it hangs torch's loader: the thread that sends what
    # a worker made drops what it cannot pickle, and the trainer waits for it.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    # The user's datasets leave handles open.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def check(case: Case) -> None:
    """Load with torch and with penstock; raise `AssertionError` if they differ."""
    alike = case.torchs_own or not case.draws or case.drawn_by_trainer
    expected = loop(case.reference, torchs_loader=True, mute=not alike)
    entries = loop(case)
    if case.torchs_own and case.trait in ORDERLESS:
        entries, expected = samples_of(entries), samples_of(expected)
    if not alike:
        check_draws(case, entries, expected)
        entries = muted(entries)
    if case.reference.workers:  # torch puts the worker's traceback into the text
        entries, expected = without_texts(entries), without_texts(expected)
    if case.moved_blindly:
        entries, expected = (
            without_the_trainers(entries),
            without_the_trainers(expected),
        )
    compare(entries, expected)


def check_draws(case: Case, entries: list[Any], expected: list[Any]) -> None:
    """Raise `AssertionError` unless draws are distinct, and come again."""
    draws = draws_in(entries)
    assert len(draws) == len(draws_in(expected))
    assert len(set(draws)) == len(draws), "drawn twice"
    again = repeats(case)
    if again is not None:
        compare(loop(again), entries)


def compare(entries: list[Any], expected: list[Any]) -> None:
    """Raise `AssertionError` that shows the first entry that differs."""
    for at, (one, other) in enumerate(zip_longest(entries, expected)):
        try:
            assert_same(one, other)
        except AssertionError as error:
            raise AssertionError(f"entry {at}: {one!r}, not {other!r}") from error


def repeats(case: Case) -> Case | None:
    """Return settings that draw the same as torch, if there are any.

    Workers of a pipeline take whatever is next; the loader seeds each sample.
    """
    if case.face == "pipeline":
        return case if case.workers == 1 else None
    if case.trait in BOTH or case.workers == 0:
        return case
    return replace(case, workers=1 if case.persistent else 0, said=False)


def loop(case: Case, *, torchs_loader: bool = False, mute: bool = False) -> list[Any]:
    """Run a case with files of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return looped(case, Path(folder), torchs_loader=torchs_loader, mute=mute)


def without_texts(entries: list[Any]) -> list[Any]:
    """Leave out the texts of exceptions."""
    return [entry[:2] if is_marked(entry, RAISED) else entry for entry in entries]


def without_the_trainers(entries: list[Any]) -> list[Any]:
    """Leave out what the trainer drew."""
    return [entry for entry in entries if not is_marked(entry, TRAINERS)]


def is_marked(entry: Any, mark: str) -> bool:
    return type(entry) is tuple and entry != () and entry[0] is mark


def samples_of(entries: list[Any]) -> list[Any]:
    """Return the samples of all batches, by their numbers."""
    batches = without_the_trainers(entries)
    batches = [batch for batch in batches if not isinstance(batch, str)]
    return sorted((row for batch in batches for row in batch), key=lambda row: row[0])


@pytest.mark.long
@pytest.mark.parametrize(  # parts that can run in parallel
    "seed",
    [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))],
)
def test_penstock_makes_of_ordinary_data_what_torch_makes(seed: int) -> None:
    if "CI" not in os.environ:  # new examples are sought by hand
        seed = random.SystemRandom().randrange(2**32)
    with ended_when_stuck(STUCK_TEST_S) as stacks:
        different = run_seed(seed, OF_A_SEED) + run_seed(seed, ALONE, alone=True)
        report = "\n".join(f"{case}\n{text}" for case, text in different)
        assert not different, f"seed {seed}:\n{report}\n{stacks.read_text()}"


@pytest.mark.parametrize(
    "case",
    [
        # A sample that is read again under a seed must not have changed by that.
        Case(trait="draws and counts"),
        Case(trait="counts, seldom draws", workers=1),
        # State is wherever code finds it.
        Case(trait="counts in a closure", move=1),
        Case(trait="counts in its module", move=1),
        # A knob moves no dataset that has changed since.
        Case(face="pipeline", trait="counts", workers=1, move=1, length=24, epochs=2),
        Case(face="pipeline", trait="torch's stream", workers=1, move=2, length=24),
        Case(face="pipeline", collate="counted", move=2, length=24, epochs=2),
        # Workers have copies of what a loop changes.
        Case(change=4, move=1, length=24, epochs=2),
        Case(face="pipeline", change=4, move=1, length=24, epochs=2),
        # Torch asks a dataset for whatever a sampler yields, and for whole batches.
        Case(sampler="batches", index="pair", many="dict", collate="list", workers=1),
        # What a collate_fn raises in the trainer is final.
        Case(face="pipeline", collate="failing", move=1, batch=1, length=16, epochs=1),
        # Its error may say which sample does not fit.
        Case("pipeline", collate="failing", shape="ragged", move=1, length=15, batch=6),
        # A worker of torch's rounds a batch of several types to the first one's.
        Case(
            trait="many", shape="now narrow, now wide", workers=1, length=24, epochs=2
        ),
        # Batches formed at run time are collated under a seed, too.
        Case(face="pipeline", trait="by worker", collate="drawing"),
    ],
    ids=repr,
)
def test_cases_that_once_differed_agree_now(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("face", "workers", "move", "found"),
    [
        ("loader", 0, 1, ("inline", "trainer")),  # to processes and back
        ("loader", 0, 2, ("process", "trainer")),
        ("pipeline", 0, 3, ("inline", "trainer")),  # to threads and back
        ("pipeline", 3, 1, ("process", "trainer")),
        ("pipeline", 3, 2, ("process", "process")),
    ],
)
def test_the_moves_of_a_case_take_place(
    face: str, workers: int, move: int, found: tuple[str, str], tmp_path: Path
) -> None:
    ps.set_enable_autotune(True)
    case = Case(face=face, workers=workers, move=move, length=24, batch=2)
    with program_of(case, tmp_path) as loader:
        seen(case, loader)
        reading = loader.stats()
        assert (reading.segments[0].executor, reading.host) == found


def run_seed(seed: int, count: int, *, alone: bool = False) -> list[tuple[Case, str]]:
    """Check the cases of a seed; return those that differ, and how."""
    different: list[tuple[Case, str]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        derandomize=False,  # the seed determines the cases
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases(alone=alone))
    def run(case: Case) -> None:
        if text := difference(case):
            print(case, text, sep="\n", flush=True)
            different.append((case, text))

    run()
    return different


def difference(case: Case) -> str:
    """Return how penstock differs from torch; empty: not at all."""
    try:
        check(case)
    except Exception:  # noqa: BLE001 it is noted, and others follow
        return traceback.format_exc()
    return ""


def main() -> int:
    """Check one case, or many; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="")
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--resume", type=Path, default=Path("differential.jsonl"))
    parser.add_argument("--share", default="0/1", help="seeds that are i modulo n")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable()
    if arguments.case:
        text = difference(eval(arguments.case, vars(ordinary_programs)))  # noqa: S307 our own words
        print(text or "no difference")
        return bool(text)
    share, shares = map(int, arguments.share.split("/"))
    arguments.resume.touch()
    lines = map(json.loads, arguments.resume.read_text().splitlines())
    lines_by_seed = {line["seed"]: line for line in lines}
    for seed in range(share, arguments.examples // OF_A_SEED, shares):
        if seed in lines_by_seed:
            continue
        begun_s = time.monotonic()
        faulthandler.dump_traceback_later(OF_A_SEED * STUCK_S, exit=True)
        different = [(repr(c), text) for c, text in run_seed(seed, OF_A_SEED)]
        took_s = round(time.monotonic() - begun_s, 1)
        lines_by_seed[seed] = {"seed": seed, "took_s": took_s, "different": different}
        with arguments.resume.open("a") as file:
            file.write(json.dumps(lines_by_seed[seed]) + "\n")
    different = sum(len(line["different"]) for line in lines_by_seed.values())
    print(f"{len(lines_by_seed) * OF_A_SEED} examples, {different} that differ")
    return bool(different)


if __name__ == "__main__":
    raise SystemExit(main())
