"""Break the product on purpose, in one small place at a time: do the tests notice?

    python tests/mutations.py            # a list of the pure core; exit status 1 if any survives
    python tests/mutations.py timeline   # those of files whose path has that in it
    python tests/mutations.py --random 30 --modules 10   # others each time; see --help

Each breakage is made in a copy of the tree, where tests are run. Those of the list face
the fast tests of their file; if the text of one is no longer there exactly once, that is
an error: mend the list. Those drawn at random face the tests that name their module,
then all others of `make test`. At least 28 of 30 must be caught. Look at each survivor:
it means the same as the original, or a test is missing.
"""

# ruff: noqa: E501 a breakage takes one line

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from support.mutants import Mutant, draw, near_tests

ROOT = Path(__file__).parent.parent
LIMIT_S = 300.0
"""For the tests of one breakage; one that hangs is noticed, too."""
LIMIT_OF_ALL_S = 1800.0
"""For all tests."""
MAX_BYTES = 8 << 30
"""Memory of a process of the tests: a breakage may be a loop that has no end."""
TRIES = 3
"""Property tests look at other examples each time."""
SHARE = 28 / 30
"""The share of those drawn at random that must be caught."""
EXAMPLES = 150
"""Examples of each property of the core, for the list."""
PYTEST = [
    sys.executable,
    "-P",
    "-m",
    "pytest",
    "-q",
    "--tb=no",
    "-p",
    "no:cacheprovider",
]
PASSED = (0, 5)
"""Exit statuses; the second says that all tests were slow."""
HANGS = 124
ENDS = ("a test hangs", "no test can run")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
MADE = {
    ".git",
    ".hypothesis",
    ".types",
    ".venv",
    "__pycache__",
    "build",
    "dist",
    "site",
}
"""What is no part of a copy, like the caches of the linters."""
BLIND = "tests/test_mutations.py"
"""Notices each breakage of a text that the list has, whatever it does."""

CORE = "engine/core/core.py"
BUDGET = "engine/core/in_flight.py"
ORDER = "engine/plan/order.py"
PLAN = "engine/plan/plan.py"
TRIAL = "autotune/trial.py"
CURVE = "autotune/policies/bottleneck_law.py"
POLICY = "autotune/policies/policy.py"

TESTS = {
    CORE: ("engine/core/test_core.py", "engine/core/test_core_machine.py"),
    BUDGET: ("engine/core/test_byte_budget.py", "engine/core/test_core_machine.py"),
    ORDER: ("engine/plan/test_order.py", "engine/plan/test_permutation.py"),
    PLAN: (
        "engine/plan/test_timeline.py",
        "engine/plan/test_plan.py",
        "engine/plan/test_cursor.py",
        "engine/plan/test_schedule.py",
    ),
    TRIAL: ("autotune/test_trial.py", "autotune/test_noise.py"),
    CURVE: ("autotune/test_curve.py", "autotune/test_bottleneck_law.py"),
    POLICY: ("autotune/test_bottleneck_law.py", "autotune/test_regimes.py"),
}
"""By file: the tests that must notice, the fastest first."""


