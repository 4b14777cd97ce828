"""Break the pure core on purpose, in one small place at a time: do the tests notice?

    python tests/mutations.py            # all; exit status 1 if a breakage survives
    python tests/mutations.py timeline   # those of files whose path has that in it

Each breakage is made in a copy of the tree, where the fast tests of its file are run.
A breakage whose text is no longer there exactly once is an error: mend the list.
"""

# ruff: noqa: E501 a breakage takes one line

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMIT_S = 300.0
"""For the tests of one breakage; one that hangs is noticed, too."""
TRIES = 3
"""Property tests look at other examples each time."""

CORE = "engine/core/core.py"
BUDGET = "engine/core/byte_budget.py"
ORDER = "engine/plan/order.py"
PLAN = "engine/plan/plan.py"
TIMELINE = "engine/plan/timeline.py"
TRIAL = "autotune/trial.py"
CURVE = "autotune/policies/curve.py"

TESTS = {
    CORE: ("engine/core/test_core.py", "engine/core/test_core_machine.py"),
    BUDGET: ("engine/core/test_byte_budget.py", "engine/core/test_core_machine.py"),
    ORDER: ("engine/plan/test_order.py", "engine/plan/test_permutation.py"),
    PLAN: ("engine/plan/test_plan.py", "engine/plan/test_cursor.py"),
    TIMELINE: ("engine/plan/test_timeline.py", "engine/plan/test_schedule.py"),
    TRIAL: ("autotune/test_trial.py", "autotune/test_noise.py"),
    CURVE: ("autotune/test_curve.py", "autotune/test_bottleneck_law.py"),
}
"""By file: the tests that must notice, the fastest first."""


class Mutation(NamedTuple):
    """One breakage."""

    file: str
    old: str
    new: str


MUTATIONS = [
    # What a segment may work on
    Mutation(CORE, "min(reader.head, limit + 1) + reader.span", "reader.head + reader.span"),
    Mutation(CORE, "share = self.prefetch * rows // self.workers", "share = self.prefetch * rows"),
    Mutation(CORE, "return self.prefetch + self.span(rows) - 1", "return self.prefetch"),
    Mutation(CORE, "or self.next_step == self.until", ""),
    # Each row in one place, each lease settled once
    Mutation(CORE, "        self.leases.discard(lease)\n", ""),
    Mutation(CORE, "and pieces[0][:2] == (step, stop)", "and pieces[0][0] == step"),
    Mutation(CORE, "used = lease.input_bytes * done // rows", "used = lease.input_bytes"),
    Mutation(CORE, "remaining[later] -= gone", "remaining[later] -= 0"),
    Mutation(CORE, "self.batches_in_flight.get(step) is in_flight", "True"),
    Mutation(CORE, "if whole and rows < self.batch_rows:", "if whole:"),
    # Nobody sleeps over work
    Mutation(CORE, "        if left == 0:\n            self._wake(0, 1)\n        elif", "        if"),
    Mutation(CORE, "            self._wake(at, 1)  # one was woken, perhaps for several leases", "            pass  #"),
    Mutation(CORE, "if number in (0, at - 1) or state.pieces:", "if number == at - 1:"),
    # Whole batches
    Mutation(CORE, "step == state.head or not state.in_order", "True"),
    Mutation(CORE, "self._wake(number, 1)  # if it works in order, its next may be due", "pass  #"),
    Mutation(CORE, "range(at + 1, self.placing + 1)", "range(at + 1, len(remaining))"),
    Mutation(CORE, "limit = max(limit, theirs + 1)", "pass"),
    # States
    Mutation(CORE, '(State.SOURCE_PAUSED, "restart"): State.RUNNING,', ""),
    Mutation(CORE, "if self.state.delivers and not self.state.opens:", "if self.state is State.PAUSED:"),
    Mutation(CORE, "if allowed.gives_work and due and step", "if due and step"),
    Mutation(CORE, '        self._follow("close")\n', ""),
    # Bytes
    Mutation(BUDGET, "self.held_bytes + nbytes > self.limit_bytes", "self.held_bytes + nbytes >= self.limit_bytes"),
    Mutation(BUDGET, "max(charge.high, charge.held)", "charge.held"),
    Mutation(BUDGET, "if not oldest and expected is None:", "if False:"),
    Mutation(BUDGET, "known - (known - high) // 8", "high"),
    Mutation(BUDGET, "        self.byte_budget.forget(self._notify)\n", ""),
    Mutation(BUDGET, "return self._take_refused() if self._refused else []", "return []"),
    # Which sample stands where
    Mutation(ORDER, "rows.rounds * self.times + passes", "rows.rounds + passes"),
    Mutation(ORDER, "np.minimum(mixed, other, out=near)", "np.maximum(mixed, other, out=near)"),
    Mutation(ORDER, "while outside.size:", "if outside.size:"),
    Mutation(ORDER, "(given < 0)", "(given < -1)"),
    Mutation(ORDER, "np.diff(rounds[places])) + 1", "np.diff(rounds[places]))"),
    Mutation(PLAN, "min(max(n_global - first, 0), n_rows)", "min(n_global - first, n_rows)"),
    Mutation(PLAN, "n_local * ranks / n_global", "n_local / n_global"),
    Mutation(PLAN, "rows %= span.n_true", "rows = np.minimum(rows, span.n_true - 1)"),
    Mutation(PLAN, "if cursor.batch > steps or cursor", "if cursor"),
    Mutation(PLAN, "and self.timeline.even(", "and bool("),
    # Where a batch starts
    Mutation(TIMELINE, "if step <= self.step + self.here:", "if step < self.step + self.here:"),
    Mutation(TIMELINE, "return (epoch, batch) if inside else (epoch + 1, 0)", "return epoch, batch"),
    Mutation(TIMELINE, "(epoch - self.epoch - 1) * self.per_epoch", "(epoch - self.epoch) * self.per_epoch"),
    Mutation(TIMELINE, "end = min(place.position, self.epoch_length)", "end = place.position"),
    Mutation(TIMELINE, "change.value > now,", "change.value >= now,"),
    # What is kept, and tried next
    Mutation(TRIAL, "change > max(WORSE, STANDARD_ERRORS * error)", "change > WORSE"),
    Mutation(TRIAL, "if len(self.after) < MIN_FOR_RELEASE:", "if not self.after:"),
    Mutation(TRIAL, "max(waiting, wait_share(self.after[-1]))", "waiting"),
    Mutation(TRIAL, "max(min(GAIN, GAIN_SHARE * promised), MIN_SHARE * promised)", "GAIN"),
    Mutation(TRIAL, "        self._last = None\n\n", "        pass\n\n"),
    Mutation(TRIAL, "return 1.0 / (1.0 - min(spared, ALL)) - 1.0", "return 0.0"),
    Mutation(CURVE, "best = min(count for", "best = max(count for"),
    Mutation(CURVE, "least = max(fewer)", "least = min(fewer)"),
    Mutation(CURVE, "1 / DRIFT <= rate / then <= DRIFT", "rate / then <= DRIFT"),
    Mutation(CURVE, "return found[0] if found", "return found[-1] if found"),
    Mutation(CURVE, "any(o.kept and faster(o)", "any(faster(o)"),
]  # fmt: skip