class Mutation(NamedTuple):
    """One breakage of the list."""

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
    Mutation(CORE, "and ready[0][:2] == (in_flight.number, stop)", "and ready[0][0] == in_flight.number"),
    Mutation(CORE, "return lease.input_bytes - rest.input_bytes", "return lease.input_bytes"),
    Mutation(CORE, "remaining[later] -= gone", "remaining[later] -= 0"),
    Mutation(CORE, "self.batches_in_flight.get(number) is not in_flight", "False"),
    Mutation(CORE, "(plan.last and count < self.batch_rows)", "plan.last"),
    # Nobody sleeps over work
    Mutation(CORE, "        if left == 0:\n            self._wake(0, 1)\n        elif", "        if"),
    Mutation(CORE, "            self._wake(at, 1)  # one was woken, perhaps for several leases", "            pass  #"),
    Mutation(CORE, "if number in (0, at - 1) or state.ready:", "if number == at - 1:"),
    # Whole batches
    Mutation(CORE, "number == state.head or not state.in_order", "True"),
    Mutation(CORE, "self._wake(at, 1)  # if it works in order, its next may be due", "pass  #"),
    Mutation(CORE, "range(at + 1, self.placing + 1)", "range(at + 1, len(remaining))"),
    Mutation(CORE, "limit = max(limit, theirs + 1)", "pass"),
    # States
    Mutation(CORE, "            self.state = State.RUNNING\n", "            pass\n"),
    Mutation(CORE, "if self.state is State.PAUSED:  # whoever paused", "if False:  # whoever paused"),
    Mutation(CORE, "if running and due and number", "if due and number"),
    Mutation(CORE, "        self.state = State.CLOSED\n", ""),
    # Bytes
    Mutation(BUDGET, "self.held_bytes + nbytes > self.limit_bytes", "self.held_bytes + nbytes >= self.limit_bytes"),
    Mutation(BUDGET, "max(charge.high, charge.held)", "charge.held"),
    Mutation(BUDGET, "if not oldest and expected is None:", "if False:"),
    Mutation(BUDGET, "before - (before - high) // 8", "high"),
    Mutation(BUDGET, "        self.byte_budget.forget(self._notify)\n", ""),
    Mutation(BUDGET, "        return refused\n", "        return set()\n"),
    # Which sample stands where
    Mutation(ORDER, "rows.rounds * self.times + passes", "rows.rounds + passes"),
    Mutation(ORDER, "np.minimum(mixed, other, out=near)", "np.maximum(mixed, other, out=near)"),
    Mutation(ORDER, "while outside.size:", "if outside.size:"),
    Mutation(ORDER, "(given < 0)", "(given < -1)"),
    Mutation(ORDER, "np.diff(keys[places])) + 1", "np.diff(keys[places]))"),
    Mutation(PLAN, "min(max(n_global - first, 0), n_rows)", "min(n_global - first, n_rows)"),
    Mutation(PLAN, "n_local * ranks / n_global", "n_local / n_global"),
    Mutation(PLAN, "rows %= n_true", "rows = np.minimum(rows, n_true - 1)"),
    Mutation(PLAN, "if cursor.batch > steps or cursor", "if cursor"),
    Mutation(PLAN, "is timeline.run_at(epoch, stop - 1)", "is not None"),
    # Where a batch starts
    Mutation(PLAN, "self.locate(change.value - 1)", "self.locate(change.value)"),
    Mutation(PLAN, "return (epoch, batch) if inside else (epoch + 1, 0)", "return epoch, batch"),
    Mutation(PLAN, "(epoch - self.epoch - 1) * self.per_epoch", "(epoch - self.epoch) * self.per_epoch"),
    Mutation(PLAN, "position=min(place.position, self.epoch_length)", "position=place.position"),
    Mutation(PLAN, "change.value > now,", "change.value >= now,"),
    # What is kept, and tried next
    Mutation(TRIAL, "change > max(WORSE, STANDARD_ERRORS * error)", "change > WORSE"),
    Mutation(TRIAL, "if len(self.after) < MIN_FOR_RELEASE:", "if not self.after:"),
    Mutation(TRIAL, "max(waiting, wait_share(self.after[-1]))", "waiting"),
    Mutation(TRIAL, "max(min(WORTH, GAIN_SHARE * promise), MIN_SHARE * promise)", "WORTH"),
    Mutation(TRIAL, "        self._last = None\n\n", "        pass\n\n"),
    Mutation(TRIAL, "return 1.0 / (1.0 - min(spared_share, ALL)) - 1.0", "return 0.0"),
    Mutation(CURVE, "best = min(count for", "best = max(count for"),
    Mutation(CURVE, "least = max(fewer)", "least = min(fewer)"),
    Mutation(POLICY, "1 / factor <= now / then <= factor", "now / then <= factor"),
    Mutation(CURVE, "return candidates[0] if candidates", "return candidates[-1] if candidates"),
    Mutation(CURVE, "any(o.kept and faster(o)", "any(faster(o)"),
]  # fmt: skip

EQUIVALENT: dict[Mutation, str] = {}
"""Those that change nothing that could be seen, and why."""