EQUIVALENT: dict[Mutation, str] = {}
"""Those that change nothing that could be seen, and why."""


def main(pattern: str) -> int:
    """Try all mutations of matching files; return the exit status."""
    survived = []
    with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as folder:
        copy = Path(folder) / "penstock"
        shutil.copytree(ROOT, copy, ignore=left_out)
        for mutation in MUTATIONS:
            if pattern in mutation.file:
                start = time.monotonic()
                noticed = is_noticed(mutation, copy)
                known = EQUIVALENT.get(mutation, "")
                word = "caught" if noticed else known or "SURVIVED"
                took_s = time.monotonic() - start
                print(f"{word:9} {took_s:5.1f} s  {mutation.file}: {mutation.new!r}")
                if not (noticed or known):
                    survived.append(mutation)
    print(f"{len(survived)} survived")
    return bool(survived)


def is_noticed(mutation: Mutation, copy: Path) -> bool:
    """Whether a test of the file fails with this breakage in the copy of the tree."""
    path = copy / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}, "
            "which must stand there once; mend the list of mutations"
        )
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        tries = (passes(copy, TESTS[mutation.file]) for _ in range(TRIES))
        return not all(tries)
    finally:
        path.write_text(text)


def passes(copy: Path, tests: tuple[str, ...]) -> bool:
    """Whether these tests pass in the copy."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
    ]
    paths = f"{copy.parent}{os.pathsep}{copy / 'tests'}"
    variables = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PENSTOCK_EXAMPLES": "150",
    }
    try:
        done = subprocess.run(
            [*command, *(str(copy / "tests" / each) for each in tests)],
            cwd=copy,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    if "Timeout (" in done.stdout + done.stderr:
        return False  # it hangs, whatever became of the dump of its threads
    if done.returncode not in (0, 1):  # neither passed nor failed
        raise SystemExit(done.stdout + done.stderr)
    return done.returncode == 0


def left_out(folder: str, names: list[str]) -> list[str]:
    """Name what is no part of the package or its tests."""
    return [
        name for name in names if name[0] == "." or name in ("__pycache__", "build")
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