def main(arguments: list[str]) -> int:
    """Break what the command line says; return the exit status."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the copy goes, too
    with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as folder:
        copy = Copy(Path(folder))
        copy.check()
        if options.random:
            seed = random.randrange(10**6) if options.seed is None else options.seed
            print(
                f"--random {options.random} --modules {options.modules} --seed {seed}"
            )
            mutants = draw(copy.root, options.random, options.modules, seed)
            return try_drawn(mutants, copy, options)
        return try_list(options.pattern, copy)


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description="Do the tests notice small breakages?")
    parser.add_argument(
        "pattern", nargs="?", default="", help="which files of the list"
    )
    parser.add_argument("--random", type=int, metavar="N", help="draw so many instead")
    parser.add_argument("--modules", type=int, default=10, help="from so many modules")
    parser.add_argument("--seed", type=int, help="to draw the same again")
    parser.add_argument("--beside", type=int, default=2, help="processes for all tests")
    parser.add_argument(
        "--near", action="store_true", help="only ask tests that name the module"
    )
    return parser


def try_list(pattern: str, copy: Copy) -> int:
    """Try those of the list whose file matches; return whether any survived."""
    survived = 0
    for mutation in MUTATIONS:
        if pattern in mutation.file:
            start = time.monotonic()
            noticed = is_noticed(mutation, copy)
            reason = EQUIVALENT.get(mutation, "")
            word = "caught" if noticed else reason or "SURVIVED"
            took_s = time.monotonic() - start
            print(
                f"{word:9} {took_s:5.1f} s  {mutation.file}: {mutation.new!r}",
                flush=True,
            )
            survived += not (noticed or reason)
    print(f"{survived} survived")
    return bool(survived)


def is_noticed(mutation: Mutation, copy: Copy) -> bool:
    """Whether a test of the file fails with this breakage in the copy of the tree."""
    text = (copy.root / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}, "
            "which must stand there once; mend the list of mutations"
        )
    tests = [f"tests/{name}" for name in TESTS[mutation.file]]
    with copy.changed(mutation.file, text.replace(mutation.old, mutation.new)):
        tries = (copy.failures(tests, examples=EXAMPLES) for _ in range(TRIES))
        return any(tries)


def try_drawn(mutants: list[Mutant], copy: Copy, options: argparse.Namespace) -> int:
    """Try those drawn; return whether too many survived."""
    caught = 0
    for mutant in mutants:
        start = time.monotonic()
        by = first_to_notice(mutant, copy, options)
        word = "caught" if by else "SURVIVED"
        text = (copy.root / mutant.file).read_text()
        before, after = mutant.lines(text)
        place = f"{mutant.file}:{mutant.line(text)}"
        took_s = time.monotonic() - start
        print(f"{word:9} {took_s:5.1f} s  {place}: {before} -> {after}", by, flush=True)
        caught += bool(by)
    print(f"{caught} of {len(mutants)} caught")
    return caught < SHARE * len(mutants)


def first_to_notice(mutant: Mutant, copy: Copy, options: argparse.Namespace) -> str:
    """Return which test notices it, in brackets, or nothing."""
    near = near_tests(copy.root, mutant.file)
    by = noticed_by(mutant, copy, near, [], LIMIT_S)
    if not (by or options.near):
        beside = ["-n", str(options.beside)] if options.beside else []
        far = far_tests(copy.root, near)
        by = noticed_by(mutant, copy, far, beside, LIMIT_OF_ALL_S)
    return by and f"({by})"


def noticed_by(
    mutant: Mutant, copy: Copy, tests: list[str], options: list[str], limit_s: float
) -> str:
    """Name one of the tests that fails with this breakage, and without it passes."""
    broken = mutant.applied((copy.root / mutant.file).read_text())
    while tests:
        with copy.changed(mutant.file, broken):
            failed = copy.failures(tests, *options, limit_s=limit_s)
        if not failed:
            return ""
        if by := copy.sound(failed):
            return min(by)
    return ""


def far_tests(root: Path, near: list[str]) -> list[str]:
    """Name all other test files."""
    paths = (str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py"))
    return sorted(set(paths) - {*near, BLIND})


class Copy:
    """A copy of the tree, in which tests are run while a file of it is broken."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "penstock"
        self._passes = dict.fromkeys(ENDS, True)
        """Whether tests that have failed pass in the tree as it is."""
        self._edits = 0
        shutil.copytree(ROOT, self.root, ignore=left_out)
        (folder / "tmp").mkdir()
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{self.root / 'tests'}",
            "TMPDIR": str(folder / "tmp"),
        }

    def check(self) -> None:
        """Make sure that tests run here, and are those of the copy."""
        ask = [sys.executable, "-P", "-c", "import penstock; print(penstock.__file__)"]
        path = subprocess.check_output(ask, env=self._environment, text=True)
        if Path(path).parent != self.root:
            raise SystemExit(f"the copy in {self.root} would not be tested, but {path}")
        if failed := self.failures([BLIND], "-k", "can_still_be_made"):
            raise SystemExit(f"{failed} fail without any breakage")

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Give a file another text meanwhile, and a time at which no other had it."""
        path = self.root / file
        before, then = path.read_text(), path.stat().st_mtime
        self._edits += 1
        path.write_text(text)
        os.utime(path, (self._edits, self._edits))  # bytecode is known by it
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, (then, then))

    def sound(self, failed: set[str]) -> set[str]:
        """Return those that pass in the tree as it is; leave out the others from now on."""
        if ENDS[1] in failed:
            self.check()  # or else no breakage is to blame
        if unknown := failed - set(self._passes):
            failing = self.failures(sorted(unknown), stop=False)
            self._passes |= {
                test: failing.isdisjoint({test, *ENDS}) for test in unknown
            }
        return {test for test in failed if self._passes[test]}

    def failures(
        self,
        tests: list[str],
        *options: str,
        limit_s: float = LIMIT_S,
        examples: int | None = None,
        stop: bool = True,
    ) -> set[str]:
        """Run tests; name the first that fail, or how all ended."""
        command = [*PYTEST, *options, *tests, *["-x"] * stop]
        for test, passes in self._passes.items():
            command += [] if passes else ["--deselect", test]
        environment = dict(self._environment)
        if examples is not None:
            environment["PENSTOCK_EXAMPLES"] = str(examples)
        code, output = run(command, self.root, environment, limit_s)
        if code in PASSED:
            return set()
        if "Timeout (" in output or code == HANGS:
            return {ENDS[0]}  # whatever became of the dump of its threads
        return set(FAILED.findall(output)) or {ENDS[1]}


def run(
    command: list[str], folder: Path, environment: dict[str, str], limit_s: float
) -> tuple[int, str]:
    """Run a command until it ends or hangs; return its exit status and what it said.

    What it started ends with it: broken workers may outlive it.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = HANGS
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def left_out(folder: str, names: list[str]) -> list[str]:
    """Name what is no part of the tree, but was made from it."""
    return [name for name in names if name in MADE or name.endswith("_cache")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
